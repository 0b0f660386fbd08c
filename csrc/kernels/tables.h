// What codes mean that are not integers themselves.
#pragma once

#include "kernels.h"
#include "vec.h"

namespace quire::QUIRE_ISA {

// The integers of 4-bit codes; those of fp4 are twice its numbers.
constexpr int8_t kIq4nl[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr int8_t kFp4[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// The numbers of all codes of an 8-bit float: sign, exponent, fraction. Of e4m3 0x7f and 0xff are NaN; of
// e5m2 the greatest exponent has infinities and NaN, as in all wider formats.
template <int Fraction>
struct Float8Values {
  float of[256];
  constexpr Float8Values() : of{} {
    constexpr int kOne = 1 << Fraction, kBias = (1 << (6 - Fraction)) - 1;
    for (int code = 0; code < 256; ++code) {
      const int exponent = (code & 127) >> Fraction, fraction = code & (kOne - 1), unit = kBias + Fraction;
      float value = (float)(exponent ? kOne + fraction : fraction);
      for (int i = unit; i > (exponent ? exponent : 1); --i) value *= 0.5f;
      for (int i = unit; i < exponent; ++i) value *= 2.0f;
      if (Fraction == 3 && (code & 127) == 127) value = __builtin_nanf("");
      if (Fraction == 2 && exponent == 31) value = fraction ? __builtin_nanf("") : __builtin_inff();
      of[code] = code & 128 ? -value : value;
    }
  }
};
constexpr Float8Values<3> kE4m3;
constexpr Float8Values<2> kE5m2;

QUIRE_INLINE constexpr bool is_offset(Meaning meaning) {
  return meaning == Meaning::offset || meaning == Meaning::rows;
}
QUIRE_INLINE constexpr bool has_table(Meaning meaning) { return meaning >= Meaning::e4m3; }

// Returns what a code of a matrix with a table means.
QUIRE_INLINE float value_of(const Panels& matrix, int code) {
  switch (matrix.coding.meaning) {
    case Meaning::e4m3:
      return kE4m3.of[code];
    case Meaning::e5m2:
      return kE5m2.of[code];
    case Meaning::floats:
      return matrix.table[code];
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

QUIRE_INLINE const uint8_t* table_bytes(Meaning meaning) {
  return meaning == Meaning::fp4 ? kUnsignedFp4.of : kUnsignedIq4nl.of;
}
QUIRE_INLINE B64 table_of(Meaning meaning) { return load_as<B64>(table_bytes(meaning)); }

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
#elif defined(QUIRE_NEON)
  uint8x16_t t, quarters[4];
  __builtin_memcpy(&t, &table, 16);
  __builtin_memcpy(quarters, &codes, 64);
  for (int i = 0; i < 4; ++i) quarters[i] = vqtbl1q_u8(t, quarters[i]);
  return __builtin_bit_cast(B64, quarters);
#else
  for (int i = 0; i < 64; ++i) codes[i] = table[codes[i]];
  return codes;
#endif
}

}  // namespace quire::QUIRE_ISA
