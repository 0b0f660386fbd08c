// Packing of codes of other formats, which are kept as they are.
#pragma once

#include <cstdint>

#include "../kernels/kernels.h"

namespace quire {

// Scales or minimums of a matrix, [outputs][count] of each array.
struct GroupNumbers {
  const uint8_t* values = nullptr;  // of value_bytes each
  const uint8_t* codes = nullptr;   // one for each group, or null
  int64_t value_bytes = 0, num_values = 0;
};

// A matrix as quire.quantize.coded has it: rows of packed codes, a little-endian stream of bits each.
struct CodedSource {
  int64_t outputs, inputs, group, groups;  // inputs of a group, and groups of a row
  const uint8_t* packed;
  int64_t row_bytes, stride;  // bytes of codes in a row, and from row to row
  bool is_signed;             // codes are in two's complement
  GroupNumbers scales, minimums;
  const uint8_t* zeros;  // [outputs][groups], or null
};

// Fills panels [first, last).
void pack_coded(const CodedSource& source, const Panels& to, int64_t first, int64_t last);

}  // namespace quire
