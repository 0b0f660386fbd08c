// A weight matrix, or one per expert, packed for the kernels.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "../kernels/kernels.h"
#include "memory.h"
#include "nodes.h"

namespace quire {

constexpr int64_t kAlignment = 64;  // bytes: alignment of matrices and their parts
constexpr int64_t kTableBytes = 16 * sizeof(float);
constexpr int64_t kLeastSection = int64_t(1) << 22;  // weights: some huge pages

// The part of a weight that the threads of one node multiply: of some matrices, all of them or some panels.
struct Section {
  int64_t first_matrix, last_matrix, first_panel, last_panel;
};

// All parts are in one buffer, which can be written to a file and mapped unchanged. For each of `count`
// matrices: values of all panels, then block scales and channel scales, or the order of the inputs and the
// table of floats, each padded to kAlignment.
class Matrix {
 public:
  // Allocates zeros, to be filled by packing.
  Matrix(Format format, Coding coding, int64_t count, int64_t outputs, int64_t inputs)
      : format_(format),
        coding_(coding),
        count_(count),
        outputs_(outputs),
        inputs_(inputs),
        memory_((size_t)(count * stride())) {
    data_ = memory_.as<uint8_t>();
  }
  // Uses packed bytes owned by the caller.
  Matrix(Format format, Coding coding, int64_t count, int64_t outputs, int64_t inputs, uint8_t* data)
      : format_(format), coding_(coding), count_(count), outputs_(outputs), inputs_(inputs), data_(data) {}

  // Joins matrices of one shape and of any formats, such as those of the experts of a layer.
  explicit Matrix(std::vector<std::shared_ptr<const Matrix>> parts)
      : Matrix(parts.at(0)->format_, parts[0]->coding_, (int64_t)parts.size(), parts[0]->outputs_,
               parts[0]->inputs_, nullptr) {
    parts_ = std::move(parts);
  }

  // Of the first one, if matrices are joined.
  Format format() const { return format_; }
  const Coding& coding() const { return coding_; }
  int64_t count() const { return count_; }
  int64_t outputs() const { return outputs_; }
  int64_t inputs() const { return inputs_; }
  bool joined() const { return !parts_.empty(); }
  int64_t nbytes() const { return count_ * stride(); }
  uint8_t* data() const { return data_; }

  // One matrix is divided by panels, two of which may be multiplied together; so is each of several, if it is
  // large enough for a node to have whole huge pages of it. Otherwise a node has whole ones. This depends on
  // the shape alone, so that matrices of one shape and of different formats are divided alike.
  Section section(const Nodes& nodes, int node) const {
    const int64_t panels = ceil_div(outputs_, kPanel);
    if (count_ > 1 && outputs_ * inputs_ < kLeastSection * nodes.count())
      return {nodes.first(count_, node), nodes.first(count_, node + 1), 0, panels};
    const int64_t pairs = ceil_div(panels, 2);
    return {0, count_, 2 * nodes.first(pairs, node), std::min(panels, 2 * nodes.first(pairs, node + 1))};
  }

  Panels panels(int64_t index = 0) const {
    if (joined()) return parts_.at((size_t)index)->panels();
    Panels p = shape();
    uint8_t* begin = data_ + index * stride();
    p.values = begin;
    p.block_scales = (const int8_t*)(begin + values_bytes());
    p.channels = (const float*)(begin + values_bytes() + block_scales_bytes());
    if (coding_.ordered) p.order = (const int32_t*)(begin + values_bytes());
    if (coding_.meaning == Meaning::floats) p.table = (const float*)(begin + values_bytes() + order_bytes());
    return p;
  }

 private:
  Panels shape() const {
    return {format_, coding_, outputs_, inputs_, nullptr, nullptr, nullptr, nullptr, nullptr};
  }
  int64_t values_bytes() const { return round_up(shape().panels() * shape().panel_bytes(), kAlignment); }
  int64_t block_scales_bytes() const {
    return shape().quantized() ? round_up(shape().panels() * shape().groups() * kPanel, kAlignment) : 0;
  }
  int64_t channels_bytes() const { return shape().quantized() ? shape().panels() * kPanel * 4 : 0; }
  int64_t order_bytes() const { return coding_.ordered ? round_up(inputs_ * 4, kAlignment) : 0; }
  int64_t table_bytes() const { return coding_.meaning == Meaning::floats ? kTableBytes : 0; }
  int64_t stride() const {
    return values_bytes() + block_scales_bytes() + channels_bytes() + order_bytes() + table_bytes();
  }

  Format format_;
  Coding coding_;
  int64_t count_, outputs_, inputs_;
  Memory memory_;
  uint8_t* data_ = nullptr;
  std::vector<std::shared_ptr<const Matrix>> parts_;
};

}  // namespace quire
