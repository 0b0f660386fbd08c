// Bindings of the sampler.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <string>
#include <vector>

#include "bind_sampling.h"
#include "bindings.h"
#include "core/memory.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace quire {

const int64_t* RowArguments::tokens(const nb::handle& ids, int64_t vocab_size, int64_t& count) {
  count = (int64_t)nb::len(ids);
  if (count == 0) return nullptr;
  const std::vector<int64_t>& kept = tokens_.emplace_back(nb::cast<std::vector<int64_t>>(ids));
  for (const int64_t id : kept)
    if (id < 0 || id >= vocab_size) throw nb::value_error("a token outside the vocabulary");
  return kept.data();
}

void check_mask(size_t words, int64_t vocab_size) {
  if ((int64_t)words != ceil_div(vocab_size, 32))
    throw nb::value_error("a mask must have one bit per token, in 32-bit words");
}

const uint32_t* const* RowArguments::masks(const nb::handle& masks, int64_t vocab_size, int64_t count) {
  if (masks.is_none()) return nullptr;
  if ((int64_t)nb::len(masks) != count) throw nb::value_error("expected one mask per sampled position");
  std::vector<const uint32_t*>& kept = masks_.emplace_back();
  for (const nb::handle mask : masks) {
    if (mask.is_none()) {
      kept.push_back(nullptr);
      continue;
    }
    held_.push_back(nb::cast<Mask>(mask, false));
    check_mask(held_.back().size(), vocab_size);
    kept.push_back(held_.back().data());
  }
  return kept.data();
}

RowArguments::RowArguments(const nb::list& rows, const Sampler& sampler, int64_t num_logits) {
  const int64_t vocab_size = sampler.vocab_size();
  const auto check = [&](int64_t first, int64_t count) {
    if (first < 0 || first + count > num_logits) throw nb::value_error("a row of logits is out of range");
  };
  std::vector<bool> taken;
  for (const nb::handle given : rows) {
    const nb::tuple fields = nb::cast<nb::tuple>(given);
    if (fields.size() != 6) throw nb::value_error("a row to sample has six fields");
    SampledRow row{};
    row.slot = nb::cast<int64_t>(fields[0]);
    if (!sampler.holds(row.slot)) throw nb::value_error("a row uses an empty slot");
    if ((size_t)row.slot >= taken.size()) taken.resize((size_t)row.slot + 1);
    if (taken[(size_t)row.slot]) throw nb::value_error("two rows use one slot");
    taken[(size_t)row.slot] = true;
    row.following = tokens(fields[2], vocab_size, row.num_scored);
    row.first_scored = nb::cast<int64_t>(fields[1]);
    check(row.first_scored, row.num_scored);
    row.first_sampled = nb::cast<int64_t>(fields[3]);
    if (row.first_sampled >= 0) {
      row.drafted = tokens(fields[4], vocab_size, row.num_sampled);
      check(row.first_sampled, ++row.num_sampled);
      row.masks = masks(fields[5], vocab_size, row.num_sampled);
    }
    rows_.push_back(row);
  }
}

SampledResults& PooledSampler::sample(const Logits& logits, const nb::list& rows) {
  if ((int64_t)logits.shape(1) != sampler.vocab_size())
    throw nb::value_error("the logits have another vocabulary size");
  const RowArguments given(rows, sampler, (int64_t)logits.shape(0));
  nb::gil_scoped_release unlocked;
  sampler.sample(pool_, logits.data(), given.rows(), results_);
  return results_;
}

}  // namespace quire

void bind_sampling(nb::module_& m) {
  using namespace quire;
  nb::class_<SlotParams>(m, "SlotParams", "The sampling parameters of a sequence.")
      .def(nb::init<double, double, double, int64_t, int64_t, int64_t, double, double, double,
                    std::vector<int64_t>, std::vector<float>, std::optional<std::vector<int64_t>>,
                    std::vector<std::vector<int64_t>>, std::vector<int64_t>, int64_t, int64_t,
                    std::optional<int64_t>, std::optional<int64_t>>(),
           "temperature"_a, "top_p"_a, "min_p"_a, "top_k"_a, "seed"_a, "sequence"_a, "repetition_penalty"_a,
           "frequency_penalty"_a, "presence_penalty"_a, "bias_ids"_a, "biases"_a, "allowed_ids"_a.none(),
           "bad_words"_a, "stop_ids"_a, "min_tokens"_a, "num_prompt_tokens"_a, "logprobs"_a.none(),
           "prompt_logprobs"_a.none());
  nb::class_<SampledResults>(m, "SampledResults", "Flat results of the rows of a step.")
      .def_ro("token_ids", &SampledResults::token_ids)
      .def_ro("counts", &SampledResults::counts)
      .def_ro("faults", &SampledResults::faults)
      .def_ro("scored", &SampledResults::scored)
      .def_ro("listed", &SampledResults::listed)
      .def_ro("entries", &SampledResults::entries)
      .def_ro("ranks", &SampledResults::ranks)
      .def_ro("listed_ids", &SampledResults::listed_ids)
      .def_ro("logprobs", &SampledResults::logprobs)
      .def_ro("plain", &SampledResults::plain);
  nb::class_<PooledSampler>(m, "Sampler", "Samples a token for every row of a step.")
      .def(nb::init<const std::string&, int64_t, int64_t, int>(), "isa"_a, "vocab_size"_a, "max_slots"_a,
           "threads"_a)
      .def(
          "admit",
          [](PooledSampler& self, int64_t slot, const SlotParams& params, const std::vector<int64_t>& ids) {
            self.sampler.admit(slot, params, ids.data(), (int64_t)ids.size());
          },
          "slot"_a, "params"_a, "token_ids"_a)
      .def_prop_ro("vocab_size", [](PooledSampler& self) { return self.sampler.vocab_size(); })
      .def(
          "release", [](PooledSampler& self, int64_t slot) { self.sampler.release(slot); }, "slot"_a)
      .def("sample", &PooledSampler::sample, "logits"_a.noconvert(), "rows"_a,
           nb::rv_policy::reference_internal);
}
