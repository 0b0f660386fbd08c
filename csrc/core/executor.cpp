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
  first_.resize(index(0, pool_->nodes().count()));
  taken_ = std::make_unique<std::atomic<int64_t>[]>(first_.size());
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
  const Nodes& nodes = pool_->nodes();
  Step& step = step_.emplace(batch, kernels_, nodes, std::move(places));
  for (const auto& op : ops_) op->prepare(step);
  for (size_t i = 0; i < phases_.size(); ++i) {
    const Phase& phase = phases_[i];
    num_tasks_[i] = tasks(phase, step);
    for (int node = 0; node < nodes.count(); ++node) {
      const bool own = !phase.row_wise && num_tasks_[i] > 0;
      first_[index(i, node)] =
          own ? phase.ops.front()->first_task(step, node) : nodes.first(num_tasks_[i], node);
      taken_[index(i, node)].store(first_[index(i, node)], std::memory_order_relaxed);
    }
  }
  done_ = {0, 0};
}

void Executor::advance(double share) {
  const Place end = share < 1 ? place_at(share) : Place{phases_.size(), 0};
  if (end.phase < done_.phase || (end.phase == done_.phase && end.tasks <= done_.tasks)) return;
  if (done_.tasks > 0) {
    for (int node = 0; node < pool_->nodes().count(); ++node) {
      const size_t own = index(done_.phase, node);
      taken_[own].store(std::max(first_[own], done_.tasks), std::memory_order_relaxed);
    }
  }
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
    take(i, count, thread);
    pool_->barrier();
  }
}

// Computes the tasks of a phase below `count` that no thread has taken.
void Executor::take(size_t phase, int64_t count, int thread) {
  const Nodes& nodes = pool_->nodes();
  for (int i = 0; i < nodes.count(); ++i) {
    const int node = (nodes.of_thread(thread) + i) % nodes.count();
    const int64_t end = node + 1 < nodes.count() ? std::min(count, first_[index(phase, node + 1)]) : count;
    std::atomic<int64_t>& taken = taken_[index(phase, node)];
    if (i > 0 && taken.load(std::memory_order_relaxed) >= end) continue;
    for (int64_t task; (task = taken.fetch_add(1, std::memory_order_relaxed)) < end;)
      pool_->attempt([&] { run(phases_[phase], *step_, task, thread); });
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
