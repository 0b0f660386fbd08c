// Products with codes whose groups, or the parts of them that fit blocks, have 4 or 8 inputs (coding.h).
//
// The bits are defined as for larger groups (coded.cpp). Sums of so few activations are not part of their
// packed form: they are dot products with ones. Few checkpoints have such groups, so this keeps their weights
// small rather than fast.

#include "coded_scales.h"
#include "coded_units.h"
#include "table.h"
#include "tables.h"
#include "tile.h"

namespace quire::QUIRE_ISA {

namespace {

// With `Table`, codes of 4 bits are looked up in a table of integers.
template <int M, int Bits, bool Table>
class PartTile {
 public:
  QUIRE_INLINE PartTile(const Panels& w, int64_t panel, const uint8_t* x, const PanelPrefetch& ahead)
      : coding_(w.coding),
        units_(w.groups()),
        values_(w.values + panel * w.panel_bytes()),
        quads_((const int32_t*)x),
        scales_((const float*)(quads_ + (units_ * (kGroup / 4) + sums_before(2 * kSpan, w.inputs)) * M)),
        has_minimums_(coding_.minimums != ScaleForm::none || coding_.zeros),
        offset_(Table || coding_.meaning == Meaning::offset ? -1 : 0),
        table_(Table ? table_of(coding_.meaning) : B64{}),
        ahead_(ahead) {}

  QUIRE_INLINE void run(F* out) const {
    constexpr int64_t kUnits = kCodedBlock / kCodedUnit;
    const uint8_t* at = values_;
    F acc[M]{}, part[M]{};
    PartScales block;
    for (int64_t unit = 0; unit < units_; ++unit, at += kBytes) {
      if (unit % kUnits == 0) {
        const int64_t header = coding_.header_bytes();
        for (int64_t i = 0; i < header; i += 64) ahead_.at<M>(at, i);
        unpack_scales(coding_, at, block);
        at += header;
      }
      for (int64_t i = 0; i < kBytes; i += 64) ahead_.at<M>(at, i);
      add_unit(at, quads_ + unit * (kGroup / 4) * M, unit % kUnits, block, part);
      if ((unit + 1) % kSpanUnits != 0 && unit + 1 < units_) continue;
      for (int m = 0; m < M; ++m) {
        acc[m] = fma(part[m], splat(scales_[unit / kSpanUnits * M + m]), acc[m]);
        part[m] = F{};
      }
    }
    for (int m = 0; m < M; ++m) out[m] = acc[m];
  }

 private:
  static constexpr int64_t kBytes = 64 * Bits;
  static constexpr bool kSmall = Bits != 8 && !Table;  // codes are small integers
  static constexpr int64_t kSpanUnits = Bits <= 6 ? kSpan / kCodedUnit : 1;

  // Adds unit `u` of the block: `at` are its codes, `x` the activations. Its loops stay loops: unrolled, the
  // many kinds take minutes to compile.
  QUIRE_INLINE void add_unit(const uint8_t* at, const int32_t* x, int64_t u, const PartScales& block,
                             F* part) const {
    const int quads = (int)coding_.group / 4, groups = kCodedUnit / 4 / quads;
    const int64_t first = u * (kCodedUnit / coding_.group);
    B64 ones;
    __builtin_memset(&ones, 1, sizeof(ones));
#pragma GCC unroll 1
    for (int g = 0; g < groups; ++g) {
      I dots[M]{}, sums[M]{};
      const int end = (g + 1) * quads;
#pragma GCC unroll 1
      for (int k = end - quads; k < end; ++k) {
        B64 w = (B64)codes<Bits>(at, k);
        if constexpr (Table) w = look_up(table_, w);
        for (int m = 0; m < M; ++m) {
          dots[m] = dot4<kSmall>(dots[m], w, x + k * M + m);
          sums[m] = dot4<true>(sums[m], ones, x + k * M + m);
        }
      }
      scale(block, first + g, dots, sums, part);
    }
  }

  // Adds the dot products of group `g` of the block, times its scale, and its minimum.
  QUIRE_INLINE void scale(const PartScales& block, int64_t g, const I* dots, const I* sums, F* part) const {
    constexpr int kShift = Table ? 7 : Bits - 1;  // codes are too large by 1 << kShift
    const F scale = load(block.scales[g]), minimum = load(block.minimums[g]);
    for (int m = 0; m < M; ++m) {
      part[m] = fma(to_float(dots[m] - ((sums[m] << kShift) & offset_)), scale, part[m]);
      if (has_minimums_) part[m] = fma(to_float(-sums[m]), minimum, part[m]);
    }
  }

  const Coding coding_;
  const int64_t units_;
  const uint8_t* const values_;
  const int32_t* const quads_;
  const float* const scales_;
  const bool has_minimums_;
  const int32_t offset_;
  const B64 table_;
  const PanelPrefetch& ahead_;
};

template <int M, int Bits, bool Table>
void tile_of(const Panels& w, int64_t panel, const uint8_t* x, const PanelPrefetch& ahead, F* out) {
  PartTile<M, Bits, Table>(w, panel, x, ahead).run(out);
}

template <int Bits, bool Table = false>
constexpr CodedTile kTiles[kTile] = {
    tile_of<1, Bits, Table>, tile_of<2, Bits, Table>, tile_of<3, Bits, Table>, tile_of<4, Bits, Table>,
    tile_of<5, Bits, Table>, tile_of<6, Bits, Table>, tile_of<7, Bits, Table>, tile_of<8, Bits, Table>};

}  // namespace

const CodedTile* part_tiles(const Coding& coding) {
  if (coding.looked_up()) return kTiles<4, true>;
  constexpr const CodedTile* kOfBits[] = {kTiles<2>, kTiles<3>, kTiles<4>, kTiles<5>, kTiles<6>};
  return coding.bits == 8 ? kTiles<8> : kOfBits[coding.bits - 2];
}

}  // namespace quire::QUIRE_ISA
