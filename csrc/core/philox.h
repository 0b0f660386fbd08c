// Stateless random numbers, equal to those of quire/sampling/philox.py.
#pragma once

#include <cstdint>

namespace quire {

// Returns a number in [0, 1) with 53 random bits: Philox4x32-10 of Salmon et al. 2011, "Parallel Random
// Numbers: As Easy as 1, 2, 3". The counter is the position (64 bits), the sequence, and 0, the number of the
// draw at this position.
inline double uniform(uint64_t seed, uint32_t sequence, uint64_t position) {
  uint32_t c[4] = {(uint32_t)position, (uint32_t)(position >> 32), sequence, 0};
  uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = (uint64_t)c[0] * 0xD2511F53, p1 = (uint64_t)c[2] * 0xCD9E8D57;
    c[0] = (uint32_t)(p1 >> 32) ^ c[1] ^ k0;
    c[2] = (uint32_t)(p0 >> 32) ^ c[3] ^ k1;
    c[1] = (uint32_t)p1;
    c[3] = (uint32_t)p0;
    k0 += 0x9E3779B9;
    k1 += 0xBB67AE85;
  }
  return (double)((uint64_t)(c[0] >> 5) << 26 | c[1] >> 6) * 0x1p-53;
}

}  // namespace quire
