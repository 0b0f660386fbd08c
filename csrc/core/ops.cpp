#include "ops.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

namespace quire {

void Embed::run_rows(const Step& step, int64_t first, int64_t last) {
  const int64_t* ids = by_position_ ? step.batch.positions : step.batch.token_ids;
  const Panels table = table_->panels();
  for (int64_t t = first; t < last; ++t)
    step.kernels.lookup(table, ids[t], step.buffers[out_] + t * table.inputs);
}

void SampledRows::run_rows(const Step& step, int64_t first, int64_t last) {
  for (int64_t l = first; l < last; ++l)
    std::memcpy(step.buffers[out_] + l * width_, step.buffers[x_] + step.batch.logit_rows[l] * width_,
                (size_t)width_ * sizeof(float));
}

void RowWise::run_rows(const Step& step, int64_t first, int64_t last) {
  const float* x = step.buffers[x_] + first * x_width_;
  const float* y = y_ < 0 ? nullptr : step.buffers[y_] + first * x_width_;
  function_(step, x, y, step.buffers[out_] + first * out_width_, last - first);
}

void RopeTable::prepare(const Step& step) {
  cos_.resize((size_t)(step.batch.tokens * pairs_));
  sin_.resize((size_t)(step.batch.tokens * pairs_));
}

void RopeTable::run_rows(const Step& step, int64_t first, int64_t last) {
  const Batch& batch = step.batch;
  const int64_t* ends = batch.row_offsets + 1;
  for (int64_t t = first; t < last; ++t) {
    const int64_t sequence = std::upper_bound(ends, ends + batch.sequences, t) - ends;
    const Vector& frequencies = frequencies_.at(batch.variants[sequence]);
    for (int64_t i = 0; i < pairs_; ++i) {
      // The angle is rounded to float32, as in training; its cosine and sine are exact.
      const double angle = (float)batch.positions[t] * frequencies[(size_t)i];
      cos_[(size_t)(t * pairs_ + i)] = (float)(std::cos(angle) * scale_);
      sin_[(size_t)(t * pairs_ + i)] = (float)(std::sin(angle) * scale_);
    }
  }
}

void Rotary::run_rows(const Step& step, int64_t first, int64_t last) {
  const int64_t width = heads_ * dim_;
  for (int64_t t = first; t < last; ++t)
    step.kernels.rotate(step.buffers[x_] + t * width, step.buffers[out_] + t * width, table_->cos(t),
                        table_->sin(t), heads_, dim_, table_->pairs(), interleaved_);
}

namespace {

PackedActivations packed_in(const Memory& memory, const Step& step, Count count, Format weight,
                            int64_t inputs) {
  return {step.kernels.activation_format(weight), step.count(count), inputs, memory.as<uint8_t>()};
}

}  // namespace

void Pack::prepare(const Step& step) {
  const int64_t rows = round_up(std::max<int64_t>(step.count(count_), 1), kTile);
  packed_->reserve(
      (size_t)(rows * PackedActivations::row_bytes(step.kernels.activation_format(weight_), width_)));
}

void Pack::run_rows(const Step& step, int64_t first, int64_t) {
  step.kernels.pack_activations(packed_in(*packed_, step, count_, weight_, width_), step.buffers[x_], width_,
                                first / kTile);
}

namespace {

constexpr int64_t kCached = 384 << 10;  // bytes of panels that fit in the L2 cache along with the activations
// Minimum tasks per thread, for balance. With few rows, fewer and longer tasks read memory sequentially.
constexpr int64_t kShares = 16, kSharesOfFewRows = 6, kFewRows = 4 * kTile;

int64_t panels_a_task(const Panels& weight, bool gated, int64_t rows, int threads) {
  const int64_t bytes = weight.panel_bytes() * (gated ? 2 : 1);
  int64_t panels = ceil_div(weight.panels(), (rows > kFewRows ? kShares : kSharesOfFewRows) * threads);
  if (rows > kFewRows) panels = std::min(panels, std::max<int64_t>(1, kCached / bytes));
  return panels;
}

}  // namespace

void Multiply::prepare(const Step& step) {
  first_task_.assign(1, 0);
  panels_a_task_.clear();
  for (const Part& part : parts_) {
    const Panels weight = part.weight->panels();
    panels_a_task_.push_back(panels_a_task(weight, part.up != nullptr, step.count(count_), step.threads));
    first_task_.push_back(first_task_.back() + ceil_div(weight.panels(), panels_a_task_.back()));
  }
}

int64_t Multiply::tasks(const Step& step) const { return step.count(count_) == 0 ? 0 : first_task_.back(); }

void Multiply::run(const Step& step, int64_t task, int) {
  const size_t i =
      (size_t)(std::upper_bound(first_task_.begin(), first_task_.end(), task) - first_task_.begin()) - 1;
  const Part& part = parts_[i];
  Product product{part.weight->panels(),
                  nullptr,
                  part.bias.empty() ? nullptr : part.bias.data(),
                  part.activation,
                  step.buffers[part.out],
                  part.weight->outputs()};
  Panels up;
  if (part.up) {
    up = part.up->panels();
    product.up = &up;
  }
  const int64_t first = (task - first_task_[i]) * panels_a_task_[i];
  const int64_t last = std::min(first + panels_a_task_[i], product.weight.panels());
  const PackedActivations packed =
      packed_in(*packed_, step, count_, product.weight.format, product.weight.inputs);
  step.kernels.multiply(product, packed, first, last);
}

}  // namespace quire
