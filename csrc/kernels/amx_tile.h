// Products of bfloat16 with AMX: the panels of tile.h have the memory layout of its tiles.
#pragma once

#include "amx.h"
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

// Multiplies up to 32 rows with one panel; the sums stay in tiles.
class AmxBf16 {
 public:
  static constexpr int64_t kRows = 32, kInputs = 32;  // maximum, and of one tile product

  static QUIRE_INLINE TileShapes shapes(int64_t rows) {
    TileShapes shapes;
    for (int half = 0; half < 2 && half * 16 < rows; ++half) {
      const int64_t height = rows - half * 16 < 16 ? rows - half * 16 : 16;
      for (int tile = half; tile < 6; tile += 2) shapes.set(tile, height, 64);
    }
    for (int b = 6; b < 8; ++b) shapes.set(b, kInputs / 2, 64);
    return shapes;
  }

  QUIRE_INLINE AmxBf16(const uint8_t* w, int64_t inputs, const uint8_t* x, int64_t row_bytes,
                       const PanelPrefetch& ahead)
      : w_(w), x_(x), inputs_(inputs), row_bytes_(row_bytes), ahead_(ahead) {}

  // Computes out[rows]; Two: there are more than 16 rows.
  template <bool Two>
  QUIRE_INLINE void run(float (*out)[kPanel]) const {
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
    tile_store<0>(out, kPanel * 4);
    if constexpr (Two) tile_store<1>(out + 16, kPanel * 4);
  }

 private:
  template <bool Two, int A, int B>
  QUIRE_INLINE void multiply(int64_t step) const {
    for (int64_t i = 0; i < 1024; i += 64) ahead_.at<kRows>(w_, step * 1024 + i);
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

}  // namespace quire::QUIRE_ISA
