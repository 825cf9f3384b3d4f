// Matrix products of tensors with any steps, in batches, with a bias and an activation.
#pragma once
#include "exp.h"
#include "gemm.h"

constexpr int64_t d_depth = 512;    // cells of a row of A that are held as tiles read them
constexpr int64_t d_columns = 256;  // columns of C that one task computes
constexpr int64_t d_packed = 1 << 19;  // elements of B that are packed at a time, where columns are many
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
    case d_gelu: return d_apply(c, n, [](float x) { return d_gelu_of(x); });
    case d_gelu_tanh:
      // (1 + tanh(u)) / 2 = 1 / (1 + exp(-2 u))
      return d_apply(c, n, [](float x) {
        return x * d_logistic(1.59576912f * (x + 0.044715f * x * x * x));
      });
    case d_silu: return d_apply(c, n, [](float x) { return x * d_logistic(x); });
    case d_tanh_: return d_apply(c, n, [](float x) { return d_tanh(x); });
    case d_sigmoid_: return d_apply(c, n, [](float x) { return d_logistic(x); });
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
  // The end of a block's sums, `depth` cells: tiles are added to what came before, which lies in
  // `before` if there was any, and go into the result with bias and activation.
  void finish(int64_t count, int64_t column, int64_t n, int64_t depth, const cell* left,
              const cell* panels, const float* before, T* out) const {
    const int64_t step = d_round_up(n, d_panel);
    for (int64_t j = 0; j < n; j += d_panel, panels += cells() * d_panel) {
      const int64_t wide = d_least(n - j, d_panel);
      d_vec add[2] = {};
      if (bias) d_copy(bias + column + j, 0, 1, 1, wide, (float*)add, 0);
      for (int64_t i = 0; i < count; i += d_rows) {
        const cell* a = left + i * d_left_step;
        const int64_t high = d_least(count - i, d_rows);
        const auto whole = [=](int r, const d_vec* sum) __attribute__((always_inline)) {
          const d_vec* more = (const d_vec*)(before + (i + r) * step + j);
          d_vec all[2] = {sum[0] + add[0], sum[1] + add[1]};
          if (before) all[0] += more[0], all[1] += more[1];
          d_keep(out + (i + r) * c_row + j, all, false);
        };
        if (activation == d_none && high == d_rows && wide == d_panel) {
          d_tile<d_left_step, 1>(depth, a, panels, d_panel, whole);
          continue;
        }
        float tile[d_rows * d_panel];
        d_tile<d_left_step, 1>(depth, a, panels, d_panel,
                               [&](int r, const d_vec* sum) __attribute__((always_inline)) {
                                 ((d_vec*)tile)[2 * r] = sum[0] + add[0];
                                 ((d_vec*)tile)[2 * r + 1] = sum[1] + add[1];
                               });
        for (int64_t r = 0; before && r < high; ++r)
          d_keep(tile + r * d_panel, (const d_vec*)(before + (i + r) * step + j), true);
        d_activate(activation, tile, high * d_panel);
        for (int64_t r = 0; r < high; ++r)
          d_keep_part(out + (i + r) * c_row + j, (const d_vec*)tile + 2 * r, wide);
      }
    }
  }
  // A block of rows from `row` on, `n` columns from `column` on.
  void block(int64_t batch, int64_t row, int64_t column, int64_t n, const cell* panels,
             float* room) const {
    const int64_t count = d_least(rows - row, d_block_rows), tiles = d_round_up(count, d_rows);
    const int64_t width = d_round_up(n, d_panel), last = (cells() - 1) / d_sweep * d_sweep;
    cell* left = (cell*)room;
    float* before = room + d_block_rows * d_left_step;
    T* out = c + batch * c_batch + row * c_row + column;
    panels += column * cells();
    for (int64_t from = 0; from < cells(); from += d_depth) {
      const int64_t first = from * d_held<cell>, part = d_least(cells() - from, d_depth);
      d_lines(a.data + batch * a.batch + row * a.row + first * a.column, a.row, a.column, count,
              d_least(depth - first, d_depth * d_held<cell>), left, d_left_step);
      d_tiles<d_left_step, 1>(tiles, width, d_least(last - from, part), left,
                              panels + from * d_panel, cells() * d_panel, d_panel, before, width,
                              from != 0);
    }
    finish(count, column, n, cells() - last, left + last % d_depth, panels + last * d_panel,
           last ? before : nullptr, out);
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
  // Each product by all threads, many columns in stripes: what is packed at a time stays small.
  void together(int64_t threads) const {
    const int64_t fitting = d_packed / (depth + !depth) / d_columns * d_columns;
    const int64_t least = d_columns * (threads > 4 ? threads : 4);
    const int64_t stripe = fitting > least ? fitting : least;
    for (int64_t first = 0; first < columns; first += stripe) {
      d_products part = *this;
      part.columns = d_least(columns - first, stripe);
      part.b.data += first * b.column;
      part.c += first;
      if (bias) part.bias += first;
      part.shared(threads);
    }
  }
  // Each product by all threads: panels are shared.
  void shared(int64_t threads) const {
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
  if (all.batches > 1 && (all.batches >= 4 * threads || all.batches % threads == 0))
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
