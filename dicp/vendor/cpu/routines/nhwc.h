// Convolution of channels-last (NHWC) bfloat16 images, and its gradients, as products one of whose
// operands, the patches, is copied block by block and never stored as a whole. Chetlur et al., "cuDNN:
// Efficient Primitives for Deep Learning" (2014).
#pragma once
#include "convolution.h"
#include "product.h"

#if defined(__AVX512BF16__)
// `count` numbers, at most d_panel, followed by zeros. `from` is readable for none, too: a masked load that
// suppresses a fault is slow.
d_inline d_words d_load_partial(const d_bf16* from, int64_t count) {
  d_words all;
  const uint32_t mask = (uint32_t)(((uint64_t)1 << count) - 1);
  asm("vmovdqu16 %1, %0%{%2%}%{z%}" : "=v"(all) : "m"(*(const d_words*)from), "Yk"(mask));
  return all;
}
// The same for up to d_lanes numbers as words.
d_inline d_words d_load_partial_words(const d_bf16* from, int64_t count) {
  d_words all;
  const uint16_t mask = (uint16_t)((1u << count) - 1);
  asm("vpmovzxwd %1, %0%{%2%}%{z%}" : "=v"(all) : "m"(*(const d_halfwords*)from), "Yk"(mask));
  return all;
}
// Indices for `d_select_halves`: of each pair of words, the half of the first one and that of the second;
// half 0 has the low bits.
d_inline d_words d_half_indices(int64_t first, int64_t second) {
  d_words halves;
  for (int i = 0; i < d_lanes; ++i) halves[i] = 2 * i + first + ((2 * i + second + d_panel) << 16);
  return halves;
}
d_inline d_words d_select_halves(d_words halves, d_words first, d_words second) {
  asm("vpermi2w %2, %1, %0" : "+v"(halves) : "v"(first), "v"(second));
  return halves;
}
// The numbers of d_panel channels, `taps` of each, in two orders: the taps of a channel adjacent, as in
// row-major filters, or the channels of a tap. Makes vectors of one order from those of the other.
constexpr int64_t d_max_ordered_taps = 25;
struct d_tap_order {
  int64_t taps;
  d_bf16 places[d_max_ordered_taps][d_panel];
  uint32_t masks[d_max_ordered_taps][d_max_ordered_taps];
  // `by_tap`: whether vectors of a tap are made.
  d_tap_order(int64_t taps, bool by_tap) : taps(taps) {
    if (taps > d_max_ordered_taps) return;
    for (int64_t k = 0; k < taps; ++k) {
      for (int64_t s = 0; s < taps; ++s) masks[k][s] = 0;
      for (int64_t j = 0; j < d_panel; ++j) {
        const int64_t at = k * d_panel + j,
                      from = by_tap ? j * taps + k : at % taps * d_panel + at / taps;
        places[k][j] = from % d_panel;
        masks[k][from / d_panel] |= (uint32_t)1 << j;
      }
    }
  }
  // Vectors lie `step` vectors apart.
  __attribute__((always_inline)) d_words vector(int64_t k, const d_words* from, int64_t step = 1) const {
    d_words all = {};
    const d_words place = *(const d_words*)places[k];
    for (int64_t s = 0; s < taps; ++s)
      asm("vpermw %1, %2, %0%{%3%}" : "+v"(all) : "m"(from[s * step]), "v"(place), "Yk"(masks[k][s]));
    return all;
  }
};
// Replaces what is NaN among `n` results by again(its index).
template <class F> d_inline void d_replace_nan(d_bf16* to, int64_t n, const F& again) {
  int odd = 0;
#pragma omp simd reduction(| : odd)
  for (int64_t i = 0; i < n; ++i) odd |= (to[i] & 0x7fff) > 0x7f80;
  for (int64_t i = 0; odd && i < n; ++i)
    if (d_isnan(d_to_float(to[i]))) to[i] = d_to_bf16(again(i));
}
#endif

// On tile registers: the fewest pixels of a row whose patches are read in place, the most packed elements of
// the filters then, and of those that a cache keeps at a time, and the most numbers of the copied rows.
constexpr int64_t d_min_in_place = 7, d_max_in_place = 1 << 20, d_max_strip = 1 << 18,
                  d_max_in_place_rows = 1 << 17;
// There, the most pixels and the fewest numbers of filters that are read in place instead.
//
// On an Intel Xeon (Emerald Rapids), 64 pixels, 512x512x3x3 filters: 0.65 to 0.71 of the time with packed
// filters; 98 and 128 pixels 0.84; 256 pixels, or 256x256x3x3 filters, 1.3 to 1.5.
constexpr int64_t d_max_patches = 128, d_min_read_once = 1 << 20;
struct d_convolution_nhwc {
  int64_t images, channels, filters;
  d_axis y, x;
  int64_t in_image, in_row, in_pixel;
  bool skips;  // padding is left out; else it is multiplied as zeros
  // The gradient of images: taps are reversed. Steps of its filters: to the next channel, row of taps, tap of
  // a row, and filter. If filters of a channel and tap are not adjacent, all taps of a filter are.
  bool reversed;
  int64_t channel_step, tap_row_step, tap_step, filter_step;
  const d_bf16 *in, *weights, *bias;
  d_bf16* out;
  int64_t first_tap = 0;  // where `weights` points among the taps of a filter

  int64_t taps() const { return y.taps * x.taps; }
  int64_t pixels() const { return y.out * x.out; }
  d_bf16 weight(int64_t filter, int64_t channel, int64_t tap) const {
    return reversed ? reversed_filters(channel, tap)[filter * filter_step]
                    : weights[(filter * channels + channel) * taps() + tap];
  }
  const d_bf16* reversed_filters(int64_t channel, int64_t tap) const {
    return weights + channel * channel_step + reversed_tap(tap);
  }
  int64_t reversed_tap(int64_t tap) const {
    const int64_t from_last = taps() - 1 - tap;
    return from_last / x.taps * tap_row_step + from_last % x.taps * tap_step;
  }
  // One result, of the taps inside the image.
  float one(int64_t pixel, int64_t filter) const {
    const int64_t row = pixel % pixels() / x.out, column = pixel % x.out;
    double sum = 0;
    for (int64_t i = 0; i < y.taps; ++i)
      for (int64_t j = 0; j < x.taps; ++j) {
        if (!y.inside(row, i) || !x.inside(column, j)) continue;
        const d_bf16* at = in + pixel / pixels() * in_image + y.source(row, i) * in_row +
                           x.source(column, j) * in_pixel;
        for (int64_t c = 0; c < channels; ++c)
          sum += d_to_float(at[c]) * d_to_float(weight(filter, c, i * x.taps + j));
      }
    if (bias) sum += d_to_float(bias[filter]);
    return (float)sum;
  }
#if defined(__AVX512BF16__)
  typedef d_gemm<d_bf16> products;
  static constexpr int64_t tile_block = d_tile_shape<d_bf16_pair>::block_rows, left_step = products::left_step;

  // Channels that are summed at a time: their packed elements of all taps are copied together.
  int64_t block() const {
    const int64_t most = d_pack_factor<d_bf16_pair> * (products::most_depth / taps());
    if (channels <= most) return channels;
    const int64_t unit = most < d_panel ? d_pack_factor<d_bf16_pair> : d_panel, whole = most / unit * unit;
    const int64_t parts = (channels + whole - 1) / whole;
    return d_round_up((channels + parts - 1) / parts, unit);
  }
  // The product that it is; a row of its left operand is a patch, its taps in order.
  products product() const {
    const int64_t rows = images * pixels(),
                  depth = d_pack_factor<d_bf16_pair> * taps() * d_packed_depth<d_bf16>(channels);
    return {1, rows, filters, depth, {nullptr, 0, 1, 1}, {nullptr, 0, 1, 1},
            bias, false, out, 0, filters, d_none};
  }
  // Copies `some` channels from `channel` on of the patches of `count` pixels.
  void patches(int64_t pixel, int64_t count, int64_t channel, int64_t some, d_bf16_pair* to) const {
    const int64_t packed_depth = d_packed_depth<d_bf16>(some), along = x.dilation * in_pixel;
    int64_t image = pixel / pixels(), row = pixel % pixels() / x.out, column = pixel % x.out;
    for (int64_t r = 0; r < count; ++r, to += left_step) {
      d_bf16_pair* tap = to;
      for (int64_t i = 0; i < y.taps; ++i) {
        const bool above = y.inside(row, i);
        int64_t place = x.source(column, 0);
        const d_bf16* from =
            in + image * in_image + y.source(row, i) * in_row + place * in_pixel + channel;
        for (int64_t j = 0; j < x.taps; ++j, tap += packed_depth, from += along, place += x.dilation)
          copy(from, above && (uint64_t)place < (uint64_t)x.in ? some : 0, some, (d_bf16*)tap);
      }
      if (++column == x.out) column = 0, ++row;
      if (row == y.out) row = 0, ++image;
    }
  }
  // Copies `count` numbers, and zeros up to `some`. Whole vectors are written: the next tap, or the
  // padding after the last one, overwrites the excess.
  static __attribute__((always_inline)) void copy(const d_bf16* from, int64_t count, int64_t some,
                                                  d_bf16* to) {
    int64_t c = 0;
    for (; c + d_panel <= count; c += d_panel) __builtin_memcpy(to + c, from + c, sizeof(d_words));
    for (; c < some; c += d_panel) {
      const d_words part = d_load_partial(count > c ? from + c : to, count > c ? count - c : 0);
      __builtin_memcpy(to + c, &part, sizeof part);
    }
  }
  // Packs a panel of filters in the order of a patch. `words` is memory for a column of packed elements for
  // each filter of the panel: its numbers in their order in memory, the taps of a channel adjacent, in pairs.
  void panel(int64_t filter, int64_t wide, int64_t channel, int64_t some, d_bf16_pair* words,
             d_bf16_pair* to) const {
    const int64_t count = taps(), packed_depth = d_packed_depth<d_bf16>(some);
    d_transpose(weights + (filter * channels + channel) * count, channels * count, wide, some * count, words,
                d_panel);
    for (int64_t tap = 0; tap < count; ++tap) {
      const d_words halves = d_half_indices(tap % 2, (tap + count) % 2);
      const d_bf16_pair *first = words + tap / 2 * d_panel, *second = words + (tap + count) / 2 * d_panel;
      for (int64_t c = 0; c < some; c += 2, first += count * d_panel, second += count * d_panel)
        for (int64_t f = 0; f < d_panel; f += d_lanes, to += d_lanes) {
          const d_words pairs = d_select_halves(halves, *(const d_words*)(first + f),
                                                c + 1 < some ? *(const d_words*)(second + f) : d_words{});
          __builtin_memcpy(to, &pairs, sizeof pairs);
        }
    }
  }
  // The same for the panels of `n` filters, `size` apart, of the gradient of images.
  void reversed_panels(int64_t filter, int64_t n, int64_t channel, int64_t some, d_bf16_pair* to,
                       int64_t size) const {
    const int64_t count = taps(), packed_depth = d_packed_depth<d_bf16>(some), line = channel_step;
    if (n % d_panel) d_clear(to, n / d_panel * size, d_round_up(n, d_panel) / d_panel * size);
    for (int64_t c = 0; c < some; c += 2)
      for (int64_t tap = 0; tap < count; ++tap) {
        const d_bf16* from = reversed_filters(channel + c, tap) + filter;
        d_bf16_pair* at = to + (tap * packed_depth + c / 2) * d_panel;
        for (int64_t j = 0; j < n; j += d_panel, at += size) {
          const int64_t wide = d_min(n - j, d_panel);
          __builtin_prefetch(from + j + 2 * line);
          __builtin_prefetch(from + j + 3 * line);
          if (c + 1 < some) d_interleave_rows(from + j, from + line + j, wide, at);
          else for (int64_t i = 0; i < wide; ++i) d_pack_element(at + i, from + j + i, 1, 1);
        }
      }
  }
  // The same for filters whose taps are adjacent.
  void reversed_panels(int64_t filter, int64_t n, int64_t channel, int64_t some, d_bf16_pair* to,
                       int64_t size, const d_tap_order& order) const {
    const int64_t packed_depth = d_packed_depth<d_bf16>(some), all_taps = order.taps;
    d_words copies[2][d_max_ordered_taps];
    for (int64_t c = 0; c < some; c += 2)
      for (int64_t j = 0; j < n; j += d_panel) {
        const int64_t count = d_min(n - j, d_panel) * all_taps;
        const d_bf16* row = weights - first_tap + (channel + c) * channel_step + (filter + j) * all_taps;
        const d_words *first = (const d_words*)row, *second = (const d_words*)(row + channel_step);
        const bool single = c + 1 == some;
        if (single || count < d_panel * all_taps) {
          __builtin_memset(copies, 0, sizeof copies);
          __builtin_memcpy(copies[0], row, count * sizeof(d_bf16));
          if (!single) __builtin_memcpy(copies[1], row + channel_step, count * sizeof(d_bf16));
          first = copies[0], second = copies[1];
        }
        d_bf16_pair* at = to + j / d_panel * size + c / 2 * d_panel;
        for (int64_t tap = 0; tap < taps(); ++tap, at += packed_depth * d_panel) {
          const int64_t k = first_tap + reversed_tap(tap);
          const d_words both[2] = {order.vector(k, first), order.vector(k, second)};
          d_interleave_rows((const d_bf16*)both, (const d_bf16*)(both + 1), d_panel, at);
        }
      }
  }
  // Whether a patch lies inside its image.
  bool is_inside(int64_t pixel) const {
    const int64_t row = pixel % pixels() / x.out, column = pixel % x.out;
    return y.inside(row, 0) && y.inside(row, y.taps - 1) && x.inside(column, 0) &&
           x.inside(column, x.taps - 1);
  }
  // Results that are NaN, computed again without padding: an infinite tap times its zero is NaN.
  void correct(int64_t pixel, int64_t height, int64_t filter, int64_t n) const {
    for (int64_t r = pixel; r < pixel + height; ++r) {
      if (is_inside(r)) continue;
      d_replace_nan(out + r * filters + filter, n, [&](int64_t f) { return one(r, filter + f); });
    }
  }
  // The results of `count` pixels and `n` filters.
  void task(const products& all, int64_t pixel, int64_t count, int64_t filter, int64_t n,
            float* workspace, const d_tap_order& order) const {
    d_bf16_pair *lines = (d_bf16_pair*)workspace, *panels = (d_bf16_pair*)(workspace + all.packed_b_offset()),
           *rows = (d_bf16_pair*)(workspace + all.workspace_size(count));
    float* before = workspace + all.sums_offset();
    const int64_t step = block();
    products::pending_tile pending;
    for (int64_t channel = 0, done = 0; channel < channels; channel += step) {
      const int64_t some = d_min(channels - channel, step);
      const int64_t part = taps() * d_packed_depth<d_bf16>(some);
      if (reversed && filter_step == 1) reversed_panels(filter, n, channel, some, panels, part * d_panel);
      else if (reversed) reversed_panels(filter, n, channel, some, panels, part * d_panel, order);
      for (int64_t f = 0; !reversed && f < n; f += d_panel)
        panel(filter + f, d_min(n - f, d_panel), channel, some, rows, panels + f * part);
      for (int64_t i = 0, height, end = 0; i < count; i += height) {
        if (i == end) {
          end = d_min(count, end + tile_block);
          patches(pixel + i, end - i, channel, some, lines);
        }
        const bool few = d_takes_short_tile<d_bf16_pair>(end - i);
        const int64_t tile_rows = few ? d_tile_shape<d_bf16_pair>::short_rows : d_tile_shape<d_bf16_pair>::rows;
        height = d_min(end - i, tile_rows);
        float* sums = before + (all.splits_depth() ? i * d_round_up(n, d_panel) : 0);
        all.row_of_tiles(tile_rows, pixel + i, height, filter, n, done, part,
                         {lines + i % tile_block * left_step, left_step, 1, panels, d_panel},
                         part * d_panel, sums, out + (pixel + i) * filters + filter, pending);
        if (skips && channel + step >= channels) {
          all.finish_tile(pending);
          correct(pixel + i, height, filter, n);
        }
      }
      done += part;
    }
    all.finish_tile(pending);
  }
#if defined(D_TILES)
  // Few pixels: the tile registers read row-major filters in place, once, and patches in their order are the
  // other operand.
  bool reads_filters_in_place() const {
    const bool once = images * pixels() <= d_max_patches && filters * channels * taps() >= d_min_read_once;
    return once && !reversed && channels % d_panel == 0 && taps() > 1 && taps() <= d_max_ordered_taps;
  }
  // A patch, the taps of a channel adjacent.
  void ordered_patch(int64_t pixel, const d_tap_order& order, d_bf16* to) const {
    const int64_t row = pixel % pixels() / x.out, column = pixel % x.out;
    const d_bf16 *image = in + pixel / pixels() * in_image, *from[d_max_ordered_taps];
    for (int64_t i = 0; i < y.taps; ++i)
      for (int64_t j = 0; j < x.taps; ++j) {
        const bool inside = y.inside(row, i) && x.inside(column, j);
        from[i * x.taps + j] =
            inside ? image + y.source(row, i) * in_row + x.source(column, j) * in_pixel : nullptr;
      }
    for (int64_t c = 0; c < channels; c += d_panel) {
      d_words numbers[d_max_ordered_taps];
      for (int64_t t = 0; t < order.taps; ++t)
        numbers[t] = from[t] ? *(const d_words*)(from[t] + c) : d_words{};
      for (int64_t k = 0; k < order.taps; ++k, to += d_panel) {
        const d_words vector = order.vector(k, numbers);
        __builtin_memcpy(to, &vector, sizeof vector);
      }
    }
  }
  void run_by_filters() const {
    const int64_t rows = images * pixels(), size = taps() * channels;
    float* memory = d_allocate_workspace(rows * size / 2);
    if (!memory) return;
    const d_tap_order order(taps(), false);
#pragma omp parallel for
    for (int64_t r = 0; r < rows; ++r) ordered_patch(r, order, (d_bf16*)memory + r * size);
    d_gemm<d_bf16, true>{1, filters, rows, size, {weights, 0, size, 1}, {(const d_bf16*)memory, 0, 1, size},
                         bias, bias != nullptr, out, 0, filters, d_none}
        .run();
    if (skips) correct(0, rows, 0, filters);
    d_release_workspace(memory);
  }
  // At stride 1 the tile registers read patches in place, in a copy of the image with its padding: those of a
  // row of taps are adjacent for a pixel, and pixels are `channels` apart. The positions between rows, whose
  // patches are parts of two rows, are computed for nothing.
  // Pixels of a row with its padding, and rows after the first that a patch reaches.
  int64_t pitch() const { return x.out + x.taps - 1; }
  int64_t reach() const { return (y.taps - 1) * y.dilation; }
  // `count` rows of an image from `row` on, -y.padding for the first, with their padding.
  void copy_padded(int64_t image, int64_t row, int64_t count, d_bf16* to) const {
    const int64_t line = pitch() * channels, begin = d_min(x.padding, pitch()),
                  end = d_min(x.padding + x.in, pitch());
    for (int64_t r = row; r < row + count; ++r, to += line) {
      const bool inside = r >= 0 && r < y.in;
      const int64_t first = inside ? begin * channels : 0, last = inside ? end * channels : 0;
      d_clear(to, 0, first);
      d_clear(to, last, line);
      const d_bf16* from = in + image * in_image + r * in_row;
      if (in_pixel == channels) {
        if (inside) __builtin_memcpy(to + first, from, (last - first) * sizeof(d_bf16));
        continue;
      }
      for (int64_t j = first; j < last; j += channels, from += in_pixel)
        __builtin_memcpy(to + j, from, channels * sizeof(d_bf16));
    }
  }
  int64_t depth() const { return taps() * channels / d_pack_factor<d_bf16_pair>; }
  bool reads_in_place() const {
    return y.stride == 1 && x.stride == 1 && x.dilation == 1 && channels % d_panel == 0 && taps() > 1 &&
           x.padding >= 0 && x.out >= d_min_in_place && filters * depth() <= d_max_in_place;
  }
  static constexpr int64_t tile_rows = d_tile_shape<d_bf16_pair>::rows;
  // A tile whose sums are complete; the rest of its rows are stored while the next one is computed.
  struct in_place_tile {
    alignas(64) float buffers[2][tile_rows * d_panel];
    float add[d_panel];
    const float* sums = buffers[0];
    const int64_t* offsets;  // of its rows in the result; -1: between rows
    int64_t next = tile_rows, wide;
    d_bf16* to;
    void store(int64_t end) {
      const d_vec left = ((const d_vec*)add)[0], right = ((const d_vec*)add)[1];
      for (; next < end; ++next) {
        if (offsets[next] < 0) continue;
        const d_vec* sum = (const d_vec*)sums + 2 * next;
        const d_vec all[2] = {sum[0] + left, sum[1] + right};
        if (wide == d_panel) d_store_row(to + offsets[next], all, false);
        else d_store_partial_row(to + offsets[next], all, wide);
      }
    }
  };
  // A tile of positions, whose first patch starts at `a`, and of the filters of a panel.
  void compute_in_place(const d_bf16_pair* a, const d_bf16_pair* b, float* sums,
                        in_place_tile& before) const {
    constexpr int64_t step = 16;
    const int64_t pixel = channels / 2, line = y.dilation * pitch() * pixel, wide = x.taps * pixel;
    const int64_t times = y.taps * wide / step, rows = (tile_rows + times - 1) / times;
    d_clear_sums();
    for (int64_t i = 0; i < y.taps; ++i, a += line)
      for (int64_t k = 0; k < wide; k += step, b += step * d_panel) {
        d_tile_step<tile_rows, 2>(a + k, pixel, b, d_panel);
        before.store(d_min(before.next + rows, tile_rows));
      }
    d_store_sums(sums, 2 * sizeof(d_vec));
    before.store(tile_rows);
  }
  // `count` rows of the result's pixels; `panels` holds the filters.
  void task_in_place(int64_t image, int64_t row, int64_t count, const d_bf16_pair* panels,
                     d_bf16* copied) const {
    constexpr int64_t tiles = 4;
    copy_padded(image, row - y.padding, count + reach(), copied);
    const int64_t size = depth() * d_panel, positions = (count - 1) * pitch() + x.out,
                  strip = d_round_up(d_min(filters, d_max_strip / depth()), d_panel);
    int64_t offsets[2][tiles * tile_rows], parity = 0;
    in_place_tile open;
    d_bf16* to = out + (image * y.out + row) * x.out * filters;
    for (int64_t f = 0; f < filters; f += strip)
      for (int64_t p = 0; p < positions; p += tiles * tile_rows, parity ^= 1) {
        const int64_t end = d_min(positions - p, tiles * tile_rows);
        for (int64_t i = 0; i < tiles * tile_rows; ++i) {
          const int64_t r = (p + i) / pitch(), column = (p + i) % pitch();
          offsets[parity][i] = i < end && column < x.out ? (r * x.out + column) * filters : -1;
        }
        for (int64_t g = f; g < d_min(filters, f + strip); g += d_panel)
          for (int64_t i = 0; i < end; i += tile_rows) {
            float* sums = open.buffers[open.sums == open.buffers[0]];
            const d_bf16_pair* patch = (const d_bf16_pair*)(copied + (p + i) * channels);
            compute_in_place(patch, panels + g / d_panel * size, sums, open);
            open.sums = sums, open.next = 0, open.offsets = offsets[parity] + i, open.to = to + g;
            open.wide = d_min(filters - g, d_panel);
            d_clear(open.add, bias ? open.wide : 0, d_panel);
            if (bias) d_copy(bias + g, 0, 1, 1, open.wide, open.add, 0);
          }
      }
    open.store(tile_rows);
    if (skips) correct((image * y.out + row) * x.out, count * x.out, 0, filters);
  }
  // Tasks are rows of an image's pixels.
  void run_in_place() const {
    const int64_t threads = d_threads(), line = pitch() * channels, size = depth() * d_panel,
                  all = (filters + d_panel - 1) / d_panel;
    const int64_t least = (y.out * line + d_max_in_place_rows - 1) / d_max_in_place_rows;
    const int64_t parts = d_balanced_parts(images, d_min(least, y.out), y.out, threads);
    const int64_t rows = (y.out + parts - 1) / parts,
                  copied = (rows + reach()) * line + (tile_rows + x.taps) * channels;
    float* panels = d_allocate_workspace(all * size);
    const d_workspaces workspaces(d_round_up(copied / 2, 16) > size ? copied / 2 : size);
    if (panels && workspaces.data) {
      const d_tap_order order(filter_step, true);
#pragma omp parallel
      {
        const d_tile_scope tile_scope;
        float* workspace = workspaces.of_thread();
#pragma omp for schedule(dynamic)
        for (int64_t k = 0; k < all; ++k) {
          const int64_t f = k * d_panel, n = d_min(filters - f, d_panel);
          d_bf16_pair* to = (d_bf16_pair*)panels + k * size;
          if (!reversed) panel(f, n, 0, channels, (d_bf16_pair*)workspace, to);
          else if (filter_step == 1) reversed_panels(f, n, 0, channels, to, size);
          else reversed_panels(f, n, 0, channels, to, size, order);
        }
#pragma omp for schedule(dynamic)
        for (int64_t k = 0; k < images * parts; ++k) {
          const int64_t row = k % parts * rows;
          if (row < y.out)
            task_in_place(k / parts, row, d_min(y.out - row, rows), (const d_bf16_pair*)panels,
                          (d_bf16*)workspace);
        }
      }
    }
    d_release_workspace(panels);
  }
#endif
  // Tasks are strips of filters and parts of the pixels.
  void run() const {
#if defined(D_TILES)
    if (reads_filters_in_place()) return run_by_filters();
    if (reads_in_place()) return run_in_place();
#endif
    const products all = product();
    const int64_t threads = d_threads(), most = all.panels_per_strip();
    const int64_t strips = (all.panels() + most - 1) / most;
    const bool packs_once = d_uses_tiles<d_bf16_pair> && !all.splits_depth();
    const int64_t enough = packs_once ? d_task_rows_on_tiles : d_task_rows;
    const d_row_partition cut(all.rows, enough, d_tile_shape<d_bf16_pair>::rows, strips, threads);
    const int64_t parts = cut.parts, step = cut.step;
    const d_workspaces workspaces(all.workspace_size(step) + d_panel * left_step);
    if (!workspaces.data) return;
    const d_tap_order order(filter_step, true);
#pragma omp parallel if (all.rows * filters * all.depth > 50000)
    {
      const d_tile_scope tile_scope;
      float* workspace = workspaces.of_thread();
#pragma omp for schedule(dynamic)
      for (int64_t k = 0; k < parts * strips; ++k) {
        const int64_t pixel = k / strips * step, strip = k % strips;
        const int64_t filter = all.panels() * strip / strips * d_panel;
        const int64_t end = d_min(all.panels() * (strip + 1) / strips * d_panel, filters);
        task(all, pixel, d_min(all.rows - pixel, step), filter, end - filter, workspace, order);
      }
    }
  }
#else
  void run() const {  // for compiler flags that leave out what the processor has
#pragma omp parallel for
    for (int64_t k = 0; k < images * pixels() * filters; ++k)
      out[k] = d_to_bf16(one(k / filters, k % filters));
  }
#endif
};

// What a tap reads, pixel by pixel: its channels, or null for padding.
struct d_pixels_of_tap {
  const d_convolution_nhwc& of;
  const int64_t i, j;
  int64_t row, column;
  const d_bf16 *image, *line;
  d_pixels_of_tap(const d_convolution_nhwc& of, int64_t pixel, int64_t tap)
      : of(of), i(tap / of.x.taps), j(tap % of.x.taps), row(pixel % of.pixels() / of.x.out),
        column(pixel % of.x.out), image(of.in + pixel / of.pixels() * of.in_image), line(line_of()) {}
  const d_bf16* line_of() const {
    return of.y.inside(row, i) ? image + of.y.source(row, i) * of.in_row : nullptr;
  }
  const d_bf16* next() {
    const bool inside = line && of.x.inside(column, j);
    const d_bf16* at = inside ? line + of.x.source(column, j) * of.in_pixel : nullptr;
    if (++column == of.x.out) {
      column = 0;
      if (++row == of.y.out) row = 0, image += of.in_image;
      line = line_of();
    }
    return at;
  }
};

// The gradient of filters, channels last: a product of the gradient's pixels, transposed, with patches.
struct d_convolution_nhwc_filters {
  d_convolution_nhwc of;   // its filters' steps are the result's
  const d_bf16* gradient;  // of the result, its pixels adjacent

  bool is_row_major() const { return of.filter_step != 1; }
  int64_t columns() const { return of.taps() * of.channels; }
  // One result, of the pixels whose tap is inside the image.
  float one(int64_t filter, int64_t tap, int64_t channel) const {
    double sum = 0;
    const d_bf16* by = gradient + filter;
    d_pixels_of_tap pixels(of, 0, tap);
    for (int64_t pixel = 0; pixel < of.images * of.pixels(); ++pixel, by += of.filters)
      if (const d_bf16* at = pixels.next()) sum += d_to_float(at[channel]) * d_to_float(*by);
    return (float)sum;
  }
#if defined(__AVX512BF16__)
  typedef d_gemm<d_bf16> products;

  products product() const {
    return {1, of.filters, columns(), of.images * of.pixels(), {gradient, 0, 1, of.filters},
            {nullptr, 0, 1, 1}, nullptr, false, of.out, 0, columns(), d_none};
  }
  // Packs panels, `size` apart, of `n` channels of a tap, for `count` pixels.
  void panels(int64_t pixel, int64_t count, int64_t tap, int64_t channel, int64_t n, d_bf16_pair* to,
              int64_t size) const {
    const auto words = [&](const d_bf16* at, int64_t j) {
      return d_load_partial_words((at ? at : of.in) + channel + j, at && j < n ? d_min(n - j, d_lanes) : 0);
    };
    d_pixels_of_tap pixels(of, pixel, tap);
    for (int64_t p = 0; p < count; p += 2, to += d_panel) {
      const d_bf16 *first = pixels.next(), *second = p + 1 < count ? pixels.next() : nullptr;
      for (int64_t j = 0; j < d_round_up(n, d_panel); j += d_lanes) {
        const d_words pairs = words(first, j) | words(second, j) << 16;
        __builtin_memcpy(to + j / d_panel * size + j % d_panel, &pairs, sizeof pairs);
      }
    }
  }
  // The results of `height` filters and `n` columns, none of whose panels has channels of two taps.
  void task(const products& all, int64_t filter, int64_t height, int64_t column, int64_t n,
            float* workspace) const {
    d_bf16_pair* right = (d_bf16_pair*)(workspace + all.packed_b_offset());
    products::pending_tile pending;
    d_bf16* out = all.at(of.out, filter, column);
    for (int64_t done = 0; !done || done < all.packed_depth(); done += products::most_depth) {
      const int64_t part = d_min(all.packed_depth() - done, products::most_depth), pixel = 2 * done;
      const int64_t count = d_min(all.depth - pixel, 2 * part), size = part * d_panel;
      for (int64_t j = 0, some; j < n; j += some) {
        const int64_t tap = (column + j) / of.channels, channel = (column + j) % of.channels;
        some = d_min(n - j, of.channels - channel);
        panels(pixel, count, tap, channel, some, right + j / d_panel * size, size);
      }
      all.blocks(gradient + pixel * of.filters + filter, filter, height, column, n, done, part,
                 {nullptr, 0, 0, right, d_panel}, size, workspace, out, pending);
    }
    all.finish_tile(pending);
    for (int64_t f = filter; of.skips && f < filter + height; ++f) correct(f, column, n);
  }
  // Results that are NaN, computed again without padding.
  void correct(int64_t filter, int64_t column, int64_t n) const {
    d_replace_nan(of.out + filter * columns() + column, n, [&](int64_t j) {
      return one(filter, (column + j) / of.channels, (column + j) % of.channels);
    });
  }
  // A row-major result: `wide` channels of all taps are computed tap by tap in `part`, and then put in order.
  void row_major_task(int64_t filter, int64_t height, int64_t channel, int64_t wide, float* workspace,
                      d_bf16* part, const d_tap_order& order) const {
    products all = product();
    const int64_t taps = of.taps(), columns = d_round_up(wide, d_panel), n = all.c_row = taps * columns;
    d_bf16_pair* right = (d_bf16_pair*)(workspace + all.packed_b_offset());
    const int64_t most = all.panels_per_strip() / (columns / d_panel), groups = (taps + most - 1) / most;
    for (int64_t group = 0; group < groups; ++group) {
      const int64_t tap = taps * group / groups, end = taps * (group + 1) / groups;
      products::pending_tile pending;
      for (int64_t done = 0; !done || done < all.packed_depth(); done += products::most_depth) {
        const int64_t depth = d_min(all.packed_depth() - done, products::most_depth), pixel = 2 * done;
        const int64_t count = d_min(all.depth - pixel, 2 * depth), size = depth * d_panel;
        for (int64_t t = tap; t < end; ++t)
          panels(pixel, count, t, channel, wide, right + (t - tap) * columns / d_panel * size, size);
        all.blocks(gradient + pixel * of.filters + filter, filter, height, 0, (end - tap) * columns, done,
                   depth, {nullptr, 0, 0, right, d_panel}, size, workspace, part + tap * columns, pending);
      }
      all.finish_tile(pending);
    }
    for (int64_t f = filter; f < filter + height; ++f, part += n) {
      if (of.skips)
        d_replace_nan(part, n, [&](int64_t j) {
          return j % columns < wide ? one(f, j / columns, channel + j % columns) : 0.0f;
        });
      d_bf16* to = of.out + (f * of.channels + channel) * taps;
      for (int64_t j = 0; j < columns; j += d_panel)
        for (int64_t k = 0; k < taps; ++k, to += d_panel) {
          const d_words vector = order.vector(k, (const d_words*)(part + j), columns / d_panel);
          const int64_t left = d_min(d_min(wide - j, d_panel) * taps - k * d_panel, d_panel);
          if (left == d_panel) __builtin_memcpy(to, &vector, sizeof vector);
          else if (left > 0) __builtin_memcpy(to, &vector, left * sizeof(d_bf16));
        }
    }
  }
  void run_row_major() const {
    const products all = product();
    constexpr int64_t wide = 2 * d_panel;
    const int64_t blocks = (of.channels + wide - 1) / wide, threads = d_threads();
    const d_row_partition cut(of.filters, d_task_rows, d_tile_shape<d_bf16_pair>::rows, blocks, threads);
    const int64_t needed = all.workspace_size(cut.step);
    const d_workspaces workspaces(needed + cut.step * of.taps() * d_panel);
    if (!workspaces.data) return;
    const d_tap_order order(of.taps(), false);
#pragma omp parallel if (of.filters * columns() * all.depth > 50000)
    {
      const d_tile_scope tile_scope;
      float* workspace = workspaces.of_thread();
#pragma omp for schedule(dynamic)
      for (int64_t k = 0; k < cut.parts * blocks; ++k) {
        const int64_t filter = k % cut.parts * cut.step, channel = k / cut.parts * wide;
        row_major_task(filter, d_min(of.filters - filter, cut.step), channel,
                       d_min(of.channels - channel, wide), workspace, (d_bf16*)(workspace + needed), order);
      }
    }
  }
  // Tasks are strips of columns and parts of the filters. A strip has channels of several taps if those of
  // each fill its panels.
  void run() const {
    if (is_row_major()) return run_row_major();
    const products all = product();
    const int64_t line = of.channels % d_panel ? of.channels : columns(),
                  wide = all.panels_per_strip() * d_panel;
    const int64_t strips = (line + wide - 1) / wide, lines = columns() / line, threads = d_threads();
    const d_row_partition cut(of.filters, d_task_rows, d_tile_shape<d_bf16_pair>::rows, lines * strips,
                              threads);
    const d_workspaces workspaces(all.workspace_size(cut.step));
    if (!workspaces.data) return;
#pragma omp parallel if (of.filters * columns() * all.depth > 50000)
    {
      const d_tile_scope tile_scope;
      float* workspace = workspaces.of_thread();
#pragma omp for schedule(dynamic)
      for (int64_t k = 0; k < cut.parts * lines * strips; ++k) {
        const int64_t filter = k % cut.parts * cut.step, strip = k / cut.parts;
        const int64_t at = strip % strips * wide, column = strip / strips * line + at;
        task(all, filter, d_min(of.filters - filter, cut.step), column, d_min(line - at, wide), workspace);
      }
    }
  }
#else
  void run() const {
#pragma omp parallel for
    for (int64_t k = 0; k < of.filters * columns(); ++k) {
      const int64_t column = k % columns(), tap = is_row_major() ? column % of.taps() : column / of.channels,
                    channel = is_row_major() ? column / of.taps() : column % of.channels;
      of.out[k] = d_to_bf16(one(k / columns(), tap, channel));
    }
  }
#endif
};

// Sizes: images, channels, filters, both axes, the (image, row, pixel) steps of the images, whether padding
// is left out, whether it is the gradient of images, and the steps of the filters of a gradient.
static d_convolution_nhwc d_convolution_nhwc_args(const int64_t* sizes, void* images, void* filters,
                                                  void* bias, void* result) {
  return {sizes[0], sizes[1], sizes[2], d_axis_of(sizes + 3), d_axis_of(sizes + 9),
          sizes[15], sizes[16], sizes[17], sizes[18] != 0, sizes[19] != 0, sizes[20], sizes[21], sizes[22],
          sizes[23], (const d_bf16*)images, (const d_bf16*)filters, (const d_bf16*)bias, (d_bf16*)result};
}
// Arguments: images, filters (row-major), the bias if there is one, the result. For the gradient of images:
// the result's gradient, the filters (those of a tap adjacent, or row-major), the images.
static void d_convolve_nhwc(void** args, const int64_t* sizes, bool biased) {
  d_convolution_nhwc_args(sizes, args[0], args[1], biased ? args[2] : nullptr, args[2 + biased]).run();
}
// The convolution, at stride 1, of the result's gradient for the pixels `first`, `first + stride` and so on of
// an axis: taps `tap`, `tap + stride` and so on reach them, reversed; there may be none.
static d_axis d_phase_of_axis(const d_axis& axis, int64_t first, int64_t* tap) {
  const int64_t skipped = (first + axis.padding) / axis.stride, step = axis.stride;
  *tap = (first + axis.padding) % step;
  const int64_t taps = *tap < axis.taps ? (axis.taps - *tap + step - 1) / step : 0;
  const int64_t pixels = (axis.in - first + step - 1) / step;
  return {axis.out, pixels, taps, 1, axis.dilation * (taps - 1) - skipped, axis.dilation};
}
// The gradient of images of a convolution with strides, whose axes are given: each remainder of a pixel's row
// and column by the strides has a convolution of its own. Shi et al., "Is the deconvolution layer the same as a
// convolutional layer?" (2016).
static void d_convolve_nhwc_strided(void** args, const int64_t* sizes, bool biased) {
  const auto whole =
      d_convolution_nhwc_args(sizes, args[0], args[1], biased ? args[2] : nullptr, args[2 + biased]);
  const d_axis &y = whole.y, &x = whole.x;
  const int64_t rows = (y.in + y.stride - 1) / y.stride, columns = (x.in + x.stride - 1) / x.stride;
  float* workspace = d_allocate_workspace((whole.images * rows * columns * whole.filters + 1) / 2);
  if (!workspace) return;
  d_convolution_nhwc part = whole;
  part.out = (d_bf16*)workspace;
  part.tap_row_step *= y.stride, part.tap_step *= x.stride;
  for (int64_t row = 0, tap_row, tap; row < d_min(y.stride, y.in); ++row)
    for (int64_t column = 0; column < d_min(x.stride, x.in); ++column) {
      part.y = d_phase_of_axis(y, row, &tap_row), part.x = d_phase_of_axis(x, column, &tap);
      part.first_tap = tap_row * whole.tap_row_step + tap * whole.tap_step;
      part.weights = whole.weights + part.first_tap;
      const bool has_taps = part.taps() != 0;
      if (has_taps) part.run();
      else for (int64_t f = 0; f < part.filters; ++f) part.out[f] = part.bias ? part.bias[f] : 0;
      const int64_t next = has_taps ? part.filters : 0;  // pixels that no tap reaches are alike
#pragma omp parallel for
      for (int64_t line = 0; line < part.images * part.y.out; ++line) {
        const int64_t image = line / part.y.out, at = line % part.y.out * y.stride + row;
        const d_bf16* from = part.out + line * part.x.out * next;
        d_bf16* to = whole.out + ((image * y.in + at) * x.in + column) * part.filters;
        for (int64_t k = 0; k < part.x.out; ++k, from += next, to += x.stride * part.filters)
          __builtin_memcpy(to, from, part.filters * sizeof(d_bf16));
      }
    }
  d_release_workspace(workspace);
}
// Arguments: images, the result's gradient (both channels last), that of the filters (channels last or
// row-major).
static void d_convolution_nhwc_filters_of(void** args, const int64_t* sizes) {
  const auto of = d_convolution_nhwc_args(sizes, args[0], nullptr, nullptr, args[2]);
  d_convolution_nhwc_filters{of, (const d_bf16*)args[1]}.run();
}
