// The Python interface of a program recorded for this machine, and of its caches.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <array>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/attention.h"
#include "core/executor.h"
#include "core/experts.h"
#include "core/isa.h"
#include "core/ops.h"
#include "core/state.h"

namespace quire {

namespace nb = nanobind;

using Floats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Ints = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Table = nb::ndarray<const int64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using MatrixPtr = std::shared_ptr<const Matrix>;

inline Vector vector(const std::optional<Floats>& array) {
  return array ? Vector(array->data(), array->data() + array->size()) : Vector();
}

inline Activation activation(const std::string& name) {
  if (name == "none") return Activation::none;
  if (name == "silu" || name == "swish") return Activation::silu;
  if (name == "gelu_new" || name == "gelu_pytorch_tanh") return Activation::gelu_tanh;
  if (name == "relu") return Activation::relu;
  throw nb::value_error(("unknown activation " + name).c_str());
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

inline KVFormat kv_format(const std::string& name) {
  if (name == "float32") return KVFormat::f32;
  if (name == "float16") return KVFormat::f16;
  if (name == "bfloat16") return KVFormat::bf16;
  if (name == "int8") return KVFormat::int8;
  throw nb::value_error(("unknown format of keys and values " + name).c_str());
}

// The keys and values of the `layers` layers of one cache group.
class KVCache {
 public:
  KVCache(int64_t group, const std::string& name, int64_t layers, int64_t num_blocks, int64_t block_size,
          int64_t heads, int64_t dim)
      : group_(group) {
    const KVFormat format = kv_format(name);
    const int64_t bytes = format == KVFormat::f32 ? 4 : format == KVFormat::int8 ? 1 : 2;
    const int64_t head = block_size * dim * bytes, stride = layers * heads;
    keys_ = Memory((size_t)(num_blocks * stride * head));
    values_ = Memory((size_t)(num_blocks * stride * head));
    if (format == KVFormat::int8) {
      key_scales_ = Memory((size_t)(num_blocks * stride * block_size) * sizeof(float));
      value_scales_ = Memory((size_t)(num_blocks * stride * block_size) * sizeof(float));
    }
    for (int64_t layer = 0; layer < layers; ++layer) {
      const int64_t first = layer * heads;
      const bool scaled = format == KVFormat::int8;
      layers_.push_back({format, heads, dim, block_size, stride, keys_.as<uint8_t>() + first * head,
                         values_.as<uint8_t>() + first * head,
                         scaled ? key_scales_.as<float>() + first * block_size : nullptr,
                         scaled ? value_scales_.as<float>() + first * block_size : nullptr});
    }
  }
  int64_t group() const { return group_; }
  const KVLayer* layer(int64_t index) const { return &layers_.at((size_t)index); }

 private:
  int64_t group_;
  Memory keys_, values_, key_scales_, value_scales_;
  std::vector<KVLayer> layers_;
};

// A program that is recorded op by op, then run. Values are identified by buffer numbers.
class Native {
 public:
  Native(const std::string& isa, int threads)
      : executor_(kernels_of(isa), threads), packed_(std::make_shared<Memory>()) {}

  int64_t buffer(const std::string& rows, int64_t width) { return executor_.add_buffer(count(rows), width); }

  void embed(int64_t out, MatrixPtr table, bool by_position) {
    executor_.add(std::make_unique<Embed>(out, std::move(table), by_position));
  }
  void sampled_rows(int64_t out, int64_t x, int64_t width) {
    executor_.add(std::make_unique<SampledRows>(out, x, width));
  }

  void add(const std::string& rows, int64_t out, int64_t x, int64_t y, int64_t width) {
    row_wise(rows, out, width, x, width, y,
             [width](const Step& s, const float* x, const float* y, float* out, int64_t n) {
               s.kernels.add(x, y, out, n * width);
             });
  }
  void scale(const std::string& rows, int64_t out, int64_t x, int64_t width, float factor) {
    row_wise(rows, out, width, x, width, -1,
             [=](const Step& s, const float* x, const float*, float* out, int64_t n) {
               s.kernels.scale(x, factor, out, n * width);
             });
  }
  void soft_cap(const std::string& rows, int64_t out, int64_t x, int64_t width, float cap) {
    row_wise(rows, out, width, x, width, -1,
             [=](const Step& s, const float* x, const float*, float* out, int64_t n) {
               s.kernels.soft_cap(x, cap, out, n * width);
             });
  }
  void unary(const std::string& rows, int64_t out, int64_t x, int64_t width, const std::string& name) {
    const Activation a = activation(name);
    row_wise(rows, out, width, x, width, -1,
             [=](const Step& s, const float* x, const float*, float* out, int64_t n) {
               s.kernels.activate(a, x, out, n * width);
             });
  }
  void gate(const std::string& rows, int64_t out, int64_t gate, int64_t up, int64_t width,
            const std::string& name) {
    const Activation a = activation(name);
    row_wise(rows, out, width, gate, width, up,
             [=](const Step& s, const float* g, const float* u, float* out, int64_t n) {
               s.kernels.gate(a, g, u, out, n * width);
             });
  }
  void slice(const std::string& rows, int64_t out, int64_t width, int64_t x, int64_t x_width, int64_t first) {
    row_wise(rows, out, width, x, x_width, -1,
             [=](const Step&, const float* x, const float*, float* out, int64_t n) {
               for (int64_t i = 0; i < n; ++i)
                 std::memcpy(out + i * width, x + i * x_width + first, (size_t)width * sizeof(float));
             });
  }
  void norm(const std::string& rows, int64_t out, int64_t x, int64_t width, Floats weight,
            std::optional<Floats> bias, float eps, float offset, bool centered) {
    auto w = std::make_shared<Vector>(vector(weight)), b = std::make_shared<Vector>(vector(bias));
    row_wise(rows, out, width, x, width, -1,
             [=](const Step& s, const float* x, const float*, float* out, int64_t n) {
               const int64_t last = (int64_t)w->size();
               s.kernels.norm({w->data(), b->empty() ? nullptr : b->data(), last, eps, offset, centered}, x,
                              out, n * (width / last));
             });
  }

  // Returns the number of the table, for `rotary` and `frequencies`.
  int64_t rope_table(int64_t pairs, double scale) {
    auto table = std::make_unique<RopeTable>(pairs, scale);
    ropes_.push_back(table.get());
    executor_.add(std::move(table));
    return (int64_t)ropes_.size() - 1;
  }
  void frequencies(int64_t table, int64_t variant, Floats values) {
    ropes_.at((size_t)table)->set(variant, vector(values));
  }
  void rotary(int64_t out, int64_t x, int64_t heads, int64_t dim, int64_t table, bool interleaved) {
    executor_.add(std::make_unique<Rotary>(out, x, heads, dim, ropes_.at((size_t)table), interleaved));
  }

  // Packs the rows of x for the following products.
  void pack(const std::string& rows, int64_t x, int64_t width, const Matrix& like) {
    executor_.add(std::make_unique<Pack>(count(rows), x, width, like.format(), packed_));
  }
  // Starts a phase of products; `linear` and `gated_linear` add to it.
  void products(const std::string& rows) {
    auto multiply = std::make_unique<Multiply>(count(rows), packed_);
    multiply_ = multiply.get();
    executor_.add(std::move(multiply));
  }
  void linear(int64_t out, MatrixPtr weight, std::optional<Floats> bias) {
    multiply_->add({std::move(weight), nullptr, vector(bias), Activation::none, out});
  }
  void gated_linear(int64_t out, MatrixPtr gate, MatrixPtr up, const std::string& name) {
    multiply_->add({std::move(gate), std::move(up), {}, activation(name), out});
  }

  void experts(int64_t out, int64_t x, int64_t scores, std::vector<MatrixPtr> matrices,
               std::vector<std::optional<Floats>> biases, int64_t chosen, bool over_chosen,
               const std::string& name, float limit) {
    ExpertWeights weights{matrices.at(0),       matrices.at(1),       matrices.at(2),
                          vector(biases.at(0)), vector(biases.at(1)), vector(biases.at(2))};
    auto state =
        std::make_shared<ExpertsState>(std::move(weights), chosen, over_chosen, activation(name), limit);
    executor_.add(std::make_unique<RouteExperts>(state, scores));
    executor_.add(std::make_unique<GatherExperts>(state, x));
    executor_.add(std::make_unique<MultiplyExperts>(state, MultiplyExperts::Which::gate_up));
    executor_.add(std::make_unique<ActivateExperts>(state));
    executor_.add(std::make_unique<MultiplyExperts>(state, MultiplyExperts::Which::down));
    executor_.add(std::make_unique<SumExperts>(state, out));
  }

  void write_kv(int64_t k, int64_t v, std::shared_ptr<KVCache> cache, int64_t layer) {
    executor_.add(std::make_unique<WriteKV>(k, v, cache->layer(layer), cache->group()));
    caches_.push_back(std::move(cache));
  }
  void attend(int64_t out, int64_t q, std::shared_ptr<KVCache> cache, int64_t layer, int64_t heads,
              float scale, int64_t window, float softcap, std::optional<Floats> sinks) {
    sinks_.push_back(std::make_unique<Vector>(vector(sinks)));
    const float* bias = sinks_.back()->empty() ? nullptr : sinks_.back()->data();
    const Attention how{cache->layer(layer), heads, scale, window, softcap, bias};
    auto attend = std::make_unique<Attend>(q, out, how, cache->group());
    auto merge = std::make_unique<MergeSegments>(attend.get());
    executor_.add(std::move(attend));
    executor_.add(std::move(merge));
    caches_.push_back(std::move(cache));
  }

  // Must precede all ops that read these states.
  void restore_states(std::shared_ptr<StateCache> cache) {
    executor_.add(std::make_unique<RestoreStates>(cache.get()));
    states_.push_back(std::move(cache));
  }
  void convolve(int64_t out, int64_t x, const StateCache& cache, int64_t layer, Floats weight) {
    executor_.add(std::make_unique<ShortConvolution>(out, x, &cache, layer, vector(weight)));
  }
  void recur(int64_t out, int64_t x, int64_t decay, const StateCache& cache, int64_t layer) {
    executor_.add(std::make_unique<GatedRecurrence>(out, x, decay, &cache, layer));
  }

  Executor& executor() { return executor_; }
  RopeTable* rope(int64_t table) const { return ropes_.at((size_t)table); }

  nb::ndarray<nb::numpy, float, nb::ndim<2>> run(Ints token_ids, Ints positions, Ints row_offsets,
                                                 const std::vector<Table>& tables, Ints slots, Ints variants,
                                                 Ints logit_rows, const Snapshots& restored,
                                                 const Snapshots& saved, int64_t output, int64_t width) {
    std::vector<const int64_t*> rows;
    for (const auto& cache : caches_)
      if ((size_t)cache->group() >= tables.size())
        throw nb::value_error("expected a block table per cache group");
    for (const Table& table : tables)
      for (size_t row = 0; row < slots.size(); ++row) rows.push_back(table.data() + row * table.shape(1));
    const std::vector<Snapshot> before = snapshots(restored), after = snapshots(saved);
    const Batch batch{(int64_t)token_ids.size(),
                      (int64_t)slots.size(),
                      (int64_t)logit_rows.size(),
                      token_ids.data(),
                      positions.data(),
                      row_offsets.data(),
                      rows.data(),
                      slots.data(),
                      variants.data(),
                      logit_rows.data(),
                      before,
                      after};
    float* logits;
    {
      nb::gil_scoped_release unlocked;
      logits = executor_.run(batch, output);
    }
    return nb::ndarray<nb::numpy, float, nb::ndim<2>>(logits, {logit_rows.size(), (size_t)width},
                                                      nb::handle());
  }

 private:
  void row_wise(const std::string& rows, int64_t out, int64_t out_width, int64_t x, int64_t x_width,
                int64_t y, RowWise::Function function) {
    executor_.add(std::make_unique<RowWise>(count(rows), out, out_width, x, x_width, y, std::move(function)));
  }

  Executor executor_;
  std::shared_ptr<Memory> packed_;
  std::vector<std::shared_ptr<KVCache>> caches_;  // keeps alive what ops refer to
  std::vector<std::shared_ptr<StateCache>> states_;
  std::vector<std::unique_ptr<Vector>> sinks_;
  std::vector<RopeTable*> ropes_;
  Multiply* multiply_ = nullptr;
};

}  // namespace quire
