// Prefixes of a ranking, without sorting the vocabulary. Part of sampling.cpp and choose.cpp.
//
// Min-p, top-k and top-p each keep a prefix of the ranking, which is identified by its last logit and the
// number of its tokens with exactly that logit: a Cut. It is found like in a radix sort, from the highest
// bits down, but following only the bucket in which the count or weight is reached. Before that, a cheap
// bound excludes most tokens that cannot be in the prefix.
#pragma once

#include "sampling_weights.h"

namespace quire::QUIRE_ISA {

namespace {

constexpr float kMinusInf = -__builtin_inff();

// Returns the greatest of `count` logits by lane, ignoring NaN. `faults` becomes NaN in some lane if a logit
// is not finite.
QUIRE_INLINE V highest_of(const float* x, int64_t count, V& faults) {
  constexpr int kStreams = 4;  // independent chains, to hide latency
  constexpr int64_t step = kStreams * kWide;
  const int64_t whole = count / step * step;
  V high[kStreams], fault[kStreams] = {};
  for (V& h : high) h = V{} + kMinusInf;
  for (int64_t i = 0; i < whole; i += step) {
    for (int s = 0; s < kStreams; ++s) {
      const V v = load_as<V>(x + i + s * kWide);
      high[s] = greater(v, high[s]);
      fault[s] += v * 0.0f;
    }
  }
  for (int64_t i = whole; i < count; i += kWide) {
    const V v = load_row<V>(x, i, count);
    high[0] = greater(v, high[0]);
    if (count - i >= kWide) fault[0] += v * 0.0f;
  }
  for (int64_t i = count / kWide * kWide; i < count; ++i) fault[0][0] += x[i] * 0.0f;
  faults += (fault[0] + fault[1]) + (fault[2] + fault[3]);
  return greater(greater(high[0], high[1]), greater(high[2], high[3]));
}

QUIRE_INLINE float greatest_lane(V v) {
  float lanes[kWide];
  store_as(lanes, v);
  for (int half = kWide / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) lanes[i] = lanes[i] > lanes[i + half] ? lanes[i] : lanes[i + half];
  return lanes[0];
}

struct Cut {
  float threshold;  // greater logits are kept,
  int64_t equals;   // and so many equal ones, lowest ids first
};

struct Range {
  int32_t low, high;
};

// Returns integers in the order of the floats; -0 equals 0.
QUIRE_INLINE K key_of(V x) {
  const K bits = (K)(x + 0.0f);
  return bits ^ ((bits >> 31) & 0x7fffffff);
}

float of_key(int32_t key) {
  const int32_t bits = key ^ ((key >> 31) & 0x7fffffff);
  return load_as<float>(&bits);
}

Range make_keys(const float* x, int64_t count, int32_t* keys) {
  for (int64_t i = 0; i < count; i += kWide) store_as(keys + i, key_of(load_row<V>(x, i, count)));
  Range range{0x7fffffff, (int32_t)0x80000000};
  for (int64_t i = 0; i < count; ++i) {
    range.low = keys[i] < range.low ? keys[i] : range.low;
    range.high = keys[i] > range.high ? keys[i] : range.high;
  }
  return range;
}

// Adds the weights of the greatest keys until they reach `target`: keeps in `keys` and `weights` only the
// bucket where that happens, narrows `range` to it, and adds the weight of higher-ranked keys to `above`.
int64_t narrow(int32_t* keys, double* weights, int64_t count, double target, Range& range, double& above) {
  constexpr int kBuckets = 512, kCopies = 4;  // copies: equal adjacent keys are independent
  double sums[kBuckets][kCopies] = {};
  const uint32_t low = (uint32_t)range.low, width = (uint32_t)range.high - low;
  int shift = 0;
  while (width >> shift >= kBuckets) ++shift;
  for (int64_t i = 0; i < count; ++i) sums[((uint32_t)keys[i] - low) >> shift][i % kCopies] += weights[i];
  uint32_t bucket = width >> shift;
  for (; bucket > 0; --bucket) {
    const double weight = (sums[bucket][0] + sums[bucket][1]) + (sums[bucket][2] + sums[bucket][3]);
    if (above + weight >= target) break;
    above += weight;
  }
  int64_t kept = 0;
  range = {0x7fffffff, (int32_t)0x80000000};
  for (int64_t first = 0; first < count; first += kWide) {
    const U keys_here = load_as<U>(keys + first);
    uint32_t found = bits_of((K)((keys_here - low) >> shift == bucket)) & lanes_below(count - first);
    for (; found; found &= found - 1, ++kept) {
      const int64_t i = first + __builtin_ctz(found);
      const int32_t key = keys[i];
      range.low = key < range.low ? key : range.low;
      range.high = key > range.high ? key : range.high;
      keys[kept] = key;
      weights[kept] = weights[i];
    }
  }
  return kept;
}

// Returns the shortest prefix of the ranking whose weights reach `target`, or all. Overwrites the weights.
Cut select(const float* x, double* weights, int64_t count, double target, int32_t* keys) {
  Range range = make_keys(x, count, keys);
  double above = 0;
  while (count > 1 && range.low != range.high) count = narrow(keys, weights, count, target, range, above);
  const double weight = weights[0], quotient = (target - above) / weight;
  int64_t equals = quotient < (double)count ? (int64_t)quotient : count;  // also if it is NaN
  if (equals < 1) equals = 1;
  while (equals < count && above + (double)equals * weight < target) ++equals;
  while (equals > 1 && above + (double)(equals - 1) * weight >= target) --equals;
  return {of_key(range.low), equals};
}

// The remaining tokens of a row, in order of id.
struct Kept {
  const float* logits;
  const int32_t* ids;  // null: 0, 1, 2 ...
  int64_t count;
};

// Copies the tokens within a cut to scratch.logits and scratch.ids, where `kept` may be already.
Kept apply(Cut cut, Kept kept, const Scratch& scratch) {
  float* const logits = scratch.logits;
  int32_t* const ids = scratch.ids;
  K counting;
  for (int i = 0; i < kWide; ++i) counting[i] = i;
  int64_t count = 0;
  for (int64_t i = 0; i < kept.count; i += kWide) {
    const V v = load_row<V>(kept.logits, i, kept.count);
    uint32_t keep = bits_of(v >= cut.threshold) & lanes_below(kept.count - i);
    if (keep == 0) continue;
    uint32_t equal = bits_of(v == cut.threshold) & keep;
    for (int64_t surplus = __builtin_popcount(equal) - cut.equals; surplus > 0; --surplus) {
      const uint32_t last = 1u << (31 - __builtin_clz(equal));
      equal ^= last, keep ^= last;
    }
    cut.equals -= __builtin_popcount(equal);
    const K numbers = kept.ids ? load_as<K>(kept.ids + i) : counting + (int32_t)i;
    compress(logits + count, (K)v, keep);
    compress(ids + count, numbers, keep);
    count += __builtin_popcount(keep);
  }
  return {logits, ids, count};
}

Cut kth(const float* x, int64_t count, int64_t k, const Scratch& scratch) {
  for (int64_t i = 0; i < count; ++i) scratch.weights[i] = 1;
  return select(x, scratch.weights, count, (double)k, scratch.keys);
}

// Stores the greatest logit of each column of each block in scratch.columns; returns their number.
int64_t make_columns(const float* x, int64_t count, const Scratch& scratch) {
  int64_t columns = 0;
  for (int64_t first = 0; first < count; first += kBlock, columns += kWide) {
    const int64_t end = block_end(first, count);
    V highest = V{} - __builtin_inff();
    for (int64_t i = first; i < end; i += kWide) highest = greater(load_row<V>(x, i, end), highest);
    store_as(scratch.columns + columns, highest);
  }
  return columns;
}

// Returns the first k tokens of the ranking, 0 < k < kept.count.
Kept keep_top_k(Kept kept, int64_t k, const Scratch& scratch) {
  // k columns have a logit not below the k-th greatest of the columns: no token below it is needed.
  if (k <= kept.count / kBlock * kWide / 2) {
    const int64_t columns = make_columns(kept.logits, kept.count, scratch);
    kept = apply({kth(scratch.columns, columns, k, scratch).threshold, kept.count}, kept, scratch);
  }
  return apply(kth(kept.logits, kept.count, k, scratch), kept, scratch);
}

}  // namespace

}  // namespace quire::QUIRE_ISA
