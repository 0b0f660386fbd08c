// Conversion of stored keys and values, 16 numbers at a time.
#pragma once

#include "kernels.h"
#include "vec.h"

namespace quire::QUIRE_ISA {

QUIRE_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
QUIRE_INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

// Interleaves pairs: the lower half of each lane is the first.
QUIRE_INLINE U pair(H first, H second) {
#if defined(__AVX512BW__)
  const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512((__m256i)first), (__m256i)second, 1);
  typedef uint16_t Order __attribute__((vector_size(64)));
  const Order order{0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                    8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return (U)_mm512_permutexvar_epi16((__m512i)order, both);
#else
  return widen(first) | (widen(second) << 16);
#endif
}

// Exchanges rows and columns of a square of 32-bit numbers.
QUIRE_INLINE void exchange(U (&x)[kLanes]) {
#if defined(__AVX512F__)
#define QUIRE_HALF(step)                                                                 \
  {                                                                                      \
    const I lane{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};                  \
    const I from_second = (lane & step) != 0;                                            \
    const I low = from_second ? lane - step + kLanes : lane,                             \
            high = from_second ? lane + kLanes : lane + step;                            \
    for (int i = 0; i < kLanes; ++i) {                                                   \
      if (i & step) continue;                                                            \
      const U a = x[i], b = x[i + step];                                                 \
      x[i] = (U)_mm512_permutex2var_epi32((__m512i)a, (__m512i)low, (__m512i)b);         \
      x[i + step] = (U)_mm512_permutex2var_epi32((__m512i)a, (__m512i)high, (__m512i)b); \
    }                                                                                    \
  }
  QUIRE_HALF(8)
  QUIRE_HALF(4)
  QUIRE_HALF(2)
  QUIRE_HALF(1)
#undef QUIRE_HALF
#else
  typedef uint32_t Quad __attribute__((vector_size(16)));
  Quad from[kLanes][4], to[kLanes][4];
  __builtin_memcpy(from, x, sizeof(x));
  for (int i = 0; i < kLanes; i += 4) {
    for (int j = 0; j < 4; ++j) {
      const Quad a = from[i][j], b = from[i + 1][j], c = from[i + 2][j], d = from[i + 3][j];
      const Quad ab = __builtin_shufflevector(a, b, 0, 4, 1, 5),
                 cd = __builtin_shufflevector(c, d, 0, 4, 1, 5);
      const Quad AB = __builtin_shufflevector(a, b, 2, 6, 3, 7),
                 CD = __builtin_shufflevector(c, d, 2, 6, 3, 7);
      to[4 * j][i / 4] = __builtin_shufflevector(ab, cd, 0, 1, 4, 5);
      to[4 * j + 1][i / 4] = __builtin_shufflevector(ab, cd, 2, 3, 6, 7);
      to[4 * j + 2][i / 4] = __builtin_shufflevector(AB, CD, 0, 1, 4, 5);
      to[4 * j + 3][i / 4] = __builtin_shufflevector(AB, CD, 2, 3, 6, 7);
    }
  }
  __builtin_memcpy(x, to, sizeof(x));
#endif
}

// Returns the sum of each of sixteen vectors, one in a lane.
QUIRE_INLINE F sum_each(const F (&vectors)[kLanes]) {
  U lanes[kLanes];
  __builtin_memcpy(lanes, vectors, sizeof(lanes));
  exchange(lanes);
  F sum = (F)lanes[0];
  for (int i = 1; i < kLanes; ++i) sum += (F)lanes[i];
  return sum;
}

// The type of each format; conversion of a part of 16 numbers to floats, and of 16 floats to the format.

template <KVFormat>
struct Stored;

template <>
struct Stored<KVFormat::f32> {
  using Type = float;
  static QUIRE_INLINE Part part(const float* from) { return load_as<Part>(from); }
  static QUIRE_INLINE F narrow(F x) { return x; }
};

template <>
struct Stored<KVFormat::f16> {
  using Type = uint16_t;
  static QUIRE_INLINE Part part(const uint16_t* from) { return load_part_f16(from); }
  static QUIRE_INLINE H narrow(F x) { return to_f16(x); }
};

template <>
struct Stored<KVFormat::bf16> {
  using Type = uint16_t;
  static QUIRE_INLINE Part part(const uint16_t* from) { return (Part)(load_part_u16(from) << 16); }
  static QUIRE_INLINE H narrow(F x) { return to_bf16(x); }
};

template <>
struct Stored<KVFormat::int8> {
  using Type = int8_t;
  static QUIRE_INLINE Part part(const int8_t* from) {
    return __builtin_convertvector(load_part_s8(from), Part);
  }
  static QUIRE_INLINE S8 narrow(F x) { return __builtin_convertvector(to_int(x), S8); }
};

// Loads 16 numbers as floats.
template <KVFormat Form>
QUIRE_INLINE F load_stored(const typename Stored<Form>::Type* from) {
  Split<Part> out;
  for (int i = 0; i < kParts; ++i) out.parts[i] = Stored<Form>::part(from + i * kPartLanes);
  return joined(out);
}

// Returns a pointer to 16 readable elements: `from` if `count` >= 16, else a zero-padded copy.
template <typename T>
QUIRE_INLINE const T* readable(const T* from, int64_t count, T* copy) {
  if (count >= kLanes) return from;
  __builtin_memset(copy, 0, kLanes * sizeof(T));
  __builtin_memcpy(copy, from, (size_t)count * sizeof(T));
  return copy;
}

}  // namespace quire::QUIRE_ISA
