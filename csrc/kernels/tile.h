// The inner loop of every product: up to 8 rows times one panel of 16 outputs, over all inputs.
//
// Each row has one accumulator of 16 outputs in a register; the order of its sum does not depend on M. The
// weights of a panel are read once per tile, in memory order. With 8 rows, AVX-512 executes 8 multiply-add
// instructions per load of weights: bf16 and f32 reach 97 to 99% of the peak of a core, int4 about 86% and
// int8 80%, since two groups of 32 inputs take 16 such instructions and, on the same ports, one for their
// block scales (int8: two), and each span one more. With AVX2, quantized rows are multiplied with half a
// panel (half.h), on ARM with a quarter (quarter.h); float weights meet the rows whose sums fit (part.h).
#pragma once

#include "half.h"
#include "kernels.h"
#include "panel_prefetch.h"
#include "quarter.h"
#include "vec.h"

namespace quire::QUIRE_ISA {

// Returns one part of input k of a panel; `odd` says whether k is, since bfloat16 are stored in pairs.
template <Format Of>
QUIRE_INLINE Part weights_of(const uint8_t* panel, int64_t k, bool odd, int part) {
  const int64_t first = k * kPanel + part * kPartLanes;
  if constexpr (Of == Format::f32) {
    return load_as<Part>((const float*)panel + first);
  } else if constexpr (Of == Format::f16) {
    return load_part_f16((const uint16_t*)panel + first);
  } else {  // the lower half of each lane is input k, the upper k + 1
    const PartU pair = load_as<PartU>(panel + (k - odd) * kPanel * 2 + part * sizeof(Part));
    return (Part)(odd ? pair & 0xffff0000u : pair << 16);
  }
}

// Computes rows `x` of a tile of M, those that follow the first ones of a panel if `Again`.
template <int Rows, int M, Format Of, bool Again = false>
QUIRE_INLINE void float_rows(const uint8_t* w, const float* x, int64_t inputs, const PanelPrefetch& ahead,
                             F* out) {
  constexpr int64_t kBytes = Of == Format::f32 ? 64 : 32;  // of one input
  Part acc[Rows][kParts]{};
  const auto add = [&](int64_t k, bool odd) __attribute__((always_inline)) {
    Part values[kParts];
    for (int i = 0; i < kParts; ++i) values[i] = weights_of<Of>(w, k, odd, i);
    for (int m = 0; m < Rows; ++m) {
      const Part own = splat_part(x[k * M + m]);
      for (int i = 0; i < kParts; ++i) acc[m][i] = fma(values[i], own, acc[m][i]);
    }
  };
  int64_t k = 0;
  for (; k + 1 < inputs; k += 2) {
    if constexpr (!Again)
      for (int64_t i = 0; i < 2 * kBytes; i += 64) ahead.at<M>(w, k * kBytes + i);
    add(k, false);
    add(k + 1, true);
  }
  if (k < inputs) add(k, false);
  for (int m = 0; m < Rows; ++m)
    for (int i = 0; i < kParts; ++i) store_as((Part*)(out + m) + i, acc[m][i]);
}

// out[m] = sum over k of x[k][m] * w[k][16], with weights of a float format, widened as they are read.
template <int M, Format Of>
QUIRE_INLINE void tile_floats(const uint8_t* w, const float* x, int64_t inputs, const PanelPrefetch& ahead,
                              F* out) {
  constexpr int kFirst = M < kPartRows ? M : kPartRows;
  float_rows<kFirst, M, Of>(w, x, inputs, ahead, out);
  if constexpr (M > kFirst) float_rows<M - kFirst, M, Of, true>(w, x + kFirst, inputs, ahead, out + kFirst);
}

#if defined(__AVX512BF16__)
template <int M>
QUIRE_INLINE void tile_bf16(const uint8_t* w, const int32_t* x, int64_t inputs, const PanelPrefetch& ahead,
                            F* out) {
  F acc[M]{};
  const int64_t pairs = ceil_div(inputs, 2);
#pragma GCC unroll 4
  for (int64_t k = 0; k < pairs; ++k) {
    const B64 values = load_as<B64>(w + k * 64);
    ahead.at<M>(w, k * 64);
    for (int m = 0; m < M; ++m) acc[m] = dot2_bf16(acc[m], values, x[k * M + m]);
  }
  for (int m = 0; m < M; ++m) out[m] = acc[m];
}
#endif

// Adds one group of 32 inputs: acc[m] + sum of w * x, exact in 32 bits. `x` is [8][M] of 4 bytes.
template <int M, bool Int4>
QUIRE_INLINE void group_dot(const uint8_t* panel, int64_t offset, const int32_t* x,
                            const PanelPrefetch& ahead, I* acc) {
  if constexpr (Int4) {
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) {
      const B64 both = load_as<B64>(panel + offset + k * 64);
      ahead.at<M>(panel, offset + k * 64);
      const B64 low = both & 15, high = (B64)((U)both >> 4) & 15;
      for (int m = 0; m < M; ++m) acc[m] = dot4<true>(acc[m], low, x + 2 * k * M + m);
      for (int m = 0; m < M; ++m) acc[m] = dot4<true>(acc[m], high, x + (2 * k + 1) * M + m);
    }
  } else {
#pragma GCC unroll 8
    for (int k = 0; k < 8; ++k) {
      const B64 values = load_as<B64>(panel + offset + k * 64);
      ahead.at<M>(panel, offset + k * 64);
      for (int m = 0; m < M; ++m) acc[m] = dot4<false>(acc[m], values, x + k * M + m);
    }
  }
}

// True if two groups are scaled by one instruction. With one or two rows of int4, latency would dominate.
template <bool Int4>
QUIRE_INLINE constexpr bool in_pairs(int64_t rows) {
#if defined(__AVX512VNNI__)
  return !Int4 || rows > 2;
#else
  (void)rows;
  return false;
#endif
}

// The initial value of the sum of a group, besides the zero point of the weights (see QuantizedTile).
template <bool Int4>
QUIRE_INLINE constexpr int32_t begin_of_group(int64_t group, int64_t rows) {
  return !Int4 ? 8 : in_pairs<Int4>(rows) && group % 2 == 1 ? 1 << 15 : 0;
}

constexpr int64_t kScalesAhead = 512;

// True if quantized rows of int8 and int4 lie two words at a time: kernels.h.
#if defined(QUIRE_QUARTER_PANELS)
constexpr bool kPairsOfQuads = true;
#else
constexpr bool kPairsOfQuads = false;
#endif

// A product of quantized rows with one panel. Within a span, the sum over groups is one of integers:
//
//   int4: dot * block scale of the weights
//   int8: (dot / 16, rounded to 16 bits) * block scale of the weights * block scale of the row
//
// where |dot| is below 2^15 and 2^19, so that the sum of a span is below 2^31. It is multiplied by the scale
// of the span, and the total by the channel scale of the output.
template <int M, bool Int4>
class QuantizedTile {
 public:
  QUIRE_INLINE QuantizedTile(const Panels& w, int64_t panel, const uint8_t* x, const PanelPrefetch& ahead)
      : groups_(w.groups()),
        values_(w.values + panel * groups_ * kBytes),
        block_scales_(w.block_scales + panel * groups_ * kPanel),
        quads_((const int32_t*)x),
        begin_(quads_ + groups_ * (kGroup / 4) * M),
        row_scales_(begin_ + groups_ * M),
        scales_((const float*)(row_scales_ + (Int4 ? 0 : ceil_div(groups_, 2) * M))),
        ahead_(ahead) {}

  // Computes out[m] without the channel scale.
  QUIRE_INLINE void run(F* out) const {
#if defined(QUIRE_HALF_PANELS)
    if constexpr (M <= 2) {
      run_halves<M, 2>(0, 0, out);
    } else {
      constexpr int kFirst = M > 4 ? 4 : M;
      for (int half = 0; half < 2; ++half) {
        run_halves<kFirst, 1>(half, 0, out);
        if constexpr (M > kFirst) run_halves<M - kFirst, 1>(half, kFirst, out);
      }
    }
#elif defined(QUIRE_QUARTER_PANELS)
    constexpr int kQuarters = M <= 2 ? 4 : M <= 4 ? 2 : 1;  // whose sums fit in registers
    for (int quarter = 0; quarter < 4; quarter += kQuarters) run_quarters<kQuarters>(quarter, out);
#else
    run_panel(out);
#endif
  }

 private:
  static constexpr int64_t kBytes = Int4 ? kGroup * kPanel / 2 : kGroup * kPanel;
  static constexpr int64_t kTogether = kSpan / kGroup;

  QUIRE_INLINE int32_t row_scale(int64_t group, int m) const {
    return ((const int16_t*)(row_scales_ + group / 2 * M + m))[1 - group % 2];
  }

#if defined(QUIRE_HALF_PANELS)
  // Computes rows from `row` on, of eight outputs from `half` on, or of all.
  template <int Rows, int Halves>
  QUIRE_INLINE void run_halves(int half, int row, F* out) const {
    using Codes = HalfCodes<Int4 ? 4 : 8>;
    const uint8_t* const values = values_ + half * 32;
    HalfF acc[Halves * Rows]{};
    for (int64_t first = 0; first < groups_; first += kTogether) {
      const int64_t last = first + kTogether < groups_ ? first + kTogether : groups_;
      HalfI sum[Halves * Rows]{};
      for (int64_t g = first; g < last; ++g) {
        HalfI dots[Halves * Rows];
        if (half == 0 && row == 0)
          for (int64_t i = 0; i < kBytes; i += 64) ahead_.at<M>(values_, g * kBytes + i);
        const int32_t *const begin = begin_ + g * M + row, more = begin_of_group<Int4>(g, M);
        for (int i = 0; i < Halves * Rows; ++i) dots[i] = HalfI{} + (Codes::kSigned ? more : begin[i % Rows]);
        dot_halves<Rows, Halves, Codes>(values + g * kBytes, quads_ + g * (kGroup / 4) * M + row, M,
                                        __m256i{}, dots);
        for (int h = 0; h < Halves; ++h) {
          const HalfI block_scale = load_part_s8(block_scales_ + g * kPanel + (half + h) * 8);
          for (int m = 0; m < Rows; ++m) {
            HalfI& own = sum[h * Rows + m];
            if constexpr (Int4) {
              own = multiply_add_s16(own, dots[h * Rows + m], block_scale);
            } else {
              own = multiply_add_s16(own, dots[h * Rows + m] >> 4,
                                     multiply_s16(block_scale, row_scale(g, row + m)));
            }
          }
        }
      }
      prefetch(block_scales_ + first * kPanel + kScalesAhead);
      const float* scales = scales_ + first / kTogether * M + row;
      for (int i = 0; i < Halves * Rows; ++i)
        acc[i] = fma(__builtin_convertvector(sum[i], HalfF), (HalfF)_mm256_set1_ps(scales[i % Rows]), acc[i]);
    }
    for (int h = 0; h < Halves; ++h)
      for (int m = 0; m < Rows; ++m) store_as((HalfF*)(out + row + m) + half + h, acc[h * Rows + m]);
  }
#elif defined(QUIRE_QUARTER_PANELS)
  // Computes the four outputs of each quarter from `quarter` on.
  template <int Quarters>
  QUIRE_INLINE void run_quarters(int quarter, F* out) const {
    constexpr int kOwn = kRegisters<M>, kAll = Quarters * kOwn;
    const uint8_t* const values = values_ + quarter * 16;
    float32x4_t acc[kAll]{};
    for (int64_t first = 0; first < groups_; first += kTogether) {
      const int64_t last = first + kTogether < groups_ ? first + kTogether : groups_;
      int32x4_t sum[kAll]{};
      for (int64_t g = first; g < last; ++g) {
        int32x4_t dots[kAll];
        if (quarter == 0)
          for (int64_t i = 0; i < kBytes; i += 64) ahead_.at<M>(values_, g * kBytes + i);
        dot_quarters<M, Quarters, Int4>(values + g * kBytes, quads_ + g * (kGroup / 4) * M, begin_ + g * M,
                                        begin_of_group<Int4>(g, M), dots);
#pragma GCC unroll 8
        for (int i = 0; i < kAll; ++i) {
          const int8_t* const four = block_scales_ + g * kPanel + (quarter + i / kOwn) * 4;
          const int32x4_t block_scale = of_outputs<M>(load_quarter_s8(four), i % kOwn);
          if constexpr (Int4) {
            sum[i] += dots[i] * block_scale;
          } else {
            const int32x4_t both = of_rows<M>(row_scales_ + g / 2 * M, i % kOwn);
            sum[i] += (dots[i] >> 4) * (block_scale * (g % 2 ? both & 0xffff : both >> 16));
          }
        }
      }
      prefetch(block_scales_ + first * kPanel + kScalesAhead);
      const int32_t* const scales = (const int32_t*)scales_ + first / kTogether * M;
#pragma GCC unroll 8
      for (int i = 0; i < kAll; ++i)
        acc[i] = vfmaq_f32(acc[i], vcvtq_f32_s32(sum[i]), (float32x4_t)of_rows<M>(scales, i % kOwn));
    }
#pragma GCC unroll 4
    for (int q = 0; q < Quarters; ++q) store_quarter<M>(acc + q * kOwn, quarter + q, out);
  }
#else
  QUIRE_INLINE void run_panel(F* out) const {
    F acc[M]{};
    for (int64_t first = 0; first < groups_; first += kTogether) {
      const int64_t last = first + kTogether < groups_ ? first + kTogether : groups_;
      I sum[M]{};
      int64_t g = first;
#if defined(__AVX512VNNI__)
      if constexpr (in_pairs<Int4>(M))
        for (; g + 1 < last; g += 2) add_pair(g, sum);
#endif
      for (; g < last; ++g) add(g, sum);
      prefetch(block_scales_ + first * kPanel + kScalesAhead);
      const float* scales = scales_ + first / kTogether * M;
      for (int m = 0; m < M; ++m) acc[m] = fma(to_float(sum[m]), splat(scales[m]), acc[m]);
    }
    for (int m = 0; m < M; ++m) out[m] = acc[m];
  }

  QUIRE_INLINE void dot(int64_t group, I* acc) const {
    group_dot<M, Int4>(values_, group * kBytes, quads_ + group * (kGroup / 4) * M, ahead_, acc);
  }

  QUIRE_INLINE void add(int64_t group, I* sum) const {
    I dots[M];
    for (int m = 0; m < M; ++m) dots[m] = splat(begin_[group * M + m]);
    dot(group, dots);
    const I block_scale = load_s8(block_scales_ + group * kPanel);
    for (int m = 0; m < M; ++m) {
      if constexpr (Int4) {
        sum[m] += dots[m] * block_scale;
      } else {
        sum[m] += (dots[m] >> 4) * (block_scale * row_scale(group, m));
      }
    }
  }
#endif

#if defined(__AVX512VNNI__)
  // Scales two groups by one instruction on pairs of 16 bits, the first group in the upper half.
  QUIRE_INLINE void add_pair(int64_t group, I* sum) const {
    const I first = load_s8(block_scales_ + group * kPanel),
            second = load_s8(block_scales_ + (group + 1) * kPanel);
    const I block_scales = join_s16(second, first << 16);
    I dots[M], upper[M];
    for (int m = 0; m < M; ++m) dots[m] = splat(begin_[group * M + m]);
    dot(group, dots);
    // The second group of int4 is added below the first, starting at 2^15 so that there is no borrow.
    for (int m = 0; m < M; ++m) {
      const I begin = splat(begin_[(group + 1) * M + m]);
      if (!Int4) upper[m] = dots[m] << 12;
      dots[m] = Int4 ? (dots[m] << 16) + begin : begin;
    }
    dot(group + 1, dots);
    for (int m = 0; m < M; ++m) {
      if constexpr (Int4) {
        sum[m] = dot2_s16(sum[m], dots[m] ^ 0x8000, block_scales);
      } else {
        const I weights = multiply_s16(block_scales, splat(row_scales_[group / 2 * M + m]));
        sum[m] = dot2_s16(sum[m], join_s16(dots[m] >> 4, upper[m]), weights);
      }
    }
  }
#endif

  const int64_t groups_;
  const uint8_t* const values_;
  const int8_t* const block_scales_;
  const int32_t *const quads_, *const begin_, *const row_scales_;
  const float* const scales_;
  const PanelPrefetch& ahead_;
};

// The same for coded weights, one function per number of rows (coded.cpp).
using CodedTile = void (*)(const Panels&, int64_t panel, const uint8_t* x, const PanelPrefetch&, F* out);
const CodedTile* coded_tiles(const Coding& coding);
const CodedTile* row_tiles();                        // coded_rows.cpp
const CodedTile* half_tiles(const Coding& coding);   // coded_halves.cpp; null of some kinds
const CodedTile* part_tiles(const Coding& coding);   // coded_parts.cpp
const CodedTile* float_tiles(const Coding& coding);  // coded_floats.cpp

// True if the sums of eight rows times two panels fit in registers, and dot products of bytes are fast.
#if defined(__AVX512VNNI__)
constexpr bool kWide = true;
#else
constexpr bool kWide = false;
#endif

// Up to four tiles of eight rows, `bytes` apart.
constexpr int kWideTiles = 4;
struct Tiles {
  const uint8_t* x;
  int64_t bytes, count;
};

// Return the function that multiplies tiles with two panels, out [tile][2][8], or one row with one panel; or
// null (coded_wide.cpp).
using CodedTiles = void (*)(const Panels&, int64_t panel, const Tiles&, const PanelPrefetch&, F* out);
CodedTiles wide_tiles(const Panels& w);
CodedTiles one_row(const Coding& coding);
CodedTiles wide_row_tiles();  // coded_rows.cpp
CodedTiles two_row_tiles();   // two tiles and one panel

template <int M, Format Of>
QUIRE_INLINE void tile(const Panels& w, int64_t panel, const uint8_t* x, const PanelPrefetch& ahead, F* out) {
  const uint8_t* values = w.values + panel * w.panel_bytes();
  if constexpr (Of == Format::int8 || Of == Format::int4) {
    QuantizedTile<M, Of == Format::int4>(w, panel, x, ahead).run(out);
    const F channel = load(w.channels + panel * kPanel);
    for (int m = 0; m < M; ++m) out[m] *= channel;
  } else if constexpr (Of == Format::coded) {
    if constexpr (M == 1 && kWide)
      if (const CodedTiles one = one_row(w.coding)) return one(w, panel, {x, 0, 1}, ahead, out);
    coded_tiles(w.coding)[M - 1](w, panel, x, ahead, out);
  } else {
#if defined(__AVX512BF16__)
    if constexpr (Of == Format::bf16) return tile_bf16<M>(values, (const int32_t*)x, w.inputs, ahead, out);
#endif
    tile_floats<M, Of>(values, (const float*)x, w.inputs, ahead, out);
  }
}

}  // namespace quire::QUIRE_ISA
