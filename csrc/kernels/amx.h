// The tile operations of AMX: eight tiles of 16 rows of 64 bytes, and products of them.
//
// With QUIRE_AMX_TWIN they are plain C++ that adds in the same order, so that the surrounding code can be
// tested on machines without AMX.
#pragma once

#include "kernels.h"
#include "vec.h"

namespace quire::QUIRE_ISA {

// The shapes of the tiles, in the format of LDTILECFG.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  QUIRE_INLINE void set(int tile, int64_t height, int64_t width) {
    rows[tile] = (uint8_t)height;
    row_bytes[tile] = (uint16_t)width;
  }
};

#if !defined(QUIRE_AMX_TWIN)

// Sets the shapes and zeroes all tiles. Takes about 150 cycles: call it once for many products.
QUIRE_INLINE void tiles_begin(const TileShapes& shapes) { asm volatile("ldtilecfg %0" : : "m"(shapes)); }
// Releases the tiles, so that the kernel need not save them when switching threads.
QUIRE_INLINE void tiles_end() { asm volatile("tilerelease"); }

template <int T>
QUIRE_INLINE void tile_zero() {
  asm volatile("tilezero %%tmm%c0" : : "i"(T));
}
template <int T>
QUIRE_INLINE void tile_load(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(T) : "memory");
}
template <int T>
QUIRE_INLINE void tile_store(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(T) : "memory");
}
// C[m][n] += (sum over even k) + (sum over odd k) of A[m][k] * B[k / 2][2 n + k % 2] of bf16. Each of the two
// sums is a chain of float32 multiply-adds starting at zero; subnormal numbers are zero.
template <int C, int A, int B>
QUIRE_INLINE void tile_dot_bf16() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
}
// C[m][n] += sum over k of A[m][k] * B[k / 4][4 n + k % 4], with A of int8, B of uint8 and C of int32.
template <int C, int A, int B>
QUIRE_INLINE void tile_dot_s8u8() {
  asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
}

#else

struct TileState {
  TileShapes shapes;
  uint8_t data[8][16][64];
};
// All functions below are inlined into one file; each thread has its own state.
static thread_local TileState tiles;

QUIRE_INLINE void tiles_begin(const TileShapes& shapes) {
  tiles.shapes = shapes;
  __builtin_memset(tiles.data, 0, sizeof(tiles.data));
}
QUIRE_INLINE void tiles_end() { tiles.shapes = {}; }

template <int T>
QUIRE_INLINE void tile_zero() {
  __builtin_memset(tiles.data[T], 0, sizeof(tiles.data[T]));
}
template <int T>
inline void tile_load(const void* from, int64_t stride) {
  tile_zero<T>();
  for (int m = 0; m < tiles.shapes.rows[T]; ++m)
    __builtin_memcpy(tiles.data[T][m], (const uint8_t*)from + m * stride, tiles.shapes.row_bytes[T]);
}
template <int T>
inline void tile_store(void* to, int64_t stride) {
  for (int m = 0; m < tiles.shapes.rows[T]; ++m)
    __builtin_memcpy((uint8_t*)to + m * stride, tiles.data[T][m], tiles.shapes.row_bytes[T]);
}
template <int C, int A, int B>
inline void tile_dot_bf16() {
  const auto value = [](const uint8_t* from) {
    const uint32_t bits = (uint32_t)(from[0] | from[1] << 8) << 16;
    return __builtin_bit_cast(float, bits);
  };
  for (int m = 0; m < tiles.shapes.rows[C]; ++m) {
    for (int n = 0; n < 16; ++n) {
      float sums[2]{};
      for (int k = 0; k < tiles.shapes.row_bytes[A] / 2; ++k)
        sums[k % 2] = __builtin_fmaf(value(tiles.data[A][m] + 2 * k),
                                     value(tiles.data[B][k / 2] + 2 * (2 * n + k % 2)), sums[k % 2]);
      ((float*)tiles.data[C][m])[n] += sums[0] + sums[1];
    }
  }
}
template <int C, int A, int B>
inline void tile_dot_s8u8() {
  for (int m = 0; m < tiles.shapes.rows[C]; ++m)
    for (int n = 0; n < 16; ++n)
      for (int k = 0; k < tiles.shapes.row_bytes[A]; ++k)
        ((int32_t*)tiles.data[C][m])[n] += (int8_t)tiles.data[A][m][k] * tiles.data[B][k / 4][4 * n + k % 4];
}

#endif

// During its lifetime, vector instructions treat subnormal numbers as zero, as tiles always do.
class NormalNumbers {
 public:
  NormalNumbers() : before_(_mm_getcsr()) {
    _mm_setcsr(before_ | 0x8040);
  }  // flush to zero, denormals are zero
  ~NormalNumbers() { _mm_setcsr(before_); }
  NormalNumbers(const NormalNumbers&) = delete;
  NormalNumbers& operator=(const NormalNumbers&) = delete;

 private:
  const unsigned before_;
};

}  // namespace quire::QUIRE_ISA
