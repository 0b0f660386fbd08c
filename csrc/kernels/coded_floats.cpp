// Products with codes that mean floats: of 8 bits, or 4-bit codes with a table of floats.
//
// e4m3 and e5m2 become bfloat16 in registers, exactly, since they have fewer bits. Where the instruction set
// multiplies pairs of bfloat16, activations are rounded to it, as for bf16 weights; elsewhere codes become
// float32: with AVX2 by way of bfloat16, in other sets they are looked up. Tables of floats are always looked
// up. The sum of a group of inputs is multiplied by its scale: acc = fma(sum, scale, acc).

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

// Sums inputs [begin, end) of a block, whole fours; `x` are its activations, [pair][M]. Pairs of inputs
// alternate between two sums, which do not wait for each other, whatever M is.
template <int M, int N, Meaning Of>
QUIRE_INLINE void sum_float8(const uint8_t* at, int, const int32_t* x, int64_t begin, int64_t end,
                             Part (*sum)[N]) {
  F odd[M]{};
  for (int64_t quad = begin / 4; quad < ceil_div(end, 4); ++quad) {
    B64 first, second;
    widen_float8<Of>(load_as<B64>(at + quad * 64), &first, &second);
    for (int m = 0; m < M; ++m) sum[m][0] = dot2_bf16(sum[m][0], first, x[2 * quad * M + m]);
    for (int m = 0; m < M; ++m) odd[m] = dot2_bf16(odd[m], second, x[(2 * quad + 1) * M + m]);
  }
  for (int m = 0; m < M; ++m) sum[m][0] += odd[m];
}
using Float8Rows = int32_t;  // pairs of bfloat16
constexpr int kFloat8Inputs = 2;
#else

#if QUIRE_PARTS == 2
QUIRE_INLINE __m256i table_of_16(uint64_t first, uint64_t second) {
  return _mm256_broadcastsi128_si256(_mm_set_epi64x((int64_t)second, (int64_t)first));
}
#endif

// Converts the codes of 4 inputs and part `i` of the outputs to float32.
template <Meaning Of>
QUIRE_INLINE void widen_float8(const uint8_t* quad, int i, Part* values) {
#if QUIRE_PARTS == 2
  // As with AVX-512, but the lower byte of a bfloat16 is shifted out of the code, and the tables of small
  // exponents hold what is to be added to either byte, nothing where they are not small.
  constexpr bool kIsE4m3 = Of == Meaning::e4m3;
  constexpr int kLow = kIsE4m3 ? 4 : 3;
  const __m256i exponents = kIsE4m3 ? table_of_16(0x434241403f3e3d3c, 0xc3c2c1c0bfbebdbc)
                                    : table_of_16(0x3f3e3d3c3b3a3938, 0x4746454443424140);
  const __m256i more_exponent =
      kIsE4m3 ? table_of_16(0x00000000ffffffc4, 0) : table_of_16(0, 0x000000000000ffc8);
  const __m256i more_fraction =
      kIsE4m3 ? table_of_16(0xf0e0d0c09060f000, 0) : table_of_16(0, 0x00000000e0c06000);
  const __m256i codes = load_as<__m256i>(quad + i * 32), half = _mm256_set1_epi8(15);
  const __m256i rest = _mm256_and_si256(codes, _mm256_set1_epi8((1 << kLow) - 1));
  const __m256i upper = _mm256_and_si256(_mm256_srli_epi16(codes, kLow), half);
  // Of an exponent that is not small the upper bit is set, for which a table gives 0.
  const __m256i small =
      _mm256_adds_epu8(_mm256_and_si256(codes, _mm256_set1_epi8(0x7f)), _mm256_set1_epi8(0x80 - (1 << kLow)));
  __m256i high = _mm256_shuffle_epi8(exponents, upper);
  if constexpr (!kIsE4m3)  // its sign is not among the upper four bits
    high = _mm256_or_si256(high, _mm256_and_si256(codes, _mm256_set1_epi8((char)0x80)));
  high = _mm256_add_epi8(high, _mm256_shuffle_epi8(more_exponent, small));
  const __m256i low =
      _mm256_add_epi8(_mm256_slli_epi16(rest, 8 - kLow), _mm256_shuffle_epi8(more_fraction, small));
  const __m256i upper_half = _mm256_set1_epi32((int)0xffff0000);
  const __m256i first = _mm256_unpacklo_epi8(low, high), second = _mm256_unpackhi_epi8(low, high);
  values[0] = (Part)_mm256_slli_epi32(first, 16);
  values[1] = (Part)_mm256_and_si256(first, upper_half);
  values[2] = (Part)_mm256_slli_epi32(second, 16);
  values[3] = (Part)_mm256_and_si256(second, upper_half);
#else
  const float* const numbers = Of == Meaning::e4m3 ? kE4m3.of : kE5m2.of;
  for (int k = 0; k < 4; ++k)
    for (int lane = 0; lane < kPartLanes; ++lane)
      values[k][lane] = numbers[quad[float8_place(k, i * kPartLanes + lane)]];
#endif
}

template <int M, int N, Meaning Of>
QUIRE_INLINE void sum_float8(const uint8_t* at, int part, const float* x, int64_t begin, int64_t end,
                             Part (*sum)[N]) {
  for (int64_t k = begin; k < end; k += 4) {
    Part values[N][4];
    for (int i = 0; i < N; ++i) widen_float8<Of>(at + k / 4 * 64, part + i, values[i]);
    for (int j = 0; j < 4; ++j) {
      if (k + j >= end) continue;
      for (int m = 0; m < M; ++m) {
        const Part own = splat_part(x[(k + j) * M + m]);
        for (int i = 0; i < N; ++i) sum[m][i] = fma(values[i][j], own, sum[m][i]);
      }
    }
  }
}
using Float8Rows = float;
constexpr int kFloat8Inputs = 1;
#endif

// A table of 16 floats. With AVX2 it is one of bytes for each byte of a float: looking up four bytes and
// joining them takes less than choosing among sixteen floats.
struct FloatTable {
#if QUIRE_PARTS == 2
  __m256i bytes[4];
#else
  const float* numbers;
#endif
};

QUIRE_INLINE FloatTable float_table(const float* numbers) {
#if QUIRE_PARTS == 2
  FloatTable table;
  for (int byte = 0; byte < 4; ++byte) {
    uint8_t own[16];
    for (int i = 0; i < 16; ++i) own[i] = ((const uint8_t*)(numbers + i))[byte];
    table.bytes[byte] = _mm256_broadcastsi128_si256(load_as<__m128i>(own));
  }
  return table;
#else
  return {numbers};
#endif
}

// Looks up the codes of inputs 4 h to 4 h + 3 of eight, whose bytes `codes` has for each lane.
QUIRE_INLINE void look_up_four(const FloatTable& table, PartU codes, int h, Part* values) {
#if QUIRE_PARTS == 2
  const __m256i by_input =  // four outputs of each
      _mm256_broadcastsi128_si256(_mm_set_epi8(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0));
  const __m256i both = _mm256_shuffle_epi8((__m256i)codes, by_input);
  const __m256i at = _mm256_and_si256(h ? _mm256_srli_epi16(both, 4) : both, _mm256_set1_epi8(15));
  __m256i bytes[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) bytes[i] = _mm256_shuffle_epi8(table.bytes[i], at);
  const __m256i low[2] = {_mm256_unpacklo_epi8(bytes[0], bytes[1]), _mm256_unpackhi_epi8(bytes[0], bytes[1])};
  const __m256i high[2] = {_mm256_unpacklo_epi8(bytes[2], bytes[3]),
                           _mm256_unpackhi_epi8(bytes[2], bytes[3])};
#pragma GCC unroll 2
  for (int pair = 0; pair < 2; ++pair) {
    values[2 * pair] = (Part)_mm256_unpacklo_epi16(low[pair], high[pair]);
    values[2 * pair + 1] = (Part)_mm256_unpackhi_epi16(low[pair], high[pair]);
  }
#else
  for (int j = 0; j < 4; ++j) {
    const PartU own = codes >> (8 * j + 4 * h);
#if defined(__AVX512F__)
    values[j] = (F)_mm512_permutexvar_ps((__m512i)own, (__m512)load(table.numbers));
#else
    for (int i = 0; i < kPartLanes; ++i) values[j][i] = table.numbers[own[i] & 15];
#endif
  }
#endif
}

// Sums inputs [begin, end) of a block, some or, if `Whole`, all of the eight that are in the same 64 bytes.
template <int M, int N, bool Whole>
QUIRE_INLINE void sum_eight(const FloatTable& table, const uint8_t* at, int part, const float* x,
                            int64_t begin, int64_t end, Part (*sum)[N]) {
  const int64_t first = begin / 8 * 8;
#pragma GCC unroll 2
  for (int h = 0; h < 2; ++h)
#pragma GCC unroll 2
    for (int i = 0; i < N; ++i) {
      Part values[4];
      look_up_four(table, load_as<PartU>(at + first * 8 + (part + i) * 4 * kPartLanes), h, values);
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        const int64_t k = first + 4 * h + j;
        if (!Whole && (k < begin || k >= end)) continue;
        for (int m = 0; m < M; ++m) sum[m][i] = fma(values[j], splat_part(x[k * M + m]), sum[m][i]);
      }
    }
}

template <int M, int N>
QUIRE_INLINE void sum_floats(const FloatTable& table, const uint8_t* at, int part, const float* x,
                             int64_t begin, int64_t end, Part (*sum)[N]) {
  int64_t k = begin;
  for (; k % 8 == 0 && k + 8 <= end; k += 8) sum_eight<M, N, true>(table, at, part, x, k, k + 8, sum);
  if (k < end) sum_eight<M, N, false>(table, at, part, x, k, end, sum);
}

// Adds `inputs` inputs, from input `first` on, of the rows `x` to `total`: of N parts of the outputs, from
// `part` on. `at` are their codes, fetched `ahead` of use if it is given.
template <int M, int N, Meaning Of>
QUIRE_INLINE void add_block(const Panels& w, const FloatTable& table, const PartScales& block,
                            const uint8_t* at, int part, const uint8_t* x, int64_t first, int64_t inputs,
                            const PanelPrefetch* ahead, Part (*total)[N]) {
  const int64_t group = w.coding.group, unit = w.coding.unit_bytes();
  for (int64_t k = 0; k < inputs; k += group) {
    const int64_t end = inputs - k < group ? inputs : k + group;
    if (ahead && k % kCodedUnit == 0)
      for (int64_t i = k / kCodedUnit * unit; i < ceil_div(end, kCodedUnit) * unit; i += 64)
        ahead->at<M>(at, i);
    Part sum[M][N]{};
    if constexpr (Of == Meaning::floats) {
      sum_floats<M, N>(table, at, part, (const float*)x + first * M, k, end, sum);
    } else {
      sum_float8<M, N, Of>(at, part, (const Float8Rows*)x + first / kFloat8Inputs * M, k, end, sum);
    }
    for (int i = 0; i < N; ++i) {
      const Part scale = load_as<Part>(block.scales[k / group] + (part + i) * kPartLanes);
      for (int m = 0; m < M; ++m) total[m][i] = fma(sum[m][i], scale, total[m][i]);
    }
  }
}

template <int M, Meaning Of>
void tile_of(const Panels& w, int64_t panel, const uint8_t* x, const PanelPrefetch& ahead, F* out) {
  constexpr int N = M <= kPartRows ? kParts : 1;  // parts at a time, whose sums fit in registers
  const Coding& c = w.coding;
  const uint8_t* at = w.values + panel * w.panel_bytes();
  const int64_t header = c.header_bytes();
  Part total[kParts / N][M][N]{};
  PartScales block;
  const FloatTable table = Of == Meaning::floats ? float_table(w.table) : FloatTable{};
  for (int64_t first = 0; first < w.inputs; first += kCodedBlock) {
    const int64_t inputs = w.inputs - first < kCodedBlock ? w.inputs - first : kCodedBlock;
    for (int64_t i = 0; i < header; i += 64) ahead.at<M>(at, i);
    unpack_scales(c, at, block);
    at += header;
    for (int i = 0; i < kParts; i += N)
      add_block<M, N, Of>(w, table, block, at, i, x, first, inputs, i ? nullptr : &ahead, total[i / N]);
    at += ceil_div(inputs, kCodedUnit) * c.unit_bytes();
  }
  for (int m = 0; m < M; ++m)
    for (int i = 0; i < kParts; ++i) store_as((Part*)(out + m) + i, total[i / N][m][i % N]);
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
