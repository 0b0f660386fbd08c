// The gated delta rule, whose state is a matrix for each head (quire.program.ops.delta).
#pragma once

#include <memory>
#include <vector>

#include "../kernels/delta.h"
#include "state.h"

namespace quire {

// A task is a row and a key head, with the heads of values that share it. What is kept of a position are the
// keys of all key heads, then u and then G of all heads.
class DeltaRule : public Op {
 public:
  // x has queries, keys and values of a token; log_rate and bias [heads].
  DeltaRule(int64_t out, int64_t x, int64_t decay, int64_t beta, const StateCache* cache, int64_t layer,
            std::vector<float> log_rate, std::vector<float> bias, int64_t key_heads, int64_t key_dim,
            std::shared_ptr<Memory> scratch);

  void prepare(const Step& step) override;
  int64_t tasks(const Step& step) const override { return step.batch.sequences * key_heads_; }
  void run(const Step& step, int64_t task, int thread) override;

 private:
  // Some positions of a row in one chunk, for one key head.
  struct Part {
    int64_t key_head, slot, token, begin, first, end;  // token of `first`; positions, from a chunk boundary
  };

  void compute(const Step& step, const Part& part, DeltaPiece& piece) const;
  void save(const Part& part, const Snapshot& as, const DeltaPiece& piece) const;
  // Copies keys, u and G of a position between what is kept and the arrays of a piece.
  void read(const Part& part, int64_t position, const DeltaPiece& piece) const;
  void write(const Part& part, int64_t position, const DeltaPiece& piece, uint8_t* to) const;
  // The key, u and G of the first head of a part, among what is kept of a position.
  int64_t key_at(const Part& part) const { return part.key_head * shape_.key_dim; }
  int64_t u_at(const Part& part) const {
    return (key_heads_ * shape_.key_dim) + part.key_head * shape_.heads * shape_.value_dim;
  }
  int64_t total_at(const Part& part) const {
    return key_heads_ * (shape_.key_dim + shape_.heads * shape_.value_dim) + part.key_head * shape_.heads;
  }

  const int64_t out_, x_, decay_, beta_;
  const StateCache* const cache_;
  const int64_t layer_, key_heads_;
  const DeltaShape shape_;
  std::vector<float> rate_;
  const std::vector<float> bias_;
  const std::shared_ptr<Memory> scratch_;  // of each thread, shared by ops, which never run at the same time
};

}  // namespace quire
