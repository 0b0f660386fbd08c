// Dot products of bytes by the instructions of ARM, for vec.h.
#pragma once

#include "kernels.h"

#if defined(QUIRE_NEON)
#include <arm_neon.h>

namespace quire::QUIRE_ISA {

// sum[i] + the products of four signed bytes.
QUIRE_INLINE int32x4_t dot_s8(int32x4_t sum, int8x16_t w, int8x16_t x) {
#if defined(__ARM_FEATURE_DOTPROD)
  return vdotq_s32(sum, w, x);
#else
  const int16x8_t low = vmull_s8(vget_low_s8(w), vget_low_s8(x)), high = vmull_high_s8(w, x);
  return sum + vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high));
#endif
}

// Adds the products of four unsigned bytes (at most 127 if Small) with those of `x` to each lane.
template <bool Small>
QUIRE_INLINE void dot4_quarters(int32x4_t (&sums)[4], const uint8x16_t (&w)[4], int8x16_t x) {
#if defined(__ARM_FEATURE_MATMUL_INT8)
  for (int i = 0; i < 4; ++i) sums[i] = vusdotq_s32(sums[i], w[i], x);
#else
  // Bytes above 127 are made signed, which takes 128 away from each.
  const int32x4_t half = Small ? int32x4_t{} : dot_s8(int32x4_t{}, vdupq_n_s8(64), x);
  const uint8x16_t flip = vdupq_n_u8(Small ? 0 : 128);
  for (int i = 0; i < 4; ++i) sums[i] = dot_s8(sums[i] + half + half, vreinterpretq_s8_u8(w[i] ^ flip), x);
#endif
}

}  // namespace quire::QUIRE_ISA

#endif
