// Matrix products of tensors with any steps, in batches, with a bias and an activation.
#pragma once
#include "gemm.h"

constexpr int64_t d_depth = 512;    // cells of a row of A that are held as tiles read them
constexpr int64_t d_columns = 256;  // columns of C that one task computes
constexpr int64_t d_left_step = d_depth + d_lanes;

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
    case d_gelu:
      return d_apply(c, n, [](float x) { return 0.5f * x * (1.0f + d_erf(x * 0.70710678f)); });
    case d_gelu_tanh:
      return d_apply(c, n, [](float x) {
        const float inner = 0.79788456f * (x + 0.044715f * x * x * x);
        return 0.5f * x * (1.0f + d_tanh(inner));
      });
    case d_silu: return d_apply(c, n, [](float x) { return x / (1.0f + d_exp(-x)); });
    case d_tanh_: return d_apply(c, n, [](float x) { return d_tanh(x); });
    case d_sigmoid_: return d_apply(c, n, [](float x) { return 1.0f / (1.0f + d_exp(-x)); });
  }
}

template <class T> struct d_products {
  typedef d_cell<T> cell;
  int64_t batches, rows, columns, depth;
  d_matrix<T> a, b;
  const T* bias;
  T* c;
  int64_t c_batch, c_row, activation;

  int64_t cells() const { return d_cells_of<T>(depth); }
  int64_t padded() const { return d_round_up(columns, d_panel); }
  int64_t blocks() const { return (rows + d_block_rows - 1) / d_block_rows; }
  // Floats a thread needs beside the panels of B.
  int64_t room() const { return d_block_rows * (d_left_step + padded()); }
  void pack(int64_t batch, int64_t from, int64_t count, cell* panels) const {
    d_panels(b.data + batch * b.batch + from * b.column, b.row, b.column, depth, count,
             panels + from * cells());
  }
  // Where a block's sums may be written: into the result, if they fit as they are.
  float* sums(float* out, bool whole, float* room) const { return whole ? out : room; }
  float* sums(d_bf16* out, bool whole, float* room) const { return room; }
  // A block where sums are short and stay as they are: tiles go straight into the result.
  void thin(int64_t count, int64_t n, const cell* left, const cell* panels, T* out) const {
    for (int64_t j = 0; j < n; j += d_panel, panels += cells() * d_panel)
      for (int64_t i = 0; i < count; i += d_rows) {
        const int64_t high = count - i, wide = d_least(n - j, d_panel);
        T* to = out + i * c_row + j;
        const auto whole = [=](int r, const d_vec* sum) __attribute__((always_inline)) {
          d_keep(to + r * c_row, sum, false);
        };
        const auto part = [=](int r, const d_vec* sum) __attribute__((always_inline)) {
          if (r < high) d_keep_part(to + r * c_row, sum, wide);
        };
        if (high >= d_rows && wide == d_panel)
          d_tile<d_left_step, 1>(cells(), left + i * d_left_step, panels, d_panel, whole);
        else
          d_tile<d_left_step, 1>(cells(), left + i * d_left_step, panels, d_panel, part);
      }
  }
  // A block of rows from `row` on, `n` columns from `column` on.
  void block(int64_t batch, int64_t row, int64_t column, int64_t n, const cell* panels,
             float* room) const {
    const int64_t count = d_least(rows - row, d_block_rows), tiles = d_round_up(count, d_rows);
    const int64_t width = d_round_up(n, d_panel), most = d_depth * d_held<cell>;
    cell* left = (cell*)room;
    float* result = room + d_block_rows * d_left_step;
    T* out = c + batch * c_batch + row * c_row + column;
    float* to = sums(out, tiles == count && width == n, result);
    const int64_t step = to == result ? width : c_row;
    for (int64_t from = 0; from < depth; from += most) {
      const int64_t part = d_least(depth - from, most);
      d_lines(a.data + batch * a.batch + row * a.row + from * a.column, a.row, a.column, count,
              part, left, d_left_step);
      if (!bias && activation == d_none && cells() <= d_sweep)
        return thin(count, n, left, panels + column * cells(), out);
      d_tiles<d_left_step, 1>(tiles, width, d_cells_of<T>(part), left,
                              panels + column * cells() + from / d_held<cell> * d_panel,
                              cells() * d_panel, d_panel, to, step, from != 0);
    }
    for (int64_t i = 0; i < count; ++i) {
      float* line = to + i * step;
      if (!depth) d_clear(line, 0, n);
      if (bias) {
#pragma omp simd
        for (int64_t j = 0; j < n; ++j) line[j] += d_wide(bias[column + j]);
      }
      d_activate(activation, line, n);
      if (to == result) d_copy(line, n, 1, 1, n, out + i * c_row, n);
    }
  }
  // Every product by one thread: panels are packed where they are read.
  void apart() const {
#pragma omp parallel if (batches * rows * columns * depth > 50000)
    {
      float* all = d_floats(cells() * padded() + room());
      cell* panels = (cell*)all;
#pragma omp for schedule(dynamic)
      for (int64_t batch = 0; batch < batches; ++batch) {
        pack(batch, 0, columns, panels);
        for (int64_t row = 0; row < rows; row += d_block_rows)
          block(batch, row, 0, columns, panels, all + cells() * padded());
      }
      d_free(all);
    }
  }
  // Each product by all threads: panels are shared.
  void together(int64_t threads) const {
    int64_t step = d_columns;
    while (step > d_panel && blocks() * ((columns + step - 1) / step) < 4 * threads) step /= 2;
    const int64_t parts = (columns + step - 1) / step;
    cell* panels = (cell*)d_floats(cells() * padded());
#pragma omp parallel if (rows * columns * depth > 50000)
    {
      float* mine = d_floats(room());
      for (int64_t batch = 0; batch < batches; ++batch) {
#pragma omp for
        for (int64_t from = 0; from < columns; from += d_panel)
          pack(batch, from, d_least(columns - from, d_panel), panels);
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < blocks() * parts; ++task) {
          const int64_t column = task % parts * step;
          block(batch, task / parts * d_block_rows, column, d_least(columns - column, step), panels,
                mine);
        }
      }
      d_free(mine);
    }
    d_free(panels);
  }
};

// Arguments: a, b, the bias if there is one, c. Sizes: batches, rows, columns, depth, the activation,
// then the (batch, row, column) steps of a and of b, and the (batch, row) steps of c.
template <class T> static void d_product(void** args, const int64_t* sizes, bool biased) {
  const int64_t* steps = sizes + 5;
  const d_products<T> all = {
      sizes[0], sizes[1], sizes[2], sizes[3],
      {(const T*)args[0], steps[0], steps[1], steps[2]},
      {(const T*)args[1], steps[3], steps[4], steps[5]},
      biased ? (const T*)args[2] : nullptr, (T*)args[2 + biased],
      steps[6], steps[7], sizes[4]};
  const int64_t threads = omp_get_max_threads();
  if (all.batches >= 4 * threads || all.batches % threads == 0)
    all.apart();
  else
    all.together(threads);
}

// Rows of a are in groups, each with a b of its own; `ends` says where groups end.
struct d_groups {
  int64_t count, rows;
  const void* ends;
  bool wide;
  // The end of group g, never before `from` and never past the last row.
  int64_t end(int64_t g, int64_t from) const {
    const int64_t given = wide ? ((const int64_t*)ends)[g] : ((const int32_t*)ends)[g];
    return d_least(given > from ? given : from, rows);
  }
};

// Arguments: a, b, ends, c. Sizes: groups, rows, columns, depth, whether ends are 64-bit, then the (row,
// column) steps of a, the (group, row, column) steps of b, and the row step of c.
template <class T>
static void d_product_grouped(void** args, const int64_t* sizes) {
  const int64_t *steps = sizes + 5, columns = sizes[2], threads = omp_get_max_threads();
  const d_groups groups = {sizes[0], sizes[1], args[2], sizes[4] != 0};
  int64_t from = 0;
  T* c = (T*)args[3];
  for (int64_t g = 0; g < groups.count; ++g) {
    const int64_t end = groups.end(g, from);
    const d_products<T> one = {
        1, end - from, columns, sizes[3],
        {(const T*)args[0] + from * steps[0], 0, steps[0], steps[1]},
        {(const T*)args[1] + g * steps[2], 0, steps[3], steps[4]},
        nullptr, c + from * steps[5], 0, steps[5], d_none};
    if (end > from) one.together(threads);
    from = end;
  }
  for (; from < groups.rows; ++from) d_clear(c + from * steps[5], 0, columns);
}

// The gradient of b: for each group its rows of a, turned, times those of the result's gradient.
// Arguments: a, gradient, ends, c. Sizes: as above, then the (row, column) steps of a and of the
// gradient, and the (group, row) steps of c.
template <class T>
static void d_product_grouped_weights(void** args, const int64_t* sizes) {
  const int64_t *steps = sizes + 5, threads = omp_get_max_threads();
  const d_groups groups = {sizes[0], sizes[1], args[2], sizes[4] != 0};
  int64_t from = 0;
  for (int64_t g = 0; g < groups.count; ++g) {
    const int64_t end = groups.end(g, from);
    const d_products<T> one = {
        1, sizes[3], sizes[2], end - from,
        {(const T*)args[0] + from * steps[0], 0, steps[1], steps[0]},
        {(const T*)args[1] + from * steps[2], 0, steps[2], steps[3]},
        nullptr, (T*)args[3] + g * steps[4], 0, steps[5], d_none};
    one.together(threads);
    from = end;
  }
}
