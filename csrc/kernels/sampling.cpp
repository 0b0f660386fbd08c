// Functions of a row of logits for log-probabilities.

#include "sampling_select.h"
#include "table.h"

namespace quire::QUIRE_ISA {

namespace {

// Finds the first NaN of a row, if there is one.
bool find_nan(const float* x, int64_t count, Greatest& found) {
  for (int64_t i = 0; i < count; i += kWide) {
    const V v = load_row<V>(x, i, count);
    if (const uint32_t nan = bits_of(v != v)) {
      found = {i + __builtin_ctz(nan), __builtin_nanf("")};
      return true;
    }
  }
  return false;
}

}  // namespace

Greatest greatest(const float* x, int64_t count) {
  V faults{};
  Greatest best{0, kMinusInf};
  for (int64_t first = 0; first < count; first += kBlock) {
    const float highest = greatest_lane(highest_of(x + first, block_end(first, count) - first, faults));
    if (highest > best.logit) best = {first, highest};
  }
  if (bits_of(faults != faults) && find_nan(x, count, best)) return best;
  while (x[best.id] != best.logit) ++best.id;  // starting at its block
  return {best.id, x[best.id]};
}

double exp_sum(const float* logits, int64_t count, double maximum) {
  return sum(logits, count, Weighing(maximum, 1), nullptr);
}

int64_t rank(const float* x, int64_t count, int64_t id) {
  const float logit = x[id];
  int64_t place = 1, i = 0;
  K counts{};
  for (; i + kWide <= id; i += kWide) counts -= load_as<V>(x + i) >= logit;
  for (; i < id; ++i) place += x[i] >= logit;
  for (; i < count; i += kWide) counts -= load_row<V>(x, i, count) > logit;
  for (int lane = 0; lane < kWide; ++lane) place += counts[lane];
  return place;
}

void top_ids(const float* logits, int64_t count, int64_t k, int64_t* ids, void* memory) {
  Kept kept{logits, nullptr, count};
  if (k < count) kept = keep_top_k(kept, k, Scratch(memory, count));
  for (int64_t i = 0; i < kept.count; ++i) {  // insertion sort by logit; ties are in order of id already
    int64_t at = i;
    for (; at > 0 && logits[ids[at - 1]] < kept.logits[i]; --at) ids[at] = ids[at - 1];
    ids[at] = kept.ids ? kept.ids[i] : i;
  }
}

}  // namespace quire::QUIRE_ISA
