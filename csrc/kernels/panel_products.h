// Products of a register tile of rows with panels of keys or values.
#pragma once

#include "attention_panels.h"

namespace quire::QUIRE_ISA {

namespace {

// Multiplies four bytes of each row, a float or a pair, with part of a row of a panel.
template <bool Pairs>
QUIRE_INLINE Part multiply_add(Part sum, Part panel, const float* x) {
#if defined(__AVX512BF16__)
  if constexpr (Pairs) {
    int32_t both;
    __builtin_memcpy(&both, x, 4);
    return dot2_bf16(sum, (B64)panel, both);
  }
#endif
  return fma(panel, splat_part(*x), sum);
}

// out[m][16 p + lane] = out[m][16 p + lane] * keep[m] + sum over k < count of panels[p][k][lane] * x[m][k].
struct Operands {
  int64_t num_panels;
  const float* x;
  int64_t x_stride, count;
  float* out;
  int64_t out_stride;
  const float* keep;  // null: discard the previous content
};

// Computes P panels at once, so that even few rows have enough sums to keep the multipliers busy.
template <bool Pairs, int M, int P, typename Panels>
QUIRE_INLINE void tile(const Operands& o, const Panels& panels, int64_t panel) {
  const float* x = o.x;
  const int64_t x_stride = o.x_stride, out_stride = o.out_stride;
  float* out = o.out + panel * kPanel;
  Part sum[M][P * kParts]{};
  const auto offset = [&](int i) { return i / kParts * kPanel + i % kParts * kPartLanes; };
  if (o.keep)
    for (int m = 0; m < M; ++m)
      for (int i = 0; i < P * kParts; ++i)
        sum[m][i] = load_as<Part>(out + m * out_stride + offset(i)) * splat_part(o.keep[m]);
  for (int64_t k = 0; k < o.count;) {
    const auto run = panels.template run<P>(k, panel);
    const int64_t count = least(run.count, o.count - k);
    for (int64_t i = 0; i < count; ++i, ++k) {
      Part values[P * kParts];
      for (int p = 0; p < P; ++p) {
        for (int j = 0; j < kParts; ++j)
          values[p * kParts + j] = Stored<Panels::kForm>::part(run.at[p] + i * run.stride + j * kPartLanes);
        if constexpr (Panels::kAhead) __builtin_prefetch(run.ahead[p] + i * kPanel, 0, kSecondLevel);
      }
      for (int m = 0; m < M; ++m)
        for (int j = 0; j < P * kParts; ++j)
          sum[m][j] = multiply_add<Pairs>(sum[m][j], values[j], x + m * x_stride + k);
    }
  }
  for (int m = 0; m < M; ++m)
    for (int i = 0; i < P * kParts; ++i) store_as(out + m * out_stride + offset(i), sum[m][i]);
  panels.tile_done();
}

template <bool Pairs, int M, typename Panels>
void accumulate(const Operands& o, const Panels& panels) {
#if defined(__AVX512F__)
  constexpr int kSums = 16;  // in registers, along with their operands
#else
  constexpr int kSums = kRows;
#endif
  constexpr int kAtOnce = kSums / M >= 4 ? 4 : kSums / M;
  int64_t panel = 0;
  for (; panel + kAtOnce <= o.num_panels; panel += kAtOnce) tile<Pairs, M, kAtOnce>(o, panels, panel);
  if constexpr (kAtOnce > 1)
    for (; panel < o.num_panels; ++panel) tile<Pairs, M, 1>(o, panels, panel);
}

template <bool Pairs, typename Panels>
void accumulate(int64_t rows, const Operands& o, const Panels& panels) {
  switch (rows) {
    case 1:
      return accumulate<Pairs, 1>(o, panels);
    case 2:
      return accumulate<Pairs, 2>(o, panels);
    case 3:
      return accumulate<Pairs, 3>(o, panels);
    case 4:
      return accumulate<Pairs, 4>(o, panels);
#if defined(__AVX512F__)
    case 5:
      return accumulate<Pairs, 5>(o, panels);
    case 6:
      return accumulate<Pairs, 6>(o, panels);
    case 7:
      return accumulate<Pairs, 7>(o, panels);
    case 8:
      return accumulate<Pairs, 8>(o, panels);
#endif
  }
}

template <typename Function>
QUIRE_INLINE void by_panel(int64_t low, int64_t high, Function function) {
  for (int64_t i = low / kPanel * kPanel; i < high; i += kPanel)
    function(most(i, low), least(i + kPanel, high));
}

}  // namespace

}  // namespace quire::QUIRE_ISA
