// A matrix in a checkpoint file, and its conversion to panels.
#pragma once

#include "kernels.h"

namespace quire {

// A matrix [outputs, inputs] of f32, f16 or bf16 with arbitrary strides in bytes.
struct Source {
  Format format;
  int64_t outputs, inputs;
  const uint8_t* data;
  int64_t output_stride, input_stride;
};

// Floats of scratch for packing one panel: its numbers, and the largest of each group.
constexpr int64_t packing_scratch(int64_t inputs) {
  return (round_up(inputs, kGroup) + ceil_div(inputs, kGroup)) * kPanel;
}

}  // namespace quire
