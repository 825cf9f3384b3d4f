// The gradient of filters that see one channel each, channels last: vectors of channels, and sums
// held in registers for one row of taps at a time.
#pragma once
#include "convolution.h"

struct d_depthwise {
  int64_t images, channels;
  d_axis high, wide;
  const float *x, *grad;
  float* to;

  // Row `tap` of the filters of d_lanes channels, TAPS of its columns from `first` on. Long sums are
  // made of those of each image's rows.
  template <int TAPS> void row(int64_t channel, int64_t skip, int64_t tap, int64_t first) const {
    const int64_t apart = wide.dilation * channels;
    const int64_t from = wide.first(first), end = wide.last(first + TAPS - 1);
    d_vec total[TAPS] = {};
    for (int64_t image = 0; image < images; ++image)
      for (int64_t o = high.first(tap); o < high.last(tap); ++o) {
        const float* seen = x + (image * high.in + high.source(o, tap)) * wide.in * channels + channel;
        const float* reached = grad + (image * high.out + o) * wide.out * channels + channel;
        d_vec sum[TAPS] = {};
        for (int64_t p = from; p < end; ++p) {
          const d_vec g = *(const d_vec*)(reached + p * channels);
          const float* pixel = seen + wide.source(p, first) * channels;
#pragma GCC unroll 8
          for (int t = 0; t < TAPS; ++t) sum[t] += g * *(const d_vec*)(pixel + t * apart);
        }
        for (int t = 0; t < TAPS; ++t) {
          const int64_t last = wide.last(first + t), right = end > from ? end : from;
          sum[t] += edge(seen, reached, first + t, wide.first(first + t), d_least(from, last));
          sum[t] += edge(seen, reached, first + t, right, last);
          total[t] += sum[t];
        }
      }
    for (int64_t lane = skip; lane < d_lanes; ++lane)
      for (int t = 0; t < TAPS; ++t)
        to[((channel + lane) * high.taps + tap) * wide.taps + first + t] = total[t][lane];
  }
  // The same sum of one tap, at pixels where others read outside of the image.
  d_vec edge(const float* seen, const float* reached, int64_t tap, int64_t from, int64_t end) const {
    d_vec sum = {};
    for (int64_t p = from; p < end; ++p)
      sum += *(const d_vec*)(reached + p * channels) *
             *(const d_vec*)(seen + wide.source(p, tap) * channels);
    return sum;
  }
  void taps(int64_t block, int64_t tap) const {
    // The last block overlaps the one before: its first lanes are computed and not written.
    const int64_t channel = d_least(block * d_lanes, channels - d_lanes);
    const int64_t skip = block * d_lanes - channel;
    int64_t first = 0;
    for (; first + 7 <= wide.taps; first += 7) row<7>(channel, skip, tap, first);
    for (; first + 5 <= wide.taps; first += 5) row<5>(channel, skip, tap, first);
    for (; first + 3 <= wide.taps; first += 3) row<3>(channel, skip, tap, first);
    for (; first < wide.taps; ++first) row<1>(channel, skip, tap, first);
  }
};

// Arguments: images, the gradient of the result, the gradient of the filters. Sizes: images,
// channels, at least d_lanes of them, and both axes.
static void d_depthwise_filters(void** args, const int64_t* sizes) {
  const d_depthwise all = {
      sizes[0], sizes[1],
      {sizes[2], sizes[3], sizes[4], sizes[5], sizes[6], sizes[7]},
      {sizes[8], sizes[9], sizes[10], sizes[11], sizes[12], sizes[13]},
      (const float*)args[0], (const float*)args[1], (float*)args[2]};
  const int64_t blocks = (all.channels + d_lanes - 1) / d_lanes, rows = all.high.taps;
#pragma omp parallel for schedule(dynamic) \
    if (all.images * all.channels * all.high.out * all.wide.out * rows * all.wide.taps > 50000)
  for (int64_t task = 0; task < blocks * rows; ++task) all.taps(task / rows, task % rows);
}
