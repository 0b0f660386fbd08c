#include "state_space.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

namespace quire {

namespace {

constexpr int64_t kHeads = 8;  // of a task, at most

void copy(float* to, const float* from, int64_t count) {
  std::memcpy(to, from, (size_t)count * sizeof(float));
}

float* floats(uint8_t* of) { return reinterpret_cast<float*>(of); }

// u, G, steps and decays of a chunk, and what the kernel needs; whole pages.
int64_t scratch_floats(const SpaceShape& shape) {
  return round_up(kSpaceChunk * shape.heads * (shape.dim + 3) + shape.floats(), 1024);
}

// The largest number of heads of a task that divides those of a group.
int64_t heads_of_task(int64_t shared) {
  int64_t heads = std::min(kHeads, shared);
  while (shared % heads != 0) --heads;
  return heads;
}

}  // namespace

StateSpace::StateSpace(int64_t out, int64_t x, int64_t step, const StateCache* cache, int64_t layer,
                       SpaceOptions options, std::shared_ptr<Memory> scratch)
    : out_(out),
      x_(x),
      step_(step),
      cache_(cache),
      layer_(layer),
      options_(std::move(options)),
      scratch_(std::move(scratch)) {
  const int64_t heads = options_.heads();
  shape_ = {heads_of_task(heads / options_.groups), options_.state_dim,
            cache->shape().width / (heads * options_.state_dim)};
  pieces_ = heads / shape_.heads;
  if (cache->shape().format != KVFormat::f32 || cache->shape().chunk != kSpaceChunk)
    throw std::invalid_argument("a state space needs states of float32 and chunks of 64 positions");
  for (const float log : options_.log_rate) rate_.push_back(-std::exp(log));
}

void StateSpace::prepare(const Step& step) {
  scratch_->reserve((size_t)(scratch_floats(shape_) * step.threads) * sizeof(float));
}

void StateSpace::run(const Step& step, int64_t task, int thread) {
  const Batch& batch = step.batch;
  const int64_t row = task % batch.sequences, chunk = kSpaceChunk, history = cache_->shape().history;
  const int64_t first_token = batch.row_offsets[row], start = batch.positions[first_token];
  const int64_t end = start + batch.row_offsets[row + 1] - first_token;
  SpacePiece piece{};
  piece.shape = shape_;
  piece.new_u = scratch_->as<float>() + thread * scratch_floats(shape_);
  piece.totals = piece.new_u + chunk * shape_.heads * shape_.dim;
  float* steps = piece.totals + chunk * shape_.heads;
  piece.scratch = steps + 2 * chunk * shape_.heads;
  std::vector<Snapshot> saved;
  for (const Snapshot& one : batch.saved)
    if (one.group == cache_->group() && one.slot == batch.slots[row]) saved.push_back(one);
  for (int64_t begin = start / chunk * chunk; begin <= end; begin += chunk) {
    const int64_t first = std::max(begin, start), head = task / batch.sequences * shape_.heads;
    const Part part{
        head, batch.slots[row], first_token + first - start, begin, first, std::min(begin + chunk, end)};
    if (part.end > first) compute(step, part, piece, steps);
    for (const Snapshot& one : saved)
      if (one.position / chunk == begin / chunk) save(part, one, piece);
    const int64_t kept = saved.empty() ? end - history : first;
    for (int64_t position = std::max(first, kept); position < part.end; ++position)
      write(part, position, piece, cache_->inputs(layer_, part.slot, position));
  }
}

void StateSpace::compute(const Step& step, const Part& part, SpacePiece& piece, float* steps) const {
  const int64_t heads = options_.heads(), dim = shape_.dim, own = shape_.heads * dim;
  const int64_t group = part.head / (heads / options_.groups), size = shape_.state_dim * dim;
  piece.place = part.first - part.begin;
  piece.count = part.end - part.first;
  piece.width = heads * dim + 2 * kept_b();
  piece.out_width = heads * dim;
  const float* x = step.buffers[(size_t)x_] + part.token * piece.width;
  const float* b = x + heads * dim + group * shape_.state_dim;
  for (int64_t place = 0; place < piece.place; ++place) {
    const float* kept = floats(cache_->inputs(layer_, part.slot, part.begin + place));
    piece.b[place] = kept + group * shape_.state_dim;
    piece.u[place] = kept + kept_u(part);
    for (int64_t i = 0; i < shape_.heads; ++i)
      piece.totals[i * kSpaceChunk + place] = kept[kept_total(part) + i];
  }
  float* decays = steps + kSpaceChunk * shape_.heads;
  for (int64_t t = 0; t < piece.count; ++t) {
    piece.b[piece.place + t] = b + t * piece.width;
    piece.u[piece.place + t] = piece.new_u + t * own;
    const float* given = step.buffers[(size_t)step_] + (part.token + t) * heads + part.head;
    for (int64_t i = 0; i < shape_.heads; ++i) {
      const double raw = given[i] + options_.bias[(size_t)(part.head + i)];
      const float softplus = (float)(std::max(raw, 0.0) + std::log1p(std::exp(-std::abs(raw))));
      const float bounded = softplus < options_.low ? options_.low : softplus;  // ordered for NaN
      const float length = bounded > options_.high ? options_.high : bounded;
      steps[t * shape_.heads + i] = length;
      decays[t * shape_.heads + i] = rate_[(size_t)(part.head + i)] * length;
    }
  }
  const auto state = [&](int64_t position) {
    return floats(cache_->border(layer_, part.slot, position)) + part.head * size;
  };
  piece.before = part.begin > 0 ? state(part.begin) : nullptr;
  piece.after = part.end == part.begin + kSpaceChunk ? state(part.end) : nullptr;
  piece.steps = steps;
  piece.decays = decays;
  piece.skip = options_.skip.data() + part.head;
  piece.x = x + part.head * dim;
  piece.c = b + kept_b();
  piece.out = step.buffers[(size_t)out_] + part.token * piece.out_width + part.head * dim;
  step.kernels.apply_state_space(piece);
}

void StateSpace::save(const Part& part, const Snapshot& as, const SpacePiece& piece) const {
  const int64_t numbers = shape_.heads * shape_.state_dim * shape_.dim;
  const int64_t bytes = cache_->shape().bytes(numbers), at = part.head / shape_.heads * bytes;
  if (part.begin > 0)
    std::memcpy(cache_->saved_border(layer_, as.snapshot) + at,
                cache_->border(layer_, part.slot, part.begin) + at, (size_t)bytes);
  for (int64_t position = cache_->oldest(as); position < as.position; ++position) {
    uint8_t* to = cache_->saved_inputs(layer_, as, position);
    if (position >= part.first) {
      write(part, position, piece, to);
      continue;
    }
    const float* from = floats(cache_->inputs(layer_, part.slot, position));
    copy(floats(to) + kept_u(part), from + kept_u(part), shape_.heads * shape_.dim);
    copy(floats(to) + kept_total(part), from + kept_total(part), shape_.heads);
  }
}

void StateSpace::write(const Part& part, int64_t position, const SpacePiece& piece, uint8_t* to) const {
  const int64_t own = shape_.heads * shape_.dim, place = position - part.begin;
  copy(floats(to) + kept_u(part), piece.new_u + (position - part.first) * own, own);
  for (int64_t i = 0; i < shape_.heads; ++i)
    floats(to)[kept_total(part) + i] = piece.totals[i * kSpaceChunk + place];
}

void KeepShared::run(const Step& step, int64_t row, int) {
  const Batch& batch = step.batch;
  const int64_t token = batch.row_offsets[row], slot = batch.slots[row], start = batch.positions[token];
  const int64_t end = start + batch.row_offsets[row + 1] - token, history = cache_->shape().history;
  const float* x = step.buffers[(size_t)x_] + token * stride_ + first_;
  for (const Snapshot& one : batch.saved) {
    if (one.group != cache_->group() || one.slot != slot) continue;
    for (int64_t position = cache_->oldest(one); position < one.position; ++position)
      copy(floats(cache_->saved_inputs(layer_, one, position)),
           position < start ? floats(cache_->inputs(layer_, slot, position))
                            : x + (position - start) * stride_,
           width_);
  }
  for (int64_t position = std::max(start, end - history); position < end; ++position)
    copy(floats(cache_->inputs(layer_, slot, position)), x + (position - start) * stride_, width_);
}

}  // namespace quire
