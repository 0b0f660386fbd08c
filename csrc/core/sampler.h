// A token for every row of a step, in one call: docs/sampling.md.
//
// The pipeline in NumPy, quire/sampling/pipeline.py, says what each row gives. Here the state of every slot
// lies with the sampler, takes note of the tokens that it chose itself, and logits are read where the
// program left them.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "../kernels/kernels.h"
#include "../kernels/sampling.h"
#include "memory.h"
#include "thread_pool.h"

namespace quire {

// What a request asks of sampling. Token ids are in any order; those of the vocabulary only.
struct SlotParams {
  double temperature = 1, top_p = 1, min_p = 0;
  int64_t top_k = 0;
  int64_t seed = 0, sequence = 0;
  double repetition_penalty = 1, frequency_penalty = 0, presence_penalty = 0;
  std::vector<int64_t> bias_ids;  // each once
  std::vector<float> biases;
  std::optional<std::vector<int64_t>> allowed_ids;
  std::vector<std::vector<int64_t>> bad_words;
  std::vector<int64_t> stop_ids;  // end tokens of the model and of the request
  int64_t min_tokens = 0, num_prompt_tokens = 0;
  std::optional<int64_t> logprobs, prompt_logprobs;  // how many of the most likely; -1: all
};

// What sampling remembers of the tokens of a slot.
struct SlotHistory {
  int64_t num_tokens = 0;
  std::vector<int64_t> recent;   // the last of the output, as many as bad words look back
  std::vector<Emitted> emitted;  // ascending; kept only where a penalty applies
};

// One row's share of the logits of a step.
struct SampledRow {
  int64_t slot;
  int64_t num_scored;        // positions of the prompt whose following tokens are to be scored
  int64_t first_scored;      // the first of their rows of logits
  const int64_t* following;  // [num_scored]
  int64_t num_sampled;       // 0, or 1 + the number of drafted tokens
  int64_t first_sampled;     // the first of their rows of logits
  const int64_t* drafted;    // [num_sampled - 1]
  // For each sampled position the bits of the tokens that a grammar lets follow, [ceil(V / 32)], with end
  // tokens where the output may end; null where it has no say. All null: null.
  const uint32_t* const* masks;
};

// The rows' results, flat, in the order of the rows. Positions with log-probabilities are those of a row's
// scored tokens, then those of its sampled ones, where asked for.
struct SampledResults {
  std::vector<int64_t> token_ids;   // of all rows
  std::vector<int64_t> counts;      // [rows] tokens
  std::vector<int64_t> faults;      // [rows] Fault
  std::vector<int64_t> scored;      // [rows] positions of the prompt with log-probabilities
  std::vector<int64_t> listed;      // [rows] sampled positions with log-probabilities
  std::vector<int64_t> entries;     // [positions] how many tokens are listed
  std::vector<int64_t> ranks;       // [positions] of the chosen or following token, which is listed first
  std::vector<int64_t> listed_ids;  // of all positions: that token, then the most likely ones from rank 1 on
  std::vector<float> logprobs;      // of the listed tokens
  bool plain;                       // every row gave one token and nothing else

  void clear();
};

class Sampler {
 public:
  Sampler(const Kernels& kernels, int64_t vocab_size, int64_t max_slots);
  ~Sampler();

  // `tokens` are all known ones: the prompt's, then those emitted before a preemption. Throws
  // std::invalid_argument where a token is not of the vocabulary or the slot is taken.
  void admit(int64_t slot, const SlotParams& params, const int64_t* tokens, int64_t count);
  void release(int64_t slot);

  // Chooses for every row, notes the tokens in its slot, and says what came. Each slot has at most one row.
  void sample(ThreadPool& pool, const float* logits, const std::vector<SampledRow>& rows,
              SampledResults& results);

  int64_t vocab_size() const { return vocab_size_; }
  bool holds(int64_t slot) const { return slot >= 0 && slot < (int64_t)slots_.size() && slots_[slot]; }

 private:
  struct Slot;
  // One row of logits: the scored or sampled position `index` of row `row`.
  struct Task {
    int64_t row, index;
    bool scores;
  };
  struct Outcome {
    Fault fault = Fault::none;
    int64_t token = 0, rank = 0;
    std::vector<int64_t> ids;  // with log-probabilities: the token, then the most likely ones
    std::vector<float> logprobs;
  };
  // What a thread needs for a row of logits.
  struct ThreadScratch {
    Memory memory;
    std::vector<int32_t> disallowed;
    std::vector<uint64_t> keys;
    SlotHistory history;
  };

  // The parts of `sample`: one thread lists the tasks and returns their number, each takes some, one gathers.
  int64_t begin(const float* logits, const std::vector<SampledRow>& rows, int threads);
  void work(int thread);
  void finish(SampledResults& results);

  void run(const Task& task, ThreadScratch& scratch, Outcome& outcome) const;
  void choose(const SampledRow& row, int64_t index, ThreadScratch& scratch, Outcome& outcome) const;
  void list_logprobs(const float* logits, int64_t k, ThreadScratch& scratch, Outcome& outcome) const;
  Chosen choose_edited(const float* logits, const Slot& slot, const SlotHistory& history,
                       const uint32_t* mask, ThreadScratch& scratch) const;

  const Kernels& kernels_;
  const int64_t vocab_size_;
  std::vector<std::unique_ptr<Slot>> slots_;

  // Of the step under way.
  const float* logits_ = nullptr;
  const std::vector<SampledRow>* rows_ = nullptr;
  std::vector<Task> tasks_;
  std::vector<Outcome> outcomes_;       // of the tasks, perhaps more
  std::vector<ThreadScratch> scratch_;  // of the threads
  std::atomic<int64_t> taken_{0};
};

}  // namespace quire
