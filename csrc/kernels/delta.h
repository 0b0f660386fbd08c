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

  // Strides of vectors of keys and values in scratch memory, whose rest is zero.
  [[gnu::always_inline]] int64_t key_stride() const { return (key_dim + 15) / 16 * 16; }
  [[gnu::always_inline]] int64_t value_stride() const { return (value_dim + 15) / 16 * 16; }
  // Floats of the arrays that DeltaPiece points to, and of those that the kernel uses besides.
  int64_t floats() const {
    const int64_t kept = kDeltaChunk * (key_stride() + heads * (value_stride() + 1));
    return kept + 8 * key_stride() + kDeltaChunk * value_stride();
  }
};

struct DeltaPiece {
  DeltaShape shape;
  int64_t place, count;                      // positions of the chunk before these, and of these
  const float* before;                       // states [heads, key_dim, value_dim] at its start; null: zeros
  float* after;                              // receives those at its end, or null
  float *keys, *u, *totals;                  // [64, key_stride], [heads, 64, value_stride], [heads, 64]
  float* scratch;                            // what remains of the floats of the shape
  int64_t width, out_width, gates;           // strides of the inputs, of out, of decays and betas
  const float *queries, *new_keys, *values;  // of the first position
  const float *decays, *betas;               // g and beta of the heads
  float* out;                                // [heads, value_dim]
};

}  // namespace quire
