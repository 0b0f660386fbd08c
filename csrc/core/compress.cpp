#include "compress.h"

#include <algorithm>

namespace quire {

namespace {

// Returns the block table of the sequence of a token.
const int64_t* table_of(const Batch& batch, int64_t group, int64_t token) {
  const int64_t* ends = batch.row_offsets + 1;
  return batch.table(group, std::upper_bound(ends, ends + batch.sequences, token) - ends);
}

}  // namespace

void KeepInputs::run(const Step& step, int64_t task, int) {
  const int64_t last = std::min((task + 1) * kTile, step.batch.tokens), width = cache_->value_dim;
  for (int64_t token = task * kTile; token < last; ++token) {
    const int64_t position = step.batch.positions[token];
    const int64_t* table = table_of(step.batch, group_, token);
    float* row = kept_row(*cache_, table, position);
    std::copy_n(step.buffers[(size_t)values_] + token * width, width, row);
    std::copy_n(step.buffers[(size_t)gates_] + token * width, width, row + width);
  }
}

void Compress::run_rows(const Step& step, int64_t first, int64_t last) {
  for (int64_t token = first; token < last; ++token) {
    float* out = step.buffers[(size_t)out_] + token * how_.dim;
    const int64_t position = step.batch.positions[token];
    if ((position + 1) % how_.every) {
      std::fill_n(out, how_.dim, 0.0f);
    } else {
      step.kernels.compress(how_, table_of(step.batch, group_, token), position, out);
    }
  }
}

}  // namespace quire
