// The heart of every product: up to 8 rows times one panel of 16 outputs, over all inputs.
//
// One accumulator a row and 16 outputs stays in a register; a row's sum runs in one order whatever M is. The
// weights of a panel are read once for the tile, in the order they lie in memory. With 8 rows, AVX-512 does 8
// multiply-add instructions for each load of weights: bf16 and f32 reach 97 to 99% of the peak of a core,
// int4 84% and int8 79%: a group of 32 inputs takes 8 such instructions and, on the same ports, one for its
// scale, and each row group one more.
#pragma once

#include "kernels.h"
#include "vec.h"

namespace quire::QUIRE_ISA {

// Asks for weights before they are needed. One tile of rows asks for what it reads next itself. Of several,
// which read a panel again while it is near, each asks for its share of the next panel: memory is never idle.
class Ahead {
 public:
  QUIRE_INLINE Ahead(int64_t panel_bytes, int64_t tile, int64_t tiles) : alone_(tiles == 1) {
    while (tiles >> (shift_ + 1)) ++shift_;
    distance_ = alone_ ? kNext : panel_bytes + ((tile * panel_bytes) >> shift_);
  }
  // Called for each 64 bytes of a panel that begins at `values`.
  QUIRE_INLINE void at(const void* values, int64_t offset) const {
    const char* where = (const char*)values + distance_ + (offset >> shift_);
    alone_ ? __builtin_prefetch(where, 0, kNearest) : __builtin_prefetch(where, 0, kSecondLevel);
  }

 private:
  static constexpr int64_t kNext = 2048;
  static constexpr int kSecondLevel = 2, kNearest = 3;
  bool alone_;
  int shift_ = 0;
  int64_t distance_;
};

// out[m] = sum over k of x[k][m] * w[k][16].
template <int M>
QUIRE_INLINE void tile_f32(const float* w, const float* x, int64_t inputs, const Ahead& ahead, F* out) {
  F acc[M]{};
  for (int64_t k = 0; k < inputs; ++k) {
    const F values = load(w + k * kPanel);
    ahead.at(w, k * 64);
    for (int m = 0; m < M; ++m) acc[m] = fma(values, splat(x[k * M + m]), acc[m]);
  }
  for (int m = 0; m < M; ++m) out[m] = acc[m];
}

// Weights of 16 bits, widened as they are read.
template <int M, bool Brain>
QUIRE_INLINE void tile_widened(const uint16_t* w, const float* x, int64_t inputs, const Ahead& ahead,
                               F* out) {
  F acc[M]{};
  if constexpr (Brain) {
    for (int64_t k = 0; k < inputs; k += 2) {
      const U pair = load_as<U>(w + k * kPanel);  // the lower half of each lane is input k, the upper k + 1
      ahead.at(w, k * 32);
      const F even = (F)(pair << 16), odd = (F)(pair & 0xffff0000u);
      for (int m = 0; m < M; ++m) acc[m] = fma(even, splat(x[k * M + m]), acc[m]);
      if (k + 1 < inputs)
        for (int m = 0; m < M; ++m) acc[m] = fma(odd, splat(x[(k + 1) * M + m]), acc[m]);
    }
  } else {
    for (int64_t k = 0; k < inputs; ++k) {
      const F values = load_f16(w + k * kPanel);
      ahead.at(w, k * 32);
      for (int m = 0; m < M; ++m) acc[m] = fma(values, splat(x[k * M + m]), acc[m]);
    }
  }
  for (int m = 0; m < M; ++m) out[m] = acc[m];
}

#if defined(__AVX512BF16__)
template <int M>
QUIRE_INLINE void tile_bf16(const uint8_t* w, const int32_t* x, int64_t inputs, const Ahead& ahead, F* out) {
  F acc[M]{};
  const int64_t pairs = ceil_div(inputs, 2);
#pragma GCC unroll 4
  for (int64_t k = 0; k < pairs; ++k) {
    const B64 values = load_as<B64>(w + k * 64);
    ahead.at(w, k * 64);
    for (int m = 0; m < M; ++m) acc[m] = dot2_bf16(acc[m], values, x[k * M + m]);
  }
  for (int m = 0; m < M; ++m) out[m] = acc[m];
}
#endif

// One group of 32 inputs: acc[m] + sum of w * x, exact in 32 bits. `x` is [8][M] of 4 bytes.
template <int M, bool Int4>
QUIRE_INLINE void group_dot(const uint8_t* panel, int64_t offset, const int32_t* x, const Ahead& ahead,
                            I* acc) {
  if constexpr (Int4) {
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) {
      const B64 both = load_as<B64>(panel + offset + k * 64);
      ahead.at(panel, offset + k * 64);
      const B64 low = both & 15, high = (B64)((U)both >> 4) & 15;
      for (int m = 0; m < M; ++m) acc[m] = dot4<true>(acc[m], low, x[2 * k * M + m]);
      for (int m = 0; m < M; ++m) acc[m] = dot4<true>(acc[m], high, x[(2 * k + 1) * M + m]);
    }
  } else {
#pragma GCC unroll 8
    for (int k = 0; k < 8; ++k) {
      const B64 values = load_as<B64>(panel + offset + k * 64);
      ahead.at(panel, offset + k * 64);
      for (int m = 0; m < M; ++m) acc[m] = dot4<false>(acc[m], values, x[k * M + m]);
    }
  }
}

constexpr int64_t kCodesAhead = 512;

// Integer sums of the groups of one row group are weighed with the groups' 8-bit scales, still exactly; then
// come the scale of the activations and, at the end, that of the output.
template <int M, bool Int4>
QUIRE_INLINE void tile_quantized(const Panels& w, int64_t panel, const uint8_t* x, const Ahead& ahead,
                                 F* out) {
  constexpr int64_t kBytes = Int4 ? kGroup * kPanel / 2 : kGroup * kPanel;
  constexpr int64_t kTogether = row_group(Int4 ? RowFormat::for_int4 : RowFormat::for_int8) / kGroup;
  const int64_t groups = w.groups();
  const uint8_t* values = w.values + panel * groups * kBytes;
  const int8_t* codes = w.codes + panel * groups * kPanel;
  const int32_t* quads = (const int32_t*)x;
  const int32_t* begin = quads + groups * (kGroup / 4) * M;
  const float* scales = (const float*)(begin + groups * M);
  F acc[M]{};
  for (int64_t first = 0; first < groups; first += kTogether, scales += M) {
    const int64_t last = first + kTogether < groups ? first + kTogether : groups;
    I sum[M]{};
    for (int64_t g = first; g < last; ++g) {
      I dots[M];
      for (int m = 0; m < M; ++m) dots[m] = splat(begin[g * M + m]);
      group_dot<M, Int4>(values, g * kBytes, quads + g * (kGroup / 4) * M, ahead, dots);
      const I code = load_s8(codes + g * kPanel);
      for (int m = 0; m < M; ++m) sum[m] += dots[m] * code;
    }
    prefetch(codes + first * kPanel + kCodesAhead);
    for (int m = 0; m < M; ++m) acc[m] = fma(to_float(sum[m]), splat(scales[m]), acc[m]);
  }
  const F channel = load(w.channels + panel * kPanel);
  for (int m = 0; m < M; ++m) out[m] = acc[m] * channel;
}

// Not inlined: its callers are many, and it works for thousands of cycles.
template <int M>
__attribute__((noinline)) void tile(const Panels& w, int64_t panel, const uint8_t* x, const Ahead& ahead,
                                    F* out) {
  const uint8_t* values = w.values + panel * w.panel_bytes();
  switch (w.format) {
    case Format::int8:
      return tile_quantized<M, false>(w, panel, x, ahead, out);
    case Format::int4:
      return tile_quantized<M, true>(w, panel, x, ahead, out);
    case Format::f32:
      return tile_f32<M>((const float*)values, (const float*)x, w.inputs, ahead, out);
    case Format::f16:
      return tile_widened<M, false>((const uint16_t*)values, (const float*)x, w.inputs, ahead, out);
    case Format::bf16:
#if defined(__AVX512BF16__)
      return tile_bf16<M>(values, (const int32_t*)x, w.inputs, ahead, out);
#else
      return tile_widened<M, true>((const uint16_t*)values, (const float*)x, w.inputs, ahead, out);
#endif
  }
  __builtin_unreachable();
}

}  // namespace quire::QUIRE_ISA
