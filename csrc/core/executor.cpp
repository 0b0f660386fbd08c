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
  begin(batch);
  advance(1);
  return step_->buffers[(size_t)output];
}

void Executor::begin(const Batch& batch) {
  std::vector<float*> places;
  for (Buffer& buffer : buffers_) {
    const int64_t rows = buffer.count == Count::tokens ? batch.tokens : batch.logits;
    buffer.memory.reserve((size_t)(std::max<int64_t>(rows, 1) * buffer.width) * sizeof(float));
    places.push_back(buffer.memory.as<float>());
  }
  Step& step = step_.emplace(batch, kernels_, std::move(places));
  step.threads = pool_->size();
  for (const auto& op : ops_) op->prepare(step);
  for (size_t i = 0; i < phases_.size(); ++i) {
    num_tasks_[i] = tasks(phases_[i], step);
    taken_[i].store(0, std::memory_order_relaxed);
  }
  done_ = {0, 0};
}

void Executor::advance(double share) {
  const Place end = share < 1 ? place_at(share) : Place{phases_.size(), 0};
  if (end.phase < done_.phase || (end.phase == done_.phase && end.tasks <= done_.tasks)) return;
  if (done_.tasks > 0) taken_[done_.phase].store(done_.tasks, std::memory_order_relaxed);
  pool_->run([&](int thread) { work(end, thread); });
  done_ = end;
}

Executor::Place Executor::place_at(double share) const {
  std::vector<double> operations;
  double all = 0, before = 0;
  for (const Phase& phase : phases_) {
    operations.push_back(0);
    for (const Op* op : phase.ops) operations.back() += op->operations(*step_);
    all += operations.back();
  }
  for (size_t i = 0; i < phases_.size(); ++i) {
    if (before + operations[i] > share * all)
      return {i, (int64_t)((share * all - before) / operations[i] * (double)num_tasks_[i])};
    before += operations[i];
  }
  return {phases_.size(), 0};
}

// The part of a step from what is done to `end`.
void Executor::work(Place end, int thread) {
  const Step& step = *step_;
  const auto tasks = [&](size_t i) { return i < end.phase ? num_tasks_[i] : i == end.phase ? end.tasks : 0; };
  for (size_t i = done_.phase; i < phases_.size() && i <= end.phase; ++i) {
    const int64_t count = tasks(i);
    if (count == 0) continue;
    if (count == 1) {  // the first thread runs a single task alone, without a barrier before the next phase
      if (thread == 0) pool_->attempt([&] { run(phases_[i], step, 0, 0); });
      if (i + 1 == phases_.size() || tasks(i + 1) != 1) pool_->barrier();
      continue;
    }
    for (int64_t task; (task = taken_[i].fetch_add(1, std::memory_order_relaxed)) < count;)
      pool_->attempt([&] { run(phases_[i], step, task, thread); });
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
