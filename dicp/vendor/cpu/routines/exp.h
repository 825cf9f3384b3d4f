// Exponentials cheaper than the C library's: good for a few units in the last place of a float.
#pragma once
#include "prelude.h"

// exp(x) for x that is not above zero by more than rounding, within 2 units in the last place;
// results below the smallest normal number are zero. Coefficients: Moshier, Cephes (1992).
d_inline float d_exp_weight(float x) {
  const float shift = 12582912.0f;  // adding it rounds to an integer, left in the lowest bits
  const float moved = x * 1.44269504088896341f + shift, n = moved - shift;
  const float r = x - n * 0.693359375f + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const float scaled = d_float(d_bits(p) + (d_bits(moved) << 23));
  const float result = x < -87.0f ? 0.0f : scaled;
  return d_isnan(x) ? x : result;
}
// x times the normal distribution function, by the logarithm of erfc(t) at t = |x| / sqrt(2): a
// polynomial fitted over t < 4.5 to a relative error of 3e-7 up to 2.5, and 1e-6 beyond.
d_inline float d_gelu_of(float x) {
  const float t = d_abs(x) * 0.70710678f;
  float p = -2.61731125e-07f;
  p = p * t + 6.33571639e-06f;
  p = p * t - 6.50121301e-05f;
  p = p * t + 3.54049972e-04f;
  p = p * t - 9.17288712e-04f;
  p = p * t - 9.92771702e-04f;
  p = p * t + 2.01862211e-02f;
  p = p * t - 1.03292333e-01f;
  p = p * t - 6.36494768e-01f;
  p = p * t - 1.12838953f;
  const float tail = d_exp_weight(p * t);
  return 0.5f * x * (x > 0 ? 2.0f - tail : tail);
}
// 1 / (1 + exp(-x)); NaN stays NaN.
d_inline float d_logistic(float x) {
  const float small = d_exp_weight(-d_abs(x));
  return (x < 0 ? small : 1.0f) / (1.0f + small);
}
