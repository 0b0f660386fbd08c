// The parameters of the kernel of the gated delta rule (quire.program.ops.delta).
//
// A kernel computes some positions of one chunk of one row, for a key head and the heads of values that share
// it. Sums are over key dimensions and positions, in their order, with lanes over values: so bits do not
// depend on how many positions are computed at once.
#pragma once

#include "kernels.h"

namespace quire {

constexpr int64_t kDeltaChunk = 64;  // positions computed from one state

struct DeltaShape {
  int64_t heads;  // of values, that share the key head
  int64_t key_dim, value_dim;
  bool by_channel;  // a decay for each number of a key

  // Strides of vectors of keys and values in scratch memory, whose rest is zero.
  [[gnu::always_inline]] int64_t key_stride() const { return (key_dim + 15) / 16 * 16; }
  [[gnu::always_inline]] int64_t value_stride() const { return (value_dim + 15) / 16 * 16; }
  // Numbers of G of a head at a position, and their stride.
  [[gnu::always_inline]] int64_t decays() const { return by_channel ? key_dim : 1; }
  [[gnu::always_inline]] int64_t total_stride() const { return by_channel ? key_stride() : 1; }
  // Floats of the arrays that DeltaPiece points to, and of those that the kernel uses besides.
  int64_t floats() const {
    const int64_t kept = kDeltaChunk * (key_stride() + heads * (value_stride() + total_stride()));
    return kept + 8 * key_stride() + kDeltaChunk * (value_stride() + (by_channel ? key_stride() : 0));
  }
};

struct DeltaPiece {
  DeltaShape shape;
  int64_t place, count;      // positions of the chunk before these, and of these
  const float* before;       // states [heads, key_dim, value_dim] at its start; null: zeros
  float* after;              // receives those at its end, or null
  float *keys, *u, *totals;  // [64, key_stride], [heads, 64, value_stride], [heads, 64, total_stride]
  float* scratch;            // what remains of the floats of the shape
  int64_t key_width, value_width, decay_width, out_width;  // strides of the inputs and of out
  const float *queries, *new_keys, *values;                // of the first position
  const float *decays, *betas;  // g and beta [heads]; by channel decays [heads, key_dim] before the softplus,
  const float *rates, *bias;    // with the factors [heads] of it and what is added before, shaped as they are
  float* out;                   // [heads, value_dim]
};

}  // namespace quire
