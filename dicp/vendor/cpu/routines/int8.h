// Products of matrices of bytes on tile registers, in int32. Rows of B's transpose, as weights lie in
// memory, are the left operand of a tile and are read in place. A is packed: groups of four numbers that
// are adjacent along the depth.
#pragma once
#include "gemm.h"

struct __attribute__((may_alias, packed, aligned(1))) d_byte_group { uint32_t bits; };
template <> constexpr int64_t d_pack_factor<d_byte_group> = 4;

#if defined(D_TILES)
constexpr int64_t d_max_packed_bytes = 1 << 19;  // of A's rows that all columns of B are multiplied by
d_inline void d_pack_element(d_byte_group* to, const int8_t* from, int64_t, int64_t left) {
  to->bits = 0;
  __builtin_memcpy(to, from, d_min(left, 4));
}

// `is_signed`: whether the numbers of A are; those of B are.
template <bool is_signed> struct d_int8_product {
  static constexpr int64_t size = 2 * d_lanes, chunk = 64, tile = size * size;  // rows, bytes, sums
  int64_t rows, columns, depth;
  const int8_t* a;
  int64_t a_row;
  const int8_t* b;
  int64_t b_column;
  int32_t* c;
  int64_t c_row;

  int64_t padded_depth() const { return d_round_up(depth, chunk); }

  // A whole step of the depth; both tiles of B's columns, and of A's rows if there are two. Operands are
  // cleared after their last use: `d_tile_step`.
  template <int V> static void step(const int8_t* left, int64_t left_row, const int8_t* right) {
    d_tile_load<4>(left, left_row);
    d_tile_load<6>(right, 4 * size);
    d_tile_multiply_add_int8<is_signed, 0, 4, 6>();
    if constexpr (V == 2) {
      d_tile_load<7>(right + 64, 4 * size);
      d_tile_multiply_add_int8<is_signed, 1, 4, 7>();
    }
    d_tile_zero<4>();
    d_tile_load<5>(left + d_lanes * left_row, left_row);
    d_tile_multiply_add_int8<is_signed, 2, 5, 6>();
    d_tile_zero<6>();
    if constexpr (V == 2) d_tile_multiply_add_int8<is_signed, 3, 5, 7>();
    d_tile_zero<7>();
    d_tile_zero<5>();
  }
  // The sums of 32 columns of B, `left` in memory, with one panel of A; `rest` holds the last step's.
  template <int V>
  __attribute__((noinline)) void sums(const int8_t* left, int64_t left_row, const int8_t* rest,
                                      const int8_t* right, int32_t* to) const {
    d_clear_sums();
    int64_t k = 0;
    for (; k + chunk <= depth; k += chunk, right += chunk * size) step<V>(left + k, left_row, right);
    if (k < depth) step<V>(rest, chunk, right);
    d_store_sums<32, V>(to, 4 * size);
  }
  // Stores the transposed sums of `count` columns and `height` rows.
  void store(const int32_t* from, int64_t count, int64_t height, int32_t* to) const {
    for (int64_t i = 0; i < count; i += d_lanes)
      for (int64_t j = 0; j < height; j += d_lanes) {
        d_words square[d_lanes];
#pragma GCC unroll 16
        for (int r = 0; r < d_lanes; ++r) square[r] = *(const d_words*)(from + (i + r) * size + j);
        d_transpose_words(square);
        const uint16_t mask = count - i < d_lanes ? (1 << (count - i)) - 1 : -1;
#pragma GCC unroll 16
        for (int r = 0; r < d_lanes; ++r)
          if (j + r < height)
            asm("vmovdqu32 %1, %0%{%2%}"
                : "+m"(*(d_words*)(to + (j + r) * c_row + i))
                : "v"(square[r]), "Yk"(mask));
      }
  }
  // The results of `count` columns from `column` on; `panel` holds A.
  void task(int64_t column, int64_t count, const int8_t* panel, int8_t* workspace) const {
    const int8_t* left = b + column * b_column;
    int64_t left_row = b_column;
    int8_t *copy = workspace + 4 * tile, *rest = copy + size * padded_depth();
    if (count < size) {  // rows beyond the last one are not read
      for (int64_t i = 0; i < count; ++i)
        __builtin_memcpy(copy + i * padded_depth(), left + i * left_row, depth);
      left = copy, left_row = padded_depth();
    }
    const int64_t whole = depth / chunk * chunk;
    for (int64_t i = 0; i < count; ++i)
      __builtin_memcpy(rest + i * chunk, left + i * left_row + whole, depth - whole);
    for (int64_t j = 0; j < rows; j += size, panel += size * padded_depth()) {
      int32_t* found = (int32_t*)workspace;
      if (rows - j <= d_lanes) sums<1>(left, left_row, rest, panel, found);
      else sums<2>(left, left_row, rest, panel, found);
      store(found, count, d_min(rows - j, size), c + j * c_row + column);
    }
  }
  // The results of `count` rows from `first` on.
  void block(int64_t first, int64_t count, int8_t* packed, const d_workspaces& workspaces) const {
    const int64_t groups = padded_depth() / 4, used = (depth + 3) / 4;
    const d_int8_product part = {count, columns, depth, a + first * a_row, a_row, b, b_column,
                                 c + first * c_row, c_row};
    for (int64_t i = 0; i < count; i += size) {
      d_byte_group* to = (d_byte_group*)packed + i * groups;
      d_transpose(part.a + i * a_row, a_row, d_min(count - i, size), depth, to, size);
      d_clear((uint32_t*)to, used * size, groups * size);
    }
#pragma omp parallel if (count * columns * depth > 50000)
    {
      const d_tile_scope tile_scope;
      int8_t* workspace = (int8_t*)workspaces.of_thread();
#pragma omp for schedule(dynamic)
      for (int64_t k = 0; k < (columns + size - 1) / size; ++k)
        part.task(k * size, d_min(columns - k * size, size), packed, workspace);
    }
  }
  __attribute__((noinline)) void run() const {
    // Rows whose packed copy stays in the L2 cache.
    const int64_t most = d_max_packed_bytes / d_round_up(depth + 1, chunk) / size * size;
    const int64_t step = d_min(d_round_up(rows, size), most ? most : size);
    const d_workspaces packed(step * padded_depth() / 4, 1),
        workspaces(tile + size * (padded_depth() + chunk) / 4);
    if (!packed.data || !workspaces.data) return;
    for (int64_t i = 0; i < rows; i += step)
      block(i, d_min(rows - i, step), (int8_t*)packed.data, workspaces);
  }
};
#endif

// Arguments: a, b, c. Sizes: rows, columns, depth, the row step of a, the column step of b, the row step of
// c. The numbers of a row of a, of a column of b and of a row of c are adjacent.
template <bool is_signed> static void d_product_int8(void** args, const int64_t* sizes) {
#if defined(D_TILES)
  d_int8_product<is_signed>{sizes[0], sizes[1], sizes[2], (const int8_t*)args[0], sizes[3],
                            (const int8_t*)args[1], sizes[4], (int32_t*)args[2], sizes[5]}
      .run();
#endif
}
