// Direct convolution of float images: products of the filters with the pixels that each tap reads. No
// patches are copied; a tap's pixels are rows of the part of the image that a thread has copied.
// Zhang, Franchetti and Low, "High Performance Zero-Memory Overhead Direct Convolutions" (2018).
#pragma once
#include "gemm.h"

constexpr int64_t d_max_planes_size = 1 << 17;  // elements of an image part that stay in a thread's cache

struct d_axis {
  int64_t in, out, taps, stride, padding, dilation;
  int64_t source(int64_t o, int64_t tap) const { return o * stride - padding + tap * dilation; }
  // Outputs from which on, and up to which, `tap` reads inside the image.
  int64_t first(int64_t tap) const {
    const int64_t short_of = padding - tap * dilation;
    return short_of > 0 ? (short_of + stride - 1) / stride : 0;
  }
  int64_t last(int64_t tap) const {
    const int64_t available = in - 1 + padding - tap * dilation;
    return available < 0 ? 0 : d_min(out, available / stride + 1);
  }
  bool inside(int64_t o, int64_t tap) const {
    const int64_t at = source(o, tap);
    return at >= 0 && at < in;
  }
};

d_inline d_axis d_axis_of(const int64_t* sizes) {
  return {sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5]};
}

struct d_convolution {
  int64_t images, channels, filters, groups;
  d_axis y, x;
  const float *in, *weights, *bias;
  float* out;
  int64_t in_image, in_channel, in_row, out_image, out_filter;
  bool skips;  // padding is left out; else it is multiplied as zeros, which makes NaN of infinite taps

  d_convolution(const int64_t* sizes, const void* from, void* to)
      : images(sizes[0]), channels(sizes[1]), filters(sizes[2]), groups(sizes[3]),
        y(d_axis_of(sizes + 4)), x(d_axis_of(sizes + 10)), in((const float*)from), weights(nullptr),
        bias(nullptr), out((float*)to), in_image(sizes[16]), in_channel(sizes[17]),
        in_row(sizes[18]), out_image(sizes[19]), out_filter(sizes[20]),
        skips(sizes[21] && (y.padding > 0 || x.padding > 0)) {}
  int64_t depth() const { return channels * y.taps * x.taps; }
  int64_t pixels() const { return y.out * x.out; }
};

// A padded part of an image, as products read it: one plane per channel and position within a stride.
// The pixels that a tap reads for consecutive outputs are consecutive in a plane. At the end of each
// row some outputs are computed that do not exist; they are discarded.
struct d_planes {
  const d_convolution& all;
  int64_t rows, columns;  // output pixels of the largest part

  static int64_t parts(int64_t all, int64_t part) { return (all + part - 1) / part; }
  int64_t row_tiles() const { return parts(all.y.out, rows); }
  int64_t column_tiles() const { return parts(all.x.out, columns); }

  static int64_t reach(const d_axis& axis) { return (axis.taps - 1) * axis.dilation / axis.stride; }
  int64_t wide() const { return columns + reach(all.x); }
  // Elements of a plane; never a power of two, which would map planes to few cache sets.
  int64_t plane() const {
    return d_round_up((rows + reach(all.y)) * wide(), 2 * d_lanes) + d_lanes;
  }
  int64_t of_channel() const { return all.y.stride * all.x.stride * plane(); }
  int64_t workspace_size() const { return all.channels * of_channel() + d_panel; }
  // Places from the first of so many rows and columns of pixels to the last.
  int64_t span(int64_t height, int64_t width) const { return (height - 1) * wide() + width; }
  // Panels of all parts together.
  int64_t panels() const { return row_tiles() * column_tiles() * parts(span(rows, columns), d_panel); }
  // Where the first pixel reads its element k, from the first plane of its group.
  int64_t offset(int64_t k) const {
    const int64_t i = k / all.x.taps % all.y.taps * all.y.dilation;
    const int64_t j = k % all.x.taps * all.x.dilation;
    const int64_t place = i % all.y.stride * all.x.stride + j % all.x.stride;
    return k / (all.y.taps * all.x.taps) * of_channel() + place * plane() +
           i / all.y.stride * wide() + j / all.x.stride;
  }
  // Every `stride`th number of a row of the image, from its column `first` on.
  void line(const float* row, int64_t first, int64_t begin, int64_t end, float* to) const {
    const int64_t n = wide(), stride = all.x.stride;
    for (int64_t o = 0; o < begin; ++o) to[o] = 0;
    if (stride == 1)
#pragma omp simd
      for (int64_t o = begin; o < end; ++o) to[o] = row[first + o];
    else if (stride == 2)
#pragma omp simd
      for (int64_t o = begin; o < end; ++o) to[o] = row[first + 2 * o];
    else
      for (int64_t o = begin; o < end; ++o) to[o] = row[first + stride * o];
    for (int64_t o = end; o < n; ++o) to[o] = 0;
  }
  // Whether a tap reads numbers at place `r` of a step.
  static bool reads(const d_axis& axis, int64_t r) {
    for (int64_t tap = 0; tap < axis.taps; ++tap)
      if (tap * axis.dilation % axis.stride == r) return true;
    return false;
  }
  // The planes of one channel, for `height` rows of output pixels from `top` on, from column `left` on.
  void fill(const float* channel, int64_t top, int64_t height, int64_t left, float* to) const {
    const int64_t n = wide(), stride = all.x.stride;
    for (int64_t r = 0; r < all.y.stride * stride; ++r, to += plane()) {
      if (!reads(all.y, r / stride) || !reads(all.x, r % stride)) continue;
      const int64_t first = left * stride + r % stride - all.x.padding, available = all.x.in - first;
      const int64_t before = first < 0 ? d_min((stride - 1 - first) / stride, n) : 0;
      const int64_t inside = available > 0 ? d_min((available + stride - 1) / stride, n) : 0;
      for (int64_t y = 0; y < height + reach(all.y); ++y) {
        const int64_t row = (top + y) * all.y.stride + r / stride - all.y.padding;
        const bool on = row >= 0 && row < all.y.in && inside > before;
        line(channel + row * all.in_row, first, on ? before : n, on ? inside : n, to + y * n);
      }
    }
  }
};

// Whether any of `count` sums is NaN.
static bool d_has_nan(const float* sums, int64_t count) {
  d_vec nothing[2] = {};
  for (int64_t k = 0; k < count; k += d_panel) {
    nothing[0] += ((const d_vec*)(sums + k))[0] * 0.0f;
    nothing[1] += ((const d_vec*)(sums + k))[1] * 0.0f;
  }
  uint64_t bits[d_panel / 2], any = 0;
  __builtin_memcpy(bits, nothing, sizeof bits);
  for (uint64_t b : bits) any |= b;
  return any != 0;
}

// A part of an image: its first pixel, rows and columns.
struct d_image_part {
  int64_t top, left, rows, columns;
};

// Neighbouring places of a panel that are output pixels.
struct d_segment {
  int64_t place, pixel, count;
};

struct d_direct_convolution {
  const d_convolution& all;
  const d_planes planes;
  const int32_t* offsets;

  // Of the panel that begins at place `first` of `span`; `width`: columns of pixels.
  int64_t segments(int64_t first, int64_t span, int64_t width, d_segment* list) const {
    const int64_t wide = planes.wide(), end = d_min(first + d_panel, span);
    int64_t found = 0;
    for (int64_t p = first, next; p < end; p = next) {
      const int64_t row = p / wide, column = p % wide;
      next = d_min((row + 1) * wide, end);
      const int64_t count = d_min(width - column, next - p);
      if (count > 0) list[found++] = {p - first, row * all.x.out + column, count};
    }
    return found;
  }
  // Computes the sums of up to d_tile_height filters again without the padding, if any sum is NaN.
  void inside(const float* weights, int64_t step, int64_t height, const float* from,
              const d_image_part& part, int64_t place, float* sums) const {
    const int64_t wide = planes.wide(), taps = all.y.taps * all.x.taps;
    d_clear(sums, 0, height * d_panel);
    for (int64_t tap = 0; tap < taps; ++tap) {
      int32_t on[d_panel];
      for (int64_t j = 0; j < d_panel; ++j) {
        const int64_t row = part.top + (place + j) / wide, column = part.left + (place + j) % wide;
        on[j] = -(all.y.inside(row, tap / all.x.taps) && all.x.inside(column, tap % all.x.taps));
      }
      d_words mask[2];
      __builtin_memcpy(mask, on, sizeof mask);
      for (int64_t r = 0; r < height; ++r) {
        d_vec* sum = (d_vec*)(sums + r * d_panel);
        for (int64_t k = tap; k < all.depth(); k += taps) {
          const d_vec* at = (const d_vec*)(from + offsets[k]);
          sum[0] += (d_vec)((d_words)(weights[r * step + k] * at[0]) & mask[0]);
          sum[1] += (d_vec)((d_words)(weights[r * step + k] * at[1]) & mask[1]);
        }
      }
    }
  }
  // Up to R filters at the panel of places from `place` on. A long sum is computed in blocks.
  template <int R>
  void tile(const float* weights, int64_t step, int64_t height, const float* bias, const float* from,
            const d_image_part& part, int64_t place, const d_segment* list, int64_t count, float* to) const {
    const int64_t depth = all.depth(), times = (depth + d_depth_block - 1) / d_depth_block;
    float sums[R * d_panel + d_panel];
    int64_t begin = 0, end = 0;
    for (int64_t time = 1; time <= times; ++time, begin = end) {
      end = depth * time / times;
      d_compute_tile_at_offsets<R>(end - begin, weights + begin, step, from, offsets + begin,
                      [&](int r, const d_vec* sum) __attribute__((always_inline)) {
                        d_store_row(sums + r * d_panel, sum, begin != 0);
                      });
    }
    if (all.skips && d_has_nan(sums, height * d_panel))
      inside(weights, step, height, from, part, place, sums);
    for (int64_t r = 0; r < height; ++r) {
      float* line = sums + r * d_panel;
      if (bias) {
        ((d_vec*)line)[0] += bias[r];
        ((d_vec*)line)[1] += bias[r];
      }
      for (int64_t k = 0; k < count; ++k)
        d_store_partial_row(to + r * all.out_filter + list[k].pixel, (const d_vec*)(line + list[k].place),
                    list[k].count);
    }
  }
  // Filters [first, last) of a group at the pixels of a part, whose planes are given. `workspace` holds
  // d_tile_height filters.
  void filter(int64_t group, int64_t first, int64_t last, const d_image_part& part, const float* filled,
              float* out, float* workspace) const {
    const int64_t depth = all.depth(), span = planes.span(part.rows, part.columns);
    for (int64_t f = first, height; f < last; f += height) {
      const int64_t left = last - f;
      const bool is_short = d_takes_short_tile(left);
      const int64_t tile_rows = is_short ? d_short_tile_height : d_tile_height,
                    filter = group * all.filters + f;
      height = d_min(left, tile_rows);
      const float* weights = all.weights + filter * depth;
      if (height < tile_rows) {
        d_copy(weights, depth, 1, height, depth, workspace, depth);
        weights = workspace;
      }
      const float* bias = all.bias ? all.bias + filter : nullptr;
      float* to = out + filter * all.out_filter;
      for (int64_t place = 0; place < span; place += d_panel) {
        d_segment list[d_panel];
        const int64_t count = segments(place, span, part.columns, list);
        if (is_short)
          tile<d_short_tile_height>(weights, depth, height, bias, filled + place, part, place, list, count, to);
        else
          tile<d_tile_height>(weights, depth, height, bias, filled + place, part, place, list, count, to);
      }
    }
  }
};

// The parts of an image. A thread fills the planes that it reads, because planes that another thread
// has written are slow to read. There are as many parts as threads need, unless that wastes many
// computed outputs.
static d_planes d_planes_of(const d_convolution& all, int64_t threads) {
  const bool flat = all.y.out == 1;
  const int64_t most = flat ? all.x.out : all.y.out;
  int64_t parts = 1;
  const auto cut = [&] {
    const int64_t each = (most + parts - 1) / parts;
    return flat ? d_planes{all, 1, each} : d_planes{all, each, all.x.out};
  };
  while (parts < most && cut().workspace_size() > d_max_planes_size) ++parts;
  const d_planes fitting = cut();
  if (all.images * all.groups % threads == 0) return fitting;
  parts = d_round_up(parts, threads);
  return cut().panels() * 7 > fitting.panels() * 8 ? fitting : cut();
}

// Arguments: images, weights, the bias if there is one, the result. Sizes: images, channels and
// filters of a group, groups, both axes (`d_axis`), the (image, channel, row) steps of the images and
// the (image, filter) steps of the result, and whether what lies around images is left out.
static void d_convolve(void** args, const int64_t* sizes, bool biased) {
  d_convolution all(sizes, args[0], args[2 + biased]);
  all.weights = (const float*)args[1];
  all.bias = biased ? (const float*)args[2] : nullptr;
  if (!all.images || !all.pixels() || !all.filters) return;
  const int64_t depth = all.depth(), threads = d_threads();
  const d_planes planes = d_planes_of(all, threads);
  const d_workspaces offset_table(depth, 1), workspaces(planes.workspace_size() + d_tile_height * depth);
  if (!offset_table.data || !workspaces.data) return;
  int32_t* offsets = (int32_t*)offset_table.data;
  for (int64_t k = 0; k < depth; ++k) offsets[k] = (int32_t)planes.offset(k);
  const d_direct_convolution run = {all, planes, offsets};
  const int64_t column_tiles = planes.column_tiles(), tiles = planes.row_tiles() * column_tiles;
  const int64_t others = all.images * all.groups * tiles;
  int64_t parts = others % threads && others < 4 * threads ? threads : 1;
  const int64_t step = d_round_up((all.filters + parts - 1) / parts, d_tile_height);
  parts = (all.filters + step - 1) / step;
#pragma omp parallel if (all.images * all.pixels() * all.filters * all.groups * depth > 50000)
  {
    float* workspace = workspaces.of_thread();
    d_clear(workspace, 0, planes.workspace_size());
#pragma omp for schedule(dynamic)
    for (int64_t task = 0; task < others * parts; ++task) {
      const int64_t part = task % parts, tile = task / parts % tiles;
      const int64_t group = task / parts / tiles % all.groups;
      const int64_t image = task / parts / tiles / all.groups;
      const int64_t top = tile / column_tiles * planes.rows;
      const int64_t left = tile % column_tiles * planes.columns;
      const int64_t height = d_min(all.y.out - top, planes.rows);
      const int64_t width = d_min(all.x.out - left, planes.columns);
      if (height <= 0 || width <= 0) continue;
      const float* from = all.in + image * all.in_image + group * all.channels * all.in_channel;
      for (int64_t k = 0; k < all.channels; ++k)
        planes.fill(from + k * all.in_channel, top, height, left, workspace + k * planes.of_channel());
      run.filter(group, part * step, d_min(all.filters, (part + 1) * step),
                 {top, left, height, width}, workspace,
                 all.out + image * all.out_image + top * all.x.out + left, workspace + planes.workspace_size());
    }
  }
}

struct d_span {
  int64_t begin, end;
};

// The gradient of the filters, of d_panel channels at a time: their pixels, channels last and with
// the padding, are the rows of a product with grad_output.
struct d_filter_gradient {
  const d_convolution& all;  // its `out` is grad_output
  float* to;
  int64_t rows, columns;  // pixels of the result that are taken at a time

  static int64_t extent(const d_axis& axis, int64_t count) {
    return (count - 1) * axis.stride + (axis.taps - 1) * axis.dilation + 1;
  }
  int64_t wide() const { return extent(all.x, columns); }
  int64_t filled() const { return extent(all.y, rows) * wide() * d_panel; }
  int64_t taps() const { return all.y.taps * all.x.taps; }
  int64_t workspace_size(int64_t filters) const {
    return filled() + (d_round_up(filters, d_tile_height) * taps() + d_tile_height) * d_panel +
           d_tile_height * rows * columns;
  }
  // What the pixels from (top, left) on read of `count` channels.
  void fill(const float* channels, int64_t count, int64_t top, int64_t left, int64_t height,
            int64_t width, float* planes) const {
    const int64_t first = left * all.x.stride - all.x.padding, n = extent(all.x, width);
    const int64_t begin = first < 0 ? d_min(-first, n) : 0, rest = d_min(all.x.in - first, n);
    const int64_t end = rest > begin ? rest : begin;
    for (int64_t k = 0; k < extent(all.y, height); ++k, planes += wide() * d_panel) {
      const int64_t row = top * all.y.stride - all.y.padding + k;
      if (row < 0 || row >= all.y.in) {
        d_clear(planes, 0, n * d_panel);
        continue;
      }
      d_clear(planes, 0, begin * d_panel);
      d_transpose(channels + row * all.in_row + first + begin, all.in_channel, count, end - begin,
                  planes + begin * d_panel, d_panel);
      d_clear(planes, end * d_panel, n * d_panel);
    }
  }
  // Up to R filters at one tap, `height` lines of `width` pixels. A long sum is computed in blocks.
  template <int R>
  void tile(const float* grad_output, int64_t step, int64_t next, const float* seen, int64_t height,
            int64_t width, float* sums) const {
    const int64_t most = d_depth_block / width > 1 ? d_depth_block / width : 1;
    const int64_t b_step = all.x.stride * d_panel, b_next = all.y.stride * wide() * d_panel;
    for (int64_t line = 0; line < height; line += most)
      for (int64_t from = 0; from < width; from += d_depth_block)
        d_compute_tile_of_lines<R>(d_min(height - line, most), d_min(width - from, d_depth_block),
                        grad_output + line * next + from, step, next,
                        seen + line * b_next + from * b_step, b_step, b_next,
                        [=](int r, const d_vec* sum) __attribute__((always_inline)) {
                          d_store_row(sums + r * d_panel, sum, true);
                        });
  }
  // Of `count` outputs from `first` on those where `tap` reads inside the image.
  d_span read(const d_axis& axis, int64_t tap, int64_t first, int64_t count) const {
    if (!all.skips) return {0, count};
    const int64_t begin = axis.first(tap) - first, end = axis.last(tap) - first;
    return {begin > 0 ? begin : 0, d_min(end, count)};
  }
  // `count` filters, whose gradient of the result at the pixels of a part begins at `grad_output`.
  void add(const float* grad_output, int64_t count, const d_image_part& part, const float* planes, float* sums,
           float* copy) const {
    const int64_t height = part.rows, width = part.columns;
    for (int64_t f = 0, some; f < count; f += some) {
      const int64_t left = count - f;
      const bool is_short = d_takes_short_tile(left);
      const float* from = grad_output + f * all.out_filter;
      int64_t step = all.out_filter, next = all.x.out;
      some = d_min(left, is_short ? d_short_tile_height : d_tile_height);
      if (some < (is_short ? d_short_tile_height : d_tile_height)) {
        for (int64_t r = 0; r < some; ++r)
          d_copy(from + r * step, next, 1, height, width, copy + r * height * width, width);
        from = copy, step = height * width, next = width;
      }
      for (int64_t tap = 0; tap < taps(); ++tap) {
        const int64_t i = tap / all.x.taps * all.y.dilation, j = tap % all.x.taps * all.x.dilation;
        const d_span y = read(all.y, tap / all.x.taps, part.top, height);
        const d_span x = read(all.x, tap % all.x.taps, part.left, width);
        if (y.begin >= y.end || x.begin >= x.end) continue;
        const int64_t row = y.begin * all.y.stride + i, column = x.begin * all.x.stride + j;
        const float* seen = planes + (row * wide() + column) * d_panel;
        const float* grad_output = from + y.begin * next + x.begin;
        float* at = sums + (tap * d_round_up(count, d_tile_height) + f) * d_panel;
        if (is_short)
          tile<d_short_tile_height>(grad_output, step, next, seen, y.end - y.begin, x.end - x.begin, at);
        else
          tile<d_tile_height>(grad_output, step, next, seen, y.end - y.begin, x.end - x.begin, at);
      }
    }
  }
  // The gradient of `count` filters from `first` on for up to d_panel channels from `channel` on.
  void task(int64_t group, int64_t channel, int64_t first, int64_t count, float* workspace) const {
    const int64_t some = d_min(all.channels - channel, d_panel);
    const int64_t apart = d_round_up(count, d_tile_height);
    float *sums = workspace + filled(), *copy = sums + (apart * taps() + d_tile_height) * d_panel;
    d_clear(sums, 0, (apart * taps() + d_tile_height) * d_panel);
    for (int64_t image = 0; image < all.images; ++image)
      for (int64_t top = 0; top < all.y.out; top += rows)
        for (int64_t left = 0; left < all.x.out; left += columns) {
          const int64_t height = d_min(all.y.out - top, rows);
          const int64_t width = d_min(all.x.out - left, columns);
          fill(all.in + image * all.in_image + (group * all.channels + channel) * all.in_channel,
               some, top, left, height, width, workspace);
          add(all.out + image * all.out_image + (group * all.filters + first) * all.out_filter +
                  top * all.x.out + left,
              count, {top, left, height, width}, workspace, sums, copy);
        }
    for (int64_t f = 0; f < count; ++f) {
      float* at = to + ((group * all.filters + first + f) * all.channels + channel) * taps();
      if (taps() == 1)
        d_copy(sums + f * d_panel, 0, 1, 1, some, at, 0);
      else
        d_transpose(sums + f * d_panel, apart * d_panel, taps(), some, at, taps());
    }
  }
};

// Arguments: images, the gradient of the result, the gradient of the filters. Sizes: as above.
static void d_convolution_filters(void** args, const int64_t* sizes) {
  const d_convolution all(sizes, args[0], args[1]);
  const int64_t threads = d_threads(), strips = (all.channels + d_panel - 1) / d_panel;
  d_filter_gradient gradient = {all, (float*)args[2], all.y.out, all.x.out};
  while (gradient.rows > 1 && gradient.filled() > d_max_planes_size)
    gradient.rows = (gradient.rows + 1) / 2;
  while (gradient.columns > d_depth_block && gradient.filled() > d_max_planes_size)
    gradient.columns = (gradient.columns + 1) / 2;
  const int64_t others = all.groups * strips;
  int64_t parts = others % threads && others < 4 * threads ? threads : 1;
  const int64_t step = d_round_up((all.filters + parts - 1) / parts, d_tile_height);
  parts = (all.filters + step - 1) / step;
  const d_workspaces workspaces(gradient.workspace_size(step));
  if (!workspaces.data) return;
#pragma omp parallel if (all.images * all.pixels() * all.filters * all.groups * all.depth() > 50000)
  {
    float* workspace = workspaces.of_thread();
#pragma omp for schedule(dynamic)
    for (int64_t task = 0; task < others * parts; ++task) {
      const int64_t part = task % parts, strip = task / parts % strips;
      gradient.task(task / parts / strips, strip * d_panel, part * step,
                    d_min(all.filters - part * step, step), workspace);
    }
  }
}
