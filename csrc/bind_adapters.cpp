// Bindings of adapters: matrices that are packed by Python and used by the steps of slots.

#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "bindings.h"
#include "core/adapters.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace quire {

namespace {

// Site, format, rank, inputs, outputs and scale of the matrices for one product.
using Shape = std::tuple<int64_t, std::string, int64_t, int64_t, int64_t, float>;

Format float_format(const std::string& name) {
  if (name == "f32") return Format::f32;
  if (name == "f16") return Format::f16;
  if (name == "bf16") return Format::bf16;
  throw nb::value_error(("adapters are not stored as " + name).c_str());
}

std::shared_ptr<Adapter> allocated(int64_t sites, const std::vector<Shape>& shapes) {
  std::vector<AdapterShape> found;
  for (const auto& [site, format, rank, inputs, outputs, scale] : shapes) {
    if (site < 0 || site >= sites || rank <= 0 || inputs <= 0 || outputs <= 0)
      throw nb::value_error("an adapter for no such product");
    found.push_back({site, float_format(format), rank, inputs, outputs, scale});
  }
  return std::make_shared<Adapter>(sites, found);
}

}  // namespace

}  // namespace quire

void bind_adapters(nb::module_& m) {
  using namespace quire;
  nb::class_<Adapter>(m, "Adapter", "The matrices of an adapter, all in one memory.")
      .def(nb::new_(&allocated), "sites"_a, "shapes"_a)
      .def(
          "down", [](const Adapter& self, int64_t site) { return self.part(site).down; }, "site"_a,
          nb::keep_alive<0, 1>())
      .def(
          "up", [](const Adapter& self, int64_t site) { return self.part(site).up; }, "site"_a,
          nb::keep_alive<0, 1>())
      .def_prop_ro("nbytes", &Adapter::nbytes);
}
