// Sampling of one row of logits.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "bindings.h"
#include "core/isa.h"
#include "core/memory.h"
#include "kernels/sampling.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace quire {

namespace {

using Logits = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

class Sampling {
 public:
  explicit Sampling(const std::string& isa) : kernels_(kernels_of(isa)) {}

  std::pair<int64_t, float> greatest(Logits row) {
    check(row);
    nb::gil_scoped_release unlocked;
    const Greatest found = kernels_.greatest(row.data(), (int64_t)row.size());
    return {found.id, found.logit};
  }
  int64_t draw(Logits row, double maximum, double temperature, int64_t top_k, double top_p, double min_p,
               double u) {
    check(row);
    nb::gil_scoped_release unlocked;
    return kernels_.draw(row.data(), (int64_t)row.size(), {maximum, temperature, top_p, min_p, top_k, u},
                         scratch(row));
  }
  double exp_sum(Logits row, double maximum) {
    check(row);
    nb::gil_scoped_release unlocked;
    return kernels_.exp_sum(row.data(), (int64_t)row.size(), maximum);
  }
  int64_t rank(Logits row, int64_t id) {
    if (id < 0 || id >= (int64_t)row.size()) throw nb::index_error("no such token");
    return kernels_.rank(row.data(), (int64_t)row.size(), id);
  }
  std::vector<int64_t> top_ids(Logits row, int64_t k) {
    check(row);
    if (k < 1 || k > kMostTop) throw nb::value_error("top_ids gives from 1 to 64 tokens");
    std::vector<int64_t> ids((size_t)std::min(k, (int64_t)row.size()));
    kernels_.top_ids(row.data(), (int64_t)row.size(), k, ids.data(), scratch(row));
    return ids;
  }

 private:
  static void check(const Logits& row) {
    if (row.size() == 0) throw nb::value_error("an empty row of logits");
  }
  void* scratch(const Logits& row) {
    scratch_.reserve((size_t)sampling_scratch_bytes((int64_t)row.size()));
    return scratch_.as<uint8_t>();
  }

  const Kernels& kernels_;
  Memory scratch_;
};

}  // namespace

}  // namespace quire

void bind_sampling(nb::module_& m) {
  using namespace quire;
  nb::class_<Sampling>(m, "Sampling",
                       "What sampling does to one row of logits [V]; for one thread at a time.")
      .def(nb::init<const std::string&>(), "isa"_a)
      .def("greatest", &Sampling::greatest, "logits"_a.noconvert())
      .def("draw", &Sampling::draw, "logits"_a.noconvert(), "maximum"_a, "temperature"_a, "top_k"_a,
           "top_p"_a, "min_p"_a, "u"_a)
      .def("exp_sum", &Sampling::exp_sum, "logits"_a.noconvert(), "maximum"_a)
      .def("rank", &Sampling::rank, "logits"_a.noconvert(), "token_id"_a)
      .def("top_ids", &Sampling::top_ids, "logits"_a.noconvert(), "k"_a);
}
