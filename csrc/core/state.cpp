#include "state.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace quire {

namespace {

constexpr int64_t kChannels = 64;         // of a part: four vectors of sixteen
constexpr int64_t kTasksPerThread = 4;    // bounds the delay by a thread that is preempted
constexpr int64_t kWorthATask = 1 << 14;  // numbers: some microseconds

}  // namespace

StateCache::StateCache(int64_t group, const StateShape& shape, int64_t layers, int64_t slots,
                       int64_t snapshots)
    : group_(group),
      layers_(layers),
      num_slots_(slots),
      num_snapshots_(snapshots),
      shape_(shape),
      states_((size_t)(slots * layers * shape.slot_bytes())),
      snapshots_((size_t)(snapshots * layers * shape.snapshot_bytes())) {}

void StateCache::check(const Batch& batch) const {
  for (int64_t row = 0; row < batch.sequences; ++row)
    if (batch.slots[row] >= num_slots_) throw std::out_of_range("a row in a slot that has no state");
  for (const auto& snapshots : {batch.restored, batch.saved})
    for (const Snapshot& one : snapshots)
      if (one.group == group_ && (one.slot >= num_slots_ || one.snapshot >= num_snapshots_))
        throw std::out_of_range("a step uses a snapshot that does not exist");
}

void RestoreStates::prepare(const Step& step) {
  cache_->check(step.batch);
  restored_.clear();
  for (const Snapshot& one : step.batch.restored)
    if (one.group == cache_->group()) restored_.push_back(one);
}

void RestoreStates::run(const Step&, int64_t task, int) {
  const Snapshot& from = restored_[(size_t)(task / cache_->layers())];
  const int64_t layer = task % cache_->layers();
  const StateShape& shape = cache_->shape();
  std::copy_n(cache_->saved_border(layer, from.snapshot), shape.bytes(shape.width),  // 0 of a convolution
              cache_->border(layer, from.slot, from.position));
  for (int64_t position = cache_->oldest(from); position < from.position; ++position)
    std::memcpy(cache_->inputs(layer, from.slot, position), cache_->saved_inputs(layer, from, position),
                (size_t)shape.bytes(shape.inputs));
}

void StateOp::prepare(const Step& step) {
  const Batch& batch = step.batch;
  int64_t computed = 0;
  for (int64_t row = 0; row < batch.sequences; ++row) {
    const int64_t first = batch.row_offsets[row], count = batch.row_offsets[row + 1] - first;
    computed += positions(batch.positions[first], batch.positions[first] + count);
  }
  const int64_t parts = batch.sequences * ceil_div(width_, kChannels);
  tasks_ = std::min({parts, ceil_div(computed * width_, kWorthATask), step.threads * kTasksPerThread});
}

void StateOp::run(const Step& step, int64_t task, int) {
  const Batch& batch = step.batch;
  const int64_t parts = batch.sequences * ceil_div(width_, kChannels);
  std::vector<Snapshot> saved;
  for (int64_t i = parts * task / tasks_; i < parts * (task + 1) / tasks_; ++i) {
    const int64_t row = i % batch.sequences, channel = i / batch.sequences * kChannels;
    const int64_t token = batch.row_offsets[row], start = batch.positions[token];
    const int64_t end = start + batch.row_offsets[row + 1] - token;
    const Part part{batch.slots[row], token, start, end, channel, std::min(kChannels, width_ - channel)};
    saved.clear();
    for (const Snapshot& one : batch.saved)
      if (one.group == cache_->group() && one.slot == part.slot) saved.push_back(one);
    for (const Snapshot& one : saved) save_inputs(step, part, one);
    compute(step, part, saved);
    keep_inputs(step, part);  // overwrites those that were just read
  }
}

void StateOp::save_inputs(const Step& step, const Part& part, const Snapshot& as) const {
  const StateShape& shape = cache_->shape();
  for (int64_t position = cache_->oldest(as); position < as.position; ++position) {
    for (size_t i = 0; i < inputs_.size(); ++i) {
      uint8_t* to = cache_->saved_inputs(layer_, as, position) + offset(part, i);
      if (position < part.start) {
        std::memcpy(to, cache_->inputs(layer_, part.slot, position) + offset(part, i),
                    (size_t)shape.bytes(part.channels));
      } else {
        const float* x = at(step, part, inputs_[i]) + (position - part.start) * width_;
        step.kernels.keep(shape.format, x, to, part.channels);
      }
    }
  }
}

void StateOp::keep_inputs(const Step& step, const Part& part) const {
  const StateShape& shape = cache_->shape();
  for (int64_t position = std::max(part.start, part.end - shape.history); position < part.end; ++position) {
    for (size_t i = 0; i < inputs_.size(); ++i) {
      const float* x = at(step, part, inputs_[i]) + (position - part.start) * width_;
      step.kernels.keep(shape.format, x, cache_->inputs(layer_, part.slot, position) + offset(part, i),
                        part.channels);
    }
  }
}

void ShortConvolution::compute(const Step& step, const Part& part, const std::vector<Snapshot>&) const {
  step.kernels.convolve({.kept = kept(),
                         .kept_x = cache_->inputs(layer_, part.slot) + offset(part, 0),
                         .start = part.start,
                         .count = part.end - part.start,
                         .kernel = (int64_t)weight_.size() / width_,
                         .channels = part.channels,
                         .width = width_,
                         .x = at(step, part, inputs_[0]),
                         .weight = weight_.data() + part.channel,
                         .bias = bias_.empty() ? nullptr : bias_.data() + part.channel,
                         .activation = activation_,
                         .out = at(step, part, out_)});
}

void GatedRecurrence::compute(const Step& step, const Part& part, const std::vector<Snapshot>& saved) const {
  const StateShape& shape = cache_->shape();
  const int64_t channel = shape.bytes(part.channel);
  const uint8_t* inputs = cache_->inputs(layer_, part.slot);
  for (int64_t begin = part.start / shape.chunk * shape.chunk; begin <= part.end; begin += shape.chunk) {
    const uint8_t* before = begin > 0 ? cache_->border(layer_, part.slot, begin) + channel : nullptr;
    for (const Snapshot& one : saved)  // this one is overwritten two boundaries later
      if (before && one.position / shape.chunk == begin / shape.chunk)
        std::memcpy(cache_->saved_border(layer_, one.snapshot) + channel, before,
                    (size_t)shape.bytes(part.channels));
    if (begin == part.end) break;
    const int64_t start = std::max(begin, part.start), border = begin + shape.chunk;
    const int64_t row = (start - part.start) * width_;
    step.kernels.recur(
        {.kept = kept(),
         .kept_x = inputs + offset(part, 0),
         .kept_decay = inputs + offset(part, 1),
         .begin = begin,
         .start = start,
         .end = std::min(border, part.end),
         .before = before,
         .after = border <= part.end ? cache_->border(layer_, part.slot, border) + channel : nullptr,
         .channels = part.channels,
         .width = width_,
         .x = at(step, part, inputs_[0]) + row,
         .decay = at(step, part, inputs_[1]) + row,
         .out = at(step, part, out_) + row});
  }
}

}  // namespace quire
