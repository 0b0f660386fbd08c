#include "ops.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <stdexcept>

namespace quire {

namespace {

// Returns memory of this thread for some rows.
float* rows_of_thread(int64_t rows, int64_t width) {
  thread_local Memory memory;
  memory.reserve((size_t)(rows * width) * sizeof(float));
  return memory.as<float>();
}

}  // namespace

Moments moments(const float* x, int64_t count) {
  constexpr int64_t kSums = 8;  // independent ones, for speed
  double sums[kSums] = {}, squares[kSums] = {};
  for (int64_t i = 0; i < count; ++i) {
    const double value = x[i];
    sums[i % kSums] += value;
    squares[i % kSums] += value * value;
  }
  Moments total{0, 0};
  for (int64_t i = 0; i < kSums; ++i) total = {total.mean + sums[i], total.square + squares[i]};
  return {total.mean / (double)count, total.square / (double)count};
}

void Embed::run_rows(const Step& step, int64_t first, int64_t last) {
  const Panels table = table_->panels();
  for (int64_t t = first; t < last; ++t) {
    float* out = step.buffers[out_] + t * table.inputs;
    const int64_t id = of_.row(step.batch, t, table.outputs);
    if (table.order == nullptr) {
      step.kernels.lookup(table, id, out);
      continue;
    }
    float* row = rows_of_thread(1, table.inputs);
    step.kernels.lookup(table, id, row);
    for (int64_t k = 0; k < table.inputs; ++k) out[table.order[k]] = row[k];
  }
}

namespace {

// Converts a row of numbers, as T, to float by `value`.
template <typename T, typename Value>
void convert(const uint8_t* from, int64_t count, float* out, const Value& value) {
  for (int64_t i = 0; i < count; ++i) {
    T stored;
    std::memcpy(&stored, from + i * (int64_t)sizeof(T), sizeof(T));
    out[i] = value(stored);
  }
}

float of_bf16(uint16_t bits) {
  const uint32_t wide = (uint32_t)bits << 16;
  float value;
  std::memcpy(&value, &wide, sizeof(value));
  return value;
}

}  // namespace

#if defined(__aarch64__)
using Half = __fp16;  // GCC 12 has _Float16 for x86-64 alone
#else
using Half = _Float16;
#endif

void EmbedStored::run_rows(const Step& step, int64_t first, int64_t last) {
  const int64_t width = table_.width, row_bytes = width * (table_.format == Format::f32 ? 4 : 2);
  for (int64_t t = first; t < last; ++t) {
    const uint8_t* row = table_.data + of_.row(step.batch, t, table_.rows) * row_bytes;
    float* out = step.buffers[out_] + t * width;
    if (table_.format == Format::f32) {
      std::memcpy(out, row, (size_t)row_bytes);
    } else if (table_.format == Format::bf16) {
      convert<uint16_t>(row, width, out, of_bf16);
    } else {
      convert<Half>(row, width, out, [](Half value) { return (float)value; });
    }
  }
}

void SampledRows::run_rows(const Step& step, int64_t first, int64_t last) {
  for (int64_t l = first; l < last; ++l)
    std::memcpy(step.buffers[out_] + l * width_, step.buffers[x_] + step.batch.logit_rows[l] * width_,
                (size_t)width_ * sizeof(float));
}

void EmbedSegments::prepare(const Step& step) {
  const Batch& batch = step.batch;
  const int64_t most = table_->panels().outputs - 1;
  segments_.clear();
  for (int64_t sequence = 0; sequence < batch.sequences; ++sequence) {
    int64_t segment = 0;
    for (int64_t t = batch.row_offsets[sequence]; t < batch.row_offsets[sequence + 1]; ++t) {
      segments_.push_back(segment);
      if (batch.token_ids[t] == separator_) segment = std::min(segment + 1, most);
    }
  }
}

void EmbedSegments::run_rows(const Step& step, int64_t first, int64_t last) {
  const Panels table = table_->panels();
  for (int64_t t = first; t < last; ++t)
    step.kernels.lookup(table, segments_[(size_t)t], step.buffers[out_] + t * table.inputs);
}

void PoolRows::run_rows(const Step& step, int64_t first, int64_t last) {
  const Batch& batch = step.batch;
  const int64_t* ends = batch.row_offsets + 1;
  std::vector<double> sums((size_t)width_);
  for (int64_t l = first; l < last; ++l) {
    const int64_t* end = std::upper_bound(ends, ends + batch.sequences, batch.logit_rows[l]);
    const int64_t begin = end[-1], count = mean_ ? *end - begin : 1;
    const float* x = step.buffers[x_] + begin * width_;
    std::fill(sums.begin(), sums.end(), 0.0);
    for (int64_t t = 0; t < count; ++t)
      for (int64_t i = 0; i < width_; ++i) sums[(size_t)i] += x[t * width_ + i];
    float* out = step.buffers[out_] + l * width_;
    for (int64_t i = 0; i < width_; ++i) out[i] = (float)(sums[(size_t)i] / (double)count);
  }
}

void PreviousHidden::run_rows(const Step& step, int64_t first, int64_t last) {
  if (!step.batch.hidden) throw std::invalid_argument("this batch brings no hidden states");
  std::memcpy(step.buffers[out_] + first * width_, step.batch.hidden + first * width_,
              (size_t)((last - first) * width_) * sizeof(float));
}

void RowWise::run_rows(const Step& step, int64_t first, int64_t last) {
  const float* x = step.buffers[x_] + first * x_width_;
  const float* y = y_ < 0 ? nullptr : step.buffers[y_] + first * y_width_;
  function_(step, x, y, step.buffers[out_] + first * out_width_, last - first);
}

void RopeTable::prepare(const Step& step) {
  cos_.resize((size_t)(step.batch.tokens * pairs_));
  sin_.resize((size_t)(step.batch.tokens * pairs_));
}

float RopeTable::angle(const Step& step, int64_t token, int64_t pair, const Vector* frequencies) const {
  if (places_ >= 0) {
    const int64_t each = pairs_ / num_axes_;
    return step.buffers[places_][token * num_axes_ + pair / each] * of_places_[(size_t)(pair % each)];
  }
  const bool three = !axes_.empty() && step.batch.rotary != nullptr;
  const int64_t position =
      three ? step.batch.rotary[3 * token + axes_[(size_t)pair]] : step.batch.positions[token];
  return (float)(position - behind_) * (*frequencies)[(size_t)pair];
}

void RopeTable::run_rows(const Step& step, int64_t first, int64_t last) {
  const Batch& batch = step.batch;
  const int64_t* ends = batch.row_offsets + 1;
  for (int64_t t = first; t < last; ++t) {
    const int64_t sequence = std::upper_bound(ends, ends + batch.sequences, t) - ends;
    const Vector* frequencies = places_ < 0 ? &frequencies_.at(batch.variants[sequence]) : nullptr;
    for (int64_t i = 0; i < pairs_; ++i) {
      const double rotated = angle(step, t, i, frequencies);  // its cosine and sine are exact
      cos_[(size_t)(t * pairs_ + i)] = (float)(std::cos(rotated) * scale_);
      sin_[(size_t)(t * pairs_ + i)] = (float)(std::sin(rotated) * scale_);
    }
  }
}

void ScaleByPosition::run_rows(const Step& step, int64_t first, int64_t last) {
  for (int64_t t = first; t < last; ++t) {
    const double periods = (double)((step.batch.positions[t] + first_) / period_);
    const float factor = (float)(1 + beta_ * std::log(1 + periods));
    step.kernels.scale(step.buffers[x_] + t * width_, factor, step.buffers[out_] + t * width_, width_);
  }
}

void Rotary::run_rows(const Step& step, int64_t first, int64_t last) {
  Vector negated((size_t)(inverse_ ? table_->pairs() : 0));
  for (int64_t row = first; row < last; ++row) {
    const int64_t token = count_ == Count::tokens ? row : step.batch.logit_rows[row];
    const float* sin = table_->sin(token);
    std::transform(sin, sin + negated.size(), negated.begin(), std::negate<float>());
    rotate(step, row, table_->cos(token), inverse_ ? negated.data() : sin);
  }
}

void Rotary::rotate(const Step& step, int64_t row, const float* cos, const float* sin) const {
  const float* x = step.buffers[x_] + row * heads_ * dim_;
  float* out = step.buffers[out_] + row * heads_ * dim_;
  const int64_t pairs = table_->pairs();
  if (first_ == 0) return step.kernels.rotate(x, out, cos, sin, heads_, dim_, pairs, interleaved_);
  for (int64_t head = 0; head < heads_; ++head, x += dim_, out += dim_) {
    if (out != x) std::copy_n(x, first_, out);
    step.kernels.rotate(x + first_, out + first_, cos, sin, 1, dim_ - first_, pairs, interleaved_);
  }
}

namespace {

PackedActivations packed_in(const Memory& memory, const Step& step, Count count, const Panels& weight) {
  return {step.kernels.activation_format(weight), step.count(count), weight.inputs, memory.as<uint8_t>()};
}

}  // namespace

void pack_tile(const Step& step, const PackedActivations& packed, const float* x, int64_t stride,
               const Panels& weight, int64_t tile) {
  if (weight.order == nullptr) return step.kernels.pack_activations(packed, x, stride, tile);
  const int64_t width = weight.inputs;
  const PackedActivations one{packed.format, packed.tile_rows(tile), width, packed.tile(tile)};
  float* ordered = rows_of_thread(one.rows, width);
  for (int64_t m = 0; m < one.rows; ++m) {
    const float* from = x + (tile * kTile + m) * stride;
    for (int64_t k = 0; k < width; ++k) ordered[m * width + k] = from[weight.order[k]];
  }
  step.kernels.pack_activations(one, ordered, width, 0);
}

void Pack::prepare(const Step& step) {
  const int64_t rows = round_up(std::max<int64_t>(step.count(count_), 1), kTile);
  packed_->reserve(
      (size_t)(rows * PackedActivations::row_bytes(step.kernels.activation_format(weight_), width_)));
}

void Pack::run_rows(const Step& step, int64_t first, int64_t) {
  pack_tile(step, packed_in(*packed_, step, count_, weight_), step.buffers[x_], width_, weight_,
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
  return rows < kTile ? panels : round_up(panels, 2);  // two may be multiplied together
}

}  // namespace

void Multiply::prepare(const Step& step) {
  first_task_.assign(1, 0);
  panels_a_task_.clear();
  for (const Part& part : parts_) {
    const Panels weight = part.weight->panels();
    panels_a_task_.push_back(panels_a_task(weight, part.up != nullptr, step.count(count_), step.threads));
  }
  for (int node = 0; node < step.nodes.count(); ++node)
    for (size_t i = 0; i < parts_.size(); ++i) {
      const Section own = parts_[i].weight->section(step.nodes, node);
      const int64_t tasks = ceil_div(own.last_panel - own.first_panel, panels_a_task_[i]);
      first_task_.push_back(first_task_.back() + tasks);
    }
}

int64_t Multiply::tasks(const Step& step) const { return step.count(count_) == 0 ? 0 : first_task_.back(); }

void Multiply::run(const Step& step, int64_t task, int) {
  const size_t at =
      (size_t)(std::upper_bound(first_task_.begin(), first_task_.end(), task) - first_task_.begin()) - 1;
  const size_t i = at % parts_.size();
  const Part& part = parts_[i];
  const Section own = part.weight->section(step.nodes, (int)(at / parts_.size()));
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
  const int64_t first = own.first_panel + (task - first_task_[at]) * panels_a_task_[i];
  const int64_t last = std::min(first + panels_a_task_[i], own.last_panel);
  const PackedActivations packed = packed_in(*packed_, step, count_, product.weight);
  step.kernels.multiply(product, packed, first, last);
}

double Multiply::operations(const Step& step) const {
  double weights = 0;
  for (const Part& part : parts_)
    weights += (part.up ? 2.0 : 1.0) * (double)(part.weight->outputs() * part.weight->inputs());
  return 2 * weights * (double)step.count(count_);
}

}  // namespace quire
