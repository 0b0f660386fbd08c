// The module quire.backends.native._core: Python records ops in an executor once, then runs it.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings.h"
#include "core/isa.h"
#include "core/probe.h"
#include "native.h"

namespace nb = nanobind;
using namespace nb::literals;

NB_MODULE(_core, m) {
  using namespace quire;
  m.doc() = "The native core: packed weights, the executor of programs, sampling, and measured peak rates.";
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
  nb::class_<KVCache>(m, "KVCache", "Keys and values of the layers of one cache group.")
      .def(nb::init<int64_t, const std::string&, int64_t, int64_t, int64_t, int64_t, int64_t>(), "group"_a,
           "format"_a, "layers"_a, "num_blocks"_a, "block_size"_a, "heads"_a, "dim"_a);
  nb::class_<StateCache>(m, "StateCache", "States of the layers of one cache group, by slot and snapshot.")
      .def(
          "__init__",
          [](StateCache* self, int64_t group, const std::string& format, int64_t layers, int64_t slots,
             int64_t snapshots, int64_t width, int64_t inputs, int64_t reach, int64_t history,
             int64_t chunk) {
            const StateShape shape{kv_format(format), width, inputs, reach, history, chunk};
            new (self) StateCache(group, shape, layers, slots, snapshots);
          },
          "group"_a, "format"_a, "layers"_a, "slots"_a, "snapshots"_a, "width"_a, "inputs"_a, "reach"_a,
          "history"_a, "chunk"_a);
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
      .def("restore_states", &Native::restore_states, "cache"_a)
      .def("convolve", &Native::convolve, "out"_a, "x"_a, "cache"_a, "layer"_a, "weight"_a)
      .def("recur", &Native::recur, "out"_a, "x"_a, "decay"_a, "cache"_a, "layer"_a)
      .def("run", &Native::run, "token_ids"_a, "positions"_a, "row_offsets"_a, "block_tables"_a, "slots"_a,
           "variants"_a, "logit_rows"_a, "restored"_a, "saved"_a, "output"_a, "width"_a,
           nb::rv_policy::reference_internal);
  bind_steps(m);
}
