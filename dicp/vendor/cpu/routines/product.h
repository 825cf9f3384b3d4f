// Matrix products of tensors with any steps, in batches, with a bias and an activation.
//
// Tiles read operands in place where they can: an element of A is broadcast from any address, and rows
// of B are vectors if its columns are adjacent. Other operands are packed by the thread that reads
// them, block by block, so that a block stays in its cache.
#pragma once
#include "dots.h"

constexpr int64_t d_task_rows = 512;   // rows of C that are enough for a task
constexpr int64_t d_task_rows_on_tiles = 4096;  // the same on tile registers: each task copies its columns of B
constexpr int64_t d_max_split_k_size = 1 << 15;  // most elements of C for which each thread has sums of its own
constexpr int64_t d_max_rows_unpacked = 384;    // rows of C for which copying B costs more than it saves
constexpr int64_t d_page = 4096;        // bytes after which addresses fall into the same set of an L1 cache
constexpr int64_t d_max_cached_a = 1 << 18;     // packed elements of A that the L2 cache keeps beside B, on tiles

// A tile whose sums are complete, while the epilogue of its rows from `next` to `height` is not: on tile
// registers it overlaps with the products of the next tile.
template <class T, class C> struct d_pending_tile {};
#if defined(D_TILES)
template <class T> struct d_pending_tile<T, d_bf16_pair> {
  alignas(64) float buffers[2][d_tile_shape<d_bf16_pair>::rows * d_panel];
  float add[d_panel];  // the bias of its columns
  float *sums = buffers[0], *before;
  int64_t next = 0, height = 0, row, wide;
  bool has_before, last;
  T* out;
};
#endif

// `by_columns`: C is written in columns, which lie c_row apart. B holds numbers of type W, which become T.
template <class T, bool by_columns = false, class W = T> struct d_gemm {
  typedef d_packed<T> packed;
  typedef d_tile_shape<packed> tile_shape;
  typedef d_pending_tile<T, packed> pending_tile;
  static constexpr int64_t most_depth = tile_shape::depth, left_step = d_packed_a_stride<packed>;
  int64_t batches, rows, columns, depth;
  d_matrix<T> a;
  d_matrix<W> b;
  const T* bias;
  bool by_row;  // the bias: a number for each row of C, else for each column
  T* c;
  int64_t c_batch, c_row, activation;

  int64_t packed_depth() const { return d_packed_depth<T>(depth); }
  int64_t panels() const { return (columns + d_panel - 1) / d_panel; }
  bool splits_depth() const { return packed_depth() > most_depth; }
  // Whether the rows of A that a tile reads together lie in one set of the L1 cache, which holds fewer lines, and
  // are read often enough for a copy.
  bool rows_collide() const {
    return !d_uses_tiles<packed> && a.column == 1 && a.row * sizeof(T) % d_page == 0 && panels() >= 4;
  }
  // Whether A is read in place: its elements, or pairs of them, are packed elements.
  bool reads_a_in_place() const {
    if (rows_collide()) return false;
    if (d_pack_factor<packed> == 1) return sizeof(T) == sizeof(packed);
    return a.column == 1 && a.row % 2 == 0 && a.batch % 2 == 0 && depth % 2 == 0;
  }
  // Whether `n` columns of B are read in place.
  bool reads_b_in_place(int64_t n) const {
    return sizeof(W) == sizeof(float) && b.column == 1 && n % d_panel == 0 && rows <= d_max_rows_unpacked;
  }
  // Panels of a strip of columns: more where each strip copies A, or reads it fast and its panels, 512 KiB at
  // most, stay in the L2 cache.
  int64_t panels_per_strip() const {
    if (d_uses_tiles<packed>) return packed_depth() > most_depth / 2 ? 4 : 8;
    return reads_a_in_place() ? 4 : 8;
  }

  // The epilogue that tiles do not do themselves, for up to `height` rows; `tile` holds their sums.
  void apply_epilogue(float* tile, int64_t row, int64_t height, int64_t wide, T* out) const {
    for (int64_t r = 0; by_row && r < height; ++r) {
      ((d_vec*)tile)[2 * r] += d_to_float(bias[row + r]);
      ((d_vec*)tile)[2 * r + 1] += d_to_float(bias[row + r]);
    }
    d_activate(activation, tile, height * d_panel);
    if constexpr (by_columns) return store_transposed(tile, height, wide, out);
    for (int64_t r = 0; r < height; ++r)
      d_store_partial_row(out + r * c_row, (const d_vec*)tile + 2 * r, wide);
  }
  // Stores a tile whose columns are rows in memory.
  void store_transposed(const float* tile, int64_t height, int64_t wide, T* out) const {
    for (int64_t r = 0; r < height; r += d_lanes)
      for (int64_t j = 0; j < wide; j += d_lanes) {
        d_vec square[d_lanes + 1] = {};
        for (int64_t i = 0; i < d_min(height - r, d_lanes); ++i)
          square[i] = *(const d_vec*)(tile + (r + i) * d_panel + j);
        d_transpose_floats(square);
        for (int64_t i = 0; i < d_min(wide - j, d_lanes); ++i)
          d_store_partial_row(out + (j + i) * c_row + r, square + i, d_min(height - r, d_lanes));
      }
  }
  // The bias of `wide` columns as a panel of floats, in `workspace` if they do not lie as one.
  const float* columns_of_bias(int64_t column, int64_t wide, float* workspace) const {
    if (sizeof(T) == sizeof(float) && wide == d_panel) return (const float*)(bias + column);
    d_clear(workspace, wide, d_panel);
    d_copy(bias + column, 0, 1, 1, wide, workspace, 0);
    return workspace;
  }
  // A tile of `tile_rows` rows, its columns in one vector or two.
  static auto tile_of(int64_t tile_rows, bool narrow) {
    return tile_rows == tile_shape::short_rows
               ? d_compute_and_store_tile<tile_shape::short_rows, 2, by_columns, packed, float>
           : narrow ? d_compute_and_store_tile<tile_shape::rows, 1, by_columns, packed, float>
                    : d_compute_and_store_tile<tile_shape::rows, 2, by_columns, packed, float>;
  }
  // Up to `tile_rows` rows of C and `n` columns from `column` on: the sums of `part` packed elements, after
  // `done` earlier ones. A long sum is computed in blocks: rounding errors stay small.
  void row_of_tiles(int64_t tile_rows, int64_t row, int64_t height, int64_t column, int64_t n,
                    int64_t done, int64_t part, d_tile_operands<packed> from, int64_t panel,
                    float* before, T* out, pending_tile& pending) const {
    if constexpr (d_uses_tiles<packed>)
      return start_tiles(tile_rows, row, height, column, n, done, part, from, panel, before, out, pending);
    constexpr int64_t summed = d_summed_depth<packed>;
    const int64_t step = d_round_up(n, d_panel), times = (part + summed - 1) / summed;
    const bool last = done + part == packed_depth(),
               plain = activation == d_none && height == tile_rows && !by_row;
    for (int64_t j = 0; j < n; j += d_panel, from.b += panel, before += d_panel) {
      const int64_t wide = d_min(n - j, d_panel);
      const auto sum = tile_of(tile_rows, wide <= d_lanes);
      int64_t begin = 0;
      for (int64_t time = 1, end; time <= times - last; ++time, begin = end) {
        end = part * time / times;
        const float* more = done + begin ? before : nullptr;
        sum(end - begin, from.after(begin), {nullptr, more, step, before, step, d_panel});
      }
      if (!last) continue;
      const float* more = done + begin ? before : nullptr;
      float workspace[d_panel], tile[tile_shape::rows * d_panel];
      const float* add = bias && !by_row ? columns_of_bias(column + j, wide, workspace) : nullptr;
      // Tiles of 16-bit numbers are compiled only for whole tiles; others are narrowed by `apply_epilogue`.
      if constexpr (!by_columns && sizeof(T) == sizeof(float)) {
        if (plain) {
          sum(part - begin, from.after(begin), {add, more, step, out + j, c_row, wide});
          continue;
        }
      } else if constexpr (!by_columns) {
        if (plain && tile_rows == tile_shape::rows && wide > d_lanes) {
          d_compute_and_store_tile<tile_shape::rows, 2, false, packed, T>(part - begin, from.after(begin),
                                                        {add, more, step, out + j, c_row, wide});
          continue;
        }
      }
      sum(part - begin, from.after(begin), {add, more, step, tile, d_panel, d_panel});
      apply_epilogue(tile, row, height, wide, at(out, 0, j));
    }
  }
#if defined(D_TILES)
  // The same on tile registers; the epilogue of the last tile is left to `finish_tile`.
  void start_tiles(int64_t tile_rows, int64_t row, int64_t height, int64_t column, int64_t n, int64_t done,
                  int64_t part, d_tile_operands<packed> from, int64_t panel, float* before, T* out,
                  pending_tile& pending) const {
    const int64_t times = part / 16 + 1;  // at least the calls of `between`
    // Between the products with a panel, its share of the rows of A of the next tile is prefetched, line by line.
    const int64_t rows_ahead = from.next == from.a ? 0 : tile_rows, width = d_round_up(n, d_panel);
    const packed* ahead = from.next;
    for (int64_t j = 0; j < n; j += d_panel, from.b += panel, before += tile_rows * d_panel) {
      const int64_t wide = d_min(n - j, d_panel), rows = (pending.height - pending.next + times - 1) / times;
      const int64_t begin = rows_ahead * j / width, end = rows_ahead * (j + d_panel) / width;
      const auto between = [&](int64_t k) {
        for (int64_t r = begin; r < end; ++r) __builtin_prefetch(ahead + r * from.a_row + k, 0, 2);
        finish_rows(pending, d_min(pending.next + rows, pending.height));
      };
      float* sums = pending.buffers[pending.sums == pending.buffers[0]];
      if (tile_rows == tile_shape::short_rows)
        d_compute_tile_in_registers<tile_shape::short_rows, 2>(part, from, nullptr, sums, between);
      else if (wide <= d_lanes)
        d_compute_tile_in_registers<tile_shape::rows, 1>(part, from, nullptr, sums, between);
      else d_compute_tile_in_registers<tile_shape::rows, 2>(part, from, nullptr, sums, between);
      finish_tile(pending);
      pending.sums = sums, pending.next = 0, pending.height = height, pending.row = row, pending.wide = wide;
      pending.before = before, pending.has_before = done != 0;
      pending.last = done + part == packed_depth(), pending.out = at(out, 0, j);
      d_clear(pending.add, bias && !by_row ? wide : 0, d_panel);
      if (bias && !by_row) d_copy(bias + column + j, 0, 1, 1, wide, pending.add, 0);
    }
  }
  // The epilogue of the open tile's rows before `end`.
  __attribute__((noinline, visibility("hidden"))) void finish_rows(pending_tile& pending, int64_t end) const {
    const int64_t begin = pending.next;
    if (begin >= end) return;
    pending.next = end;
    const bool plain = pending.last && !pending.has_before && activation == d_none && !by_row;
    if (by_columns || !plain || pending.wide < d_panel) return finish_any_rows(pending, begin, end);
    const d_vec *add = (const d_vec*)pending.add, left = add[0], right = add[1];
    for (int64_t r = begin; r < end; ++r) {
      const d_vec* sum = (const d_vec*)pending.sums + 2 * r;
      const d_vec all[2] = {sum[0] + left, sum[1] + right};
      d_store_row(pending.out + r * c_row, all, false);
    }
  }
  // The same with all that an epilogue may have.
  void finish_any_rows(pending_tile& pending, int64_t begin, int64_t end) const {
    for (int64_t r = begin; r < end; ++r) add_to_row(pending, r);
    if (!pending.last) return;
    d_activate(activation, pending.sums + begin * d_panel, (end - begin) * d_panel);
    if constexpr (by_columns) {
      if (end == pending.height)
        store_transposed_bf16(pending.sums, pending.height, pending.wide, pending.out);
    } else {
      for (int64_t r = begin; r < end; ++r) {
        const d_vec* sum = (const d_vec*)pending.sums + 2 * r;
        if (pending.wide == d_panel) d_store_row(pending.out + r * c_row, sum, false);
        else d_store_partial_row(pending.out + r * c_row, sum, pending.wide);
      }
    }
  }
  // Adds the earlier sums of row r, and the bias if its sums are complete; else stores them for later ones.
  void add_to_row(pending_tile& pending, int64_t r) const {
    d_vec *sum = (d_vec*)pending.sums + 2 * r, *before = (d_vec*)pending.before + 2 * r;
    if (pending.has_before) sum[0] += before[0], sum[1] += before[1];
    if (!pending.last) {
      before[0] = sum[0], before[1] = sum[1];
      return;
    }
    const d_vec *add = (const d_vec*)pending.add,
                all = d_vec{} + (by_row ? d_to_float(bias[pending.row + r]) : 0);
    sum[0] += all + add[0], sum[1] += all + add[1];
  }
  // Stores a tile whose columns are rows in memory: pairs of its rows are transposed as words.
  void store_transposed_bf16(const float* tile, int64_t height, int64_t wide, T* out) const {
    const uint32_t mask = (uint32_t)(((uint64_t)1 << height) - 1);
    for (int64_t j = 0; j < wide; j += d_lanes) {
      d_words square[d_lanes];
#pragma GCC unroll 16
      for (int i = 0; i < d_lanes; ++i) {
        const float* rows = tile + 2 * i * d_panel + j;
        square[i] = d_interleaved_bf16(*(const d_vec*)rows, *(const d_vec*)(rows + d_panel));
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
  void finish_tile(pending_tile& pending) const {
    if constexpr (d_uses_tiles<packed>) finish_rows(pending, pending.height);
  }
  // Prefetches the rows of A of the next tiles.
  void prefetch(const T* line, int64_t left) const {
    constexpr int64_t step = d_line / sizeof(T);
    for (int64_t r = 0; r < d_min(left, tile_shape::rows); ++r)
      for (int64_t k = 0; k < depth; k += step) __builtin_prefetch(line + r * a.row + k);
  }
  // Where the number of a row and a column of C lies.
  T* at(T* c, int64_t row, int64_t column) const {
    return by_columns ? c + row + column * c_row : c + row * c_row + column;
  }
  // Floats that a task needs: copies of A and of B, and sums of `height` rows.
  int64_t packed_b_offset() const { return tile_shape::block_rows * left_step; }
  int64_t sums_offset() const { return packed_b_offset() + most_depth * d_panel * panels_per_strip(); }
  int64_t workspace_size(int64_t height) const {
    return sums_offset() + (splits_depth() ? d_round_up(height, tile_shape::rows) : tile_shape::rows) *
                               d_panel * panels_per_strip();
  }
  // `count` rows from `row` on and `n` columns from `column` on, of one batch.
  void task(int64_t batch, int64_t row, int64_t count, int64_t column, int64_t n,
            float* workspace) const {
    const T* from_a = a.data + batch * a.batch + row * a.row;
    const W* from_b = b.data + batch * b.batch + column * b.column;
    T* out = at(c + batch * c_batch, row, column);
    packed* panels = (packed*)(workspace + packed_b_offset());
    pending_tile pending;
    for (int64_t done = 0; !done || done < packed_depth(); done += most_depth) {  // sums of nothing are 0
      const int64_t part = d_min(packed_depth() - done, most_depth), first = done * d_pack_factor<packed>;
      const W* right = from_b + first * b.row;
      d_tile_operands<packed> from = {nullptr, 0, 0, (const packed*)right, b.row};
      if (!reads_b_in_place(n)) {
        const int64_t numbers = d_min(depth - first, most_depth * d_pack_factor<packed>);
        d_pack_panels<W, T>(right, b.row, b.column, numbers, n, panels);
        from.b = panels, from.b_step = d_panel;
      }
      const int64_t panel = reads_b_in_place(n) ? d_panel : part * d_panel;
      blocks(from_a + first * a.column, row, count, column, n, done, part, from, panel, workspace, out,
             pending);
    }
    finish_tile(pending);
  }
  // The same for one part of the sums; A is copied in blocks of rows, or for the last rows alone.
  void blocks(const T* lines, int64_t row, int64_t count, int64_t column, int64_t n, int64_t done,
              int64_t part, d_tile_operands<packed> from, int64_t panel, float* workspace, T* out,
              pending_tile& pending) const {
    const int64_t numbers = d_min(depth - done * d_pack_factor<packed>, part * d_pack_factor<packed>);
    float* before = workspace + sums_offset();
    for (int64_t i = 0, height, end = 0; i < count; i += height) {
      const T* line = lines + i * a.row;
      packed* copy = (packed*)workspace + (reads_a_in_place() ? 0 : i % tile_shape::block_rows * left_step);
      const bool next = i == end;
      if (next) end = reads_a_in_place() ? count : d_min(count, end + tile_shape::block_rows);
      const int64_t left = end - i;
      const int64_t tile_rows = d_takes_short_tile<packed>(left) ? tile_shape::short_rows : tile_shape::rows;
      height = d_min(left, tile_rows);
      if (reads_a_in_place() && height == tile_rows) {
        from.a = (const packed*)line, from.a_row = a.row / d_pack_factor<packed>, from.a_step = a.column;
      } else {
        if (next || reads_a_in_place())
          d_pack_rows(line, a.row, a.column, reads_a_in_place() ? height : left, numbers, copy, left_step);
        from.a = copy, from.a_row = left_step, from.a_step = 1;
      }
      const bool ahead = reads_a_in_place() && a.column == 1 && left > height;
      // Short rows end before the hardware prefetcher starts. Weights, by columns, are in no cache.
      if (ahead && !splits_depth() && !d_uses_tiles<packed> && !by_columns)
        prefetch(line + height * a.row, left - height);
      const bool cached = !by_columns && (!d_uses_tiles<packed> || count * part <= d_max_cached_a);
      from.next = from.a + (ahead && !cached ? height * from.a_row : 0);
      float* sums = before + (splits_depth() ? i * d_round_up(n, d_panel) : 0);
      row_of_tiles(tile_rows, row + i, height, column, n, done, part, from, panel, sums, at(out, i, 0),
                   pending);
    }
  }
  // Split-K: whether each thread sums a part of the depth, for a small result of great depth.
  bool uses_split_k(int64_t threads) const {
    return batches == 1 && activation == d_none && !bias && rows <= d_task_rows && threads > 1 &&
           rows * columns <= d_max_split_k_size && 2 * depth >= 3 * threads * most_depth;
  }
  void run_split_k(int64_t threads) const {
    const int64_t size = rows * columns, wide = panels_per_strip() * d_panel;
    const d_workspaces totals(threads * size, 1), workspaces(workspace_size(rows), threads);
    if (!totals.data || !workspaces.data) return;
    T* sums = (T*)totals.data;
#pragma omp parallel
    {
      float* workspace = workspaces.of_thread();
#pragma omp for schedule(static)
      for (int64_t part = 0; part < threads; ++part) {
        d_gemm one = *this;
        const int64_t first = depth * part / threads;
        one.depth = depth * (part + 1) / threads - first;
        one.a.data += first * a.column, one.b.data += first * b.row;
        one.c = sums + part * size, one.c_row = columns;
        for (int64_t column = 0; column < columns; column += wide)
          one.task(0, 0, rows, column, d_min(wide, columns - column), workspace);
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
      if (uses_split_k(threads)) return run_split_k(threads);
    int64_t strips =
        d_round_up((panels() + panels_per_strip() - 1) / panels_per_strip(), batches % threads ? threads : 1);
    strips = d_min(strips, panels());
    const int64_t enough = d_uses_tiles<packed> && !splits_depth() ? d_task_rows_on_tiles : d_task_rows;
    const d_row_partition cut(rows, enough, tile_shape::rows, batches * strips, threads);
    const int64_t parts = cut.parts, step = cut.step;
    const d_workspaces workspaces(workspace_size(step));
    if (!workspaces.data) return;
#pragma omp parallel if (batches * rows * columns * depth > 50000)
    {
      const d_tile_scope tile_scope;
      float* workspace = workspaces.of_thread();
#pragma omp for schedule(dynamic)
      for (int64_t task = 0; task < batches * parts * strips; ++task) {
        const int64_t strip = task % strips, rest = task / strips;
        const int64_t column = panels() * strip / strips * d_panel, row = rest % parts * step;
        const int64_t end = d_min(panels() * (strip + 1) / strips * d_panel, columns);
        this->task(rest / parts, row, d_min(rows - row, step), column, end - column, workspace);
      }
    }
  }
};

template <class T> static void d_product(void** args, const int64_t* sizes, bool biased) {
  const d_product_args<T> p(args, sizes, biased);
  d_gemm<T>{p.batches, p.rows, p.columns, p.depth, p.a, p.b, p.bias, p.by_row,
                p.c, p.c_batch, p.c_row, p.activation}
      .run();
}
// The same where the columns of B are contiguous and the number of rows is known at the call only.
template <class T> static void d_product_any_rows(void** args, const int64_t* sizes, bool biased) {
  if (d_product_args<T>(args, sizes, biased).rows <= d_max_dot_rows) d_product_by_dots<T>(args, sizes, biased);
  else d_product<T>(args, sizes, biased);
}
// The transposed product: rows of B's transpose are read in place, as they lie in a linear layer's
// weights, and A is packed instead.
template <class T> static void d_product_transposed(void** args, const int64_t* sizes, bool biased) {
  const d_product_args<T> p(args, sizes, biased);
  d_gemm<T, true>{p.batches, p.columns, p.rows, p.depth,
                      {p.b.data, p.b.batch, p.b.column, p.b.row}, {p.a.data, p.a.batch, p.a.column, p.a.row},
                      p.bias, p.bias && !p.by_row, p.c, p.c_batch, p.c_row, p.activation}
      .run();
}

// The product with a matrix of bytes: arguments and sizes of `d_product_of_bytes_by_dots`.
template <class T> static void d_product_of_bytes(void** args, const int64_t* sizes) {
  const d_bytes_product_args<T> p(args, sizes);
  d_gemm<T, false, int8_t>{1, p.rows, p.columns, p.depth, p.a, p.b, nullptr, false, p.c, 0, p.c_row, d_none}
      .run();
}

#if defined(D_TILES)
// The product of few rows with a matrix of bytes, transposed: 32 columns of B, as rows that are adjacent in
// memory, are converted in blocks that the L1 cache keeps. Sums go on from block to block.
struct d_byte_tiles {
  static constexpr int64_t height = d_tile_shape<d_bf16_pair>::rows, block = 256, step = block + d_lanes,
                           tile = height * d_panel;
  int64_t rows, columns, depth;
  d_matrix<d_bf16> a;
  d_matrix<int8_t> b;
  d_bf16* c;
  int64_t c_row;

  int64_t packed_depth() const { return d_packed_depth<d_bf16>(depth); }
  int64_t panels() const { return (rows + d_panel - 1) / d_panel; }
  // The results of `count` columns from `column` on; `right` holds the panels of A.
  void task(int64_t column, int64_t count, const d_bf16_pair* right, float* workspace) const {
    d_bf16_pair* left = (d_bf16_pair*)workspace;
    float* sums = workspace + height * step;
    for (int64_t k = 0; k < packed_depth(); k += block) {
      const int64_t part = d_min(packed_depth() - k, block), numbers = d_min(depth - 2 * k, 2 * part);
      d_pack_rows(b.data + column * b.column + 2 * k, b.column, 1, count, numbers, left, step);
      for (int64_t j = 0; j < panels(); ++j) {
        const d_tile_operands<d_bf16_pair> of = {
            left, step, 1, right + (j * packed_depth() + k) * d_panel, d_panel};
        float *to = sums + j * tile, *before = k ? to : nullptr;
        if (rows - j * d_panel <= d_lanes)
          d_compute_tile_in_registers<height, 1>(part, of, before, to, [](int64_t) {});
        else d_compute_tile_in_registers<height, 2>(part, of, before, to, [](int64_t) {});
      }
    }
    const d_gemm<d_bf16, true> all = {1, columns, rows, depth, {}, {}, nullptr, false, c, 0, c_row, d_none};
    for (int64_t j = 0; j < panels(); ++j)
      all.store_transposed_bf16(sums + j * tile, count, d_min(rows - j * d_panel, d_panel),
                                all.at(c, column, j * d_panel));
  }
  __attribute__((noinline)) void run() const {
    const d_workspaces right(panels() * packed_depth() * d_panel, 1),
        workspaces(height * step + panels() * tile);
    if (!right.data || !workspaces.data) return;
    if (!depth) d_clear(workspaces.data, 0, workspaces.count * d_threads());  // sums of nothing are 0
    d_pack_panels<d_bf16>(a.data, a.column, a.row, depth, rows, (d_bf16_pair*)right.data);
#pragma omp parallel if (rows * columns * depth > 50000)
    {
      const d_tile_scope tile_scope;
      float* workspace = workspaces.of_thread();
#pragma omp for schedule(dynamic)
      for (int64_t k = 0; k < (columns + height - 1) / height; ++k)
        task(k * height, d_min(columns - k * height, height), (const d_bf16_pair*)right.data, workspace);
    }
  }
};
#endif
// The same on tile registers, where there are any, for few rows of bfloat16.
template <class T> static void d_product_of_bytes_on_tiles(void** args, const int64_t* sizes) {
#if defined(D_TILES)
  if constexpr (d_uses_tiles<d_packed<T>>) {
    const d_bytes_product_args<T> p(args, sizes);
    d_byte_tiles{p.rows, p.columns, p.depth, p.a, p.b, p.c, p.c_row}.run();
  } else
#endif
    d_product_of_bytes<T>(args, sizes);
}

// Rows of a are in groups, each with a b of its own; `ends` says where groups end.
struct d_groups {
  int64_t count, rows;
  const void* ends;
  bool wide;
  // The end of group g, never before `from` and never past the last row.
  int64_t end(int64_t g, int64_t from) const {
    const int64_t given = wide ? ((const int64_t*)ends)[g] : ((const int32_t*)ends)[g];
    return d_min(given > from ? given : from, rows);
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
    if (end > from && end - from <= d_max_dot_rows && steps[3] == 1)
      d_dots<T, T>{1, end - from, columns, sizes[3], left, right, nullptr, false, out, 0, steps[5], d_none}
          .run();
    else if (end > from)
      d_gemm<T>{1, end - from, columns, sizes[3], left, right, nullptr, false, out, 0, steps[5], d_none}.run();
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
    const d_gemm<T> one = {
        1, sizes[3], sizes[2], end - from,
        {(const T*)args[0] + from * steps[0], 0, steps[1], steps[0]},
        {(const T*)args[1] + from * steps[2], 0, steps[2], steps[3]},
        nullptr, false, (T*)args[3] + g * steps[4], 0, steps[5], d_none};
    one.run();
    from = end;
  }
}
