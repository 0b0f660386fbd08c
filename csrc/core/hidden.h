// Hidden states of positions in the blocks of a cache, as bfloat16.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "memory.h"

namespace quire {

class HiddenStates {
 public:
  // Room for `width` numbers at each of the positions of so many blocks.
  HiddenStates(int64_t blocks, int64_t block_size, int64_t width)
      : block_size_(block_size), width_(width), memory_((size_t)(blocks * block_size * width) * 2) {}

  int64_t width() const { return width_; }
  // Keeps those of a position, in the block table of its sequence.
  void put(const int64_t* table, int64_t position, const float* from) {
    std::transform(from, from + width_, at(table, position), [](float x) {
      const uint32_t bits = std::bit_cast<uint32_t>(x);
      if (x != x) return (uint16_t)(bits >> 16 | 0x40);
      return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);  // rounded to even
    });
  }
  // Writes those of the position before this one; zeros before position 0.
  void before(const int64_t* table, int64_t position, float* to) const {
    if (position == 0) {
      std::fill_n(to, width_, 0.0f);
      return;
    }
    const uint16_t* from = at(table, position - 1);
    std::transform(from, from + width_, to,
                   [](uint16_t x) { return std::bit_cast<float>((uint32_t)x << 16); });
  }
  void clear(int64_t block) {
    const int64_t numbers = block_size_ * width_;
    std::fill_n(memory_.as<uint16_t>() + block * numbers, numbers, (uint16_t)0);
  }

 private:
  uint16_t* at(const int64_t* table, int64_t position) const {
    const int64_t place = table[position / block_size_] * block_size_ + position % block_size_;
    return memory_.as<uint16_t>() + place * width_;
  }

  int64_t block_size_, width_;
  Memory memory_;
};

}  // namespace quire
