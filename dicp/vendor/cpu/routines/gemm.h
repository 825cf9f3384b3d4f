// Products of float matrices held in registers, a tile at a time, and the packing they read.
// Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication" (2008).
#pragma once
#include "prelude.h"

extern "C" int omp_get_max_threads(void);

// A tile of C is d_rows by two vectors: as many accumulators as the registers hold beside one row
// of B and one element of A.
#if defined(__AVX512F__)
constexpr int d_lanes = 16, d_rows = 12;
#elif defined(__AVX2__)
constexpr int d_lanes = 8, d_rows = 6;
#else
constexpr int d_lanes = 4, d_rows = 8;
#endif
constexpr int d_panel = 2 * d_lanes;
constexpr int d_block_rows = 4 * d_rows;
constexpr int64_t d_sweep = 128;
typedef float d_vec __attribute__((vector_size(4 * d_lanes), aligned(4), may_alias));

d_inline int64_t d_round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
d_inline int64_t d_least(int64_t a, int64_t b) { return a < b ? a : b; }
d_inline float* d_floats(int64_t count) { return (float*)d_alloc((uint64_t)count * sizeof(float)); }

d_inline void d_clear(float* x, int64_t from, int64_t to) {
  for (int64_t j = from; j < to; ++j) x[j] = 0;
}

// c[i][j] (+)= sum over k of a[i * AI + k * AK] * b[k * b_step + j], for a whole tile.
template <int AI, int AK>
d_inline void d_tile(int64_t depth, const float* a, const float* b, int64_t b_step, float* c,
                     int64_t c_step, bool add) {
  d_vec sum[d_rows][2];
#pragma GCC unroll 16
  for (int i = 0; i < d_rows; ++i) sum[i][0] = sum[i][1] = d_vec{};
  for (int64_t k = 0; k < depth; ++k, a += AK, b += b_step) {
    const d_vec left = ((const d_vec*)b)[0], right = ((const d_vec*)b)[1];
#pragma GCC unroll 16
    for (int i = 0; i < d_rows; ++i) {
      sum[i][0] += a[i * AI] * left;
      sum[i][1] += a[i * AI] * right;
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < d_rows; ++i) {
    d_vec* to = (d_vec*)(c + i * c_step);
    to[0] = add ? to[0] + sum[i][0] : sum[i][0];
    to[1] = add ? to[1] + sum[i][1] : sum[i][1];
  }
}

// The same over `rows` by `columns`, whole tiles of both; panels of B lie `panel_step` apart. Long
// sums are made of short ones: B's rows stay in the first cache, and rounding errors stay small.
template <int AI, int AK>
static void d_tiles(int64_t rows, int64_t columns, int64_t depth, const float* a, const float* b,
                    int64_t panel_step, int64_t b_step, float* c, int64_t c_step, bool add) {
  for (int64_t from = 0; from < depth; from += d_sweep)
    for (int64_t j = 0; j < columns; j += d_panel)
      for (int64_t i = 0; i < rows; i += d_rows)
        d_tile<AI, AK>(d_least(depth - from, d_sweep), a + i * AI + from * AK,
                       b + j / d_panel * panel_step + from * b_step, b_step, c + i * c_step + j,
                       c_step, add || from);
}

// to[c * to_step + r] = from[r * from_step + c]: a transposed copy, whole squares in registers.
static void d_transpose(const float* from, int64_t from_step, int64_t rows, int64_t columns,
                        float* to, int64_t to_step) {
  constexpr int n = d_lanes;
  const int64_t whole_rows = rows / n * n, whole_columns = columns / n * n;
  for (int64_t r = 0; r < whole_rows; r += n)
    for (int64_t c = 0; c < whole_columns; c += n)
      d_turn_square<float, n>(from + r * from_step + c, from_step, to + c * to_step + r, to_step);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = r < whole_rows ? whole_columns : 0; c < columns; ++c)
      to[c * to_step + r] = from[r * from_step + c];
}

// to[r * to_step + c] = from[r * row_step + c * column_step] * scale
static void d_copy(const float* from, int64_t row_step, int64_t column_step, int64_t rows,
                   int64_t columns, float* to, int64_t to_step, float scale = 1.0f) {
  if (row_step == 1 && column_step != 1) {
    d_transpose(from, column_step, columns, rows, to, to_step);
    if (scale == 1.0f) return;
    from = to, row_step = to_step, column_step = 1;
  }
  if (column_step == 1) {
    for (int64_t r = 0; r < rows; ++r) {
#pragma omp simd
      for (int64_t c = 0; c < columns; ++c)
        to[r * to_step + c] = from[r * row_step + c] * scale;
    }
    return;
  }
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < columns; ++c)
      to[r * to_step + c] = from[r * row_step + c * column_step] * scale;
}

// Panels of d_panel columns, each `depth` rows one after another, the last one filled with zeros.
static void d_panels(const float* from, int64_t row_step, int64_t column_step, int64_t depth,
                   int64_t columns, float* to) {
  for (int64_t j = 0; j < columns; j += d_panel, to += depth * d_panel) {
    const int64_t width = d_least(columns - j, d_panel);
    if (width < d_panel)
      for (int64_t k = 0; k < depth * d_panel; ++k) to[k] = 0;
    d_copy(from + j * column_step, row_step, column_step, depth, width, to, d_panel);
  }
}
