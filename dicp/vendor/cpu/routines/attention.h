// Attention of float tensors, forward and backward, scores never written to memory as a whole.
// Dao et al., "FlashAttention" (2022) and "FlashAttention-2" (2023).
#pragma once
#include "gemm.h"

constexpr int64_t d_keys = 480;        // keys whose scores are held at a time
constexpr int64_t d_most_depth = 256;  // largest head size
// Rows of queries lie so far apart: a power of two would put all of them into few cache sets.
constexpr int64_t d_query_step = d_most_depth + 16;
// Keys are counted in whole tiles both as columns and as rows.
constexpr int64_t d_whole = d_panel % d_rows ? 3 * d_panel : d_panel;
static_assert(d_whole % d_rows == 0 && d_keys % d_whole == 0, "tiles of keys");

struct d_heads {
  const float* data;
  int64_t batch, head, row;
  const float* at(int64_t b, int64_t h) const { return data + b * batch + h * head; }
};

// Sizes in the order in which the caller hands them over, then the steps of every tensor.
struct d_attention {
  int64_t batches, heads, groups, rows, keys, depth, width, causal;
  float scale;
  d_heads q, k, v;
  const float* mask;
  int64_t mask_batch, mask_head, mask_row, mask_key;
  const int64_t* rest;

  d_attention(void** args, const int64_t* sizes, bool masked) {
    batches = sizes[0], heads = sizes[1], groups = sizes[1] / sizes[2], rows = sizes[3];
    keys = sizes[4], depth = sizes[5], width = sizes[6], causal = sizes[7];
    double number;
    __builtin_memcpy(&number, &sizes[8], sizeof number);
    scale = (float)number;
    rest = sizes + 9;
    q = next(args[0]), k = next(args[1]), v = next(args[2]);
    mask = nullptr;
    mask_batch = mask_head = mask_row = mask_key = 0;
    if (masked) {
      mask = (const float*)args[3];
      mask_batch = rest[0], mask_head = rest[1], mask_row = rest[2], mask_key = rest[3];
      rest += 4;
    }
  }
  d_heads next(const void* data) {
    const d_heads found = {(const float*)data, rest[0], rest[1], rest[2]};
    rest += 3;
    return found;
  }
  int64_t padded_keys() const { return d_round_up(keys, d_panel); }
  int64_t padded_depth() const { return d_round_up(depth, d_panel); }
  int64_t padded_width() const { return d_round_up(width, d_panel); }
  // Keys that rows up to `end` may see.
  int64_t seen(int64_t end) const { return causal ? d_least(end, keys) : keys; }
  // Scores of one row, its mask added, in place.
  void add_mask(float* score, int64_t b, int64_t h, int64_t row, int64_t from, int64_t n) const {
    if (!mask) return;
    const float* m = mask + b * mask_batch + h * mask_head + row * mask_row + from * mask_key;
    if (mask_key == 1) {
#pragma omp simd
      for (int64_t j = 0; j < n; ++j) score[j] += m[j];
    } else {
      for (int64_t j = 0; j < n; ++j) score[j] += m[j * mask_key];
    }
  }
};

d_inline float d_largest(const float* x, int64_t n, float start) {
  float top = start;
#pragma omp simd reduction(max : top)
  for (int64_t j = 0; j < n; ++j) top = x[j] > top ? x[j] : top;
  return top;
}
// exp(x) for x that is not above zero by more than rounding, within 2 units in the last place;
// results below the smallest normal number are zero. Coefficients: Moshier, Cephes (1992).
d_inline float d_exp_weight(float x) {
  const float shift = 12582912.0f;  // adding it rounds to an integer, left in the lowest bits
  const float moved = x * 1.44269504088896341f + shift, n = moved - shift;
  const float r = x - n * 0.693359375f + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const float scaled = d_float(d_bits(p) + (d_bits(moved) << 23));
  const float result = x < -87.0f ? 0.0f : scaled;
  return d_isnan(x) ? x : result;
}
// x = exp(x - base), and the sum of it; NaN and infinite scores come through the sum.
d_inline float d_exp_sum(float* x, int64_t n, float base) {
  float total = 0;
#pragma omp simd reduction(+ : total)
  for (int64_t j = 0; j < n; ++j) {
    x[j] = d_exp_weight(x[j] - base);
    total += x[j];
  }
  return total;
}
d_inline void d_scale_row(float* x, int64_t n, float factor) {
#pragma omp simd
  for (int64_t j = 0; j < n; ++j) x[j] *= factor;
}

// One block of rows of one head: out (rows by width) and the logarithm of every row's sum.
static void d_attend_rows(const d_attention& a, const float* keys, const float* values, float* room,
                          int64_t b, int64_t h, int64_t first, float* out, int64_t out_row,
                          float* sums, int64_t sums_row) {
  const int64_t count = d_least(a.rows - first, d_block_rows);
  const int64_t tiles = d_round_up(count, d_rows), width = a.padded_width();
  float* queries = room;
  float* scores = queries + d_block_rows * d_query_step;
  float* result = scores + d_block_rows * d_keys;
  float top[d_block_rows], total[d_block_rows];
  d_copy(a.q.at(b, h) + first * a.q.row, a.q.row, 1, count, a.depth, queries, d_query_step, a.scale);
  for (int64_t i = 0; i < d_block_rows; ++i) top[i] = -d_inff, total[i] = 0;
  const int64_t end = a.seen(first + count);
  for (int64_t from = 0; from < end; from += d_keys) {
    const int64_t n = d_least(end - from, d_keys), padded = d_round_up(n, d_panel);
    d_tiles<d_query_step, 1>(tiles, padded, a.depth, queries, keys + from * a.depth,
                             a.depth * d_panel, d_panel, scores, d_keys, false);
    for (int64_t i = 0; i < count; ++i) {
      float* score = scores + i * d_keys;
      int64_t here = a.causal ? d_least(n, first + i + 1 - from) : n;
      here = here > 0 ? here : 0;
      a.add_mask(score, b, h, first + i, from, here);
      const float highest = d_largest(score, here, top[i]);
      const float base = highest == -d_inff ? 0 : highest;
      const float fade = d_exp(top[i] - base);
      total[i] = total[i] * fade + d_exp_sum(score, here, base);
      d_clear(score, here, padded);
      if (from && fade != 1.0f) d_scale_row(result + i * width, width, fade);
      top[i] = highest;
    }
    d_tiles<d_keys, 1>(tiles, width, n, scores, values + from * d_panel,
                       a.keys * d_panel, d_panel, result, width, from != 0);
  }
  for (int64_t i = 0; i < count; ++i) {
    const float factor = total[i] == 0 ? 0 : 1 / total[i];
#pragma omp simd
    for (int64_t j = 0; j < a.width; ++j)
      out[(first + i) * out_row + j] = end ? result[i * width + j] * factor : 0;
    sums[(first + i) * sums_row] = top[i] + d_log(total[i]);
  }
}

static void d_attention_forward(void** args, const int64_t* sizes, bool masked) {
  d_attention a(args, sizes, masked);
  const d_heads out = a.next(args[3 + masked]), sums = a.next(args[4 + masked]);
  const int64_t blocks = (a.rows + d_block_rows - 1) / d_block_rows, of_group = a.groups * blocks;
  const int64_t pairs = a.batches * (a.heads / a.groups), threads = omp_get_max_threads();
  // Keys and values are packed once per task: as few tasks as keep every thread busy.
  const int64_t wanted = pairs >= 4 * threads ? 1 : (4 * threads + pairs - 1) / pairs;
  const int64_t parts = d_least(of_group, wanted), tasks = pairs * parts;
#pragma omp parallel if (tasks > 1)
  {
    const int64_t packed = a.padded_keys() * (a.padded_depth() + a.padded_width());
    float* keys = d_floats(packed + d_block_rows * (d_query_step + d_keys + a.padded_width()));
    float* values = keys + a.padded_keys() * a.padded_depth();
    float* room = keys + packed;
#pragma omp for schedule(dynamic)
    for (int64_t task = 0; task < tasks; ++task) {
      const int64_t pair = task / parts, part = task % parts;
      const int64_t b = pair / (a.heads / a.groups), shared = pair % (a.heads / a.groups);
      d_panels(a.k.at(b, shared), 1, a.k.row, a.depth, a.keys, keys);
      d_panels(a.v.at(b, shared), a.v.row, 1, a.keys, a.width, values);
      for (int64_t k = part * of_group / parts; k < (part + 1) * of_group / parts; ++k) {
        const int64_t h = shared * a.groups + k / blocks;
        d_attend_rows(a, keys, values, room, b, h, k % blocks * d_block_rows,
                      (float*)out.at(b, h), out.row, (float*)sums.at(b, h), sums.row);
      }
    }
    d_free(keys);
  }
}

// What a block of rows adds to the gradients of one head's keys and values, and its own.
struct d_backward {
  const d_attention& a;
  d_heads grad, out, sums, grad_q;
  const float *keys_turned, *values_turned, *keys;
  float *grad_keys, *grad_values, *room;

  void rows(int64_t b, int64_t h, int64_t first) const {
    const int64_t count = d_least(a.rows - first, d_block_rows);
    const int64_t tiles = d_round_up(count, d_rows);
    const int64_t depth = a.padded_depth(), width = a.padded_width();
    float* queries = room;
    float* grads = queries + d_block_rows * d_query_step;
    float* result = grads + d_block_rows * d_query_step;
    float* weights = result + d_block_rows * d_query_step;
    float* slopes = weights + d_block_rows * d_keys;
    float shared[d_block_rows], base[d_block_rows];
    for (int64_t i = 0; i < 2 * d_block_rows * d_query_step; ++i) queries[i] = 0;
    d_copy(a.q.at(b, h) + first * a.q.row, a.q.row, 1, count, a.depth, queries, d_query_step,
           a.scale);
    d_copy(grad.at(b, h) + first * grad.row, grad.row, 1, count, a.width, grads, d_query_step);
    for (int64_t i = 0; i < count; ++i) {
      const float* y = out.at(b, h) + (first + i) * out.row;
      float total = 0;
#pragma omp simd reduction(+ : total)
      for (int64_t j = 0; j < a.width; ++j) total += y[j] * grads[i * d_query_step + j];
      shared[i] = total;
      const float sum = sums.at(b, h)[(first + i) * sums.row];
      base[i] = sum == -d_inff ? 0 : sum;
    }
    const int64_t end = a.seen(first + count);
    for (int64_t from = 0; from < end; from += d_keys) {
      const int64_t n = d_least(end - from, d_keys), padded = d_round_up(n, d_panel);
      const int64_t whole = d_round_up(n, d_whole);
      d_tiles<d_query_step, 1>(tiles, padded, a.depth, queries, keys_turned + from * a.depth,
                               a.depth * d_panel, d_panel, weights, d_keys, false);
      d_tiles<d_query_step, 1>(tiles, padded, a.width, grads, values_turned + from * a.width,
                               a.width * d_panel, d_panel, slopes, d_keys, false);
      for (int64_t i = 0; i < tiles; ++i) {
        float *weight = weights + i * d_keys, *slope = slopes + i * d_keys;
        int64_t here = a.causal ? d_least(n, first + i + 1 - from) : n;
        here = here > 0 && i < count ? here : 0;
        a.add_mask(weight, b, h, first + i, from, here);
#pragma omp simd
        for (int64_t j = 0; j < here; ++j) {
          weight[j] = d_exp_weight(weight[j] - base[i]);
          slope[j] = weight[j] * (slope[j] - shared[i]);
        }
        d_clear(weight, here, whole);
        d_clear(slope, here, whole);
      }
      d_tiles<1, d_keys>(whole, width, tiles, weights, grads, d_panel, d_query_step,
                         grad_values + from * width, width, true);
      d_tiles<1, d_keys>(whole, depth, tiles, slopes, queries, d_panel, d_query_step,
                         grad_keys + from * depth, depth, true);
      d_tiles<d_keys, 1>(tiles, depth, n, slopes, keys + from * d_panel, a.keys * d_panel, d_panel,
                         result, d_query_step, from != 0);
    }
    float* to = (float*)grad_q.at(b, h) + first * grad_q.row;
    if (end)
      d_copy(result, d_query_step, 1, count, a.depth, to, grad_q.row, a.scale);
    else
      for (int64_t i = 0; i < count; ++i) d_clear(to + i * grad_q.row, 0, a.depth);
  }
};

// Arguments: q, k, v, mask if there is one, grad, out, sums, then the three gradients.
static void d_attention_backward(void** args, const int64_t* sizes, bool masked) {
  d_attention a(args, sizes, masked);
  const int at = 3 + masked;
  const d_heads grad = a.next(args[at]), out = a.next(args[at + 1]), sums = a.next(args[at + 2]);
  const d_heads grad_q = a.next(args[at + 3]), grad_k = a.next(args[at + 4]);
  const d_heads grad_v = a.next(args[at + 5]);
  const int64_t heads = a.heads / a.groups, tasks = a.batches * heads;
  const int64_t depth = a.padded_depth(), width = a.padded_width();
  const int64_t keys = d_round_up(a.keys, d_whole);
#pragma omp parallel if (tasks > 1)
  {
    const int64_t room = 3 * d_block_rows * d_query_step + 2 * d_block_rows * d_keys;
    float* start = d_floats(keys * 3 * depth + keys * 2 * width + room);
    float *keys_turned = start, *keys_plain = keys_turned + keys * depth;
    float *grad_keys = keys_plain + keys * depth, *values_turned = grad_keys + keys * depth;
    float* grad_values = values_turned + keys * width;
    const d_backward block = {a, grad, out, sums, grad_q, keys_turned, values_turned, keys_plain,
                              grad_keys, grad_values, grad_values + keys * width};
#pragma omp for schedule(dynamic)
    for (int64_t task = 0; task < tasks; ++task) {
      const int64_t b = task / heads, shared = task % heads;
      d_panels(a.k.at(b, shared), 1, a.k.row, a.depth, a.keys, keys_turned);
      d_panels(a.v.at(b, shared), 1, a.v.row, a.width, a.keys, values_turned);
      d_panels(a.k.at(b, shared), a.k.row, 1, a.keys, a.depth, keys_plain);
      d_clear(grad_keys, 0, keys * depth);
      d_clear(grad_values, 0, keys * width);
      for (int64_t k = 0; k < a.groups; ++k)
        for (int64_t first = 0; first < a.rows; first += d_block_rows)
          block.rows(b, shared * a.groups + k, first);
      d_copy(grad_keys, depth, 1, a.keys, a.depth, (float*)grad_k.at(b, shared), grad_k.row);
      d_copy(grad_values, width, 1, a.keys, a.width, (float*)grad_v.at(b, shared), grad_v.row);
    }
    d_free(start);
  }
}
