// What sampling does to a row of logits that is as long as the vocabulary: docs/sampling.md.
//
// The twin in NumPy is quire/sampling/arithmetic.py; it says what each function means. Functions are pure,
// take one row of at least one logit, and allocate nothing. A row's sums have one order that follows from the
// row.
//
//   greatest    of a faulty row too; the others' rows are in order
//   exp_sum     the sum of exp(logit - maximum), whose logarithm log-probabilities need
//   rank        a token's place in the ranking, from 1
//   top_ids     the first min(k, count) ids of the ranking, in its order, 0 < k <= kMostTop
#pragma once

#include <cstddef>
#include <cstdint>

namespace quire {

// The first token of the ranking (greater logit first, lower id among equals). Where a logit is NaN, that is
// the first NaN; otherwise +inf, if there is one. So a logit that is not finite names the row's fault.
struct Greatest {
  int64_t id;
  float logit;
};

// How a token is drawn from a row that `greatest` found in order.
struct Draw {
  double maximum;  // the greatest logit
  double temperature, top_p, min_p;
  int64_t top_k;  // 0, or anything not less than the row: all
  double u;       // in [0, 1)
};

constexpr int64_t kMostTop = 64;  // the most tokens that top_ids can give

// Bytes of scratch memory, aligned to 64, for draw and top_ids of a row of `count` logits.
constexpr int64_t sampling_scratch_bytes(int64_t count) {
  return 20 * (count + 64) + 72 * (count / 1024 + 2);  // 5 words a token, 18 a block of tokens
}

}  // namespace quire
