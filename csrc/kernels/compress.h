// The parameters of the kernel that makes entries of several tokens (quire.program.ops.compressed).
#pragma once

#include "kernels.h"

namespace quire {

// Returns what the cache of a sequence has of a position: its values, then its gates.
[[gnu::always_inline]] inline float* kept_row(const KVLayer& cache, const int64_t* table, int64_t position) {
  const int64_t block = table[position / cache.block_size] * cache.stride;
  return (float*)cache.values + (block * cache.block_size + position % cache.block_size) * cache.dim;
}

struct Compression {
  const KVLayer* cache;  // float32
  const float* bias;     // [every, numbers of values], added to gates
  int64_t every, dim;    // tokens and numbers of an entry
  // Tokens have twice as many numbers: the first half for the entry after their own.
  [[gnu::always_inline]] bool overlapping() const { return cache->value_dim > dim; }
};

}  // namespace quire
