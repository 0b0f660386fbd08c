// Products with codes that mean floats: e4m3, and the table nf4.
//
// e4m3 becomes bfloat16 in registers, exactly, since it has fewer bits. Where the instruction set multiplies
// pairs of bfloat16, activations are rounded to it, as for bf16 weights; elsewhere codes are looked up as
// float32. nf4 is always looked up. The sum of a group of inputs is multiplied by its scale: acc = fma(sum,
// scale, acc).

#include "coded_scales.h"
#include "table.h"
#include "tables.h"
#include "tile.h"

namespace quire::QUIRE_ISA {

namespace {

#if defined(__AVX512BF16__)

QUIRE_INLINE __m512i table_of_16(uint64_t first, uint64_t second) {
  return _mm512_broadcast_i32x4(_mm_set_epi64x((int64_t)second, (int64_t)first));
}

// Converts 64 codes to two vectors of pairs of bfloat16.
//
// A code is sign, 4 bits of exponent, 3 of fraction. The upper byte of the bfloat16 has the sign and the
// exponent without its last bit, which the upper half of the code determines; the lower byte has that bit
// and the fraction, which are the lower half. Codes with exponent 0, that are below 2^-6, have tables of
// their own.
QUIRE_INLINE void widen_float8(B64 codes, B64* first, B64* second) {
  const __m512i w = (__m512i)codes, half = _mm512_set1_epi8(15);
  const __m512i exponents = table_of_16(0x434241403f3e3d3c, 0xc3c2c1c0bfbebdbc);
  const __m512i small_exponents = table_of_16(0x3c3c3c3c3b3b3b00, 0x3c3c3c3c3c3c3c3c);
  const __m512i small_fractions = table_of_16(0x60402000c0800000, 0xf0e0d0c0b0a09080);
  const __m512i lower = _mm512_and_si512(w, half), upper = _mm512_and_si512(_mm512_srli_epi16(w, 4), half);
  const __mmask64 small = _mm512_testn_epi8_mask(w, _mm512_set1_epi8(0x70));
  const __m512i low = _mm512_mask_shuffle_epi8(_mm512_slli_epi16(lower, 4), small, small_fractions, lower);
  __m512i high = _mm512_shuffle_epi8(exponents, upper);
  high = _mm512_mask_shuffle_epi8(high, small, small_exponents, lower);
  high = _mm512_ternarylogic_epi32(high, w, _mm512_set1_epi8((char)0x80), 0xf8);  // high | (w & 0x80)
  *first = (B64)_mm512_unpacklo_epi8(low, high);
  *second = (B64)_mm512_unpackhi_epi8(low, high);
}

// Sums `units` units of a group. Pairs of inputs alternate between two sums, which do not wait for each
// other, whatever M is.
template <int M>
QUIRE_INLINE void sum_float8(const uint8_t* at, const int32_t* x, int64_t units, int64_t, F* sum) {
  F odd[M]{};
  for (int64_t quad = 0; quad < units * kCodedUnit / 4; ++quad) {
    B64 first, second;
    widen_float8(load_as<B64>(at + quad * 64), &first, &second);
    for (int m = 0; m < M; ++m) sum[m] = dot2_bf16(sum[m], first, x[2 * quad * M + m]);
    for (int m = 0; m < M; ++m) odd[m] = dot2_bf16(odd[m], second, x[(2 * quad + 1) * M + m]);
  }
  for (int m = 0; m < M; ++m) sum[m] += odd[m];
}
using Float8Rows = int32_t;  // pairs of bfloat16
constexpr int kFloat8Inputs = 2;
#else

template <int M>
QUIRE_INLINE void sum_float8(const uint8_t* at, const float* x, int64_t, int64_t inputs, F* sum) {
  for (int64_t k = 0; k < inputs; ++k) {
    F values;
    for (int lane = 0; lane < kPanel; ++lane) values[lane] = kFloat8.of[at[float8_place(k, lane)]];
    for (int m = 0; m < M; ++m) sum[m] = fma(values, splat(x[k * M + m]), sum[m]);
  }
}
using Float8Rows = float;
constexpr int kFloat8Inputs = 1;
#endif

// Returns the numbers of 16 codes: the low 4 bits of each lane.
QUIRE_INLINE F look_up_nf4(U codes) {
#if defined(__AVX512F__)
  return (F)_mm512_permutexvar_ps((__m512i)codes, (__m512)load(kNf4));
#else
  F out;
  for (int i = 0; i < kLanes; ++i) out[i] = kNf4[codes[i] & 15];
  return out;
#endif
}

template <int M>
QUIRE_INLINE void sum_nf4(const uint8_t* at, const float* x, int64_t, int64_t inputs, F* sum) {
  constexpr int kTogether = 8;
  for (int64_t k = 0; k < inputs; k += kTogether) {
    const U eight = load_as<U>(at + k / kTogether * 64);
    const int64_t count = inputs - k < kTogether ? inputs - k : kTogether;
#pragma GCC unroll 8
    for (int i = 0; i < kTogether; ++i) {
      if (i >= count) break;
      const F values = look_up_nf4(eight >> (8 * (i % 4) + i / 4 * 4));
      for (int m = 0; m < M; ++m) sum[m] = fma(values, splat(x[(k + i) * M + m]), sum[m]);
    }
  }
}

template <int M, bool Nf4>
void tile_of(const Panels& w, int64_t panel, const uint8_t* x, const PanelPrefetch& ahead, F* out) {
  const Coding& c = w.coding;
  const uint8_t* at = w.values + panel * w.panel_bytes();
  const int64_t header = c.header_bytes(), unit = c.unit_bytes();
  F total[M]{};
  BlockScales block;
  for (int64_t first = 0; first < w.inputs; first += kCodedBlock) {
    const int64_t end = w.inputs - first < kCodedBlock ? w.inputs - first : kCodedBlock;
    for (int64_t i = 0; i < header; i += 64) ahead.at(at, i);
    unpack_scales(c, at, block);
    at += header;
    for (int64_t k = 0; k < end; k += c.group) {
      const int64_t inputs = end - k < c.group ? end - k : c.group, units = ceil_div(inputs, kCodedUnit);
      for (int64_t i = 0; i < units * unit; i += 64) ahead.at(at, i);
      F sum[M]{};
      if constexpr (Nf4) {
        sum_nf4<M>(at, (const float*)x + (first + k) * M, units, inputs, sum);
      } else {
        sum_float8<M>(at, (const Float8Rows*)x + (first + k) / kFloat8Inputs * M, units, inputs, sum);
      }
      const F scale = load(block.scales[k / c.group]);
      for (int m = 0; m < M; ++m) total[m] = fma(sum[m], scale, total[m]);
      at += units * unit;
    }
  }
  for (int m = 0; m < M; ++m) out[m] = total[m];
}

template <bool Nf4>
constexpr CodedTile kFloatTiles[kTile] = {tile_of<1, Nf4>, tile_of<2, Nf4>, tile_of<3, Nf4>, tile_of<4, Nf4>,
                                          tile_of<5, Nf4>, tile_of<6, Nf4>, tile_of<7, Nf4>, tile_of<8, Nf4>};

}  // namespace

const CodedTile* float8_tiles() { return kFloatTiles<false>; }
const CodedTile* nf4_tiles() { return kFloatTiles<true>; }

}  // namespace quire::QUIRE_ISA
