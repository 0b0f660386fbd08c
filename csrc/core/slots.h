// State of slots between steps: tokens, block tables, rope variants. Steps bring deltas.
#pragma once

#include <cstdint>
#include <vector>

#include "adapters.h"
#include "executor.h"
#include "images.h"
#include "ops.h"
#include "sampler.h"

namespace quire {

// One row of a planned step (quire.types.Row).
struct PlannedRow {
  int64_t slot, start, count;
  int64_t logits;                // of the last positions
  bool sample;                   // of the last 1 + drafted.size() of them
  std::vector<int64_t> drafted;  // tokens to be verified, after the known ones
};

// The state changes of a step, applied when it starts to compute.
struct Deltas {
  struct Frequencies {  // of a new context variant
    RopeTable* table;
    int64_t variant;
    Vector values;
  };
  struct Admission {
    int64_t slot, variant;
    std::vector<int64_t> token_ids;
    SlotParams params;
    std::shared_ptr<const Adapter> adapter;  // or null
  };
  struct Rotation {
    int64_t slot;
    RotaryPositions positions;
  };
  struct Shown {
    int64_t slot;  // -1: of none yet
    Image image;
    double share;  // of the encoding that is done then
  };
  struct Grant {
    int64_t slot, group, first;
    std::vector<int64_t> blocks;
  };
  std::vector<Frequencies> frequencies;
  std::vector<int64_t> released;
  std::vector<Admission> admitted;
  std::vector<Grant> granted;
  std::vector<Rotation> rotated;
  std::vector<Shown> shown;
  std::vector<Snapshot> restored, saved;
};

// The arrays of a Batch. Tokens, positions and logits are appended, then the row that they belong to is
// ended.
struct BatchArrays {
  std::vector<int64_t> token_ids, positions, row_offsets{0}, slots, variants, logit_rows;
  std::vector<const int64_t*> tables;
  std::vector<const Adapter*> adapters;
  std::vector<int64_t> rotary, image_tokens, visible_ends;
  std::vector<const float*> image_rows;

  void clear();
  void end_row(int64_t slot, int64_t variant, const Adapter* adapter = nullptr);
  // Returns the batch; its pointers are valid until the arrays change.
  Batch batch() const;
};

class Slots {
 public:
  Slots(int64_t slots, int64_t groups) : groups_((size_t)groups), slots_((size_t)slots) {
    for (Slot& slot : slots_) slot.tables.resize(groups_);
  }

  void apply(const Deltas& deltas);
  // Adds an image that was encoded.
  void show(int64_t slot, Image image) { slots_.at((size_t)slot).images.push_back(std::move(image)); }
  // Drops the images whose tokens these rows have all computed.
  void drop_images(const std::vector<PlannedRow>& rows);
  // Returns the step for the ops; its pointers are valid until the next call. Drafted tokens are stored as if
  // they were known.
  Batch lay_out(const std::vector<PlannedRow>& rows);
  // Returns the sampling input of the rows laid out last, which must outlive the result.
  std::vector<SampledRow> sampled(const std::vector<PlannedRow>& rows) const;
  // Of a slot: its known tokens, its block table in a cache group, and its rope variant.
  const std::vector<int64_t>& token_ids(int64_t slot) const { return slots_.at((size_t)slot).token_ids; }
  const std::vector<int64_t>& table(int64_t slot, int64_t group) const {
    return slots_.at((size_t)slot).tables.at((size_t)group);
  }
  int64_t variant(int64_t slot) const { return slots_.at((size_t)slot).variant; }
  // Replaces drafted tokens by the results of rows. A row that should have sampled but failed gets an
  // arbitrary token.
  void extend(const std::vector<PlannedRow>& rows, const SampledResults& results);

 private:
  struct Slot {
    int64_t variant = 0, num_prompt = 0;
    bool scores_prompt = false;
    std::shared_ptr<const Adapter> adapter;
    std::unique_ptr<const RotaryPositions> positions;  // null: those of text
    std::vector<Image> images;                         // encoded, of which tokens are to be computed
    std::vector<int64_t> token_ids;
    std::vector<std::vector<int64_t>> tables;  // by group
  };

  // Adds the tokens of images of a row, and by which positions all of its tokens rotate. With `whole`, also
  // what they see.
  void lay_out_images(const PlannedRow& row, const Slot& slot, bool whole);

  size_t groups_;
  std::vector<Slot> slots_;
  BatchArrays arrays_;  // of the batch laid out last
};

}  // namespace quire
