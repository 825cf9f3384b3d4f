// Convolution of float images as a product of the filters with columns of patches, a few columns at
// a time. Chellapilla, Puri and Simard, "High Performance Convolutional Neural Networks" (2006).
#pragma once
#include "gemm.h"

constexpr int64_t d_patch = 512;    // elements of a patch held at a time
constexpr int64_t d_pixels = 128;   // output pixels that one task computes, of any images
constexpr int64_t d_filters = 480;  // filters that one task computes
constexpr int64_t d_filter_step = d_patch + d_lanes;

struct d_axis {
  int64_t in, out, taps, stride, padding, dilation;
  int64_t source(int64_t o, int64_t tap) const { return o * stride - padding + tap * dilation; }
  // Outputs from which on, and up to which, `tap` reads inside the image.
  int64_t first(int64_t tap) const {
    const int64_t short_of = padding - tap * dilation;
    return short_of > 0 ? (short_of + stride - 1) / stride : 0;
  }
  int64_t last(int64_t tap) const {
    const int64_t room = in - 1 + padding - tap * dilation;
    return room < 0 ? 0 : d_least(out, room / stride + 1);
  }
};

// Neighbouring output pixels of one image row.
struct d_run {
  int64_t place, count, image, row, column;
};

struct d_convolution {
  int64_t images, channels, filters, groups;
  d_axis y, x;
  const float *in, *weights, *bias;
  float* out;
  int64_t in_image, in_channel, in_row, out_image, out_filter;

  int64_t depth() const { return channels * y.taps * x.taps; }
  int64_t pixels() const { return y.out * x.out; }

  // Runs end where a panel ends.
  int64_t runs(int64_t from, int64_t count, d_run* list) const {
    int64_t found = 0;
    for (int64_t place = 0; place < count;) {
      const int64_t pixel = from + place, in_image = pixel % pixels();
      const int64_t column = in_image % x.out, in_panel = d_panel - place % d_panel;
      const int64_t here = d_least(d_least(x.out - column, in_panel), count - place);
      list[found++] = {place, here, pixel / pixels(), in_image / x.out, column};
      place += here;
    }
    return found;
  }
  // Elements [from, from + part) of the patches that `list` names, in panels.
  void gather(int64_t group, int64_t from, int64_t part, const d_run* list, int64_t count,
              float* panels) const {
    for (int64_t r = 0; r < count; ++r) {
      const d_run& run = list[r];
      float* to = panels + run.place / d_panel * part * d_panel + run.place % d_panel;
      const int64_t end = run.column + run.count, area = y.taps * x.taps;
      const float* image = in + run.image * in_image + group * channels * in_channel;
      int64_t channel = from / area, i = from % area / x.taps, j = from % x.taps;
      for (int64_t k = 0; k < part; ++k, to += d_panel) {
        const int64_t row = y.source(run.row, i);
        const bool inside = row >= 0 && row < y.in;
        const int64_t least = x.first(j), most = d_least(x.last(j), end);
        const int64_t low = inside ? d_least(least > run.column ? least : run.column, end) : end;
        const int64_t high = inside && most > low ? most : low;
        const float* source = image + channel * in_channel + row * in_row + x.source(0, j);
        if (x.stride == 1 && high - low == d_panel) {
          ((d_vec*)to)[0] = ((const d_vec*)(source + low))[0];
          ((d_vec*)to)[1] = ((const d_vec*)(source + low))[1];
        } else {
          float* line = to - run.column;
          for (int64_t o = run.column; o < low; ++o) line[o] = 0;
          if (x.stride == 1)
            for (int64_t o = low; o < high; ++o) line[o] = source[o];
          else
            for (int64_t o = low; o < high; ++o) line[o] = source[x.stride * o];
          for (int64_t o = high; o < end; ++o) line[o] = 0;
        }
        if (++j == x.taps) {
          j = 0;
          if (++i == y.taps) i = 0, ++channel;
        }
      }
    }
  }
  int64_t parts() const { return (depth() + d_patch - 1) / d_patch; }
  int64_t filter_blocks() const { return (filters + d_block_rows - 1) / d_block_rows; }
  // The filters as tiles read them: block after block, each in parts of d_patch elements.
  float* packed(float* all, int64_t group, int64_t block, int64_t part) const {
    return all + ((group * filter_blocks() + block) * parts() + part) * d_block_rows * d_filter_step;
  }
  void pack(float* all, int64_t group, int64_t block) const {
    const int64_t first = block * d_block_rows, rows = d_least(filters - first, d_block_rows);
    const float* from = weights + (group * filters + first) * depth();
    for (int64_t part = 0; part < parts(); ++part) {
      const int64_t start = part * d_patch;
      d_copy(from + start, depth(), 1, rows, d_least(depth() - start, d_patch),
             packed(all, group, block, part), d_filter_step);
    }
  }
  // `most` filters from `filter` on, at `count` pixels from `from` on.
  void block(int64_t group, int64_t filter, int64_t most, int64_t from, int64_t count,
             float* filters_packed, float* room) const {
    float* panels = room;
    float* result = panels + d_patch * d_pixels;
    d_run list[d_pixels];
    const int64_t found = runs(from, count, list), width = d_round_up(count, d_panel);
    for (int64_t part = 0; part < parts(); ++part) {
      const int64_t start = part * d_patch, here = d_least(depth() - start, d_patch);
      gather(group, start, here, list, found, panels);
      for (int64_t f = 0; f < most; f += d_block_rows)
        d_tiles<d_filter_step, 1>(d_round_up(d_least(most - f, d_block_rows), d_rows), width, here,
                                  packed(filters_packed, group, (filter + f) / d_block_rows, part),
                                  panels, here * d_panel, d_panel, result + f * width, width, part);
    }
    for (int64_t place = 0; place < count;) {
      const int64_t pixel = (from + place) % pixels(), image = (from + place) / pixels();
      const int64_t here = d_least(pixels() - pixel, count - place);
      for (int64_t f = 0; f < most; ++f) {
        const int64_t o = group * filters + filter + f;
        const float add = bias ? bias[o] : 0.0f;
        const float* source = result + f * width + place;
        float* to = out + image * out_image + o * out_filter + pixel;
#pragma omp simd
        for (int64_t p = 0; p < here; ++p) to[p] = source[p] + add;
      }
      place += here;
    }
  }
};

d_inline d_axis d_axis_of(const int64_t* sizes) {
  return {sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5]};
}

// Arguments: images, weights, the bias if there is one, the result. Sizes: images, channels and
// filters of a group, groups, both axes (`d_axis`), the (image, channel, row) steps of the images and
// the (image, filter) steps of the result.
static void d_convolve(void** args, const int64_t* sizes, bool biased) {
  const int64_t* steps = sizes + 16;
  const d_convolution all = {
      sizes[0], sizes[1], sizes[2], sizes[3], d_axis_of(sizes + 4), d_axis_of(sizes + 10),
      (const float*)args[0], (const float*)args[1], biased ? (const float*)args[2] : nullptr,
      (float*)args[2 + biased], steps[0], steps[1], steps[2], steps[3], steps[4]};
  const int64_t total = all.images * all.pixels(), threads = omp_get_max_threads();
  const int64_t panels = (total + d_panel - 1) / d_panel;
  const int64_t chunks = (panels * d_panel + d_pixels - 1) / d_pixels;
  const int64_t blocks = all.filter_blocks();
  int64_t step = d_least(blocks, d_filters / d_block_rows);
  while (step > 2 && chunks * all.groups * ((blocks + step - 1) / step) < 4 * threads)
    step = (step + 1) / 2;
  const int64_t parts = (blocks + step - 1) / step, tasks = chunks * all.groups * parts;
  float* filters = d_floats(all.groups * blocks * all.parts() * d_block_rows * d_filter_step);
#pragma omp parallel if (total * all.filters * all.groups * all.depth() > 50000)
  {
    // Lanes past the last pixel are computed too, and thrown away.
    const int64_t room = d_patch * d_pixels + (d_filters + d_block_rows) * d_pixels;
    float* mine = d_floats(room);
    d_clear(mine, 0, d_patch * d_pixels);
#pragma omp for
    for (int64_t k = 0; k < all.groups * blocks; ++k) all.pack(filters, k / blocks, k % blocks);
#pragma omp for schedule(dynamic)
    for (int64_t task = 0; task < tasks; ++task) {
      const int64_t part = task % parts, rest = task / parts;
      const int64_t group = rest % all.groups, chunk = rest / all.groups;
      const int64_t from = panels * chunk / chunks * d_panel;
      const int64_t end = d_least(panels * (chunk + 1) / chunks * d_panel, total);
      const int64_t first = part * step * d_block_rows;
      all.block(group, first, d_least(all.filters - first, step * d_block_rows), from, end - from,
                filters, mine);
    }
    d_free(mine);
  }
  d_free(filters);
}
