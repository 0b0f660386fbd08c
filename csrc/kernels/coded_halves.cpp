// Products of coded weights with AVX2: up to four rows with eight outputs at a time (half.h), or with sixteen
// where there are one or two rows, or products of a whole unit fit in 16 bits: activations are read once for
// both halves then.
//
// Scales are unpacked once for all rows and both halves of a panel. The bits are those of coded.cpp.

#include "coded_kinds.h"
#include "coded_scales.h"
#include "tables.h"
#include "tile.h"

namespace quire::QUIRE_ISA {

#if defined(QUIRE_HALF_PANELS)

namespace {

template <int M, int Bits, int Table, Summed Of, bool Minimums>
class HalfTile {
 public:
  QUIRE_INLINE HalfTile(const Panels& w, int64_t panel, const uint8_t* x, const PanelPrefetch& ahead)
      : coding_(w.coding),
        units_(w.groups()),
        values_(w.values + panel * w.panel_bytes()),
        quads_((const int32_t*)x),
        sums_(quads_ + (units_ * (kGroup / 4) + sums_before(inputs_of<Of>(coding_), w.inputs)) * M),
        scales_((const float*)(quads_ + (units_ * (kGroup / 4) + sums_before(2 * kSpan, w.inputs)) * M)),
        group_shift_(__builtin_ctz((unsigned)coding_.group) - __builtin_ctz((unsigned)kCodedUnit)),
        table_(Table ? _mm256_sub_epi8(load_as<__m256i>(table_bytes(coding_.meaning)),
                                       _mm256_set1_epi8(128 - Table))
                     : __m256i{}),
        ahead_(ahead) {}

  QUIRE_INLINE void run(F* out) const {
    constexpr int64_t kUnits = kCodedBlock / kCodedUnit;
    const int64_t header = coding_.header_bytes();
    const uint8_t* at = values_;
    HalfF* const sums = (HalfF*)out;  // [row][half]
    for (int m = 0; m < M; ++m) out[m] = F{};
    BlockScales block;
    for (int64_t first = 0; first < units_; first += kUnits) {
      for (int64_t i = 0; i < header; i += 64) ahead_.at<M>(at, i);
      unpack_scales(coding_, at, block);
      at += header;
      const int64_t count = units_ - first < kUnits ? units_ - first : kUnits;
      for (int64_t u = 0; u < count; u += kSpanUnits) {
        const int64_t units = count - u < kSpanUnits ? count - u : kSpanUnits;
        for (int64_t i = 0; i < units * kBytes; i += 64) ahead_.at<M>(at, i);
        for (int half = 0; half < 2; half += kHalves) {
          add_span<kFirst>(at, first + u, units, block, u, half, 0, sums);
          if constexpr (M > kFirst) add_span<M - kFirst>(at, first + u, units, block, u, half, kFirst, sums);
        }
        at += units * kBytes;
      }
    }
  }

 private:
  using Codes = HalfCodes<Bits, Table>;
  static constexpr int kFirst = M < 4 ? M : 4;  // rows at a time
  static constexpr int kHalves = M <= 2 || Codes::kFit == 8 ? 2 : 1;
  static constexpr int64_t kBytes = 64 * Bits;
  static constexpr int64_t kSpanUnits = Bits <= 6 ? kSpan / kCodedUnit : 1;

  // Adds `units` units, which have one scale of the rows: unit `first` of the row, `u` of the block, and on.
  template <int Rows>
  QUIRE_INLINE void add_span(const uint8_t* at, int64_t first, int64_t units, const BlockScales& block,
                             int64_t u, int half, int row, HalfF* acc) const {
    const int64_t summed = inputs_of<Of>(coding_), more = summed / kCodedUnit - 1;
    const int32_t* x = quads_ + first * (kGroup / 4) * M + row;
    const int32_t* sums = sums_ + (first * kCodedUnit >> __builtin_ctz((unsigned)summed)) * M + row;
    const uint8_t* values = at + half * 32;
    HalfI dots[kHalves * Rows];
    HalfF part[kHalves * Rows]{};
    if constexpr (Of == Summed::span) begin<Rows>(sums, dots);
    for (int64_t i = 0; i < units; ++i, values += kBytes, x += kGroup / 4 * M) {
      if constexpr (Of == Summed::half) {
        begin<Rows>(sums, dots);
        dot_halves<Rows, kHalves, Codes, 0, 4>(values, x, M, table_, dots);
        scale<Rows>(block, 2 * (u + i), half, sums, dots, part);
        begin<Rows>(sums + M, dots);
        dot_halves<Rows, kHalves, Codes, 4, 8>(values, x, M, table_, dots);
        scale<Rows>(block, 2 * (u + i) + 1, half, sums + M, dots, part);
        sums += 2 * M;
      } else {
        if (Of == Summed::unit || (Of == Summed::units && (i & more) == 0)) begin<Rows>(sums, dots);
        dot_halves<Rows, kHalves, Codes>(values, x, M, table_, dots);
        if (Of == Summed::unit || (Of == Summed::units && ((i & more) == more || i + 1 == units))) {
          scale<Rows>(block, (u + i) >> group_shift_, half, sums, dots, part);
          sums += M;
        }
      }
    }
    if constexpr (Of == Summed::span) scale<Rows>(block, u >> group_shift_, half, sums, dots, part);
    const float* const scales = scales_ + first / kSpanUnits * M + row;
    for (int h = 0; h < kHalves; ++h)
      for (int m = 0; m < Rows; ++m) {
        HalfF& own = acc[(row + m) * 2 + half + h];
        own = fma(part[h * Rows + m], (HalfF)_mm256_set1_ps(scales[m]), own);
      }
  }

  // Begins with the sum of the values times what all codes are too small by, as they are multiplied.
  template <int Rows>
  QUIRE_INLINE void begin(const int32_t* sums, HalfI* dots) const {
    constexpr int32_t kOffset = Table ? Table : 1 << (Bits - 1);
    constexpr int32_t kTooSmall = (Codes::kSigned ? kOffset : 0) - (Minimums ? 0 : kOffset);
    for (int i = 0; i < kHalves * Rows; ++i) dots[i] = HalfI{} - sums[i % Rows] * kTooSmall;
  }

  // Adds the dot products of group `g` of the block, times its scale, and its minimum.
  template <int Rows>
  QUIRE_INLINE void scale(const BlockScales& block, int64_t g, int half, const int32_t* sums,
                          const HalfI* dots, HalfF* part) const {
    for (int h = 0; h < kHalves; ++h) {
      const HalfF scale = load_as<HalfF>(block.scales[g] + (half + h) * 8);
      for (int i = h * Rows; i < (h + 1) * Rows; ++i) part[i] = fma(to_float(dots[i]), scale, part[i]);
    }
    if constexpr (!Minimums) return;
    for (int m = 0; m < Rows; ++m) {
      const HalfF sum = to_float(HalfI{} + sums[m]);
      for (int h = 0; h < kHalves; ++h) {
        const HalfF minimum = load_as<HalfF>(block.minimums[g] + (half + h) * 8);
        part[h * Rows + m] = fma(sum, minimum, part[h * Rows + m]);
      }
    }
  }

  const Coding coding_;
  const int64_t units_;
  const uint8_t* const values_;
  const int32_t *const quads_, *const sums_;
  const float* const scales_;
  const int group_shift_;  // units to groups, unless these are halves of a unit
  const __m256i table_;
  const PanelPrefetch& ahead_;
};

template <int M, int Bits, int Table, Summed Of, bool Minimums>
void tile_of(const Panels& w, int64_t panel, const uint8_t* x, const PanelPrefetch& ahead, F* out) {
  HalfTile<M, Bits, Table, Of, Minimums>(w, panel, x, ahead).run(out);
}

template <int Bits, int Table, Summed Of, bool Minimums>
constexpr CodedTile kTiles[kTile] = {
    tile_of<1, Bits, Table, Of, Minimums>, tile_of<2, Bits, Table, Of, Minimums>,
    tile_of<3, Bits, Table, Of, Minimums>, tile_of<4, Bits, Table, Of, Minimums>,
    tile_of<5, Bits, Table, Of, Minimums>, tile_of<6, Bits, Table, Of, Minimums>,
    tile_of<7, Bits, Table, Of, Minimums>, tile_of<8, Bits, Table, Of, Minimums>};

}  // namespace

const CodedTile* half_tiles(const Coding& coding) {
  return of_kind(coding, [&]<int Bits, bool Table, Summed Of, bool Minimums>() -> const CodedTile* {
    if constexpr (Table)
      if (coding.meaning == Meaning::fp4) return kTiles<Bits, 12, Of, Minimums>;
    return kTiles<Bits, (Table ? 128 : 0), Of, Minimums>;
  });
}

#else

const CodedTile* half_tiles(const Coding&) { return nullptr; }

#endif

}  // namespace quire::QUIRE_ISA
