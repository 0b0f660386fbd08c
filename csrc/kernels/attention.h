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
  int64_t heads;       // query heads; a multiple of those of the cache
  float scale;         // of scores
  int64_t window;      // visible positions of a token, its own included; 0: all up to its own
  float softcap;       // 0: none
  const float* sinks;  // [heads] or null

  // Always inlined: shared by kernels of several instruction sets.
  [[gnu::always_inline]] int64_t group() const { return heads / cache->heads; }
  [[gnu::always_inline]] int64_t oldest(int64_t position) const {
    return window && position >= window ? position + 1 - window : 0;
  }
};

// Some tokens of one sequence, with the query heads that share one head of the cache. Its rows are pairs
// (token, head of the group), ordered by token.
struct AttentionUnit {
  const float* q;            // from the first token on, [tokens, heads, dim]
  float* out;                // likewise
  const int64_t* positions;  // [tokens], ascending by one
  int64_t tokens;
  int64_t head;                // a head of the cache
  const int64_t* block_table;  // of the sequence
  int64_t first_segment, last_segment;
  // Null if the unit covers all segments its tokens see: then it writes `out`. Otherwise the record of its
  // first segment for its first row; records of further segments follow, those of the next row are
  // `row_stride` later.
  float* records;
  int64_t row_stride;
};

// Floats of the record of a row for a segment: mixed values [padded dim], then peak and total of the weights.
[[gnu::always_inline]] constexpr int64_t record_floats(int64_t dim) { return round_up(dim, kPanel) + kPanel; }

// Floats of scratch for a unit of `rows` rows.
[[gnu::always_inline]] constexpr int64_t attention_scratch(int64_t rows, int64_t dim) {
  const int64_t width = round_up(dim, kPanel);
  const int64_t row = width + kPartition + record_floats(dim) + kPanel;
  return (2 * kPartition + 1) * width + rows * row + 3 * kPanel;
}

}  // namespace quire
