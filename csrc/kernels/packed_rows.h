// Rows packed for W8A8 (ActivationFormat::rows).
#pragma once

#include "kernels.h"

namespace quire::QUIRE_ISA {

// With AMX each row lies by itself, as its tiles take them; otherwise the words of M rows alternate.
#if defined(QUIRE_AMX)
constexpr bool kByRow = true;
#else
constexpr bool kByRow = false;
#endif

// M rows: words of four numbers, then the initial values of the sums, then the scales.
template <int M>
class PackedRows {
 public:
  static constexpr int64_t kNext = kByRow ? 1 : M;  // from word to word

  QUIRE_INLINE PackedRows(const uint8_t* x, int64_t groups)
      : words_((const int32_t*)x),
        count_(groups * (kGroup / 4)),
        row_bytes_(PackedActivations::row_bytes(ActivationFormat::rows, groups * kGroup)) {}

  // Words from row to row.
  QUIRE_INLINE int64_t row_step() const { return kByRow ? row_bytes_ / 4 : 1; }
  QUIRE_INLINE const int32_t* words() const { return words_; }
  QUIRE_INLINE int32_t begin(int64_t m) const { return words_[count_ * kNext + m * row_step()]; }
  QUIRE_INLINE float scale(int64_t m) const {
    return __builtin_bit_cast(float, words_[(count_ + 1) * kNext + m * row_step()]);
  }

 private:
  const int32_t* const words_;
  const int64_t count_, row_bytes_;
};

}  // namespace quire::QUIRE_ISA
