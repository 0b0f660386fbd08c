// Bindings of Matrix, of packing a checkpoint's tensors into it, and of the checksum of cache files.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <new>
#include <tuple>

#include "bindings.h"
#include "core/checksum.h"
#include "core/isa.h"
#include "core/matrix.h"
#include "kernels/packing.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace quire {

namespace {

using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Strided = nb::ndarray<nb::ro, nb::ndim<2>, nb::device::cpu>;

constexpr const char* kNames[] = {"f32", "f16", "bf16", "int8", "int4"};  // in the order of Format

Format format_of(const std::string& name) {
  for (int i = 0; i < 5; ++i)
    if (name == kNames[i]) return (Format)i;
  throw nb::value_error(("unknown format " + name).c_str());
}

void require(bool condition, const char* message) {
  if (!condition) throw nb::value_error(message);
}

Matrix allocated(const std::string& format, int64_t count, int64_t outputs, int64_t inputs) {
  require(count > 0 && outputs > 0 && inputs > 0, "a matrix has at least one output and one input");
  return Matrix(format_of(format), count, outputs, inputs);
}

Matrix mapped(const std::string& format, int64_t count, int64_t outputs, int64_t inputs, Bytes buffer) {
  require(count > 0 && outputs > 0 && inputs > 0, "a matrix has at least one output and one input");
  Matrix matrix(format_of(format), count, outputs, inputs, const_cast<uint8_t*>(buffer.data()));
  require((int64_t)buffer.size() == matrix.nbytes(), "the buffer has another size than the packed matrix");
  require((uintptr_t)buffer.data() % kAlignment == 0, "the buffer is not aligned to 64 bytes");
  return matrix;
}

Source source_of(const Strided& array, const std::string& dtype) {
  const Format format = format_of(dtype);
  const bool wide = format == Format::f32;
  require(wide || format == Format::f16 || format == Format::bf16, "a source is f32, f16 or bf16");
  require(array.dtype() == (wide ? nb::dtype<float>() : nb::dtype<uint16_t>()),
          "pass f32 as float32, other formats as uint16");
  const int64_t size = wide ? 4 : 2;
  return {format,
          (int64_t)array.shape(0),
          (int64_t)array.shape(1),
          (const uint8_t*)array.data(),
          array.stride(0) * size,
          array.stride(1) * size};
}

bool pack(Matrix& matrix, int64_t index, const Strided& array, const std::string& dtype,
          const std::vector<float>& tries, const std::string& isa, int64_t first, int64_t last) {
  const Source source = source_of(array, dtype);
  const Kernels& kernels = kernels_of(isa);
  require(0 <= index && index < matrix.count(), "the index is out of range");
  const Panels to = matrix.panels(index);
  require(source.outputs == to.outputs && source.inputs == to.inputs, "the source has another shape");
  require(to.quantized() || to.format == Format::f32 || to.format == source.format,
          "only f32 panels may change the format of floats");
  require(!to.quantized() || !tries.empty(), "at least one candidate is needed");
  require(0 <= first && first <= last && last <= to.panels(), "no such panels");
  nb::gil_scoped_release unlocked;
  thread_local Memory scratch;
  scratch.reserve((size_t)packing_scratch(to.inputs) * sizeof(float));
  return kernels.pack_panels(source, to, first, last, tries.data(), (int64_t)tries.size(),
                             scratch.as<float>());
}

uint64_t sum(Bytes data) {
  nb::gil_scoped_release unlocked;
  return checksum(data.data(), data.size());
}

}  // namespace

}  // namespace quire

void bind_weights(nb::module_& m) {
  using namespace quire;
  m.attr("PANEL") = kPanel;
  m.attr("GROUP") = kGroup;
  m.attr("SPAN") = kSpan;
  m.attr("ALIGNMENT") = kAlignment;
  nb::class_<Matrix>(m, "Matrix", "Packed matrices [count, outputs, inputs], in one buffer.")
      .def(
          "__init__",
          [](Matrix* self, const std::string& format, int64_t count, int64_t outputs, int64_t inputs) {
            new (self) Matrix(allocated(format, count, outputs, inputs));
          },
          "format"_a, "count"_a, "outputs"_a, "inputs"_a)
      .def_static("mapped", &mapped, "format"_a, "count"_a, "outputs"_a, "inputs"_a, "buffer"_a,
                  nb::keep_alive<0, 5>(), "Use a packed buffer, which is not copied and is kept alive.")
      .def_prop_ro("format", [](const Matrix& self) { return kNames[(int)self.format()]; })
      .def_prop_ro("shape",
                   [](const Matrix& self) { return std::tuple(self.count(), self.outputs(), self.inputs()); })
      .def_prop_ro("nbytes", &Matrix::nbytes)
      .def_prop_ro(
          "data",
          [](const Matrix& self) {
            return nb::ndarray<nb::numpy, const uint8_t, nb::ndim<1>>(self.data(), {(size_t)self.nbytes()},
                                                                      nb::find(self));
          },
          nb::rv_policy::reference, "All packed bytes, read-only.");
  m.def("pack", &pack, "matrix"_a, "index"_a, "source"_a, "dtype"_a, "tries"_a, "isa"_a, "first"_a, "last"_a,
        "Fill panels [first, last) of one matrix. Return False if a number is not finite and the format is "
        "quantized.");
  m.def("checksum", &sum, "data"_a);
  m.def(
      "packed_bytes",
      [](const std::string& format, int64_t count, int64_t outputs, int64_t inputs) {
        return Matrix(format_of(format), count, outputs, inputs, nullptr).nbytes();
      },
      "format"_a, "count"_a, "outputs"_a, "inputs"_a);
  m.def(
      "row_bytes", [](int64_t inputs) { return PackedActivations::row_bytes(ActivationFormat::f32, inputs); },
      "inputs"_a, "Maximum bytes of one row of packed activations.");
}
