// The parameters of the kernel of Mamba-2's state space (quire.program.ops.state_space).
//
// A kernel computes some positions of one chunk of one row, for some heads that share B and C. Sums are over
// the numbers of a state and over positions, in their order, with lanes over channels: so bits depend neither
// on how many positions are computed at once nor on how heads are divided.
#pragma once

#include "kernels.h"

namespace quire {

constexpr int64_t kSpaceChunk = 64;  // positions computed from one state

struct SpaceShape {
  int64_t heads, state_dim, dim;  // of a piece

  // Floats of the kernel's scratch memory: u of a chunk and products of a few positions with a state.
  int64_t floats() const { return (kSpaceChunk + 8) * ((dim + 15) / 16 * 16); }
};

struct SpacePiece {
  SpaceShape shape;
  int64_t place, count;         // positions of the chunk before these, and of these
  const float* before;          // states [heads, state_dim, dim] at its start; null: zeros
  float* after;                 // receives those at its end, or null
  const float* b[kSpaceChunk];  // B of each position of the chunk
  const float* u[kSpaceChunk];  // u [heads, dim] of each; those of new positions are computed
  float* new_u;                 // where these are, one position after the other
  float* totals;                // [heads, 64], G
  float* scratch;
  int64_t width, out_width;     // strides of x and C, and of out
  const float *x, *c;           // of the first new position
  const float *steps, *decays;  // [count, heads]
  const float* skip;            // [heads]
  float* out;                   // [heads, dim]
};

}  // namespace quire
