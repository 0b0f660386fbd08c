// Quarters of panels for ARM: registers of four lanes, and dot products of rows with four outputs.
//
// The sums of eight rows and four outputs fit in 32 registers. Register r has row r, one output in a lane.
// With products of matrices of bytes, for more than two rows, registers 2p and 2p + 1 have rows 2p and 2p + 1
// instead: of outputs 0 and 1 the first, of 2 and 3 the second; lanes are output, row: 00, 01, 10, 11.
//
// Without dot products, products of bytes are added in 16 bits. Those of int4 are at most 15 * 127, so
// sixteen fit, and a group of 32 inputs is widened once. Of int8, two fit. The integers are those that dot4
// gives.
#pragma once

#include "kernels.h"
#include "vec.h"

#if defined(QUIRE_NEON)
#define QUIRE_QUARTER_PANELS

namespace quire::QUIRE_ISA {

#if defined(__ARM_FEATURE_MATMUL_INT8)
constexpr bool kMatrices = true;  // and dot products of unsigned with signed bytes
#else
constexpr bool kMatrices = false;
#endif

template <int Rows>
constexpr bool kByPairs = kMatrices && Rows > 2;
template <int Rows>
constexpr int kRegisters = kByPairs<Rows> ? (int)round_up(Rows, 2) : Rows;

// Returns for register r the numbers of its rows, and of its outputs.
template <int Rows>
QUIRE_INLINE int32x4_t of_rows(const int32_t* from, int r) {
  if (!kByPairs<Rows>) return vdupq_n_s32(load_as<int32_t>(from + r));
  const int first = r / 2 * 2;
  return first + 1 < Rows ? vreinterpretq_s32_s64(vdupq_n_s64(load_as<int64_t>(from + first)))
                          : vdupq_n_s32(load_as<int32_t>(from + first));
}

template <int Rows>
QUIRE_INLINE int32x4_t of_outputs(int32x4_t four, int r) {
  if (!kByPairs<Rows>) return four;
  return r % 2 ? vzip2q_s32(four, four) : vzip1q_s32(four, four);
}

QUIRE_INLINE int32x4_t load_quarter_s8(const int8_t* from) {
  return vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(load_as<int32_t>(from))))));
}

// Stores the registers of four outputs to their quarter of each row.
template <int Rows>
QUIRE_INLINE void store_quarter(const float32x4_t* registers, int quarter, F* out) {
#pragma GCC unroll 8
  for (int m = 0; m < Rows; ++m) {
    const float32x4_t *pair = registers + m / 2 * 2, *own = registers + m;
    const float32x4_t row = !kByPairs<Rows> ? *own
                            : m % 2         ? vuzp2q_f32(pair[0], pair[1])
                                            : vuzp1q_f32(pair[0], pair[1]);
    store_as((float32x4_t*)(out + m) + quarter, row);
  }
}

#if defined(__ARM_FEATURE_DOTPROD)
template <int Lane>
QUIRE_INLINE int32x4_t dot_lane(int32x4_t sum, uint8x16_t w, int8x16_t x) {
#if defined(__ARM_FEATURE_MATMUL_INT8)
  return vusdotq_laneq_s32(sum, w, x, Lane);
#else
  return vdotq_laneq_s32(sum, vreinterpretq_s8_u8(w), x, Lane);
#endif
}

// Adds products of 8 inputs: of four outputs the first four inputs and the others, with `x` [Rows][8].
template <int Rows>
QUIRE_INLINE void dot_eight(uint8x16_t first, uint8x16_t second, const int32_t* x, int32x4_t* dots) {
#if defined(__ARM_FEATURE_MATMUL_INT8)
  if constexpr (kByPairs<Rows>) {
    const uint32x4_t a = vreinterpretq_u32_u8(first), b = vreinterpretq_u32_u8(second);
    const uint8x16_t low = vreinterpretq_u8_u32(vzip1q_u32(a, b)),
                     high = vreinterpretq_u8_u32(vzip2q_u32(a, b));
#pragma GCC unroll 8
    for (int m = 0; m < Rows; m += 2) {
      const int8x16_t rows = m + 1 < Rows ? load_as<int8x16_t>(x + 2 * m)
                                          : vreinterpretq_s8_s64(vdupq_n_s64(load_as<int64_t>(x + 2 * m)));
      dots[m] = vusmmlaq_s32(dots[m], low, rows);
      dots[m + 1] = vusmmlaq_s32(dots[m + 1], high, rows);
    }
    return;
  }
#endif
#pragma GCC unroll 8
  for (int m = 0; m + 1 < Rows; m += 2) {
    const int8x16_t rows = load_as<int8x16_t>(x + 2 * m);
    dots[m] = dot_lane<1>(dot_lane<0>(dots[m], first, rows), second, rows);
    dots[m + 1] = dot_lane<3>(dot_lane<2>(dots[m + 1], first, rows), second, rows);
  }
  if constexpr (Rows % 2 == 1) {
    const int8x16_t row = vreinterpretq_s8_s64(vdupq_n_s64(load_as<int64_t>(x + 2 * (Rows - 1))));
    dots[Rows - 1] = dot_lane<1>(dot_lane<0>(dots[Rows - 1], first, row), second, row);
  }
}
#else
// Adds products of 4 inputs in 16 bits, two for each output.
QUIRE_INLINE void multiply_add_s8(int16x8_t* sums, uint8x16_t w, const int32_t* x) {
  const int8x16_t q = vreinterpretq_s8_u8(w), xs = vreinterpretq_s8_s32(vdupq_n_s32(*x));
  sums[0] = vmlal_s8(sums[0], vget_low_s8(q), vget_low_s8(xs));
  sums[1] = vmlal_high_s8(sums[1], q, xs);
}
#endif

// Sums over a group of 32 inputs, [quarter][register]: of the outputs that begin at `values`, packed as in
// Panels, and rows of `x`, [4][Rows] of 8 bytes. They begin with `begin`, [row]: the zero point, and `more`.
template <int Rows, int Quarters, bool Int4>
QUIRE_INLINE void dot_quarters(const uint8_t* values, const int32_t* x, const int32_t* begin, int32_t more,
                               int32x4_t* dots) {
  constexpr int kOwn = kRegisters<Rows>;
  constexpr bool kUnsigned = Int4 || kMatrices;  // else bytes of weights become signed, without a zero point
#pragma GCC unroll 8
  for (int i = 0; i < Quarters * kOwn; ++i)
    dots[i] = kUnsigned ? of_rows<Rows>(begin, i % kOwn) : vdupq_n_s32(more);
#if !defined(__ARM_FEATURE_DOTPROD)
  int16x8_t pairs[Quarters * Rows][2]{};
#endif
#pragma GCC unroll 4
  for (int k = 0; k < 4; ++k, x += 2 * Rows) {
#pragma GCC unroll 4
    for (int q = 0; q < Quarters; ++q) {
      const uint8_t* const from = values + (Int4 ? k : 2 * k) * 64 + q * 16;
      uint8x16_t first = load_as<uint8x16_t>(from), second;
      if constexpr (Int4) {
        second = vshrq_n_u8(first, 4);
        first = vandq_u8(first, vdupq_n_u8(15));
      } else {
        second = load_as<uint8x16_t>(from + 64);
        if (!kUnsigned) first = veorq_u8(first, vdupq_n_u8(128)), second = veorq_u8(second, vdupq_n_u8(128));
      }
#if defined(__ARM_FEATURE_DOTPROD)
      dot_eight<Rows>(first, second, x, dots + q * kOwn);
#else
#pragma GCC unroll 8
      for (int m = 0; m < Rows; ++m) {
        int16x8_t* const sums = pairs[q * Rows + m];
        multiply_add_s8(sums, first, x + 2 * m);
        multiply_add_s8(sums, second, x + 2 * m + 1);
        if (Int4) continue;
        const int32x4_t low = vpaddlq_s16(sums[0]), high = vpaddlq_s16(sums[1]);
        dots[q * Rows + m] = vaddq_s32(dots[q * Rows + m], vpaddq_s32(low, high));
        sums[0] = sums[1] = int16x8_t{};
      }
#endif
    }
  }
#if !defined(__ARM_FEATURE_DOTPROD)
  if constexpr (Int4)
#pragma GCC unroll 8
    for (int i = 0; i < Quarters * Rows; ++i)
      dots[i] = vpadalq_s16(dots[i], vpaddq_s16(pairs[i][0], pairs[i][1]));
#endif
}

}  // namespace quire::QUIRE_ISA

#endif
