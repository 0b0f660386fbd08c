// Attention over the paged cache: the parameters of its kernels.
//
// The context is divided into segments of 512 positions, and these into partitions of 64, both counted from
// position 0. Within a segment there is one running softmax over partitions; segments are then merged in
// order. So the sum of a token has one order, independent of other tokens, threads and blocks.
#pragma once

#include "kernels.h"

namespace quire {

constexpr int64_t kPartition = 64;
constexpr int64_t kSegment = 512;
constexpr int64_t kUnitRows = 64;  // most (token, query head) pairs that share one conversion of the cache

struct Attention {
  const KVLayer* cache;
  int64_t heads;       // query heads; a multiple of `groups`
  int64_t groups;      // of query heads that are computed together: the heads of the cache, but for latents
  float scale;         // of scores
  int64_t window;      // visible positions of a token, its own included, or those on either side; 0: all
  float softcap;       // 0: none
  const float* sinks;  // [heads] or null
  bool chunked;        // windows begin anew at multiples of their length
  bool both;           // tokens see positions on both sides, not only those up to their own
  // Added to scores, by head and how far a position is from the token's own: [heads][num_biases], that of its
  // own at `first_after`. Whole panels of positions from the first of a sequence on have one. Null: none.
  const float* biases = nullptr;
  int64_t num_biases = 0, first_after = 0;
  int64_t chosen = 0;   // positions or entries that a token attends to if it sees more; 0: it attends to all
  bool listed = false;  // tokens attend to their windows and then to entries (AttentionUnit)
  const KVLayer* entries = nullptr;  // of such tokens, or null

  // Always inlined: shared by kernels of several instruction sets.
  [[gnu::always_inline]] int64_t group() const { return heads / groups; }
  [[gnu::always_inline]] int64_t oldest(int64_t position) const {
    if (chunked) return position / window * window;
    if (both) return window && position > window ? position - window : 0;
    return window && position >= window ? position + 1 - window : 0;
  }
  // `length`: of the sequence.
  [[gnu::always_inline]] int64_t newest(int64_t position, int64_t length) const {
    if (!both) return position;
    return window && position + window < length ? position + window : length - 1;
  }
  // The entries that a token attends to, and the positions before them, if tokens are `listed`.
  [[gnu::always_inline]] int64_t num_entries(int64_t position) const {
    const int64_t complete = entries ? (position + 1) / entries->every : 0;
    return chosen && chosen < complete ? chosen : complete;
  }
  [[gnu::always_inline]] int64_t num_recent(int64_t position) const {
    return position + 1 < window ? position + 1 : window;
  }
  // The vectors that take the place of the context of a token; 0 if none do.
  [[gnu::always_inline]] int64_t num_listed(int64_t position) const {
    if (listed) return num_recent(position) + num_entries(position);
    return chosen && position >= chosen ? chosen : 0;
  }
};

// Some tokens of one sequence, with the query heads of one group. Its rows are pairs (token, head of the
// group), ordered by token.
struct AttentionUnit {
  const float* q;            // from the first token on, [tokens, heads, dim], of latents [.., value_dim]
  const float* q_rest;       // of latents: the rest of the queries, [tokens, heads, dim - value_dim]
  float* out;                // [tokens, heads, value_dim]
  const int64_t* positions;  // [tokens], ascending by one
  const int64_t* ends;       // [tokens], ascending, of what tokens see beyond their own positions; or null
  // Of one token: so many vectors take the place of its context, if not 0. The first are the `recent`
  // positions up to its own. The others are entries, or positions of the same cache: from the first on, or
  // those `chosen`, ascending.
  int64_t listed, recent;
  const int32_t* chosen;
  const int64_t* entry_table;  // of their blocks
  int64_t tokens;
  int64_t group;               // also the head of the cache, but for latents
  const int64_t* block_table;  // of the sequence
  int64_t length;              // of the sequence, where tokens see both sides
  int64_t first_segment, last_segment;
  // Null if the unit covers all segments its tokens see: then it writes `out`. Otherwise the record of its
  // first segment for its first row; records of further segments follow, those of the next row are
  // `row_stride` later.
  float* records;
  int64_t row_stride;
};

// Floats of the record of a row for a segment: mixed values [padded], then peak and total of the weights.
[[gnu::always_inline]] constexpr int64_t record_floats(int64_t dim) { return round_up(dim, kPanel) + kPanel; }

// Floats of scratch for a unit of `rows` rows.
[[gnu::always_inline]] constexpr int64_t attention_scratch(int64_t rows, const KVLayer& cache) {
  const int64_t width = round_up(cache.dim, kPanel), values = round_up(cache.value_dim, kPanel);
  const int64_t row = width + kPartition + record_floats(cache.value_dim) + 2 * kPanel;
  return kPartition * width + (kPartition + 1) * values + rows * row + 2 * kPartition + 3 * kPanel;
}

}  // namespace quire
