// Products of matrices held in registers, a tile at a time, and the packing they read. Numbers are
// float or bfloat16 in memory; sums are float.
// Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication" (2008).
#pragma once
#include "tile.h"


// A tile of C is d_tile_height by two vectors: as many accumulators as the registers hold beside one row
// of B and one element of A.
#if defined(__AVX512F__)
constexpr int d_lanes = 16, d_tile_height = 12;
#elif defined(__AVX2__)
constexpr int d_lanes = 8, d_tile_height = 6;
#else
constexpr int d_lanes = 4, d_tile_height = 8;
#endif
constexpr int d_short_tile_height = d_tile_height - d_tile_height / 3;
constexpr int d_panel = 2 * d_lanes;
constexpr int64_t d_depth_block = 128;  // terms of a sum that are added before it is added to the others
typedef float d_vec __attribute__((vector_size(4 * d_lanes), aligned(4), may_alias));
typedef uint32_t d_words __attribute__((vector_size(4 * d_lanes), aligned(4), may_alias));
typedef int32_t d_lane_indices __attribute__((vector_size(4 * d_lanes)));
typedef uint32_t d_unaligned_words __attribute__((vector_size(4 * d_lanes), aligned(1), may_alias));
typedef d_bf16 d_halfwords __attribute__((vector_size(2 * d_lanes), aligned(2), may_alias));

d_inline int64_t d_round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
d_inline int64_t d_min(int64_t a, int64_t b) { return a < b ? a : b; }
// The fewest parts, `least` or more, by which `others * parts` tasks of equal length leave the threads
// idle for a fifth of the time at most; if there are none up to `tile_rows`, those that do so the least.
static int64_t d_balanced_parts(int64_t others, int64_t least, int64_t most, int64_t threads) {
  int64_t best = least;
  double busy = 0;
  for (int64_t parts = least; parts <= most || parts == least; ++parts) {
    const int64_t tasks = others * parts, rounds = (tasks + threads - 1) / threads;
    const double now = (double)tasks / (double)(rounds * threads);
    if (now > busy) best = parts, busy = now;
    if (busy >= 0.8) break;
  }
  return best;
}
// Parts of `rows`, `height` or fewer rows in each where possible, and the rows of one: whole tiles of
// `tile` rows. `others` is the number of tasks for each part.
struct d_row_partition {
  int64_t parts, step;
  d_row_partition(int64_t rows, int64_t high, int64_t tile, int64_t others, int64_t threads) {
    const int64_t shortest = 2 * tile;
    parts = d_balanced_parts(others, (rows + high - 1) / high, (rows + shortest - 1) / shortest, threads);
    step = d_round_up((rows + parts - 1) / parts, tile);
    parts = (rows + step - 1) / step;
  }
};
// Tiles of packed elements of type C: the rows of a tile (MR), of a shorter one, and of a block that stays in a
// cache (MC), and the depth of a packed block (KC).
template <class C> struct d_tile_shape {
  static constexpr int rows = d_tile_height, short_rows = d_short_tile_height, block_rows = 4 * d_tile_height,
                       depth = 512;
};
template <class C> constexpr int64_t d_packed_a_stride = d_tile_shape<C>::depth + d_lanes;
// Whether packed elements of type C are multiplied in tile registers.
template <class C> constexpr bool d_uses_tiles = false;
// Whether the next tile of the `left` remaining rows is a smaller one, which they fill better.
template <class C = float> d_inline bool d_takes_short_tile(int64_t left) {
  typedef d_tile_shape<C> shape;
  return left <= shape::short_rows || (left > shape::rows && left <= 2 * shape::short_rows);
}
// Workspaces, of floats or packed elements, start at a cache line, which no vector crosses then. One block is
// cached from call to call: memory that is allocated and freed between tensors that stay fragments the heap.
// The block belongs to the library and not to a thread, because a thread-local object with a destructor would
// keep the library loaded for as long as the thread runs.
constexpr int64_t d_line = 64;                     // bytes; the first line of a block holds its size
constexpr uint64_t d_line_cells = d_line / sizeof(float);
constexpr int64_t d_max_cached_bytes = 4 << 20;    // bytes for each thread of the team
static int64_t* d_cached_block = nullptr;
static thread_local int64_t d_failed_allocation = 0;         // bytes that a routine could not allocate
static int64_t* d_take_cached_block() {
  return __atomic_exchange_n(&d_cached_block, nullptr, __ATOMIC_ACQ_REL);
}
static bool d_cache_block(int64_t* block) {
  int64_t* none = nullptr;
  return __atomic_compare_exchange_n(&d_cached_block, &none, block, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED);
}
static __attribute__((destructor)) void d_free_cached_block() { d_free(d_take_cached_block()); }
static float* d_allocate_workspace(int64_t count) {
  const int64_t bytes = d_round_up(count * sizeof(float), d_line);
  int64_t* block = d_take_cached_block();
  if (!block || *block < bytes) {
    d_free(block);
    block = (int64_t*)d_alloc(d_line + bytes);
    if (!block) {
      d_failed_allocation = bytes;
      return nullptr;
    }
    *block = bytes;
  }
  return (float*)((char*)block + d_line);
}
static void d_release_workspace(float* workspace) {
  int64_t* block = workspace ? (int64_t*)((char*)workspace - d_line) : nullptr;
  const bool small = block && *block <= d_max_cached_bytes * d_threads();
  if (!small || !d_cache_block(block)) d_free(block);
}
// Memory for each thread of a team, allocated before the team starts; null if that fails.
struct d_workspaces {
  const int64_t count;
  float* const data;
  explicit d_workspaces(int64_t floats, int64_t threads = d_threads())
      : count(d_round_up(floats, d_line / sizeof(float))), data(d_allocate_workspace(count * threads)) {}
  ~d_workspaces() { d_release_workspace(data); }
  float* of_thread() const { return data + d_thread() * count; }
};

template <class T> d_inline void d_clear(T* x, int64_t from, int64_t to) {
  for (int64_t j = from; j < to; ++j) x[j] = T{};
}

// ---- elements in memory, and packed elements ----------------------------------------------------
d_inline float d_to_float(float x) { return x; }
d_inline float d_to_float(d_bf16 x) { return d_from_bf16(x); }
d_inline float d_to_float(int8_t x) { return x; }
d_inline void d_store(float* to, float x) { *to = x; }
d_inline void d_store(d_bf16* to, float x) { *to = d_to_bf16(x); }

// A packed element is a float or, where the processor multiplies pairs of bfloat16, two of them that are
// adjacent along the depth. Both have 32 bits.
template <class T> struct d_packed_type { typedef float type; };
template <class C> constexpr int64_t d_pack_factor = 1;
#if defined(__AVX512BF16__)
struct __attribute__((may_alias, packed, aligned(2))) d_bf16_pair { uint32_t bits; };
template <> struct d_packed_type<d_bf16> { typedef d_bf16_pair type; };
template <> constexpr int64_t d_pack_factor<d_bf16_pair> = 2;
#endif
#if defined(D_TILES)
// Two by two tiles of sums: each tile of an operand is read for two of them.
template <> struct d_tile_shape<d_bf16_pair> {
  static constexpr int rows = 32, short_rows = 16, block_rows = 64, depth = 1024;
};
template <> constexpr bool d_uses_tiles<d_bf16_pair> = true;
#endif
template <class T> using d_packed = typename d_packed_type<T>::type;
// Terms of a sum that are added before it is added to the others. Sums of pairs are rounded to 16 bits in
// the end; the errors of longer sums are negligible beside that.
template <class C> constexpr int64_t d_summed_depth = d_pack_factor<C> == 2 ? d_tile_shape<C>::depth : d_depth_block;
// Number of packed elements that hold `count` numbers of type T along the depth.
template <class T> d_inline int64_t d_packed_depth(int64_t count) {
  return (count + d_pack_factor<d_packed<T>> - 1) / d_pack_factor<d_packed<T>>;
}

// Products of the packed elements in two vectors, added to the sums of their lanes. Instructions take copies of
// sums: g++ keeps an array in memory if one of its elements is an operand of `asm`.
d_inline void d_multiply_add_lanes(d_vec& sum, d_vec a, d_vec b, const float*) { sum += a * b; }
#if defined(__AVX512BF16__)
d_inline void d_multiply_add_lanes(d_vec& sum, d_vec a, d_vec b, const d_bf16_pair*) {
  d_vec all = sum;
  asm("vdpbf16ps %2, %1, %0" : "+v"(all) : "v"(a), "v"(b));
  sum = all;
}
#endif
// One vector of B, or two.
template <int V = 2> d_inline void d_multiply_add(d_vec* sum, float a, d_vec left, d_vec right) {
  sum[0] += a * left;
  if (V == 2) sum[1] += a * right;
}
// `left` numbers, `step` apart, as one packed element.
template <class T> d_inline void d_pack_element(float* to, const T* from, int64_t, int64_t) {
  *to = d_to_float(*from);
}
#if defined(__AVX512BF16__)
template <int V = 2> d_inline void d_multiply_add(d_vec* sum, d_bf16_pair a, d_vec left, d_vec right) {
  const d_words all = d_words{} + a.bits;
  d_vec first = sum[0], second = sum[1];
  asm("vdpbf16ps %2, %1, %0" : "+v"(first) : "v"(all), "v"(left));
  if (V == 2) asm("vdpbf16ps %2, %1, %0" : "+v"(second) : "v"(all), "v"(right));
  sum[0] = first, sum[1] = second;
}
d_inline void d_pack_element(d_bf16_pair* to, const d_bf16* from, int64_t step, int64_t left) {
  to->bits = from[0] | (left > 1 ? (uint32_t)from[step] << 16 : 0);
}
d_inline void d_pack_element(d_bf16_pair* to, const int8_t* from, int64_t step, int64_t left) {
  const d_bf16 both[2] = {d_to_bf16(from[0]), d_to_bf16(left > 1 ? from[step] : 0)};
  d_pack_element(to, both, 1, 2);
}
// g++ 12 converts a vector of 16-bit numbers in halves.
d_inline d_words d_zero_extended(const d_bf16* at) {
  d_words all;
  asm("vpmovzxwd %1, %0" : "=v"(all) : "m"(*(const d_halfwords*)at));
  return all;
}
d_inline d_words d_interleaved(const d_bf16* first, const d_bf16* second) {
  return d_zero_extended(first) | d_zero_extended(second) << 16;
}
// Packed elements of two rows.
d_inline void d_interleave_rows(const d_bf16* first, const d_bf16* second, int64_t n, d_bf16_pair* to) {
  int64_t j = 0;
  for (; j + d_lanes <= n; j += d_lanes) *(d_words*)(to + j) = d_interleaved(first + j, second + j);
  for (; j < n; ++j) to[j].bits = first[j] | (uint32_t)second[j] << 16;
}
#endif

// Stores one row of a tile, or adds it to the row in memory (floats only).
d_inline void d_store_row(float* to, const d_vec* sum, bool add) {
  d_vec* at = (d_vec*)to;
  at[0] = add ? at[0] + sum[0] : sum[0];
  at[1] = add ? at[1] + sum[1] : sum[1];
}
d_inline void d_store_row(d_bf16* to, const d_vec* sum, bool) {
#if defined(__AVX512BF16__)
  d_words both;
  asm("vcvtne2ps2bf16 %2, %1, %0" : "=v"(both) : "v"(sum[1]), "v"(sum[0]));
  __builtin_memcpy(to, &both, sizeof both);
#else
  for (int j = 0; j < d_panel; ++j) to[j] = d_to_bf16(sum[j / d_lanes][j % d_lanes]);
#endif
}
// Stores the first `n` numbers of one row.
d_inline void d_store_partial_row(float* to, const d_vec* sum, int64_t n) {
#if defined(__AVX512F__)
  const uint32_t mask = ((uint64_t)1 << n) - 1;
  asm("vmovups %1, %0%{%2%}" : "+m"(*(d_vec*)to) : "v"(sum[0]), "Yk"((uint16_t)mask));
  asm("vmovups %1, %0%{%2%}" : "+m"(((d_vec*)to)[1]) : "v"(sum[1]), "Yk"((uint16_t)(mask >> 16)));
#else
  const d_vec first = sum[0], second = sum[1];  // copies, so that a tile's sums stay in registers
  if (n >= d_lanes) *(d_vec*)to = first;
  if (n >= d_panel) *(d_vec*)(to + d_lanes) = second;
  const d_vec rest = n < d_lanes ? first : second;
  for (int64_t j = n / d_lanes * d_lanes; j < n; ++j) to[j] = rest[j % d_lanes];
#endif
}
d_inline void d_store_partial_row(d_bf16* to, const d_vec* sum, int64_t n) {
#if defined(__AVX512BF16__)
  const uint32_t mask = ((uint64_t)1 << n) - 1;
  d_words both;
  asm("vcvtne2ps2bf16 %2, %1, %0" : "=v"(both) : "v"(sum[1]), "v"(sum[0]));
  asm("vmovdqu16 %1, %0%{%2%}" : "+m"(*(d_words*)to) : "v"(both), "Yk"(mask));
#else
  for (int64_t j = 0; j < n; ++j) to[j] = d_to_bf16(((const float*)sum)[j]);
#endif
}

#if defined(__AVX512BF16__)
// Numbers of two rows as packed elements.
d_inline d_words d_interleaved_bf16(d_vec first, d_vec second) {
  static const d_bf16 order[d_panel] = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23,
                                        8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  d_words both;
  asm("vcvtne2ps2bf16 %2, %1, %0" : "=v"(both) : "v"(second), "v"(first));
  asm("vpermw %0, %1, %0" : "+v"(both) : "v"(*(const d_words*)order));
  return both;
}
#endif

// A vector of floats from adjacent numbers.
d_inline d_vec d_load_floats(const float* at) { return *(const d_vec*)at; }
typedef int8_t d_bytes __attribute__((vector_size(d_lanes), aligned(1), may_alias));
d_inline d_vec d_load_floats(const d_bf16* at) {
  return (d_vec)(__builtin_convertvector(*(const d_halfwords*)at, d_words) << 16);
}
// g++ 12 converts vectors of bytes number by number.
d_inline d_vec d_load_floats(const int8_t* at) {
  d_lane_indices all;
#if defined(__AVX512F__)
  asm("vpmovsxbd %1, %0" : "=v"(all) : "m"(*(const d_bytes*)at));
#elif defined(__AVX2__)
  asm("vpmovsxbd %1, %0" : "=x"(all) : "m"(*(const d_bytes*)at));
#else
  for (int j = 0; j < d_lanes; ++j) all[j] = at[j];
#endif
  return __builtin_convertvector(all, d_vec);
}
// A vector of packed elements from adjacent numbers of type T, or from bytes that stand for such numbers.
template <class T> d_inline d_vec d_load_packed(const T* at) {
  if constexpr (sizeof(T) * d_pack_factor<d_packed<T>> != sizeof(float)) return d_load_floats(at);
  return (d_vec)(*(const d_unaligned_words*)at);
}
template <class C> d_inline d_vec d_load_packed_bytes(const int8_t* at) {
  if constexpr (d_pack_factor<C> == 1) return d_load_floats(at);
  d_vec packed = d_load_floats(at);
#if defined(__AVX512BF16__)
  // The upper halves of both vectors: a byte's bfloat16 is exact.
  static const d_bf16 upper[d_panel] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
                                        33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
  asm("vpermt2w %2, %1, %0" : "+v"(packed) : "v"(*(const d_words*)upper), "v"(d_load_floats(at + d_lanes)));
#endif
  return packed;
}
template <class T> d_inline d_vec d_load_packed(const int8_t* at) {
  return d_load_packed_bytes<d_packed<T>>(at);
}

// ---- tiles ----------------------------------------------------------------------------------
// The rows of A, with the steps between and along them, and the adjacent columns of B, with the step
// between its rows. `next`: the rows of A to prefetch, or `a`.
template <class C> struct d_tile_operands {
  const C* a;
  int64_t a_row, a_step;
  const C* b;
  int64_t b_step;
  const C* next = a;
  d_tile_operands after(int64_t k) const {
    return {a + k * a_step, a_row, a_step, b + k * b_step, b_step, next + k * a_step};
  }
};
// store(i, row i of A * B) for i < R; of V vectors. `prefetches_a`: prefetches other rows of A.
template <int R, int V = 2, bool prefetches_a = false, class C, class S>
d_inline void d_compute_tile(int64_t depth, const d_tile_operands<C>& of, const S& store) {
  d_vec sum[R][2];
  // Three rows share a pointer, so that all pointers fit into registers.
  const C *from[(R + 2) / 3], *b = of.b;
  const int64_t row = of.a_row, step = of.a_step, b_step = of.b_step;
#pragma GCC unroll 16
  for (int i = 0; i < R; ++i) sum[i][0] = sum[i][1] = d_vec{};
#pragma GCC unroll 4
  for (int i = 0; i < (R + 2) / 3; ++i) from[i] = of.a + 3 * i * row;
  for (uint64_t k = 0; k < (uint64_t)depth; ++k, b += b_step) {
    // Prefetches the next panel of B: its rows are too far apart for the hardware prefetcher.
    for (int v = 0; v < V; ++v) __builtin_prefetch(b + d_panel + v * d_lanes);
    // One line of A in each step: a burst of prefetches would wait for memory. To the L2 cache, as rows
    // that lie a power of two apart share few places of L1. More rows than a tile has cost nothing; a
    // branch that leaves them out does.
    if (prefetches_a)
      __builtin_prefetch(of.next + k % d_line_cells * row + k / d_line_cells * d_line_cells, 0, 2);
    const d_vec left = ((const d_vec*)b)[0], right = V == 2 ? ((const d_vec*)b)[1] : d_vec{};
#pragma GCC unroll 16
    for (int i = 0; i < R; ++i) d_multiply_add<V>(sum[i], from[i / 3][i % 3 * row], left, right);
#pragma GCC unroll 4
    for (int i = 0; i < (R + 2) / 3; ++i) from[i] += step;
  }
#pragma GCC unroll 16
  for (int i = 0; i < R; ++i) store(i, sum[i]);
}
#if defined(D_TILES)
// Up to 16 packed elements of depth of every operand's tiles: a's in 4 and 5, b's in 6 and 7; sums in 0 to 3.
// An operand is cleared after its last use: a clear tile holds no physical register. At times a core has few
// of them, presumably while its other hardware thread holds some, and loads wait for one. In that state of an
// Intel Xeon (Emerald Rapids), a step from the L1 cache takes 126 ns, with cleared operands 71; else 28 ns both
// ways.
template <int R, int V>
d_inline void d_tile_step(const d_bf16_pair* a, int64_t a_step, const d_bf16_pair* b, int64_t b_step) {
  constexpr int64_t size = sizeof(d_bf16_pair);
  d_tile_load<4>(a, a_step * size);
  d_tile_stream<6>(b, b_step * size);
  d_tile_multiply_add<0, 4, 6>();
  if constexpr (V == 2) {
    d_tile_stream<7>(b + 16, b_step * size);
    d_tile_multiply_add<1, 4, 7>();
  }
  d_tile_zero<4>();
  if constexpr (R == 32) {
    d_tile_load<5>(a + 16 * a_step, a_step * size);
    d_tile_multiply_add<2, 5, 6>();
  }
  d_tile_zero<6>();
  if constexpr (R == 32 && V == 2) d_tile_multiply_add<3, 5, 7>();
  d_tile_zero<7>();
  d_tile_zero<5>();
}
// `sums`: R rows of two vectors; the second ones stay as they are if V is 1. The products are added to those
// in `before`, unless it is null. `between` runs after each step, with its depth: other work overlaps with the
// tile unit's.
template <int R, int V, class F>
__attribute__((noinline)) static void d_compute_tile_in_registers(int64_t depth,
                                                                  const d_tile_operands<d_bf16_pair>& of,
                                                                  const float* before, float* sums,
                                                                  const F& between) {
  constexpr int64_t row = 2 * sizeof(d_vec);
  if (before) d_load_sums<R, V>(before, row);
  else d_clear_sums();
  int64_t k = 0;
  for (; k + 16 <= depth; k += 16) {
    d_tile_step<R, V>(of.a + k, of.a_row, of.b + k * of.b_step, of.b_step);
    between(k);
  }
  if (k < depth) {  // the rest, filled up with zeros
    d_bf16_pair a[R * 16], b[16 * d_panel];
    d_clear(a, 0, R * 16);
    d_clear(b, 0, 16 * d_panel);
    for (int i = 0; i < R; ++i)
      __builtin_memcpy(a + 16 * i, of.a + i * of.a_row + k, (depth - k) * sizeof(d_bf16_pair));
    for (int64_t i = k; i < depth; ++i)
      __builtin_memcpy(b + (i - k) * d_panel, of.b + i * of.b_step, V * sizeof(d_vec));
    d_tile_step<R, V>(a, 16, b, d_panel);
  }
  d_store_sums<R, V>(sums, row);
}
// The packed elements of a row of A are adjacent.
template <int R, int V = 2, bool prefetches_a = false, class S>
d_inline void d_compute_tile(int64_t depth, const d_tile_operands<d_bf16_pair>& of, const S& store) {
  d_vec sums[2 * R];
  if constexpr (V == 1)
    for (int i = 0; i < R; ++i) sums[2 * i + 1] = d_vec{};
  d_compute_tile_in_registers<R, V>(depth, of, nullptr, (float*)sums, [](int64_t) {});
  for (int i = 0; i < R; ++i) store(i, sums + 2 * i);
}
#endif
// Stores the first `wide` columns of a tile's sums, after adding the bias of each column and the
// earlier sums, where there are any.
template <class T> struct d_tile_epilogue {
  const float *add, *before;
  int64_t before_step;
  T* out;
  int64_t out_step, wide;
};
// One function for all epilogues: compiling a tile takes long.
template <int R, int V, bool prefetches_a, class C, class T>
__attribute__((noinline)) static void d_compute_and_store_tile(int64_t depth, const d_tile_operands<C>& of,
                                                const d_tile_epilogue<T>& end) {
  d_compute_tile<R, V, prefetches_a>(depth, of, [&](int r, const d_vec* sum) __attribute__((always_inline)) {
    d_vec all[2] = {sum[0], sum[1]};
    if (end.add) all[0] += ((const d_vec*)end.add)[0], all[1] += ((const d_vec*)end.add)[1];
    const d_vec* more = (const d_vec*)(end.before + r * end.before_step);
    if (end.before) all[0] += more[0], all[1] += more[1];
    T* to = end.out + r * end.out_step;
    if (end.wide == d_panel)
      d_store_row(to, all, false);
    else
      d_store_partial_row(to, all, end.wide);
  });
}
// The same for rows of B at the given offsets; rows of A are `row` apart.
template <int R, class S>
d_inline void d_compute_tile_at_offsets(int64_t depth, const float* a, int64_t row, const float* b,
                           const int32_t* offsets, const S& store) {
  d_vec sum[R][2];
  const float* from[(R + 2) / 3];
#pragma GCC unroll 16
  for (int i = 0; i < R; ++i) sum[i][0] = sum[i][1] = d_vec{};
#pragma GCC unroll 4
  for (int i = 0; i < (R + 2) / 3; ++i) from[i] = a + 3 * i * row;
  for (int64_t k = 0; k < depth; ++k) {
    const d_vec* at = (const d_vec*)(b + offsets[k]);
    const d_vec left = at[0], right = at[1];
#pragma GCC unroll 16
    for (int i = 0; i < R; ++i) d_multiply_add(sum[i], from[i / 3][i % 3 * row + k], left, right);
  }
#pragma GCC unroll 16
  for (int i = 0; i < R; ++i) store(i, sum[i]);
}
// The same for sums over `lines` lines of `depth` numbers each; rows of A are `row` apart, lines of A
// and of B `a_next` and `b_next`.
template <int R, class S>
d_inline void d_compute_tile_of_lines(int64_t lines, int64_t depth, const float* a, int64_t row, int64_t a_next,
                           const float* b, int64_t b_step, int64_t b_next, const S& store) {
  d_vec sum[R][2];
#pragma GCC unroll 16
  for (int i = 0; i < R; ++i) sum[i][0] = sum[i][1] = d_vec{};
  for (int64_t line = 0; line < lines; ++line, a += a_next, b += b_next) {
    const float *from[(R + 2) / 3], *at = b;
#pragma GCC unroll 4
    for (int i = 0; i < (R + 2) / 3; ++i) from[i] = a + 3 * i * row;
    for (int64_t k = 0; k < depth; ++k, at += b_step) {
      const d_vec left = ((const d_vec*)at)[0], right = ((const d_vec*)at)[1];
#pragma GCC unroll 16
      for (int i = 0; i < R; ++i) d_multiply_add(sum[i], from[i / 3][i % 3 * row + k], left, right);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < R; ++i) store(i, sum[i]);
}
#if defined(D_TILES)
template <int AI, int AK, class S> d_inline void d_compute_strided_tile(int64_t depth, const d_bf16_pair* a,
                                                                        const d_bf16_pair* b, int64_t b_step,
                                                                        const S& store) {
  static_assert(AK == 1, "tiles read rows");
  d_compute_tile<d_tile_shape<d_bf16_pair>::rows>(depth, {a, AI, AK, b, b_step}, store);
}
#endif
// store(i, row i of c), where c[i][j] = sum over k of a[i * AI + k * AK] * b[k * b_step + j].
template <int AI, int AK, class C, class S>
d_inline void d_compute_strided_tile(int64_t depth, const C* a, const C* b, int64_t b_step, const S& store) {
  d_vec sum[d_tile_height][2];
#pragma GCC unroll 16
  for (int i = 0; i < d_tile_height; ++i) sum[i][0] = sum[i][1] = d_vec{};
  for (int64_t k = 0; k < depth; ++k, a += AK, b += b_step) {
    const d_vec left = ((const d_vec*)b)[0], right = ((const d_vec*)b)[1];
#pragma GCC unroll 16
    for (int i = 0; i < d_tile_height; ++i) d_multiply_add(sum[i], a[i * AI], left, right);
  }
#pragma GCC unroll 16
  for (int i = 0; i < d_tile_height; ++i) store(i, sum[i]);
}

// c (+)= a * b over `rows` by `columns`, whole tiles of both; panels of B lie `panel_step` apart.
// A long sum is computed in blocks: B stays in the L1 cache, and rounding errors stay small.
template <int AI, int AK, class C>
static void d_multiply_tiles(int64_t rows, int64_t columns, int64_t depth, const C* a, const C* b,
                    int64_t panel_step, int64_t b_step, float* c, int64_t c_step, bool add) {
  for (int64_t from = 0; from < depth; from += d_summed_depth<C>)
    for (int64_t j = 0; j < columns; j += d_panel)
      for (int64_t i = 0; i < rows; i += d_tile_shape<C>::rows)
        d_compute_strided_tile<AI, AK>(d_min(depth - from, d_summed_depth<C>), a + i * AI + from * AK,
                       b + j / d_panel * panel_step + from * b_step, b_step,
                       [=](int r, const d_vec* sum) __attribute__((always_inline)) {
                         d_store_row(c + (i + r) * c_step + j, sum, add || from);
                       });
}

// ---- copies ---------------------------------------------------------------------------------
d_inline void d_transpose_words(d_words* rows) {
  d_exchange_blocks<d_lanes, d_lanes / 2, d_words, d_lane_indices>(rows);
}
// The same for vectors of floats. Copies, as a template's parameter has no attributes: neither aliases
// nor vectors at any address.
d_inline void d_transpose_floats(d_vec* rows) {
  alignas(64) d_words words[d_lanes];
#pragma GCC unroll 16
  for (int i = 0; i < d_lanes; ++i) words[i] = (d_words)rows[i];
  d_transpose_words(words);
#pragma GCC unroll 16
  for (int i = 0; i < d_lanes; ++i) rows[i] = (d_vec)words[i];
}
template <class C> d_inline void d_store_square(const d_words* rows, C* to, int64_t to_step) {
#pragma GCC unroll 16
  for (int i = 0; i < d_lanes; ++i) *(d_words*)(to + i * to_step) = rows[i];
}
typedef uint32_t d_quarter __attribute__((vector_size(16), aligned(1), may_alias));
// A vector of quarters that lie `step` apart.
template <class T> d_inline d_words d_load_quarters(const T* from, int64_t step) {
  d_words all;
#if defined(__AVX512VL__)
  asm("vmovups %1, %x0" : "=v"(all) : "m"(*(const d_quarter*)from));
  asm("vinserti32x4 $1, %1, %t0, %t0" : "+v"(all) : "m"(*(const d_quarter*)(from + step)));
  asm("vinserti32x4 $2, %1, %0, %0" : "+v"(all) : "m"(*(const d_quarter*)(from + 2 * step)));
  asm("vinserti32x4 $3, %1, %0, %0" : "+v"(all) : "m"(*(const d_quarter*)(from + 3 * step)));
#elif defined(__AVX2__)
  asm("vmovups %1, %x0" : "=x"(all) : "m"(*(const d_quarter*)from));
  asm("vinserti128 $1, %1, %0, %0" : "+x"(all) : "m"(*(const d_quarter*)(from + step)));
#else
  for (int q = 0; q < d_lanes / 4; ++q) __builtin_memcpy((char*)&all + 16 * q, from + q * step, 16);
#endif
  return all;
}
// The quarters of four vectors, each a square of words, transposed.
template <int... j> d_inline void d_transpose_quarters(d_words* v, d_int_sequence<j...>) {
  constexpr int n = d_lanes;
  const auto low = [](d_words x, d_words y) {
    return D_SHUFFLE(x, y, d_lane_indices, (j / 4 * 4 + j % 4 / 2 + j % 2 * n)...);
  };
  const auto high = [](d_words x, d_words y) {
    return D_SHUFFLE(x, y, d_lane_indices, (j / 4 * 4 + 2 + j % 4 / 2 + j % 2 * n)...);
  };
  const auto first = [](d_words x, d_words y) {
    return D_SHUFFLE(x, y, d_lane_indices, (j / 4 * 4 + j % 2 + j % 4 / 2 * n)...);
  };
  const auto second = [](d_words x, d_words y) {
    return D_SHUFFLE(x, y, d_lane_indices, (j / 4 * 4 + 2 + j % 2 + j % 4 / 2 * n)...);
  };
  const d_words a = low(v[0], v[1]), b = high(v[0], v[1]);
  const d_words c = low(v[2], v[3]), d = high(v[2], v[3]);
  v[0] = first(a, c), v[1] = second(a, c);
  v[2] = first(b, d), v[3] = second(b, d);
}
// Transposes a square of packed elements; reading quarters of vectors replaces half of the shuffles. Prefetches
// the line of each row that is read four squares later and, for tile registers, which wait for memory more often,
// that of the rows of the next squares to the L2 cache.
template <class T, class C>
d_inline void d_transpose_packed(const T* from, int64_t from_step, C* to, int64_t to_step) {
  constexpr int64_t distance = 4 * d_lanes * d_pack_factor<C>;
#pragma GCC unroll 16
  for (int i = 0; i < d_lanes; ++i) {
    __builtin_prefetch(from + i * from_step + distance);
    if (d_uses_tiles<C>) __builtin_prefetch(from + (i + d_lanes) * from_step, 0, 2);
  }
#pragma GCC unroll 4
  for (int c = 0; c < d_lanes; c += 4) {
    d_words v[4];
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k)
      v[k] = d_load_quarters(from + k * from_step + c * d_pack_factor<C>, 4 * from_step);
    d_transpose_quarters(v, typename d_int_sequence_of<d_lanes>::type());
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) *(d_words*)(to + (c + k) * to_step) = v[k];
  }
}

// The same for numbers of fewer bits, which become packed elements of 32 bits.
template <class T, class C>
d_inline void d_transpose_converted(const T* from, int64_t from_step, C* to, int64_t to_step) {
  d_words square[d_lanes];
#pragma GCC unroll 16
  for (int i = 0; i < d_lanes; ++i)
    if constexpr (sizeof(T) == 1) square[i] = (d_words)d_load_packed_bytes<C>(from + i * from_step);
    else square[i] = (d_words)d_load_floats(from + i * from_step);
  d_transpose_words(square);
  d_store_square(square, to, to_step);
}

// Row r of `from` becomes column r of `to`, packed in packed elements: transposes squares in registers.
template <class T, class C>
static void d_transpose(const T* from, int64_t from_step, int64_t rows, int64_t columns, C* to,
                        int64_t to_step) {
  constexpr int64_t n = d_lanes, pack_factor = d_pack_factor<C>;
  const int64_t whole_rows = rows / n * n, whole = columns / pack_factor / n * n;
  for (int64_t r = 0; r < whole_rows; r += n)
    for (int64_t c = 0; c < whole; c += n)
      if constexpr (sizeof(C) == pack_factor * sizeof(T))
        d_transpose_packed<T, C>(from + r * from_step + c * pack_factor, from_step, to + c * to_step + r,
                                 to_step);
      else
        d_transpose_converted(from + r * from_step + c * pack_factor, from_step, to + c * to_step + r, to_step);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = r < whole_rows ? whole : 0; c * pack_factor < columns; ++c)
      d_pack_element(to + c * to_step + r, from + r * from_step + c * pack_factor, 1,
                     columns - c * pack_factor);
}

// to[r * to_step + c] = from[r * row_step + c * column_step] * scale
template <class T, class O>
static void d_copy(const T* from, int64_t row_step, int64_t column_step, int64_t rows,
                   int64_t columns, O* to, int64_t to_step, float scale = 1.0f) {
  if (column_step == 1) {
    for (int64_t r = 0; r < rows; ++r) {
#pragma omp simd
      for (int64_t c = 0; c < columns; ++c)
        d_store(to + r * to_step + c, d_to_float(from[r * row_step + c]) * scale);
    }
    return;
  }
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < columns; ++c)
      d_store(to + r * to_step + c, d_to_float(from[r * row_step + c * column_step]) * scale);
}

// ---- packing --------------------------------------------------------------------------------
// Prefetches the line of a row that is packed later, with the rows in between. Rows of a strip are short
// and far apart: the hardware prefetcher does not find the next ones.
template <class T> d_inline void d_prefetch_ahead(const T* at, int64_t row_step) {
  __builtin_prefetch(at + 16 * row_step);
}
// Panels of a row-major operand of floats; each row is read once.
static void d_pack_row_major(const float* from, int64_t row_step, int64_t depth, int64_t columns, float* to) {
  const int64_t whole = columns / d_panel * d_panel;
  if (whole < columns) d_clear(to, whole * depth, (whole + d_panel) * depth);
  for (int64_t k = 0; k < depth; ++k, from += row_step) {
    for (int64_t j = 0; j < whole; j += d_panel) {
      d_prefetch_ahead(from + j, row_step);
      d_prefetch_ahead(from + j + d_lanes, row_step);
      const d_vec *at = (const d_vec*)(from + j), left = at[0], right = at[1];
      d_vec* panel = (d_vec*)(to + j * depth + k * d_panel);
      panel[0] = left, panel[1] = right;
    }
    for (int64_t j = whole; j < columns; ++j) to[whole * depth + k * d_panel + j - whole] = from[j];
  }
}
// Packs the left operand: the packed elements of each row, row after row.
template <class T>
static void d_pack_rows(const T* from, int64_t row_step, int64_t column_step, int64_t rows,
                    int64_t depth, float* to, int64_t to_step) {
  if (row_step == 1 && column_step != 1)
    return d_transpose(from, column_step, depth, rows, to, to_step);
  d_copy(from, row_step, column_step, rows, depth, to, to_step);
}
// Packs the right operand: rows of packed elements, row after row.
template <class T>
static void d_pack_panel(const T* from, int64_t row_step, int64_t column_step, int64_t depth,
                     int64_t columns, float* to) {
  d_pack_rows(from, row_step, column_step, depth, columns, to, d_panel);
}
#if defined(__AVX512BF16__)
static void d_pack_rows(const d_bf16* from, int64_t row_step, int64_t column_step, int64_t rows,
                    int64_t depth, d_bf16_pair* to, int64_t to_step) {
  if (column_step == 1) {
    for (int64_t r = 0; r < rows; ++r, from += row_step, to += to_step) {
      __builtin_memcpy(to, from, depth / 2 * sizeof(d_bf16_pair));
      if (depth % 2) d_pack_element(to + depth / 2, from + depth - 1, 1, 1);
    }
    return;
  }
  constexpr int64_t n = d_lanes;
  const int64_t whole_rows = row_step == 1 ? rows / n * n : 0, whole = depth / 2 / n * n;
  for (int64_t c = 0; c < whole; c += n)
    for (int64_t r = 0; r < whole_rows; r += n) {
      d_words square[d_lanes];
#pragma GCC unroll 16
      for (int i = 0; i < d_lanes; ++i) {
        const d_bf16* at = from + r + 2 * (c + i) * column_step;
        square[i] = d_interleaved(at, at + column_step);
      }
      d_transpose_words(square);
      d_store_square(square, to + r * to_step + c, to_step);
    }
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = r < whole_rows ? whole : 0; 2 * c < depth; ++c)
      d_pack_element(to + r * to_step + c, from + r * row_step + 2 * c * column_step, column_step,
             depth - 2 * c);
}
// The same for bytes that are adjacent in a row.
static void d_pack_rows(const int8_t* from, int64_t row_step, int64_t, int64_t rows, int64_t depth,
                        d_bf16_pair* to, int64_t to_step) {
  const int64_t vectors = depth / d_panel;
  for (int64_t r = 0; r < rows; ++r, from += row_step, to += to_step) {
    d_vec* vector = (d_vec*)to;
#pragma GCC unroll 4
    for (int64_t v = 0; v < vectors; ++v) {
      d_prefetch_ahead(from + v * d_panel, row_step);
      vector[v] = d_load_packed_bytes<d_bf16_pair>(from + v * d_panel);
    }
    for (int64_t k = vectors * d_panel; k < depth; k += 2) d_pack_element(to + k / 2, from + k, 1, depth - k);
  }
}
static void d_pack_panel(const d_bf16* from, int64_t row_step, int64_t column_step, int64_t depth,
                     int64_t columns, d_bf16_pair* to) {
  if (row_step == 1) return d_transpose(from, column_step, columns, depth, to, d_panel);
  for (int64_t k = 0; k < depth; k += 2, from += 2 * row_step, to += d_panel)
    for (int64_t j = 0; j < columns; ++j)
      d_pack_element(to + j, from + j * column_step, row_step, depth - k);
}
// Panels of a row-major operand; each pair of rows is read once.
static void d_pack_row_major(const d_bf16* from, int64_t row_step, int64_t depth, int64_t columns,
                           d_bf16_pair* to) {
  const int64_t packed_depth = d_packed_depth<d_bf16>(depth), whole = columns / d_panel * d_panel;
  if (whole < columns) d_clear(to, whole * packed_depth, (whole + d_panel) * packed_depth);
  for (int64_t k = 0; k < packed_depth; ++k, from += 2 * row_step)
    for (int64_t j = 0; j < columns; j += d_panel) {
      d_bf16_pair* panel = to + j * packed_depth + k * d_panel;
      d_prefetch_ahead(from + j, row_step);
      d_prefetch_ahead(from + row_step + j, row_step);
      const int64_t n = d_min(columns - j, d_panel);
      if (2 * k + 1 < depth)
        d_interleave_rows(from + j, from + row_step + j, n, panel);
      else
        for (int64_t i = 0; i < n; ++i) d_pack_element(panel + i, from + j + i, 1, 1);
    }
}
#endif

// Packs panels of d_panel columns, each row after row; the last panel is padded with zeros. Packed elements are
// those of T, which the numbers of type W stand for.
template <class W, class T = W>
static void d_pack_panels(const W* from, int64_t row_step, int64_t column_step, int64_t depth,
                     int64_t columns, d_packed<T>* to) {
  const int64_t size = d_packed_depth<T>(depth) * d_panel;
  if constexpr (sizeof(W) == sizeof(float))
    if (column_step == 1) return d_pack_row_major(from, row_step, depth, columns, to);
#if defined(__AVX512BF16__)
  if constexpr (d_pack_factor<d_packed<T>> == 2 && sizeof(W) == 2)
    if (column_step == 1) return d_pack_row_major(from, row_step, depth, columns, to);
#endif
  for (int64_t j = 0; j < columns; j += d_panel, to += size) {
    const int64_t width = d_min(columns - j, d_panel);
    if (width < d_panel) d_clear(to, 0, size);
    if constexpr (sizeof(W) == 1)  // the bytes of a column are adjacent
      d_transpose(from + j * column_step, column_step, width, depth, to, d_panel);
    else
      d_pack_panel(from + j * column_step, row_step, column_step, depth, width, to);
  }
}
