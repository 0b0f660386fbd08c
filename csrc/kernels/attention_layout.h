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
  float peaks[kPartLanes], totals[kPartLanes];
  float keep[kPartLanes];  // factor of the previous sums after the latest partition
};

// The softmax state of one row over the merged segments.
struct Merged {
  float peak, total;
};

// The first and the last position that a row sees.
struct Visible {
  int64_t oldest, newest;
};

// A vector of a latent cache.
struct Place {
  const KVLayer& layer;
  int64_t index;

  template <typename T>
  const T* vector() const {
    return (const T*)layer.values + index * layer.dim;
  }
};

struct Work {
  const Attention& how;
  const AttentionUnit& unit;
  const KVLayer& cache;
  int64_t group, rows, dim, width;  // width: dim rounded up to whole panels
  int64_t value_dim, value_width;   // likewise
  int64_t size, shift;              // of a block: 2^shift positions
  const KVLayer* entries = &cache;  // what listed vectors are of, after the recent ones
  int64_t entry_shift = 0;
  // Scratch of the thread.
  float* keys = nullptr;          // [4 panels][width][16], or half as many pairs
  float* values = nullptr;        // [value_width / 16][64 + 1][16], or half as many pairs
  float* queries = nullptr;       // [rows][width], scaled; pairs fill the first half of each row
  float* weights = nullptr;       // [rows][64], scores at first; pairs likewise
  float* key_scales = nullptr;    // [64], of 8-bit integers in the partition
  float* value_scales = nullptr;  // likewise
  Visible* visible = nullptr;     // [rows]
  State* states = nullptr;        // by tile, in the current segment
  Merged* merged = nullptr;       // [rows]
  float* records = nullptr;       // [rows], of the current segment; those of the unit or in scratch
  int64_t row_stride = 0;

  State& state(int64_t row) const { return states[row / kRows]; }
  float* record(int64_t row) const { return records + row * row_stride; }
  int64_t position(int64_t row) const { return unit.positions[row / group]; }
  int64_t oldest(int64_t row) const { return visible[row].oldest; }
  int64_t newest(int64_t row) const { return visible[row].newest; }
  // Returns the index of a row among the query heads of all tokens.
  int64_t query(int64_t row) const { return row / group * how.heads + unit.group * group + row % group; }
  float* out(int64_t row) const { return unit.out + query(row) * value_dim; }
  // Returns the index of the unit's head in the block of a position, in heads, and the offset in the block.
  int64_t page(int64_t position) const {
    const int64_t block = unit.block_table[((position >> shift) + 1) * cache.apart - 1];
    return block * cache.stride + (cache.latent ? 0 : unit.group);
  }
  int64_t place(int64_t position) const { return position & (size - 1); }
  // Returns the vector, of a latent cache, that has a place in the order of sums.
  Place vector(int64_t i) const {
    if (!unit.listed) return {cache, page(i) * size + place(i)};
    if (i < unit.recent) {
      const int64_t position = unit.positions[0] + 1 - unit.recent + i;
      return {cache, page(position) * size + place(position)};
    }
    const int64_t entry = unit.chosen ? unit.chosen[i - unit.recent] : i - unit.recent;
    const int64_t block = unit.entry_table[((entry >> entry_shift) + 1) * entries->apart - 1];
    const int64_t place = entry & (entries->block_size - 1);
    return {*entries, (block * entries->stride << entry_shift) + place};
  }
};

inline Work start(const Attention& how, const AttentionUnit& unit, float* scratch) {
  const KVLayer& cache = *how.cache;
  const int64_t group = how.group(), rows = unit.tokens * group, width = round_up(cache.dim, kPanel);
  const int64_t value_width = round_up(cache.value_dim, kPanel);
  const auto take = [&](int64_t count) { return scratch += count, scratch - count; };
  const int64_t size = cache.block_size, shift = __builtin_ctzll((unsigned long long)size);
  Work w{how, unit, cache, group, rows, cache.dim, width, cache.value_dim, value_width, size, shift};
  if (how.entries) w.entries = how.entries;
  w.entry_shift = __builtin_ctzll((unsigned long long)w.entries->block_size);
  w.keys = take(kPartition * width);
  w.values = take(kValueStride * value_width / kPanel);
  w.queries = take(rows * width);
  w.weights = take(rows * kPartition);
  w.key_scales = take(kPartition);
  w.value_scales = take(kPartition);
  w.visible = (Visible*)take(rows * (int64_t)(sizeof(Visible) / sizeof(float)));
  w.states = (State*)take(ceil_div(rows, kRows) * (int64_t)(sizeof(State) / sizeof(float)));
  w.merged = (Merged*)take(rows * 2);
  w.records = unit.records;
  w.row_stride = unit.row_stride;
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t at = w.position(row);
    w.visible[row] = {how.oldest(at), unit.ends ? unit.ends[row / group] - 1 : how.newest(at, unit.length)};
    if (unit.listed) w.visible[row] = {0, unit.listed - 1};
  }
  if (!unit.records) {
    w.records = take(rows * record_floats(cache.value_dim));
    w.row_stride = record_floats(cache.value_dim);
  }
  return w;
}

// Lays out the queries of a unit, scaled.
template <bool Pairs>
void lay_queries(const Work& w) {
  const int64_t first = w.cache.latent ? w.value_dim : w.dim, rest = w.dim - first;
  float joined[kLanes];
  for (int64_t row = 0; row < w.rows; ++row) {
    const float* q = w.unit.q + w.query(row) * first;
    const float* q_rest = w.unit.q_rest + w.query(row) * rest;
    float* to = w.queries + row * w.width;
    for (int64_t d = 0; d < w.width; d += kLanes) {
      F x;
      if (d + kLanes <= first || !rest) {
        x = load_some(q + d, first - d) * w.how.scale;
      } else if (d >= first) {
        x = load_some(q_rest + d - first, w.dim - d) * w.how.scale;
      } else {
        for (int64_t i = 0; i < kLanes; ++i)
          joined[i] = d + i < first ? q[d + i] : d + i < w.dim ? q_rest[d + i - first] : 0.0f;
        x = load(joined) * w.how.scale;
      }
      if constexpr (Pairs) {
        store_as(to + d / 2, to_bf16(x));
      } else {
        store(to + d, x);
      }
    }
  }
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

// Copies the scales of positions [low, high) of the partition at `start`: of values, and of keys, but for
// latents, whose parts have two and are multiplied by them when they are laid out.
inline void copy_scales(const Work& w, int64_t start, int64_t low, int64_t high) {
  if (w.unit.listed) {
    for (int64_t i = low; i < high; ++i) {
      const Place from = w.vector(start + i);
      w.value_scales[i] = from.layer.value_scales[from.index];
    }
    return;
  }
  for (int64_t i = low / kPanel * kPanel; i < high; i += kPanel) {
    const int64_t first = start + i;
    if (!w.cache.latent) {
      Columns<float> keys(w, w.cache.key_scales, 1, first, start + low, start + high);
      store(w.key_scales + i, load(keys.row(0)));
    }
    if (w.value_dim == 0) continue;
    Columns<float> values(w, w.cache.value_scales, 1, first, start + low, start + high);
    store(w.value_scales + i, load(values.row(0)));
  }
}

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
    for (int64_t d = 0; d < dim; ++d, to += kPanel) {
      const T* from = keys.row(d);
      for (int i = 0; i < kParts; ++i)
        store_as(to + i * kPartLanes, Stored<Form>::part(from + i * kPartLanes));
    }
  }
}

// The same of latents, which are stored by position: squares of 16 positions are exchanged.
template <KVFormat Form, bool Pairs>
void lay_latent_keys(const Work& w, int64_t start, int64_t low, int64_t high) {
  using T = typename Stored<Form>::Type;
  constexpr int64_t kSide = Pairs ? 2 * kLanes : kLanes;  // components of a square
  const int64_t panel = low / kPanel, first = start + panel * kPanel, dim = w.dim;
  const T* rows[kLanes];
  F scales[2]{};
  for (int64_t i = 0; i < kLanes; ++i) {
    const Place from = w.vector(least(most(first + i, start + low), start + high - 1));
    rows[i] = from.vector<T>();
    if constexpr (Form == KVFormat::int8) {
      scales[0][i] = from.layer.value_scales[from.index];
      if (dim > w.value_dim) scales[1][i] = from.layer.key_scales[from.index];
    }
  }
  float* to = w.keys + panel * w.width * kPanel;
  for (int64_t d = 0; d < dim; d += kSide) {
    U square[kLanes];
    T copy[kSide];
    for (int64_t i = 0; i < kLanes; ++i) {
      const T* from = rows[i] + d;
      if (dim - d < kSide) {
        __builtin_memset(copy, 0, sizeof(copy));
        __builtin_memcpy(copy, from, (size_t)(dim - d) * sizeof(T));
        from = copy;
      }
      if constexpr (Pairs) {
        square[i] = load_as<U>(from);
      } else {
        square[i] = (U)load_stored<Form>(from);
      }
    }
    exchange(square);
    const int64_t count = Pairs ? ceil_div(least(kSide, dim - d), 2) : least(kSide, dim - d);
    for (int64_t k = 0; k < count; ++k, to += kPanel) {
      F x = (F)square[k];
      if constexpr (Form == KVFormat::int8) x *= scales[d + k >= w.value_dim];
      store(to, x);
    }
  }
}

// Lays out values of positions [low, high) of the partition at `start`, with zeros to complete a pair.
template <KVFormat Form, bool Pairs>
void lay_values(const Work& w, int64_t start, int64_t low, int64_t high) {
  using T = typename Stored<Form>::Type;
  const int64_t size = w.size, dim = w.value_dim, stride = w.cache.value_stride();
  const auto at = [&](int64_t i) {
    if (w.unit.listed) return w.vector(start + i).vector<T>();
    return (const T*)w.cache.values + (w.page(start + i) * size + w.place(start + i)) * stride;
  };
  T copies[2][kLanes];
  if constexpr (Pairs) {
    for (int64_t i = low / 2 * 2; i < high; i += 2) {
      const bool has_even = i >= low, has_odd = i + 1 < high;
      const T *even = at(i), *odd = w.unit.listed && has_odd ? at(i + 1) : even + stride;  // or in one block
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
      float* to = w.values + i * kPanel;
      for (int64_t d = 0; d < dim; d += kPanel, to += kValueStride) {
        const T* some = readable(from + d, dim - d, copies[0]);
        for (int j = 0; j < kParts; ++j)
          store_as(to + j * kPartLanes, Stored<Form>::part(some + j * kPartLanes));
      }
    }
  }
}

}  // namespace quire::QUIRE_ISA
