// The layout of codes with scales of groups, as other formats have them (quire.quantize.coded).
//
// A panel has blocks of 256 inputs, each a header and then units of 32 inputs; the last block has the units
// that its inputs need. Memory is read once, in order, and a weight takes its bits and those of its scales.
//
// A unit of 8-bit codes is [4 inputs][16][4], of floats [4 inputs][4][2 pairs][4][2]. Fewer bits are split
// into planes, of 4, 2 and 1 bits from the lowest on: plane 4 [8 inputs][16][4] has inputs 0..3 in the low
// halves and 4..7 in the high ones; plane 2 [16 inputs][16][4] and plane 1 [32 inputs][16][4] have the bits
// of 4 inputs at bits 0, 2, 4, 6 or 0 ... 7.
//
// A header has scales, minimums and zeros, each [group][16] and padded to 64 bytes. f16_i8 is [16] f16, then
// codes; f32_e4m3 is [16] f32, then codes, and so is e4m3_over_f32, whose codes are divided. f16_u6, for 8
// groups and for scales and minimums together, is [2][16] f16 of both, then three words for each output: the
// low 4 bits of the codes of scales, those of minimums, and the high 2 bits of both.
#pragma once

#include <cstdint>

// Always inlined: the linker would merge functions of two instruction sets with the same name, possibly into
// instructions that this machine does not support.
#define QUIRE_INLINE inline __attribute__((always_inline))

namespace quire {

constexpr int kCodedBlock = 256;  // inputs
constexpr int kCodedUnit = 32;

enum class ScaleForm : int32_t { none, f16, bf16, f32, e8m0, f16_i8, f16_u6, f32_e4m3, e4m3_over_f32 };

// What a code means: itself, less 2^(bits - 1), an 8-bit float, a number of a table of integers (tables.h),
// or one of 16 floats that are stored with the matrix. `rows` is offset with one scale for an output,
// and with activations of one scale for a row.
enum class Meaning : int32_t { unsigned_, offset, rows, e4m3, e5m2, iq4nl, fp4, floats };

struct Coding {
  int32_t bits = 0;   // 2 to 8, but not 7
  int32_t group = 0;  // inputs that share a scale: a power of two, 4 to 256
  Meaning meaning = Meaning::unsigned_;
  ScaleForm scales = ScaleForm::none, minimums = ScaleForm::none;
  bool zeros = false;    // W = scale * (code - zero)
  bool ordered = false;  // inputs are in another order (Panels)

  QUIRE_INLINE constexpr int64_t groups() const { return kCodedBlock / group; }
  // True if a code stands for an integer of 8 bits in a table.
  QUIRE_INLINE constexpr bool looked_up() const {
    return meaning == Meaning::iq4nl || meaning == Meaning::fp4;
  }
  // True if a code is a float of 8 bits.
  QUIRE_INLINE constexpr bool float8() const { return meaning == Meaning::e4m3 || meaning == Meaning::e5m2; }
  QUIRE_INLINE constexpr int64_t unit_bytes() const { return 64 * bits; }
  // Bytes of the scales or minimums in a header.
  QUIRE_INLINE constexpr int64_t form_bytes(ScaleForm form) const {
    switch (form) {
      case ScaleForm::none:
        return 0;
      case ScaleForm::f16:
      case ScaleForm::bf16:
        return padded(groups() * 32);
      case ScaleForm::f32:
        return groups() * 64;
      case ScaleForm::e8m0:
        return padded(groups() * 16);
      case ScaleForm::f16_i8:
        return padded(32 + groups() * 16);
      case ScaleForm::f16_u6:
        return 256;
      case ScaleForm::f32_e4m3:
      case ScaleForm::e4m3_over_f32:
        return 64 + padded(groups() * 16);
    }
    return 0;
  }
  QUIRE_INLINE constexpr int64_t minimums_at() const { return form_bytes(scales); }
  QUIRE_INLINE constexpr int64_t zeros_at() const {
    return minimums_at() + (scales == ScaleForm::f16_u6 ? 0 : form_bytes(minimums));
  }
  QUIRE_INLINE constexpr int64_t header_bytes() const {
    return zeros_at() + (zeros ? padded(groups() * 16) : 0);
  }
  QUIRE_INLINE constexpr int64_t panel_bytes(int64_t inputs) const {
    return (inputs + kCodedBlock - 1) / kCodedBlock * header_bytes() +
           (inputs + kCodedUnit - 1) / kCodedUnit * unit_bytes();
  }
  // Inputs of an activation that share a scale (coded_product.span_of).
  QUIRE_INLINE constexpr int64_t span() const { return bits <= 6 ? 128 : 32; }
  // Inputs that are summed as integers: those in one span and one group.
  QUIRE_INLINE constexpr int64_t summed() const { return group < span() ? group : span(); }

 private:
  QUIRE_INLINE static constexpr int64_t padded(int64_t bytes) { return (bytes + 63) / 64 * 64; }
};

}  // namespace quire
