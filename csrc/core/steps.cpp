#include "steps.h"

#include <algorithm>

namespace quire {

Steps::~Steps() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    over_ = true;
  }
  launched_.notify_all();
  if (thread_.joinable()) thread_.join();
}

template <typename Part>
void Steps::guard(const Part& part) {
  if (failure_) std::rethrow_exception(failure_);
  try {
    part();
  } catch (...) {
    failure_ = std::current_exception();
    throw;
  }
}

void Steps::apply(const Job& job) {
  slots_.apply(job.deltas);
  for (const int64_t slot : job.deltas.released) sampler_.release(slot);
  for (const Deltas::Admission& one : job.deltas.admitted)
    sampler_.admit(one.slot, one.params, one.token_ids.data(), (int64_t)one.token_ids.size());
  if (draft_) draft_->apply(job.rows, job.deltas);
}

void Steps::compute(Job& job) {
  guard([&] {
    job.began_s = now();
    apply(job);
    if (!job.deltas.shown.empty() && tower_) {
      const double began_s = now();
      for (Deltas::Shown& shown : job.deltas.shown) {
        tower_->encode(shown.image, shown.share);
        if (shown.slot >= 0) slots_.show(shown.slot, std::move(shown.image));
      }
      job.image_s = now() - began_s;
    }
    Batch batch = slots_.lay_out(job.rows);
    batch.restored = job.deltas.restored;
    batch.saved = job.deltas.saved;
    job.logits = executor_.run(batch, output_);
    if (draft_) draft_->keep(batch, executor_);
    slots_.drop_images(job.rows);
    job.core_wait_s = wait_.take();
    job.ended_s = now();
  });
}

void Steps::forward(Job& job) {
  {
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [&] { return num_open_ == 0; });
  }
  wait_.begin(now());
  compute(job);
}

void Steps::sample(Job& job, const std::vector<RowMasks>& masks) {
  const double began_s = now();
  job.mask_s = began_s - job.ended_s;
  if (job.mask_s > 1e-4) wait_.begin(began_s);  // it has slept
  finish(job, masks);
}

void Steps::finish(Job& job, const std::vector<RowMasks>& masks) {
  guard([&] {
    const double began_s = now();
    std::vector<SampledRow> rows = slots_.sampled(job.rows);
    for (const RowMasks& of : masks) {
      SampledRow& row = rows.at(of.row);
      row.masks = of.masks.data();
      row.num_sampled = std::min(row.num_sampled, (int64_t)of.masks.size());
    }
    sampler_.sample(executor_.pool(), job.logits, rows, job.results);
    slots_.extend(job.rows, job.results);
    const double waited_s = std::max(job.core_wait_s + wait_.take(), executor_.pool().take_core_wait());
    job.ended_s = now();
    job.core_wait_s = std::min(waited_s, job.ended_s - job.began_s - job.mask_s);  // not before the step
    job.sampling_s = job.ended_s - began_s;
    if (draft_ && job.num_proposed > 0) draft(job);
  });
}

void Steps::draft(Job& job) {
  draft_->propose(job.rows, job.results, slots_, sampler_, job.num_proposed, job.proposed);
  wait_.take(), executor_.pool().take_core_wait();  // no wait of the next step
  const double ended_s = now();
  job.draft_s = ended_s - job.ended_s;
  job.ended_s = ended_s;
}

void Steps::launch(std::shared_ptr<Job> job) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!thread_.joinable()) thread_ = std::thread([this] { loop(); });  // may throw
    queue_.push_back(std::move(job));
    ++num_open_;
  }
  launched_.notify_one();
}

void Steps::wait(Job& job) {
  std::unique_lock<std::mutex> lock(mutex_);
  done_.wait(lock, [&] { return job.done; });
  if (job.failure) std::rethrow_exception(job.failure);
}

void Steps::loop() {
  wait_.begin(now());
  for (;;) {
    std::shared_ptr<Job> job;
    bool slept = false;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      slept = queue_.empty();
      launched_.wait(lock, [&] { return over_ || !queue_.empty(); });
      if (over_) return;
      job = std::move(queue_.front());
      queue_.pop_front();
    }
    if (slept) wait_.begin(now());
    try {
      compute(*job);
      finish(*job, {});
    } catch (...) {
      job->failure = std::current_exception();
    }
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      job->done = true;
      --num_open_;
    }
    done_.notify_all();
  }
}

}  // namespace quire
