// The codes of a unit of coded panels, as bytes in registers (coding.h).
#pragma once

#include "kernels.h"
#include "vec.h"

namespace quire::QUIRE_ISA {

// Returns the codes of 4 inputs of a unit, 4k on, of the outputs that fit in V.
template <int Bits, typename V = U>
QUIRE_INLINE V codes(const uint8_t* unit, int k) {
  if constexpr (Bits == 8) return load_as<V>(unit + k * 64);
  V found{};
  int low = 0;
  if constexpr ((Bits & 4) != 0) {
    const V both = load_as<V>(unit + k / 2 * 64);
    found = (k % 2 ? both >> 4 : both) & 0x0f0f0f0fu;
    unit += 256;
    low = 4;
  }
  if constexpr ((Bits & 2) != 0) {
    const V four = load_as<V>(unit + k / 4 * 64);
    const int shift = low - 2 * (k % 4);
    found |= (shift < 0 ? four >> -shift : four << shift) & (0x03030303u << low);
    unit += 128;
    low += 2;
  }
  if constexpr ((Bits & 1) != 0) {
    const V eight = load_as<V>(unit);
    const int shift = low - k;
    found |= (shift < 0 ? eight >> -shift : eight << shift) & (0x01010101u << low);
  }
  return found;
}

}  // namespace quire::QUIRE_ISA
