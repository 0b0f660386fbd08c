// Rounding of activations to int8.
#pragma once

#include "vec.h"

namespace quire::QUIRE_ISA {

// Returns the largest magnitude in each lane, as bits: above all finite numbers if one is not finite.
QUIRE_INLINE I magnitude_by_lane(const float* x, int64_t count) {
  I top{};
  for (int64_t k = 0; k < count; k += kLanes) top = max(top, (I)abs(load_some(x + k, count - k)));
  return top;
}

QUIRE_INLINE int32_t magnitude(const float* x, int64_t count) {
  return reduce_max(magnitude_by_lane(x, count));
}

// Rounding of numbers up to a magnitude to steps: the factor, 0 if all become zero, and what a step is.
struct Steps {
  float factor, scale;
};
QUIRE_INLINE Steps steps_of(int32_t magnitude, float count) {
  const float largest = __builtin_bit_cast(float, magnitude), ratio = count / largest;
  const bool finite = magnitude < 0x7f800000;
  return {finite && ratio <= 3.4028235e38f ? ratio : 0.0f,  // of tiny numbers it overflows
          finite ? largest / count : __builtin_nanf("")};
}

struct HalfSums {
  int32_t low, high;  // of inputs 0..15 and 16..31
};
QUIRE_INLINE int32_t total(HalfSums of) { return of.low + of.high; }

QUIRE_INLINE int32_t sum_of(I x) {
  const I halves = add_halves(x);
  return halves[0] + halves[8];
}

// Rounds 32 numbers times `inverse` to integers, as the bytes of 8 words; returns their sums.
QUIRE_INLINE HalfSums quantize_group(const float* x, int64_t count, float inverse, int32_t* words) {
  const I low = to_int(load_some(x, count) * inverse);
  const I high = count > kLanes ? to_int(load_some(x + kLanes, count - kLanes) * inverse) : I{};
  store_as(words, to_s8(low));
  store_as(words + 4, to_s8(high));
  return {sum_of(low), sum_of(high)};
}

}  // namespace quire::QUIRE_ISA
