// Bindings of steps, which are planned by Python and computed without its lock.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "bind_sampling.h"
#include "bindings.h"
#include "core/steps.h"
#include "native.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace quire {

namespace {

using Bits = nb::ndarray<const uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Numbers = std::vector<int64_t>;
using Patches = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

std::shared_ptr<Job> plan(const Numbers& slots, const Numbers& starts, const Numbers& counts,
                          const Numbers& logits, const std::vector<bool>& samples) {
  auto job = std::make_shared<Job>();
  for (size_t i = 0; i < slots.size(); ++i)
    job->rows.push_back({slots[i], starts.at(i), counts.at(i), logits.at(i), samples.at(i), {}});
  return job;
}

}  // namespace

}  // namespace quire

void bind_steps(nb::module_& m) {
  using namespace quire;
  nb::class_<Job>(m, "Step", "A step from its plan to its results.")
      .def(nb::new_(&plan), "slots"_a, "starts"_a, "counts"_a, "logits"_a, "samples"_a)
      .def(
          "draft", [](Job& job, size_t row, Numbers ids) { job.rows.at(row).drafted = std::move(ids); },
          "row"_a, "token_ids"_a)
      .def_rw("num_proposed", &Job::num_proposed)
      .def(
          "release", [](Job& job, Numbers slots) { job.deltas.released = std::move(slots); }, "slots"_a)
      .def(
          "admit",
          [](Job& job, int64_t slot, int64_t variant, Numbers token_ids, const SlotParams& params,
             std::shared_ptr<Adapter> adapter) {
            job.deltas.admitted.push_back({slot, variant, std::move(token_ids), params, std::move(adapter)});
          },
          "slot"_a, "variant"_a, "token_ids"_a, "params"_a, "adapter"_a.none())
      .def(
          "rotate",
          [](Job& job, int64_t slot, Ints known, int64_t shift) {
            job.deltas.rotated.push_back({slot, {{known.data(), known.data() + known.size()}, shift}});
          },
          "slot"_a, "known"_a, "shift"_a,
          "The tokens of an admitted slot rotate by `known` [n * 3] positions, later ones by their own and "
          "`shift`.")
      .def(
          "show",
          [](Job& job, int64_t slot, int64_t first, int64_t rows, int64_t line, int64_t gap, bool whole,
             double share, const std::optional<Patches>& patches, Numbers windows, Numbers places) {
            Image image{first, rows, line, gap, whole, std::move(windows), std::move(places)};
            if (patches) {
              image.patches.assign(patches->data(), patches->data() + patches->size());
              image.columns = (int64_t)patches->shape(1);
            }
            job.deltas.shown.push_back({slot, std::move(image), share});
          },
          "slot"_a, "first"_a, "rows"_a, "line"_a, "gap"_a, "whole"_a, "share"_a, "patches"_a.none(),
          "windows"_a, "places"_a,
          "An Image, before a row computes the first of its tokens; or, with slot -1, `share` of its "
          "encoding before any row does. Without patches it is the last one shown.")
      .def(
          "frequencies",
          [](Job& job, const Native& native, int64_t table, int64_t variant, Floats values) {
            job.deltas.frequencies.push_back({native.rope(table), variant, vector(values)});
          },
          "native"_a, "table"_a, "variant"_a, "values"_a,
          "Frequencies of a context variant (quire.program.rope).")
      .def(
          "grant",
          [](Job& job, int64_t slot, int64_t group, int64_t first, Numbers blocks) {
            job.deltas.granted.push_back({slot, group, first, std::move(blocks)});
          },
          "slot"_a, "group"_a, "first"_a, "block_ids"_a)
      .def(
          "restore", [](Job& job, const Snapshots& of) { job.deltas.restored = snapshots(of); },
          "snapshots"_a)
      .def(
          "save", [](Job& job, const Snapshots& of) { job.deltas.saved = snapshots(of); }, "snapshots"_a)
      .def_ro("results", &Job::results)
      .def_ro("proposed", &Job::proposed)
      .def_ro("began_s", &Job::began_s)
      .def_ro("ended_s", &Job::ended_s)
      .def_ro("mask_s", &Job::mask_s)
      .def_ro("sampling_s", &Job::sampling_s)
      .def_ro("core_wait_s", &Job::core_wait_s)
      .def_ro("draft_s", &Job::draft_s)
      .def_ro("image_s", &Job::image_s);
  nb::class_<Steps>(m, "Steps", "Computes the steps of a program in sequence.")
      .def(
          "__init__",
          [](Steps* self, Native& native, int64_t output, int64_t slots, int64_t groups, int64_t vocab_size) {
            new (self) Steps(native.executor(), output, slots, groups, vocab_size);
          },
          "native"_a, "output"_a, "slots"_a, "groups"_a, "vocab_size"_a, nb::keep_alive<1, 2>())
      .def(
          "draft_with",
          [](Steps& self, Native& native, int64_t output, int64_t width, int64_t groups, int64_t group,
             int64_t window, int64_t reach, int64_t blocks, int64_t block_size, int64_t spare,
             int64_t max_tokens, int64_t max_len, int64_t hidden, int64_t given, int64_t own) {
            self.draft_with(native.executor(), {output, width, groups, group, window, reach, blocks,
                                                block_size, spare, max_tokens, max_len, hidden, given, own});
          },
          "native"_a, nb::kw_only(), "output"_a, "width"_a, "groups"_a, "group"_a, "window"_a, "reach"_a,
          "blocks"_a, "block_size"_a, "spare"_a, "max_tokens"_a, "max_len"_a, "hidden"_a, "given"_a, "own"_a,
          nb::keep_alive<1, 2>())
      .def(
          "see_with",
          [](Steps& self, Native& native, int64_t output, int64_t width) {
            self.see_with(native.executor(), output, width);
          },
          "native"_a, "output"_a, "width"_a, nb::keep_alive<1, 2>())
      .def("forget_drafted", &Steps::forget_drafted, "blocks"_a)
      .def("forward", &Steps::forward, "step"_a, nb::call_guard<nb::gil_scoped_release>())
      .def(
          "sample",
          [](Steps& self, Job& job, const std::vector<std::pair<size_t, std::vector<Bits>>>& masks) {
            std::vector<RowMasks> rows;
            for (const auto& [row, own] : masks) {
              rows.push_back({row, {}});
              for (const Bits& bits : own) {
                check_mask(bits.size(), self.vocab_size());
                rows.back().masks.push_back(bits.data());
              }
            }
            nb::gil_scoped_release unlocked;
            self.sample(job, rows);
          },
          "step"_a, "masks"_a,
          "`masks` are those of rows with a grammar, by row index, for the first sampled positions; a row "
          "without masks gives no token.")
      .def("launch", &Steps::launch, "step"_a)
      .def("wait", &Steps::wait, "step"_a, nb::call_guard<nb::gil_scoped_release>());
}
