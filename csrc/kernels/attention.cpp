// Paged attention: products of a register tile of rows with panels of keys, softmax, and products with
// values.
//
// A partition of 64 positions is first converted to panels, once for all rows of a unit. Rows are then
// processed in tiles of 8, in two passes, so that the panels of each product stay in the L1 cache.

#include "attention.h"

#include "functions.h"
#include "panel_products.h"
#include "table.h"

namespace quire::QUIRE_ISA {

namespace {

const float kNothing = -__builtin_inff();  // the score of an invisible position

// Softmax.

QUIRE_INLINE F see(F scores, int64_t first, int64_t oldest, int64_t newest) {
  const I lane{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const I at = lane + (int32_t)first;
  return select((at >= (int32_t)oldest) & (at <= (int32_t)newest), scores, splat(kNothing));
}

// The rows of a tile, and the positions of a partition visible to any of them.
struct Tile {
  int64_t row, rows, low, high;
  int64_t first_panel() const { return low / kPanel; }
  int64_t last_panel() const { return ceil_div(high, kPanel); }
};

Tile tile_at(const Work& w, int64_t row, int64_t start) {
  const int64_t rows = least(kRows, w.rows - row);
  const int64_t newest = w.newest(row + rows - 1);
  return {row, rows, most(w.oldest(row) - start, 0), least(newest + 1 - start, kPartition)};
}

// Returns the biases of the scores of one row, from position `start` on.
QUIRE_INLINE const float* biases(const Work& w, int64_t row, int64_t start) {
  const int64_t head = w.unit.group * w.group + row % w.group;
  return w.how.biases + head * w.how.num_biases + w.how.first_after + start - w.position(row);
}

// Scales the scores of one row, adds biases and masks them; returns their maximum by lane.
template <KVFormat Form>
QUIRE_INLINE F mask(const Work& w, const Tile& t, int64_t row, int64_t start) {
  const int64_t oldest = w.oldest(row) - start, newest = w.newest(row) - start;
  const int64_t end = t.last_panel() * kPanel;
  const float cap = w.how.softcap;
  const float* added = w.how.biases ? biases(w, row, start) : nullptr;
  const bool scaled = Form == KVFormat::int8 && !w.cache.latent;
  float* scores = w.weights + row * kPartition;
  Split<Part> top;
  for (int j = 0; j < kParts; ++j) top.parts[j] = splat_part(kNothing);
  for (int64_t i = t.first_panel() * kPanel; i < end; i += kPanel) {
    const bool seen = oldest <= i && newest >= i + kPanel - 1;
    if (scaled)
      for (int j = 0; j < kPanel; j += kPartLanes)
        store_as(scores + i + j, load_as<Part>(scores + i + j) * load_as<Part>(w.key_scales + i + j));
    if (!seen || cap != 0 || added) {
      F s = load(scores + i);
      if (cap != 0) s = cap * tanh(s / cap);
      if (added) s += load(added + i);
      store(scores + i, seen ? s : see(s, i, oldest, newest));
    }
    for (int j = 0; j < kParts; ++j)
      top.parts[j] = max(top.parts[j], load_as<Part>(scores + i + j * kPartLanes));
  }
  return joined(top);
}

// Converts scores of one row to weights; returns their sum by lane. Those of 8-bit values are then
// multiplied by the scales of the values.
template <KVFormat Form, bool Pairs>
QUIRE_INLINE F weigh(const Work& w, float* scores, const Tile& t, float peak) {
  const int64_t end = t.last_panel() * kPanel;
  if constexpr (Pairs) {
    F total{};
    for (int64_t i = t.first_panel() * kPanel; i < end; i += kPanel) {
      const H half = to_bf16(exp_negative(load(scores + i) - splat(peak)));
      store_as(scores + i / 2, half);
      total += from_bf16(half);  // the rounded weights, as used in the product
    }
    return total;
  } else {
    Split<Part> total{};
    for (int64_t i = t.first_panel() * kPanel; i < end; i += kPanel) {
      for (int j = 0; j < kParts; ++j) {
        float* const at = scores + i + j * kPartLanes;
        Part x = exp_negative(load_as<Part>(at) - splat_part(peak));
        total.parts[j] += x;
        if constexpr (Form == KVFormat::int8) x *= load_as<Part>(w.value_scales + i + j * kPartLanes);
        store_as(at, x);
      }
    }
    return joined(total);
  }
}

template <KVFormat Form, bool Pairs, typename Panels>
void score(const Work& w, const Tile& t, int64_t start, const Panels& keys) {
  const int64_t first = t.first_panel();
  float* scores = w.weights + t.row * kPartition;
  const Operands operands{t.last_panel() - first,
                          w.queries + t.row * w.width,
                          w.width,
                          Pairs ? ceil_div(w.dim, 2) : w.dim,
                          scores + first * kPanel,
                          kPartition,
                          nullptr};
  accumulate<Pairs>(t.rows, operands, keys.from(first, 0));
  F lanes[kRows];
  for (int64_t m = 0; m < kRows; ++m) lanes[m] = m < t.rows ? mask<Form>(w, t, t.row + m, start) : F{};
  const Part top = first_part(across(lanes, [](auto a, auto b) { return a > b ? a : b; }));
  State& state = w.state(t.row);
  const Part before = load_as<Part>(state.peaks), higher = max(top, before);
  const Part finite = select(higher == splat_part(kNothing), Part{}, higher);
  const Part keep = exp_negative(before - finite);
  float peaks[kPartLanes];
  store_as(peaks, finite);
  for (int64_t m = 0; m < t.rows; ++m) lanes[m] = weigh<Form, Pairs>(w, scores + m * kPartition, t, peaks[m]);
  const Part total = first_part(across(lanes, [](auto a, auto b) { return a + b; }));
  store_as(state.peaks, higher);
  store_as(state.keep, keep);
  store_as(state.totals, fma(load_as<Part>(state.totals), keep, total));
}

// mixed = mixed * keep + weights * values.
template <bool Pairs, typename Panels>
void mix(const Work& w, const Tile& t, const Panels& values) {
  const int64_t first = Pairs ? t.low / 2 : t.low, last = Pairs ? ceil_div(t.high, 2) : t.high;
  const Operands operands{w.value_width / kPanel,
                          w.weights + t.row * kPartition + first,
                          kPartition,
                          last - first,
                          w.record(t.row),
                          w.row_stride,
                          w.state(t.row).keep};
  accumulate<Pairs>(t.rows, operands, values.from(0, first));
}

// `end` is the end of the segments of the unit. One tile of rows takes keys and values as they are stored.
template <KVFormat Form, bool Pairs>
void attend_partition(const Work& w, int64_t start, int64_t end) {
  const int64_t low = most(w.oldest(0) - start, 0), high = least(end - start, kPartition);
  if constexpr (Form == KVFormat::int8) copy_scales(w, start, low, high);
  if constexpr (!Pairs) {
    if (w.rows <= kRows && w.size == kPanel && !w.cache.latent && w.value_dim == w.value_width) {
      const StoredBlocks<Form> blocks(w, start, low, high, end);
      const Tile t = tile_at(w, 0, start);
      if (t.low >= t.high) return;
      score<Form, Pairs>(w, t, start, StoredKeys<Form>{blocks});
      return mix<Pairs>(w, t, StoredValues<Form>{blocks});
    }
  }
  const int64_t next = w.unit.listed ? end : start + kPartition;  // what is listed is not side by side
  PartitionPrefetch ahead(w, sizeof(typename Stored<Form>::Type), next, end);
  by_panel(low, high, [&](int64_t first, int64_t last) {
    if (w.cache.latent) {
      lay_latent_keys<Form, Pairs>(w, start, first, last);
    } else {
      lay_keys<Form, Pairs>(w, start, first, last);
    }
    ahead.some();
  });
  const LaidPanels keys{w.keys, w.width * kPanel, ahead};
  for (int64_t row = 0; row < w.rows; row += kRows)
    if (const Tile t = tile_at(w, row, start); t.low < t.high) score<Form, Pairs>(w, t, start, keys);
  by_panel(low, high, [&](int64_t first, int64_t last) {
    lay_values<Form, Pairs>(w, start, first, last);
    ahead.some();
  });
  const LaidPanels values{w.values, kValueStride, ahead};
  for (int64_t row = 0; row < w.rows; row += kRows)
    if (const Tile t = tile_at(w, row, start); t.low < t.high) mix<Pairs>(w, t, values);
}

// Segments.

// The initial state of a merge: empty, or the sink, a score without a value.
Merged begin(const Attention& how, int64_t head, float* out) {
  __builtin_memset(out, 0, (size_t)how.cache->value_dim * sizeof(float));
  return how.sinks ? Merged{how.sinks[head], 1} : Merged{kNothing, 0};
}

void merge(Merged& merged, const float* record, int64_t dim, float* out) {
  const float* state = record + round_up(dim, kPanel);
  if (state[1] == 0) return;  // nothing is visible; a NaN total counts as visible, even without a peak
  const float peak = state[0] > merged.peak ? state[0] : merged.peak;
  F change{};
  change[0] = merged.peak - peak;
  change[1] = state[0] - peak;
  change = exp_negative(change);
  const F keep = splat(change[0]), take = splat(change[1]);
  merged = {peak, merged.total * change[0] + state[1] * change[1]};
  for (int64_t d = 0; d < dim; d += kLanes)
    store_some(out + d, load_some(out + d, dim - d) * keep + load(record + d) * take, dim - d);
}

void finish(const Merged& merged, int64_t dim, float* out) {
  for (int64_t d = 0; d < dim; d += kLanes)  // + 0: the sign of a zero could depend on masked positions
    store_some(out + d, load_some(out + d, dim - d) / merged.total + 0.0f, dim - d);
}

template <KVFormat Form>
void attend_segment(const Work& w, int64_t segment) {
  for (int64_t row = 0; row < w.rows; row += kRows) {
    store_as(w.state(row).peaks, splat_part(kNothing));
    store_as(w.state(row).totals, Part{});
  }
  for (int64_t row = 0; row < w.rows; ++row)
    __builtin_memset(w.record(row), 0, (size_t)w.value_width * sizeof(float));
  const int64_t first = most(segment * kSegment, w.oldest(0) / kPartition * kPartition);
  const int64_t end = least(w.unit.last_segment * kSegment, w.newest(w.rows - 1) + 1);
  const int64_t last = least((segment + 1) * kSegment, end);
  for (int64_t start = first; start < last; start += kPartition)
    attend_partition<Form, kPairs<Form>>(w, start, end);
  for (int64_t row = 0; row < w.rows; ++row) {
    w.record(row)[w.value_width] = w.state(row).peaks[row % kRows];
    w.record(row)[w.value_width + 1] = w.state(row).totals[row % kRows];
  }
}

template <KVFormat Form>
void attend_unit(Work& w) {
  lay_queries<kPairs<Form>>(w);
  const bool whole = !w.unit.records;
  if (whole)
    for (int64_t row = 0; row < w.rows; ++row)
      w.merged[row] = begin(w.how, w.unit.group * w.group + row % w.group, w.out(row));
  for (int64_t segment = w.unit.first_segment; segment < w.unit.last_segment; ++segment) {
    attend_segment<Form>(w, segment);
    if (whole) {
      for (int64_t row = 0; row < w.rows; ++row) merge(w.merged[row], w.record(row), w.value_dim, w.out(row));
    } else {
      w.records += record_floats(w.value_dim);
    }
  }
  if (whole)
    for (int64_t row = 0; row < w.rows; ++row) finish(w.merged[row], w.value_dim, w.out(row));
}

}  // namespace

void attend(const Attention& how, const AttentionUnit& unit, float* scratch) {
  Work w = start(how, unit, scratch);
  switch (how.cache->format) {
    case KVFormat::f32:
      return attend_unit<KVFormat::f32>(w);
    case KVFormat::f16:
      return attend_unit<KVFormat::f16>(w);
    case KVFormat::bf16:
      return attend_unit<KVFormat::bf16>(w);
    case KVFormat::int8:
      return attend_unit<KVFormat::int8>(w);
  }
}

void merge_segments(const Attention& how, int64_t head, const float* records, int64_t count, float* out) {
  const int64_t dim = how.cache->value_dim;
  Merged merged = begin(how, head, out);
  for (int64_t i = 0; i < count; ++i) merge(merged, records + i * record_floats(dim), dim, out);
  finish(merged, dim, out);
}

}  // namespace quire::QUIRE_ISA
