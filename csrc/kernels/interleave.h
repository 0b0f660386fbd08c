// Rounding of the rows of a tile to int8, and their layout in it: [word of four inputs][row].
//
// Rows are interleaved in registers: moving a word at a time takes longer than rounding.
#pragma once

#include "rounding.h"

namespace quire::QUIRE_ISA {

constexpr int kGroupWords = kGroup / 4;

// Sums of the inputs 0..15 and 16..31 of a group, by row.
struct GroupSums {
  int32_t low[kTile], high[kTile];
  int32_t total(int64_t row) const { return low[row] + high[row]; }
};

// Computes the largest magnitudes of `count` numbers of each row, as bits (see `magnitude`).
template <int Rows>
QUIRE_INLINE void magnitudes(const float* x, int64_t stride, int64_t count, int32_t* tops) {
  if constexpr (Rows <= 2) {
    for (int m = 0; m < Rows; ++m) tops[m] = magnitude(x + m * stride, count);
  } else {
    I own[kTile]{};
    for (int m = 0; m < Rows; ++m) own[m] = magnitude_by_lane(x + m * stride, count);
    const I all = across(own, [](auto a, auto b) { return a > b ? a : b; });
    __builtin_memcpy(tops, &all, Rows * sizeof(int32_t));
  }
}

#if defined(__AVX512VNNI__)
// Stores the first numbers of both halves, [2][Rows].
template <int Rows>
QUIRE_INLINE void store_words(int32_t* to, I words) {
  if constexpr (Rows == kTile) return store(to, words);
  constexpr __mmask8 kFirst = (1 << Rows) - 1;
  _mm256_mask_storeu_epi32(to, kFirst, _mm512_castsi512_si256((__m512i)words));
  _mm256_mask_storeu_epi32(to + Rows, kFirst, _mm512_extracti64x4_epi64((__m512i)words, 1));
}

// Turns words [8 rows][8 words] into [8 words][Rows], and sums their bytes.
template <int Rows>
QUIRE_INLINE void interleave(const int32_t* words, int32_t* out, GroupSums& sums) {
  I four[4];  // words 0..3 and 4..7 of rows 0..3, the same of rows 4..7, [word][row]
  for (int i = 0; i < 2; ++i) {
    const I a = load(words + i * 32), b = load(words + i * 32 + 16);
    four[2 * i] = __builtin_shufflevector(a, b, 0, 8, 16, 24, 1, 9, 17, 25, 2, 10, 18, 26, 3, 11, 19, 27);
    four[2 * i + 1] =
        __builtin_shufflevector(a, b, 4, 12, 20, 28, 5, 13, 21, 29, 6, 14, 22, 30, 7, 15, 23, 31);
  }
  const B64 ones = (B64)splat(0x01010101);
  for (int half = 0; half < 2; ++half) {
    const I a = four[half], b = four[2 + half];
    const I first = __builtin_shufflevector(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const I second =
        __builtin_shufflevector(a, b, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    store_words<Rows>(out + 4 * half * Rows, first);
    store_words<Rows>(out + (4 * half + 2) * Rows, second);
    const I sum = dot4(dot4(I{}, ones, first), ones, second);
    const I both =
        sum + __builtin_shufflevector(sum, sum, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
    __builtin_memcpy(half ? sums.high : sums.low, &both, sizeof(sums.low));
  }
}
#endif

// Rounds at most 32 numbers of each row times its factor, to [8][Rows] words or, in pairs, [4][Rows][2]. Rows
// whose factor is 0 become 0.
template <int Rows, bool Pairs = false>
QUIRE_INLINE void quantize_rows(const float* x, int64_t stride, int64_t count, const float* factors,
                                int32_t* to, GroupSums& sums) {
  int32_t words[kTile * kGroupWords]{};
#if defined(__AVX512VNNI__)
  if constexpr (Rows > 1 && !Pairs) {
    for (int m = 0; m < Rows; ++m)
      if (factors[m] > 0) quantize_group(x + m * stride, count, factors[m], words + m * kGroupWords);
    return interleave<Rows>(words, to, sums);
  }
#endif
  for (int m = 0; m < Rows; ++m) {
    HalfSums found{};
    if (factors[m] > 0) found = quantize_group(x + m * stride, count, factors[m], words + m * kGroupWords);
    sums.low[m] = found.low, sums.high[m] = found.high;
    for (int i = 0; i < kGroupWords; ++i)
      to[Pairs ? (i / 2 * Rows + m) * 2 + i % 2 : i * Rows + m] = words[m * kGroupWords + i];
  }
}

}  // namespace quire::QUIRE_ISA
