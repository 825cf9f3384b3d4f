// Attention without a score matrix in memory. Scores and sums are float;
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
