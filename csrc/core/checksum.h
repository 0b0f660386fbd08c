// A checksum at the speed of memory. It detects damage to files written by this machine, not deliberate
// manipulation.
#pragma once

#include <cstdint>
#include <cstring>

namespace quire {

// FNV-1a over eight words in parallel. Changing one word always changes the result: each step is a bijection
// of its lane, and so is each step that combines the lanes.
inline uint64_t checksum(const uint8_t* data, size_t bytes) {
  constexpr uint64_t kPrime = 0x100000001b3, kLanes = 8;
  uint64_t lane[kLanes];
  for (uint64_t i = 0; i < kLanes; ++i) lane[i] = 0xcbf29ce484222325 + i;
  const auto mix = [&lane](const uint8_t* from) {
    uint64_t word[kLanes];
    std::memcpy(word, from, sizeof(word));
#pragma GCC unroll 8
    for (uint64_t i = 0; i < kLanes; ++i) {
      lane[i] = (lane[i] ^ word[i]) * kPrime;
      lane[i] ^= lane[i] >> 32;  // mix the high bits into the low ones
    }
  };
  size_t done = 0;
  for (; done + 64 <= bytes; done += 64) mix(data + done);
  if (done < bytes) {
    uint8_t rest[64] = {};
    std::memcpy(rest, data + done, bytes - done);
    mix(rest);
  }
  uint64_t joined = bytes;
  for (uint64_t i = 0; i < kLanes; ++i) {
    joined = (joined ^ lane[i]) * kPrime;
    joined ^= joined >> 29;
  }
  return joined;
}

}  // namespace quire
