// A draft model beside the target: it proposes tokens in the target's block tables.
//
// quire/backends/drafting.py defines what it computes and when.
#pragma once

#include <cstdint>
#include <vector>

#include "executor.h"
#include "hidden.h"
#include "sampler.h"
#include "slots.h"

namespace quire {

struct DraftShape {
  int64_t output, width;         // the executor's buffer of logits, and the logits of a row
  int64_t groups;                // cache groups of the draft model; all use one block table of the target,
  int64_t group, window, reach;  // that of this group; its window, and how far back the draft model looks,
                                 // each 0 if that is to the beginning
  int64_t blocks, block_size;    // of that group
  int64_t spare;                 // blocks of each slot, for positions beyond those granted to it
  int64_t max_tokens, max_len;   // of a step, to catch up; positions
  int64_t hidden;                // the numbers of a hidden state, if it reads those of the target; else 0
  int64_t given, own;            // the buffers with them, of the target's executor and of its own
};

class DraftModel {
 public:
  DraftModel(Executor& executor, const DraftShape& shape, int64_t slots);

  // Takes the changes of slots and blocks of a step.
  void apply(const std::vector<PlannedRow>& rows, const Deltas& deltas);
  // Notes that these blocks have nothing of the draft model.
  void forget(const std::vector<int64_t>& blocks) {
    for (const int64_t block : blocks) filled_.at((size_t)block) = 0, hidden_.clear(block);
  }
  // Takes the hidden states of a step that the target computed last.
  void keep(const Batch& batch, const Executor& target);
  // Proposes up to `count` tokens after each row, whose results are in `slots` and `sampler` already.
  void propose(const std::vector<PlannedRow>& rows, const SampledResults& results, const Slots& slots,
               Sampler& sampler, int64_t count, std::vector<std::vector<int64_t>>& proposed);

 private:
  // What is computed of a slot: leading positions with known tokens, then those of `guessed`. Positions from
  // `room` on were in spare blocks.
  struct Slot {
    int64_t computed = 0, room = 0;
    std::vector<int64_t> guessed;
    std::vector<int64_t> table;  // of this step, with the spare blocks
  };
  // A row that lacks positions [start, end); `samples` if a token was sampled after the last of these.
  struct Lagging {
    size_t row;
    int64_t slot, start, end;
    bool samples;
  };

  // Chooses the rows to compute: first those that lack least, within the most tokens of a step. A block is
  // computed for one sequence only: others that share it go on from there in another step.
  std::vector<Lagging> lagging(const std::vector<PlannedRow>& rows, const SampledResults& results,
                               const Slots& slots);
  int64_t advance(int64_t number, const std::vector<int64_t>& tokens, const std::vector<int64_t>& table,
                  int64_t oldest);
  void fill(int64_t first, int64_t last, const std::vector<int64_t>& table);
  void extend_table(int64_t number, const std::vector<int64_t>& table);
  // Adds a row to the batch.
  void add(const Slots& slots, int64_t number, const int64_t* tokens, int64_t start, int64_t count,
           bool samples);
  // Computes the batch and returns its logits. It brings the hidden states before each token; those that it
  // gives for sampled rows are kept, where the target has not been yet.
  const float* run();

  Executor& executor_;
  const DraftShape shape_;
  std::vector<Slot> slots_;
  std::vector<int64_t> filled_;   // by block: leading positions computed with the tokens it has
  std::vector<int64_t> claimed_;  // by block: the last pass that computed some of it
  int64_t pass_ = 0;
  HiddenStates hidden_;
  std::vector<float> before_;  // of the tokens of the batch
  BatchArrays arrays_;
};

}  // namespace quire
