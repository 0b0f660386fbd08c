// Sampling kernels: functions of a row of logits over the vocabulary (docs/sampling.md).
//
// quire/sampling/ defines them in NumPy. Functions are pure, take one row of at least one logit, and allocate
// nothing. Sums have one order, determined by the row.
//
//   choose      the whole pipeline from the logits of a row to its token
//   greatest    the first token of the ranking; the following require its logit to be finite
//   exp_sum     the sum of exp(logit - maximum), whose logarithm log-probabilities need
//   rank        the rank of a token, from 1
//   top_ids     the first min(k, count) ids of the ranking, in its order, 0 < k <= kMostTop
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels.h"

namespace quire {

// The first token of the ranking (greater logit first, lower id among equals). If a logit is NaN, it is the
// first NaN; else +inf, if there is one. So a logit that is not finite identifies the fault of the row.
struct Greatest {
  int64_t id;
  float logit;
};

// Token ids in ascending order.
struct Ids {
  const int32_t* ids = nullptr;
  int64_t count = 0;
};

// A token of the prompt or the output, and its number of occurrences in the output.
struct Emitted {
  int32_t id, count;
};

// The edits of a row before temperature: steps 2 to 9 of docs/sampling.md, in this order.
struct Edits {
  bool restricts = false;  // to `allowed`: every other logit becomes -inf
  Ids allowed;
  Ids biased;  // `biases` are added to these
  const float* biases = nullptr;
  const uint32_t* mask = nullptr;    // [ceil(V / 32)], a bit for each allowed token; null: all
  Ids disallowed;                    // become -inf
  const Emitted* emitted = nullptr;  // ascending; the penalties apply to these
  int64_t num_emitted = 0;
  double repetition = 1;
  float frequency = 0, presence = 0;

  QUIRE_INLINE bool any() const {
    return restricts || biased.count || mask || disallowed.count || num_emitted;
  }
};

// The parameters of steps 11 to 16.
struct Choosing {
  double temperature = 0, top_p = 1, min_p = 0;
  int64_t top_k = 0;  // 0, or not less than the length of the row: all
  double u = 0;       // in [0, 1)
};

// The reason no token can be sampled: the logits of the model, or the edits.
enum class Fault : int32_t { none, only_minus_inf, nan, infinite, excluded, too_large };

struct Chosen {
  int64_t id;
  Fault fault;
};

constexpr int64_t kMostTop = 64;  // maximum k of top_ids

// Bytes of scratch, aligned to 64, for top_ids of a row of `count` logits.
constexpr int64_t sampling_scratch_bytes(int64_t count) {
  return 20 * (count + 64) + 72 * (count / 1024 + 2);  // 5 words per token, 18 per block of tokens
}

// The same for choose, which also keeps the edited logits, and three numbers per block.
constexpr int64_t choosing_scratch_bytes(int64_t count) {
  return sampling_scratch_bytes(count) + 4 * (count + 64) + 24 * (count / 1024 + 2) + 256;
}

}  // namespace quire
