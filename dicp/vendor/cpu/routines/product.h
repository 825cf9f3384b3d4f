// Matrix products of tensors with any steps, in batches, with a bias and an activation.
//
// Tiles read operands in place where they can: an element of A is broadcast from any address, and rows
// of B are vectors if its columns are adjacent. Other operands are packed by the thread that reads
// them, block by block, so that a block stays in its cache.
#pragma once
#include "dots.h"

constexpr int64_t d_high = 512;   // rows of C that are enough for a task
constexpr int64_t d_most_high = 4096;  // the same on tile registers: each task copies its columns of B
constexpr int64_t d_most_parted = 1 << 15;  // most elements of C for which each thread has sums of its own
constexpr int64_t d_few = 384;    // rows of C for which copying B costs more than it saves

// A tile whose sums are complete, while the epilogue of its rows from `next` to `high` is not: on tile
// registers it overlaps with the products of the next tile.
template <class T, class C> struct d_open_tile {};
#if defined(D_TILES)
template <class T> struct d_open_tile<T, d_pair> {
  alignas(64) float rooms[2][d_tile_rows<d_pair>::most * d_panel];
  float add[d_panel];  // the bias of its columns
  float *sums = rooms[0], *before;
  int64_t next = 0, high = 0, row, wide;
  bool has_before, last;
  T* out;
};
#endif

// `by_columns`: C is written in columns, which lie c_row apart. B holds numbers of type W, which become T.
template <class T, bool by_columns = false, class W = T> struct d_products {
  typedef d_cell<T> cell;
  typedef d_tile_rows<cell> tile_rows;
  typedef d_open_tile<T, cell> open_tile;
  static constexpr int64_t most_depth = tile_rows::depth, left_step = d_left_step<cell>;
  int64_t batches, rows, columns, depth;
  d_matrix<T> a;
  d_matrix<W> b;
  const T* bias;
  bool by_row;  // the bias: a number for each row of C, else for each column
  T* c;
  int64_t c_batch, c_row, activation;

  int64_t cells() const { return d_cells_of<T>(depth); }
  int64_t panels() const { return (columns + d_panel - 1) / d_panel; }
  bool parted() const { return cells() > most_depth; }
  // Whether A is read in place: its elements, or pairs of them, are cells.
  bool reads_a() const {
    if (d_held<cell> == 1) return sizeof(T) == sizeof(cell);
    return a.column == 1 && a.row % 2 == 0 && a.batch % 2 == 0 && depth % 2 == 0;
  }
  // Whether `n` columns of B are read in place.
  bool reads_b(int64_t n) const {
    return sizeof(W) == sizeof(float) && b.column == 1 && n % d_panel == 0 && rows <= d_few;
  }
  // Panels of a strip of columns: more where each strip copies A.
  int64_t most() const { return reads_a() && !d_on_tiles<cell> ? 4 : 8; }

  // The epilogue that tiles do not do themselves, for up to `high` rows; `tile` holds their sums.
  void complete(float* tile, int64_t row, int64_t high, int64_t wide, T* out) const {
    for (int64_t r = 0; by_row && r < high; ++r) {
      ((d_vec*)tile)[2 * r] += d_wide(bias[row + r]);
      ((d_vec*)tile)[2 * r + 1] += d_wide(bias[row + r]);
    }
    d_activate(activation, tile, high * d_panel);
    if constexpr (by_columns) return keep_transposed(tile, high, wide, out);
    for (int64_t r = 0; r < high; ++r)
      d_keep_part(out + r * c_row, (const d_vec*)tile + 2 * r, wide);
  }
  // Stores a tile whose columns are rows in memory.
  void keep_transposed(const float* tile, int64_t high, int64_t wide, T* out) const {
    for (int64_t r = 0; r < high; r += d_lanes)
      for (int64_t j = 0; j < wide; j += d_lanes) {
        d_vec square[d_lanes + 1] = {};
        for (int64_t i = 0; i < d_least(high - r, d_lanes); ++i)
          square[i] = *(const d_vec*)(tile + (r + i) * d_panel + j);
        d_transpose_floats(square);
        for (int64_t i = 0; i < d_least(wide - j, d_lanes); ++i)
          d_keep_part(out + (j + i) * c_row + r, square + i, d_least(high - r, d_lanes));
      }
  }
  // The bias of `wide` columns as a panel of floats, in `room` if they do not lie as one.
  const float* columns_of_bias(int64_t column, int64_t wide, float* room) const {
    if (sizeof(T) == sizeof(float) && wide == d_panel) return (const float*)(bias + column);
    d_clear(room, wide, d_panel);
    d_copy(bias + column, 0, 1, 1, wide, room, 0);
    return room;
  }
  // A tile of `most` rows, its columns in one vector or two.
  static auto tile_of(int64_t most, bool narrow) {
    return most == tile_rows::few ? d_tile_to<tile_rows::few, 2, by_columns, cell, float>
           : narrow               ? d_tile_to<tile_rows::most, 1, by_columns, cell, float>
                                  : d_tile_to<tile_rows::most, 2, by_columns, cell, float>;
  }
  // Up to `most` rows of C and `n` columns from `column` on: the sums of `part` cells, `done` of them
  // before. Long sums are made of short ones: rounding errors stay small.
  void row_of_tiles(int64_t most, int64_t row, int64_t high, int64_t column, int64_t n,
                    int64_t done, int64_t part, d_tile_operands<cell> from, int64_t panel,
                    float* before, T* out, open_tile& open) const {
    if constexpr (d_on_tiles<cell>)
      return open_tiles(most, row, high, column, n, done, part, from, panel, before, out, open);
    const int64_t step = d_round_up(n, d_panel), times = (part + d_sweep - 1) / d_sweep;
    const bool last = done + part == cells(), plain = activation == d_none && high == most && !by_row;
    for (int64_t j = 0; j < n; j += d_panel, from.b += panel, before += d_panel) {
      const int64_t wide = d_least(n - j, d_panel);
      const auto sum = tile_of(most, wide <= d_lanes);
      int64_t begin = 0;
      for (int64_t time = 1, end; time <= times - last; ++time, begin = end) {
        end = part * time / times;
        const float* more = done + begin ? before : nullptr;
        sum(end - begin, from.after(begin), {nullptr, more, step, before, step, d_panel});
      }
      if (!last) continue;
      const float* more = done + begin ? before : nullptr;
      float room[d_panel], tile[tile_rows::most * d_panel];
      const float* add = bias && !by_row ? columns_of_bias(column + j, wide, room) : nullptr;
      // Tiles of 16-bit numbers are compiled only for whole tiles; others are narrowed by `complete`.
      if constexpr (!by_columns && sizeof(T) == sizeof(float)) {
        if (plain) {
          sum(part - begin, from.after(begin), {add, more, step, out + j, c_row, wide});
          continue;
        }
      } else if constexpr (!by_columns) {
        if (plain && most == tile_rows::most && wide > d_lanes) {
          d_tile_to<tile_rows::most, 2, false, cell, T>(part - begin, from.after(begin),
                                                        {add, more, step, out + j, c_row, wide});
          continue;
        }
      }
      sum(part - begin, from.after(begin), {add, more, step, tile, d_panel, d_panel});
      complete(tile, row, high, wide, at(out, 0, j));
    }
  }
#if defined(D_TILES)
  // The same on tile registers; the epilogue of the last tile is left to `close`.
  void open_tiles(int64_t most, int64_t row, int64_t high, int64_t column, int64_t n, int64_t done,
                  int64_t part, d_tile_operands<cell> from, int64_t panel, float* before, T* out,
                  open_tile& open) const {
    const int64_t times = part / 16 + 1;  // at least the calls of `between`
    for (int64_t j = 0; j < n; j += d_panel, from.b += panel, before += most * d_panel) {
      const int64_t wide = d_least(n - j, d_panel), rows = (open.high - open.next + times - 1) / times;
      const auto between = [&] { close_rows(open, d_least(open.next + rows, open.high)); };
      float* sums = open.rooms[open.sums == open.rooms[0]];
      if (most == tile_rows::few) d_tile_sums<tile_rows::few, 2>(part, from, sums, between);
      else if (wide <= d_lanes) d_tile_sums<tile_rows::most, 1>(part, from, sums, between);
      else d_tile_sums<tile_rows::most, 2>(part, from, sums, between);
      close(open);
      open.sums = sums, open.next = 0, open.high = high, open.row = row, open.wide = wide;
      open.before = before, open.has_before = done != 0;
      open.last = done + part == cells(), open.out = at(out, 0, j);
      d_clear(open.add, bias && !by_row ? wide : 0, d_panel);
      if (bias && !by_row) d_copy(bias + column + j, 0, 1, 1, wide, open.add, 0);
    }
  }
  // The epilogue of the open tile's rows before `end`.
  __attribute__((noinline, visibility("hidden"))) void close_rows(open_tile& open, int64_t end) const {
    const d_vec *add = (const d_vec*)open.add, left = add[0], right = add[1];
    const bool plain = open.last && !open.has_before && activation == d_none && !by_row;
    if (by_columns || !plain || open.wide < d_panel)
      for (; open.next < end; ++open.next) close_row(open, open.next);
    for (; open.next < end; ++open.next) {
      const d_vec* sum = (const d_vec*)open.sums + 2 * open.next;
      const d_vec all[2] = {sum[0] + left, sum[1] + right};
      d_keep(open.out + open.next * c_row, all, false);
    }
  }
  void close_row(open_tile& open, int64_t r) const {
    d_vec *sum = (d_vec*)open.sums + 2 * r, *before = (d_vec*)open.before + 2 * r;
    if (open.has_before) sum[0] += before[0], sum[1] += before[1];
    if (!open.last) {
      before[0] = sum[0], before[1] = sum[1];
      return;
    }
    const d_vec *add = (const d_vec*)open.add, all = d_vec{} + (by_row ? d_wide(bias[open.row + r]) : 0);
    sum[0] += all + add[0], sum[1] += all + add[1];
    d_activate(activation, (float*)sum, d_panel);
    if constexpr (!by_columns) {
      if (open.wide == d_panel) d_keep(open.out + r * c_row, sum, false);
      else d_keep_part(open.out + r * c_row, sum, open.wide);
    } else if (r == open.high - 1) {
      keep_pairs(open.sums, open.high, open.wide, open.out);
    }
  }
  // Stores a tile whose columns are rows in memory: pairs of its rows are transposed as words.
  void keep_pairs(const float* tile, int64_t high, int64_t wide, T* out) const {
    const uint32_t mask = (uint32_t)(((uint64_t)1 << high) - 1);
    for (int64_t j = 0; j < wide; j += d_lanes) {
      d_words square[d_lanes];
#pragma GCC unroll 16
      for (int i = 0; i < d_lanes; ++i) {
        const float* rows = tile + 2 * i * d_panel + j;
        square[i] = d_paired(*(const d_vec*)rows, *(const d_vec*)(rows + d_panel));
      }
      d_transpose_words(square);
#pragma GCC unroll 16
      for (int i = 0; i < d_lanes; ++i)
        if (j + i < wide)
          asm("vmovdqu16 %1, %0%{%2%}" : "+m"(*(d_words*)(out + (j + i) * c_row)) : "v"(square[i]), "Yk"(mask));
    }
  }
#endif
  // The epilogue of the open tile, if there is one.
  void close(open_tile& open) const {
    if constexpr (d_on_tiles<cell>) close_rows(open, open.high);
  }
  // Prefetches the rows of A of the next tiles.
  void prefetch(const T* line, int64_t left) const {
    constexpr int64_t step = d_line / sizeof(T);
    for (int64_t r = 0; r < d_least(left, tile_rows::most); ++r)
      for (int64_t k = 0; k < depth; k += step) __builtin_prefetch(line + r * a.row + k);
  }
  // Where the number of a row and a column of C lies.
  T* at(T* c, int64_t row, int64_t column) const {
    return by_columns ? c + row + column * c_row : c + row * c_row + column;
  }
  // Floats that a task needs: copies of A and of B, and sums of `high` rows.
  int64_t copies() const { return tile_rows::block * left_step; }
  int64_t sums() const { return copies() + most_depth * d_panel * most(); }
  int64_t room(int64_t high) const {
    return sums() + (parted() ? d_round_up(high, tile_rows::most) : tile_rows::most) * d_panel * most();
  }
  // `count` rows from `row` on and `n` columns from `column` on, of one batch.
  void task(int64_t batch, int64_t row, int64_t count, int64_t column, int64_t n,
            float* room) const {
    const T* from_a = a.data + batch * a.batch + row * a.row;
    const W* from_b = b.data + batch * b.batch + column * b.column;
    T* out = at(c + batch * c_batch, row, column);
    cell* panels = (cell*)(room + copies());
    open_tile open;
    for (int64_t done = 0; !done || done < cells(); done += most_depth) {  // sums of nothing are 0
      const int64_t part = d_least(cells() - done, most_depth), first = done * d_held<cell>;
      const W* right = from_b + first * b.row;
      d_tile_operands<cell> from = {nullptr, 0, 0, (const cell*)right, b.row};
      if (!reads_b(n)) {
        const int64_t numbers = d_least(depth - first, most_depth * d_held<cell>);
        d_panels<W, T>(right, b.row, b.column, numbers, n, panels);
        from.b = panels, from.b_step = d_panel;
      }
      const int64_t panel = reads_b(n) ? d_panel : part * d_panel;
      blocks(from_a + first * a.column, row, count, column, n, done, part, from, panel, room, out, open);
    }
    close(open);
  }
  // The same for one part of the sums; A is copied in blocks of rows, or for the last rows alone.
  void blocks(const T* lines, int64_t row, int64_t count, int64_t column, int64_t n, int64_t done,
              int64_t part, d_tile_operands<cell> from, int64_t panel, float* room, T* out,
              open_tile& open) const {
    const int64_t numbers = d_least(depth - done * d_held<cell>, part * d_held<cell>);
    float* before = room + sums();
    for (int64_t i = 0, high, end = 0; i < count; i += high) {
      const T* line = lines + i * a.row;
      cell* copy = (cell*)room + (reads_a() ? 0 : i % tile_rows::block * left_step);
      const bool next = i == end;
      if (next) end = reads_a() ? count : d_least(count, end + tile_rows::block);
      const int64_t left = end - i;
      const int64_t most = d_takes_short<cell>(left) ? tile_rows::few : tile_rows::most;
      high = d_least(left, most);
      if (reads_a() && high == most) {
        from.a = (const cell*)line, from.a_row = a.row / d_held<cell>, from.a_step = a.column;
      } else {
        if (next || reads_a())
          d_lines(line, a.row, a.column, reads_a() ? high : left, numbers, copy, left_step);
        from.a = copy, from.a_row = left_step, from.a_step = 1;
      }
      const bool ahead = reads_a() && a.column == 1 && left > high;
      // Short rows end before the hardware prefetcher starts. Weights, by columns, are in no cache.
      if (ahead && !parted() && (d_on_tiles<cell> || !by_columns))
        prefetch(line + high * a.row, left - high);
      from.next = from.a + (ahead && by_columns ? high * from.a_row : 0);
      float* sums = before + (parted() ? i * d_round_up(n, d_panel) : 0);
      row_of_tiles(most, row + i, high, column, n, done, part, from, panel, sums, at(out, i, 0), open);
    }
  }
  // Split-K: whether each thread sums a part of the depth, for a small result of great depth.
  bool by_depth(int64_t threads) const {
    return batches == 1 && activation == d_none && !bias && rows <= d_high && threads > 1 &&
           rows * columns <= d_most_parted && 2 * depth >= 3 * threads * most_depth;
  }
  void run_by_depth(int64_t threads) const {
    const int64_t size = rows * columns, wide = most() * d_panel;
    const d_rooms totals(threads * size, 1), rooms(room(rows), threads);
    if (!totals.at || !rooms.at) return;
    T* sums = (T*)totals.at;
#pragma omp parallel
    {
      float* mine = rooms.mine();
#pragma omp for schedule(static)
      for (int64_t part = 0; part < threads; ++part) {
        d_products one = *this;
        const int64_t first = depth * part / threads;
        one.depth = depth * (part + 1) / threads - first;
        one.a.data += first * a.column, one.b.data += first * b.row;
        one.c = sums + part * size, one.c_row = columns;
        for (int64_t column = 0; column < columns; column += wide)
          one.task(0, 0, rows, column, d_least(wide, columns - column), mine);
      }
#pragma omp for schedule(static)
      for (int64_t row = 0; row < rows; ++row) {
        const T* from = sums + row * columns;
#pragma omp simd
        for (int64_t j = 0; j < columns; ++j) {
          T sum = from[j];
          for (int64_t part = 1; part < threads; ++part) sum += from[part * size + j];
          c[row * c_row + j] = sum;
        }
      }
    }
  }
  // Tasks are strips of a batch's columns, and where those are few, parts of its rows.
  __attribute__((noinline)) void run() const {
    const int64_t threads = d_threads();
    if constexpr (sizeof(T) == sizeof(float) && !by_columns)
      if (by_depth(threads)) return run_by_depth(threads);
    int64_t strips = d_round_up((panels() + most() - 1) / most(), batches % threads ? threads : 1);
    strips = d_least(strips, panels());
    const int64_t enough = d_on_tiles<cell> && !parted() ? d_most_high : d_high;
    const d_row_parts cut(rows, enough, tile_rows::most, batches * strips, threads);
    const int64_t parts = cut.parts, step = cut.step;
    const d_rooms rooms(room(step));
    if (!rooms.at) return;
#pragma omp parallel if (batches * rows * columns * depth > 50000)
    {
      const d_tiles_held held;
      float* mine = rooms.mine();
#pragma omp for schedule(dynamic)
      for (int64_t task = 0; task < batches * parts * strips; ++task) {
        const int64_t strip = task % strips, rest = task / strips;
        const int64_t column = panels() * strip / strips * d_panel, row = rest % parts * step;
        const int64_t end = d_least(panels() * (strip + 1) / strips * d_panel, columns);
        this->task(rest / parts, row, d_least(rows - row, step), column, end - column, mine);
      }
    }
  }
};

template <class T> static void d_product(void** args, const int64_t* sizes, bool biased) {
  const d_product_of<T> p(args, sizes, biased);
  d_products<T>{p.batches, p.rows, p.columns, p.depth, p.a, p.b, p.bias, p.by_row,
                p.c, p.c_batch, p.c_row, p.activation}
      .run();
}
// The same where the columns of B are contiguous and the number of rows is known at the call only.
template <class T> static void d_product_any_rows(void** args, const int64_t* sizes, bool biased) {
  if (d_product_of<T>(args, sizes, biased).rows <= d_most_dots) d_dots_of<T>(args, sizes, biased);
  else d_product<T>(args, sizes, biased);
}
// The transposed product: rows of B's transpose are read in place, as they lie in a linear layer's
// weights, and A is packed instead.
template <class T> static void d_product_transposed(void** args, const int64_t* sizes, bool biased) {
  const d_product_of<T> p(args, sizes, biased);
  d_products<T, true>{p.batches, p.columns, p.rows, p.depth,
                      {p.b.data, p.b.batch, p.b.column, p.b.row}, {p.a.data, p.a.batch, p.a.column, p.a.row},
                      p.bias, p.bias && !p.by_row, p.c, p.c_batch, p.c_row, p.activation}
      .run();
}

// The product with a matrix of bytes: arguments and sizes of `d_dots_of_bytes`.
template <class T> static void d_product_of_bytes(void** args, const int64_t* sizes) {
  const d_bytes_of<T> p(args, sizes);
  d_products<T, false, int8_t>{1, p.rows, p.columns, p.depth, p.a, p.b, nullptr, false, p.c, 0, p.c_row, d_none}
      .run();
}

// Rows of a are in groups, each with a b of its own; `ends` says where groups end.
struct d_groups {
  int64_t count, rows;
  const void* ends;
  bool wide;
  // The end of group g, never before `from` and never past the last row.
  int64_t end(int64_t g, int64_t from) const {
    const int64_t given = wide ? ((const int64_t*)ends)[g] : ((const int32_t*)ends)[g];
    return d_least(given > from ? given : from, rows);
  }
};

// Arguments: a, b, ends, c. Sizes: groups, rows, columns, depth, whether ends are 64-bit, then the (row,
// column) steps of a, the (group, row, column) steps of b, and the row step of c.
template <class T>
static void d_product_grouped(void** args, const int64_t* sizes) {
  const int64_t *steps = sizes + 5, columns = sizes[2];
  const d_groups groups = {sizes[0], sizes[1], args[2], sizes[4] != 0};
  int64_t from = 0;
  T* c = (T*)args[3];
  for (int64_t g = 0; g < groups.count; ++g) {
    const int64_t end = groups.end(g, from);
    const d_matrix<T> left = {(const T*)args[0] + from * steps[0], 0, steps[0], steps[1]};
    const d_matrix<T> right = {(const T*)args[1] + g * steps[2], 0, steps[3], steps[4]};
    T* out = c + from * steps[5];
    if (end > from && end - from <= d_most_dots && steps[3] == 1)
      d_dots<T, T>{1, end - from, columns, sizes[3], left, right, nullptr, false, out, 0, steps[5], d_none}.run();
    else if (end > from)
      d_products<T>{1, end - from, columns, sizes[3], left, right, nullptr, false, out, 0, steps[5], d_none}.run();
    from = end;
  }
  for (; from < groups.rows; ++from) d_clear(c + from * steps[5], 0, columns);
}

// The gradient of b: for each group its rows of a, transposed, times those of the result's gradient.
// Arguments: a, gradient, ends, c. Sizes: as above, then the (row, column) steps of a and of the
// gradient, and the (group, row) steps of c.
template <class T>
static void d_product_grouped_weights(void** args, const int64_t* sizes) {
  const int64_t *steps = sizes + 5;
  const d_groups groups = {sizes[0], sizes[1], args[2], sizes[4] != 0};
  int64_t from = 0;
  for (int64_t g = 0; g < groups.count; ++g) {
    const int64_t end = groups.end(g, from);
    const d_products<T> one = {
        1, sizes[3], sizes[2], end - from,
        {(const T*)args[0] + from * steps[0], 0, steps[1], steps[0]},
        {(const T*)args[1] + from * steps[2], 0, steps[2], steps[3]},
        nullptr, false, (T*)args[3] + g * steps[4], 0, steps[5], d_none};
    one.run();
    from = end;
  }
}
