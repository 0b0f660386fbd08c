// Keys and values of a partition as panels [panel][k][lane] of products, laid out or as the cache has them.
#pragma once

#include "attention_layout.h"

namespace quire::QUIRE_ISA {

// Rows of P adjacent panels that are at equal distances, and what to prefetch beside each row.
template <typename T, int P>
struct Run {
  const T *at[P], *ahead[P];
  int64_t stride, count;
};

// Prefetches the cache content of a partition, some lines at a time, between computations.
constexpr int kSecondLevel = 2;  // into L2: L1 is filled by the current partition

class PartitionPrefetch {
 public:
  PartitionPrefetch(const Work& w, int64_t item_bytes, int64_t start, int64_t end)
      : bytes_{w.size * w.dim * item_bytes, w.size * w.cache.value_stride() * item_bytes} {
    const uint8_t* const bases[] = {w.cache.keys, w.cache.values};
    for (int values = w.cache.latent; values < 2; ++values) {
      for (int64_t position = start; position < least(end, start + kPartition); position += w.size)
        blocks_[count_++] = bases[values] + w.page(position) * bytes_[values];
      if (!values) keys_ = count_;
    }
    share_ =
        ceil_div(keys_ * ceil_div(bytes_[0], kLine) + (count_ - keys_) * ceil_div(bytes_[1], kLine), kCalls);
  }

  void some() {
    for (int64_t lines = share_; lines > 0 && at_ < count_;) {
      const int64_t bytes = bytes_[at_ >= keys_];
      const int64_t now = least(lines, ceil_div(bytes - offset_, kLine));
      const uint8_t* from = blocks_[at_] + offset_;
      for (int64_t i = 0; i < now; ++i) __builtin_prefetch(from + i * kLine, 0, kSecondLevel);
      lines -= now;
      offset_ += now * kLine;
      if (offset_ >= bytes) offset_ = 0, ++at_;
    }
  }

 private:
  static constexpr int64_t kLine = 64, kCalls = 3 * kPanels;
  const uint8_t* blocks_[kPartition];  // of at least one position each, or keys and values of 8
  int64_t bytes_[2], keys_ = 0, count_ = 0, at_ = 0, offset_ = 0, share_;  // keys come first
};

// Panels of floats or pairs, and the content of the cache that is fetched meanwhile.
struct LaidPanels {
  static constexpr KVFormat kForm = KVFormat::f32;
  static constexpr bool kAhead = false;
  const float* panels;
  int64_t stride;
  PartitionPrefetch& ahead;

  template <int P>
  QUIRE_INLINE Run<float, P> run(int64_t k, int64_t panel) const {
    Run<float, P> run{{}, {}, kPanel, kPartition * kPanel};
    for (int p = 0; p < P; ++p) run.at[p] = panels + (panel + p) * stride + k * kPanel;
    return run;
  }
  QUIRE_INLINE LaidPanels from(int64_t panel, int64_t k) const {
    return {panels + panel * stride + k * kPanel, stride, ahead};
  }
  QUIRE_INLINE void tile_done() const { ahead.some(); }
};

// The blocks of a partition, of 16 positions each, and those of the next one, or the same without a next one.
template <KVFormat Form>
struct StoredBlocks {
  using T = typename Stored<Form>::Type;
  int64_t value_dim;
  const T *keys[kPanels], *values[kPanels];  // of positions [low, high) of the partition
  const T *keys_ahead[kPanels], *values_ahead[kPanels];

  StoredBlocks(const Work& w, int64_t start, int64_t low, int64_t high, int64_t end)
      : value_dim(w.value_dim) {
    for (int64_t i = low / kPanel; i < ceil_div(high, kPanel); ++i) {
      const int64_t position = start + i * kPanel, next = position + kPartition;
      const int64_t page = w.page(position) * kPanel, ahead = next < end ? w.page(next) * kPanel : page;
      keys[i] = (const T*)w.cache.keys + page * w.dim;
      values[i] = (const T*)w.cache.values + page * w.value_dim;
      keys_ahead[i] = (const T*)w.cache.keys + ahead * w.dim;
      values_ahead[i] = (const T*)w.cache.values + ahead * w.value_dim;
    }
  }
};

template <KVFormat Form>
struct StoredKeys {
  static constexpr KVFormat kForm = Form;
  static constexpr bool kAhead = true;
  const StoredBlocks<Form>& blocks;
  int64_t first = 0;  // panel

  template <int P>
  QUIRE_INLINE auto run(int64_t k, int64_t panel) const {
    Run<typename Stored<Form>::Type, P> run{{}, {}, kPanel, kPartition * kPanel};
    for (int p = 0; p < P; ++p) {
      run.at[p] = blocks.keys[first + panel + p] + k * kPanel;
      run.ahead[p] = blocks.keys_ahead[first + panel + p] + k * kPanel;
    }
    return run;
  }
  QUIRE_INLINE StoredKeys from(int64_t panel, int64_t) const { return {blocks, panel}; }
  QUIRE_INLINE void tile_done() const {}
};

template <KVFormat Form>
struct StoredValues {
  static constexpr KVFormat kForm = Form;
  static constexpr bool kAhead = true;
  const StoredBlocks<Form>& blocks;
  int64_t first = 0;  // position

  // The panels of a block fetch one part of the next block each.
  template <int P>
  QUIRE_INLINE auto run(int64_t k, int64_t panel) const {
    const int64_t block = (first + k) / kPanel, place = (first + k) % kPanel;
    Run<typename Stored<Form>::Type, P> run{{}, {}, blocks.value_dim, kPanel - place};
    for (int p = 0; p < P; ++p) {
      run.at[p] = blocks.values[block] + place * blocks.value_dim + (panel + p) * kPanel;
      run.ahead[p] = blocks.values_ahead[block] + ((panel + p) * kPanel + place) * kPanel;
    }
    return run;
  }
  QUIRE_INLINE StoredValues from(int64_t, int64_t position) const { return {blocks, position}; }
  QUIRE_INLINE void tile_done() const {}
};

}  // namespace quire::QUIRE_ISA
