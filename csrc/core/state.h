// States of fixed size per slot, and the ops that use them: a short convolution and a gated recurrence
// (quire.program.ops.state).
#pragma once

#include <vector>

#include "../kernels/states.h"
#include "executor.h"

namespace quire {

// The sizes of the state of one layer (quire.program.caches.SlotState).
struct StateShape {
  KVFormat format;
  int64_t width;   // of a state
  int64_t inputs;  // of a position
  int64_t reach, history, chunk;

  int64_t bytes(int64_t numbers) const { return numbers * (format == KVFormat::f32 ? 4 : 2); }
  int64_t slot_bytes() const { return bytes(2 * width + history * inputs); }
  int64_t snapshot_bytes() const { return bytes(width + reach * inputs); }
};

// The states of the layers of one cache group. For a slot, a layer has the states at the last two chunk
// boundaries, then the inputs of the last `history` positions; for a snapshot, the state at the boundary
// before it, then the inputs of the `reach` positions before it. All layers of a slot or snapshot are
// contiguous.
class StateCache {
 public:
  StateCache(int64_t group, const StateShape& shape, int64_t layers, int64_t slots, int64_t snapshots);

  int64_t group() const { return group_; }
  int64_t layers() const { return layers_; }
  const StateShape& shape() const { return shape_; }

  // The state at the last chunk boundary not after a position.
  uint8_t* border(int64_t layer, int64_t slot, int64_t position) const {
    return of_slot(layer, slot) + shape_.bytes(position / shape_.chunk % 2 * shape_.width);
  }
  // The inputs of positions that are multiples of `history`; those of the others follow.
  uint8_t* inputs(int64_t layer, int64_t slot) const {
    return of_slot(layer, slot) + shape_.bytes(2 * shape_.width);
  }
  uint8_t* inputs(int64_t layer, int64_t slot, int64_t position) const {
    return inputs(layer, slot) + shape_.bytes(position % shape_.history * shape_.inputs);
  }
  uint8_t* saved_border(int64_t layer, int64_t snapshot) const {
    return snapshots_.as<uint8_t>() + (snapshot * layers_ + layer) * shape_.snapshot_bytes();
  }
  // The inputs of one of the `reach` positions before the snapshot.
  uint8_t* saved_inputs(int64_t layer, const Snapshot& of, int64_t position) const {
    const int64_t place = position - of.position + shape_.reach;
    return saved_border(layer, of.snapshot) + shape_.bytes(shape_.width + place * shape_.inputs);
  }
  // The first position whose inputs are in a snapshot.
  int64_t oldest(const Snapshot& of) const {
    return of.position > shape_.reach ? of.position - shape_.reach : 0;
  }

  // The memory of all slots, and of all snapshots, one after the other.
  const Memory& states() const { return states_; }
  const Memory& snapshots() const { return snapshots_; }

  // Throws if a step uses slots or snapshots that do not exist.
  void check(const Batch& batch) const;

 private:
  uint8_t* of_slot(int64_t layer, int64_t slot) const {
    return states_.as<uint8_t>() + (slot * layers_ + layer) * shape_.slot_bytes();
  }

  const int64_t group_, layers_, num_slots_, num_snapshots_;
  const StateShape shape_;
  Memory states_, snapshots_;
};

// Restores slots from snapshots, in all layers of a group. Must precede all ops of the group, whose rows may
// overwrite these snapshots.
class RestoreStates : public Op {
 public:
  explicit RestoreStates(const StateCache* cache) : cache_(cache) {}

  void prepare(const Step& step) override;
  int64_t tasks(const Step&) const override { return (int64_t)restored_.size() * cache_->layers(); }
  void run(const Step& step, int64_t task, int thread) override;

 private:
  const StateCache* cache_;
  std::vector<Snapshot> restored_;  // of this group
};

// An op over inputs of `width` independent channels: a task is a run of channels of a row.
class StateOp : public Op {
 public:
  void prepare(const Step& step) override;
  int64_t tasks(const Step&) const override { return tasks_; }
  void run(const Step& step, int64_t task, int thread) override;

 protected:
  // Some channels of a row.
  struct Part {
    int64_t slot, token, start, end;  // index of its first token in the step; positions
    int64_t channel, channels;
  };

  // `inputs` are buffers, in the order in which the inputs of a position are stored.
  StateOp(const StateCache* cache, int64_t layer, int64_t width, std::vector<int64_t> inputs)
      : cache_(cache), layer_(layer), width_(width), inputs_(std::move(inputs)) {}

  // Returns the number of positions computed for a row, recomputed ones included.
  virtual int64_t positions(int64_t start, int64_t end) const = 0;
  // `saved` are the snapshots of the row.
  virtual void compute(const Step& step, const Part& part, const std::vector<Snapshot>& saved) const = 0;

  int64_t offset(const Part& part, size_t input) const {  // within the inputs of a position
    return cache_->shape().bytes((int64_t)input * width_ + part.channel);
  }
  float* at(const Step& step, const Part& part, int64_t buffer) const {  // at the first token of the part
    return step.buffers[(size_t)buffer] + part.token * width_ + part.channel;
  }
  KeptInputs kept() const {
    const StateShape& shape = cache_->shape();
    return {shape.format, shape.history, shape.bytes(shape.inputs)};
  }

  const StateCache* const cache_;
  const int64_t layer_, width_;
  const std::vector<int64_t> inputs_;

 private:
  void save_inputs(const Step& step, const Part& part, const Snapshot& as) const;
  void keep_inputs(const Step& step, const Part& part) const;

  int64_t tasks_ = 0;
};

// weight [kernel, width], bias [width] or empty.
class ShortConvolution : public StateOp {
 public:
  ShortConvolution(int64_t out, int64_t x, const StateCache* cache, int64_t layer, std::vector<float> weight,
                   std::vector<float> bias, Activation activation)
      : StateOp(cache, layer, cache->shape().inputs, {x}),
        out_(out),
        weight_(std::move(weight)),
        bias_(std::move(bias)),
        activation_(activation) {}

 private:
  int64_t positions(int64_t start, int64_t end) const override { return end - start; }
  void compute(const Step& step, const Part& part, const std::vector<Snapshot>& saved) const override;

  const int64_t out_;
  const std::vector<float> weight_, bias_;
  const Activation activation_;
};

class GatedRecurrence : public StateOp {
 public:
  GatedRecurrence(int64_t out, int64_t x, int64_t decay, const StateCache* cache, int64_t layer)
      : StateOp(cache, layer, cache->shape().width, {x, decay}), out_(out) {}

 private:
  int64_t positions(int64_t start, int64_t end) const override {
    return end - start + start % cache_->shape().chunk;
  }
  void compute(const Step& step, const Part& part, const std::vector<Snapshot>& saved) const override;

  const int64_t out_;
};

}  // namespace quire
