#include "executor.h"

#include <algorithm>

namespace quire {

int64_t Executor::add_buffer(Count count, int64_t width) {
  buffers_.push_back({count, width, Memory()});
  return (int64_t)buffers_.size() - 1;
}

void Executor::add(std::unique_ptr<Op> op) {
  const bool joins =
      op->row_wise() && !phases_.empty() && phases_.back().row_wise && phases_.back().rows == op->rows();
  if (joins) {
    phases_.back().ops.push_back(op.get());
  } else {
    phases_.push_back({{op.get()}, op->row_wise(), op->rows()});
  }
  ops_.push_back(std::move(op));
  num_tasks_.resize(phases_.size());
  taken_ = std::make_unique<std::atomic<int64_t>[]>(phases_.size());
}

float* Executor::run(const Batch& batch, int64_t output) {
  std::vector<float*> places;
  for (Buffer& buffer : buffers_) {
    const int64_t rows = buffer.count == Count::tokens ? batch.tokens : batch.logits;
    buffer.memory.reserve((size_t)(std::max<int64_t>(rows, 1) * buffer.width) * sizeof(float));
    places.push_back(buffer.memory.as<float>());
  }
  Step step(batch, kernels_, std::move(places));
  step.threads = pool_->size();
  for (const auto& op : ops_) op->prepare(step);
  for (size_t i = 0; i < phases_.size(); ++i) {
    num_tasks_[i] = tasks(phases_[i], step);
    taken_[i].store(0, std::memory_order_relaxed);
  }
  pool_->run([&](int thread) { work(step, thread); });
  return step.buffers[(size_t)output];
}

void Executor::work(const Step& step, int thread) {
  for (size_t i = 0; i < phases_.size(); ++i) {
    const int64_t count = num_tasks_[i];
    if (count == 0) continue;
    if (count == 1) {  // the first thread runs a single task alone, without a barrier before the next phase
      if (thread == 0) run(phases_[i], step, 0, 0);
      if (i + 1 == phases_.size() || num_tasks_[i + 1] != 1) pool_->barrier();
      continue;
    }
    for (int64_t task; (task = taken_[i].fetch_add(1, std::memory_order_relaxed)) < count;)
      run(phases_[i], step, task, thread);
    pool_->barrier();
  }
}

int64_t Executor::tasks(const Phase& phase, const Step& step) const {
  return phase.row_wise ? ceil_div(step.count(phase.rows), kTile) : phase.ops.front()->tasks(step);
}

void Executor::run(const Phase& phase, const Step& step, int64_t task, int thread) {
  if (!phase.row_wise) return phase.ops.front()->run(step, task, thread);
  const int64_t first = task * kTile, last = std::min(first + kTile, step.count(phase.rows));
  for (Op* op : phase.ops) op->run_rows(step, first, last);
}

}  // namespace quire
