// Convolution of float images by im2col: a product with copied patches, for small images, whose rows
// fill no vector, and for gradients of strided convolutions. The pixels of all images are the columns
// of one matrix; with a stride, each position within it is a convolution of its own.
// Chellapilla, Puri and Simard, "High Performance Convolutional Neural Networks for Document
// Processing" (2006).
#pragma once
#include "convolution.h"

constexpr int64_t d_patch_depth = 512;   // numbers of a patch that are copied at a time
constexpr int64_t d_patch_panels = 8;    // panels of columns that are
constexpr int64_t d_max_tap_reads = 1 << 13;

// The input position that output `o` reads at a tap.
struct d_tap_axis {
  int64_t in, out, taps, stride, begin, step;
  int64_t source(int64_t o, int64_t tap) const { return begin + o * stride + tap * step; }
};

// Up to d_lanes adjacent pixels, from column `place` of the matrix on.
struct d_pixel_run {
  int64_t image, row, column, place, count;
};

// The pixels that a tap reads for them: lanes [first, last) of those that begin at `from`.
struct d_tap_read {
  int64_t from;
  int32_t first, last;
};

struct d_patches {
  int64_t images, channels;
  d_tap_axis y, x;
  const float* in;
  int64_t in_image, in_channel, in_row;

  int64_t taps() const { return y.taps * x.taps; }
  int64_t depth() const { return channels * taps(); }
  int64_t pixels() const { return y.out * x.out; }
  int64_t columns() const { return images * pixels(); }

  // The pixels in columns [first, end); no run crosses the end of a panel.
  int64_t runs(int64_t first, int64_t end, d_pixel_run* list) const {
    int64_t found = 0;
    for (int64_t at = first, count; at < end; at += count) {
      const int64_t pixel = at % pixels(), column = pixel % x.out, place = at - first;
      count = d_min(d_min(x.out - column, end - at), d_lanes - place % d_lanes);
      list[found++] = {at / pixels(), pixel / x.out, column, place, count};
    }
    return found;
  }
  void reads(const d_pixel_run* list, int64_t count, d_tap_read* to) const {
    for (int64_t tap = 0; tap < taps(); ++tap)
      for (int64_t k = 0; k < count; ++k) {
        const int64_t row = y.source(list[k].row, tap / x.taps);
        const int64_t column = x.source(list[k].column, tap % x.taps);
        const int64_t first = column < 0 ? (x.stride - 1 - column) / x.stride : 0;
        const int64_t available = x.in - column;
        const int64_t last = available > 0 ? d_min((available + x.stride - 1) / x.stride, list[k].count) : 0;
        const bool on = row >= 0 && row < y.in && first < last;
        *to++ = {on ? list[k].image * in_image + row * in_row + column : 0, on ? (int32_t)first : 0,
                 on ? (int32_t)last : 0};
      }
  }
  // d_lanes numbers, with zeros for those that lie outside.
  __attribute__((always_inline)) void copy(const float* channel, const d_tap_read& read, float* to) const {
    const float* from = channel + read.from;
    if (x.stride == 1) {
#if defined(__AVX512F__)
      d_vec lanes;
      const uint16_t mask = (uint16_t)((1u << read.last) - (1u << read.first));
      asm("vmovups %1, %0%{%2%}%{z%}" : "=v"(lanes) : "m"(*(const d_vec*)from), "Yk"(mask));
      *(d_vec*)to = lanes;
      return;
#elif defined(__AVX2__)
      d_vec lanes;
      const d_lane_indices place = {0, 1, 2, 3, 4, 5, 6, 7};
      const d_lane_indices mask = (place >= read.first) & (place < read.last);
      asm("vmaskmovps %1, %2, %0" : "=x"(lanes) : "m"(*(const d_vec*)from), "x"(mask));
      *(d_vec*)to = lanes;
      return;
#endif
    }
    *(d_vec*)to = d_vec{};
    for (int64_t lane = read.first; lane < read.last; ++lane) to[lane] = from[lane * x.stride];
  }
  // Copies elements [first, last) of the patches of `count` runs from `list` on, one line per element.
  // Vectors write past a line's end into the next line, so lines are written in order.
  void lines(int64_t first, int64_t last, const d_pixel_run* list, int64_t count, const d_tap_read* reads,
             int64_t all, float* to, int64_t step) const {
    const float* channel = in + first / taps() * in_channel;
    for (int64_t k = first, tap = first % taps(); k < last; ++k, to += step) {
      for (int64_t j = 0; j < count; ++j)
        copy(channel, reads[tap * all + j], to + list[j].place - list->place);
      if (++tap == taps()) tap = 0, channel += in_channel;
    }
  }
};

// Compresses the lanes set in `tap_mask` to adjacent ones; false where the processor has no such instruction.
d_inline bool d_compress(const float* from, uint32_t tap_mask, float* to) {
#if defined(__AVX512F__)
  d_vec lanes;
  asm("vmovups %1, %0%{%2%}%{z%}\n\tvcompressps %0, %0%{%2%}%{z%}"
      : "=&v"(lanes) : "m"(*(const d_vec*)from), "Yk"((uint16_t)tap_mask));
  *(d_vec*)to = lanes;
  return true;
#else
  return false;
#endif
}
// `count` numbers, `step` apart.
d_inline void d_store_strided(float* to, d_vec from, int64_t count, int64_t step) {
#if defined(__AVX512F__)
  if (step == 2) {
    constexpr uint32_t even = 0x55555555;
    const uint32_t mask = even & (uint32_t)(((uint64_t)1 << 2 * count) - 1);
    const d_words all = (d_words)from;
    const d_words first = D_SHUFFLE(all, all, d_lane_indices, 0, 0, 1, 0, 2, 0, 3, 0, 4, 0, 5, 0, 6, 0, 7, 0);
    const d_words second =
        D_SHUFFLE(all, all, d_lane_indices, 8, 0, 9, 0, 10, 0, 11, 0, 12, 0, 13, 0, 14, 0, 15, 0);
    asm("vmovups %1, %0%{%2%}" : "+m"(*(d_vec*)to) : "v"(first), "Yk"((uint16_t)mask));
    asm("vmovups %1, %0%{%2%}" : "+m"(((d_vec*)to)[1]) : "v"(second), "Yk"((uint16_t)(mask >> 16)));
    return;
  }
#endif
  for (int64_t lane = 0; lane < count; ++lane) to[lane * step] = from[lane];
}

// R by d_panel sums, a long sum in blocks.
template <int R>
static void d_patch_tile(int64_t depth, const float* a, int64_t a_row, const float* b, float* sums,
                         bool add) {
  for (int64_t from = 0; from < depth; from += d_depth_block)
    d_compute_tile<R>(d_min(depth - from, d_depth_block),
                 d_tile_operands<float>{a + from, a_row, 1, b + from * d_panel, d_panel},
                 [=](int r, const d_vec* sum) __attribute__((always_inline)) {
                   d_store_row(sums + r * d_panel, sum, add || from);
                 });
}

// The rows of a task in blocks; `of` supplies a block's elements and stores its sums.
template <class T>
static void d_patch_blocks(const T& of, int64_t row, int64_t rows, int64_t first, int64_t last,
                           int64_t panels, const float* right, int64_t panel, float* sums,
                           float* workspace) {
  const int64_t depth = last - first;
  const bool whole = depth == of.depth();  // no sums are kept
  for (int64_t i = 0, height; i < rows; i += height) {
    const int64_t left = rows - i;
    const bool is_short = d_takes_short_tile(left);
    const int64_t tile_rows = is_short ? d_short_tile_height : d_tile_height;
    height = d_min(left, tile_rows);
    int64_t step = 0;
    const float* elements = of.elements(row + i, height, tile_rows, first, last, workspace, &step);
    for (int64_t q = 0; q < panels; ++q) {
      float* at = sums + ((whole ? 0 : i * panels) + q * tile_rows) * d_panel;
      if (is_short)
        d_patch_tile<d_short_tile_height>(depth, elements, step, right + q * panel, at, first != 0);
      else
        d_patch_tile<d_tile_height>(depth, elements, step, right + q * panel, at, first != 0);
      if (last == of.depth()) of.finish(row + i, height, q, at);
    }
  }
}

// Tasks: each group's columns in strips, and its rows in parts.
struct d_patch_tasks {
  int64_t groups, strips, parts, step, panels;

  d_patch_tasks(int64_t groups, int64_t rows, int64_t columns, int64_t max_panels, bool by_rows)
      : groups(groups), panels((columns + d_panel - 1) / d_panel) {
    const int64_t threads = groups % d_threads() ? d_threads() : 1;
    strips = (panels + max_panels - 1) / max_panels;
    if (!by_rows) strips = d_min(d_round_up(strips, threads), panels);
    parts = strips % threads ? threads : 1;
    step = d_round_up((rows + parts - 1) / parts, d_tile_height);
    parts = (rows + step - 1) / step;
  }
  int64_t count() const { return groups * strips * parts; }
  int64_t group(int64_t task) const { return task / parts / strips; }
  int64_t part(int64_t task) const { return task % parts; }
  int64_t first(int64_t task) const { return panels * (task / parts % strips) / strips; }
  int64_t last(int64_t task) const { return panels * (task / parts % strips + 1) / strips; }
  int64_t panels_per_strip() const { return (panels + strips - 1) / strips; }
  // Sums that a task keeps.
  int64_t sums_size() const { return (step + d_tile_height) * panels_per_strip() * d_panel; }
};

// Whether all of `count` sums are NaN, which further terms do not change.
static bool d_all_nan(const float* sums, int64_t count) {
  for (int64_t k = 0; k < count; ++k)
    if (!d_isnan(sums[k])) return false;
  return true;
}

// Sums over the numbers of patches: the result, or the gradient of images.
struct d_patch_product {
  d_patches patches;
  int64_t rows;
  const float *weights, *bias;
  int64_t row, channel, tap_y, tap_x;  // steps of the weights
  uint32_t taps;                       // those of d_lanes numbers that are taps
  float* out;
  int64_t out_image, out_channel, out_row, out_column;
  bool skips;
  const d_pixel_run* runs = nullptr;
  const d_tap_read* reads = nullptr;
  int64_t count = 0;

  int64_t depth() const { return patches.depth(); }
  bool has_adjacent_taps() const { return tap_x == 1 && tap_y == patches.x.taps; }
  bool reads_weights_in_place() const { return has_adjacent_taps() && channel == patches.taps(); }
  int64_t part() const {
    const int64_t taps = patches.taps();
    return taps > d_patch_depth ? taps : d_patch_depth / taps * taps;
  }
  int64_t panels_per_strip() const {
    const int64_t fit = d_max_tap_reads / (d_panel * patches.taps());
    return fit < 1 ? 1 : d_min(fit, d_patch_panels);
  }
  // Whole channels of a block's weights.
  const float* elements(int64_t first_row, int64_t height, int64_t tile_rows, int64_t first, int64_t last,
                       float* to, int64_t* step) const {
    const int64_t many = patches.taps(), wide = patches.x.taps;
    const float* from = weights + first_row * row + first / many * channel;
    if (reads_weights_in_place() && height == tile_rows) {
      *step = row;
      return from;
    }
    *step = last - first + d_lanes;
    if (reads_weights_in_place()) {
      d_copy(from, row, 1, height, last - first, to, *step);
      return to;
    }
    // Squares of filters with one tap; rows past the last one that is needed are transposed, too.
    int64_t transposed = first;
    if (many == 1 && row == 1 && height <= d_lanes && first_row + d_lanes <= rows)
      for (; transposed + d_lanes <= last; transposed += d_lanes)
        d_transpose_packed<float, float>(from + (transposed - first) * channel, channel,
                                         to + transposed - first, *step);
    for (int64_t r = 0; r < height; ++r) {
      float* line = to + r * *step + transposed - first;
      const float* elements = from + r * row + (transposed - first) / many * channel;
      for (int64_t k = transposed; k < last; k += many, line += many, elements += channel) {
        if (taps && d_compress(elements, taps, line)) continue;
        if (has_adjacent_taps()) {
          d_copy(elements, 0, 1, 1, many, line, 0);
          continue;
        }
        for (int64_t tap = 0; tap < many; ++tap)
          line[tap] = elements[tap / wide * tap_y + tap % wide * tap_x];
      }
    }
    return to;
  }
  // Computes NaN sums again, without the padding.
  void inside(int64_t first_row, int64_t height, const d_pixel_run* list, int64_t runs, float* sums) const {
    d_clear(sums, 0, height * d_panel);
    for (int64_t r = 0; r < height; ++r)
      for (int64_t j = 0; j < runs; ++j) {
        const d_tap_read* from = reads + (list - this->runs) + j;
        float* to = sums + r * d_panel + list[j].place % d_panel;
        for (int64_t c = 0; c < patches.channels && !d_all_nan(to, list[j].count); ++c)
          add(weights + (first_row + r) * row + c * channel, patches.in + c * patches.in_channel,
              from, to);
      }
  }
  // Adds one channel to a run.
  void add(const float* weights, const float* image, const d_tap_read* from, float* to) const {
    const int64_t wide = patches.x.taps;
    for (int64_t tap = 0; tap < patches.taps(); ++tap, from += count) {
      const float weight = weights[tap / wide * tap_y + tap % wide * tap_x];
      for (int64_t lane = from->first; lane < from->last; ++lane)
        to[lane] += weight * image[from->from + lane * patches.x.stride];
    }
  }
  void finish(int64_t first_row, int64_t height, int64_t panel, float* sums) const {
    const d_pixel_run *list = runs, *end = runs + count;
    while (list->place < panel * d_panel) ++list;
    int64_t some = 0;
    while (list + some < end && list[some].place < (panel + 1) * d_panel) ++some;
    if (skips && d_has_nan(sums, height * d_panel)) inside(first_row, height, list, some, sums);
    for (int64_t r = 0; r < height; ++r) {
      const float add = bias ? bias[first_row + r] : 0.0f;
      for (int64_t j = 0; j < some; ++j) {
        const float* from = sums + r * d_panel + list[j].place % d_panel;
        float* to = out + list[j].image * out_image + (first_row + r) * out_channel +
                    list[j].row * out_row + list[j].column * out_column;
        const d_vec line[2] = {*(const d_vec*)from + add, {}};
        if (out_column == 1)
          d_store_partial_row(to, line, list[j].count);
        else
          d_store_strided(to, line[0], list[j].count, out_column);
      }
    }
  }
  int64_t packed_size() const {
    return (d_lanes > d_tile_height ? d_lanes : d_tile_height) * (part() + d_lanes);
  }
  int64_t workspace_size(const d_patch_tasks& tasks) const {
    const int64_t list = tasks.panels_per_strip() * d_panel * sizeof(d_pixel_run) / sizeof(float);
    const int64_t table =
        tasks.panels_per_strip() * d_panel * patches.taps() * sizeof(d_tap_read) / sizeof(float);
    return tasks.sums_size() + packed_size() + tasks.panels_per_strip() * part() * d_panel + d_panel + list +
           table;
  }
  void task(const d_patch_tasks& tasks, int64_t task, float* workspace) {
    const int64_t first_row = tasks.part(task) * tasks.step, first = tasks.first(task);
    const int64_t panels = tasks.last(task) - first, height = d_min(rows - first_row, tasks.step);
    float *copy = workspace + tasks.sums_size(), *right = copy + packed_size();
    d_pixel_run* list = (d_pixel_run*)(right + tasks.panels_per_strip() * part() * d_panel + d_panel);
    d_tap_read* table = (d_tap_read*)(list + tasks.panels_per_strip() * d_panel);
    count = patches.runs(first * d_panel,
                         d_min((first + panels) * d_panel, patches.columns()), list);
    patches.reads(list, count, table);
    runs = list, reads = table;
    for (int64_t done = 0; done < depth(); done += part()) {
      const int64_t end = d_min(done + part(), depth()), panel = (end - done) * d_panel;
      for (int64_t q = 0, from = 0, to = 0; q < panels; ++q, from = to) {
        while (to < count && list[to].place < (q + 1) * d_panel) ++to;
        if (patches.columns() < (first + q + 1) * d_panel) d_clear(right, q * panel, (q + 1) * panel);
        patches.lines(done, end, list + from, to - from, table + from, count, right + q * panel,
                      d_panel);
      }
      d_patch_blocks(*this, first_row, height, done, end, panels, right, panel, workspace, copy);
    }
  }
};

// The product for each group; `in_group`, `weights_group` and `out_group` lie between groups.
static void d_run_patch_product(const d_patch_product& all, int64_t groups, int64_t in_group,
                        int64_t weights_group, int64_t out_group) {
  const d_patch_tasks tasks(groups, all.rows, all.patches.columns(), all.panels_per_strip(),
                            !all.reads_weights_in_place());
  const d_workspaces workspaces(all.workspace_size(tasks));
  if (!workspaces.data) return;
#pragma omp parallel if (groups * all.rows * all.patches.columns() * all.depth() > 50000)
  {
    float* workspace = workspaces.of_thread();
#pragma omp for schedule(dynamic)
    for (int64_t task = 0; task < tasks.count(); ++task) {
      d_patch_product one = all;
      const int64_t group = tasks.group(task);
      one.patches.in += group * in_group;
      one.weights += group * weights_group;
      if (one.bias) one.bias += group * all.rows;
      one.out += group * out_group;
      one.task(tasks, task, workspace);
    }
  }
}

d_inline d_tap_axis d_tap_axis_of(const d_axis& axis) {
  return {axis.in, axis.out, axis.taps, axis.stride, -axis.padding, axis.dilation};
}
d_inline d_patches d_im2col_patches(const d_convolution& all) {
  return {all.images, all.channels, d_tap_axis_of(all.y), d_tap_axis_of(all.x), all.in, all.in_image,
          all.in_channel, all.in_row};
}

// Arguments and sizes as those of d_convolve.
static void d_im2col_forward(void** args, const int64_t* sizes, bool biased) {
  const d_convolution all(sizes, args[0], args[2 + biased]);
  const int64_t taps = all.y.taps * all.x.taps;
  if (!all.images || !all.pixels() || !all.filters) return;
  const d_patch_product product = {
      d_im2col_patches(all), all.filters, (const float*)args[1], biased ? (const float*)args[2] : nullptr,
      all.depth(), taps, all.x.taps, 1, 0, all.out, all.out_image, all.out_filter, all.x.out, 1,
      all.skips};
  d_run_patch_product(product, all.groups, all.channels * all.in_channel, all.filters * all.depth(),
              all.filters * all.out_filter);
}

// The part of grad_output along an axis that the gradient of pixels at position `r` within a stride
// reads: by the taps from `*tap` on.
static d_tap_axis d_phase_of_tap_axis(const d_axis& axis, int64_t r, int64_t* tap) {
  const int64_t stride = axis.stride, size = axis.in > r ? (axis.in - r + stride - 1) / stride : 0;
  if (stride == 1) {
    *tap = 0;
    return {axis.out, size, axis.taps, 1, axis.padding, -axis.dilation};
  }
  *tap = (r + axis.padding) % stride;  // such axes are not dilated
  const int64_t taps = axis.taps > *tap ? (axis.taps - *tap + stride - 1) / stride : 0;
  return {axis.out, size, taps, 1, (r + axis.padding - *tap) / stride, -1};
}

// The gradient of images. Arguments: the gradient of the result, weights, the gradient of the
// images. Sizes as those of d_convolve; (image, channel, row) steps are those of the first, (image,
// channel) steps those of the last.
static void d_im2col_images(void** args, const int64_t* sizes) {
  const d_convolution all(sizes, args[0], args[2]);
  const int64_t taps = all.y.taps * all.x.taps, phases = all.y.stride * all.x.stride;
  for (int64_t k = 0; k < phases; ++k) {
    const int64_t top = k / all.x.stride, left = k % all.x.stride;
    int64_t row = 0, column = 0;
    const d_tap_axis y = d_phase_of_tap_axis(all.y, top, &row), x = d_phase_of_tap_axis(all.x, left, &column);
    if (!all.images || !all.channels || !y.out || !x.out) continue;
    float* out = all.out + top * all.x.in + left;
    uint32_t tap_mask = 0;
    for (int64_t tap = 0; tap < y.taps * x.taps && taps <= d_lanes; ++tap)
      tap_mask |= 1u << (tap / x.taps * all.y.stride * all.x.taps + tap % x.taps * all.x.stride);
    const d_patch_product product = {
        {all.images, all.filters, y, x, all.in, all.in_image, all.in_channel, all.in_row},
        all.channels, (const float*)args[1] + row * all.x.taps + column, nullptr,
        taps, all.depth(), all.y.stride * all.x.taps, all.x.stride, tap_mask, out, all.out_image,
        all.out_filter, all.y.stride * all.x.in, all.x.stride, true};
    if (product.depth()) {
      d_run_patch_product(product, all.groups, all.filters * all.in_channel, all.filters * all.depth(),
                  all.channels * all.out_filter);
      continue;
    }
    for (int64_t plane = 0; plane < all.images * all.groups * all.channels; ++plane) {
      const int64_t image = plane / (all.groups * all.channels);
      float* to = out + image * all.out_image + plane % (all.groups * all.channels) * all.out_filter;
      for (int64_t i = 0; i < y.out; ++i)
        for (int64_t j = 0; j < x.out; ++j)
          to[i * product.out_row + j * product.out_column] = 0;
    }
  }
}

// Sums over the pixels of all images: the gradient of filters.
struct d_patch_filters {
  d_patches patches;
  int64_t rows;
  const float* grad_output;
  int64_t image, filter;
  float* out;
  bool skips;
  int64_t column = 0;  // of the result, the first of a task

  int64_t depth() const { return patches.columns(); }
  int64_t part() const { return d_min(d_patch_depth, d_round_up(depth(), d_lanes)); }
  int64_t line() const { return part() + d_lanes; }
  const float* elements(int64_t row, int64_t height, int64_t tile_rows, int64_t first, int64_t last, float* to,
                       int64_t* step) const {
    if (patches.images == 1 && height == tile_rows) {
      *step = filter;
      return grad_output + row * filter + first;
    }
    *step = line();
    for (int64_t at = first, some; at < last; at += some) {
      const int64_t pixel = at % patches.pixels();
      some = d_min(patches.pixels() - pixel, last - at);
      d_copy(grad_output + at / patches.pixels() * image + row * filter + pixel, filter, 1, height, some,
             to + at - first, line());
    }
    return to;
  }
  // The gradient of one weight without the padding.
  float inside(int64_t row, int64_t k) const {
    const d_tap_axis &y = patches.y, &x = patches.x;
    float sum = 0;
    for (int64_t i = 0; i < patches.images * y.out && !d_isnan(sum); ++i) {
      const int64_t from = y.source(i % y.out, k % patches.taps() / x.taps);
      if (from < 0 || from >= y.in) continue;
      const float* pixels = patches.in + i / y.out * patches.in_image + from * patches.in_row +
                            k / patches.taps() * patches.in_channel;
      const float* grad_row = grad_output + i / y.out * image + row * filter + i % y.out * x.out;
      for (int64_t j = 0; j < x.out; ++j) {
        const int64_t at = x.source(j, k % x.taps);
        if (at >= 0 && at < x.in) sum += pixels[at] * grad_row[j];
      }
    }
    return sum;
  }
  void finish(int64_t row, int64_t height, int64_t panel, float* sums) const {
    const int64_t first = column + panel * d_panel, some = d_min(patches.depth() - first, d_panel);
    if (skips && d_has_nan(sums, height * d_panel))
      for (int64_t r = 0; r < height; ++r)
        for (int64_t j = 0; j < some; ++j)
          if (d_isnan(sums[r * d_panel + j])) sums[r * d_panel + j] = inside(row + r, first + j);
    for (int64_t r = 0; r < height; ++r)
      d_store_partial_row(out + (row + r) * patches.depth() + first, (const d_vec*)(sums + r * d_panel), some);
  }
  int64_t workspace_size(const d_patch_tasks& tasks) const {
    const int64_t list = part() * sizeof(d_pixel_run) / sizeof(float);
    const int64_t table = part() * patches.taps() * sizeof(d_tap_read) / sizeof(float);
    return tasks.sums_size() + d_tile_height * line() +
           (tasks.panels_per_strip() * part() + line()) * d_panel + list + table;
  }
  void task(const d_patch_tasks& tasks, int64_t task, float* workspace) {
    const int64_t first_row = tasks.part(task) * tasks.step, first = tasks.first(task);
    const int64_t panels = tasks.last(task) - first, height = d_min(rows - first_row, tasks.step);
    float *copy = workspace + tasks.sums_size(), *right = copy + d_tile_height * line();
    float* lines = right + tasks.panels_per_strip() * part() * d_panel;
    d_pixel_run* list = (d_pixel_run*)(lines + line() * d_panel);
    d_tap_read* table = (d_tap_read*)(list + part());
    column = first * d_panel;
    for (int64_t done = 0; done < depth(); done += part()) {
      const int64_t end = d_min(done + part(), depth()), panel = (end - done) * d_panel;
      const int64_t count = patches.runs(done, end, list);
      patches.reads(list, count, table);
      for (int64_t q = 0; q < panels; ++q) {
        const int64_t k = column + q * d_panel, some = d_min(patches.depth() - k, d_panel);
        patches.lines(k, k + some, list, count, table, count, lines, line());
        if (some < d_panel) d_clear(right, q * panel, (q + 1) * panel);
        d_transpose(lines, line(), some, end - done, right + q * panel, d_panel);
      }
      d_patch_blocks(*this, first_row, height, done, end, panels, right, panel, workspace, copy);
    }
  }
};

// Arguments and sizes as those of d_convolution_filters.
static void d_im2col_filters(void** args, const int64_t* sizes) {
  const d_convolution all(sizes, args[0], args[1]);
  const d_patch_filters product = {
      d_im2col_patches(all), all.filters, all.out, all.out_image, all.out_filter, (float*)args[2], all.skips};
  const d_patch_tasks tasks(all.groups, all.filters, all.depth(), d_patch_panels, false);
  const d_workspaces workspaces(product.workspace_size(tasks));
  if (!workspaces.data) return;
#pragma omp parallel if (all.groups * all.filters * all.depth() * product.depth() > 50000)
  {
    float* workspace = workspaces.of_thread();
#pragma omp for schedule(dynamic)
    for (int64_t task = 0; task < tasks.count(); ++task) {
      d_patch_filters one = product;
      const int64_t group = tasks.group(task);
      one.patches.in += group * all.channels * all.in_channel;
      one.grad_output += group * all.filters * all.out_filter;
      one.out += group * all.filters * all.depth();
      one.task(tasks, task, workspace);
    }
  }
}
