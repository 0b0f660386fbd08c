// Entries of several tokens: sums of their values, weighted by a softmax of their gates for each number.

#include "compress.h"

#include "functions.h"
#include "table.h"

namespace quire::QUIRE_ISA {

void compress(const Compression& how, const int64_t* table, int64_t position, float* out) {
  const KVLayer& cache = *how.cache;
  const int64_t width = cache.value_dim, dim = how.dim, own = position + 1 - how.every;
  const int64_t first = how.overlapping() && own > 0 ? own - how.every : own;
  const auto row = [&](int64_t at) { return (const float*)kept_row(cache, table, at); };
  // Where the numbers of a token that count begin, among all it has.
  const auto begin = [&](int64_t at) { return how.overlapping() && at >= own ? dim : 0; };
  const auto gate = [&](int64_t at, int64_t d) {
    const int64_t i = begin(at) + d;
    const F bias = load_some(how.bias + at % how.every * width + i, dim - d);
    return load_some(row(at) + width + i, dim - d) + bias;
  };
  for (int64_t d = 0; d < dim; d += kLanes) {
    F peak = gate(first, d), total{}, sum{};
    for (int64_t at = first + 1; at <= position; ++at) peak = max(peak, gate(at, d));
    for (int64_t at = first; at <= position; ++at) {
      const F weight = exp_negative(gate(at, d) - peak);
      total += weight;
      sum = fma(weight, load_some(row(at) + begin(at) + d, dim - d), sum);
    }
    store_some(out + d, sum / total, dim - d);
  }
}

}  // namespace quire::QUIRE_ISA
