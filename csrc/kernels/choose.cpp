// The sampling pipeline of docs/sampling.md, from the logits of a row to a token.
//
// The row is read from memory once (sampling_survey.h). Later passes read only blocks whose greatest logit
// can matter.

#include "sampling_select.h"
#include "sampling_survey.h"
#include "table.h"

namespace quire::QUIRE_ISA {

namespace {

// Returns the least logit of at least this weight, which is at most 1.
float logit_of(double weight, Weighing weighing) {
  const double logit = weighing.maximum + __builtin_log2(weight) / weighing.scale;
  const float nearest = (float)logit;
  return nearest < logit ? of_key(key_of(V{} + nearest)[0] + 1) : nearest;
}

// Returns the shortest prefix of the ranking with top_p of the weight.
Kept keep_top_p(Kept kept, Weighing weighing, double top_p, const Scratch& scratch) {
  const double total = sum(kept.logits, kept.count, weighing, nullptr);
  // All tokens with smaller weights together have less than 1 - top_p of the total: none is in the nucleus.
  // The factor 0.5 allows for rounding.
  const double lightest = 0.5 * (1 - top_p) * total / (double)kept.count;
  kept = apply({logit_of(lightest, weighing), kept.count}, kept, scratch);
  weigh(kept.logits, kept.count, weighing, scratch.weights);
  return apply(select(kept.logits, scratch.weights, kept.count, top_p * total, scratch.keys), kept, scratch);
}

// Returns the index where the cumulative sum of the weights exceeds u times the total; its weight is
// positive.
int64_t inverse_cumulative(const float* x, int64_t count, Weighing weighing, double u, double* blocks) {
  const double target = u * sum(x, count, weighing, blocks);
  double before = 0;
  int64_t first = 0;
  // u < 1, so the target is below the total even when rounded, and a block is found.
  for (; first + kBlock < count && before + blocks[first / kBlock] <= target; first += kBlock)
    before += blocks[first / kBlock];
  const int64_t end = block_end(first, count);
  double weights[kBlock];
  weigh(x + first, end - first, weighing, weights);
  int64_t last = first;
  for (int64_t i = first; i < end; ++i) {
    if (weights[i - first] > 0) last = i;  // the answer, where the block's sum was rounded otherwise
    before += weights[i - first];
    if (before > target) break;
  }
  return last;
}

// Returns a bit for each of `size` <= 64 logits that is not below the threshold.
QUIRE_INLINE uint64_t bits_above(const float* x, int64_t size, float threshold) {
  uint64_t bits = 0;
  if (size >= 64) {
    for (int i = 0; i < 64; i += kWide) bits |= (uint64_t)bits_of(load_as<V>(x + i) >= threshold) << i;
    return bits;
  }
  for (int64_t i = 0; i < size; ++i) bits |= (uint64_t)(x[i] >= threshold) << i;
  return bits;
}

// Appends those of 64 tokens, from `first` on, whose bits are set, to the kept tokens in `scratch`.
QUIRE_INLINE void gather_group(const float* x, int64_t size, int64_t first, uint64_t bits,
                               const Scratch& scratch, int64_t& count) {
  constexpr int kFew = 4;  // always written, to avoid unpredictable branches
  if (const int found = __builtin_popcountll(bits); found <= kFew && size >= 64) {
    for (int n = 0; n < kFew; ++n, bits &= bits - 1) {
      const int i = __builtin_ctzll(bits | uint64_t(1) << 63);
      scratch.logits[count + n] = x[i];
      scratch.ids[count + n] = (int32_t)(first + i);
    }
    count += found;
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

// Returns the tokens not below `threshold`, in order of id.
Kept gather(const Survey& found, float threshold) {
  const Scratch& scratch = found.scratch;
  int64_t count = 0;
  for (int64_t first = 0, b = 0; first < found.count; first += kBlock, ++b) {
    if (!found.at[b] || !(found.highest[b] >= threshold)) continue;
    const int64_t size = block_end(first, found.count) - first;
    uint64_t bits[kBlock / 64];
    int64_t groups[kBlock / 64], num_groups = 0;  // groups with any: listed without unpredictable branches
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

// Estimates a lower bound of the weights in the nucleus from the mean weight, assuming normally distributed
// logits. The greatest of n such logits is about 0.9 sqrt(2 log n) deviations above the mean.
double likely_lightest(double top_p, double mean_weight, int64_t count) {
  const double greatest = 0.9 * __builtin_sqrt(2 * __builtin_log((double)count));
  const double square = greatest * greatest + 2 * __builtin_log(mean_weight);
  const double deviation = greatest - (square > 0 ? __builtin_sqrt(square) : 0);
  const double t = __builtin_sqrt(-2 * __builtin_log(top_p > 0.5 ? 1 - top_p : 0.5));
  // Abramowitz and Stegun 26.2.22, for the distribution of the weight; 0.8 is a margin for other
  // distributions.
  const double tail = t - (2.30753 + 0.27061 * t) / (1 + (0.99229 + 0.04481 * t) * t) + 0.8;
  return __builtin_exp(deviation * (deviation - tail - greatest));
}

// Returns the tokens of at least this weight, with their weights in scratch.weights, and the sum of these.
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

// Returns the shortest prefix of the ranking of the whole row with top_p of the weight.
Kept nucleus(const Survey& found, const Weighing& weighing, double top_p, double total) {
  const double target = top_p * total;
  // All tokens with smaller weights together have less than 1 - top_p of the total, so none is in the
  // nucleus. The factor 0.5 allows for rounding.
  const double lightest = 0.5 * (1 - top_p) * total / (double)found.count;
  // A greater bound leaves fewer tokens, and is valid if these have enough weight.
  const double likely = likely_lightest(top_p, total / (double)found.count, found.count);
  Kept kept{};
  double above = 0;
  if (likely > lightest) kept = weighed_above(found, weighing, likely, above);
  if (!(above > target * (1 + 1e-9))) kept = weighed_above(found, weighing, lightest, above);
  const Scratch& scratch = found.scratch;
  return apply(select(kept.logits, scratch.weights, kept.count, target, scratch.keys), kept, scratch);
}

// Returns the first k tokens of the ranking, or more if k is large.
Kept top_k_or_more(const Survey& found, int64_t k) {
  // k columns have a logit not below the k-th greatest of the columns: no token below it is needed.
  const int64_t columns = ceil_div(found.count, kBlock) * kWide;
  if (k > columns / 2) return gather(found, kMinusInf);
  return gather(found, kth(found.scratch.columns, columns, k, found.scratch).threshold);
}

// Returns the token of the whole row where the cumulative sum of the weights exceeds u times the total.
int64_t draw_from_all(const Survey& found, const Weighing& weighing, double total, double u) {
  const double target = u * total;
  const int64_t blocks = ceil_div(found.count, kBlock);
  double before = 0;
  int64_t b = 0, last = 0;
  // u < 1, so the target is below the total even when rounded, and a block with weight is found.
  for (; b + 1 < blocks && !(before + found.weights[b] > target); ++b) before += found.weights[b];
  if (!found.at[b]) return found.id;  // not reached unless weights are NaN
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
  const bool whole = how.min_p <= 0 && !(how.top_k > 0 && how.top_k < count);  // needs all weights
  const bool draws = how.temperature != 0;
  Weighing weighing(0, draws ? how.temperature : 1);
  const Weighing* sums = draws && whole ? &weighing : nullptr;
  // Lighter tokens can only be drawn by the smallest u of all.
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
