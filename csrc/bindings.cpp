// The module quire.backends.native._core: an executor that Python fills with ops, once, and then runs.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings.h"
#include "core/attention.h"
#include "core/executor.h"
#include "core/experts.h"
#include "core/isa.h"
#include "core/ops.h"
#include "core/probe.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace quire {

namespace {

using Floats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Ints = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Table = nb::ndarray<const int64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using MatrixPtr = std::shared_ptr<const Matrix>;

Vector vector(const std::optional<Floats>& array) {
  return array ? Vector(array->data(), array->data() + array->size()) : Vector();
}

Activation activation(const std::string& name) {
  if (name == "none") return Activation::none;
  if (name == "silu" || name == "swish") return Activation::silu;
  if (name == "gelu_new" || name == "gelu_pytorch_tanh") return Activation::gelu_tanh;
  if (name == "relu") return Activation::relu;
  throw nb::value_error(("unknown activation " + name).c_str());
}

Count count(const std::string& name) { return name == "T" ? Count::tokens : Count::logits; }

KVFormat kv_format(const std::string& name) {
  if (name == "float32") return KVFormat::f32;
  if (name == "float16") return KVFormat::f16;
  if (name == "bfloat16") return KVFormat::bf16;
  if (name == "int8") return KVFormat::int8;
  throw nb::value_error(("unknown format of keys and values " + name).c_str());
}

// The keys and values of `layers` layers of one shape.
class KVCache {
 public:
  KVCache(const std::string& name, int64_t layers, int64_t num_blocks, int64_t block_size, int64_t heads,
          int64_t dim) {
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
  const KVLayer* layer(int64_t index) const { return &layers_.at((size_t)index); }

 private:
  Memory keys_, values_, key_scales_, value_scales_;
  std::vector<KVLayer> layers_;
};

// A program being recorded for this machine, then run. Values are buffer numbers.
class Native {
 public:
  Native(const std::string& isa, int threads)
      : executor_(kernels_of(isa), threads), room_(std::make_shared<Memory>()) {}

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

  // Returns the number by which `rotary` and `frequencies` name the table.
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

  // Lays out the rows of x for the products that follow.
  void pack(const std::string& rows, int64_t x, int64_t width, const Matrix& like) {
    executor_.add(std::make_unique<Pack>(count(rows), x, width, like.format(), room_));
  }
  // Begins a phase of products; `linear` and `gated_linear` add to it.
  void products(const std::string& rows) {
    auto multiply = std::make_unique<Multiply>(count(rows), room_);
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
    executor_.add(std::make_unique<WriteKV>(k, v, cache->layer(layer)));
    caches_.push_back(std::move(cache));
  }
  void attend(int64_t out, int64_t q, std::shared_ptr<KVCache> cache, int64_t layer, int64_t heads,
              float scale, int64_t window, float softcap, std::optional<Floats> sinks) {
    sinks_.push_back(std::make_unique<Vector>(vector(sinks)));
    const float* bias = sinks_.back()->empty() ? nullptr : sinks_.back()->data();
    auto attend =
        std::make_unique<Attend>(q, out, Attention{cache->layer(layer), heads, scale, window, softcap, bias});
    auto merge = std::make_unique<MergeSegments>(attend.get());
    executor_.add(std::move(attend));
    executor_.add(std::move(merge));
    caches_.push_back(std::move(cache));
  }

  nb::ndarray<nb::numpy, float, nb::ndim<2>> run(Ints token_ids, Ints positions, Ints row_offsets,
                                                 Table tables, Ints context_lens, Ints variants,
                                                 Ints logit_rows, int64_t output, int64_t width) {
    const Batch batch{(int64_t)token_ids.size(),  (int64_t)context_lens.size(),
                      (int64_t)logit_rows.size(), (int64_t)tables.shape(1),
                      token_ids.data(),           positions.data(),
                      row_offsets.data(),         tables.data(),
                      context_lens.data(),        variants.data(),
                      logit_rows.data()};
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
  std::shared_ptr<Memory> room_;
  std::vector<std::shared_ptr<KVCache>> caches_;  // what ops refer to lives as long as they do
  std::vector<std::unique_ptr<Vector>> sinks_;
  std::vector<RopeTable*> ropes_;
  Multiply* multiply_ = nullptr;
};

}  // namespace

}  // namespace quire

NB_MODULE(_core, m) {
  using namespace quire;
  m.doc() =
      "The native core: packed weights, the executor of programs, sampling, and what the machine can do.";
  m.attr("PACKING_VERSION") = kPackingVersion;
  m.def(
      "isas",
      [] {
        std::vector<std::string> names;
        for (const Kernels* kernels : available_kernels()) names.push_back(kernels->isa);
        return names;
      },
      "Instruction sets whose kernels this machine can run, best first.");
  m.def("usable_cores", &usable_cores, "Physical cores this process may use.");
  m.def(
      "peak_operations",
      [](int threads, const std::string& isa, const std::string& kind, double seconds) {
        nb::gil_scoped_release unlocked;
        ThreadPool pool(threads);
        return peak_operations(pool, isa, kind, seconds);
      },
      "threads"_a, "isa"_a, "kind"_a, "seconds"_a);
  m.def(
      "read_bandwidth",
      [](int threads, const std::string& isa, size_t bytes, double seconds) {
        nb::gil_scoped_release unlocked;
        ThreadPool pool(threads);
        return read_bandwidth(pool, isa, bytes, seconds);
      },
      "threads"_a, "isa"_a, "bytes"_a, "seconds"_a);
  bind_weights(m);
  bind_sampling(m);
  nb::class_<KVCache>(m, "KVCache", "Keys and values of layers of one shape.")
      .def(nb::init<const std::string&, int64_t, int64_t, int64_t, int64_t, int64_t>(), "format"_a,
           "layers"_a, "num_blocks"_a, "block_size"_a, "heads"_a, "dim"_a);
  nb::class_<Native>(m, "Native",
                     "A program recorded for this machine: add buffers and ops in order, then run.")
      .def(nb::init<const std::string&, int>(), "isa"_a, "threads"_a)
      .def("buffer", &Native::buffer, "rows"_a, "width"_a)
      .def("embed", &Native::embed, "out"_a, "table"_a, "by_position"_a)
      .def("sampled_rows", &Native::sampled_rows, "out"_a, "x"_a, "width"_a)
      .def("add", &Native::add, "rows"_a, "out"_a, "x"_a, "y"_a, "width"_a)
      .def("scale", &Native::scale, "rows"_a, "out"_a, "x"_a, "width"_a, "factor"_a)
      .def("soft_cap", &Native::soft_cap, "rows"_a, "out"_a, "x"_a, "width"_a, "cap"_a)
      .def("unary", &Native::unary, "rows"_a, "out"_a, "x"_a, "width"_a, "activation"_a)
      .def("gate", &Native::gate, "rows"_a, "out"_a, "gate"_a, "up"_a, "width"_a, "activation"_a)
      .def("slice", &Native::slice, "rows"_a, "out"_a, "width"_a, "x"_a, "x_width"_a, "first"_a)
      .def("norm", &Native::norm, "rows"_a, "out"_a, "x"_a, "width"_a, "weight"_a, "bias"_a.none(), "eps"_a,
           "offset"_a, "centered"_a)
      .def("rope_table", &Native::rope_table, "pairs"_a, "scale"_a)
      .def("frequencies", &Native::frequencies, "table"_a, "variant"_a, "values"_a)
      .def("rotary", &Native::rotary, "out"_a, "x"_a, "heads"_a, "dim"_a, "table"_a, "interleaved"_a)
      .def("pack", &Native::pack, "rows"_a, "x"_a, "width"_a, "like"_a)
      .def("products", &Native::products, "rows"_a)
      .def("linear", &Native::linear, "out"_a, "weight"_a, "bias"_a.none())
      .def("gated_linear", &Native::gated_linear, "out"_a, "gate"_a, "up"_a, "activation"_a)
      .def("experts", &Native::experts, "out"_a, "x"_a, "scores"_a, "matrices"_a, "biases"_a, "chosen"_a,
           "over_chosen"_a, "activation"_a, "limit"_a)
      .def("write_kv", &Native::write_kv, "k"_a, "v"_a, "cache"_a, "layer"_a)
      .def("attend", &Native::attend, "out"_a, "q"_a, "cache"_a, "layer"_a, "heads"_a, "scale"_a, "window"_a,
           "softcap"_a, "sinks"_a.none())
      .def("run", &Native::run, "token_ids"_a, "positions"_a, "row_offsets"_a, "block_tables"_a,
           "context_lens"_a, "variants"_a, "logit_rows"_a, "output"_a, "width"_a,
           nb::rv_policy::reference_internal);
}
