// The scales and minimums of coded panels as float32 (coding.h).
#pragma once

#include "kernels.h"
#include "vec.h"

namespace quire::QUIRE_ISA {

// The scales of a block's groups, and the minimums, negated like the sums of activations.
template <int Least>  // inputs of a group
struct alignas(64) ScalesOf {
  float scales[kCodedBlock / Least][kPanel], minimums[kCodedBlock / Least][kPanel];
};
using BlockScales = ScalesOf<16>;
using PartScales = ScalesOf<4>;

QUIRE_INLINE F from_e8m0(const uint8_t* from) {
  const I byte = load_s8((const int8_t*)from) & 255;
  const I tiny = byte == 0, nan = byte == 255;
  return (F)((byte << 23) | (tiny & 0x00400000) | (nan & 0x7fc00000));
}

// A code without its sign is the upper bits of a float32 whose exponent is too small by 120.
QUIRE_INLINE F from_e4m3(const uint8_t* from) {
  const I code = load_s8((const int8_t*)from);
  return (F)(((code & 0x7f) << 20) | (code & (int32_t)0x80000000)) * 0x1p120f;
}

// Returns the numbers of group `g`; `at` is where those of the block begin.
QUIRE_INLINE F number_of(ScaleForm form, const uint8_t* at, int64_t g) {
  switch (form) {
    case ScaleForm::f16:
      return load_f16((const uint16_t*)at + g * kPanel);
    case ScaleForm::bf16:
      return load_bf16((const uint16_t*)at + g * kPanel);
    case ScaleForm::f32:
      return load((const float*)at + g * kPanel);
    case ScaleForm::e8m0:
      return from_e8m0(at + g * kPanel);
    case ScaleForm::f16_i8:
      return load_f16((const uint16_t*)at) * to_float(load_s8((const int8_t*)at + 32 + g * kPanel));
    case ScaleForm::f32_e4m3:
      return load((const float*)at) * from_e4m3(at + 64 + g * kPanel);
    case ScaleForm::e4m3_over_f32:
      return from_e4m3(at + 64 + g * kPanel) / load((const float*)at);
    default:
      return F{};
  }
}

QUIRE_INLINE F from_bytes(const uint8_t* from) { return to_float(load_s8((const int8_t*)from) & 255); }

template <int Least>
__attribute__((noinline)) void unpack_six_bits(const uint8_t* header, ScalesOf<Least>& to) {
  const F d = load_f16((const uint16_t*)header), least = -load_f16((const uint16_t*)header + kPanel);
  const U scales = load_as<U>(header + 64), minimums = load_as<U>(header + 128),
          high = load_as<U>(header + 192);
#pragma GCC unroll 8
  for (int g = 0; g < 8; ++g) {
    const U s = ((scales >> (4 * g)) & 15) | (((high >> (2 * g)) & 3) << 4);
    const U m = ((minimums >> (4 * g)) & 15) | (((high >> (16 + 2 * g)) & 3) << 4);
    store(to.scales[g], d * to_float((I)s));
    store(to.minimums[g], least * to_float((I)m));
  }
}

// Unpacks numbers of one form; called with a constant, it does not choose again for each group.
template <bool Negated>
QUIRE_INLINE void unpack_form(ScaleForm form, int64_t groups, const uint8_t* from, float (*to)[kPanel]) {
  const bool codes = form == ScaleForm::f16_i8;
  const F common = codes ? load_f16((const uint16_t*)from) : F{};  // or it is read again after each store
  for (int64_t g = 0; g < groups; ++g) {
    const F number =
        codes ? common * to_float(load_s8((const int8_t*)from + 32 + g * kPanel)) : number_of(form, from, g);
    store(to[g], Negated ? -number : number);
  }
}

template <bool Negated>
QUIRE_INLINE void unpack_numbers(ScaleForm form, int64_t groups, const uint8_t* from, float (*to)[kPanel]) {
  if (form == ScaleForm::f16) return unpack_form<Negated>(ScaleForm::f16, groups, from, to);
  if (form == ScaleForm::bf16) return unpack_form<Negated>(ScaleForm::bf16, groups, from, to);
  if (form == ScaleForm::e8m0) return unpack_form<Negated>(ScaleForm::e8m0, groups, from, to);
  if (form == ScaleForm::f16_i8) return unpack_form<Negated>(ScaleForm::f16_i8, groups, from, to);
  unpack_form<Negated>(form, groups, from, to);
}

template <int Least>
__attribute__((noinline)) void unpack_scales(const Coding& coding, const uint8_t* header,
                                             ScalesOf<Least>& to) {
  if (coding.scales == ScaleForm::f16_u6) return unpack_six_bits(header, to);
  const int64_t groups = coding.groups();
  unpack_numbers<false>(coding.scales, groups, header, to.scales);
  if (coding.meaning == Meaning::fp4)  // of twice the numbers (tables.h)
    for (int64_t g = 0; g < groups; ++g) store(to.scales[g], load(to.scales[g]) * 0.5f);
  if (coding.minimums != ScaleForm::none)
    unpack_numbers<true>(coding.minimums, groups, header + coding.minimums_at(), to.minimums);
  if (!coding.zeros) return;
  const uint8_t* const zeros = header + coding.zeros_at();
  for (int64_t g = 0; g < groups; ++g)
    store(to.minimums[g], load(to.scales[g]) * from_bytes(zeros + g * kPanel));
}

}  // namespace quire::QUIRE_ISA
