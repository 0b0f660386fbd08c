// The sampler: a token for every row of a step, in one call (docs/sampling.md).
//
// quire/sampling/pipeline.py defines the results in NumPy. Here the sampler keeps the state of every slot and
// records the tokens it sampled; logits are read in place, from the buffer of the program.
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

// The sampling parameters of a sequence. Token ids are in any order, and must be in the vocabulary.
struct SlotParams {
  double temperature = 1, top_p = 1, min_p = 0;
  int64_t top_k = 0;
  int64_t seed = 0, sequence = 0;
  double repetition_penalty = 1, frequency_penalty = 0, presence_penalty = 0;
  std::vector<int64_t> bias_ids;  // without duplicates
  std::vector<float> biases;
  std::optional<std::vector<int64_t>> allowed_ids;
  std::vector<std::vector<int64_t>> bad_words;
  std::vector<int64_t> stop_ids;  // end tokens of the model and of the request
  int64_t min_tokens = 0, num_prompt_tokens = 0;
  std::optional<int64_t> logprobs, prompt_logprobs;  // number of most likely tokens; -1: all
};

// The history of a slot, as needed for sampling.
struct SlotHistory {
  int64_t num_tokens = 0;
  std::vector<int64_t> recent;   // the last output tokens, up to the length of the longest bad word
  std::vector<Emitted> emitted;  // ascending; kept only if a penalty applies
};

// The logits of one row of a step.
struct SampledRow {
  int64_t slot;
  int64_t num_scored;        // prompt positions whose next tokens are to be scored
  int64_t first_scored;      // the first of their rows of logits
  const int64_t* following;  // [num_scored]
  int64_t num_sampled;       // 0, or 1 + the number of drafted tokens
  int64_t first_sampled;     // the first of their rows of logits
  const int64_t* drafted;    // [num_sampled - 1]
  // By sampled position, the bits of the tokens that a grammar allows next, [ceil(V / 32)], including end
  // tokens if the output may end; null for positions without a mask. Null if all are.
  const uint32_t* const* masks;
};

// A slot whose next token is proposed: the one after those it has and these.
struct Proposing {
  int64_t slot;
  const int64_t* following;
  int64_t count;
};

// The results of the rows, flat, in order. The positions with log-probabilities are, for each row, those of
// its scored tokens, then, if requested, those of its sampled ones.
struct SampledResults {
  std::vector<int64_t> token_ids;   // of all rows
  std::vector<int64_t> counts;      // [rows] tokens
  std::vector<int64_t> faults;      // [rows] Fault
  std::vector<int64_t> scored;      // [rows] positions of the prompt with log-probabilities
  std::vector<int64_t> listed;      // [rows] sampled positions with log-probabilities
  std::vector<int64_t> entries;     // [positions] number of listed tokens
  std::vector<int64_t> ranks;       // [positions] of the chosen or following token, which is listed first
  std::vector<int64_t> listed_ids;  // by position: that token, then the most likely ones from rank 1 on
  std::vector<float> logprobs;      // of the listed tokens
  bool plain;                       // every row has one token and nothing else

  void clear();
};

class Sampler {
 public:
  Sampler(const Kernels& kernels, int64_t vocab_size, int64_t max_slots);
  ~Sampler();

  // `tokens` are all known ones: the prompt, then those emitted before a preemption. Throws
  // std::invalid_argument if a token is not in the vocabulary or the slot is taken.
  void admit(int64_t slot, const SlotParams& params, const int64_t* tokens, int64_t count);
  void release(int64_t slot);

  // Samples for every row and records the tokens in its slot. Each slot has at most one row.
  void sample(ThreadPool& pool, const float* logits, const std::vector<SampledRow>& rows,
              SampledResults& results);

  // Draws a token for each slot from its row of a draft model's logits [slots, width], by the parameters and
  // the random number with which `sample` will; -1 if there is none. Records nothing.
  void propose(ThreadPool& pool, const float* logits, int64_t width, const std::vector<Proposing>& slots,
               std::vector<int64_t>& drawn);

  int64_t vocab_size() const { return vocab_size_; }
  bool holds(int64_t slot) const { return slot >= 0 && slot < (int64_t)slots_.size() && slots_[slot]; }

 private:
  struct Slot;
  // A row of logits: the scored or sampled position `index` of row `row`.
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
  // Scratch memory of a thread.
  struct ThreadScratch {
    Memory memory;
    std::vector<int32_t> disallowed;
    std::vector<uint64_t> keys;
    std::vector<float> padded;  // logits of a smaller vocabulary
    SlotHistory history;
  };

  void reserve_scratch(int threads);
  // The parts of `sample`: one thread lists tasks and returns their number, all process them, one gathers.
  int64_t begin(const float* logits, const std::vector<SampledRow>& rows, int threads);
  void work(int thread);
  void finish(SampledResults& results);

  void run(const Task& task, ThreadScratch& scratch, Outcome& outcome) const;
  Chosen choose(const float* logits, const Slot& slot, const int64_t* following, int64_t count,
                const uint32_t* mask, ThreadScratch& scratch) const;
  void list_logprobs(const float* logits, int64_t k, ThreadScratch& scratch, Outcome& outcome) const;
  Chosen choose_edited(const float* logits, const Slot& slot, const SlotHistory& history,
                       const uint32_t* mask, ThreadScratch& scratch) const;

  const Kernels& kernels_;
  const int64_t vocab_size_;
  std::vector<std::unique_ptr<Slot>> slots_;

  // Of the current step.
  const float* logits_ = nullptr;
  const std::vector<SampledRow>* rows_ = nullptr;
  std::vector<Task> tasks_;
  std::vector<Outcome> outcomes_;       // by task; may be longer
  std::vector<ThreadScratch> scratch_;  // by thread
  std::atomic<int64_t> taken_{0};
};

}  // namespace quire
