// Half panels for AVX2: vectors of eight lanes, and dot products of rows with eight outputs.
//
// The sums of four rows and eight outputs fit in 16 registers; those of eight rows and sixteen do not.
// Without VNNI, products of bytes are added in pairs, in 16 bits. Those of int4 are at most 15 * 127, so
// eight pairs fit, and a group of 32 inputs is widened once. Those of int8, of magnitudes with the signs in
// x, are at most 127 * 127: each pair is widened. The integers are those that dot4 gives.
#pragma once

#include "vec.h"

#if defined(__AVX2__) && !defined(__AVX512BW__)
#define QUIRE_HALF_PANELS

namespace quire::QUIRE_ISA {

typedef float HalfF __attribute__((vector_size(32)));    // 8 floats
typedef int32_t HalfI __attribute__((vector_size(32)));  // 8 integers
typedef uint32_t HalfU __attribute__((vector_size(32)));

QUIRE_INLINE HalfF fma(HalfF a, HalfF b, HalfF c) {
  return (HalfF)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}

QUIRE_INLINE HalfI load_half_s8(const int8_t* from) {
  return (HalfI)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from));
}

// Returns a[i] * b, and sum[i] + a[i] * b[i], of numbers of 16 bits in lanes of 32. Products are not widened.
QUIRE_INLINE HalfI multiply_s16(HalfI a, int32_t b) {
  return (HalfI)_mm256_mullo_epi16((__m256i)a, _mm256_set1_epi16((int16_t)b));
}

QUIRE_INLINE HalfI multiply_add_s16(HalfI sum, HalfI a, HalfI b) {
  return sum + (HalfI)_mm256_madd_epi16((__m256i)a, (__m256i)(b & 0xffff));
}

// Sums over a group of 32 inputs, [half][row]: of the outputs that begin at `values`, packed as in Panels,
// and rows of `x`, [8][stride] of 4 bytes. They begin with `begin`, [row]: the zero point, and `more`.
template <int Rows, int Halves, bool Int4>
QUIRE_INLINE void dot_halves(const uint8_t* values, const int32_t* x, int64_t stride, const int32_t* begin,
                             int32_t more, HalfI* dots) {
  constexpr int kLoads = Int4 ? 4 : 8;  // of 32 bytes
#if defined(__AVXVNNI__)
  for (int i = 0; i < Halves * Rows; ++i) dots[i] = HalfI{} + begin[i % Rows];
#else
  const __m256i ones = _mm256_set1_epi16(1);
  __m256i pairs[Halves * Rows];
  for (int i = 0; i < Halves * Rows; ++i) {
    pairs[i] = _mm256_setzero_si256();
    dots[i] = HalfI{} + more;
  }
#endif
#pragma GCC unroll 8
  for (int k = 0; k < kLoads; ++k) {
#pragma GCC unroll 2
    for (int part = 0; part < (Int4 ? 2 : 1); ++part) {
      HalfU w[Halves];
      for (int h = 0; h < Halves; ++h) {
        w[h] = load_as<HalfU>(values + k * 64 + h * 32);
        if (Int4) w[h] = (w[h] >> (4 * part)) & 0x0f0f0f0fu;
      }
      for (int m = 0; m < Rows; ++m) {
        const __m256i xs = _mm256_set1_epi32(x[(k * (Int4 ? 2 : 1) + part) * stride + m]);
        for (int h = 0; h < Halves; ++h) {
          const int i = h * Rows + m;
#if defined(__AVXVNNI__)
          dots[i] = (HalfI)_mm256_dpbusd_avx_epi32((__m256i)dots[i], (__m256i)w[h], xs);
#else
          if constexpr (Int4) {
            pairs[i] = _mm256_add_epi16(pairs[i], _mm256_maddubs_epi16((__m256i)w[h], xs));
          } else {
            const __m256i q = (__m256i)(w[h] ^ 0x80808080u);
            const __m256i pair = _mm256_maddubs_epi16(_mm256_abs_epi8(q), _mm256_sign_epi8(xs, q));
            dots[i] += (HalfI)_mm256_madd_epi16(pair, ones);
          }
#endif
        }
      }
    }
  }
#if !defined(__AVXVNNI__)
  if constexpr (Int4)
    for (int i = 0; i < Halves * Rows; ++i)
      dots[i] = (HalfI)_mm256_madd_epi16(pairs[i], ones) + begin[i % Rows];
#endif
}

}  // namespace quire::QUIRE_ISA

#endif
