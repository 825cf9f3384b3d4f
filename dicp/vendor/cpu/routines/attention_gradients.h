// The gradients of attention, without a score matrix in memory.
// Dao et al., "FlashAttention-2" (2023).
#pragma once
#include "attention.h"

// Keys whose products are summed in registers in the gradients of queries. Tasks have whole groups of
// them, so that sums are rounded alike however many tasks there are.
template <class C> constexpr int64_t d_key_group = d_uses_tiles<C> ? 160 : 96;
template <class C> constexpr bool d_are_key_groups =
    d_key_block % d_key_group<C> == 0 && d_key_group<C> % d_whole_tiles<C> == 0;
static_assert(d_are_key_groups<float> && d_are_key_groups<d_packed<d_bf16>>, "groups of keys");

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
      // The products by columns of weights compute whole tiles of keys; transposing them takes whole vectors.
      const int64_t tile_keys = d_round_up(n, d_tile_shape<packed>::rows);
      const int64_t whole = d_round_up(tile_keys > padded ? tile_keys : padded, d_lanes);
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
          tile_keys, width, packed_rows, transposed, grad_panels, packed_rows * d_panel, d_panel,
          grad_values + (from - lower) * width, width, true);
      transposed = d_transpose_left_operand(grad_scores, count, whole, transposed_memory);
      d_multiply_tiles<transposed_strides::row, transposed_strides::step>(
          tile_keys, depth, packed_rows, transposed, query_panels, packed_rows * d_panel, d_panel,
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
