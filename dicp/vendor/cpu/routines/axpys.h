// Matrix products of few rows whose right operand is row-major: sums of its rows, multiplied by numbers of
// the left operand (axpy). Each of its elements is read once, and as it lies.
#pragma once
#include "dots.h"

constexpr int64_t d_max_axpy_rows = 2;   // rows of C
constexpr int64_t d_axpy_columns = 512;  // most columns of a task: sums of all rows stay in the L1 cache
constexpr int64_t d_axpy_unroll = 8;    // rows of B that are added at a time

template <class T> struct d_axpys {
  int64_t batches, rows, columns, depth;
  d_matrix<T> a, b;
  const T* bias;
  bool by_row;  // the bias: a number for each row of C, else for each column
  T* c;
  int64_t c_batch, c_row, activation;

  // Adds `R` rows of B, each multiplied by its number of `by`, to `n` sums; prefetches the next ones.
  template <int R>
  static void add(const T* from, int64_t step, const float* by, int64_t n, float* sums) {
    int64_t j = 0;
    for (; j + d_lanes <= n; j += d_lanes) {
      d_vec sum = *(const d_vec*)(sums + j);
#pragma GCC unroll 8
      for (int i = 0; i < R; ++i) {
        __builtin_prefetch(from + (i + R) * step + j);
        sum += by[i] * d_load_floats(from + i * step + j);
      }
      *(d_vec*)(sums + j) = sum;
    }
    for (; j < n; ++j)
      for (int i = 0; i < R; ++i) sums[j] += by[i] * d_to_float(from[i * step + j]);
  }
  // The sums of `count` rows of B from `right` on; the numbers of `left` multiply them.
  void part(const T* left, const T* right, int64_t count, int64_t n, float* sums) const {
    d_clear(sums, 0, rows * d_axpy_columns);
    for (int64_t k = 0, some; k < count; k += some) {
      some = count - k < d_axpy_unroll ? 1 : d_axpy_unroll;
      for (int64_t r = 0; r < rows; ++r) {
        float by[d_axpy_unroll];
        for (int64_t i = 0; i < some; ++i) by[i] = d_to_float(left[r * a.row + (k + i) * a.column]);
        if (some == 1) add<1>(right + k * b.row, b.row, by, n, sums + r * d_axpy_columns);
        else add<d_axpy_unroll>(right + k * b.row, b.row, by, n, sums + r * d_axpy_columns);
      }
    }
  }
  // `n` columns from `column` on. Long sums are made of short ones: rounding errors stay small.
  void task(int64_t batch, int64_t column, int64_t n) const {
    alignas(64) float totals[d_max_axpy_rows * d_axpy_columns], sums[d_max_axpy_rows * d_axpy_columns];
    const T *left = a.data + batch * a.batch, *right = b.data + batch * b.batch + column;
    d_clear(totals, 0, rows * d_axpy_columns);
    for (int64_t k = 0; k < depth; k += d_depth_block) {
      part(left + k * a.column, right + k * b.row, d_min(depth - k, d_depth_block), n, sums);
      for (int64_t r = 0; r < rows; ++r)
#pragma omp simd
        for (int64_t j = 0; j < n; ++j) totals[r * d_axpy_columns + j] += sums[r * d_axpy_columns + j];
    }
    for (int64_t r = 0; r < rows; ++r) d_finish_row(*this, batch, r, column, n, totals + r * d_axpy_columns);
  }
  void run() const {
    const int64_t lines = (columns + d_lanes - 1) / d_lanes, threads = d_threads();
    int64_t strips = (columns + d_axpy_columns - 1) / d_axpy_columns;
    if (batches < threads) strips = d_min(lines, d_round_up(strips, (threads + batches - 1) / batches));
    const int64_t wide = (lines + strips - 1) / strips * d_lanes;
#pragma omp parallel for collapse(2) schedule(static) if (batches * rows * columns * depth > 50000)
    for (int64_t batch = 0; batch < batches; ++batch)
      for (int64_t strip = 0; strip < strips; ++strip)
        if (strip * wide < columns) task(batch, strip * wide, d_min(columns - strip * wide, wide));
  }
};

// Arguments and sizes: those of `d_product_args`.
template <class T> static void d_product_by_axpys(void** args, const int64_t* sizes, bool biased) {
  const d_product_args<T> p(args, sizes, biased);
  d_axpys<T>{p.batches, p.rows, p.columns, p.depth, p.a, p.b, p.bias, p.by_row,
             p.c, p.c_batch, p.c_row, p.activation}
      .run();
}
