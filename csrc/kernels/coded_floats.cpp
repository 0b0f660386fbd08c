// Products with codes that mean floats: of 8 bits, or 4-bit codes with a table of floats.
//
// e4m3 and e5m2 become bfloat16 in registers, exactly, since they have fewer bits. Where the instruction set
// multiplies pairs of bfloat16, activations are rounded to it, as for bf16 weights; elsewhere codes are
// looked up as float32. Tables of floats are always looked up. The sum of a group of inputs is multiplied by
// its scale: acc = fma(sum, scale, acc).

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

// What bytes of a bfloat16 are: the upper one without its sign, by the upper bits of a code; both, by the
// lower half of a code whose exponent is 0 or small.
struct Float8Tables {
  __m512i exponents, small_exponents, small_fractions;
};

template <Meaning Of>
QUIRE_INLINE Float8Tables float8_tables() {
  if constexpr (Of == Meaning::e4m3) {
    return {table_of_16(0x434241403f3e3d3c, 0x434241403f3e3d3c),
            table_of_16(0x3c3c3c3c3b3b3b00, 0x3c3c3c3c3c3c3c3c),
            table_of_16(0x60402000c0800000, 0xf0e0d0c0b0a09080)};
  } else {
    return {table_of_16(0x3f3e3d3c3b3a3938, 0x4746454443424140),
            table_of_16(0x3838383838383700, 0x3939393939393939),
            table_of_16(0xe0c0a08040008000, 0xe0c0a08060402000)};
  }
}

// Converts 64 codes to two vectors of pairs of bfloat16.
//
// A code is sign, exponent, fraction: of 4 and 3 bits, or 5 and 2. The upper byte of the bfloat16 has sign
// and exponent without its last bit, which the bits of the code above the lower 4, or 3, determine; the
// lower byte has that bit and the fraction, which are these lower bits. Codes whose three bits after the
// sign are 0 have tables of their own, since their exponent may be 0.
template <Meaning Of>
QUIRE_INLINE void widen_float8(B64 codes, B64* first, B64* second) {
  constexpr int kLow = Of == Meaning::e4m3 ? 4 : 3;
  const Float8Tables tables = float8_tables<Of>();
  const __m512i w = (__m512i)codes, half = _mm512_set1_epi8(15);
  const __m512i lower = _mm512_and_si512(w, half), upper = _mm512_and_si512(_mm512_srli_epi16(w, kLow), half);
  const __m512i rest = _mm512_and_si512(w, _mm512_set1_epi8((1 << kLow) - 1));
  const __mmask64 small = _mm512_testn_epi8_mask(w, _mm512_set1_epi8(0x70));
  const __m512i low =
      _mm512_mask_shuffle_epi8(_mm512_slli_epi16(rest, 8 - kLow), small, tables.small_fractions, lower);
  __m512i high = _mm512_shuffle_epi8(tables.exponents, upper);
  high = _mm512_mask_shuffle_epi8(high, small, tables.small_exponents, lower);
  high = _mm512_ternarylogic_epi32(high, w, _mm512_set1_epi8((char)0x80), 0xf8);  // high | (w & 0x80)
  *first = (B64)_mm512_unpacklo_epi8(low, high);
  *second = (B64)_mm512_unpackhi_epi8(low, high);
}

// Sums inputs [begin, end) of a block, whole fours; `x` are its activations. Pairs of inputs alternate
// between two sums, which do not wait for each other, whatever M is.
template <int M, Meaning Of>
QUIRE_INLINE void sum_float8(const uint8_t* at, const int32_t* x, int64_t begin, int64_t end, F* sum) {
  F odd[M]{};
  for (int64_t quad = begin / 4; quad < ceil_div(end, 4); ++quad) {
    B64 first, second;
    widen_float8<Of>(load_as<B64>(at + quad * 64), &first, &second);
    for (int m = 0; m < M; ++m) sum[m] = dot2_bf16(sum[m], first, x[2 * quad * M + m]);
    for (int m = 0; m < M; ++m) odd[m] = dot2_bf16(odd[m], second, x[(2 * quad + 1) * M + m]);
  }
  for (int m = 0; m < M; ++m) sum[m] += odd[m];
}
using Float8Rows = int32_t;  // pairs of bfloat16
constexpr int kFloat8Inputs = 2;
#else

template <int M, Meaning Of>
QUIRE_INLINE void sum_float8(const uint8_t* at, const float* x, int64_t begin, int64_t end, F* sum) {
  const float* const numbers = Of == Meaning::e4m3 ? kE4m3.of : kE5m2.of;
  for (int64_t k = begin; k < end; ++k) {
    F values;
    for (int lane = 0; lane < kPanel; ++lane) values[lane] = numbers[at[float8_place(k, lane)]];
    for (int m = 0; m < M; ++m) sum[m] = fma(values, splat(x[k * M + m]), sum[m]);
  }
}
using Float8Rows = float;
constexpr int kFloat8Inputs = 1;
#endif

// Returns the numbers of 16 codes: the low 4 bits of each lane.
QUIRE_INLINE F look_up_floats(const float* table, U codes) {
#if defined(__AVX512F__)
  return (F)_mm512_permutexvar_ps((__m512i)codes, (__m512)load(table));
#else
  F out;
  for (int i = 0; i < kLanes; ++i) out[i] = table[codes[i] & 15];
  return out;
#endif
}

// Sums inputs [begin, end) of a block, at most eight of which are in the same 64 bytes.
template <int M>
QUIRE_INLINE void sum_eight(const float* table, const uint8_t* at, const float* x, int64_t begin, int64_t end,
                            F* sum) {
  const U eight = load_as<U>(at + begin / 8 * 64);
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    const int64_t k = begin / 8 * 8 + i;
    if (k < begin || k >= end) continue;
    const F values = look_up_floats(table, eight >> (8 * (i % 4) + i / 4 * 4));
    for (int m = 0; m < M; ++m) sum[m] = fma(values, splat(x[k * M + m]), sum[m]);
  }
}

template <int M>
QUIRE_INLINE void sum_floats(const float* table, const uint8_t* at, const float* x, int64_t begin,
                             int64_t end, F* sum) {
  for (int64_t k = begin; k < end; k += 8) sum_eight<M>(table, at, x, k, k + 8 < end ? k + 8 : end, sum);
}

template <int M, Meaning Of>
void tile_of(const Panels& w, int64_t panel, const uint8_t* x, const PanelPrefetch& ahead, F* out) {
  const Coding& c = w.coding;
  const uint8_t* at = w.values + panel * w.panel_bytes();
  const int64_t header = c.header_bytes(), unit = c.unit_bytes();
  F total[M]{};
  PartScales block;
  for (int64_t first = 0; first < w.inputs; first += kCodedBlock) {
    const int64_t inputs = w.inputs - first < kCodedBlock ? w.inputs - first : kCodedBlock;
    for (int64_t i = 0; i < header; i += 64) ahead.at<M>(at, i);
    unpack_scales(c, at, block);
    at += header;
    for (int64_t k = 0; k < inputs; k += c.group) {
      const int64_t end = inputs - k < c.group ? inputs : k + c.group;
      if (k % kCodedUnit == 0)
        for (int64_t i = k / kCodedUnit * unit; i < ceil_div(end, kCodedUnit) * unit; i += 64)
          ahead.at<M>(at, i);
      F sum[M]{};
      if constexpr (Of == Meaning::floats) {
        sum_floats<M>(w.table, at, (const float*)x + first * M, k, end, sum);
      } else {
        sum_float8<M, Of>(at, (const Float8Rows*)x + first / kFloat8Inputs * M, k, end, sum);
      }
      const F scale = load(block.scales[k / c.group]);
      for (int m = 0; m < M; ++m) total[m] = fma(sum[m], scale, total[m]);
    }
    at += ceil_div(inputs, kCodedUnit) * unit;
  }
  for (int m = 0; m < M; ++m) out[m] = total[m];
}

template <Meaning Of>
constexpr CodedTile kFloatTiles[kTile] = {tile_of<1, Of>, tile_of<2, Of>, tile_of<3, Of>, tile_of<4, Of>,
                                          tile_of<5, Of>, tile_of<6, Of>, tile_of<7, Of>, tile_of<8, Of>};

}  // namespace

const CodedTile* float_tiles(const Coding& coding) {
  switch (coding.meaning) {
    case Meaning::e4m3:
      return kFloatTiles<Meaning::e4m3>;
    case Meaning::e5m2:
      return kFloatTiles<Meaning::e5m2>;
    default:
      return kFloatTiles<Meaning::floats>;
  }
}

}  // namespace quire::QUIRE_ISA
