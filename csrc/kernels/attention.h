// Attention over the paged cache: what its kernels are told.
//
// The context is cut into segments of 512 positions and these into partitions of 64, both counted from
// position 0. Within a segment runs one softmax, partition by partition; segments are then merged in order.
// So the sum of a token has one order, whichever tokens, threads and blocks are about it.
#pragma once

#include "kernels.h"

namespace quire {

constexpr int64_t kPartition = 64;
constexpr int64_t kSegment = 512;
constexpr int64_t kUnitRows = 64;  // (token, query head) pairs that share one conversion of keys and values

struct Attention {
  const KVLayer* cache;
  int64_t heads;       // of queries; a multiple of those of the cache
  float scale;         // of scores
  int64_t window;      // positions a token sees, its own included; 0: all up to its own
  float softcap;       // 0: none
  const float* sinks;  // [heads] or null

  // Inlined always: kernels of several instruction sets share these.
  [[gnu::always_inline]] int64_t group() const { return heads / cache->heads; }
  [[gnu::always_inline]] int64_t oldest(int64_t position) const {
    return window && position >= window ? position + 1 - window : 0;
  }
};

// Some tokens of one sequence with the query heads that share one head of the cache. Its rows are
// (token, head of the group), token by token.
struct AttentionUnit {
  const float* q;            // of the first token, [tokens, heads, dim]
  float* out;                // likewise
  const int64_t* positions;  // [tokens], ascending by one
  int64_t tokens;
  int64_t head;                // of the cache
  const int64_t* block_table;  // of the sequence
  int64_t first_segment, last_segment;
  // Null where the unit covers all segments its tokens see: it writes `out`. Otherwise what it found of its
  // first segment for its first row; the next segment's record follows, the next row's is `row_stride` on.
  float* records;
  int64_t row_stride;
};

// What a row found in a segment: its mixed values [padded dim], then the peak and the total of its weights.
[[gnu::always_inline]] constexpr int64_t record_floats(int64_t dim) { return round_up(dim, kPanel) + kPanel; }

// Floats of scratch that a unit of `rows` rows needs.
[[gnu::always_inline]] constexpr int64_t attention_scratch(int64_t rows, int64_t dim) {
  const int64_t width = round_up(dim, kPanel);
  const int64_t row = width + kPartition + record_floats(dim) + kPanel;
  return (2 * kPartition + 1) * width + rows * row + 3 * kPanel;
}

}  // namespace quire
