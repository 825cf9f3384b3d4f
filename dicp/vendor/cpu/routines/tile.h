// The tile registers of AMX: eight tiles of 16 rows of 64 bytes. Intel, "Software Developer's Manual",
// volume 1, chapter 18.
//
// DICP_TILES says that the kernel lets this process use them. A test compiles the routines against a
// model of the instructions instead, `tile_model.h`.
#pragma once
#include "prelude.h"

#if defined(DICP_TILE_MODEL)
#include "tile_model.h"
#define D_TILES
#elif defined(DICP_TILES) && (defined(__AMX_BF16__) || defined(__AMXBF16__)) && defined(__AVX512BF16__)
#define D_TILES
// What `ldtilecfg` reads: the shape of each tile.
struct alignas(64) d_tile_shapes {
  uint8_t palette = 1, start_row = 0, unused[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
d_inline void d_tile_configure(const d_tile_shapes& shapes) {
  asm volatile("ldtilecfg %0" ::"m"(shapes) : "memory");
}
d_inline void d_tile_release() { asm volatile("tilerelease" ::: "memory"); }
template <int t> d_inline void d_tile_zero() { asm volatile("tilezero %%tmm%c0" ::"i"(t)); }
// Rows lie `step` bytes apart.
template <int t> d_inline void d_tile_load(const void* from, int64_t step) {
  asm volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(t), "r"(from), "r"(step) : "memory");
}
// The same for bytes that are read once: the L1 cache keeps what is read again (TILELOADDT1).
template <int t> d_inline void d_tile_stream(const void* from, int64_t step) {
  asm volatile("tileloaddt1 (%1,%2,1), %%tmm%c0" ::"i"(t), "r"(from), "r"(step) : "memory");
}
template <int t> d_inline void d_tile_store(void* to, int64_t step) {
  asm volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(t), "r"(to), "r"(step) : "memory");
}
// c += a * b, for pairs of bfloat16.
template <int c, int a, int b> d_inline void d_tile_multiply_add() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(c), "i"(a), "i"(b));
}
// c += a * b, for groups of four signed bytes of a, and signed or unsigned ones of b, in int32.
template <bool is_signed, int c, int a, int b> d_inline void d_tile_multiply_add_int8() {
  if constexpr (is_signed)
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(c), "i"(a), "i"(b));
  else
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(c), "i"(a), "i"(b));
}
#endif

#if defined(D_TILES)
// The sums of a product are in tiles 0 to 3: two by two, or as many as R rows, 16 or 32, and V vectors of
// numbers of 32 bits need. In memory, rows are `step` bytes apart; without one, all rows are the first one.
d_inline void d_clear_sums() {
  d_tile_zero<0>();
  d_tile_zero<1>();
  d_tile_zero<2>();
  d_tile_zero<3>();
}
template <int R = 32, int V = 2> d_inline void d_load_sums(const void* from, int64_t step) {
  const char *upper = (const char*)from, *lower = upper + 16 * step;
  d_tile_load<0>(upper, step);
  if constexpr (V == 2) d_tile_load<1>(upper + 64, step);
  if constexpr (R == 32) d_tile_load<2>(lower, step);
  if constexpr (R == 32 && V == 2) d_tile_load<3>(lower + 64, step);
}
template <int R = 32, int V = 2> d_inline void d_store_sums(void* to, int64_t step) {
  char *upper = (char*)to, *lower = upper + 16 * step;
  d_tile_store<0>(upper, step);
  if constexpr (V == 2) d_tile_store<1>(upper + 64, step);
  if constexpr (R == 32) d_tile_store<2>(lower, step);
  if constexpr (R == 32 && V == 2) d_tile_store<3>(lower + 64, step);
}
#endif

// A thread multiplies tiles only while it holds one of these. Tiles are released at its end: libraries
// configure them for themselves, and the kernel saves less at a context switch.
struct d_tile_scope {
#if defined(D_TILES)
  d_tile_scope() { d_tile_configure(d_tile_shapes()); }
  ~d_tile_scope() { d_tile_release(); }
#else
  d_tile_scope() {}
#endif
  d_tile_scope(const d_tile_scope&) = delete;
};
