// Mixture of experts: rows are gathered by expert, so that each expert's weights are read once a step.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "ops.h"

namespace quire {

struct ExpertWeights {
  std::shared_ptr<const Matrix> gate, up, down;  // one matrix for each expert; gate may be null
  Vector gate_bias, up_bias, down_bias;          // [experts, outputs] or empty

  // The first of those that multiply x.
  const Matrix& first() const { return gate ? *gate : *up; }
};

// How experts are chosen (quire.program.ops.experts.Routing).
struct Routing {
  enum class Affinity { softmax, sigmoid, sqrtsoftplus };

  int64_t chosen;
  Affinity affinity;  // of the scores
  bool normalized;    // shares are divided by the sum of the chosen affinities
  Vector bias;        // added to affinities where experts are chosen, or empty
  int64_t groups, kept_groups;
  bool by_two;  // groups rank by the sum of their two best, else by their best
  double scaling, floor;
  Vector factors;  // of the shares, by expert, or empty
  bool on_inputs;  // shares multiply the inputs of experts, else their results
  double margin;   // each is chosen and weighed among the scores this near the best (SparseMixer), or -1
  std::vector<int32_t> listed;  // the experts of each token id, `chosen` after the other, or empty
};

// The state of the experts op (quire.program.ops.experts). Each pair (token, chosen expert) has a slot; slots
// are ordered by expert, then token.
class ExpertsState {
 public:
  ExpertsState(ExpertWeights weights, Routing routing, Activation activation, float limit, bool shifted)
      : weights(std::move(weights)),
        routing(std::move(routing)),
        activation(activation),
        limit(limit),
        shifted(shifted) {}

  struct Group {  // the slots of one expert
    int64_t expert, first, rows;
    bool shared;  // gate and up take the same packed activations
  };
  struct Tile {
    const Group* group;
    int64_t number;  // index within the group
  };

  const ExpertWeights weights;
  const Routing routing;
  const Activation activation;
  const float limit;   // of gates and ups before the activation, or 0
  const bool shifted;  // with a limit: the activation is that of gpt-oss

  int64_t experts() const { return weights.up->count(); }
  int64_t chosen() const { return routing.chosen; }
  int64_t hidden() const { return weights.up->inputs(); }
  int64_t inner() const { return weights.up->outputs(); }

  std::vector<int64_t> picked;       // [tokens, chosen], best first
  std::vector<float> picked_shares;  // likewise
  std::vector<int64_t> token;        // [slots]
  std::vector<float> share;          // [slots]
  std::vector<int64_t> slot_of;      // [tokens, chosen], by ascending expert index
  std::vector<Group> groups;
  std::vector<Tile> tiles;
  Memory gathered, gates, ups, downs;  // [slots, hidden], [slots, inner] twice, [slots, hidden]
  Memory packed_hidden, packed_inner;  // packed activations of all slots, by group
  Memory packed_up;                    // packed_hidden of groups whose `up` needs them in another form

  // The matrices that multiply x: gate and up, or up alone.
  int64_t inner_matrices() const { return weights.gate ? 2 : 1; }

  // The packed activations of a group for a product with `weight`; `from` has space for all slots.
  PackedActivations packed(const Step& step, const Memory& from, const Group& group,
                           const Matrix& weight) const;
  // True if gate and up of an expert take the same packed activations.
  bool shared(const Step& step, int64_t expert) const;
};

// The passes of the op, in order. All share its state.
class ChooseExperts : public Op {  // the experts of each token, and their shares
 public:
  ChooseExperts(std::shared_ptr<ExpertsState> state, int64_t scores)
      : s_(std::move(state)), scores_(scores) {}
  void prepare(const Step& step) override;
  bool row_wise() const override { return true; }
  void run_rows(const Step& step, int64_t first, int64_t last) override;

 private:
  std::shared_ptr<ExpertsState> s_;
  int64_t scores_;
};

class RouteExperts : public Op {  // one task: gathers tokens by expert
 public:
  explicit RouteExperts(std::shared_ptr<ExpertsState> state) : s_(std::move(state)) {}
  void prepare(const Step& step) override;
  int64_t tasks(const Step& step) const override { return step.batch.tokens > 0; }
  void run(const Step& step, int64_t task, int thread) override;

 private:
  std::shared_ptr<ExpertsState> s_;
  std::vector<std::vector<std::pair<int64_t, float>>> of_;  // (token, share) by expert
};

// A pass whose number of parts is known only after routing: each thread takes parts until none is left, those
// of its node first.
class ExpertsPass : public Op {
 public:
  explicit ExpertsPass(std::shared_ptr<ExpertsState> state) : s_(std::move(state)) {}
  void prepare(const Step& step) override;
  int64_t tasks(const Step& step) const override { return step.batch.tokens > 0 ? step.threads : 0; }
  void run(const Step& step, int64_t task, int thread) override;

 protected:
  virtual int64_t parts(const Step& step, int node) const = 0;
  virtual void part(const Step& step, int node, int64_t number) = 0;
  std::shared_ptr<ExpertsState> s_;

 private:
  struct alignas(64) Counter {
    std::atomic<int64_t> next{0};
  };
  std::vector<Counter> of_nodes_;
};

class TilesPass : public ExpertsPass {  // a part is a tile
 public:
  using ExpertsPass::ExpertsPass;

 protected:
  virtual void tile(const Step& step, const ExpertsState::Tile& tile) = 0;
  int64_t parts(const Step& step, int node) const override {
    return first(step, node + 1) - first(step, node);
  }
  void part(const Step& step, int node, int64_t number) override {
    tile(step, s_->tiles[(size_t)(first(step, node) + number)]);
  }

 private:
  int64_t first(const Step& step, int node) const {
    return step.nodes.first((int64_t)s_->tiles.size(), node);
  }
};

class GatherExperts : public TilesPass {  // gathers the rows of x of a tile, and packs them for gate and up
 public:
  GatherExperts(std::shared_ptr<ExpertsState> state, int64_t x) : TilesPass(std::move(state)), x_(x) {}

 protected:
  void tile(const Step& step, const ExpertsState::Tile& tile) override;

 private:
  int64_t x_;
};

class ActivateExperts : public TilesPass {  // activation(gate) * up, or activation(up), packed for down
 public:
  using TilesPass::TilesPass;

 protected:
  void tile(const Step& step, const ExpertsState::Tile& tile) override;
};

class MultiplyExperts : public ExpertsPass {  // a part: some panels of one expert's matrix
 public:
  enum class Which { gate_up, down };
  MultiplyExperts(std::shared_ptr<ExpertsState> state, Which which)
      : ExpertsPass(std::move(state)), which_(which) {}

 protected:
  int64_t parts(const Step& step, int node) const override;
  void part(const Step& step, int node, int64_t number) override;

 private:
  // What a node multiplies: some panels of the chosen experts among some, by the indices of their groups.
  struct Own {
    int64_t first_group, groups, first_panel, last_panel, chunks;
  };
  Own own(const Step& step, int node) const;
  int64_t matrices() const { return which_ == Which::down ? 1 : s_->inner_matrices(); }
  Which which_;
};

class SumExperts : public Op {  // out[t] = sum of shares times the results of the chosen experts
 public:
  SumExperts(std::shared_ptr<ExpertsState> state, int64_t out) : s_(std::move(state)), out_(out) {}
  bool row_wise() const override { return true; }
  void run_rows(const Step& step, int64_t first, int64_t last) override;

 private:
  std::shared_ptr<ExpertsState> s_;
  int64_t out_;
};

}  // namespace quire
