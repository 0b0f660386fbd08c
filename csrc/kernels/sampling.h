// What sampling does to a row of logits that is as long as the vocabulary: docs/sampling.md.
//
// The definition, in NumPy, is quire/sampling/. Functions are pure, take one row of at least one logit, and
// allocate nothing. A row's sums have one order that follows from the row.
//
//   choose      the whole pipeline from the logits of a row to its token
//   greatest    what follows is for rows in which it is finite
//   exp_sum     the sum of exp(logit - maximum), whose logarithm log-probabilities need
//   rank        a token's place in the ranking, from 1
//   top_ids     the first min(k, count) ids of the ranking, in its order, 0 < k <= kMostTop
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels.h"

namespace quire {

// The first token of the ranking (greater logit first, lower id among equals). Where a logit is NaN, that is
// the first NaN; otherwise +inf, if there is one. So a logit that is not finite names the row's fault.
struct Greatest {
  int64_t id;
  float logit;
};

// Token ids in ascending order.
struct Ids {
  const int32_t* ids = nullptr;
  int64_t count = 0;
};

// A token of the prompt or the output, and how often it is in the output.
struct Emitted {
  int32_t id, count;
};

// What is done to a row before its temperature: steps 2 to 9 of docs/sampling.md, in this order.
struct Edits {
  bool restricts = false;  // to `allowed`: every other logit becomes -inf
  Ids allowed;
  Ids biased;  // `biases` are added to these
  const float* biases = nullptr;
  const uint32_t* mask = nullptr;    // [ceil(V / 32)], a bit for each token that may follow; null: all may
  Ids disallowed;                    // become -inf
  const Emitted* emitted = nullptr;  // ascending; what the penalties apply to
  int64_t num_emitted = 0;
  double repetition = 1;
  float frequency = 0, presence = 0;

  QUIRE_INLINE bool any() const {
    return restricts || biased.count || mask || disallowed.count || num_emitted;
  }
};

// Steps 11 to 16.
struct Choosing {
  double temperature = 0, top_p = 1, min_p = 0;
  int64_t top_k = 0;  // 0, or anything not less than the row: all
  double u = 0;       // in [0, 1)
};

// Why no token can be chosen: the model's logits, or what the edits made of them.
enum class Fault : int32_t { none, only_minus_inf, nan, infinite, excluded, too_large };

struct Chosen {
  int64_t id;
  Fault fault;
};

constexpr int64_t kMostTop = 64;  // the most tokens that top_ids can give

// Bytes of scratch memory, aligned to 64, for top_ids of a row of `count` logits.
constexpr int64_t sampling_scratch_bytes(int64_t count) {
  return 20 * (count + 64) + 72 * (count / 1024 + 2);  // 5 words a token, 18 a block of tokens
}

// The same for choose, which keeps besides the edited logits, and of each block three numbers.
constexpr int64_t choosing_scratch_bytes(int64_t count) {
  return sampling_scratch_bytes(count) + 4 * (count + 64) + 24 * (count / 1024 + 2) + 256;
}

}  // namespace quire
