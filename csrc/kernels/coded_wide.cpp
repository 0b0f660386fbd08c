// Products of eight rows with two panels of coded weights, and of one row with one, where dot products of
// bytes are one instruction.
//
// Of two panels, each number of a row is read once for both, and all sums of a group of inputs are in
// registers: of a core that starts two such instructions a cycle, reading is otherwise the limit. All
// branches are on template arguments, so the multiplications of a group with its scale overlap with the next
// dot products, and a core waits for memory with more loads under way. The bits are those of coded.cpp.

#include "coded_kinds.h"
#include "coded_scales.h"
#include "coded_units.h"
#include "table.h"
#include "tables.h"
#include "tile.h"

namespace quire::QUIRE_ISA {

#if defined(__AVX512VNNI__)

namespace {

template <int M, int N, int Bits, bool Table, Summed Of, bool Minimums>
class WideTile {
 public:
  QUIRE_INLINE WideTile(const Panels& w, int64_t panel, const Tiles& tiles)
      : coding_(w.coding),
        units_(w.groups()),
        next_(w.panel_bytes()),
        values_(w.values + panel * next_),
        tiles_(tiles),
        sums_at_((units_ * (kGroup / 4) + sums_before(inputs_of<Of>(coding_), w.inputs)) * M),
        scales_at_((units_ * (kGroup / 4) + sums_before(2 * kSpan, w.inputs)) * M),
        group_shift_(__builtin_ctz((unsigned)coding_.group) - __builtin_ctz((unsigned)kCodedUnit)),
        table_(Table ? table_of(coding_.meaning) : B64{}) {}

  // Computes out [tile][N][M].
  QUIRE_INLINE void run(F* out) const {
    constexpr int64_t kUnits = kCodedBlock / kCodedUnit;
    const int64_t header = coding_.header_bytes();
    const uint8_t* at = values_;
    const int64_t tiles = M < kTile ? 1 : tiles_.count;
    for (int64_t i = 0; i < tiles * kSums; ++i) out[i] = F{};
    BlockScales blocks[N];
    for (int64_t first = 0; first < units_; first += kUnits) {
      for (int n = 0; n < N; ++n) unpack_scales(coding_, at + n * next_, blocks[n]);
      fetch_ahead(at, header, header);
      at += header;
      const int64_t count = units_ - first < kUnits ? units_ - first : kUnits;
      for (int64_t t = 0; t < tiles; ++t) {
        const int32_t* const x = (const int32_t*)(tiles_.x + t * tiles_.bytes);
        for (int64_t u = 0; u < count; u += kSpanUnits) {
          const int64_t units = count - u < kSpanUnits ? count - u : kSpanUnits;
          if (u / kSpanUnits % tiles == t) fetch_ahead(at + u * kBytes, kSpanUnits * kBytes, header);
          add_span(at + u * kBytes, x, first + u, units, blocks, u, out + t * kSums);
        }
      }
      at += count * kBytes;
    }
  }

 private:
  static constexpr int kSums = N * M;
  static constexpr int64_t kBytes = 64 * Bits;
  static constexpr int64_t kSpanUnits = Bits <= 6 ? kSpan / kCodedUnit : 1;

  // Fetches what the next block has in the place of `bytes`, of which each tile does some spans; not for one
  // row (PanelPrefetch).
  QUIRE_INLINE void fetch_ahead(const uint8_t* at, int64_t bytes, int64_t header) const {
    if constexpr (M == 1) return;
    const uint8_t* const from = at + header + kCodedBlock / kCodedUnit * kBytes;
    for (int64_t i = 0; i < bytes; i += 64)
      for (int n = 0; n < N; ++n) __builtin_prefetch(from + n * next_ + i);
  }

  // Adds `units` units, which have one scale of the rows: unit `first` of the row, `u` of the block, and on.
  QUIRE_INLINE void add_span(const uint8_t* at, const int32_t* tile, int64_t first, int64_t units,
                             const BlockScales* blocks, int64_t u, F* acc) const {
    const int64_t summed = inputs_of<Of>(coding_), more = summed / kCodedUnit - 1;
    const int32_t* x = tile + first * (kGroup / 4) * M;
    const int32_t* sums = tile + sums_at_ + (first * kCodedUnit >> __builtin_ctz((unsigned)summed)) * M;
    I dots[kSums];
    F part[kSums]{};
    if constexpr (Of == Summed::span) begin(sums, dots);
    for (int64_t i = 0; i < units; ++i, at += kBytes, x += kGroup / 4 * M) {
      if constexpr (Of == Summed::half) {
        begin(sums, dots);
        add<0, 4>(at, x, dots);
        scale(blocks, 2 * (u + i), sums, dots, part);
        begin(sums + M, dots);
        add<4, 8>(at, x, dots);
        scale(blocks, 2 * (u + i) + 1, sums + M, dots, part);
        sums += 2 * M;
      } else {
        if (Of == Summed::unit || (Of == Summed::units && (i & more) == 0)) begin(sums, dots);
        add<0, 8>(at, x, dots);
        if (Of == Summed::unit || (Of == Summed::units && ((i & more) == more || i + 1 == units))) {
          scale(blocks, (u + i) >> group_shift_, sums, dots, part);
          sums += M;
        }
      }
    }
    if constexpr (Of == Summed::span) scale(blocks, u >> group_shift_, sums, dots, part);
    const float* const scales = (const float*)(tile + scales_at_) + first / kSpanUnits * M;
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const F own = splat(scales[m]);
#pragma GCC unroll 2
      for (int i = m; i < kSums; i += M) acc[i] = fma(part[i], own, acc[i]);
    }
  }

  // Begins with minus the sum of the values times what all codes are too large by.
  QUIRE_INLINE void begin(const int32_t* sums, I* dots) const {
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 2
      for (int i = m; i < kSums; i += M) dots[i] = Minimums ? I{} : splat(sums[m]) << (Table ? 7 : Bits - 1);
  }

  template <int First, int Last>
  QUIRE_INLINE void add(const uint8_t* at, const int32_t* x, I* dots) const {
#pragma GCC unroll 8
    for (int k = First; k < Last; ++k) {
      B64 values[N];
#pragma GCC unroll 2
      for (int n = 0; n < N; ++n) {
        values[n] = (B64)codes<Bits>(at + n * next_, k);
        if constexpr (Table) values[n] = look_up(table_, values[n]);
      }
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        const I row = splat(x[k * M + m]);
#pragma GCC unroll 2
        for (int n = 0; n < N; ++n) dots[n * M + m] = dot4(dots[n * M + m], values[n], row);
      }
    }
  }

  // Adds the dot products of group `g` of the block, times its scale, and its minimum.
  QUIRE_INLINE void scale(const BlockScales* blocks, int64_t g, const int32_t* sums, const I* dots,
                          F* part) const {
#pragma GCC unroll 2
    for (int n = 0; n < N; ++n) {
      const F scale = load(blocks[n].scales[g]);
#pragma GCC unroll 8
      for (int i = n * M; i < (n + 1) * M; ++i) part[i] = fma(to_float(dots[i]), scale, part[i]);
    }
    if constexpr (!Minimums) return;
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const F sum = to_float(splat(sums[m]));
#pragma GCC unroll 2
      for (int n = 0; n < N; ++n) part[n * M + m] = fma(sum, load(blocks[n].minimums[g]), part[n * M + m]);
    }
  }

  const Coding coding_;
  const int64_t units_, next_;
  const uint8_t* const values_;
  const Tiles tiles_;
  const int64_t sums_at_, scales_at_;  // in a tile
  const int group_shift_;              // units to groups, unless these are halves of a unit
  const B64 table_;
};

template <int M, int N, int Bits, bool Table, Summed Of, bool Minimums>
void tiles_of(const Panels& w, int64_t panel, const Tiles& tiles, const PanelPrefetch&, F* out) {
  WideTile<M, N, Bits, Table, Of, Minimums>(w, panel, tiles).run(out);
}

// Returns the function for M rows and N panels at a time, or null.
template <int M, int N>
CodedTiles choose(const Coding& coding) {
  return of_kind(coding, []<int Bits, bool Table, Summed Of, bool Minimums>() -> CodedTiles {
    return tiles_of<M, N, Bits, Table, Of, Minimums>;
  });
}

}  // namespace

CodedTiles wide_tiles(const Panels& w) {
  if (w.format != Format::coded) return nullptr;
  return w.coding.meaning == Meaning::rows ? wide_row_tiles() : choose<kTile, 2>(w.coding);
}

CodedTiles one_row(const Coding& coding) { return choose<1, 1>(coding); }

#else

CodedTiles wide_tiles(const Panels&) { return nullptr; }
CodedTiles one_row(const Coding&) { return nullptr; }

#endif

}  // namespace quire::QUIRE_ISA
