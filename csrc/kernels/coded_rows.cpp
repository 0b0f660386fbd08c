// Products with W8A8 weights: integers with one scale for an output, times rows with one scale each.
//
// The sum of a row is one of integers, exact below 132,104 inputs. With eight rows, 8 of 9 instructions are
// dot products; with one row memory is the limit.

#include "coded_scales.h"
#include "half.h"
#include "interleave.h"
#include "packed_rows.h"
#include "table.h"
#include "tile.h"

namespace quire::QUIRE_ISA {

namespace {

#if defined(QUIRE_HALF_PANELS)

using Codes = HalfCodes<8>;

// Adds the products of `Rows` rows with `units` units of the outputs at `at`, of one half of a panel or both,
// to `sums`, [half][row]. `x` are the rows' numbers, [4-byte words][M].
template <int M, int Rows, int Halves>
QUIRE_INLINE void add_units(const uint8_t* at, int64_t units, const int32_t* x, const PanelPrefetch* ahead,
                            HalfI* sums) {
  HalfI dots[Halves * Rows];
  __builtin_memcpy(dots, sums, sizeof(dots));
  for (int64_t u = 0; u < units; ++u, at += 64 * 8, x += kGroupWords * M) {
    if (ahead)
      for (int i = 0; i < 8; ++i) ahead->at<M>(at, i * 64);
    dot_halves<Rows, Halves, Codes>(at, x, M, __m256i{}, dots);
  }
  __builtin_memcpy(sums, dots, sizeof(dots));
}

// Multiplies M rows with a panel: up to four with eight outputs at a time, or up to two with sixteen.
template <int M>
void row_tile(const Panels& w, int64_t panel, const uint8_t* x, const PanelPrefetch& ahead, F* out) {
  constexpr int kFirst = M < 4 ? M : 4, kHalves = M <= 2 ? 2 : 1;
  const int64_t header = w.coding.header_bytes();
  const uint8_t* at = w.values + panel * w.panel_bytes();
  const PackedRows<M> packed(x, w.groups());
  const int32_t* row = packed.words();
  const F channel = number_of(w.coding.scales, at, 0);
  HalfI sums[2][M];
  for (int m = 0; m < M; ++m) sums[0][m] = sums[1][m] = HalfI{} + (Codes::kSigned ? 0 : packed.begin(m));
  for (int64_t left = w.groups(); left > 0; left -= kCodedBlock / kCodedUnit) {
    at += header;
    const int64_t units = left < kCodedBlock / kCodedUnit ? left : kCodedBlock / kCodedUnit;
    for (int half = 0; half < 2; half += kHalves) {
      const uint8_t* const from = at + half * 32;
      add_units<M, kFirst, kHalves>(from, units, row, half ? nullptr : &ahead, sums[half]);
      if constexpr (M > kFirst)
        add_units<M, M - kFirst, kHalves>(from, units, row + kFirst, nullptr, sums[half] + kFirst);
    }
    at += units * 64 * 8;
    row += units * kGroupWords * M;
  }
  for (int m = 0; m < M; ++m) {
    const HalfI both[] = {sums[0][m], sums[1][m]};
    out[m] = to_float(__builtin_bit_cast(I, both)) * splat(packed.scale(m)) * channel;
  }
}

constexpr CodedTile kRowTiles[kTile] = {row_tile<1>, row_tile<2>, row_tile<3>, row_tile<4>,
                                        row_tile<5>, row_tile<6>, row_tile<7>, row_tile<8>};

#else

// Adds the products of one row with N panels, whose sums are `Stride` apart.
template <int N, int Stride>
QUIRE_INLINE void add_row(I* sums, const B64* values, const int32_t* row) {
#if defined(__AVX512VNNI__)
  if constexpr (N > 1) {  // the row is read once
    const I numbers = splat(*row);
#pragma GCC unroll 2
    for (int n = 0; n < N; ++n) sums[n * Stride] = dot4(sums[n * Stride], values[n], numbers);
    return;
  }
#endif
  *sums = dot4<false>(*sums, *values, row);
}

// Multiplies M rows with N panels. One panel has two sums for each row, whose additions do not wait for each
// other.
template <int M, int N>
void row_tile(const Panels& w, int64_t panel, const uint8_t* x, const PanelPrefetch& ahead, F* out) {
  constexpr int kSums = N == 1 ? 2 : 1;
  const int64_t quads = w.groups() * kGroupWords, header = w.coding.header_bytes(), next = w.panel_bytes();
  const uint8_t* at = w.values + panel * next;
  const PackedRows<M> packed(x, w.groups());
  const int32_t* row = packed.words();
  const int64_t step = packed.row_step();
  F channels[N];
  for (int n = 0; n < N; ++n) channels[n] = number_of(w.coding.scales, at + n * next, 0);
  I sums[kSums][N * M]{};
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
    for (int n = 0; n < N; ++n) sums[0][n * M + m] = splat(packed.begin(m));
  for (int64_t left = quads; left > 0; left -= kCodedBlock / 4) {
    at += header;
    const int64_t count = left < kCodedBlock / 4 ? left : kCodedBlock / 4;
    for (int64_t k = 0; k < count; k += 2, at += 128, row += 2 * PackedRows<M>::kNext) {
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {
        B64 values[N];
        for (int n = 0; n < N; ++n) {
          ahead.at<M>(at + n * next, i * 64);
          values[n] = load_as<B64>(at + n * next + i * 64);
        }
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m)
          add_row<N, M>(sums[i % kSums] + m, values, row + i * PackedRows<M>::kNext + m * step);
      }
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
    for (int n = 0; n < N; ++n) {
      const int i = n * M + m;
      out[i] = to_float(kSums == 2 ? sums[0][i] + sums[kSums - 1][i] : sums[0][i]) * splat(packed.scale(m)) *
               channels[n];
    }
}

constexpr CodedTile kRowTiles[kTile] = {row_tile<1, 1>, row_tile<2, 1>, row_tile<3, 1>, row_tile<4, 1>,
                                        row_tile<5, 1>, row_tile<6, 1>, row_tile<7, 1>, row_tile<8, 1>};

// With AMX, tiles multiply many rows.
#if defined(__AVX512VNNI__) && !defined(QUIRE_AMX)

// Multiplies two tiles of eight rows with one panel.
void two_tiles(const Panels& w, int64_t panel, const Tiles& tiles, const PanelPrefetch& ahead, F* out) {
  const int64_t quads = w.groups() * kGroupWords, header = w.coding.header_bytes();
  const uint8_t* at = w.values + panel * w.panel_bytes();
  const PackedRows<kTile> packed[] = {{tiles.x, w.groups()}, {tiles.x + tiles.bytes, w.groups()}};
  const int32_t *first = packed[0].words(), *second = packed[1].words();
  const F channel = number_of(w.coding.scales, at, 0);
  I sums[2][kTile];
#pragma GCC unroll 8
  for (int m = 0; m < kTile; ++m)
    sums[0][m] = splat(packed[0].begin(m)), sums[1][m] = splat(packed[1].begin(m));
  for (int64_t left = quads; left > 0; left -= kCodedBlock / 4) {
    at += header;
    const int64_t count = left < kCodedBlock / 4 ? left : kCodedBlock / 4;
    for (int64_t k = 0; k < count; ++k, at += 64, first += kTile, second += kTile) {
      const B64 values = load_as<B64>(at);
      ahead.at<kTile>(at, 0);
#pragma GCC unroll 8
      for (int m = 0; m < kTile; ++m) sums[0][m] = dot4<false>(sums[0][m], values, first + m);
#pragma GCC unroll 8
      for (int m = 0; m < kTile; ++m) sums[1][m] = dot4<false>(sums[1][m], values, second + m);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < kTile; ++m)
    for (int t = 0; t < 2; ++t)
      out[t * kTile + m] = to_float(sums[t][m]) * splat(packed[t].scale(m)) * channel;
}

#endif
#endif

template <int Rows>
void pack(const float* x, int64_t stride, int64_t inputs, uint8_t* out) {
  const int64_t groups = ceil_div(inputs, kGroup);
  int32_t* const quads = (int32_t*)out;
  int32_t* const begin = quads + groups * kGroupWords * Rows;
  float* const scales = (float*)(begin + Rows);
  int32_t tops[kTile]{}, totals[kTile]{};
  float inverses[kTile]{};
  magnitudes<Rows>(x, stride, inputs, tops);
  for (int m = 0; m < Rows; ++m) {
    const Steps steps = steps_of(tops[m], 127.0f);
    inverses[m] = steps.factor;
    scales[m] = steps.scale;
  }
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t rest = inputs - g * kGroup;
    GroupSums sums;
    quantize_rows<Rows>(x + g * kGroup, stride, rest < kGroup ? rest : kGroup, inverses,
                        quads + g * kGroupWords * Rows, sums);
    for (int m = 0; m < Rows; ++m) totals[m] += sums.total(m);
  }
  for (int m = 0; m < Rows; ++m) begin[m] = -128 * totals[m];  // codes are too large by 128
}

using Pack = void (*)(const float*, int64_t, int64_t, uint8_t*);
constexpr Pack kPack[kTile] = {pack<1>, pack<2>, pack<3>, pack<4>, pack<5>, pack<6>, pack<7>, pack<8>};

}  // namespace

const CodedTile* row_tiles() { return kRowTiles; }

#if defined(__AVX512VNNI__) && !defined(QUIRE_AMX)

CodedTiles wide_row_tiles() {
  return [](const Panels& w, int64_t panel, const Tiles& tiles, const PanelPrefetch& ahead, F* out) {
    for (int64_t t = 0; t < tiles.count; ++t)
      row_tile<kTile, 2>(w, panel, tiles.x + t * tiles.bytes, ahead, out + t * 2 * kTile);
  };
}

CodedTiles two_row_tiles() { return two_tiles; }

#else

CodedTiles wide_row_tiles() { return nullptr; }
CodedTiles two_row_tiles() { return nullptr; }

#endif

void pack_rows(const float* x, int64_t stride, int64_t m_rows, int64_t inputs, uint8_t* out) {
  if constexpr (!kByRow) return kPack[m_rows - 1](x, stride, inputs, out);
  for (int64_t m = 0; m < m_rows; ++m)
    pack<1>(x + m * stride, stride, inputs,
            out + m * PackedActivations::row_bytes(ActivationFormat::rows, inputs));
}

}  // namespace quire::QUIRE_ISA
