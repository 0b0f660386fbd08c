// The working state of an attention unit: its scratch, and the conversion of cache partitions to panels.
#pragma once

#include "attention.h"
#include "kv.h"

namespace quire::QUIRE_ISA {

#if defined(__AVX512F__)
constexpr int kRows = 8;  // rows whose sums are in registers together
#else
constexpr int kRows = 4;
#endif

// True for formats that are multiplied as stored, in pairs.
#if defined(__AVX512BF16__)
template <KVFormat Form>
constexpr bool kPairs = Form == KVFormat::bf16;
#else
template <KVFormat Form>
constexpr bool kPairs = false;
#endif

constexpr int64_t kPanels = kPartition / kPanel;
constexpr int64_t kValueStride = (kPartition + 1) * kPanel;  // + 1: a stride of 4096 would fill one cache set
// The softmax state of a tile's rows within a segment, one lane per row.
struct State {
  float peaks[kLanes], totals[kLanes];
  float keep[kLanes];  // factor of the previous sums after the latest partition
};

// The softmax state of one row over the merged segments.
struct Merged {
  float peak, total;
};

struct Work {
  const Attention& how;
  const AttentionUnit& unit;
  const KVLayer& cache;
  int64_t group, rows, dim, width;  // width: dim rounded up to whole panels
  int64_t size, shift;              // of a block: 2^shift positions
  // Scratch of the thread.
  float* keys;     // [4 panels][width][16], or half as many pairs
  float* values;   // [width / 16][64 + 1][16], or half as many pairs
  float* queries;  // [rows][width], scaled; pairs fill the first half of each row
  float* weights;  // [rows][64], scores at first; pairs likewise
  State* states;   // by tile, in the current segment
  Merged* merged;  // [rows]
  float* records;  // [rows], of the current segment; those of the unit or in scratch
  int64_t row_stride;

  State& state(int64_t row) const { return states[row / kRows]; }
  float* record(int64_t row) const { return records + row * row_stride; }
  int64_t position(int64_t row) const { return unit.positions[row / group]; }
  int64_t oldest(int64_t row) const { return how.oldest(position(row)); }
  float* out(int64_t row) const {
    return unit.out + (row / group * how.heads + unit.head * group + row % group) * dim;
  }
  // Returns the index of the unit's head in the block of a position, in heads, and the offset in the block.
  int64_t page(int64_t position) const {
    return unit.block_table[position >> shift] * cache.stride + unit.head;
  }
  int64_t place(int64_t position) const { return position & (size - 1); }
};

inline Work start(const Attention& how, const AttentionUnit& unit, float* scratch) {
  const KVLayer& cache = *how.cache;
  const int64_t group = how.group(), rows = unit.tokens * group, width = round_up(cache.dim, kPanel);
  const auto take = [&](int64_t count) { return scratch += count, scratch - count; };
  const int64_t size = cache.block_size, shift = __builtin_ctzll((unsigned long long)size);
  Work w{how, unit, cache, group, rows, cache.dim, width,        size,           shift,
         {},  {},   {},    {},    {},   {},        unit.records, unit.row_stride};
  w.keys = take(kPartition * width);
  w.values = take(kValueStride * width / kPanel);
  w.queries = take(rows * width);
  w.weights = take(rows * kPartition);
  w.states = (State*)take(ceil_div(rows, kRows) * (int64_t)(sizeof(State) / sizeof(float)));
  w.merged = (Merged*)take(rows * 2);
  if (!unit.records) {
    w.records = take(rows * record_floats(cache.dim));
    w.row_stride = record_floats(cache.dim);
  }
  return w;
}

// Sixteen positions of each component of the keys, or of their scales (`inner` = 1).
template <typename T>
struct Columns {
  const T *first, *second;  // two blocks if they hold 8 positions
  int64_t size;
  T both[kLanes];

  // Positions start + [0, 16), of which only [low, high) may be read.
  QUIRE_INLINE Columns(const Work& w, const void* base, int64_t inner, int64_t start, int64_t low,
                       int64_t high)
      : size(w.size) {
    const auto at = [&](int64_t position) {
      return (const T*)base + w.page(position) * inner * size + w.place(position);
    };
    if (size >= kLanes) {
      first = second = at(start);
    } else {
      const int64_t middle = start + kLanes / 2;
      first = at(low < middle ? start : middle);
      second = at(middle < high ? middle : start);
    }
  }
  QUIRE_INLINE const T* row(int64_t d) {
    if (size >= kLanes) return first + d * size;
    __builtin_memcpy(both, first + d * size, sizeof(both) / 2);
    __builtin_memcpy(both + kLanes / 2, second + d * size, sizeof(both) / 2);
    return both;
  }
};

// Lays out one panel of keys, positions [low, high) of the partition at `start`; other lanes are arbitrary.
template <KVFormat Form, bool Pairs>
void lay_keys(const Work& w, int64_t start, int64_t low, int64_t high) {
  using T = typename Stored<Form>::Type;
  const int64_t panel = low / kPanel, first = start + panel * kPanel, dim = w.dim;
  float* to = w.keys + panel * w.width * kPanel;
  Columns<T> keys(w, w.cache.keys, dim, first, start + low, start + high);
  if constexpr (Pairs) {
    for (int64_t d = 0; d + 1 < dim; d += 2, to += kPanel) {
      const H even = load_as<H>(keys.row(d));
      store_as(to, pair(even, load_as<H>(keys.row(d + 1))));
    }
    if (dim % 2) store_as(to, pair(load_as<H>(keys.row(dim - 1)), H{}));
  } else {
    F scale = splat(1.0f);
    if constexpr (Form == KVFormat::int8)
      scale = load(Columns<float>(w, w.cache.key_scales, 1, first, start + low, start + high).row(0));
    for (int64_t d = 0; d < dim; ++d, to += kPanel) {
      F x = Stored<Form>::widen(keys.row(d));
      if constexpr (Form == KVFormat::int8) x *= scale;
      store(to, x);
    }
  }
}

// Lays out values of positions [low, high) of the partition at `start`, with zeros to complete a pair.
template <KVFormat Form, bool Pairs>
void lay_values(const Work& w, int64_t start, int64_t low, int64_t high) {
  using T = typename Stored<Form>::Type;
  const int64_t size = w.size, dim = w.dim;
  const T* base = (const T*)w.cache.values;
  const auto at = [&](int64_t i) { return base + (w.page(start + i) * size + w.place(start + i)) * dim; };
  T copies[2][kLanes];
  if constexpr (Pairs) {
    for (int64_t i = low / 2 * 2; i < high; i += 2) {
      const bool has_even = i >= low, has_odd = i + 1 < high;
      const T *even = at(i), *odd = even + dim;  // both are in one block
      float* to = w.values + i / 2 * kPanel;
      int64_t d = 0;
      if (has_even && has_odd)
        for (; d + kPanel <= dim; d += kPanel, to += kValueStride)
          store_as(to, pair(load_as<H>(even + d), load_as<H>(odd + d)));
      for (; d < dim; d += kPanel, to += kValueStride) {
        const H first = has_even ? load_as<H>(readable(even + d, dim - d, copies[0])) : H{};
        store_as(to, pair(first, has_odd ? load_as<H>(readable(odd + d, dim - d, copies[1])) : H{}));
      }
    }
  } else {
    for (int64_t i = low; i < high; ++i) {
      const T* from = at(i);
      float *to = w.values + i * kPanel, scale = 1;
      if constexpr (Form == KVFormat::int8) scale = w.cache.value_scales[(from - base) / dim];
      for (int64_t d = 0; d < dim; d += kPanel, to += kValueStride) {
        F x = Stored<Form>::widen(readable(from + d, dim - d, copies[0]));
        if constexpr (Form == KVFormat::int8) x *= scale;
        store(to, x);
      }
    }
  }
}

// Prefetches the cache content of a partition, some lines at a time, between computations.
class PartitionPrefetch {
 public:
  PartitionPrefetch(const Work& w, int64_t item_bytes, int64_t start, int64_t end)
      : bytes_(w.size * w.dim * item_bytes) {
    const uint8_t* const bases[] = {w.cache.keys, w.cache.values};
    for (const uint8_t* base : bases)
      for (int64_t position = start; position < least(end, start + kPartition); position += w.size)
        blocks_[count_++] = base + w.page(position) * bytes_;
    share_ = ceil_div(count_ * ceil_div(bytes_, kLine), kCalls);
  }

  void some() {
    for (int64_t lines = share_; lines > 0 && at_ < count_;) {
      const int64_t now = least(lines, ceil_div(bytes_ - offset_, kLine));
      const uint8_t* from = blocks_[at_] + offset_;
      for (int64_t i = 0; i < now; ++i) __builtin_prefetch(from + i * kLine, 0, kSecondLevel);
      lines -= now;
      offset_ += now * kLine;
      if (offset_ >= bytes_) offset_ = 0, ++at_;
    }
  }

 private:
  static constexpr int64_t kLine = 64, kCalls = 3 * kPanels;
  static constexpr int kSecondLevel = 2;  // into L2: L1 is filled by the current partition
  const uint8_t* blocks_[2 * kPartition / 8];
  int64_t bytes_, count_ = 0, at_ = 0, offset_ = 0, share_;
};

}  // namespace quire::QUIRE_ISA
