// The codes of a unit of coded panels, as bytes in registers (coding.h).
#pragma once

#include "kernels.h"
#include "vec.h"

namespace quire::QUIRE_ISA {

// Returns the codes of 4 inputs of a unit, 4k on.
template <int Bits>
QUIRE_INLINE B64 codes(const uint8_t* unit, int k) {
  if constexpr (Bits == 8) return load_as<B64>(unit + k * 64);
  U found{};
  int low = 0;
  if constexpr ((Bits & 4) != 0) {
    const U both = load_as<U>(unit + k / 2 * 64);
    found = (k % 2 ? both >> 4 : both) & 0x0f0f0f0fu;
    unit += 256;
    low = 4;
  }
  if constexpr ((Bits & 2) != 0) {
    const U four = load_as<U>(unit + k / 4 * 64);
    const int shift = low - 2 * (k % 4);
    found |= (shift < 0 ? four >> -shift : four << shift) & (0x03030303u << low);
    unit += 128;
    low += 2;
  }
  if constexpr ((Bits & 1) != 0) {
    const U eight = load_as<U>(unit);
    const int shift = low - k;
    found |= (shift < 0 ? eight >> -shift : eight << shift) & (0x01010101u << low);
  }
  return (B64)found;
}

}  // namespace quire::QUIRE_ISA
