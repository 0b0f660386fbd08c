// Bindings of Matrix, of packing a checkpoint's tensors into it, and of the checksum of cache files.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <memory>
#include <new>
#include <optional>
#include <sstream>
#include <tuple>

#include "bindings.h"
#include "core/checksum.h"
#include "core/coded_packing.h"
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

// In the order of ScaleForm.
constexpr const char* kForms[] = {"none",   "f16",    "bf16",     "f32",          "e8m0",
                                  "f16_i8", "f16_u6", "f32_e4m3", "e4m3_over_f32"};

// In the order of Meaning.
constexpr const char* kMeanings[] = {"unsigned", "offset", "rows", "e4m3", "e5m2", "iq4nl", "fp4", "floats"};

Format format_of(const std::string& name) {
  for (int i = 0; i < 5; ++i)
    if (name == kNames[i]) return (Format)i;
  throw nb::value_error(("unknown format " + name).c_str());
}

void require(bool condition, const char* message) {
  if (!condition) throw nb::value_error(message);
}

ScaleForm form_of(const std::string& name) {
  for (int i = 0; i < (int)std::size(kForms); ++i)
    if (name == kForms[i]) return (ScaleForm)i;
  throw nb::value_error(("unknown form " + name).c_str());
}

Meaning meaning_of(const std::string& name) {
  for (int i = 0; i < (int)std::size(kMeanings); ++i)
    if (name == kMeanings[i]) return (Meaning)i;
  throw nb::value_error(("unknown meaning " + name).c_str());
}

// A format by its name: one of kNames, or "coded", bits, group, one of kMeanings, the forms of scales and
// minimums, "zeros" or "none", and "ordered" or nothing, as quire.backends.native.coding writes it.
struct Named {
  Format format = Format::f32;
  Coding coding;

  explicit Named(const std::string& name) {
    std::istringstream words(name);
    std::string first, meaning, scales, minimums, zeros;
    words >> first;
    if (first != "coded") {
      format = format_of(name);
      return;
    }
    format = Format::coded;
    words >> coding.bits >> coding.group >> meaning >> scales >> minimums >> zeros;
    require(!words.fail(), "an incomplete format");
    std::string rest;
    coding.ordered = (bool)(words >> rest);
    require(words.eof() && (rest.empty() || rest == "ordered"), "unknown words in a format");
    coding.meaning = meaning_of(meaning);
    coding.scales = form_of(scales);
    coding.minimums = form_of(minimums);
    coding.zeros = zeros == "zeros";
    const int g = coding.group;
    require(coding.bits >= 2 && coding.bits <= 8 && coding.bits != 7, "no kernel for so many bits");
    require(g >= 4 && g <= kCodedBlock && (g & (g - 1)) == 0, "no kernel for such groups");
    const Meaning of = coding.meaning;
    const bool wide = of == Meaning::rows || coding.float8(), table = of >= Meaning::iq4nl;
    const bool floats = coding.float8() || of == Meaning::floats;
    require((!wide || coding.bits == 8) && (!table || coding.bits == 4), "these codes have other bits");
    require(of != Meaning::rows || g == kCodedBlock, "W8A8 has one scale for an output");
    require(!floats || plain(), "no kernel for such floats");
    require(of <= Meaning::offset || !coding.zeros, "zeros belong to integers");
    require(coding.scales != ScaleForm::none, "a coded matrix has scales");
    const bool two = coding.scales == ScaleForm::f16_u6, least = coding.minimums == ScaleForm::f16_u6;
    require(two == least && (!two || g == 32), "6-bit codes are of 32 inputs, for scales and minimums");
  }

  void check(int64_t count, int64_t outputs, int64_t inputs) const {
    require(count > 0 && outputs > 0 && inputs > 0, "a matrix has at least one output and one input");
    require(coding.meaning != Meaning::rows || inputs <= 1 << 17, "sums of so many inputs exceed 32 bits");
  }

  bool plain() const { return coding.minimums == ScaleForm::none && !coding.zeros; }
};

std::string name_of(const Matrix& matrix) {
  if (matrix.format() != Format::coded) return kNames[(int)matrix.format()];
  const Coding& c = matrix.coding();
  std::ostringstream name;
  name << "coded " << c.bits << ' ' << c.group << ' ' << kMeanings[(int)c.meaning] << ' ';
  name << kForms[(int)c.scales] << ' ' << kForms[(int)c.minimums] << (c.zeros ? " zeros" : " none");
  name << (c.ordered ? " ordered" : "");
  return name.str();
}

// A name for the form of packed activations that products with a matrix take, on every instruction set.
std::string activations_of(const std::string& format) {
  const Named named(format);
  if (named.format != Format::coded) return format;
  switch (named.coding.meaning) {
    case Meaning::rows:
      return "rows";
    case Meaning::e4m3:
    case Meaning::e5m2:
      return "float8";
    case Meaning::floats:
      return "f32";
    default:
      return named.coding.span() == kSpan ? "spans_128" : "spans_32";
  }
}

Matrix allocated(const std::string& format, int64_t count, int64_t outputs, int64_t inputs) {
  const Named named(format);
  named.check(count, outputs, inputs);
  return Matrix(named.format, named.coding, count, outputs, inputs);
}

Matrix mapped(const std::string& format, int64_t count, int64_t outputs, int64_t inputs, Bytes buffer) {
  const Named named(format);
  named.check(count, outputs, inputs);
  uint8_t* data = const_cast<uint8_t*>(buffer.data());
  Matrix matrix(named.format, named.coding, count, outputs, inputs, data);
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
  require(to.format != Format::coded, "floats cannot become coded panels");
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

using Rows = nb::ndarray<const uint8_t, nb::ndim<2>, nb::device::cpu>;
using Optional = std::optional<nb::ndarray<nb::ro, nb::ndim<2>, nb::c_contig, nb::device::cpu>>;

using Order = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Table = nb::ndarray<const float, nb::shape<16>, nb::c_contig, nb::device::cpu>;

GroupNumbers numbers_of(const Optional& values, const Optional& codes, ScaleForm form, const Panels& to,
                        int64_t groups) {
  if (form == ScaleForm::none) {
    require(!values && !codes, "the matrix has no such numbers");
    return {};
  }
  const bool e4m3 = form == ScaleForm::f32_e4m3 || form == ScaleForm::e4m3_over_f32;
  const bool two = e4m3 || form == ScaleForm::f16_i8 || form == ScaleForm::f16_u6;
  const int64_t size = e4m3 || form == ScaleForm::f32 ? 4 : form == ScaleForm::e8m0 ? 1 : 2;
  require(values && (int64_t)values->shape(0) == to.outputs && (int64_t)values->itemsize() == size,
          "the values do not fit the matrix");
  require(two == codes.has_value(), "codes belong to forms of two levels");
  const int64_t count = (int64_t)values->shape(1), blocks = ceil_div(to.inputs, kCodedBlock);
  require(two ? count == 1 || count == blocks : count == groups, "there is a value for each group or block");
  if (two)
    require((int64_t)codes->shape(0) == to.outputs && (int64_t)codes->shape(1) == groups &&
                codes->itemsize() == 1,
            "there is a code for each group");
  return {(const uint8_t*)values->data(), two ? (const uint8_t*)codes->data() : nullptr, size, count};
}

void pack_codes(Matrix& matrix, int64_t index, const Rows& packed, int64_t group, bool is_signed,
                const Optional& scales, const Optional& scale_codes, const Optional& minimums,
                const Optional& minimum_codes, const Optional& zeros, const std::optional<Order>& order,
                const std::optional<Table>& table, int64_t first, int64_t last) {
  require(matrix.format() == Format::coded && 0 <= index && index < matrix.count(), "no such coded matrix");
  const Panels to = matrix.panels(index);
  const Coding& c = to.coding;
  require(group >= 1 && (group == c.group ||
                         (c.group == kCodedBlock && (group % kCodedBlock == 0 || group >= to.inputs))),
          "the groups do not fit the matrix");
  CodedSource source{};
  source.outputs = to.outputs;
  source.inputs = to.inputs;
  source.group = group;
  source.groups = ceil_div(to.inputs, group);
  source.packed = packed.data();
  source.row_bytes = (int64_t)packed.shape(1);
  source.stride = packed.stride(0);
  source.is_signed = is_signed;
  require((int64_t)packed.shape(0) == to.outputs && source.row_bytes == ceil_div(to.inputs * c.bits, 8) &&
              (packed.stride(1) == 1 || packed.shape(1) == 1),
          "the codes have another shape");
  source.scales = numbers_of(scales, scale_codes, c.scales, to, source.groups);
  source.minimums = numbers_of(minimums, minimum_codes, c.minimums, to, source.groups);
  require(zeros.has_value() == c.zeros, "zeros belong to matrices with zeros");
  if (zeros) {
    require((int64_t)zeros->shape(0) == to.outputs && (int64_t)zeros->shape(1) == source.groups &&
                zeros->itemsize() == 1,
            "there is a zero for each group");
    source.zeros = (const uint8_t*)zeros->data();
  }
  require(order.has_value() == c.ordered, "an order belongs to matrices that have one");
  if (order) {
    require((int64_t)order->size() == to.inputs, "the order has another length");
    const auto outside = [&](int32_t input) { return input < 0 || input >= to.inputs; };
    require(std::none_of(order->data(), order->data() + to.inputs, outside), "an input is out of range");
    if (first == 0) std::memcpy((int32_t*)to.order, order->data(), (size_t)to.inputs * sizeof(int32_t));
  }
  require(table.has_value() == (to.table != nullptr), "a table belongs to matrices of floats");
  if (table && first == 0) std::memcpy((float*)to.table, table->data(), (size_t)kTableBytes);
  require(0 <= first && first <= last && last <= to.panels(), "no such panels");
  nb::gil_scoped_release unlocked;
  pack_coded(source, to, first, last);
}

Matrix joined(std::vector<std::shared_ptr<const Matrix>> parts) {
  require(!parts.empty(), "at least one matrix is needed");
  for (const auto& part : parts)
    require(part->count() == 1 && !part->joined() && part->outputs() == parts[0]->outputs() &&
                part->inputs() == parts[0]->inputs(),
            "single matrices of one shape are joined");
  return Matrix(std::move(parts));
}

std::optional<nb::ndarray<nb::numpy, const int32_t, nb::ndim<1>>> order_of(const Matrix& matrix) {
  const int32_t* order = matrix.panels().order;
  if (order == nullptr) return {};
  return nb::ndarray<nb::numpy, const int32_t, nb::ndim<1>>(order, {(size_t)matrix.inputs()},
                                                            nb::find(matrix));
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
      .def_static("joined", &joined, "parts"_a, "Join single matrices of one shape and of any formats.")
      .def_prop_ro("format", &name_of)
      .def_prop_ro("order", &order_of, nb::rv_policy::reference,
                   "The activation that each input is, int32 [inputs]; None if they are in order.")
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
  m.def("pack_codes", &pack_codes, "matrix"_a, "index"_a, "packed"_a, "group"_a, "is_signed"_a, "scales"_a,
        "scale_codes"_a.none(), "minimums"_a.none(), "minimum_codes"_a.none(), "zeros"_a.none(),
        "order"_a.none(), "table"_a.none(), "first"_a, "last"_a,
        "Fill panels [first, last) of one coded matrix from the parts of a quire.quantize.coded.Coded.");
  m.def("activations", &activations_of, "format"_a,
        "Matrices of formats with equal names take the same packed activations.");
  m.def("checksum", &sum, "data"_a);
  m.def(
      "packed_bytes",
      [](const std::string& format, int64_t count, int64_t outputs, int64_t inputs) {
        const Named named(format);
        return Matrix(named.format, named.coding, count, outputs, inputs, nullptr).nbytes();
      },
      "format"_a, "count"_a, "outputs"_a, "inputs"_a);
  m.def(
      "row_bytes", [](int64_t inputs) { return PackedActivations::row_bytes(ActivationFormat::f32, inputs); },
      "inputs"_a, "Maximum bytes of one row of packed activations.");
}
