// The kinds of codes whose products are compiled without branches.
#pragma once

#include "kernels.h"

namespace quire::QUIRE_ISA {

// What is summed as integers: half a unit, a unit, as many units as the coding says, or all of a span.
enum class Summed { half, unit, units, span };

template <Summed Of>
QUIRE_INLINE int64_t inputs_of(const Coding& coding) {
  if (Of == Summed::units) return coding.summed();
  return Of == Summed::half ? kCodedUnit / 2 : Of == Summed::unit ? kCodedUnit : kSpan;
}

// Returns make.operator()<Bits, Table, Of, Minimums>() for a coding, or null if it is of another kind. Codes
// with minimums are unsigned; others have an offset.
template <typename Make>
auto of_kind(const Coding& coding, Make make)
    -> decltype(make.template operator()<4, true, Summed::half, false>()) {
  if (coding.meaning == Meaning::rows || coding.float8() || coding.meaning == Meaning::floats) return nullptr;
  if (coding.group < 16) return nullptr;
  const bool minimums = coding.minimums != ScaleForm::none || coding.zeros;
  const int64_t summed = coding.summed();
  if (coding.looked_up()) {
    if (minimums || summed > kCodedUnit) return nullptr;
    return summed == 16 ? make.template operator()<4, true, Summed::half, false>()
                        : make.template operator()<4, true, Summed::unit, false>();
  }
  if (minimums != (coding.meaning == Meaning::unsigned_)) return nullptr;
  const auto either = [&]<int Bits, Summed Of>() {
    return minimums ? make.template operator()<Bits, false, Of, true>()
                    : make.template operator()<Bits, false, Of, false>();
  };
  switch (coding.bits * 1000 + summed) {
    case 2016:
      return either.template operator()<2, Summed::half>();
    case 2128:
      return either.template operator()<2, Summed::span>();
    case 3016:
      return either.template operator()<3, Summed::half>();
    case 4032:
      return either.template operator()<4, Summed::unit>();
    case 4128:
      return either.template operator()<4, Summed::span>();
    case 5032:
      return either.template operator()<5, Summed::unit>();
    case 6016:
      return either.template operator()<6, Summed::half>();
    case 8032:
      return either.template operator()<8, Summed::unit>();
  }
  if (summed < kCodedUnit) return nullptr;
  switch (coding.bits) {
    case 2:
      return either.template operator()<2, Summed::units>();
    case 3:
      return either.template operator()<3, Summed::units>();
    case 4:
      return either.template operator()<4, Summed::units>();
    case 5:
      return either.template operator()<5, Summed::units>();
    case 6:
      return either.template operator()<6, Summed::units>();
    default:
      return nullptr;
  }
}

}  // namespace quire::QUIRE_ISA
