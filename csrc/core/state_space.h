// Mamba-2's state space, whose state is a matrix for each head (quire.program.ops.state_space).
#pragma once

#include <memory>
#include <vector>

#include "../kernels/state_space.h"
#include "state.h"

namespace quire {

// Sizes and parameters. Of a position, B of all groups are kept, then u and then G of all heads; x has x, B
// and C of a token.
struct SpaceOptions {
  int64_t groups, state_dim;
  float low, high;                          // limits of steps
  std::vector<float> log_rate, bias, skip;  // [heads]

  int64_t heads() const { return (int64_t)skip.size(); }
};

// A task is a row and a few heads that share B and C. Keeps u and G of its heads.
class StateSpace : public Op {
 public:
  StateSpace(int64_t out, int64_t x, int64_t step, const StateCache* cache, int64_t layer,
             SpaceOptions options, std::shared_ptr<Memory> scratch);

  void prepare(const Step& step) override;
  int64_t tasks(const Step& step) const override { return step.batch.sequences * pieces_; }
  void run(const Step& step, int64_t task, int thread) override;

 private:
  // Some positions of a row in one chunk, of some heads.
  struct Part {
    int64_t head, slot, token, begin, first, end;  // token of `first`; positions, from a chunk boundary
  };

  void compute(const Step& step, const Part& part, SpacePiece& piece, float* steps) const;
  void save(const Part& part, const Snapshot& as, const SpacePiece& piece) const;
  void write(const Part& part, int64_t position, const SpacePiece& piece, uint8_t* to) const;
  int64_t kept_b() const { return options_.groups * shape_.state_dim; }
  int64_t kept_u(const Part& part) const { return kept_b() + part.head * shape_.dim; }
  int64_t kept_total(const Part& part) const { return kept_b() + options_.heads() * shape_.dim + part.head; }

  const int64_t out_, x_, step_;
  const StateCache* const cache_;
  const int64_t layer_;
  const SpaceOptions options_;
  SpaceShape shape_;
  int64_t pieces_;
  std::vector<float> rate_;
  const std::shared_ptr<Memory> scratch_;  // of each thread, shared by ops, which never run at the same time
};

// Keeps B of the rows of a StateSpace, after all of its tasks have read those before. A task is a row.
class KeepShared : public Op {
 public:
  // `width` numbers from number `first` on of each token, `stride` apart, are kept.
  KeepShared(int64_t x, int64_t stride, int64_t first, int64_t width, const StateCache* cache, int64_t layer)
      : x_(x), stride_(stride), first_(first), width_(width), cache_(cache), layer_(layer) {}

  int64_t tasks(const Step& step) const override { return step.batch.sequences; }
  void run(const Step& step, int64_t task, int thread) override;

 private:
  const int64_t x_, stride_, first_, width_;
  const StateCache* const cache_;
  const int64_t layer_;
};

}  // namespace quire
