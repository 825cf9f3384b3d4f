// Depthwise convolution of channels-last images, and its gradients: vectors are of channels, and the
// sums of several adjacent pixels are in registers. Numbers are float or bfloat16 in memory; filters'
// gradients and all sums are float.
#pragma once
#include "convolution.h"

constexpr int64_t d_pixels_per_sum = 128;  // pixels of a block sum of a filter's gradient

d_inline void d_store_lanes(float* to, d_vec from) { *(d_vec*)to = from; }
d_inline void d_store_lanes(d_bf16* to, d_vec from) {
#if defined(__AVX512BF16__)
  d_bf16 some __attribute__((vector_size(2 * d_lanes)));
  asm("vcvtneps2bf16 %1, %0" : "=v"(some) : "v"(from));
  __builtin_memcpy(to, &some, sizeof some);
#else
  for (int j = 0; j < d_lanes; ++j) to[j] = d_to_bf16(from[j]);
#endif
}

struct d_depthwise {
  int64_t images, channels;
  d_axis high, wide;

  explicit d_depthwise(const int64_t* sizes)
      : images(sizes[0]), channels(sizes[1]), high(d_axis_of(sizes + 2)),
        wide(d_axis_of(sizes + 8)) {}
  int64_t taps() const { return high.taps * wide.taps; }
  int64_t blocks() const { return (channels + d_lanes - 1) / d_lanes; }
  // The last block overlaps the one before.
  int64_t channel(int64_t block) const { return d_min(block * d_lanes, channels - d_lanes); }
  bool is_large() const { return images * channels * high.out * wide.out * taps() > 50000; }
};

// ---- the result, and transposed, the gradient of images -----------------------------------------
// The output at i reads pixel i - t at tap t, in units of the stride; in the transposed convolution it
// reads pixel i + t.
template <class T, int TAPS, int STEP, bool TRANSPOSED> struct d_depthwise_images {
  const d_depthwise& all;
  const T* from;
  const float *weights, *bias;
  T* to;

  static constexpr int before = TRANSPOSED ? (TAPS - 1) / STEP : 0;
  int64_t in(const d_axis& axis) const { return TRANSPOSED ? axis.out : axis.in; }
  int64_t out(const d_axis& axis) const { return TRANSPOSED ? axis.in : axis.out; }
  // The row of the image that a row of the result reads at a tap; -1 if that is padding.
  int64_t source(int64_t row, int64_t tap) const {
    const d_axis& y = all.high;
    const int64_t at = TRANSPOSED ? row + y.padding - tap * y.dilation : y.source(row, tap);
    if (at < 0 || (TRANSPOSED && at % y.stride)) return -1;
    const int64_t found = TRANSPOSED ? at / y.stride : at;
    return found < in(y) ? found : -1;
  }
  // Adds one row of taps to N adjacent outputs. The pixels read begin at `seen`; [first, last) of them
  // are inside the image.
  template <int N>
  __attribute__((always_inline)) void add(const T* seen, int64_t first, int64_t last,
                                          const float* filters, d_vec* sum) const {
    constexpr int reads = TRANSPOSED ? before + (N - 1) / STEP + 1 : (N - 1) * STEP + TAPS;
    const int64_t step = all.channels;
    d_vec weight[TAPS];
#pragma GCC unroll 8
    for (int t = 0; t < TAPS; ++t) weight[t] = ((const d_vec*)filters)[t];
#pragma GCC unroll 32
    for (int i = 0; i < reads; ++i) {
      if (i < first || i >= last) continue;
      const d_vec pixel = d_load_floats(seen + i * step);
#pragma GCC unroll 8
      for (int t = 0; t < TAPS; ++t) {
        const int at = TRANSPOSED ? (i - before) * STEP + t : i - t, x = TRANSPOSED ? at : at / STEP;
        if (at >= 0 && x < N && (TRANSPOSED || at % STEP == 0)) sum[x] += pixel * weight[t];
      }
    }
  }
  // A row of the result, N pixels at a time.
  template <int N> void row(int64_t image, int64_t row, int64_t block) const {
    const int64_t n = all.channels, channel = all.channel(block), width = out(all.wide);
    const int64_t seen = in(all.wide), padding = all.wide.padding;
    const T* pixels = from + image * in(all.high) * seen * n + channel;
    T* line = to + (image * out(all.high) + row) * width * n + channel;
    for (int64_t x = TRANSPOSED ? -(padding % STEP) : 0; x < width; x += N) {
      const int64_t first = TRANSPOSED ? (x + padding) / STEP - before : x * STEP - padding;
      d_vec sum[N];
#pragma GCC unroll 8
      for (int k = 0; k < N; ++k) sum[k] = bias ? ((const d_vec*)bias)[block] : d_vec{};
      for (int64_t tap = 0; tap < all.high.taps; ++tap) {
        const int64_t at = source(row, tap);
        if (at >= 0)
          add<N>(pixels + (at * seen + first) * n, -first, seen - first,
                 weights + (block * all.high.taps + tap) * TAPS * d_lanes, sum);
      }
#pragma GCC unroll 8
      for (int k = 0; k < N; ++k)
        if (x + k >= 0 && x + k < width) d_store_lanes(line + (x + k) * n, sum[k]);
    }
  }
  void run() const {
    const int64_t rows = all.images * out(all.high);
#pragma omp for schedule(static)
    for (int64_t task = 0; task < rows; ++task)
      for (int64_t block = 0; block < all.blocks(); ++block)
        if (out(all.wide) > 4)
          row<8>(task / out(all.high), task % out(all.high), block);
        else
          row<4>(task / out(all.high), task % out(all.high), block);
  }
};

template <class T, int TAPS, int STEP, bool TRANSPOSED>
static void d_depthwise_run(const d_depthwise& all, const T* from, const T* weights, const T* bias,
                             T* to) {
  const int64_t taps = all.taps(), vectors = all.blocks() * d_lanes;
  const d_workspaces workspace((taps + 1) * vectors, 1);  // every tap of a block a vector
  if (!workspace.data) return;
  float* copies = workspace.data;
  float* biases = copies + taps * vectors;
  const d_depthwise_images<T, TAPS, STEP, TRANSPOSED> convolution = {
      all, from, copies, bias ? biases : nullptr, to};
#pragma omp parallel if (all.is_large())
  {
#pragma omp for schedule(static)
    for (int64_t block = 0; block < all.blocks(); ++block) {
      const int64_t channel = all.channel(block);
      float* copy = copies + block * taps * d_lanes;
      if constexpr (sizeof(T) == sizeof(float))
        d_transpose(weights + channel * taps, taps, d_lanes, taps, copy, d_lanes);
      else
        d_copy(weights + channel * taps, 1, taps, taps, d_lanes, copy, d_lanes);
      if (bias) d_copy(bias + channel, 0, 1, 1, d_lanes, biases + block * d_lanes, 0);
    }
    convolution.run();
  }
}
template <class T, int TAPS, bool TRANSPOSED>
static void d_depthwise_any_stride(const int64_t* sizes, const void* from, const void* weights,
                                const void* bias, void* to) {
  const d_depthwise all(sizes);
  const auto run = all.wide.stride == 1 ? d_depthwise_run<T, TAPS, 1, TRANSPOSED>
                                        : d_depthwise_run<T, TAPS, 2, TRANSPOSED>;
  run(all, (const T*)from, (const T*)weights, (const T*)bias, (T*)to);
}

// Arguments: images, filters of TAPS columns, the bias if there is one, the result. Sizes: images,
// channels, at least d_lanes of them, and both axes; the second has no dilation and a stride of 1
// or 2.
template <class T, int TAPS>
static void d_depthwise_forward(void** args, const int64_t* sizes, bool biased) {
  d_depthwise_any_stride<T, TAPS, false>(sizes, args[0], args[1], biased ? args[2] : nullptr,
                                      args[2 + biased]);
}
// Arguments: the gradient of the result, filters, the gradient of the images. Sizes as above.
template <class T, int TAPS> static void d_depthwise_backward(void** args, const int64_t* sizes) {
  d_depthwise_any_stride<T, TAPS, true>(sizes, args[0], args[1], nullptr, args[2]);
}

// ---- the gradient of filters ----------------------------------------------------------------
// Each thread sums over some rows of the result. A stride of 0 stands for any: one tap at a time.
template <class T, int TAPS, int STEP> struct d_depthwise_filters {
  const d_depthwise& all;
  const T *from, *grad_output;

  // What N pixels of the result, from `grad_row` on, add at a row of taps.
  template <int N>
  __attribute__((always_inline)) void add(const T* seen, const T* grad_row, int64_t first,
                                          int64_t last, float* sums) const {
    const int64_t step = all.channels;
    d_vec sum[TAPS], grad[N];
#pragma GCC unroll 8
    for (int t = 0; t < TAPS; ++t) sum[t] = ((const d_vec*)sums)[t];
#pragma GCC unroll 8
    for (int x = 0; x < N; ++x) grad[x] = d_load_floats(grad_row + x * step);
#pragma GCC unroll 32
    for (int i = 0; i < (N - 1) * STEP + TAPS; ++i) {
      if (i < first || i >= last) continue;
      const d_vec pixel = d_load_floats(seen + i * step);
#pragma GCC unroll 8
      for (int t = 0; t < TAPS; ++t)
        if (i >= t && (i - t) % STEP == 0 && (i - t) / STEP < N)
          sum[t] += pixel * grad[(i - t) / STEP];
    }
#pragma GCC unroll 8
    for (int t = 0; t < TAPS; ++t) ((d_vec*)sums)[t] = sum[t];
  }
  // The pixels of a row from `x` on, N at a time.
  template <int N>
  int64_t strips(const T* image, const T* grad_row, int64_t row, int64_t x, float* sums) const {
    const d_axis &high = all.high, &wide = all.wide;
    for (; x + N <= wide.out; x += N)
      for (int64_t tap = 0; tap < high.taps; ++tap) {
        if (!high.inside(row, tap)) continue;
        const int64_t first = wide.source(x, 0);
        add<N>(image + (high.source(row, tap) * wide.in + first) * all.channels,
               grad_row + x * all.channels, -first, wide.in - first, sums + tap * TAPS * d_lanes);
      }
    return x;
  }
  void each_tap(const T* image, const T* grad_row, int64_t row, float* sums) const {
    const d_axis &high = all.high, &wide = all.wide;
    for (int64_t tap = 0; tap < all.taps(); ++tap) {
      const int64_t y = tap / wide.taps, x = tap % wide.taps;
      const T* seen = image + high.source(row, y) * wide.in * all.channels;
      d_vec sum = {};
      for (int64_t p = wide.first(x); high.inside(row, y) && p < wide.last(x); ++p)
        sum += d_load_floats(grad_row + p * all.channels) *
               d_load_floats(seen + wide.source(p, x) * all.channels);
      ((d_vec*)sums)[tap] += sum;
    }
  }
  // Rows [begin, end) of all images. A long sum is computed in blocks.
  void rows(int64_t begin, int64_t end, float* total, float* sums) const {
    const int64_t high = all.high.out, wide = all.wide.out, n = all.channels;
    const int64_t most = d_pixels_per_sum / wide > 1 ? d_pixels_per_sum / wide : 1;
    for (int64_t next; begin < end; begin = next) {
      const int64_t image = begin / high;
      next = d_min(d_min(begin + most, end), (image + 1) * high);
      for (int64_t block = 0; block < all.blocks(); ++block) {
        const T* seen = from + image * all.high.in * all.wide.in * n + all.channel(block);
        d_clear(sums, 0, all.taps() * d_lanes);
        for (int64_t row = begin; row < next; ++row) {
          const T* grad_row = grad_output + row * wide * n + all.channel(block);
          if constexpr (STEP == 0) {
            each_tap(seen, grad_row, row % high, sums);
          } else {
            int64_t x = strips<8>(seen, grad_row, row % high, 0, sums);
            x = strips<4>(seen, grad_row, row % high, x, sums);
            strips<1>(seen, grad_row, row % high, x, sums);
          }
        }
        for (int64_t tap = 0; tap < all.taps(); ++tap)
          ((d_vec*)total)[block * all.taps() + tap] += ((const d_vec*)sums)[tap];
      }
    }
  }
  void run(float* to) const {
    const int64_t taps = all.taps(), every = all.blocks() * taps, size = (every + taps) * d_lanes;
    const int64_t threads = d_threads(), rows = all.images * all.high.out;
    const d_workspaces sums(threads * size, 1);
    if (!sums.data) return;
    float* totals = sums.data;
#pragma omp parallel if (all.is_large())
    {
#pragma omp for schedule(static)
      for (int64_t k = 0; k < threads; ++k) {
        float* partial = totals + k * size;
        d_clear(partial, 0, every * d_lanes);
        this->rows(rows * k / threads, rows * (k + 1) / threads, partial, partial + every * d_lanes);
      }
#pragma omp for schedule(static)
      for (int64_t block = 0; block < all.blocks(); ++block) {
        float* sums = totals + block * taps * d_lanes;
        for (int64_t k = 1; k < threads; ++k)
          for (int64_t tap = 0; tap < taps; ++tap)
            ((d_vec*)sums)[tap] += ((const d_vec*)(sums + k * size))[tap];
        const int64_t channel = all.channel(block), skip = block * d_lanes - channel;
        d_transpose(sums + skip, d_lanes, taps, d_lanes - skip, to + (channel + skip) * taps, taps);
      }
    }
  }
};

// Arguments: images, the gradient of the result, that of filters of TAPS columns, or of any number.
// Sizes as above; for any number the second axis may be any.
template <class T, int TAPS> static void d_depthwise_filters_of(void** args, const int64_t* sizes) {
  const d_depthwise all(sizes);
  const T *from = (const T*)args[0], *grad_output = (const T*)args[1];
  float* to = (float*)args[2];
  if constexpr (TAPS == 0)
    d_depthwise_filters<T, 1, 0>{all, from, grad_output}.run(to);
  else if (all.wide.stride == 1)
    d_depthwise_filters<T, TAPS, 1>{all, from, grad_output}.run(to);
  else
    d_depthwise_filters<T, TAPS, 2>{all, from, grad_output}.run(to);
}
