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

DeltaRule::DeltaRule(int64_t out, int64_t x, int64_t decay, int64_t beta, const StateCache* cache,
                     int64_t layer, std::vector<float> log_rate, std::vector<float> bias, int64_t key_heads,
                     int64_t key_dim, std::shared_ptr<Memory> scratch)
    : out_(out),
      x_(x),
      decay_(decay),
      beta_(beta),
      cache_(cache),
      layer_(layer),
      key_heads_(key_heads),
      shape_{(int64_t)bias.size() / key_heads, key_dim,
             cache->shape().width / ((int64_t)bias.size() * key_dim)},
      bias_(std::move(bias)),
      scratch_(std::move(scratch)) {
  if (cache->shape().format != KVFormat::f32 || cache->shape().chunk != kDeltaChunk)
    throw std::invalid_argument("a delta rule needs states of float32 and chunks of 64 positions");
  for (const float log : log_rate) rate_.push_back(-std::exp(log));
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
  piece.scratch = piece.totals + shape_.heads * kDeltaChunk;
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
  const int64_t heads = shape_.heads * key_heads_, keys = key_heads_ * shape_.key_dim;
  const int64_t head = part.key_head * shape_.heads, size = shape_.key_dim * shape_.value_dim;
  for (int64_t position = part.begin; position < part.first; ++position) read(part, position, piece);
  piece.place = part.first - part.begin;
  piece.count = part.end - part.first;
  const auto state = [&](int64_t position) {
    return reinterpret_cast<float*>(cache_->border(layer_, part.slot, position)) + head * size;
  };
  piece.before = part.begin > 0 ? state(part.begin) : nullptr;
  piece.after = part.end == part.begin + kDeltaChunk ? state(part.end) : nullptr;
  float* decays = piece.keys + shape_.floats();
  float* betas = decays + kDeltaChunk * shape_.heads;
  for (int64_t t = 0; t < piece.count; ++t) {
    for (int64_t i = 0; i < shape_.heads; ++i) {
      const int64_t at = (part.token + t) * heads + head + i;
      const double x = step.buffers[(size_t)decay_][at] + bias_[(size_t)(head + i)];
      const double softplus = std::max(x, 0.0) + std::log1p(std::exp(-std::abs(x)));
      decays[t * shape_.heads + i] = rate_[(size_t)(head + i)] * (float)softplus;
      betas[t * shape_.heads + i] = (float)(1 / (1 + std::exp(-(double)step.buffers[(size_t)beta_][at])));
    }
  }
  piece.gates = shape_.heads;
  piece.decays = decays;
  piece.betas = betas;
  piece.width = 2 * keys + heads * shape_.value_dim;
  piece.out_width = heads * shape_.value_dim;
  const float* x = step.buffers[(size_t)x_] + part.token * piece.width;
  piece.queries = x + part.key_head * shape_.key_dim;
  piece.new_keys = piece.queries + keys;
  piece.values = x + 2 * keys + head * shape_.value_dim;
  piece.out = step.buffers[(size_t)out_] + part.token * piece.out_width + head * shape_.value_dim;
  step.kernels.apply_delta_rule(piece);
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
    copy(saved + total_at(part), from + total_at(part), shape_.heads);
  }
}

void DeltaRule::read(const Part& part, int64_t position, const DeltaPiece& piece) const {
  const auto* kept = reinterpret_cast<const float*>(cache_->inputs(layer_, part.slot, position));
  const int64_t place = position - part.begin, n = shape_.value_dim;
  float* key = piece.keys + place * shape_.key_stride();
  copy(key, kept + key_at(part), shape_.key_dim);
  std::fill(key + shape_.key_dim, key + shape_.key_stride(), 0.0f);
  for (int64_t i = 0; i < shape_.heads; ++i) {
    copy(piece.u + (i * kDeltaChunk + place) * shape_.value_stride(), kept + u_at(part) + i * n, n);
    piece.totals[i * kDeltaChunk + place] = kept[total_at(part) + i];
  }
}

void DeltaRule::write(const Part& part, int64_t position, const DeltaPiece& piece, uint8_t* to) const {
  auto* kept = reinterpret_cast<float*>(to);
  const int64_t place = position - part.begin, n = shape_.value_dim;
  copy(kept + key_at(part), piece.keys + place * shape_.key_stride(), shape_.key_dim);
  for (int64_t i = 0; i < shape_.heads; ++i) {
    copy(kept + u_at(part) + i * n, piece.u + (i * kDeltaChunk + place) * shape_.value_stride(), n);
    kept[total_at(part) + i] = piece.totals[i * kDeltaChunk + place];
  }
}

}  // namespace quire
