// Products with W8A8 weights: integers with one scale for an output, times rows with one scale each.
//
// The sum of a row is one of integers, exact below 132,104 inputs. With eight rows, 8 of 9 instructions are
// dot products; with one row memory is the limit.

#include "coded_scales.h"
#include "rounding.h"
#include "table.h"
#include "tile.h"

namespace quire::QUIRE_ISA {

namespace {

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
  const int64_t quads = w.groups() * kCodedUnit / 4, header = w.coding.header_bytes(), next = w.panel_bytes();
  const uint8_t* at = w.values + panel * next;
  const int32_t *row = (const int32_t*)x, *begin = row + quads * M;
  const float* const scales = (const float*)(begin + M);
  F channels[N];
  for (int n = 0; n < N; ++n) channels[n] = number_of(w.coding.scales, at + n * next, 0);
  I sums[kSums][N * M]{};
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
    for (int n = 0; n < N; ++n) sums[0][n * M + m] = splat(begin[m]);
  for (int64_t left = quads; left > 0; left -= kCodedBlock / 4) {
    at += header;
    const int64_t count = left < kCodedBlock / 4 ? left : kCodedBlock / 4;
    for (int64_t k = 0; k < count; k += 2, at += 128, row += 2 * M) {
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {
        B64 values[N];
        for (int n = 0; n < N; ++n) {
          ahead.at(at + n * next, i * 64);
          values[n] = load_as<B64>(at + n * next + i * 64);
        }
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) add_row<N, M>(sums[i % kSums] + m, values, row + i * M + m);
      }
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
    for (int n = 0; n < N; ++n) {
      const int i = n * M + m;
      out[i] = to_float(kSums == 2 ? sums[0][i] + sums[kSums - 1][i] : sums[0][i]) * splat(scales[m]) *
               channels[n];
    }
}

constexpr CodedTile kRowTiles[kTile] = {row_tile<1, 1>, row_tile<2, 1>, row_tile<3, 1>, row_tile<4, 1>,
                                        row_tile<5, 1>, row_tile<6, 1>, row_tile<7, 1>, row_tile<8, 1>};

}  // namespace

const CodedTile* row_tiles() { return kRowTiles; }

CodedTiles wide_row_tiles() {
  if constexpr (!kWide) return nullptr;
  return [](const Panels& w, int64_t panel, const Tiles& tiles, const PanelPrefetch& ahead, F* out) {
    constexpr int kPanels = kWide ? 2 : 1;
    for (int64_t t = 0; t < tiles.count; ++t)
      row_tile<kTile, kPanels>(w, panel, tiles.x + t * tiles.bytes, ahead, out + t * kPanels * kTile);
  };
}

void pack_rows(const float* x, int64_t stride, int64_t m_rows, int64_t inputs, uint8_t* out) {
  constexpr int kQuads = kGroup / 4;
  const int64_t groups = ceil_div(inputs, kGroup);
  int32_t* const quads = (int32_t*)out;
  int32_t* const begin = quads + groups * kQuads * m_rows;
  float* const scales = (float*)(begin + m_rows);
  for (int64_t m = 0; m < m_rows; ++m, x += stride) {
    const int32_t top = magnitude(x, inputs);
    const float largest = __builtin_bit_cast(float, top), ratio = 127.0f / largest;
    const bool finite = top < 0x7f800000;
    const float inverse = finite && ratio <= 3.4028235e38f ? ratio : 0.0f;  // of tiny numbers it overflows
    int32_t sum = 0;
    for (int64_t g = 0; g < groups; ++g) {
      int32_t words[kQuads]{};
      if (inverse > 0) sum += total(quantize_group(x + g * kGroup, inputs - g * kGroup, inverse, words));
      for (int i = 0; i < kQuads; ++i) quads[(g * kQuads + i) * m_rows + m] = words[i];
    }
    begin[m] = -128 * sum;  // codes are too large by 128
    scales[m] = finite ? largest / 127.0f : __builtin_nanf("");
  }
}

}  // namespace quire::QUIRE_ISA
