// A model of AMX's tile instructions, for processors without them: the routines' source compiles
// against it. What raises an exception in hardware aborts here.
// Intel, "Software Developer's Manual", volume 2: LDTILECFG, TILELOADD, TILESTORED, TDPBF16PS.
#pragma once
extern "C" void abort();
extern "C" float fmaf(float, float, float);

struct alignas(64) d_tile_shapes {
  uint8_t palette = 1, start_row = 0, unused[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(d_tile_shapes) == 64, "the operand of LDTILECFG");

struct d_model {
  bool configured;
  uint8_t rows[8];
  uint16_t row_bytes[8];
  alignas(64) uint8_t data[8][16][64];
};
static thread_local d_model d_tiles_of_thread;

static d_model& d_configured() {
  if (!d_tiles_of_thread.configured) abort();  // #UD
  return d_tiles_of_thread;
}
static void d_tile_configure(const d_tile_shapes& shapes) {
  d_model& m = d_tiles_of_thread;
  if (shapes.palette != 1 || shapes.start_row) abort();  // #GP
  for (int t = 0; t < 16; ++t) {
    if (t >= 8 && (shapes.rows[t] || shapes.row_bytes[t])) abort();
    if (shapes.rows[t] > 16 || shapes.row_bytes[t] > 64) abort();
  }
  m.configured = true;
  __builtin_memset(m.data, 0, sizeof m.data);
  for (int t = 0; t < 8; ++t) m.rows[t] = shapes.rows[t], m.row_bytes[t] = shapes.row_bytes[t];
}
static void d_tile_release() { d_tiles_of_thread.configured = false; }
template <int t> static void d_tile_zero() {
  __builtin_memset(d_configured().data[t], 0, sizeof d_tiles_of_thread.data[t]);
}
template <int t> static void d_tile_load(const void* from, int64_t step) {
  d_model& m = d_configured();
  d_tile_zero<t>();
  for (int r = 0; r < m.rows[t]; ++r)
    __builtin_memcpy(m.data[t][r], (const char*)from + r * step, m.row_bytes[t]);
}
template <int t> static void d_tile_stream(const void* from, int64_t step) {
  d_tile_load<t>(from, step);
}
template <int t> static void d_tile_store(void* to, int64_t step) {
  d_model& m = d_configured();
  for (int r = 0; r < m.rows[t]; ++r)
    __builtin_memcpy((char*)to + r * step, m.data[t][r], m.row_bytes[t]);
}
static float d_flushed(float x) { return __builtin_fabsf(x) < 1.17549435e-38f ? x * 0.0f : x; }
static float d_low(uint32_t pair) {
  const uint32_t bits = pair << 16;
  float x;
  __builtin_memcpy(&x, &bits, sizeof x);
  return d_flushed(x);
}
static float d_high(uint32_t pair) { return d_low(pair >> 16); }
// Even and odd numbers of the rows have sums of their own, rounded at each FMA; their total is added to
// c. Denormals count as zero. Loops over columns are vectors of the host.
template <int c, int a, int b> static void d_tile_multiply_add() {
  static_assert(c != a && a != b && b != c, "three tiles");  // #UD
  d_model& m = d_configured();
  const int depth = m.row_bytes[a] / 4, columns = m.row_bytes[c] / 4;
  if (m.rows[c] != m.rows[a] || m.row_bytes[b] != m.row_bytes[c] || m.rows[b] != depth) abort();
  for (int r = 0; r < m.rows[c]; ++r) {
    float even[16] = {}, odd[16] = {}, sums[16] = {};
    uint32_t left[16] = {}, right[16] = {};
    __builtin_memcpy(left, m.data[a][r], sizeof left);
    for (int k = 0; k < depth; ++k) {
      const float first = d_low(left[k]), second = d_high(left[k]);
      __builtin_memcpy(right, m.data[b][k], sizeof right);
      for (int n = 0; n < 16; ++n) {
        even[n] = d_flushed(fmaf(first, d_low(right[n]), even[n]));
        odd[n] = d_flushed(fmaf(second, d_high(right[n]), odd[n]));
      }
    }
    __builtin_memcpy(sums, m.data[c][r], sizeof sums);
    for (int n = 0; n < 16; ++n) sums[n] = d_flushed(d_flushed(sums[n]) + d_flushed(even[n] + odd[n]));
    __builtin_memcpy(m.data[c][r], sums, 4 * columns);
  }
}
// c += a * b, for groups of four bytes; TDPBSSD and TDPBSUD wrap around.
template <bool is_signed, int c, int a, int b> static void d_tile_multiply_add_int8() {
  static_assert(c != a && a != b && b != c, "three tiles");  // #UD
  d_model& m = d_configured();
  const int depth = m.row_bytes[a] / 4, columns = m.row_bytes[c] / 4;
  if (m.rows[c] != m.rows[a] || m.row_bytes[b] != m.row_bytes[c] || m.rows[b] != depth) abort();
  for (int r = 0; r < m.rows[c]; ++r)
    for (int n = 0; n < columns; ++n) {
      uint32_t sum;
      __builtin_memcpy(&sum, m.data[c][r] + 4 * n, sizeof sum);
      for (int k = 0; k < depth; ++k)
        for (int i = 0; i < 4; ++i) {
          const uint8_t right = m.data[b][k][4 * n + i];
          sum += (int8_t)m.data[a][r][4 * k + i] * (is_signed ? (int8_t)right : right);
        }
      __builtin_memcpy(m.data[c][r] + 4 * n, &sum, sizeof sum);
    }
}
