// Products with codes of other formats, and rows of them (coding.h).
//
// quire/quantize/coded_product.py defines the bits: sums of a group are exact integers, and each multiply-add
// of floats is rounded once, in the order written there. Of a product with eight rows, 8 of 10 instructions
// for 32 inputs in a group with a minimum are dot products; with one row memory is the limit.

#include "coded_scales.h"
#include "coded_units.h"
#include "interleave.h"
#include "table.h"
#include "tables.h"
#include "tile.h"

namespace quire::QUIRE_ISA {

namespace {

// Loops that are not unrolled compile in half the time: where common kinds have tiles of half a panel, and in
// the set for processors that have no wide registers.
#if defined(__AVX512F__) || defined(QUIRE_NEON)
constexpr int kUnrolled = 8;
#else
constexpr int kUnrolled = 1;
#endif

// With `Table`, codes of 4 bits are looked up in a table of integers.
template <int M, int Bits, bool Table>
class Tile {
 public:
  QUIRE_INLINE Tile(const Panels& w, int64_t panel, const uint8_t* x, const PanelPrefetch& ahead)
      : coding_(w.coding),
        units_(w.groups()),
        values_(w.values + panel * w.panel_bytes()),
        quads_((const int32_t*)x),
        sums_(quads_ + (units_ * (kGroup / 4) + sums_before(coding_.summed(), w.inputs)) * M),
        scales_((const float*)(quads_ + (units_ * (kGroup / 4) + sums_before(2 * kSpan, w.inputs)) * M)),
        has_minimums_(coding_.minimums != ScaleForm::none || coding_.zeros),
        group_shift_(__builtin_ctz((unsigned)coding_.group)),
        sum_shift_(__builtin_ctz((unsigned)coding_.summed())),
        table_(Table ? table_of(coding_.meaning) : B64{}),
        ahead_(ahead) {}

  QUIRE_INLINE void run(F* out) const {
    constexpr int64_t kUnits = kCodedBlock / kCodedUnit;
    const int64_t header = coding_.header_bytes();
    const uint8_t* at = values_;
    F acc[M]{};
    BlockScales block;
    for (int64_t first = 0; first < units_; first += kUnits) {
      for (int64_t i = 0; i < header; i += 64) ahead_.at<M>(at, i);
      unpack_scales(coding_, at, block);
      const int64_t count = units_ - first < kUnits ? units_ - first : kUnits;
      const int32_t* x = quads_ + first * (kGroup / 4) * M;
      if (coding_.group == 16) {
        add_block<true>(at + header, x, first, count, block, acc);
      } else {
        add_block<false>(at + header, x, first, count, block, acc);
      }
      at += header + count * kBytes;
    }
    for (int m = 0; m < M; ++m) out[m] = acc[m];
  }

 private:
  static constexpr int64_t kBytes = 64 * Bits;
  static constexpr bool kSmall = Bits != 8 && !Table;  // codes are small integers
  static constexpr int64_t kSpanUnits = Bits <= 6 ? kSpan / kCodedUnit : 1;

  // Adds a block of `count` units, from unit `first` of the row on: `at` are its codes, `x` the activations.
  template <bool Halves>
  QUIRE_INLINE void add_block(const uint8_t* at, const int32_t* x, int64_t first, int64_t count,
                              const BlockScales& block, F* acc) const {
    const int64_t shift = Halves ? 0 : sum_shift_ - 5, mask = ((int64_t)1 << shift) - 1;  // units of a sum
    for (int64_t u = 0; u < count;) {
      const int64_t last = u + kSpanUnits < count ? u + kSpanUnits : count;
      const float* const scales = scales_ + (first + u) / kSpanUnits * M;
      F part[M]{};
      I dots[M];
      for (; u < last; ++u, at += kBytes, x += kGroup / 4 * M) {
        for (int64_t i = 0; i < kBytes; i += 64) ahead_.at<M>(at, i);
        if constexpr (Halves) {
          for (int half = 0; half < 2; ++half) {
            const int32_t* sums = sums_ + (2 * (first + u) + half) * M;
            begin(sums, dots);
            half ? add<4, 8>(at, x, dots) : add<0, 4>(at, x, dots);
            scale(block, 2 * u + half, sums, dots, part);
          }
        } else {
          const int32_t* sums = sums_ + ((first + u) >> shift) * M;
          if ((u & mask) == 0) begin(sums, dots);
          add<0, 8>(at, x, dots);
          if (((u + 1) & mask) == 0 || u + 1 == count) scale(block, u * 32 >> group_shift_, sums, dots, part);
        }
      }
      for (int m = 0; m < M; ++m) acc[m] = fma(part[m], splat(scales[m]), acc[m]);
    }
  }

  // Begins with minus the sum of the values times what all codes are too large by.
  QUIRE_INLINE void begin(const int32_t* sums, I* dots) const {
    const int32_t offset = Table || coding_.meaning == Meaning::offset ? -1 : 0;
    constexpr int kShift = Table ? 7 : Bits - 1;
    for (int m = 0; m < M; ++m) dots[m] = (splat(sums[m]) << kShift) & offset;
  }

  template <int First, int Last>
  QUIRE_INLINE void add(const uint8_t* at, const int32_t* x, I* dots) const {
#pragma GCC unroll kUnrolled
    for (int k = First; k < Last; ++k) {
      B64 w = (B64)codes<Bits>(at, k);
      if constexpr (Table) w = look_up(table_, w);
      for (int m = 0; m < M; ++m) dots[m] = dot4<kSmall>(dots[m], w, x + k * M + m);
    }
  }

  // Adds the dot products of group `g` of the block, times its scale, and its minimum.
  QUIRE_INLINE void scale(const BlockScales& block, int64_t g, const int32_t* sums, const I* dots,
                          F* part) const {
    const F scale = load(block.scales[g]);
    for (int m = 0; m < M; ++m) part[m] = fma(to_float(dots[m]), scale, part[m]);
    if (!has_minimums_) return;
    const F minimum = load(block.minimums[g]);
    for (int m = 0; m < M; ++m) part[m] = fma(to_float(splat(sums[m])), minimum, part[m]);
  }

  const Coding coding_;
  const int64_t units_;
  const uint8_t* const values_;
  const int32_t *const quads_, *const sums_;
  const float* const scales_;
  const bool has_minimums_;
  const int group_shift_, sum_shift_;
  const B64 table_;
  const PanelPrefetch& ahead_;
};

template <int M, int Bits, bool Table>
void tile_of(const Panels& w, int64_t panel, const uint8_t* x, const PanelPrefetch& ahead, F* out) {
  Tile<M, Bits, Table>(w, panel, x, ahead).run(out);
}

template <int Bits, bool Table = false>
constexpr CodedTile kTiles[kTile] = {
    tile_of<1, Bits, Table>, tile_of<2, Bits, Table>, tile_of<3, Bits, Table>, tile_of<4, Bits, Table>,
    tile_of<5, Bits, Table>, tile_of<6, Bits, Table>, tile_of<7, Bits, Table>, tile_of<8, Bits, Table>};

// Returns code `k` of a unit for one output.
int code_of(const Coding& coding, const uint8_t* unit, int64_t k, int64_t lane) {
  const int bits = coding.bits;
  const int64_t at = lane * 4 + k % 4, quad = k / 4;
  if (coding.float8()) return unit[float8_place(k, lane)];
  if (bits == 8) return unit[quad * 64 + at];
  int code = 0, low = 0;
  for (int plane = 4; plane > 0; plane /= 2) {
    if (!(bits & plane)) continue;
    const int64_t together = 8 / plane;  // inputs in a byte
    const int byte = unit[quad / together * 64 + at];
    code |= (byte >> (quad % together * plane) & ((1 << plane) - 1)) << low;
    unit += 64 * plane;
    low += plane;
  }
  return code;
}

template <int Rows>
void pack(const float* x, int64_t stride, int64_t inputs, int64_t span, uint8_t* out) {
  const int64_t padded = round_up(inputs, kGroup);
  int32_t* const quads = (int32_t*)out;
  int32_t* const sums = quads + padded / 4 * Rows;
  float* const scales = (float*)(sums + sums_before(2 * kSpan, inputs) * Rows);
  __builtin_memset(sums, 0, (size_t)(sums_before(2 * kSpan, inputs) * Rows) * 4);
  for (int64_t first = 0; first < inputs; first += span) {
    const int64_t count = inputs - first < span ? inputs - first : span;
    int32_t tops[kTile]{};
    float inverses[kTile]{};
    magnitudes<Rows>(x + first, stride, count, tops);
    for (int m = 0; m < Rows; ++m) {
      const Steps steps = steps_of(tops[m], 127.0f);
      inverses[m] = steps.factor;
      scales[first / span * Rows + m] = steps.scale;
    }
    for (int64_t input = first; input < first + count; input += kGroup) {
      const int64_t rest = first + count - input;
      GroupSums found;
      quantize_rows<Rows>(x + input, stride, rest < kGroup ? rest : kGroup, inverses,
                          quads + input / 4 * Rows, found);
      for (int m = 0; m < Rows; ++m) {
        sums[input / 16 * Rows + m] = -found.low[m];
        sums[(input / 16 + 1) * Rows + m] = -found.high[m];
        for (int64_t n = 32; n <= kSpan; n *= 2)
          sums[(sums_before(n, inputs) + input / n) * Rows + m] -= found.total(m);
      }
    }
  }
}

using Pack = void (*)(const float*, int64_t, int64_t, int64_t, uint8_t*);
constexpr Pack kPack[kTile] = {pack<1>, pack<2>, pack<3>, pack<4>, pack<5>, pack<6>, pack<7>, pack<8>};

}  // namespace

const CodedTile* coded_tiles(const Coding& coding) {
  if (const CodedTile* const halves = half_tiles(coding)) return halves;
  if (coding.meaning == Meaning::rows) return row_tiles();
  if (coding.float8() || coding.meaning == Meaning::floats) return float_tiles(coding);
  if (coding.group < 16) return part_tiles(coding);
  if (coding.looked_up()) return kTiles<4, true>;
  switch (coding.bits) {
    case 2:
      return kTiles<2>;
    case 3:
      return kTiles<3>;
    case 4:
      return kTiles<4>;
    case 5:
      return kTiles<5>;
    case 6:
      return kTiles<6>;
    default:
      return kTiles<8>;
  }
}

void pack_spans(const float* x, int64_t stride, int64_t m_rows, int64_t inputs, int64_t span, uint8_t* out) {
  kPack[m_rows - 1](x, stride, inputs, span, out);
}

void lookup_coded(const Panels& table, int64_t row, float* out) {
  const Coding& c = table.coding;
  const int64_t lane = row % kPanel, zero = is_offset(c.meaning) ? 1 << (c.bits - 1) : 0;
  const uint8_t* at = table.values + row / kPanel * table.panel_bytes();
  PartScales block;
  for (int64_t k = 0; k < table.inputs; k += kCodedUnit) {
    if (k % kCodedBlock == 0) unpack_scales(c, at, block);
    const uint8_t* zeros = at + c.zeros_at();
    const uint8_t* unit = at + c.header_bytes() + k % kCodedBlock / kCodedUnit * c.unit_bytes();
    const int64_t count = table.inputs - k < kCodedUnit ? table.inputs - k : kCodedUnit;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t g = (k % kCodedBlock + i) / c.group;
      const int code = code_of(c, unit, i, lane);
      const int64_t q = code - zero - (c.zeros ? zeros[g * kPanel + lane] : 0);
      const float product = block.scales[g][lane] * (has_table(c.meaning) ? value_of(table, code) : (float)q);
      out[k + i] = c.minimums == ScaleForm::none ? product : product - block.minimums[g][lane];
    }
    if ((k + kCodedUnit) % kCodedBlock == 0)
      at += c.header_bytes() + kCodedBlock / kCodedUnit * c.unit_bytes();
  }
}

}  // namespace quire::QUIRE_ISA
