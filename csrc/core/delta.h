// The gated delta rule, whose state is a matrix for each head (quire.program.ops.delta).
#pragma once

#include <memory>
#include <vector>

#include "../kernels/delta.h"
#include "state.h"

namespace quire {

struct DeltaOptions {
  int64_t key_heads, key_dim;
  float beta_factor;
  std::vector<float> log_rate, bias;  // [heads]; with a decay for each channel bias [heads, key_dim]
};

// The buffers of its inputs. Those of queries, keys and values may be one, which has them side by side.
struct DeltaInputs {
  int64_t queries, keys, values, decay, beta;
};

// A task is a row and a key head, with the heads of values that share it. What is kept of a position are the
// keys of all key heads, then u and then G of all heads.
class DeltaRule : public Op {
 public:
  DeltaRule(int64_t out, const DeltaInputs& inputs, const StateCache* cache, int64_t layer,
            const DeltaOptions& options, std::shared_ptr<Memory> scratch);

  void prepare(const Step& step) override;
  int64_t tasks(const Step& step) const override { return step.batch.sequences * key_heads_; }
  void run(const Step& step, int64_t task, int thread) override;

 private:
  // Some positions of a row in one chunk, for one key head.
  struct Part {
    int64_t key_head, slot, token, begin, first, end;  // token of `first`; positions, from a chunk boundary
  };

  void compute(const Step& step, const Part& part, DeltaPiece& piece) const;
  void locate_inputs(const Step& step, const Part& part, DeltaPiece& piece) const;
  void apply_gates(const Step& step, const Part& part, DeltaPiece& piece) const;
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
    const int64_t before = key_heads_ * (shape_.key_dim + shape_.heads * shape_.value_dim);
    return before + part.key_head * shape_.heads * shape_.decays();
  }

  const int64_t out_;
  const DeltaInputs inputs_;
  const StateCache* const cache_;
  const int64_t layer_, key_heads_;
  const DeltaShape shape_;
  const float beta_factor_;
  std::vector<float> rate_;
  const std::vector<float> bias_;
  const std::shared_ptr<Memory> scratch_;  // of each thread, shared by ops, which never run at the same time
};

}  // namespace quire
