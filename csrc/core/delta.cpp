#include "delta.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

namespace quire {

namespace {

int64_t scratch_floats(const DeltaShape& shape) {  // with decays and betas of a chunk; whole pages
  return round_up(shape.floats() + 2 * kDeltaChunk * shape.heads, 1024);
}

void copy(float* to, const float* from, int64_t count) {
  std::memcpy(to, from, (size_t)count * sizeof(float));
}

}  // namespace

DeltaRule::DeltaRule(int64_t out, const DeltaInputs& inputs, const StateCache* cache, int64_t layer,
                     const DeltaOptions& options, std::shared_ptr<Memory> scratch)
    : out_(out),
      inputs_(inputs),
      cache_(cache),
      layer_(layer),
      key_heads_(options.key_heads),
      shape_{(int64_t)options.log_rate.size() / options.key_heads, options.key_dim,
             cache->shape().width / ((int64_t)options.log_rate.size() * options.key_dim),
             options.bias.size() > options.log_rate.size()},
      beta_factor_(options.beta_factor),
      bias_(options.bias),
      scratch_(std::move(scratch)) {
  if (cache->shape().format != KVFormat::f32 || cache->shape().chunk != kDeltaChunk)
    throw std::invalid_argument("a delta rule needs states of float32 and chunks of 64 positions");
  for (const float log : options.log_rate) rate_.push_back(-std::exp(log));
}

void DeltaRule::prepare(const Step& step) {
  scratch_->reserve((size_t)(scratch_floats(shape_) * step.threads) * sizeof(float));
}

void DeltaRule::run(const Step& step, int64_t task, int thread) {
  const Batch& batch = step.batch;
  const int64_t row = task % batch.sequences, chunk = cache_->shape().chunk;
  const int64_t first_token = batch.row_offsets[row], start = batch.positions[first_token];
  const int64_t end = start + batch.row_offsets[row + 1] - first_token;
  DeltaPiece piece{};
  piece.shape = shape_;
  piece.keys = scratch_->as<float>() + thread * scratch_floats(shape_);
  piece.u = piece.keys + kDeltaChunk * shape_.key_stride();
  piece.totals = piece.u + shape_.heads * kDeltaChunk * shape_.value_stride();
  piece.scratch = piece.totals + shape_.heads * kDeltaChunk * shape_.total_stride();
  std::vector<Snapshot> saved;
  for (const Snapshot& one : batch.saved)
    if (one.group == cache_->group() && one.slot == batch.slots[row]) saved.push_back(one);
  for (int64_t begin = start / chunk * chunk; begin <= end; begin += chunk) {
    const int64_t first = std::max(begin, start);
    const Part part{task / batch.sequences,      batch.slots[row], first_token + first - start, begin, first,
                    std::min(begin + chunk, end)};
    if (part.end > first) compute(step, part, piece);
    for (const Snapshot& one : saved)
      if (one.position / chunk == begin / chunk) save(part, one, piece);
    const int64_t kept = saved.empty() ? end - cache_->shape().history : first;
    for (int64_t position = std::max(first, kept); position < part.end; ++position)
      write(part, position, piece, cache_->inputs(layer_, part.slot, position));
  }
}

void DeltaRule::compute(const Step& step, const Part& part, DeltaPiece& piece) const {
  const int64_t first = part.key_head * shape_.heads * shape_.key_dim * shape_.value_dim;
  for (int64_t position = part.begin; position < part.first; ++position) read(part, position, piece);
  piece.place = part.first - part.begin;
  piece.count = part.end - part.first;
  const auto state = [&](int64_t position) {
    return reinterpret_cast<float*>(cache_->border(layer_, part.slot, position)) + first;
  };
  piece.before = part.begin > 0 ? state(part.begin) : nullptr;
  piece.after = part.end == part.begin + kDeltaChunk ? state(part.end) : nullptr;
  locate_inputs(step, part, piece);
  apply_gates(step, part, piece);
  step.kernels.apply_delta_rule(piece);
}

void DeltaRule::locate_inputs(const Step& step, const Part& part, DeltaPiece& piece) const {
  const auto at = [&](int64_t buffer, int64_t width) {
    return step.buffers[(size_t)buffer] + part.token * width;
  };
  const int64_t keys = key_heads_ * shape_.key_dim, values = key_heads_ * shape_.heads * shape_.value_dim;
  const int64_t key = part.key_head * shape_.key_dim;
  const int64_t value = part.key_head * shape_.heads * shape_.value_dim;
  const bool together = inputs_.queries == inputs_.values;
  piece.key_width = together ? 2 * keys + values : keys;
  piece.value_width = together ? piece.key_width : values;
  piece.queries = at(inputs_.queries, piece.key_width) + key;
  piece.new_keys = at(inputs_.keys, piece.key_width) + (together ? keys : 0) + key;
  piece.values = at(inputs_.values, piece.value_width) + (together ? 2 * keys : 0) + value;
  piece.out_width = values;
  piece.out = at(out_, values) + value;
}

// Makes betas, and one decay of each head, of the inputs; the kernel makes those of channels.
void DeltaRule::apply_gates(const Step& step, const Part& part, DeltaPiece& piece) const {
  const int64_t heads = shape_.heads * key_heads_, head = part.key_head * shape_.heads;
  const float* decay = step.buffers[(size_t)inputs_.decay];
  float* decays = piece.keys + shape_.floats();
  float* betas = decays + kDeltaChunk * shape_.heads;
  for (int64_t t = 0; t < piece.count; ++t) {
    for (int64_t i = 0; i < shape_.heads; ++i) {
      const int64_t at = (part.token + t) * heads + head + i, to = t * shape_.heads + i;
      const double beta = step.buffers[(size_t)inputs_.beta][at];
      betas[to] = (float)(1 / (1 + std::exp(-beta))) * beta_factor_;
      if (shape_.by_channel) continue;
      const double x = decay[at] + bias_[(size_t)(head + i)];
      const double softplus = std::max(x, 0.0) + std::log1p(std::exp(-std::abs(x)));
      decays[to] = rate_[(size_t)(head + i)] * (float)softplus;
    }
  }
  piece.decay_width = heads * shape_.decays();
  piece.decays = shape_.by_channel ? decay + part.token * piece.decay_width + head * shape_.key_dim : decays;
  piece.betas = betas;
  piece.rates = rate_.data() + head;
  piece.bias = bias_.data() + head * shape_.decays();
}

void DeltaRule::save(const Part& part, const Snapshot& as, const DeltaPiece& piece) const {
  const int64_t numbers = shape_.heads * shape_.key_dim * shape_.value_dim;
  const int64_t bytes = cache_->shape().bytes(numbers), at = part.key_head * bytes;
  if (part.begin > 0)
    std::memcpy(cache_->saved_border(layer_, as.snapshot) + at,
                cache_->border(layer_, part.slot, part.begin) + at, (size_t)bytes);
  for (int64_t position = cache_->oldest(as); position < as.position; ++position) {
    uint8_t* to = cache_->saved_inputs(layer_, as, position);
    if (position >= part.first) {
      write(part, position, piece, to);
      continue;
    }
    const auto* from = reinterpret_cast<const float*>(cache_->inputs(layer_, part.slot, position));
    auto* saved = reinterpret_cast<float*>(to);
    copy(saved + key_at(part), from + key_at(part), shape_.key_dim);
    copy(saved + u_at(part), from + u_at(part), shape_.heads * shape_.value_dim);
    copy(saved + total_at(part), from + total_at(part), shape_.heads * shape_.decays());
  }
}

void DeltaRule::read(const Part& part, int64_t position, const DeltaPiece& piece) const {
  const auto* kept = reinterpret_cast<const float*>(cache_->inputs(layer_, part.slot, position));
  const int64_t place = position - part.begin, n = shape_.value_dim, decays = shape_.decays();
  float* key = piece.keys + place * shape_.key_stride();
  copy(key, kept + key_at(part), shape_.key_dim);
  std::fill(key + shape_.key_dim, key + shape_.key_stride(), 0.0f);
  for (int64_t i = 0; i < shape_.heads; ++i) {
    copy(piece.u + (i * kDeltaChunk + place) * shape_.value_stride(), kept + u_at(part) + i * n, n);
    float* total = piece.totals + (i * kDeltaChunk + place) * shape_.total_stride();
    *total = kept[total_at(part) + i * decays];
    if (!shape_.by_channel) continue;
    copy(total + 1, kept + total_at(part) + i * decays + 1, decays - 1);
    std::fill(total + decays, total + shape_.total_stride(), 0.0f);
  }
}

void DeltaRule::write(const Part& part, int64_t position, const DeltaPiece& piece, uint8_t* to) const {
  auto* kept = reinterpret_cast<float*>(to);
  const int64_t place = position - part.begin, n = shape_.value_dim, decays = shape_.decays();
  copy(kept + key_at(part), piece.keys + place * shape_.key_stride(), shape_.key_dim);
  for (int64_t i = 0; i < shape_.heads; ++i) {
    copy(kept + u_at(part) + i * n, piece.u + (i * kDeltaChunk + place) * shape_.value_stride(), n);
    const float* total = piece.totals + (i * kDeltaChunk + place) * shape_.total_stride();
    kept[total_at(part) + i * decays] = *total;
    if (shape_.by_channel) copy(kept + total_at(part) + i * decays + 1, total + 1, decays - 1);
  }
}

}  // namespace quire
