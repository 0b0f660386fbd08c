// Half panels for AVX2: vectors of eight lanes, and dot products of rows with eight outputs.
//
// The sums of four rows and eight outputs fit in 16 registers; those of eight rows and sixteen do not.
// Without VNNI, products of bytes are added in pairs, in 16 bits, and so are as many pairs as fit: of codes
// of 4 bits those of a group of 32 inputs, at most 8 * 2 * 15 * 127. Bytes are taken as magnitudes, with
// their signs in x: 2 * 128 * 127 fits once. The integers are those that dot4 gives.
#pragma once

#include "coded_units.h"
#include "vec.h"

#if defined(__AVX2__) && !defined(__AVX512BW__)
#define QUIRE_HALF_PANELS

namespace quire::QUIRE_ISA {

using HalfF = Part;  // of eight
using HalfI = PartI;
using HalfU = PartU;

// Returns a[i] * b, and sum[i] + a[i] * b[i], of numbers of 16 bits in lanes of 32. Products are not widened.
QUIRE_INLINE HalfI multiply_s16(HalfI a, int32_t b) {
  return (HalfI)_mm256_mullo_epi16((__m256i)a, _mm256_set1_epi16((int16_t)b));
}

QUIRE_INLINE HalfI multiply_add_s16(HalfI sum, HalfI a, HalfI b) {
  return sum + (HalfI)_mm256_madd_epi16((__m256i)a, (__m256i)(b & 0xffff));
}

#if defined(__AVXVNNI__)
constexpr bool kByteDots = true;
#else
constexpr bool kByteDots = false;
#endif

// How bytes of weights are made of codes: of `Bits` bits, or looked up in a table of bytes, which are numbers
// plus `Table` and at most twice that.
template <int Bits, int Table = 0>
struct HalfCodes {
  // True if bytes are multiplied with signs, so that their offset of 128 is no part of the sum.
  static constexpr bool kSigned = !kByteDots && (Bits == 8 || Table == 128);
  // Words of four inputs whose products are added in 16 bits.
  static constexpr int kFit = kSigned ? 1 : Bits == 5 || Table ? 4 : Bits <= 4 ? 8 : 2;

  // Returns the codes of 4 inputs, 4k on, of the eight outputs at `unit` (coded_units.h).
  QUIRE_INLINE static __m256i load(const uint8_t* unit, int k, __m256i table) {
    const __m256i w = (__m256i)codes<Bits, HalfU>(unit, k);
    return Table ? _mm256_shuffle_epi8(table, w) : w;
  }
};

// Computes x here. Left to itself, GCC multiplies first and adds last, with the products in memory.
template <typename V>
QUIRE_INLINE void in_order(V& x) {
  asm volatile("" : "+x"(x));
}

// Adds products of the words [First, Last) of a unit of 32 inputs to `dots`, [half][row]: of the outputs that
// begin at `unit`, and rows of `x`, [8][stride] of 4 bytes.
template <int Rows, int Halves, typename Codes, int First = 0, int Last = 8>
QUIRE_INLINE void dot_halves(const uint8_t* unit, const int32_t* x, int64_t stride, __m256i table,
                             HalfI* dots) {
#if !defined(__AVXVNNI__)
  const __m256i ones = _mm256_set1_epi16(1);
  __m256i pairs[Halves * Rows];
#endif
  // Else GCC broadcasts rows before a loop over halves, and keeps 32 vectors in memory.
  asm volatile("" : "+r"(x));
#pragma GCC unroll 8
  for (int k = First; k < Last; ++k) {
    __m256i w[Halves];
#pragma GCC unroll 2
    for (int h = 0; h < Halves; ++h) w[h] = Codes::load(unit + h * 32, k, table);
#if !defined(__AVXVNNI__)
    __m256i magnitudes[Halves];
    if constexpr (Codes::kSigned) {
#pragma GCC unroll 2
      for (int h = 0; h < Halves; ++h) {
        w[h] = _mm256_xor_si256(w[h], _mm256_set1_epi8(-128));
        magnitudes[h] = _mm256_abs_epi8(w[h]);
      }
    }
    constexpr int kFit = Last - First < Codes::kFit ? Last - First : Codes::kFit;
    const bool begins = (k - First) % kFit == 0, ends = (k - First + 1) % kFit == 0;
#endif
#pragma GCC unroll 4
    for (int m = 0; m < Rows; ++m) {
      const __m256i xs = _mm256_set1_epi32(x[k * stride + m]);
#pragma GCC unroll 2
      for (int h = 0; h < Halves; ++h) {
        const int i = h * Rows + m;
#if defined(__AVXVNNI__)
        dots[i] = (HalfI)_mm256_dpbusd_avx_epi32((__m256i)dots[i], w[h], xs);
#else
        const __m256i pair = Codes::kSigned ? _mm256_maddubs_epi16(magnitudes[h], _mm256_sign_epi8(xs, w[h]))
                                            : _mm256_maddubs_epi16(w[h], xs);
        pairs[i] = begins ? pair : _mm256_add_epi16(pairs[i], pair);
        if constexpr (Rows > 2) in_order(pairs[i]);
        if (ends) dots[i] += (HalfI)_mm256_madd_epi16(pairs[i], ones);
        if constexpr (Rows > 2 && Codes::kFit < 8) in_order(dots[i]);
#endif
      }
    }
  }
}

}  // namespace quire::QUIRE_ISA

#endif
