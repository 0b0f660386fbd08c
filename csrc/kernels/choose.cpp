// From the logits of a row to a token: the pipeline of docs/sampling.md.
//
// The row is read from memory once. Of each block of 1,024 tokens the greatest logit and the weight,
// relative to that logit, are found while the block is in the nearest cache. A block that edits touch is
// edited in scratch memory; where nothing is left of it, it is not looked at again. What follows looks only
// at blocks whose greatest logit can matter.

#include "sampling_select.h"
#include "table.h"

namespace quire::QUIRE_ISA {

namespace {

constexpr float kMinusInf = -__builtin_inff();
constexpr uint32_t kAll = (1u << kWide) - 1;  // a bit for each lane

// What is known of a row's blocks.
struct Survey {
  Scratch scratch;
  const float** at;  // [blocks] their logits after the edits; null where none is above -inf
  double* weights;   // [blocks] relative to the greatest logit of the row
  float* highest;    // [blocks] the greatest logits
  float* edited;     // [count]
  int64_t count, id;
  float maximum;  // the greatest logit of the row after the edits, that of token `id`
  bool unusual;   // a logit was not finite before the edits

  Survey(void* memory, int64_t count) : scratch(memory, count), count(count), id(0) {
    const int64_t blocks = ceil_div(count, kBlock), used = round_up(sampling_scratch_bytes(count), 64);
    at = (const float**)((uint8_t*)memory + used);
    weights = (double*)(at + blocks);
    highest = (float*)(weights + blocks);
    edited = highest + round_up(blocks, 16);
    maximum = kMinusInf;
    unusual = false;
  }
};

// A list of ids that is walked through block by block.
struct Walk {
  Ids list;
  int64_t next = 0;

  bool reaches(int64_t end) const { return next < list.count && list.ids[next] < end; }
};

// The same edits, as far as they have come.
struct Editing {
  const Edits& edits;
  Walk allowed, biased, barred;
  int64_t next_emitted = 0;

  explicit Editing(const Edits& edits)
      : edits(edits), allowed{edits.allowed}, biased{edits.biased}, barred{edits.barred} {}

  bool reaches_emitted(int64_t end) const {
    return next_emitted < edits.num_emitted && edits.emitted[next_emitted].id < end;
  }
};

// Where the mask has no bit, -inf. `bits` are those of the lanes, from the lowest.
QUIRE_INLINE V masked(V v, uint32_t bits) {
#if defined(__AVX512DQ__)
  return (V)_mm512_mask_blend_ps((__mmask16)bits, _mm512_set1_ps(kMinusInf), (__m512)v);
#else
  K each;
  for (int i = 0; i < kWide; ++i) each[i] = 1 << i;
  return ((each & (int32_t)bits) != 0) ? v : V{} + kMinusInf;
#endif
}

bool has_bits(const uint32_t* words, int64_t count, uint32_t& missing) {
  uint32_t any = 0, all = ~0u;
  for (int64_t i = 0; i < count; ++i) any |= words[i], all &= words[i];
  missing = ~all;
  return any != 0;
}

// to[0 ... end - first) = x[first ... end), -inf where the mask has no bit.
void copy_masked(const float* x, int64_t first, int64_t end, const uint32_t* mask, float* to) {
  for (int64_t i = first; i < end; i += kWide)
    store_as(to + i - first, masked(load_row<V>(x, i, end), mask[i / 32] >> (i % 32)));
}

float penalized(float logit, const Emitted& token, const Edits& edits) {
  if (edits.repetition != 1) {
    const double wide = logit;  // in float32 a tiny penalty would be zero
    logit = (float)(wide > 0 ? wide / edits.repetition : wide * edits.repetition);
  }
  if (edits.frequency != 0) logit -= edits.frequency * (float)token.count;
  if (edits.presence != 0) logit -= edits.presence * (token.count > 0 ? 1.0f : 0.0f);
  return logit;
}

// The block's logits after the edits: in `x` itself where there are none, else in `to`; null where all are
// -inf for certain.
const float* edit(const float* x, int64_t first, int64_t end, Editing& now, float* to) {
  const Edits& edits = now.edits;
  const bool touched = now.biased.reaches(end) || now.barred.reaches(end) || now.reaches_emitted(end);
  bool left = true, copied = false;
  uint32_t missing = 0;
  if (edits.restricts) {
    left = now.allowed.reaches(end);
  } else if (edits.mask) {
    left = has_bits(edits.mask + first / 32, ceil_div(end - first, 32), missing);
  }
  if (left && edits.restricts) {
    for (int64_t i = 0; i < end - first; i += kWide) store_as(to + i, V{} + kMinusInf);
    for (; now.allowed.reaches(end); ++now.allowed.next) {
      const int32_t id = now.allowed.list.ids[now.allowed.next];
      if (!edits.mask || (edits.mask[id / 32] >> (id % 32) & 1)) to[id - first] = x[id];
    }
    copied = true;
  } else if (left && missing) {
    copy_masked(x, first, end, edits.mask, to);
    copied = true;
  } else if (left && touched) {
    __builtin_memcpy(to, x + first, (size_t)(end - first) * sizeof(float));
    copied = true;
  }
  // Also where nothing is left the lists go on; what is added to -inf is -inf.
  for (; now.biased.reaches(end); ++now.biased.next)
    if (copied) to[now.biased.list.ids[now.biased.next] - first] += edits.biases[now.biased.next];
  for (; now.barred.reaches(end); ++now.barred.next)
    if (copied) to[now.barred.list.ids[now.barred.next] - first] = kMinusInf;
  for (; now.reaches_emitted(end); ++now.next_emitted) {
    const Emitted& token = edits.emitted[now.next_emitted];
    if (copied) to[token.id - first] = penalized(to[token.id - first], token, edits);
  }
  return !left ? nullptr : copied ? to : x + first;
}

// The greatest of `count` logits in each lane; NaN is passed over. `faults` becomes NaN in some lane where
// a logit is not finite.
QUIRE_INLINE V highest_of(const float* x, int64_t count, V& faults) {
  constexpr int kStreams = 4;  // so that one maximum need not wait for the one before
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
    faults += v * 0.0f;  // the lanes beyond the end are a false alarm
  }
  faults += (fault[0] + fault[1]) + (fault[2] + fault[3]);
  return greater(greater(high[0], high[1]), greater(high[2], high[3]));
}

// Goes through the row; with a scale, weighs the blocks, each relative to its own greatest logit. Those
// that weigh less than 2^least of the greatest token so far weigh nothing.
template <bool Edited>
void survey(const float* x, const Edits& edits, const Weighing* weighing, double least, Survey& found) {
  Editing now(edits);
  V faults{};
  for (int64_t first = 0, b = 0; first < found.count; first += kBlock, ++b) {
    const int64_t end = block_end(first, found.count), size = end - first;
    const float* at = x + first;
    V high = highest_of(at, size, faults);
    if (Edited) {
      at = edit(x, first, end, now, found.edited + first);
      V ignored{};
      if (!at) {
        high = V{} + kMinusInf;
      } else if (at != x + first) {
        high = highest_of(at, size, ignored);
      }
    }
    store_as(found.scratch.columns + b * kWide, high);
    float highest = kMinusInf;
    for (int lane = 0; lane < kWide; ++lane) highest = high[lane] > highest ? high[lane] : highest;
    if (highest > found.maximum) {
      found.maximum = highest;
      for (found.id = 0; at[found.id] != highest;) ++found.id;
      found.id += first;
    }
    found.at[b] = highest > kMinusInf ? at : nullptr;
    found.highest[b] = highest;
    if (!weighing) continue;
    const bool matters = ((double)highest - found.maximum) * weighing->scale > least;  // false for NaN
    Weighing own = *weighing;
    own.maximum = highest;
    found.weights[b] = matters ? sum_block(at, size, own) : 0;
  }
  found.unusual = bits_of(faults != faults) != 0;
}

// Makes the weights of blocks relative to the greatest logit of the row; returns their sum. A block in which
// no token has a weight by itself has none either.
double level(const Weighing& weighing, Survey& found) {
  const int64_t blocks = ceil_div(found.count, kBlock);
  double total = 0;
  for (int64_t first = 0; first < blocks; first += 16) {
    double factors[16];
    const int64_t count = blocks - first < 16 ? blocks - first : 16;
    weigh(found.highest + first, count, weighing, factors);
    for (int64_t i = 0; i < count; ++i) {
      double& weight = found.weights[first + i];
      weight = factors[i] > 1e-300 ? weight * factors[i] : 0;
      total += weight;
    }
  }
  return total;
}

// One bit for each of 64 logits, of which `size` are there: is it not below the threshold?
QUIRE_INLINE uint64_t bits_above(const float* x, int64_t size, float threshold) {
  uint64_t bits = 0;
  if (size >= 64) {
    for (int i = 0; i < 64; i += kWide) bits |= (uint64_t)bits_of(load_as<V>(x + i) >= threshold) << i;
    return bits;
  }
  for (int64_t i = 0; i < size; ++i) bits |= (uint64_t)(x[i] >= threshold) << i;
  return bits;
}

// Adds to `kept` those of 64 tokens, from `first` on, whose bits are set. `kept` lies in `scratch`.
QUIRE_INLINE void gather_group(const float* x, int64_t size, int64_t first, uint64_t bits,
                               const Scratch& scratch, int64_t& count) {
  if (__builtin_popcountll(bits) < 8) {
    for (; bits; bits &= bits - 1, ++count) {
      const int i = __builtin_ctzll(bits);
      scratch.logits[count] = x[i];
      scratch.ids[count] = (int32_t)(first + i);
    }
    return;
  }
  K counting;
  for (int i = 0; i < kWide; ++i) counting[i] = i;
  for (int64_t i = 0; i < 64 && i < size; i += kWide) {
    const uint32_t keep = (uint32_t)(bits >> i) & kAll;
    compress(scratch.logits + count, (K)load_row<V>(x, i, size), keep);
    compress(scratch.ids + count, counting + (int32_t)(first + i), keep);
    count += __builtin_popcount(keep);
  }
}

// The tokens that are not below `threshold`, in order of id.
Kept gather(const Survey& found, float threshold) {
  const Scratch& scratch = found.scratch;
  int64_t count = 0;
  for (int64_t first = 0, b = 0; first < found.count; first += kBlock, ++b) {
    if (!found.at[b] || !(found.highest[b] >= threshold)) continue;
    const int64_t size = block_end(first, found.count) - first;
    uint64_t bits[kBlock / 64];
    int64_t groups[kBlock / 64], num_groups = 0;  // that have any: listed without a branch to guess
    for (int64_t group = 0; group < size; group += 64) {
      bits[num_groups] = bits_above(found.at[b] + group, size - group, threshold);
      groups[num_groups] = group;
      num_groups += bits[num_groups] != 0;
    }
    for (int64_t i = 0; i < num_groups; ++i)
      gather_group(found.at[b] + groups[i], size - groups[i], first + groups[i], bits[i], scratch, count);
  }
  return {scratch.logits, scratch.ids, count};
}

// A weight that few tokens of the nucleus are below, if the logits are spread as a normal distribution:
// that is known by the mean weight. The greatest of n such logits is some 0.9 sqrt(2 log n) deviations
// above the mean.
double likely_lightest(double top_p, double mean_weight, int64_t count) {
  const double greatest = 0.9 * __builtin_sqrt(2 * __builtin_log((double)count));
  const double square = greatest * greatest + 2 * __builtin_log(mean_weight);
  const double deviation = greatest - (square > 0 ? __builtin_sqrt(square) : 0);
  const double t = __builtin_sqrt(-2 * __builtin_log(top_p > 0.5 ? 1 - top_p : 0.5));
  // Abramowitz and Stegun 26.2.22, of the distribution of the weight; 0.8 for what is not normal.
  const double tail = t - (2.30753 + 0.27061 * t) / (1 + (0.99229 + 0.04481 * t) * t) + 0.8;
  return __builtin_exp(deviation * (deviation - tail - greatest));
}

// The tokens of at least this weight; in scratch.weights their weights, whose sum comes too.
Kept weighed_above(const Survey& found, const Weighing& weighing, double weight, double& sum) {
  const Kept kept = gather(found, logit_of(weight, weighing));
  D even{}, odd{};
  for (int64_t i = 0; i < kept.count; i += 2 * kHalf) {
    const D low = weigh(load_row<N>(kept.logits, i, kept.count), weighing);
    const D high = weigh(load_row<N>(kept.logits, i + kHalf, kept.count), weighing);
    store_as(found.scratch.weights + i, low);
    store_as(found.scratch.weights + i + kHalf, high);
    even += low, odd += high;
  }
  even += odd;
  sum = 0;
  for (int i = 0; i < kHalf; ++i) sum += even[i];
  return kept;
}

// The shortest beginning of the ranking of the whole row that has top_p of the weight.
Kept nucleus(const Survey& found, const Weighing& weighing, double top_p, double total) {
  const double target = top_p * total;
  // All tokens lighter than this weigh less than 1 - top_p of the sum together, so none is in the nucleus.
  // The half leaves room for rounding.
  const double lightest = 0.5 * (1 - top_p) * total / (double)found.count;
  // A greater bound leaves fewer to look at, and holds if those have the weight.
  const double likely = likely_lightest(top_p, total / (double)found.count, found.count);
  Kept kept{};
  double above = 0;
  if (likely > lightest) kept = weighed_above(found, weighing, likely, above);
  if (!(above > target * (1 + 1e-9))) kept = weighed_above(found, weighing, lightest, above);
  const Scratch& scratch = found.scratch;
  return apply(select(kept.logits, scratch.weights, kept.count, target, scratch.keys), kept, scratch);
}

// The first k tokens of the ranking, or more where they are many.
Kept top_k_or_more(const Survey& found, int64_t k) {
  // k columns have a logit not below the k-th greatest of the columns: no token below it is wanted.
  const int64_t columns = ceil_div(found.count, kBlock) * kWide;
  if (k > columns / 2) return gather(found, kMinusInf);
  return gather(found, kth(found.scratch.columns, columns, k, found.scratch).threshold);
}

// Of the whole row: the token at which the running sum of the weights exceeds the fraction u of their sum.
int64_t draw_from_all(const Survey& found, const Weighing& weighing, double total, double u) {
  const double target = u * total;
  const int64_t blocks = ceil_div(found.count, kBlock);
  double before = 0;
  int64_t b = 0, last = 0;
  // u < 1, so the target is below the sum also when rounded, and a block that has weight is found.
  for (; b + 1 < blocks && !(before + found.weights[b] > target); ++b) before += found.weights[b];
  if (!found.at[b]) return found.id;  // not reached with weights that are numbers
  const int64_t size = block_end(b * kBlock, found.count) - b * kBlock;
  double weights[kBlock];
  weigh(found.at[b], size, weighing, weights);
  for (int64_t i = 0; i < size; ++i) {
    if (weights[i] > 0) last = i;  // the answer, where the block's sum was rounded otherwise
    before += weights[i];
    if (before > target) break;
  }
  return b * kBlock + last;
}

Fault fault_of(float greatest) {
  if (greatest == kMinusInf) return Fault::only_minus_inf;
  if (greatest == __builtin_inff()) return Fault::infinite;
  return greatest != greatest ? Fault::nan : Fault::none;
}

int64_t draw_surveyed(const Survey& found, const Weighing& weighing, const Choosing& how, double total) {
  const bool narrows = how.top_k > 0 && how.top_k < found.count;
  Kept kept{};
  if (how.min_p > 0) {
    kept = gather(found, logit_of(how.min_p, weighing));
  } else if (narrows) {
    kept = top_k_or_more(found, how.top_k);
  } else if (how.top_p < 1) {
    kept = nucleus(found, weighing, how.top_p, total);
  } else {
    return draw_from_all(found, weighing, total, how.u);
  }
  if (narrows && how.top_k < kept.count) kept = keep_top_k(kept, how.top_k, found.scratch);
  if (how.top_p < 1 && (narrows || how.min_p > 0))
    kept = keep_top_p(kept, weighing, how.top_p, found.scratch);
  if (kept.count == 0) return found.id;  // not reached: the greatest token is always kept
  return kept.ids[inverse_cumulative(kept.logits, kept.count, weighing, how.u, found.scratch.blocks)];
}

}  // namespace

Chosen choose(const float* x, int64_t count, const Edits& edits, const Choosing& how, void* memory) {
  Survey found(memory, count);
  const bool whole = how.min_p <= 0 && !(how.top_k > 0 && how.top_k < count);  // weights of all are needed
  const bool draws = how.temperature != 0;
  Weighing weighing(0, draws ? how.temperature : 1);
  const Weighing* sums = draws && whole ? &weighing : nullptr;
  // What is lighter is seen only by the least u of all.
  const double least = how.u > 0 ? -80 : -1000;
  if (edits.any()) {
    survey<true>(x, edits, sums, least, found);
  } else {
    survey<false>(x, edits, sums, least, found);
  }
  if (found.unusual) {
    const Fault fault = fault_of(greatest(x, count).logit);
    if (fault != Fault::none) return {0, fault};
  }
  if (found.maximum == kMinusInf) return {0, Fault::excluded};
  if (found.maximum == __builtin_inff()) return {0, Fault::too_large};
  if (!draws) return {found.id, Fault::none};
  weighing.maximum = found.maximum;
  const double total = sums ? level(weighing, found) : 0;
  return {draw_surveyed(found, weighing, how, total), Fault::none};
}

}  // namespace quire::QUIRE_ISA
