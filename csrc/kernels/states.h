// The parameters of kernels for ops with a state per slot.
//
// A kernel computes some channels of some positions of one row. Pointers are to the first of these channels.
// State is stored in `format`, never int8; new inputs are rounded to it before they are used.
#pragma once

#include "kernels.h"

namespace quire {

// Inputs of earlier positions: those of position p are at index p modulo `history`, `pitch` bytes apart.
struct KeptInputs {
  KVFormat format;
  int64_t history, pitch;
};

// out[t] = activation(bias + sum over i < kernel of weight[i] * x[t - kernel + 1 + i]), from the oldest to
// the newest.
struct Convolution {
  KeptInputs kept;
  const uint8_t* kept_x;
  int64_t start, count;  // positions
  int64_t kernel, channels;
  int64_t width;        // stride of x, out and weight
  const float* x;       // of the first position
  const float* weight;  // [kernel, width]
  const float* bias;    // or null
  Activation activation;
  float* out;
};

// out[t] = h = decay[t] * h + x[t], over positions of one chunk.
struct Recurrence {
  KeptInputs kept;
  const uint8_t *kept_x, *kept_decay;
  int64_t begin, start, end;  // positions: inputs before `start` are read from the state
  const uint8_t* before;      // h before `begin`; null: zeros
  uint8_t* after;             // receives h at `end`, or null
  int64_t channels;
  int64_t width;           // stride of x, decay and out
  const float *x, *decay;  // of position `start`
  float* out;
};

}  // namespace quire
