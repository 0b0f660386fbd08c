// Values that Python passes to a program recorded for this machine.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <array>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/adapters.h"
#include "core/executor.h"
#include "core/experts.h"
#include "core/matrix.h"
#include "core/ops.h"

namespace quire {

namespace nb = nanobind;

using Floats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Ints = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Table = nb::ndarray<const int64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Stored = nb::ndarray<nb::ro, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using MatrixPtr = std::shared_ptr<const Matrix>;
using Adapters = std::vector<std::optional<std::shared_ptr<const Adapter>>>;

inline Vector vector(const std::optional<Floats>& array) {
  return array ? Vector(array->data(), array->data() + array->size()) : Vector();
}

// Numbers that stay where they are until the program goes.
class KeptNumbers {
 public:
  // Returns the place of a copy; null if there are none.
  const float* keep(const std::optional<Floats>& numbers) {
    if (!numbers) return nullptr;
    return kept_.emplace_back(std::make_unique<Vector>(vector(numbers)))->data();
  }

 private:
  std::vector<std::unique_ptr<Vector>> kept_;
};

inline Activation activation(const std::string& name) {
  if (name == "linear") return Activation::none;
  if (name == "silu" || name == "swish") return Activation::silu;
  if (name == "gelu") return Activation::gelu;
  if (name == "tanh") return Activation::tanh;
  if (name == "gelu_new" || name == "gelu_pytorch_tanh") return Activation::gelu_tanh;
  if (name == "relu") return Activation::relu;
  if (name == "relu2") return Activation::relu2;
  if (name == "sigmoid") return Activation::sigmoid;
  throw nb::value_error(("unknown activation " + name).c_str());
}

inline Routing::Affinity affinity_of(const std::string& name) {
  if (name == "softmax") return Routing::Affinity::softmax;
  if (name == "sigmoid") return Routing::Affinity::sigmoid;
  if (name == "sqrtsoftplus") return Routing::Affinity::sqrtsoftplus;
  throw nb::value_error(("unknown affinity " + name).c_str());
}

// Tuples (slot, group, position, snapshot) from Python.
using Snapshots = std::vector<std::array<int64_t, 4>>;

inline std::vector<Snapshot> snapshots(const Snapshots& tuples) {
  std::vector<Snapshot> found;
  for (const auto& [slot, group, position, snapshot] : tuples)
    found.push_back({slot, group, position, snapshot});
  return found;
}

inline Count count(const std::string& name) { return name == "T" ? Count::tokens : Count::logits; }

}  // namespace quire
