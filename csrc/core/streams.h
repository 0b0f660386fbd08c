// Hyper-connections: hidden states in several streams (quire.program.ops.streams).
#pragma once

#include "ops.h"

namespace quire {

// The weights by which streams are read, written and mixed (quire.program.ops.streams.StreamWeights).
class StreamWeights {
 public:
  StreamWeights(int64_t streams, int64_t hidden, Vector base, Vector scale, double eps, double floor,
                int64_t rounds)
      : streams_(streams),
        hidden_(hidden),
        base_(std::move(base)),
        scale_(std::move(scale)),
        eps_(eps),
        floor_(floor),
        rounds_(rounds) {}

  // Numbers in a row of `mixed` and of the result: streams, or with weights of a matrix more.
  int64_t width() const { return (int64_t)base_.size(); }
  // Computes those of one token, from its streams and their product with a matrix.
  void compute(const float* x, const float* mixed, float* out) const;

 private:
  void make_doubly_stochastic(double* matrix) const;

  int64_t streams_, hidden_;
  Vector base_, scale_;
  double eps_, floor_;
  int64_t rounds_;
};

// out = sum of weight w[i] times stream i.
void collapse_streams(const float* x, const float* w, float* out, int64_t streams, int64_t hidden);

// The streams after a layer: its output y by the weights of writing, and the streams x by the matrix in w.
class MixStreams : public Op {
 public:
  MixStreams(int64_t out, int64_t x, int64_t y, int64_t w, int64_t streams, int64_t hidden)
      : out_(out), x_(x), y_(y), w_(w), streams_(streams), hidden_(hidden) {}
  bool row_wise() const override { return true; }
  void run_rows(const Step& step, int64_t first, int64_t last) override;

 private:
  int64_t out_, x_, y_, w_, streams_, hidden_;
};

}  // namespace quire
