// Entries of several tokens, made of cached values and gates (quire.program.ops.compressed.Compress).
#pragma once

#include "../kernels/compress.h"
#include "executor.h"
#include "ops.h"

namespace quire {

// Writes the values and gates of each token to the cache, as they are.
class KeepInputs : public Op {
 public:
  KeepInputs(int64_t values, int64_t gates, const KVLayer* cache, int64_t group)
      : values_(values), gates_(gates), cache_(cache), group_(group) {}
  int64_t tasks(const Step& step) const override { return ceil_div(step.batch.tokens, kTile); }
  void run(const Step& step, int64_t task, int thread) override;

 private:
  int64_t values_, gates_;  // buffers
  const KVLayer* cache_;
  const int64_t group_;
};

// Writes the entry of each token that ends one, zeros for others. The values and gates of the step are in the
// cache before.
class Compress : public Op {
 public:
  Compress(int64_t out, const Compression& how, Vector bias, int64_t group)
      : out_(out), how_(how), bias_(std::move(bias)), group_(group) {
    how_.bias = bias_.data();
  }
  bool row_wise() const override { return true; }
  void run_rows(const Step& step, int64_t first, int64_t last) override;

 private:
  int64_t out_;  // buffer
  Compression how_;
  const Vector bias_;
  const int64_t group_;
};

}  // namespace quire
