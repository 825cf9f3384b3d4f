// Attention, forward and backward, without a score matrix in memory. Scores and sums are float;
// exponentials are converted to the tensors' type before they are multiplied.
// Dao et al., "FlashAttention" (2022) and "FlashAttention-2" (2023).
#pragma once
#include "exp.h"
#include "gemm.h"

constexpr int64_t d_key_block = 480;  // keys whose scores are in memory at a time
constexpr int64_t d_max_head_size = 256;
// The step between rows of queries: a power of two would map all rows to few cache sets.
constexpr int64_t d_query_step = d_max_head_size + 16;
// A block of keys is a whole number of tiles both as columns and as rows.
template <class C>
constexpr int64_t d_whole_tiles = d_panel % d_tile_shape<C>::rows ? 3 * d_panel : d_panel;
static_assert(d_whole_tiles<float> % d_tile_height == 0 && d_key_block % d_whole_tiles<float> == 0,
              "tiles of keys");
// Keys whose products are summed in registers in the gradients of queries. Tasks have whole groups of
// them, so that sums are rounded alike however many tasks there are.
template <class C> constexpr int64_t d_key_group = d_uses_tiles<C> ? 160 : 96;
template <class C> constexpr bool d_are_key_groups =
    d_key_block % d_key_group<C> == 0 && d_key_group<C> % d_whole_tiles<C> == 0;
static_assert(d_are_key_groups<float> && d_are_key_groups<d_packed<d_bf16>>, "groups of keys");

// What a mask's values are: numbers that are added to the scores, or whether a key is visible. The
// scores of other keys are replaced by -inf or by the lowest number.
enum d_mask_values { d_mask_float, d_mask_narrow, d_mask_bool, d_mask_lowest };

// The bits of a magnitude, which grow with it. Those of NaN are above infinity's.
d_inline uint16_t d_magnitude_bits(d_bf16 x) { return x & 0x7fffu; }
d_inline uint32_t d_magnitude_bits(float x) { return d_size_bits(x); }
// Those of 2^40: products of numbers up to it, and sums of as many as a head has, are finite.
constexpr uint32_t d_moderate_bits = 0x53800000u;
template <class T> constexpr uint32_t d_moderate_bits_of = d_moderate_bits >> (32 - 8 * sizeof(T));

template <class T> struct d_head_tensor {
  T* data;
  int64_t batch, head, row;
  T* at(int64_t b, int64_t h) const { return data + b * batch + h * head; }
  // Whether no number is NaN, infinite or so large that products of it may be infinite.
  bool is_moderate(int64_t batches, int64_t heads, int64_t rows, int64_t width) const {
    int64_t large = 0;
#pragma omp parallel for collapse(2) reduction(+ : large) if (batches * heads > 1)
    for (int64_t b = 0; b < batches; ++b)
      for (int64_t h = 0; h < heads; ++h) {
        decltype(d_magnitude_bits(T())) largest[d_max_head_size] = {};  // of each column
        for (int64_t i = 0; i < rows; ++i) {
          const T* x = at(b, h) + i * row;
#pragma omp simd
          for (int64_t j = 0; j < width; ++j) {
            const auto bits = d_magnitude_bits(x[j]);
            largest[j] = bits > largest[j] ? bits : largest[j];
          }
        }
        for (int64_t j = 0; j < width; ++j) large += largest[j] > d_moderate_bits_of<T>;
      }
    return !large;
  }
};

// Whether a mask of booleans, or of numbers that are added, gives a key the weight 0.
d_inline bool d_hides(uint8_t visible) { return !visible; }
template <class M> d_inline bool d_hides(M added) { return d_to_float(added) == -d_inff; }
// Whether a mask hides all of the keys that one cache line of it is about.
template <class M> constexpr int64_t d_mask_line = 64 / sizeof(M);
template <class M> d_inline bool d_hides_line(const M* mask) {
  int visible = 0;
#pragma omp simd reduction(+ : visible)
  for (int64_t j = 0; j < d_mask_line<M>; ++j) visible += !d_hides(mask[j]);
  return !visible;
}
// The first key that a mask leaves visible, or `n`.
template <class M> d_inline int64_t d_first_visible(const M* mask, int64_t n) {
  int64_t j = 0;
  while (j + d_mask_line<M> <= n && d_hides_line(mask + j)) j += d_mask_line<M>;
  while (j < n && d_hides(mask[j])) ++j;
  return j;
}
// The position after the last key from `from` on that a mask leaves visible, or `from`.
template <class M> d_inline int64_t d_visible_end(const M* mask, int64_t from, int64_t n) {
  while (n - d_mask_line<M> >= from && d_hides_line(mask + n - d_mask_line<M>)) n -= d_mask_line<M>;
  while (n > from && d_hides(mask[n - 1])) --n;
  return n;
}

// The lanes of x where those of a comparison are true, and elsewhere those of y.
d_inline d_vec d_select(d_lane_indices test, d_vec x, d_vec y) {
  return test ? x : y;
}
// Which lanes are among the first n.
d_inline d_lane_indices d_lanes_before(int64_t n) {
  static const int32_t numbers[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  d_lane_indices all;
  __builtin_memcpy(&all, numbers, sizeof all);
  return all < (d_lane_indices{} + (int32_t)n);
}
// to[i] = all lanes of of[i], combined; `count` is rounded up to whole vectors.
template <class F>
d_inline void d_combine_lanes(const d_vec* of, int64_t count, float* to, const F& combine) {
  for (int64_t i = 0; i < count; i += d_lanes) {
    d_words square[d_lanes];
    __builtin_memcpy(square, of + i, sizeof square);
    d_transpose_words(square);
    d_vec all = (d_vec)square[0];
#pragma GCC unroll 16
    for (int j = 1; j < d_lanes; ++j) all = combine(all, (d_vec)square[j]);
    *(d_vec*)(to + i) = all;
  }
}
// `d_exp_weight` of each lane.
d_inline d_vec d_exp_weights(d_vec x) {
  const d_vec shift = d_vec{} + (12582912.0f + 127.0f);
  const d_vec moved = x * 1.44269504088896341f + shift, n = moved - shift;
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
  const d_vec r = n * -0.693147182f + x, s = r * r;
#else
  const d_vec r = n * 2.12194440e-4f + (n * -0.693359375f + x), s = r * r;
#endif
  const d_vec a = r * 1.66671167e-1f + 4.99992281e-1f, b = r * 8.31246788e-3f + 4.18906524e-2f;
  const d_vec p = (b * s + a) * s + (r + 1.0f);
  const d_vec scaled = p * (d_vec)((d_words)moved << 23);
  return d_select(x < (d_vec{} - 87.0f), d_vec{}, scaled);
}
// Stores a panel of a left operand's row as packed elements.
d_inline void d_store_packed_panel(float* to, const d_vec* x) { d_store_row(to, x, false); }
#if defined(__AVX512BF16__)
d_inline void d_store_packed_panel(d_bf16_pair* to, const d_vec* x) { d_store_row((d_bf16*)to, x, false); }
#endif
// to[j] = x[j] * factor; x has whole panels.
template <class T> d_inline void d_store_scaled(const float* x, int64_t n, float factor, T* to) {
  // Without instructions that convert to 16 bits, a loop is vectorized as integer arithmetic.
  constexpr bool by_loop = sizeof(T) == 2 && d_pack_factor<d_packed<T>> == 1;
  if constexpr (by_loop) return d_copy(x, 0, 1, 1, n, to, 0, factor);
  for (int64_t j = 0; j < n; j += d_panel) {
    const d_vec *from = (const d_vec*)(x + j), both[2] = {from[0] * factor, from[1] * factor};
    if (n - j >= d_panel) d_store_row(to + j, both, false);
    else d_store_partial_row(to + j, both, n - j);
  }
}
// exp(x - base) of whole panels, as packed elements in place. Returns the sums of the lanes.
template <class C> d_inline d_vec d_exp_and_pack(float* x, int64_t n, float base, const C*) {
  d_vec total = {};
  for (int64_t j = 0; j < n; j += d_panel) {
    const d_vec* from = (const d_vec*)(x + j);
    const d_vec both[2] = {d_exp_weights(from[0] - base), d_exp_weights(from[1] - base)};
    total += both[0] + both[1];
    d_store_packed_panel((C*)x + j / d_pack_factor<C>, both);
  }
  return total;
}

struct d_key_range {
  int64_t first, end;
};
constexpr int64_t d_floats_of_range = sizeof(d_key_range) / sizeof(float);

// The sizes in the order of the arguments, then the steps of every tensor.
template <class T> struct d_attention {
  static constexpr int64_t block = d_tile_shape<d_packed<T>>::block_rows;
  int64_t batches, heads, groups, rows, keys, depth, width, causal;
  float scale;
  d_head_tensor<const T> q, k, v;
  const void* mask;
  int64_t mask_values;  // a d_mask_values; the narrow ones are of type T
  bool skips_hidden_keys = true;    // whether keys after the last query of a block are left out
  bool skips_masked_keys = false;   // whether those are that the mask hides from all of a block
  int64_t mask_batch, mask_head, mask_row, mask_key;
  const int64_t* rest;
  d_key_range* ranges = nullptr;  // what the mask leaves visible to each block of rows

  d_attention(void** args, const int64_t* sizes, bool masked) {
    batches = sizes[0], heads = sizes[1], groups = sizes[1] / sizes[2], rows = sizes[3];
    keys = sizes[4], depth = sizes[5], width = sizes[6], causal = sizes[7];
    double number;
    __builtin_memcpy(&number, &sizes[8], sizeof number);
    scale = (float)number, mask_values = sizes[9];
    rest = sizes + 10;
    q = next<const T>(args[0]), k = next<const T>(args[1]), v = next<const T>(args[2]);
    mask = nullptr;
    mask_batch = mask_head = mask_row = mask_key = 0;
    if (masked) {
      mask = args[3];
      mask_batch = rest[0], mask_head = rest[1], mask_row = rest[2], mask_key = rest[3];
      rest += 4;
    }
  }
  template <class E> d_head_tensor<E> next(void* data) {
    const d_head_tensor<E> found = {(E*)data, rest[0], rest[1], rest[2]};
    rest += 3;
    return found;
  }
  bool is_moderate() const {
    return q.is_moderate(batches, heads, rows, depth) &&
           k.is_moderate(batches, heads / groups, keys, depth) &&
           v.is_moderate(batches, heads / groups, keys, width);
  }
  // A mask beside the causal flag hides the keys after each query, and no others. Where all numbers
  // are moderate, these keys change nothing and are skipped; elsewhere the mask is applied.
  void choose_mask(bool moderate) {
    if (moderate)
      mask = nullptr;
    else
      causal = 0;
  }
  int64_t padded_keys() const { return d_round_up(keys, d_panel); }
  int64_t padded_depth() const { return d_round_up(depth, d_panel); }
  int64_t padded_width() const { return d_round_up(width, d_panel); }
  // Number of keys that are visible to rows before `end`.
  int64_t visible_end(int64_t end) const { return causal && skips_hidden_keys ? d_min(end, keys) : keys; }
  // The blocks of rows for which `find_ranges` finds the visible keys: none where the mask cannot hide tiles
  // of keys from a block. One that is the only block sees most keys.
  int64_t range_blocks() const {
    if (causal || !mask || mask_values == d_mask_lowest || mask_key != 1 || rows <= block) return 0;
    return (mask_batch ? batches : 1) * (mask_head ? heads : 1) * blocks_of_mask();
  }
  int64_t blocks_of_mask() const { return mask_row ? (rows + block - 1) / block : 1; }
  d_key_range& range_of(int64_t b, int64_t h, int64_t first) const {
    const int64_t at = (mask_batch ? b : 0) * (mask_head ? heads : 1) + (mask_head ? h : 0);
    return ranges[at * blocks_of_mask() + (mask_row ? first / block : 0)];
  }
  // Finds these keys and keeps them in `to`. Whether some block sees fewer tiles of keys than there are.
  bool find_ranges(d_key_range* to) {
    ranges = to;
    bool hides = false;
    for (int64_t b = 0; b < (mask_batch ? batches : 1); ++b)
      for (int64_t h = 0; h < (mask_head ? heads : 1); ++h)
        for (int64_t first = 0; first < (mask_row ? rows : 1); first += block) {
          const d_key_range seen = visible_range(b, h, first, d_min(rows - first, block));
          range_of(b, h, first) = seen;
          hides |= seen.first || seen.end + d_whole_tiles<d_packed<T>> <= keys;
        }
    return hides;
  }
  // The keys that the mask leaves visible to some of these rows, from the beginning of a tile.
  d_key_range visible_range(int64_t b, int64_t h, int64_t first, int64_t count) const {
    if (mask_values == d_mask_bool) return visible_range((const uint8_t*)mask, b, h, first, count);
    if (mask_values == d_mask_narrow) return visible_range((const T*)mask, b, h, first, count);
    return visible_range((const float*)mask, b, h, first, count);
  }
  template <class M>
  d_key_range visible_range(const M* values, int64_t b, int64_t h, int64_t first, int64_t count) const {
    d_key_range seen = {keys, 0};
    for (int64_t i = first; i < first + (mask_row ? count : 1); ++i) {
      const M* row = values + mask_at(b, h, i, 0);
      seen.first = d_first_visible(row, seen.first);
      seen.end = d_visible_end(row, seen.end, keys);
    }
    seen.first = seen.first / d_whole_tiles<d_packed<T>> * d_whole_tiles<d_packed<T>>;
    return seen;
  }
  // The keys that change something for some of these rows.
  d_key_range key_range(int64_t b, int64_t h, int64_t first, int64_t count) const {
    return skips_masked_keys ? range_of(b, h, first) : d_key_range{0, visible_end(first + count)};
  }
  // Scales the scores of one row and adds its mask, in place.
  template <class M> void add(const M* m, float* score, int64_t n) const {
    if (mask_key == 1) {
#pragma omp simd
      for (int64_t j = 0; j < n; ++j) score[j] = score[j] * scale + d_to_float(m[j]);
    } else {
      for (int64_t j = 0; j < n; ++j) score[j] = score[j] * scale + d_to_float(m[j * mask_key]);
    }
  }
  // Scales the visible numbers of one row and replaces the others, in place.
  void replace_hidden(const uint8_t* visible, float* x, int64_t n, float factor, float other) const {
    if (mask_key == 1) {
#pragma omp simd
      for (int64_t j = 0; j < n; ++j) {
        const float scaled = x[j] * factor;
        x[j] = visible[j] ? scaled : other;
      }
    } else {
      for (int64_t j = 0; j < n; ++j) x[j] = visible[j * mask_key] ? x[j] * factor : other;
    }
  }
  // Adds the mask, if there is one; returns the factor by which the caller must scale the scores.
  float add_mask(float* score, int64_t b, int64_t h, int64_t row, int64_t from, int64_t n) const {
    if (!mask) return scale;
    const int64_t at = mask_at(b, h, row, from);
    if (replaces())
      replace_hidden((const uint8_t*)mask + at, score, n, scale,
           mask_values == d_mask_bool ? -d_inff : -__FLT_MAX__);
    else if (mask_values == d_mask_narrow)
      add((const T*)mask + at, score, n);
    else
      add((const float*)mask + at, score, n);
    return 1;
  }
  // Scales the scores of a row that are visible, adds the mask, and fills a whole panel up with -inf. Returns
  // the largest in each lane; NaN comes through the sum.
  d_vec scale_and_mask(float* score, int64_t b, int64_t h, int64_t row, int64_t from, int64_t n) const {
    const d_vec factor = d_vec{} + scale;
    if (!mask) return map_row(score, n, [=](d_vec x, int64_t, int64_t) { return x * factor; });
    if (mask_key != 1 || mask_values == d_mask_lowest) {
      add_mask(score, b, h, row, from, n);
      return map_row(score, n, [](d_vec x, int64_t, int64_t) { return x; });
    }
    const int64_t at = mask_at(b, h, row, from);
    if (mask_values == d_mask_float) return add_mask_row((const float*)mask + at, score, n);
    if (mask_values == d_mask_narrow) return add_mask_row((const T*)mask + at, score, n);
    const int8_t* visible = (const int8_t*)mask + at;
    return map_row(score, n, [=](d_vec x, int64_t j, int64_t count) {
      return d_select(load_mask(visible + j, count) != d_vec{}, x * factor, d_vec{} - d_inff);
    });
  }
  template <class M> d_vec add_mask_row(const M* values, float* score, int64_t n) const {
    const d_vec factor = d_vec{} + scale;
    return map_row(score, n, [=](d_vec x, int64_t j, int64_t count) {
      return x * factor + load_mask(values + j, count);
    });
  }
  // A vector of mask values, of which `count` are in memory.
  template <class M> static d_vec load_mask(const M* at, int64_t count) {
    if (count >= d_lanes) return d_load_floats(at);
    M part[d_lanes] = {};
    for (int64_t j = 0; j < count; ++j) part[j] = at[j];
    return d_load_floats((const M*)part);
  }
  template <class F> static d_vec map_row(float* score, int64_t n, const F& masked) {
    d_vec largest = d_vec{} - d_inff;
    int64_t j = 0;
    for (; j + d_lanes <= n; j += d_lanes) {
      d_vec& at = *(d_vec*)(score + j);
      at = masked(at, j, d_lanes);
      largest = d_select(at > largest, at, largest);
    }
    for (; j % d_panel || j < n; j += d_lanes) {
      d_vec& at = *(d_vec*)(score + j);
      const d_vec other = d_vec{} - d_inff;
      at = j < n ? d_select(d_lanes_before(n - j), masked(at, j, n - j), other) : other;
      largest = d_select(at > largest, at, largest);
    }
    return largest;
  }
  bool replaces() const { return mask_values == d_mask_bool || mask_values == d_mask_lowest; }
  // No gradient flows to a score that the mask replaced, also where its row is NaN.
  void clear_hidden(float* grad_score, int64_t b, int64_t h, int64_t row, int64_t from, int64_t n) const {
    if (!mask || !replaces()) return;
    replace_hidden((const uint8_t*)mask + mask_at(b, h, row, from), grad_score, n, 1, 0);
  }
  int64_t mask_at(int64_t b, int64_t h, int64_t row, int64_t key) const {
    return b * mask_batch + h * mask_head + row * mask_row + key * mask_key;
  }
};

// Converts a row of floats to packed elements of a left operand, in place; `n` is a multiple of a vector of
// 16-bit numbers.
d_inline void d_pack_row_in_place(float*, int64_t, float*) {}
// The left operand transposed: rows, d_key_block floats apart, become columns of packed elements, in place or
// in `to`.
template <class C> struct d_transposed_strides { static constexpr int row = 1, step = d_key_block; };
d_inline const float* d_transpose_left_operand(const float* from, int64_t, int64_t, float*) { return from; }
#if defined(__AVX512BF16__)
d_inline void d_pack_row_in_place(float* row, int64_t n, d_bf16_pair* to) {
  for (int64_t j = 0; j < n; j += d_panel)
    d_store_row((d_bf16*)(to + j / 2), (const d_vec*)(row + j), false);
}
// Packed elements of two rows, for d_lanes columns.
d_inline d_words d_load_row_pair(const float* at) {
  return d_interleaved_bf16(*(const d_vec*)at, *(const d_vec*)(at + d_key_block));
}
#if defined(D_TILES)
template <> struct d_transposed_strides<d_bf16_pair> {
  static constexpr int row = d_tile_shape<d_bf16_pair>::block_rows / 2, step = 1;
};
static const d_bf16_pair* d_transpose_left_operand(const float* from, int64_t rows, int64_t n,
                                                   d_bf16_pair* to) {
  for (int64_t i = 0; i < rows; i += 2 * d_lanes)
    for (int64_t j = 0; j < n; j += d_lanes) {
      d_words square[d_lanes];
      for (int64_t k = 0; k < d_lanes; ++k) square[k] = d_load_row_pair(from + (i + 2 * k) * d_key_block + j);
      d_transpose_words(square);
      d_store_square(square, to + j * d_transposed_strides<d_bf16_pair>::row + i / 2,
                     d_transposed_strides<d_bf16_pair>::row);
    }
  return to;
}
#else
static const d_bf16_pair* d_transpose_left_operand(const float* from, int64_t rows, int64_t n,
                                                   d_bf16_pair* to) {
  for (int64_t i = 0; i < rows; i += 2)
    for (int64_t j = 0; j < n; j += d_lanes)
      *(d_words*)(to + i / 2 * d_key_block + j) = d_load_row_pair(from + i * d_key_block + j);
  return to;
}
#endif
#endif

// The largest of `start` and x * factor.
d_inline float d_row_max(const float* x, int64_t n, float factor, float start) {
  float row_max = start;
#pragma omp simd reduction(max : row_max)
  for (int64_t j = 0; j < n; ++j) row_max = x[j] * factor > row_max ? x[j] * factor : row_max;
  return row_max;
}
// x = exp(x * factor - base), and the sum of it; NaN and infinite scores come through the sum.
d_inline float d_exp_and_sum(float* x, int64_t n, float factor, float base) {
  float total = 0;
#pragma omp simd reduction(+ : total)
  for (int64_t j = 0; j < n; ++j) {
    x[j] = d_exp_weight(x[j] * factor - base);
    total += x[j];
  }
  return total;
}
d_inline void d_scale_row(float* x, int64_t n, float factor) {
#pragma omp simd
  for (int64_t j = 0; j < n; ++j) x[j] *= factor;
}

// One block of rows of one head: out (rows by width) and the logarithm of every row's sum.
template <class T>
static void d_attention_rows(const d_attention<T>& a, const d_packed<T>* keys, const d_packed<T>* values,
                          float* workspace, int64_t b, int64_t h, int64_t first, T* out, int64_t out_row,
                          float* sums, int64_t sums_row) {
  typedef d_packed<T> packed;
  constexpr int64_t block = d_tile_shape<packed>::block_rows;
  const int64_t count = d_min(a.rows - first, block), depth = d_packed_depth<T>(a.depth);
  const int64_t tiles = d_round_up(count, d_tile_shape<packed>::rows), width = a.padded_width();
  packed* queries = (packed*)workspace;
  float* scores = workspace + block * d_query_step;
  float* result = scores + block * d_key_block;
  float row_max[block], row_sum[block], base[block], of_row[block];
  d_vec lanes[block] = {};
  d_pack_rows(a.q.at(b, h) + first * a.q.row, a.q.row, 1, count, a.depth, queries, d_query_step);
  for (int64_t i = 0; i < block; ++i) row_max[i] = -d_inff, row_sum[i] = 0;
  const d_key_range seen = a.key_range(b, h, first, count);
  const int64_t start = seen.first, end = seen.end;
  for (int64_t from = start; from < end; from += d_key_block) {
    const int64_t n = d_min(end - from, d_key_block), padded = d_round_up(n, d_panel);
    d_multiply_tiles<d_query_step, 1>(tiles, padded, depth, queries, keys + from * depth, depth * d_panel,
                             d_panel, scores, d_key_block, false);
    const auto visible = [&](int64_t i) {
      const int64_t last = a.causal ? d_min(n, first + i + 1 - from) : n;
      return last > 0 ? last : 0;
    };
    for (int64_t i = 0; i < count; ++i)
      lanes[i] = a.scale_and_mask(scores + i * d_key_block, b, h, first + i, from, visible(i));
    d_combine_lanes(lanes, count, of_row, [](d_vec x, d_vec y) { return d_select(x > y, x, y); });
    for (int64_t i = 0; i < count; ++i) {
      const float new_max = of_row[i] > row_max[i] ? of_row[i] : row_max[i];
      base[i] = new_max == -d_inff ? 0 : new_max;
      if (from != start) {
        const float rescale = d_exp(row_max[i] - base[i]);
        row_sum[i] *= rescale;
        if (rescale != 1.0f) d_scale_row(result + i * width, width, rescale);
      }
      row_max[i] = new_max;
    }
    for (int64_t i = 0; i < count; ++i) {
      float* score = scores + i * d_key_block;
      const int64_t whole = d_round_up(visible(i), d_panel);
      lanes[i] = d_exp_and_pack(score, whole, base[i], queries);
      d_clear((packed*)score, whole / d_pack_factor<packed>, padded / d_pack_factor<packed>);
    }
    d_combine_lanes(lanes, count, of_row, [](d_vec x, d_vec y) { return x + y; });
    for (int64_t i = 0; i < count; ++i) row_sum[i] += of_row[i];
    d_multiply_tiles<d_key_block, 1>(tiles, width, d_packed_depth<T>(n), (const packed*)scores,
                       values + from / d_pack_factor<packed> * d_panel, d_packed_depth<T>(a.keys) * d_panel,
                       d_panel, result, width, from != start);
  }
  for (int64_t i = 0; i < count; ++i) {
    const float factor = row_sum[i] == 0 ? 0 : 1 / row_sum[i];
    T* to = out + (first + i) * out_row;
    if (!end) d_clear(to, 0, a.width);
    else d_store_scaled(result + i * width, a.width, factor, to);
    sums[(first + i) * sums_row] = row_max[i] + d_log(row_sum[i]);
  }
}

// The log-sum-exp beyond which its rounding error counts: a weight made from it is off by as much.
constexpr float d_large_logsumexp = 16;
// The same for a row of more keys than are held at a time, which costs a pass of its own.
template <class T> constexpr float d_large_logsumexp_of_blocks = sizeof(T) == 4 ? 32 : 4096;
// One below this, of finite mask values: the graph has divided the row's gradient by the number of
// its keys, each of which has the weight 1 (dynamo_bridge/attention/training.py).
constexpr float d_hidden_row_logsumexp = -134217728;
// Weights of a row and the gradients of its scores from all its scores and the gradients of its
// weights, in place. A weight beside which the others vanish is 1, and its gradient 0, exactly.
static void d_softmax_gradient(float* weight, float* grad_score, int64_t n, float factor) {
  const float new_max = d_row_max(weight, n, factor, -d_inff);
  const float inverse = 1 / d_exp_and_sum(weight, n, factor, new_max == -d_inff ? 0 : new_max);
  float delta = 0;
#pragma omp simd reduction(+ : delta)
  for (int64_t j = 0; j < n; ++j) {
    weight[j] *= inverse;
    delta += weight[j] * grad_score[j];
  }
#pragma omp simd
  for (int64_t j = 0; j < n; ++j) grad_score[j] = weight[j] * (grad_score[j] - delta);
}

// What the gradient of a row with large scores needs of all of them, a block of keys after another.
struct d_online_statistics {
  float row_max, row_sum, delta;
  // Adds the scores, and the gradients of their weights: both stay as they are.
  void add(const float* score, const float* grad_score, int64_t n, float factor) {
    const float new_max = d_row_max(score, n, factor, row_max);
    const float base = new_max == -d_inff ? 0 : new_max, rescale = d_exp(row_max - base);
    float sum = 0, product = 0;
#pragma omp simd reduction(+ : sum, product)
    for (int64_t j = 0; j < n; ++j) {
      const float weight = d_exp_weight(score[j] * factor - base);
      sum += weight;
      product += weight * grad_score[j];
    }
    row_max = new_max, row_sum = row_sum * rescale + sum, delta = delta * rescale + product;
  }
};

template <class T>
static void d_attention_forward(void** args, const int64_t* sizes, bool masked) {
  typedef d_packed<T> packed;
  d_attention<T> a(args, sizes, masked);
  const bool chooses_mask = a.causal && a.mask;
  if (chooses_mask) a.choose_mask(a.is_moderate());
  auto out = a.template next<T>(args[3 + masked]);
  auto sums = a.template next<float>(args[4 + masked]);
  if (a.rows == 1 && !a.causal) {  // heads that share keys become the rows of one head
    const auto join = [&](auto& x) { x.row = x.head, x.head *= a.groups; };
    join(a.q), join(out), join(sums);
    a.mask_row = a.mask_head, a.mask_head *= a.groups;
    a.rows = a.groups, a.heads /= a.groups, a.groups = 1;
  }
  constexpr int64_t block = d_tile_shape<packed>::block_rows;
  const int64_t blocks = (a.rows + block - 1) / block, of_group = a.groups * blocks;
  const int64_t pairs = a.batches * (a.heads / a.groups), threads = d_threads();
  // Keys and values are packed once per task: as few tasks as keep every thread busy.
  const int64_t wanted = pairs >= 4 * threads ? 1 : (4 * threads + pairs - 1) / pairs;
  const int64_t parts = d_min(of_group, wanted), tasks = pairs * parts;
  const int64_t of_keys = a.padded_keys() * d_packed_depth<T>(a.depth);
  const int64_t packed_size = of_keys + d_packed_depth<T>(a.keys) * a.padded_width();
  const int64_t of_thread = packed_size + block * (d_query_step + d_key_block + a.padded_width());
  const int64_t of_ranges = chooses_mask ? 0 : a.range_blocks() * d_floats_of_range;
  const d_workspaces workspaces(of_thread, threads + (of_ranges + of_thread - 1) / of_thread);
  if (!workspaces.data) return;
  d_key_range* ranges = (d_key_range*)(workspaces.data + threads * workspaces.count);
  a.skips_masked_keys = of_ranges && a.find_ranges(ranges) && a.is_moderate();
#pragma omp parallel if (tasks > 1)
  {
    const d_tile_scope tile_scope;
    float* start = workspaces.of_thread();
    packed *keys = (packed*)start, *values = keys + of_keys;
    float* workspace = start + packed_size;
#pragma omp for schedule(dynamic)
    for (int64_t task = 0; task < tasks; ++task) {
      const int64_t pair = task / parts, part = task % parts;
      const int64_t b = pair / (a.heads / a.groups), kv_head = pair % (a.heads / a.groups);
      d_pack_panels(a.k.at(b, kv_head), 1, a.k.row, a.depth, a.keys, keys);
      d_pack_panels(a.v.at(b, kv_head), a.v.row, 1, a.keys, a.width, values);
      for (int64_t k = part * of_group / parts; k < (part + 1) * of_group / parts; ++k) {
        const int64_t h = kv_head * a.groups + k / blocks;
        d_attention_rows(a, keys, values, workspace, b, h, k % blocks * block, out.at(b, h), out.row,
                      sums.at(b, h), sums.row);
      }
    }
  }
}

// How the keys of a head are divided among tasks: the groups of keys in each task, and the tasks.
// They are the fewest that leave the threads idle for a fifth of the time at most.
template <class C> struct d_key_partition {
  int64_t groups, parts;
  d_key_partition(int64_t heads, int64_t keys, int64_t threads) {
    const int64_t all = keys > 0 ? (keys + d_key_group<C> - 1) / d_key_group<C> : 1;
    parts = threads > 1 ? d_balanced_parts(heads, 1, all, threads) : 1;
    groups = (all + parts - 1) / parts;
    parts = (all + groups - 1) / groups;
  }
  int64_t step() const { return groups * d_key_group<C>; }
};

// The tasks of one head, which divide its keys, add to the gradient of a block of queries in the order
// of the keys. Tasks begin in that order, so the first of those that have not ended never waits.
struct d_key_order {
  int64_t* ended;  // for each task, the blocks of queries whose gradient has its part
  bool waits;      // whether there are tasks before this one
  void wait(int64_t block) const {
    if (!waits) return;
    for (int64_t looks = 0; __atomic_load_n(ended - 1, __ATOMIC_ACQUIRE) <= block; ++looks) d_spin_wait(looks);
  }
  void end(int64_t block) const { __atomic_store_n(ended, block + 1, __ATOMIC_RELEASE); }
};

// The gradient of a block of queries, and what the block adds to the gradients of its head's keys and
// values.
template <class T> struct d_attention_gradient {
  typedef d_packed<T> packed;
  typedef d_transposed_strides<packed> transposed_strides;
  const d_attention<T>& a;
  d_head_tensor<const T> grad, out;
  d_head_tensor<const float> sums;
  d_head_tensor<T> grad_q;
  const packed *keys_transposed, *values_transposed, *keys;
  float *grad_keys, *grad_values, *workspace;
  // The keys of the task, and the gradients of queries that the tasks of a head share, if there are
  // several.
  int64_t lower = 0, upper = a.keys;
  float* shared_result = nullptr;

  static constexpr int64_t block = d_tile_shape<packed>::block_rows;
  static constexpr int64_t lines = block * d_query_step, scores = block * d_key_block;
  static constexpr int64_t needed = 5 * lines + 3 * scores;

  // Whether added mask values absorb the scores of a row with this log-sum-exp.
  bool absorbed(float base) const { return base <= d_hidden_row_logsumexp && !a.replaces(); }
  // Whether the weights of a row that sees `end` keys are made from all its scores and not from its
  // log-sum-exp.
  bool is_exact(float base, int64_t end) const {
    return d_abs(base) > (end > d_key_block ? d_large_logsumexp_of_blocks<T> : d_large_logsumexp) &&
           !absorbed(base);
  }
  bool has_exact_rows(int64_t b, int64_t h) const {
    for (int64_t i = 0; i < a.rows; ++i) {
      const float sum = sums.at(b, h)[i * sums.row];
      const int64_t last = d_min(i / block * block + block, a.rows);
      if (sum != -d_inff && is_exact(sum, a.visible_end(last))) return true;
    }
    return false;
  }

  void rows(int64_t b, int64_t h, int64_t first, const d_key_order& order, int64_t number) const {
    const int64_t count = d_min(a.rows - first, block), packed_rows = d_packed_depth<T>(count);
    const int64_t tiles = d_round_up(count, d_tile_shape<packed>::rows);
    const int64_t depth = a.padded_depth(), width = a.padded_width();
    const int64_t in_depth = d_packed_depth<T>(a.depth), in_width = d_packed_depth<T>(a.width);
    const int64_t all = a.visible_end(first + count);
    const d_key_range seen = a.key_range(b, h, first, count);
    const int64_t start = seen.first / d_key_group<packed> * d_key_group<packed>;
    const int64_t begin = start > lower ? start : lower, end = d_min(seen.end, upper);
    if (end <= begin && (lower || seen.end)) return order.end(number);
    packed *queries = (packed*)workspace, *grads = queries + lines;
    packed *query_panels = grads + lines, *grad_panels = query_panels + lines;
    float *own_result = workspace + 4 * lines, *weights = own_result + lines, *grad_scores = weights + scores;
    packed* transposed_memory = (packed*)(grad_scores + scores);
    float* result = shared_result ? shared_result + number * block * depth : own_result;
    const int64_t result_step = shared_result ? depth : d_query_step;
    float delta[block], base[block], inverse[block];
    bool exact[block];  // whether a row's weights are not made from its log-sum-exp
    const T *query = a.q.at(b, h) + first * a.q.row, *grad_rows = grad.at(b, h) + first * grad.row;
    d_pack_rows(query, a.q.row, 1, count, a.depth, queries, d_query_step);
    d_pack_rows(grad_rows, grad.row, 1, count, a.width, grads, d_query_step);
    d_pack_panels(query, a.q.row, 1, count, a.depth, query_panels);
    d_pack_panels(grad_rows, grad.row, 1, count, a.width, grad_panels);
    for (int64_t i = 0; i < count; ++i) {
      const T *y = out.at(b, h) + (first + i) * out.row, *dy = grad_rows + i * grad.row;
      float total = 0;
#pragma omp simd reduction(+ : total)
      for (int64_t j = 0; j < a.width; ++j) total += d_to_float(y[j]) * d_to_float(dy[j]);
      delta[i] = total;
      const float sum = sums.at(b, h)[(first + i) * sums.row];
      base[i] = sum == -d_inff ? 0 : sum;
    }
    const auto multiply = [&](int64_t from, int64_t padded) {
      const packed *key = keys_transposed + (from - lower) * in_depth;
      const packed *value = values_transposed + (from - lower) * in_width;
      d_multiply_tiles<d_query_step, 1>(tiles, padded, in_depth, queries, key, in_depth * d_panel, d_panel,
                                        weights, d_key_block, false);
      d_multiply_tiles<d_query_step, 1>(tiles, padded, in_width, grads, value, in_width * d_panel, d_panel,
                                        grad_scores, d_key_block, false);
    };
    const auto visible = [&](int64_t i, int64_t from, int64_t n) {
      const int64_t visible_keys = a.causal ? d_min(n, first + i + 1 - from) : n;
      return visible_keys > 0 && i < count ? visible_keys : 0;
    };
    bool many = false;
    for (int64_t i = 0; i < count; ++i) {
      inverse[i] = 1;
      exact[i] = all > d_key_block && is_exact(base[i], all);
      many |= exact[i];
    }
    if (many) {
      d_online_statistics found[block];
      for (int64_t i = 0; i < count; ++i) found[i] = {-d_inff, 0, 0};
      for (int64_t from = begin; from < end; from += d_key_block) {
        const int64_t n = d_min(end - from, d_key_block);
        multiply(from, d_round_up(n, d_panel));
        for (int64_t i = 0; i < count; ++i) {
          const int64_t visible_keys = visible(i, from, n);
          if (!visible_keys || !exact[i]) continue;
          float* score = weights + i * d_key_block;
          const float factor = a.add_mask(score, b, h, first + i, from, visible_keys);
          found[i].add(score, grad_scores + i * d_key_block, visible_keys, factor);
        }
      }
      for (int64_t i = 0; i < count; ++i)
        if (exact[i]) {
          base[i] = found[i].row_max == -d_inff ? 0 : found[i].row_max, inverse[i] = 1 / found[i].row_sum;
          delta[i] = found[i].delta * inverse[i];
        }
    }
    for (int64_t from = begin; from < end; from += d_key_block) {
      const int64_t n = d_min(end - from, d_key_block), padded = d_round_up(n, d_panel);
      const int64_t whole = d_round_up(n, d_whole_tiles<packed>);
      multiply(from, padded);
      for (int64_t i = 0; i < tiles; ++i) {
        float *weight = weights + i * d_key_block, *grad_score = grad_scores + i * d_key_block;
        const int64_t visible_keys = visible(i, from, n);
        const float factor = a.add_mask(weight, b, h, first + i, from, visible_keys);
        if (visible_keys && all <= d_key_block && is_exact(base[i], all)) {
          d_softmax_gradient(weight, grad_score, visible_keys, factor);
        } else {
          // The score of a row's only key has the gradient 0, or NaN: `delta` is rounded in another order.
          if (!from && visible_keys == 1) delta[i] = grad_score[0];
#pragma omp simd
          for (int64_t j = 0; j < visible_keys; ++j) {
            weight[j] = d_exp_weight(weight[j] * factor - base[i]) * inverse[i];
            grad_score[j] = weight[j] * (grad_score[j] - delta[i]);
          }
        }
        a.clear_hidden(grad_score, b, h, first + i, from, visible_keys);
        d_clear(weight, visible_keys, whole);
        // A key that the causal flag hides has the weight 0, which leaves NaN as it is.
        const int64_t hidden = a.skips_hidden_keys || i >= count ? visible_keys : n;
        for (int64_t j = visible_keys; j < hidden; ++j) grad_score[j] = 0 * (grad_score[j] - delta[i]);
        d_clear(grad_score, hidden, whole);
      }
      const packed* transposed = d_transpose_left_operand(weights, count, whole, transposed_memory);
      d_multiply_tiles<transposed_strides::row, transposed_strides::step>(
          whole, width, packed_rows, transposed, grad_panels, packed_rows * d_panel, d_panel,
          grad_values + (from - lower) * width, width, true);
      transposed = d_transpose_left_operand(grad_scores, count, whole, transposed_memory);
      d_multiply_tiles<transposed_strides::row, transposed_strides::step>(
          whole, depth, packed_rows, transposed, query_panels, packed_rows * d_panel, d_panel,
          grad_keys + (from - lower) * depth, depth, true);
      for (int64_t i = 0; i < count; ++i)
        d_pack_row_in_place(grad_scores + i * d_key_block, padded, (packed*)(grad_scores + i * d_key_block));
      if (from == begin) order.wait(number);
      for (int64_t k = 0; k < n; k += d_key_group<packed>)
        d_multiply_tiles<d_key_block, 1>(tiles, depth, d_packed_depth<T>(d_min(n - k, d_key_group<packed>)),
                                         (const packed*)grad_scores + k / d_pack_factor<packed>,
                                         keys + (from - lower + k) / d_pack_factor<packed> * d_panel,
                                         d_packed_depth<T>(upper - lower) * d_panel, d_panel, result,
                                         result_step, from + k != start);
    }
    T* to = grad_q.at(b, h) + first * grad_q.row;
    if (!seen.end)
      for (int64_t i = 0; i < count; ++i) d_clear(to + i * grad_q.row, 0, a.depth);
    else if (end == seen.end)
      d_copy(result, result_step, 1, count, a.depth, to, grad_q.row, a.scale);
    order.end(number);
  }
};

// Arguments: q, k, v, mask if there is one, grad, out, sums, then the three gradients.
template <class T>
static void d_attention_backward(void** args, const int64_t* sizes, bool masked) {
  typedef d_packed<T> packed;
  d_attention<T> a(args, sizes, masked);
  const int at = 3 + masked;
  const auto grad = a.template next<const T>(args[at]);
  const int64_t of_ranges = a.range_blocks() * d_floats_of_range;
  const auto is_moderate = [&] {
    return grad.is_moderate(a.batches, a.heads, a.rows, a.width) && a.is_moderate();
  };
  if (a.causal) {
    a.skips_hidden_keys = is_moderate();
    if (a.mask) a.choose_mask(a.skips_hidden_keys);
  }
  const auto out = a.template next<const T>(args[at + 1]);
  const auto sums = a.template next<const float>(args[at + 2]);
  const auto grad_q = a.template next<T>(args[at + 3]), grad_k = a.template next<T>(args[at + 4]);
  const auto grad_v = a.template next<T>(args[at + 5]);
  const int64_t heads = a.heads / a.groups, pairs = a.batches * heads;
  const int64_t threads = d_threads();
  const d_key_partition<packed> cut(pairs, a.keys, threads);
  const int64_t tasks = pairs * cut.parts;
  const int64_t depth = a.padded_depth(), width = a.padded_width();
  const int64_t keys = d_round_up(a.keys, d_whole_tiles<packed>);
  const int64_t of_depth = keys * d_packed_depth<T>(a.depth), of_width = keys * d_packed_depth<T>(a.width);
  const int64_t of_keys = d_packed_depth<T>(a.keys) * depth;
  const int64_t of_gradients = keys * (depth + width);
  const int64_t of_thread = of_depth + of_width + of_keys + of_gradients + d_attention_gradient<T>::needed;
  // Counters and, where heads are divided, gradients of queries: tasks share them.
  const int64_t blocks =
      a.groups * ((a.rows + d_attention_gradient<T>::block - 1) / d_attention_gradient<T>::block);
  const int64_t of_queries = cut.parts > 1 ? blocks * d_attention_gradient<T>::block * depth : 0;
  const int64_t counters = tasks * sizeof(int64_t) / sizeof(float);
  const int64_t shared = counters + pairs * of_queries;
  const d_workspaces workspaces(of_thread, threads + (shared + of_ranges) / of_thread + 1);
  if (!workspaces.data) return;
  float* common = workspaces.data + threads * workspaces.count;
  a.skips_masked_keys = of_ranges && a.find_ranges((d_key_range*)(common + shared)) && is_moderate();
  int64_t *ended = (int64_t*)common, taken = 0;
  d_clear(ended, 0, tasks);
#pragma omp parallel if (tasks > 1)
  {
    const d_tile_scope tile_scope;
    float* start = workspaces.of_thread();
    packed *keys_transposed = (packed*)start, *values_transposed = keys_transposed + of_depth;
    packed* keys_plain = values_transposed + of_width;
    float* grad_keys = start + of_depth + of_width + of_keys;
    float* grad_values = grad_keys + keys * depth;
    d_attention_gradient<T> of_block = {a,
                                        grad,
                                        out,
                                        sums,
                                        grad_q,
                                        keys_transposed,
                                        values_transposed,
                                        keys_plain,
                                        grad_keys,
                                        grad_values,
                                        grad_values + keys * width};
    // Not a loop of OpenMP, which may give tasks to threads in any order.
    for (int64_t task; (task = __atomic_fetch_add(&taken, 1, __ATOMIC_RELAXED)) < tasks;) {
      const int64_t part = task % cut.parts, pair = task / cut.parts;
      const int64_t b = pair / heads, kv_head = pair % heads;
      int64_t lower = part * cut.step(), upper = d_min(a.keys, lower + cut.step());
      bool whole = cut.parts == 1;
      for (int64_t k = 0; k < a.groups && !whole; ++k)
        whole = of_block.has_exact_rows(b, kv_head * a.groups + k);
      if (whole && part) continue;
      if (whole) lower = 0, upper = a.keys;
      of_block.lower = lower, of_block.upper = upper;
      of_block.shared_result = whole ? nullptr : common + counters + pair * of_queries;
      const d_key_order order = {ended + task, part > 0};
      const T *key = a.k.at(b, kv_head) + lower * a.k.row, *value = a.v.at(b, kv_head) + lower * a.v.row;
      const int64_t n = upper - lower;
      d_pack_panels(key, 1, a.k.row, a.depth, n, keys_transposed);
      d_pack_panels(value, 1, a.v.row, a.width, n, values_transposed);
      d_pack_panels(key, a.k.row, 1, n, a.depth, keys_plain);
      d_clear(grad_keys, 0, d_round_up(n, d_whole_tiles<packed>) * depth);
      d_clear(grad_values, 0, d_round_up(n, d_whole_tiles<packed>) * width);
      for (int64_t k = 0, number = 0; k < a.groups; ++k)
        for (int64_t first = 0; first < a.rows; first += d_attention_gradient<T>::block, ++number)
          of_block.rows(b, kv_head * a.groups + k, first, order, number);
      d_copy(grad_keys, depth, 1, n, a.depth, grad_k.at(b, kv_head) + lower * grad_k.row, grad_k.row, a.scale);
      d_copy(grad_values, width, 1, n, a.width, grad_v.at(b, kv_head) + lower * grad_v.row, grad_v.row);
    }
  }
}
