// Products of float32 matrices on tile registers. A number is the sum of three bfloat16 numbers, exactly,
// and the six largest of the nine products of two numbers' parts are added. Those left out are below
// 2^-25 of the product, and the sums round less often than those of a loop over the depth.
// Henry, Tang and Heinecke, "Leveraging the bfloat16 Artificial Intelligence Datatype For
// Higher-Precision Computations" (2019).
#pragma once
#include "product.h"

#if defined(D_TILES)
constexpr int64_t d_split_block = 32;   // rows or columns of a block, and the depth of a step
constexpr int64_t d_split_part = 512;   // words of one part of a block's step: two tiles
constexpr int64_t d_split_step = 3 * d_split_part;
constexpr int64_t d_split_depth = 512, d_split_rows = 512;  // the most that one packed copy of A holds
// Magnitudes as bits: from 2^63 on, a sum of parts may be no number where the product is infinite. Parts of
// numbers below 2^-100 may be too small for bfloat16: a block of such numbers is not split. Beside larger ones
// they lose what is below 2^-126, as the tile registers take such numbers for 0.
constexpr uint32_t d_split_largest = 0x5f000000, d_split_smallest = 0x0d800000;

// The lines of a square of floats, `step` apart; missing ones are 0.
d_inline void d_load_lines(const float* from, int64_t step, int64_t lines, int64_t length, d_vec* to) {
  if (lines >= d_lanes && length >= d_lanes) {
#pragma GCC unroll 16
    for (int i = 0; i < d_lanes; ++i) to[i] = *(const d_vec*)(from + i * step);
    return;
  }
  for (int64_t i = 0; i < d_lanes; ++i) {
    float line[d_lanes] = {};
    for (int64_t j = 0; i < lines && j < d_min(length, d_lanes); ++j) line[j] = from[i * step + j];
    to[i] = *(const d_vec*)line;
  }
}
// A square of the matrix at `from`, which has `rows` and `columns` from there on.
d_inline void d_load_square(const float* from, int64_t row, int64_t column, int64_t rows, int64_t columns,
                            d_vec* square) {
  if (column == 1) return d_load_lines(from, row, rows, columns, square);
  if (row == 1) {
    d_load_lines(from, column, columns, rows, square);
    return d_transpose_floats(square);
  }
  for (int64_t i = 0; i < d_lanes; ++i)
    for (int64_t j = 0; j < d_lanes; ++j)
      square[i][j] = i < rows && j < columns ? from[i * row + j * column] : 0.0f;
}
// The parts of two vectors, from which words of tiles are made: each the nearest bfloat16 to what the
// ones before it leave. The last one is exact, unless it is denormal.
d_inline void d_split_pair(d_vec first, d_vec second, uint32_t* to, d_words& largest) {
  const d_words one = (d_words)first & 0x7fffffff, other = (d_words)second & 0x7fffffff;
  largest = one > largest ? one : largest;
  largest = other > largest ? other : largest;
  d_words low, high;
#pragma GCC unroll 2
  for (int part = 0; part < 2; ++part, to += d_split_part) {
    low = ((d_words)first + 0x8000) & 0xffff0000, high = ((d_words)second + 0x8000) & 0xffff0000;
    *(d_words*)to = low >> 16 | high;
    first -= (d_vec)low, second -= (d_vec)high;
  }
  *(d_words*)to = (d_words)first >> 16 | ((d_words)second & 0xffff0000);  // bits below are those of denormals
}
// Packs up to 32 rows of A or columns of B, which lie `across` apart, and `depth` numbers of each, `along`
// apart. A pair holds numbers whose depths differ by 16. Returns the largest magnitude, as bits.
template <bool left>
__attribute__((noinline)) static uint32_t d_split_panel(const float* from, int64_t across, int64_t along,
                                                        int64_t width, int64_t depth, uint32_t* to) {
  const int64_t row = left ? across : along, column = left ? along : across;
  d_words largest = {};
  for (int64_t k = 0; k < depth; k += d_split_block, to += d_split_step)
    for (int64_t h = 0; h < width; h += d_lanes) {
      d_vec squares[2][d_lanes];
      for (int64_t i = 0; i < 2; ++i) {
        const int64_t k0 = k + i * d_lanes, deep = depth - k0, wide = width - h;
        d_load_square(from + h * across + k0 * along, row, column, left ? wide : deep, left ? deep : wide,
                      squares[i]);
      }
      for (int64_t i = 0; i < d_lanes; ++i)
        d_split_pair(squares[0][i], squares[1][i], to + (h + i) * d_lanes, largest);
    }
  uint32_t most = 0;
  for (int i = 0; i < d_lanes; ++i) most = largest[i] > most ? largest[i] : most;
  return most;
}
d_inline bool d_is_splittable(uint32_t largest) {
  return largest < d_split_largest && (!largest || largest >= d_split_smallest);
}

// R tiles of rows, which are loaded, by V tiles of columns in registers. Operands whose last product this is
// are cleared: `d_tile_step`.
template <int R, int V, bool last_of_rows, bool last_of_columns>
d_inline void d_multiply_split_rows(const uint32_t* part) {
  d_tile_load<4>(part, 64);
  d_tile_multiply_add<0, 4, 6>();
  if constexpr (V == 2) d_tile_multiply_add<1, 4, 7>();
  if constexpr (last_of_rows) d_tile_zero<4>();
  if constexpr (R == 2) {
    d_tile_load<5>(part + d_split_part / 2, 64);
    d_tile_multiply_add<2, 5, 6>();
  }
  if constexpr (last_of_columns) d_tile_zero<6>();
  if constexpr (R == 2 && V == 2) d_tile_multiply_add<3, 5, 7>();
  if constexpr (last_of_columns) d_tile_zero<7>();
  if constexpr (last_of_rows) d_tile_zero<5>();
}
// V tiles of columns, which are loaded, by R tiles of rows in registers, whose last product this is.
template <int R, int V> d_inline void d_multiply_split_columns(const uint32_t* part) {
  d_tile_load<6>(part, 64);
  d_tile_multiply_add<0, 4, 6>();
  if constexpr (R == 2) d_tile_multiply_add<2, 5, 6>();
  if constexpr (V == 2) {
    d_tile_load<7>(part + d_split_part / 2, 64);
    d_tile_multiply_add<1, 4, 7>();
  }
  d_tile_zero<4>();
  if constexpr (R == 2 && V == 2) d_tile_multiply_add<3, 5, 7>();
  d_tile_zero<5>();
}
// Adds the products of R tiles of rows and V tiles of columns. Each part is loaded once for its products,
// and the first part of A again.
template <int R, int V>
__attribute__((noinline)) static void d_multiply_split_block(int64_t steps, const uint32_t* a,
                                                             const uint32_t* b) {
  for (; steps; --steps, a += d_split_step, b += d_split_step) {
    d_tile_load<6>(b + 2 * d_split_part, 64);
    if constexpr (V == 2) d_tile_load<7>(b + 5 * d_split_part / 2, 64);
    d_multiply_split_rows<R, V, false, true>(a);
    d_multiply_split_columns<R, V>(b + d_split_part);
    d_multiply_split_rows<R, V, false, true>(a + d_split_part);
    d_multiply_split_columns<R, V>(b);
    d_multiply_split_rows<R, V, true, false>(a + 2 * d_split_part);
    d_multiply_split_rows<R, V, true, true>(a);
  }
}

struct d_split_gemm {
  int64_t batches, rows, columns, depth;
  d_matrix<float> a, b;
  const float* bias;  // a number for each column of C
  float* c;
  int64_t c_batch, c_row, activation;

  int64_t depth_blocks() const { return (depth + d_split_depth - 1) / d_split_depth; }
  int64_t block_depth() const {
    return d_round_up((depth + depth_blocks() - 1) / depth_blocks(), d_split_block);
  }
  int64_t panel_size() const { return block_depth() / d_split_block * d_split_step; }
  int64_t panels_of_rows(int64_t height) const {
    return d_round_up(d_min(height, d_split_rows), d_split_block) / d_split_block;
  }
  // A task needs copies of A and B, a block of sums and its bias.
  int64_t workspace_size(int64_t height) const {
    return (panels_of_rows(height) + 1) * panel_size() + (d_split_block + 1) * d_split_block;
  }
  // Up to 32 rows and columns of C: the sums of `steps` steps and the bias, or what is there. Each depth block
  // is summed by itself: with 8192 numbers the error would be 4 to 6 times that of BLAS.
  void block(int64_t height, int64_t wide, int64_t steps, const uint32_t* left, const uint32_t* right,
             const float* add, float* tile, bool first, bool last, float* out) const {
    constexpr int64_t n = d_split_block;
    const bool whole = height == n && wide == n, active = last && activation != d_none;
    if (first) d_load_sums(add, 0);
    else d_clear_sums();
    if (height > d_lanes && wide > d_lanes) d_multiply_split_block<2, 2>(steps, left, right);
    else if (height > d_lanes) d_multiply_split_block<2, 1>(steps, left, right);
    else if (wide > d_lanes) d_multiply_split_block<1, 2>(steps, left, right);
    else d_multiply_split_block<1, 1>(steps, left, right);
    if (first && whole && !active) return d_store_sums(out, c_row * sizeof(float));
    d_store_sums(tile, n * sizeof(float));
    for (int64_t r = 0; !first && r < height; ++r) {
#pragma omp simd
      for (int64_t j = 0; j < wide; ++j) tile[r * n + j] += out[r * c_row + j];
    }
    if (active) d_activate(activation, tile, height * n);
    for (int64_t r = 0; r < height; ++r)
      d_store_partial_row(out + r * c_row, (const d_vec*)(tile + r * n), wide);
  }
  // `count` rows from `row` on and `n` columns from `column` on, of one batch; false if numbers are too
  // large or too small.
  bool task(int64_t batch, int64_t row, int64_t count, int64_t column, int64_t n, float* workspace) const {
    const float *from_a = a.data + batch * a.batch, *from_b = b.data + batch * b.batch;
    const int64_t panel = panel_size(), part = block_depth();
    uint32_t *left = (uint32_t*)workspace, *right = left + panels_of_rows(count) * panel;
    float *tile = (float*)right + panel, *add = tile + d_split_block * d_split_block;
    d_clear(add, 0, d_split_block);
    for (int64_t k = 0; k < depth; k += part)
      for (int64_t i = 0; i < count; i += d_split_rows) {
        const int64_t deep = d_min(depth - k, part), steps = (deep + d_split_block - 1) / d_split_block;
        const int64_t high = d_min(count - i, d_split_rows);
        uint32_t largest = 0;
        for (int64_t r = 0; r < high; r += d_split_block) {
          const float* line = from_a + (row + i + r) * a.row + k * a.column;
          const int64_t height = d_min(high - r, d_split_block);
          const uint32_t most =
              d_split_panel<true>(line, a.row, a.column, height, deep, left + r / d_split_block * panel);
          largest = most > largest ? most : largest;
        }
        if (!d_is_splittable(largest)) return false;
        for (int64_t j = column; j < column + n; j += d_split_block) {
          const int64_t wide = d_min(column + n - j, d_split_block);
          const float* lines = from_b + k * b.row + j * b.column;
          if (!d_is_splittable(d_split_panel<false>(lines, b.column, b.row, wide, deep, right))) return false;
          if (bias && !k) {
            d_clear(add, wide, d_split_block);
            __builtin_memcpy(add, bias + j, wide * sizeof(float));
          }
          float* out = c + batch * c_batch + (row + i) * c_row + j;
          for (int64_t r = 0; r < high; r += d_split_block)
            block(d_min(high - r, d_split_block), wide, steps, left + r / d_split_block * panel, right, add,
                  tile, !k, k + deep == depth, out + r * c_row);
        }
      }
    return true;
  }
  // Tasks are batches; where they are few, parts of the rows or columns, whichever are more.
  void run() const {
    if (!batches || !rows || !columns || !depth) return run_in_float32();
    const int64_t threads = d_threads(), longer = rows > columns ? rows : columns;
    const int64_t blocks = (longer + d_split_block - 1) / d_split_block;
    const int64_t parts = d_min(blocks, batches % threads ? threads : 1);
    const int64_t step = (blocks + parts - 1) / parts * d_split_block;
    const d_workspaces workspaces(workspace_size(rows > columns ? d_min(step, rows) : rows));
    if (!workspaces.data) return;
    bool fits = true;
#pragma omp parallel if (batches * rows * columns * depth > 500000)
    {
      const d_tile_scope tile_scope;
      float* workspace = workspaces.of_thread();
#pragma omp for schedule(dynamic)
      for (int64_t at = 0; at < batches * parts; ++at) {
        const int64_t batch = at / parts, from = at % parts * step, count = d_min(step, longer - from);
        if (count <= 0) continue;
        const bool done = rows > columns ? this->task(batch, from, count, 0, columns, workspace)
                                         : this->task(batch, 0, rows, from, count, workspace);
        if (!done) __atomic_store_n(&fits, false, __ATOMIC_RELAXED);
      }
    }
    if (!fits) run_in_float32();
  }
  void run_in_float32() const {
    d_gemm<float>{batches, rows, columns, depth, a, b, bias, false, c, c_batch, c_row, activation}.run();
  }
};
#endif

// Arguments and sizes of `d_product`; the bias has a number for each column.
static void d_product_split(void** args, const int64_t* sizes, bool biased) {
#if defined(D_TILES)
  const d_product_args<float> p(args, sizes, biased);
  d_split_gemm{p.batches, p.rows, p.columns, p.depth, p.a, p.b, p.bias, p.c, p.c_batch, p.c_row, p.activation}
      .run();
#else
  d_product<float>(args, sizes, biased);
#endif
}
