// Steps are computed in sequence: in the thread that collects them, or ahead, in a separate thread.
//
// A step that fails leaves slots in an unknown state, so every later step fails with the same error.
#pragma once

#include <condition_variable>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "draft.h"
#include "executor.h"
#include "sampler.h"
#include "slots.h"

namespace quire {

// A step from its plan to its results. It is shared by Python and the thread of the steps, and may be
// destroyed without Python's lock, so it holds no Python objects.
struct Job : std::enable_shared_from_this<Job> {
  std::vector<PlannedRow> rows;
  Deltas deltas;
  int64_t num_proposed = 0;  // tokens that the draft model proposes after each row
  SampledResults results;
  std::vector<std::vector<int64_t>> proposed;  // by row; empty if the draft model did not run
  double began_s = 0, ended_s = 0;             // steady clock, as time.monotonic
  double mask_s = 0, sampling_s = 0, core_wait_s = 0, draft_s = 0, image_s = 0;

  const float* logits = nullptr;
  std::exception_ptr failure;
  bool done = false;  // set for launched steps
};

// The masks of a row with a grammar, for the first of its sampled positions; the others give no token. A row
// without masks gives none.
struct RowMasks {
  size_t row;
  std::vector<const uint32_t*> masks;
};

class Steps {
 public:
  // `output` is the executor's buffer of logits.
  Steps(Executor& executor, int64_t output, int64_t slots, int64_t groups, int64_t vocab_size)
      : executor_(executor),
        output_(output),
        num_slots_(slots),
        slots_(slots, groups),
        sampler_(executor.kernels(), vocab_size, slots) {}
  ~Steps();

  // Lets a draft model propose tokens. Its executor must share the threads of these steps.
  void draft_with(Executor& executor, const DraftShape& shape) {
    draft_ = std::make_unique<DraftModel>(executor, shape, num_slots_);
  }

  // Lets prompts have images, which the tower encodes. Its executor must share the threads of these steps.
  void see_with(Executor& executor, int64_t output, int64_t width) {
    tower_ = std::make_unique<Tower>(executor, output, width);
  }

  // Notes that the content of these blocks, of the group whose table the draft model shares, was replaced. No
  // step may be in flight.
  void forget_drafted(const std::vector<int64_t>& blocks) {
    if (draft_) draft_->forget(blocks);
  }

  // Compute a step in the calling thread, after all launched ones: first its logits, then, when the masks are
  // known, its tokens.
  void forward(Job& job);
  void sample(Job& job, const std::vector<RowMasks>& masks);

  // Launches a step in the thread of these steps, after those launched before it.
  void launch(std::shared_ptr<Job> job);
  // Waits for a launched step; throws its error if it failed.
  void wait(Job& job);

  int64_t vocab_size() const { return sampler_.vocab_size(); }

 private:
  template <typename Part>
  void guard(const Part& part);
  void apply(const Job& job);
  void compute(Job& job);
  void finish(Job& job, const std::vector<RowMasks>& masks);
  void draft(Job& job);
  void loop();

  Executor& executor_;
  const int64_t output_, num_slots_;
  Slots slots_;
  Sampler sampler_;
  std::unique_ptr<DraftModel> draft_;
  std::unique_ptr<Tower> tower_;
  std::mutex mutex_;
  std::condition_variable launched_, done_;
  std::deque<std::shared_ptr<Job>> queue_;
  int64_t num_open_ = 0;        // launched steps that are not done
  std::exception_ptr failure_;  // of the first failed step; used only by the computing thread
  CoreWait wait_;               // of the computing thread
  bool over_ = false;
  std::thread thread_;  // started with the first launch
};

}  // namespace quire
