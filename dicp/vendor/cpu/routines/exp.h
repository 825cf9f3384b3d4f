// Activations of products, by the exponentials of the prelude.
#pragma once
#include "prelude.h"

// x times the normal distribution function.
d_inline float d_gelu_of(float x) { return x * d_normal_cdf(x); }
// 1 / (1 + exp(-x)); NaN stays NaN.
d_inline float d_logistic(float x) {
  const float small = d_exp_weight(-d_abs(x));
  return (x < 0 ? small : 1.0f) / (1.0f + small);
}
