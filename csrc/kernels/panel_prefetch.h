// How tiles of rows prefetch the weights that they read next.
#pragma once

#include "half.h"
#include "kernels.h"

namespace quire::QUIRE_ISA {

// Prefetches weights. A single tile of rows prefetches what it reads next. Of several tiles, which read a
// cached panel again, each prefetches its share of the next panel, so that memory is never idle. One row
// reads in order. With AVX-512 there is so little between two reads that processors fetch ahead by
// themselves, and more requests only delay theirs; AVX2 takes twice as many instructions, and gains by them.
class PanelPrefetch {
 public:
  // For tile `tile` of the `tiles` that meet panels, `together` of them at once.
  QUIRE_INLINE PanelPrefetch(int64_t panel_bytes, int64_t together, int64_t tile, int64_t tiles)
      : alone_(tiles == 1) {
    while (tiles >> (shift_ + 1)) ++shift_;
    distance_ = alone_ ? kNext : together * panel_bytes + ((tile * panel_bytes) >> shift_);
  }
  // Called for each 64 bytes of the panel at `values`, which M rows are multiplied with.
  template <int M>
  QUIRE_INLINE void at(const void* values, int64_t offset) const {
    if constexpr (M == 1 && kFetchedAhead) return;
    const char* where = (const char*)values + distance_ + (offset >> shift_);
    alone_ ? __builtin_prefetch(where, 0, kNearest) : __builtin_prefetch(where, 0, kSecondLevel);
  }

 private:
#if defined(QUIRE_HALF_PANELS)
  static constexpr bool kFetchedAhead = false;
#else
  static constexpr bool kFetchedAhead = true;
#endif
  static constexpr int64_t kNext = 4096;
  static constexpr int kSecondLevel = 2, kNearest = 3;
  bool alone_;
  int shift_ = 0;
  int64_t distance_;
};

}  // namespace quire::QUIRE_ISA
