// Convolution of float images as a product of the filters with columns of patches, a few columns at
// a time. Chellapilla, Puri and Simard, "High Performance Convolutional Neural Networks" (2006).
#pragma once
#include "gemm.h"

constexpr int64_t d_patch = 512;    // elements of a patch held at a time
constexpr int64_t d_pixels = 128;   // output pixels that one task computes, of any images
constexpr int64_t d_filters = 480;  // filters that one task computes
constexpr int64_t d_filter_step = d_patch + d_lanes;
constexpr int64_t d_part = d_patch * d_pixels;
constexpr int64_t d_most_shared = 1 << 22;  // floats of patches that threads share

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

d_inline d_axis d_axis_of(const int64_t* sizes) {
  return {sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5]};
}

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

  d_convolution(const int64_t* sizes, const void* from, void* to)
      : images(sizes[0]), channels(sizes[1]), filters(sizes[2]), groups(sizes[3]),
        y(d_axis_of(sizes + 4)), x(d_axis_of(sizes + 10)), in((const float*)from), weights(nullptr),
        bias(nullptr), out((float*)to), in_image(sizes[16]), in_channel(sizes[17]),
        in_row(sizes[18]), out_image(sizes[19]), out_filter(sizes[20]) {}
  int64_t depth() const { return channels * y.taps * x.taps; }
  int64_t pixels() const { return y.out * x.out; }

  // The runs that `count` pixels from `from` on are made of; none crosses a multiple of `most`.
  int64_t runs(int64_t from, int64_t count, int64_t most, d_run* list) const {
    int64_t found = 0;
    for (int64_t place = 0; place < count;) {
      const int64_t pixel = from + place, in_image = pixel % pixels();
      const int64_t column = in_image % x.out, left = most - place % most;
      const int64_t here = d_least(d_least(x.out - column, left), count - place);
      list[found++] = {place, here, pixel / pixels(), in_image / x.out, column};
      place += here;
    }
    return found;
  }
  // What tap (i, j) of one channel reads for the pixels of a run; zero outside the image.
  void read(const d_run& run, int64_t channel, int64_t i, int64_t j, float* to) const {
    const int64_t row = y.source(run.row, i), end = run.column + run.count;
    const bool inside = row >= 0 && row < y.in;
    const int64_t least = x.first(j), most = d_least(x.last(j), end);
    const int64_t low = inside ? d_least(least > run.column ? least : run.column, end) : end;
    const int64_t high = inside && most > low ? most : low;
    const float* source =
        in + run.image * in_image + channel * in_channel + row * in_row + x.source(0, j);
    if (x.stride == 1 && run.count == d_panel && high - low == d_panel) {
      ((d_vec*)to)[0] = ((const d_vec*)(source + low))[0];
      ((d_vec*)to)[1] = ((const d_vec*)(source + low))[1];
      return;
    }
    to -= run.column;
    for (int64_t o = run.column; o < low; ++o) to[o] = 0;
    if (x.stride == 1)
      for (int64_t o = low; o < high; ++o) to[o] = source[o];
    else
      for (int64_t o = low; o < high; ++o) to[o] = source[x.stride * o];
    for (int64_t o = high; o < end; ++o) to[o] = 0;
  }
  // Elements [from, from + part) of the patches that `list` names: element k of the pixel at place p
  // goes to to[p / d_panel * panel + k * row + p % d_panel].
  void gather(int64_t group, int64_t from, int64_t part, const d_run* list, int64_t count,
              int64_t panel, int64_t row, float* to) const {
    const int64_t area = y.taps * x.taps;
    for (int64_t r = 0; r < count; ++r) {
      int64_t channel = group * channels + from / area, i = from % area / x.taps, j = from % x.taps;
      float* line = to + list[r].place / d_panel * panel + list[r].place % d_panel;
      for (int64_t k = 0; k < part; ++k, line += row) {
        read(list[r], channel, i, j, line);
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
  void pack(int64_t group, int64_t block, int64_t part, float* to) const {
    const int64_t first = block * d_block_rows, rows = d_least(filters - first, d_block_rows);
    const int64_t start = part * d_patch;
    d_copy(weights + (group * filters + first) * depth() + start, depth(), 1, rows,
           d_least(depth() - start, d_patch), to, d_filter_step);
  }
  // `most` filters from `filter` on, at `count` pixels from `from` on.
  // Their patches are gathered here, unless they lie in `gathered`, part after part; and the filters
  // are put in order here, unless they lie in `ready`.
  void block(int64_t group, int64_t filter, int64_t most, int64_t from, int64_t count,
             float* ready, const float* gathered, float* room) const {
    float* left = room + d_part;
    float* result = left + d_block_rows * d_filter_step;
    d_run list[d_pixels];
    const int64_t found = gathered ? 0 : runs(from, count, d_panel, list);
    const int64_t width = d_round_up(count, d_panel);
    for (int64_t part = 0; part < parts(); ++part) {
      const int64_t start = part * d_patch, here = d_least(depth() - start, d_patch);
      const float* panels = gathered ? gathered + part * d_part : room;
      if (!gathered) gather(group, start, here, list, found, here * d_panel, d_panel, room);
      for (int64_t f = 0; f < most; f += d_block_rows) {
        const int64_t block = (filter + f) / d_block_rows;
        const float* rows = ready ? packed(ready, group, block, part) : left;
        if (!ready) pack(group, block, part, left);
        d_tiles<d_filter_step, 1>(d_round_up(d_least(most - f, d_block_rows), d_rows), width, here,
                                  rows, panels, here * d_panel, d_panel, result + f * width, width,
                                  part);
      }
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

// Arguments: images, weights, the bias if there is one, the result. Sizes: images, channels and
// filters of a group, groups, both axes (`d_axis`), the (image, channel, row) steps of the images and
// the (image, filter) steps of the result.
static void d_convolve(void** args, const int64_t* sizes, bool biased) {
  d_convolution all(sizes, args[0], args[2 + biased]);
  all.weights = (const float*)args[1];
  all.bias = biased ? (const float*)args[2] : nullptr;
  const int64_t total = all.images * all.pixels(), threads = omp_get_max_threads();
  const int64_t panels = (total + d_panel - 1) / d_panel;
  const int64_t chunks = (panels * d_panel + d_pixels - 1) / d_pixels;
  const int64_t blocks = all.filter_blocks();
  int64_t step = d_least(blocks, d_filters / d_block_rows);
  while (step > 2 && chunks * all.groups * ((blocks + step - 1) / step) < 4 * threads)
    step = (step + 1) / 2;
  const int64_t parts = (blocks + step - 1) / step, tasks = chunks * all.groups * parts;
  // Filters that several tasks read are put in order once for all.
  const int64_t packs = chunks > 2 ? all.groups * blocks * all.parts() : 0;
  float* filters = packs ? d_floats(packs * d_block_rows * d_filter_step) : nullptr;
  // Patches that several tasks read are gathered once for all.
  const int64_t gathers = all.groups * chunks * all.parts();
  const bool share = parts > 1 && gathers * d_part <= d_most_shared;
  float* shared = share ? d_floats(gathers * d_part) : nullptr;
  const auto start_of = [&](int64_t chunk) {
    return d_least(panels * chunk / chunks * d_panel, total);
  };
#pragma omp parallel if (total * all.filters * all.groups * all.depth() > 50000)
  {
    // Lanes past the last pixel are computed too, and thrown away.
    float* mine = d_floats(d_part + d_block_rows * d_filter_step +
                           (d_filters + d_block_rows) * d_pixels);
    d_clear(mine, 0, d_part);
#pragma omp for nowait
    for (int64_t k = 0; k < packs; ++k) {
      const int64_t part = k % all.parts(), block = k / all.parts() % blocks;
      const int64_t group = k / all.parts() / blocks;
      all.pack(group, block, part, all.packed(filters, group, block, part));
    }
#pragma omp for
    for (int64_t k = 0; k < (share ? gathers : 0); ++k) {
      const int64_t part = k % all.parts(), chunk = k / all.parts() % chunks;
      const int64_t first = start_of(chunk), here = d_least(all.depth() - part * d_patch, d_patch);
      d_run list[d_pixels];
      const int64_t found = all.runs(first, start_of(chunk + 1) - first, d_panel, list);
      d_clear(shared + k * d_part, 0, d_part);
      all.gather(k / all.parts() / chunks, part * d_patch, here, list, found, here * d_panel, d_panel,
                 shared + k * d_part);
    }
#pragma omp for schedule(dynamic)
    for (int64_t task = 0; task < tasks; ++task) {
      const int64_t part = task % parts, rest = task / parts;
      const int64_t group = rest % all.groups, chunk = rest / all.groups;
      const int64_t from = start_of(chunk), first = part * step * d_block_rows;
      all.block(group, first, d_least(all.filters - first, step * d_block_rows), from,
                start_of(chunk + 1) - from, filters,
                share ? shared + (group * chunks + chunk) * all.parts() * d_part : nullptr, mine);
    }
    d_done(mine);
  }
  d_done(shared);
  d_done(filters);
}

// The gradient of the filters: for 48 elements of a patch at a time, their values at all pixels times
// what reached the result there.
struct d_filter_gradient {
  const d_convolution& all;  // its `out` is the gradient of the result
  float* to;

  int64_t total() const { return all.images * all.pixels(); }
  int64_t padded() const { return d_round_up(all.filters, d_panel); }
  int64_t blocks() const { return (all.depth() + d_block_rows - 1) / d_block_rows; }
  // One image of one panel of filters, turned: pixels first.
  void pack(float* turned, int64_t group, int64_t panel, int64_t image) const {
    const int64_t first = panel * d_panel, width = d_least(all.filters - first, d_panel);
    const float* from =
        all.out + image * all.out_image + (group * all.filters + first) * all.out_filter;
    d_panels(from, 1, all.out_filter, all.pixels(), width,
             turned + ((group * padded() + first) * total()) + image * all.pixels() * d_panel);
  }
  void block(const float* turned, int64_t group, int64_t block, float* room) const {
    const int64_t first = block * d_block_rows, count = d_least(all.depth() - first, d_block_rows);
    float* left = room;
    float* result = left + d_block_rows * d_filter_step;
    d_run list[d_patch];
    for (int64_t from = 0; from < total(); from += d_patch) {
      const int64_t part = d_least(total() - from, d_patch);
      const int64_t found = all.runs(from, part, d_patch, list);
      all.gather(group, first, count, list, found, d_panel, d_filter_step, left);
      d_tiles<d_filter_step, 1>(d_round_up(count, d_rows), padded(), part, left,
                                turned + group * padded() * total() + from * d_panel,
                                total() * d_panel, d_panel, result, padded(), from != 0);
    }
    if (!total()) d_clear(result, 0, d_block_rows * padded());
    d_transpose(result, padded(), count, all.filters,
                to + group * all.filters * all.depth() + first, all.depth());
  }
};

// Arguments: images, the gradient of the result, the gradient of the filters. Sizes: as above.
static void d_convolution_filters(void** args, const int64_t* sizes) {
  const d_convolution all(sizes, args[0], args[1]);
  const d_filter_gradient gradient = {all, (float*)args[2]};
  const int64_t panels = gradient.padded() / d_panel, blocks = gradient.blocks();
  float* turned = d_floats(all.groups * gradient.padded() * gradient.total());
#pragma omp parallel if (gradient.total() * all.filters * all.groups * all.depth() > 50000)
  {
    const int64_t room = d_block_rows * (d_filter_step + gradient.padded());
    float* mine = d_floats(room);
    d_clear(mine, 0, room);
#pragma omp for
    for (int64_t k = 0; k < all.groups * panels * all.images; ++k)
      gradient.pack(turned, k / (panels * all.images), k / all.images % panels, k % all.images);
#pragma omp for schedule(dynamic)
    for (int64_t k = 0; k < all.groups * blocks; ++k)
      gradient.block(turned, k / blocks, k % blocks, mine);
    d_done(mine);
  }
  d_done(turned);
}
