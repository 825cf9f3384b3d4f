// Matrix products of few rows: dot products, for which the right operand, weights as a rule, is read once
// and as it lies.
#pragma once
#include "exp.h"
#include "gemm.h"

// Rows of C up to which its numbers are dot products, and those up to which a product with bytes is.
constexpr int64_t d_max_dot_rows = d_lanes == 16 ? 8 : 4, d_max_dot_rows_of_bytes = 12;
constexpr int64_t d_dot_columns = 64;      // columns of a task

template <class T> struct d_matrix {
  const T* data;
  int64_t batch, row, column;
};

enum d_activation { d_none, d_relu, d_gelu, d_gelu_tanh, d_silu, d_tanh_, d_sigmoid_ };

template <class F> d_inline void d_apply(float* c, int64_t n, F f) {
#pragma omp simd
  for (int64_t j = 0; j < n; ++j) c[j] = f(c[j]);
}
static void d_activate(int64_t kind, float* c, int64_t n) {
  switch (kind) {
    case d_relu: return d_apply(c, n, [](float x) { return x > 0 || d_isnan(x) ? x : 0.0f; });
    case d_gelu: return d_apply(c, n, [](float x) { return d_gelu_of(x); });
    case d_gelu_tanh: return d_apply(c, n, [](float x) { return x * d_normal_cdf_tanh(x); });
    case d_silu: return d_apply(c, n, [](float x) { return x * d_logistic(x); });
    case d_tanh_: return d_apply(c, n, [](float x) { return d_tanh(x); });
    case d_sigmoid_: return d_apply(c, n, [](float x) { return d_logistic(x); });
  }
}

// totals[i] = the sum of the lanes of sums[i], for whole squares of vectors. Compiled once.
__attribute__((noinline)) static void d_sum_lanes(const d_vec* sums, int count, float* totals) {
  for (int i = 0; i < count; i += d_lanes) {
    d_words square[d_lanes];
    __builtin_memcpy(square, sums + i, sizeof square);
    d_transpose_words(square);
    d_vec total = (d_vec)square[0];
#pragma GCC unroll 16
    for (int j = 1; j < d_lanes; ++j) total += (d_vec)square[j];
    __builtin_memcpy(totals + i, &total, sizeof total);
  }
}
// sums[w * R + r] = the dot product of row w of `left` and row r of `right`, both of `depth` numbers.
// `right` holds packed elements of T and ends in zeros up to a whole vector.
template <int W, int R, class T, class L>
d_inline void d_dot_products(int64_t depth, const L* left, int64_t left_row, const d_packed<T>* right,
                             int64_t right_row, float* sums) {
  constexpr int64_t pack_factor = d_pack_factor<d_packed<T>>, n = d_lanes * pack_factor;  // numbers of a vector
  constexpr int count = W * R, whole = (count + d_lanes - 1) / d_lanes * d_lanes;
  d_vec sum[count], all[whole];  // in registers until the loop has ended
#pragma GCC unroll 16
  for (int i = 0; i < count; ++i) sum[i] = d_vec{};
  L some[W * n];
  // Rows side by side are too short for the hardware prefetcher: the next ones are prefetched, but for
  // eight of float32, which it loads faster.
  constexpr bool prefetched = W < 8 || sizeof(L) < sizeof(float);
  // The last numbers are padded in `some` and multiplied by the same loop, so that it is compiled once.
  for (int64_t left_over = depth, length = depth / n * n;; length = n) {
    for (int64_t k = 0; k < length; k += n, right += d_lanes) {
      d_vec b[R];
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) b[r] = *(const d_vec*)(right + r * right_row);
#pragma GCC unroll 8
      for (int w = 0; w < W; ++w) {
        if (prefetched) __builtin_prefetch(left + (W + w) * left_row + k, 0, 2);
        const d_vec a = d_load_packed<T>(left + w * left_row + k);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) d_multiply_add_lanes(sum[w * R + r], a, b[r], right);
      }
    }
    left_over -= length;
    if (left_over <= 0) break;
    d_clear(some, 0, W * n);
    for (int w = 0; w < W; ++w)
      __builtin_memcpy(some + w * n, left + w * left_row + length, left_over * sizeof(L));
    left = some, left_row = n;
  }
#pragma GCC unroll 16
  for (int i = 0; i < whole; ++i) all[i] = i < count ? sum[i] : d_vec{};
  d_sum_lanes(all, whole, sums);
}

// The epilogue of `n` sums of a row of C from `column` on: bias, activation and store.
template <class P>
d_inline void d_finish_row(const P& p, int64_t batch, int64_t r, int64_t column, int64_t n, float* row) {
  if (p.bias)
    for (int64_t j = 0; j < n; ++j) row[j] += d_to_float(p.bias[p.by_row ? r : column + j]);
  d_activate(p.activation, row, n);
  d_copy(row, 0, 1, 1, n, p.c + batch * p.c_batch + r * p.c_row + column, 0);
}

// The numbers of a column of B, of type W, are adjacent. C holds numbers of type T, and products are of type P.
template <class T, class W, class P = T> struct d_dots {
  typedef d_packed<P> packed;
  int64_t batches, rows, columns, depth;
  d_matrix<T> a;
  d_matrix<W> b;
  const T* bias;
  bool by_row;  // the bias: a number for each row of C, else for each column
  T* c;
  int64_t c_batch, c_row, activation;

  // The first `some` of N columns, `next` apart, of R rows, for all rows; `copy` holds A.
  template <int N, int R>
  void dots(const packed* copy, int64_t step, const W* line, int64_t next, float* to, int some) const {
    float sums[(N * R + d_lanes - 1) / d_lanes * d_lanes];
    for (int64_t r = 0; r < rows; r += R) {
      d_dot_products<N, R, P>(depth, line, next, copy + r * step, step, sums);
      for (int64_t i = 0; i < d_min(rows - r, R); ++i)
        for (int w = 0; w < some; ++w) to[(r + i) * d_dot_columns + w] = sums[w * R + i];
    }
  }
  // A row of A as packed elements; not `d_pack_rows`, whose transposes take long to compile.
  void copy_row(const T* from, packed* to) const {
    constexpr int64_t pack_factor = d_pack_factor<packed>;
    if (a.column == 1 && sizeof(T) * pack_factor == sizeof(packed)) {
      __builtin_memcpy(to, from, depth * sizeof(T));
      return;
    }
    for (int64_t k = 0; k < depth; k += pack_factor)
      d_pack_element(to + k / pack_factor, from + k * a.column, a.column, depth - k);
  }
  void strip_of_dots(int64_t batch, int64_t column, int64_t n, const packed* copy, int64_t step) const {
    float tile[d_max_dot_rows_of_bytes * d_dot_columns];
    const W* lines = b.data + batch * b.batch + column * b.column;
    const auto line = [&](int64_t j) { return lines + j * b.column; };
    int64_t j = 0;
    if (rows == 1)
      for (; j + 8 <= n; j += 8) dots<8, 1>(copy, step, line(j), b.column, tile + j, 8);
    // The last columns are fewer than a step: they are multiplied as often as a step has columns.
    for (int64_t left; j < n; j += left) {
      left = n - j < 4 ? 1 : 4;
      const int64_t next = left == 4 ? b.column : 0;
      if (rows % 4 == 1 || rows % 4 == 2)
        dots<4, 3>(copy, step, line(j), next, tile + j, left);
      else
        dots<4, 4>(copy, step, line(j), next, tile + j, left);
    }
    for (int64_t r = 0; r < rows; ++r) d_finish_row(*this, batch, r, column, n, tile + r * d_dot_columns);
  }
  __attribute__((noinline)) void run() const {
    const int64_t step = d_round_up(d_packed_depth<P>(depth), d_lanes) + d_lanes, size = (rows + 3) * step;
    const int64_t strips = (columns + d_dot_columns - 1) / d_dot_columns;
    const d_workspaces workspace(batches * size, 1);
    if (!workspace.data) return;
    packed* copies = (packed*)workspace.data;
    d_clear(copies, 0, batches * size);
    for (int64_t k = 0; k < batches; ++k)
      for (int64_t r = 0; r < rows; ++r)
        copy_row(a.data + k * a.batch + r * a.row, copies + k * size + r * step);
#pragma omp parallel for schedule(static) if (batches * rows * columns * depth > 50000)
    for (int64_t task = 0; task < batches * strips; ++task) {
      const int64_t batch = task / strips, column = task % strips * d_dot_columns;
      strip_of_dots(batch, column, d_min(columns - column, d_dot_columns), copies + batch * size, step);
    }
  }
};

// Arguments: a, b, the bias if there is one, c. Sizes: batches, rows, columns, depth, the activation,
// then the (batch, row, column) steps of a and of b, the (batch, row) steps of c, and whether the bias
// holds a number for each row.
template <class T> struct d_product_args {
  int64_t batches, rows, columns, depth, activation;
  d_matrix<T> a, b;
  const T* bias;
  bool by_row;
  T* c;
  int64_t c_batch, c_row;
  d_product_args(void** args, const int64_t* sizes, bool biased)
      : batches(sizes[0]), rows(sizes[1]), columns(sizes[2]), depth(sizes[3]), activation(sizes[4]),
        a{(const T*)args[0], sizes[5], sizes[6], sizes[7]},
        b{(const T*)args[1], sizes[8], sizes[9], sizes[10]},
        bias(biased ? (const T*)args[2] : nullptr), by_row(biased && sizes[13]),
        c((T*)args[2 + biased]), c_batch(sizes[11]), c_row(sizes[12]) {}
};
template <class T> static void d_product_by_dots(void** args, const int64_t* sizes, bool biased) {
  const d_product_args<T> p(args, sizes, biased);
  d_dots<T, T>{p.batches, p.rows, p.columns, p.depth, p.a, p.b, p.bias, p.by_row,
               p.c, p.c_batch, p.c_row, p.activation}
      .run();
}

// Arguments: a, b, c. Sizes: rows, columns, depth, the (row, column) steps of a, the column step of b, the
// row step of c. A column of b holds adjacent bytes.
template <class T> struct d_bytes_product_args {
  int64_t rows, columns, depth;
  d_matrix<T> a;
  d_matrix<int8_t> b;
  T* c;
  int64_t c_row;
  d_bytes_product_args(void** args, const int64_t* sizes)
      : rows(sizes[0]), columns(sizes[1]), depth(sizes[2]), a{(const T*)args[0], 0, sizes[3], sizes[4]},
        b{(const int8_t*)args[1], 0, 1, sizes[5]}, c((T*)args[2]), c_row(sizes[6]) {}
};
template <class T> static void d_product_of_bytes_by_dots(void** args, const int64_t* sizes) {
#if defined(D_TILES)
  typedef float product;  // converting bytes to pairs of bfloat16 takes longer for the few rows
#else
  typedef T product;
#endif
  const d_bytes_product_args<T> p(args, sizes);
  d_dots<T, int8_t, product>{1, p.rows, p.columns, p.depth, p.a, p.b, nullptr, false, p.c, 0, p.c_row, d_none}
      .run();
}
