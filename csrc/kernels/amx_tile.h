// Products of bfloat16, and of W8A8, with AMX: the panels of tile.h have the memory layout of its tiles.
#pragma once

#include "amx.h"
#include "coded_scales.h"
#include "packed_rows.h"
#include "tile.h"

namespace quire::QUIRE_ISA {

// Multiplies M rows with one panel using vectors, with the same bits as tiles. With few rows memory is the
// limit, and tiles read it up to 10% slower.
template <int M>
QUIRE_INLINE void few_rows_bf16(const uint8_t* w, int64_t inputs, const uint8_t* x, int64_t row_bytes,
                                const PanelPrefetch& ahead, F* out) {
  constexpr int64_t kPairs = 16;  // of one tile product
  F acc[M]{};
  const int64_t pairs = ceil_div(inputs, 2);
  for (int64_t first = 0; first < pairs; first += kPairs) {
    const int64_t last = first + kPairs < pairs ? first + kPairs : pairs;
    F even[M]{}, odd[M]{};
    float row[M][2][kPairs];
    for (int m = 0; m < M; ++m) {
      const U inputs_of_row = load_as<U>(x + m * row_bytes + first * 4);
      store(row[m][0], (F)(inputs_of_row << 16));
      store(row[m][1], (F)(inputs_of_row & 0xffff0000u));
    }
#pragma GCC unroll 4
    for (int64_t k = first; k < last; ++k) {
      const U values = load_as<U>(w + k * 64);  // the lower half of each lane is input 2 k, the upper 2 k + 1
      ahead.at<M>(w, k * 64);
      for (int m = 0; m < M; ++m) {
        even[m] = fma((F)(values << 16), splat(row[m][0][k - first]), even[m]);
        odd[m] = fma((F)(values & 0xffff0000u), splat(row[m][1][k - first]), odd[m]);
      }
    }
    for (int m = 0; m < M; ++m) acc[m] += even[m] + odd[m];
  }
  for (int m = 0; m < M; ++m) out[m] = acc[m];
}

constexpr int kAmxRows = 32;  // that meet a panel together, at most

// Returns the shapes of tiles for so many rows: of 64 bytes each. Tiles 0, 2 and 4 are of the first 16 rows,
// 1, 3 and 5 of the others, 6 and 7 of weights.
QUIRE_INLINE TileShapes amx_shapes(int64_t rows) {
  TileShapes shapes;
  for (int half = 0; half < 2 && half * 16 < rows; ++half) {
    const int64_t height = rows - half * 16 < 16 ? rows - half * 16 : 16;
    for (int tile = half; tile < 6; tile += 2) shapes.set(tile, height, 64);
  }
  for (int b = 6; b < 8; ++b) shapes.set(b, 16, 64);
  return shapes;
}

// Multiplies up to 32 rows of bfloat16 with one panel; the sums stay in tiles.
class AmxBf16 {
 public:
  static constexpr int64_t kInputs = 32;  // of one tile product
  static constexpr int kPanels = 1;

  QUIRE_INLINE AmxBf16(const Panels& w, int64_t panel, const uint8_t* x, int64_t row_bytes,
                       const PanelPrefetch& ahead)
      : w_(w.values + panel * w.panel_bytes()),
        x_(x),
        inputs_(w.inputs),
        row_bytes_(row_bytes),
        ahead_(ahead) {}

  // Computes out[rows]; Two: there are more than 16 rows.
  template <bool Two, int N>
  QUIRE_INLINE void run(int64_t, F* out) const {
    tile_zero<0>();
    if constexpr (Two) tile_zero<1>();
    const int64_t whole = inputs_ / kInputs;
    int64_t step = 0;
    for (; step + 1 < whole; step += 2) multiply<Two, 2, 6>(step), multiply<Two, 4, 7>(step + 1);
    if (step < whole) multiply<Two, 2, 6>(step);
    if (const int64_t rest = inputs_ - whole * kInputs) {  // activations are zero-padded, panels are not
      alignas(64) uint8_t last[kInputs / 2][64]{};
      __builtin_memcpy(last, w_ + whole * 1024, (size_t)ceil_div(rest, 2) * 64);
      multiply_with<Two, 4, 7>(last, whole);
    }
    tile_store<0>(out, sizeof(F));
    if constexpr (Two) tile_store<1>(out + 16, sizeof(F));
  }

 private:
  template <bool Two, int A, int B>
  QUIRE_INLINE void multiply(int64_t step) const {
    for (int64_t i = 0; i < 1024; i += 64) ahead_.at<kAmxRows>(w_, step * 1024 + i);
    multiply_with<Two, A, B>(w_ + step * 1024, step);
  }

  template <bool Two, int A, int B>
  QUIRE_INLINE void multiply_with(const void* w, int64_t step) const {
    tile_load<B>(w, 64);
    tile_load<A>(x_ + step * kInputs * 2, row_bytes_);
    tile_dot_bf16<0, A, B>();
    if constexpr (Two) {
      tile_load<A + 1>(x_ + 16 * row_bytes_ + step * kInputs * 2, row_bytes_);
      tile_dot_bf16<1, A + 1, B>();
    }
  }

  const uint8_t *const w_, *const x_;
  const int64_t inputs_, row_bytes_;
  const PanelPrefetch& ahead_;
};

// Multiplies up to 32 rows of W8A8 with one panel or two; the sums, of integers, stay in tiles. Codes are
// unsigned, the numbers of rows signed.
class AmxRows {
 public:
  static constexpr int64_t kInputs = 64;  // of one tile product
  static constexpr int kPanels = 2;

  QUIRE_INLINE AmxRows(const Panels& w, int64_t panel, const uint8_t* x, int64_t row_bytes,
                       const PanelPrefetch& ahead)
      : coding_(w.coding),
        groups_(w.groups()),
        next_(w.panel_bytes()),
        w_(w.values + panel * next_),
        x_(x),
        row_bytes_(row_bytes),
        ahead_(ahead) {}

  // Computes out[N][32]; Two: there are more than 16 rows.
  template <bool Two, int N>
  QUIRE_INLINE void run(int64_t rows, F* out) const {
    constexpr int64_t kGroups = kInputs / kGroup, kBlockGroups = kCodedBlock / kGroup;
    tile_zero<0>();
    if constexpr (Two) tile_zero<1>();
    if constexpr (N > 1) tile_zero<2>();
    if constexpr (Two && N > 1) tile_zero<3>();
    const int64_t header = coding_.header_bytes();
    const uint8_t *at = w_, *x = x_;
    for (int64_t left = groups_; left > 0; left -= kBlockGroups) {
      at += header;
      int64_t count = left < kBlockGroups ? left : kBlockGroups;
      for (; count >= kGroups; count -= kGroups, at += kBytes, x += kInputs) {
        for (int n = 0; n < N; ++n)
          for (int64_t i = 0; i < kBytes; i += 64) ahead_.at<kAmxRows>(at + n * next_, i);
        multiply<Two, N>(at, next_, x);
      }
      if (count > 0) {  // half a tile; what the rows have after their end meets zeros
        alignas(64) uint8_t last[N][kBytes]{};
        for (int n = 0; n < N; ++n) __builtin_memcpy(last[n], at + n * next_, kBytes / 2);
        multiply<Two, N>(last[0], kBytes, x);
      }
    }
    store<Two, N>(rows, out);
  }

 private:
  static constexpr int64_t kBytes = kInputs * kPanel;  // of a tile of weights

  // Multiplies one tile of each panel, which are `next` apart.
  template <bool Two, int N>
  QUIRE_INLINE void multiply(const uint8_t* w, int64_t next, const uint8_t* x) const {
    tile_load<6>(w, 64);
    tile_load<4>(x, row_bytes_);
    tile_dot_s8u8<0, 4, 6>();
    if constexpr (N > 1) {
      tile_load<7>(w + next, 64);
      tile_dot_s8u8<2, 4, 7>();
    }
    if constexpr (Two) {
      tile_load<5>(x + 16 * row_bytes_, row_bytes_);
      tile_dot_s8u8<1, 5, 6>();
      if constexpr (N > 1) tile_dot_s8u8<3, 5, 7>();
    }
  }

  template <bool Two, int N>
  QUIRE_INLINE void store(int64_t rows, F* out) const {
    I sums[N][kAmxRows];
    tile_store<0>(sums[0], sizeof(I));
    if constexpr (Two) tile_store<1>(sums[0] + 16, sizeof(I));
    if constexpr (N > 1) tile_store<2>(sums[N - 1], sizeof(I));
    if constexpr (Two && N > 1) tile_store<3>(sums[N - 1] + 16, sizeof(I));
    const PackedRows<kAmxRows> packed(x_, groups_);
    for (int n = 0; n < N; ++n) {
      const F channel = number_of(coding_.scales, w_ + n * next_, 0);
      for (int64_t m = 0; m < rows; ++m)
        out[n * kAmxRows + m] =
            to_float(sums[n][m] + splat(packed.begin(m))) * splat(packed.scale(m)) * channel;
    }
  }

  const Coding& coding_;
  const int64_t groups_, next_;
  const uint8_t *const w_, *const x_;
  const int64_t row_bytes_;
  const PanelPrefetch& ahead_;
};

}  // namespace quire::QUIRE_ISA
