// A weight matrix, or one per expert, packed for the kernels.
#pragma once

#include <cstdint>

#include "../kernels/kernels.h"
#include "memory.h"

namespace quire {

constexpr int64_t kAlignment = 64;  // bytes: alignment of matrices and their parts

// All parts are in one buffer, which can be written to a file and mapped unchanged. For each of `count`
// matrices: values of all panels, then block scales, then channel scales, each padded to kAlignment.
class Matrix {
 public:
  // Allocates zeros, to be filled by packing.
  Matrix(Format format, int64_t count, int64_t outputs, int64_t inputs)
      : format_(format),
        count_(count),
        outputs_(outputs),
        inputs_(inputs),
        memory_((size_t)(count * stride())) {
    data_ = memory_.as<uint8_t>();
  }
  // Uses packed bytes owned by the caller.
  Matrix(Format format, int64_t count, int64_t outputs, int64_t inputs, uint8_t* data)
      : format_(format), count_(count), outputs_(outputs), inputs_(inputs), data_(data) {}

  Format format() const { return format_; }
  int64_t count() const { return count_; }
  int64_t outputs() const { return outputs_; }
  int64_t inputs() const { return inputs_; }
  int64_t nbytes() const { return count_ * stride(); }
  uint8_t* data() const { return data_; }

  Panels panels(int64_t index = 0) const {
    Panels p = shape();
    uint8_t* begin = data_ + index * stride();
    p.values = begin;
    p.block_scales = (const int8_t*)(begin + values_bytes());
    p.channels = (const float*)(begin + values_bytes() + block_scales_bytes());
    return p;
  }

 private:
  Panels shape() const { return {format_, outputs_, inputs_, nullptr, nullptr, nullptr}; }
  int64_t values_bytes() const { return round_up(shape().panels() * shape().panel_bytes(), kAlignment); }
  int64_t block_scales_bytes() const {
    return shape().quantized() ? round_up(shape().panels() * shape().groups() * kPanel, kAlignment) : 0;
  }
  int64_t channels_bytes() const { return shape().quantized() ? shape().panels() * kPanel * 4 : 0; }
  int64_t stride() const { return values_bytes() + block_scales_bytes() + channels_bytes(); }

  Format format_;
  int64_t count_, outputs_, inputs_;
  Memory memory_;
  uint8_t* data_ = nullptr;
};

}  // namespace quire
