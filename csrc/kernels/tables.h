// What codes mean that are not integers themselves.
#pragma once

#include "kernels.h"
#include "vec.h"

namespace quire::QUIRE_ISA {

// The integers of 4-bit codes; those of fp4 are twice its numbers.
constexpr int8_t kIq4nl[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr int8_t kFp4[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// The quantiles of a normal distribution: Dettmers et al., arXiv:2305.14314, as bitsandbytes has them.
alignas(64) constexpr float kNf4[16] = {-1.0f,
                                        -0.6961928009986877f,
                                        -0.5250730514526367f,
                                        -0.39491748809814453f,
                                        -0.28444138169288635f,
                                        -0.18477343022823334f,
                                        -0.09105003625154495f,
                                        0.0f,
                                        0.07958029955625534f,
                                        0.16093020141124725f,
                                        0.24611230194568634f,
                                        0.33791524171829224f,
                                        0.44070982933044434f,
                                        0.5626170039176941f,
                                        0.7229568362236023f,
                                        1.0f};

// The numbers of all codes of e4m3. 0x7f and 0xff are NaN.
struct Float8Values {
  float of[256];
  constexpr Float8Values() : of{} {
    for (int code = 0; code < 256; ++code) {
      const int exponent = (code >> 3) & 15, fraction = code & 7;
      float value = exponent ? 8.0f + (float)fraction : (float)fraction;
      for (int i = 10; i > (exponent ? exponent : 1); --i) value *= 0.5f;
      for (int i = 10; i < exponent; ++i) value *= 2.0f;
      if ((code & 127) == 127) value = __builtin_nanf("");
      of[code] = code & 128 ? -value : value;
    }
  }
};
constexpr Float8Values kFloat8;

QUIRE_INLINE constexpr bool is_offset(Meaning meaning) {
  return meaning == Meaning::offset || meaning == Meaning::rows;
}
QUIRE_INLINE constexpr bool has_table(Meaning meaning) { return meaning >= Meaning::e4m3; }

// Returns what a code means, by a table.
QUIRE_INLINE float value_of(Meaning meaning, int code) {
  switch (meaning) {
    case Meaning::e4m3:
      return kFloat8.of[code];
    case Meaning::nf4:
      return kNf4[code];
    case Meaning::fp4:
      return code == 8 ? -0.0f : (float)kFp4[code];
    default:
      return (float)kIq4nl[code];
  }
}

// The integers of a table plus 128, repeated for look_up.
struct alignas(64) UnsignedTable {
  uint8_t of[64];
  constexpr explicit UnsignedTable(const int8_t* from) : of{} {
    for (int i = 0; i < 64; ++i) of[i] = (uint8_t)(from[i % 16] + 128);
  }
};
constexpr UnsignedTable kUnsignedIq4nl(kIq4nl), kUnsignedFp4(kFp4);

QUIRE_INLINE B64 table_of(Meaning meaning) {
  return load_as<B64>(meaning == Meaning::fp4 ? kUnsignedFp4.of : kUnsignedIq4nl.of);
}

// Returns the numbers of 64 codes below 16.
QUIRE_INLINE B64 look_up(B64 table, B64 codes) {
#if defined(__AVX512BW__)
  return (B64)_mm512_shuffle_epi8((__m512i)table, (__m512i)codes);
#elif defined(__AVX2__)
  __m256i t, halves[2];
  __builtin_memcpy(&t, &table, 32);
  __builtin_memcpy(halves, &codes, 64);
  for (int i = 0; i < 2; ++i) halves[i] = _mm256_shuffle_epi8(t, halves[i]);
  B64 out;
  __builtin_memcpy(&out, halves, 64);
  return out;
#else
  return __builtin_shuffle(table, codes);
#endif
}

}  // namespace quire::QUIRE_ISA
