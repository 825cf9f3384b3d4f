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
static float d_half(const uint8_t* at) {
  uint32_t bits = (uint32_t)(at[0] | at[1] << 8) << 16;
  float x;
  __builtin_memcpy(&x, &bits, sizeof x);
  return d_flushed(x);
}
// Even and odd numbers of the rows have sums of their own, rounded at each FMA; their total is added to
// c. Denormals count as zero.
template <int c, int a, int b> static void d_tile_multiply_add() {
  static_assert(c != a && a != b && b != c, "three tiles");  // #UD
  d_model& m = d_configured();
  const int depth = m.row_bytes[a] / 4, columns = m.row_bytes[c] / 4;
  if (m.rows[c] != m.rows[a] || m.row_bytes[b] != m.row_bytes[c] || m.rows[b] != depth) abort();
  for (int r = 0; r < m.rows[c]; ++r) {
    float sums[16][2] = {};
    for (int k = 0; k < depth; ++k)
      for (int n = 0; n < columns; ++n)
        for (int odd = 0; odd < 2; ++odd)
          sums[n][odd] = d_flushed(fmaf(d_half(m.data[a][r] + 4 * k + 2 * odd),
                                        d_half(m.data[b][k] + 4 * n + 2 * odd), sums[n][odd]));
    for (int n = 0; n < columns; ++n) {
      float sum;
      __builtin_memcpy(&sum, m.data[c][r] + 4 * n, sizeof sum);
      sum = d_flushed(d_flushed(sum) + d_flushed(sums[n][0] + sums[n][1]));
      __builtin_memcpy(m.data[c][r] + 4 * n, &sum, sizeof sum);
    }
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
