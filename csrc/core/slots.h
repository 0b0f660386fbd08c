// What the core knows of each slot between steps: tokens, block tables, rope frequencies. Steps bring deltas.
#pragma once

#include <cstdint>
#include <vector>

#include "executor.h"
#include "ops.h"
#include "sampler.h"

namespace quire {

// One row of a step as it is planned (quire.types.Row).
struct PlannedRow {
  int64_t slot, start, count;
  int64_t logits;                // of the last positions
  bool sample;                   // of the last 1 + drafted.size() of them
  std::vector<int64_t> drafted;  // tokens to be verified, after those that are known
};

// What a step brings besides its rows, applied when it begins to compute.
struct Deltas {
  struct Frequencies {  // of a context variant that was not seen before
    RopeTable* table;
    int64_t variant;
    Vector values;
  };
  struct Admission {
    int64_t slot, variant;
    std::vector<int64_t> token_ids;
    SlotParams params;
  };
  struct Grant {
    int64_t slot, group, first;
    std::vector<int64_t> blocks;
  };
  std::vector<Frequencies> frequencies;
  std::vector<int64_t> released;
  std::vector<Admission> admitted;
  std::vector<Grant> granted;
  std::vector<Snapshot> restored, saved;
};

class Slots {
 public:
  Slots(int64_t slots, int64_t groups) : groups_((size_t)groups), slots_((size_t)slots) {
    for (Slot& slot : slots_) slot.tables.resize(groups_);
  }

  void apply(const Deltas& deltas);
  // The step for the ops; what it points to is valid until the next call. Drafted tokens are written down as
  // if they were known.
  Batch lay_out(const std::vector<PlannedRow>& rows);
  // What sampling is asked for rows that were laid out last, which must live as long as the answer is used.
  std::vector<SampledRow> sampled(const std::vector<PlannedRow>& rows) const;
  // Puts the tokens that rows gave in the place of what was drafted. A row that was to give one and failed
  // gets any token.
  void extend(const std::vector<PlannedRow>& rows, const SampledResults& results);

 private:
  struct Slot {
    int64_t variant = 0, num_prompt = 0;
    bool scores_prompt = false;
    std::vector<int64_t> token_ids;
    std::vector<std::vector<int64_t>> tables;  // of each group
  };

  size_t groups_;
  std::vector<Slot> slots_;
  // The batch that was laid out last.
  std::vector<int64_t> token_ids_, positions_, row_offsets_, numbers_, variants_, logit_rows_;
  std::vector<const int64_t*> tables_;
};

}  // namespace quire
