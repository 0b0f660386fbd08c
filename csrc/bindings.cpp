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
#include "core/placement.h"
#include "core/probe.h"
#include "native.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace quire {

namespace {

// Memory of `count` equal entries as an array [count, bytes] of Python, which keeps its owner alive.
nb::ndarray<nb::numpy, uint8_t, nb::ndim<2>> entries(const Memory& memory, size_t count, nb::handle owner) {
  return {memory.as<uint8_t>(), {count, count ? memory.bytes() / count : 0}, owner};
}

}  // namespace

}  // namespace quire

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
  bind_nodes(m);
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
  bind_adapters(m);
  bind_sampling(m);
  nb::class_<KVCache>(m, "KVCache", "Keys and values of the layers of one cache group.")
      .def(nb::init<int64_t, const std::string&, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                    int64_t, int64_t>(),
           "group"_a, "format"_a, "layers"_a, "num_blocks"_a, "block_size"_a, "heads"_a, "dim"_a,
           "value_dim"_a, "every"_a = 1, "apart"_a = 1)
      .def(
          "blocks",
          [](nb::handle self, size_t num_blocks) {
            nb::list found;
            for (const Memory* memory : nb::cast<const KVCache&>(self).arrays())
              found.append(entries(*memory, num_blocks, self));
            return found;
          },
          "num_blocks"_a, "Arrays [blocks, bytes] of this memory: together, the content of each block.")
      .def(
          "spread",
          [](const KVCache& self, const Nodes& nodes) {
            for (const Memory* memory : self.arrays()) spread(*memory, nodes);
          },
          "nodes"_a, "Have the pages of new memory on all nodes by turns.");
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
          "history"_a, "chunk"_a)
      .def(
          "snapshots",
          [](nb::handle self, size_t num_snapshots) {
            return entries(nb::cast<const StateCache&>(self).snapshots(), num_snapshots, self);
          },
          "num_snapshots"_a, "An array [snapshots, bytes] of this memory.")
      .def(
          "spread",
          [](const StateCache& self, const Nodes& nodes) {
            spread(self.states(), nodes);
            spread(self.snapshots(), nodes);
          },
          "nodes"_a, "Have the pages of new memory on all nodes by turns.");
  nb::class_<Routing>(m, "Routing", "How a token's experts are chosen.")
      .def(
          "__init__",
          [](Routing* self, int64_t chosen, const std::string& affinity, bool normalized,
             const std::optional<Floats>& bias, int64_t groups, int64_t kept_groups, bool by_two,
             double scaling, double floor, const std::optional<Floats>& factors, bool on_inputs,
             double margin, const std::optional<Floats>& listed) {
            const Vector ids = vector(listed);
            new (self) Routing{chosen,
                               affinity_of(affinity),
                               normalized,
                               vector(bias),
                               groups,
                               kept_groups,
                               by_two,
                               scaling,
                               floor,
                               vector(factors),
                               on_inputs,
                               margin,
                               {ids.begin(), ids.end()}};
          },
          "chosen"_a, "affinity"_a, "normalized"_a, "bias"_a.none(), "groups"_a, "kept_groups"_a, "by_two"_a,
          "scaling"_a, "floor"_a, "factors"_a.none(), "on_inputs"_a, "margin"_a, "listed"_a.none());
  nb::class_<Native>(m, "Native",
                     "A program recorded for this machine: add buffers and ops in order, then run.")
      .def(nb::init<const std::string&, int>(), "isa"_a, "threads"_a)
      .def(nb::init<const std::string&, const Nodes&>(), "isa"_a, "nodes"_a)
      .def(nb::init<const std::string&, const Native&>(), "isa"_a, "beside"_a,
           "A program that runs with the threads of another one.")
      .def("buffer", &Native::buffer, "rows"_a, "width"_a)
      .def("embed", &Native::embed, "out"_a, "table"_a, "by_position"_a, "replaced"_a, "same"_a)
      .def("embed_stored", &Native::embed_stored, "out"_a, "table"_a, "format"_a, "by_position"_a,
           "replaced"_a, "same"_a, nb::keep_alive<1, 3>(),
           "The table, of bits if not of float32, is read where it is.")
      .def("sampled_rows", &Native::sampled_rows, "out"_a, "x"_a, "width"_a)
      .def("embed_segments", &Native::embed_segments, "out"_a, "table"_a, "separator"_a)
      .def("pool_rows", &Native::pool_rows, "out"_a, "x"_a, "width"_a, "mean"_a)
      .def("previous_hidden", &Native::previous_hidden, "out"_a, "width"_a)
      .def("join", &Native::join, "rows"_a, "out"_a, "x"_a, "x_width"_a, "y"_a, "y_width"_a)
      .def("add", &Native::add, "rows"_a, "out"_a, "x"_a, "y"_a, "width"_a)
      .def("scale", &Native::scale, "rows"_a, "out"_a, "x"_a, "width"_a, "factor"_a)
      .def("scale_by_position", &Native::scale_by_position, "out"_a, "x"_a, "width"_a, "beta"_a, "period"_a,
           "first"_a)
      .def("scale_by_weight", &Native::scale_by_weight, "rows"_a, "out"_a, "x"_a, "width"_a, "weight"_a)
      .def("soft_cap", &Native::soft_cap, "rows"_a, "out"_a, "x"_a, "width"_a, "cap"_a)
      .def("clip", &Native::clip, "rows"_a, "out"_a, "x"_a, "width"_a, "low"_a, "high"_a)
      .def("standardize", &Native::standardize, "rows"_a, "out"_a, "x"_a, "bias"_a, "factors"_a)
      .def("xielu", &Native::xielu, "rows"_a, "out"_a, "x"_a, "width"_a, "positive"_a, "negative"_a, "beta"_a)
      .def("unary", &Native::unary, "rows"_a, "out"_a, "x"_a, "width"_a, "activation"_a)
      .def("gate", &Native::gate, "rows"_a, "out"_a, "gate"_a, "up"_a, "width"_a, "activation"_a,
           "limit"_a = 0.0f)
      .def("gate_rows", &Native::gate_rows, "rows"_a, "out"_a, "gate"_a, "up"_a, "width"_a, "activation"_a)
      .def("match_magnitude", &Native::match_magnitude, "rows"_a, "out"_a, "x"_a, "like"_a, "width"_a,
           "floor"_a)
      .def("above_cutoff", &Native::above_cutoff, "rows"_a, "out"_a, "x"_a, "width"_a, "deviations"_a)
      .def("slice", &Native::slice, "rows"_a, "out"_a, "width"_a, "x"_a, "x_width"_a, "first"_a)
      .def("norm", &Native::norm, "rows"_a, "out"_a, "x"_a, "width"_a, "weight"_a, "bias"_a.none(), "eps"_a,
           "offset"_a, "centered"_a)
      .def("gated_norm", &Native::gated_norm, "rows"_a, "out"_a, "x"_a, "gate"_a, "width"_a, "weight"_a,
           "eps"_a, "activation"_a, "gate_first"_a, "groups"_a)
      .def("rope_table", &Native::rope_table, "pairs"_a, "scale"_a, "axes"_a, "behind"_a = 0)
      .def("place_table", &Native::place_table, "places"_a, "axes"_a, "pairs"_a, "frequencies"_a)
      .def("mixed_rows", &Native::mixed_rows, "out"_a, "places"_a, "table"_a, "number"_a)
      .def("join_rows", &Native::join_rows, "out"_a, "x"_a, "width"_a)
      .def("mean_of_rows", &Native::mean_of_rows, "out"_a, "x"_a, "number"_a, "width"_a)
      .def("place_images", &Native::place_images, "out"_a, "x"_a, "width"_a, "column"_a, "added"_a)
      .def("frequencies", &Native::frequencies, "table"_a, "variant"_a, "values"_a)
      .def("rotary", &Native::rotary, "rows"_a, "out"_a, "x"_a, "heads"_a, "dim"_a, "table"_a,
           "interleaved"_a, "first"_a = 0, "inverse"_a = false)
      .def("pack", &Native::pack, "rows"_a, "x"_a, "width"_a, "like"_a)
      .def("products", &Native::products, "rows"_a)
      .def("linear", &Native::linear, "out"_a, "weight"_a, "bias"_a.none())
      .def("gated_linear", &Native::gated_linear, "out"_a, "gate"_a, "up"_a, "activation"_a)
      .def("add_adapters", &Native::add_adapters, "rows"_a, "x"_a, "width"_a, "targets"_a)
      .def("experts", &Native::experts, "out"_a, "x"_a, "scores"_a, "matrices"_a, "biases"_a, "routing"_a,
           "activation"_a, "limit"_a, "shifted"_a)
      .def("repeat_streams", &Native::repeat_streams, "rows"_a, "out"_a, "x"_a, "streams"_a, "hidden"_a)
      .def("stream_weights", &Native::stream_weights, "rows"_a, "out"_a, "x"_a, "mixed"_a, "streams"_a,
           "hidden"_a, "base"_a, "scale"_a, "eps"_a, "floor"_a, "rounds"_a)
      .def("collapse_streams", &Native::collapse_streams, "rows"_a, "out"_a, "x"_a, "w"_a, "w_width"_a,
           "streams"_a, "hidden"_a)
      .def("mix_streams", &Native::mix_streams, "out"_a, "x"_a, "y"_a, "w"_a, "streams"_a, "hidden"_a)
      .def("write_kv", &Native::write_kv, "k"_a, "v"_a, "cache"_a, "layer"_a)
      .def("attend", &Native::attend, "rows"_a, "out"_a, "q"_a, "cache"_a, "layer"_a, "heads"_a, "scale"_a,
           "window"_a, "chunked"_a, "softcap"_a, "sinks"_a.none(), "causal"_a)
      .def("attend_latents", &Native::attend_latents, "out"_a, "q"_a, "q_rest"_a, "cache"_a, "layer"_a,
           "heads"_a, "scale"_a, "chosen"_a = -1, "number"_a = 0)
      .def("attend_vectors", &Native::attend_vectors, "out"_a, "q"_a, "cache"_a, "layer"_a, "heads"_a,
           "scale"_a, "window"_a, "sinks"_a.none(), "entries"_a.none(), "entry_layer"_a, "chosen"_a = -1,
           "number"_a = 0)
      .def("compress", &Native::compress, "out"_a, "values"_a, "gates"_a, "cache"_a, "layer"_a, "bias"_a,
           "every"_a, "dim"_a)
      .def("choose_positions", &Native::choose_positions, "out"_a, "q"_a, "factors"_a, "cache"_a, "layer"_a,
           "heads"_a, "number"_a)
      .def("attend_rows", &Native::attend_rows, "out"_a, "q"_a, "k"_a, "v"_a, "heads"_a, "groups"_a, "dim"_a,
           "value_dim"_a, "scale"_a, "reach"_a, "biases"_a.none(), "first_after"_a, "halves"_a, "windowed"_a)
      .def("linear_by_head", &Native::linear_by_head, "rows"_a, "out"_a, "x"_a, "weight"_a)
      .def("restore_states", &Native::restore_states, "cache"_a)
      .def("convolve", &Native::convolve, "out"_a, "x"_a, "cache"_a, "layer"_a, "weight"_a, "bias"_a.none(),
           "activation"_a)
      .def("recur", &Native::recur, "out"_a, "x"_a, "decay"_a, "cache"_a, "layer"_a)
      .def("delta_rule", &Native::delta_rule, "out"_a, "q"_a, "k"_a, "v"_a, "decay"_a, "beta"_a, "cache"_a,
           "layer"_a, "log_rate"_a, "bias"_a, "key_heads"_a, "key_dim"_a, "beta_factor"_a)
      .def("state_space", &Native::state_space, "out"_a, "x"_a, "step"_a, "cache"_a, "layer"_a, "log_rate"_a,
           "bias"_a, "skip"_a, "groups"_a, "state_dim"_a, "low"_a, "high"_a)
      .def("run", &Native::run, "token_ids"_a, "positions"_a, "row_offsets"_a, "block_tables"_a, "slots"_a,
           "variants"_a, "logit_rows"_a, "restored"_a, "saved"_a, "output"_a, "width"_a, "adapters"_a,
           "visible_ends"_a.none(), nb::rv_policy::reference_internal);
  bind_texts(m);
  bind_steps(m);
}
