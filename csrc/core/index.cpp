#include "index.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>

namespace quire {

namespace {

constexpr int64_t kTasksPerThread = 4;
constexpr int64_t kWorthATask = 1 << 10;  // rows times positions

}  // namespace

uint64_t Best::entry(float score, int64_t position) {
  const uint32_t bits = std::bit_cast<uint32_t>(std::isnan(score) ? INFINITY : score);
  const uint32_t ordered = bits >> 31 ? ~bits : bits | 1u << 31;
  return (uint64_t)ordered << 32 | (uint32_t)~(uint32_t)position;
}

int64_t Best::shrink() {
  if (count_ <= number_) return count_;
  std::nth_element(held_, held_ + number_ - 1, held_ + count_, std::greater<>());
  passed_ = held_[number_ - 1];
  return count_ = number_;
}

void Best::write(int32_t* positions) {
  shrink();
  for (int64_t i = 0; i < number_; ++i) positions[i] = (int32_t)~(uint32_t)held_[i];
  std::sort(positions, positions + number_);
}

int64_t ChoosePositions::work(const Tile& tile) const { return tile.tokens * how_.heads * tile.segments; }

void ChoosePositions::prepare(const Step& step) {
  const Batch& batch = step.batch;
  const int64_t most = std::max<int64_t>(1, kUnitRows / how_.heads);
  tiles_.clear(), pieces_.clear(), divided_.clear(), seen_.clear();
  for (int64_t token = 0; token < batch.tokens; ++token)
    seen_.push_back((batch.positions[token] + 1) / how_.cache->every);
  int64_t total = 0, tokens = 0, records = 0;
  for (int64_t sequence = 0; sequence < batch.sequences; ++sequence) {
    const int64_t begin = batch.row_offsets[sequence], end = batch.row_offsets[sequence + 1];
    // Tokens at the start that see no more.
    const int64_t seeing = (number_ + 1) * how_.cache->every - 1 - batch.positions[begin];
    for (int64_t first = begin + std::max<int64_t>(0, seeing); first < end; first += most) {
      const int64_t count = std::min(most, end - first);
      const int64_t segments = ceil_div(seen_[(size_t)(first + count - 1)], kSegment);
      tiles_.push_back({sequence, first, count, segments, 1, 0});
      total += work(tiles_.back());
      tokens = std::max(tokens, count);
    }
  }
  const int64_t share =
      std::max(kWorthATask / kSegment * how_.heads, ceil_div(total, kTasksPerThread * step.threads));
  for (Tile& tile : tiles_) {
    const int64_t index = &tile - tiles_.data();
    if (step.threads > 1) tile.pieces = std::min(tile.segments, ceil_div(work(tile), share));
    for (int64_t number = 0; number < tile.pieces; ++number) pieces_.push_back({index, number});
    if (tile.pieces == 1) continue;
    tile.records = records;
    records += tile.tokens * tile.pieces * number_;
    for (int64_t token = 0; token < tile.tokens; ++token) divided_.push_back({index, token});
  }
  const int64_t scores = tokens * kSegment;
  scratch_floats_ = round_up(attention_scratch(tokens * how_.heads, *how_.cache) + scores, 1024);
  entries_ = tokens * Best::room(number_);
  scratch_.reserve((size_t)(scratch_floats_ * step.threads) * sizeof(float));
  held_.reserve((size_t)(entries_ * step.threads) * sizeof(uint64_t));
  records_.reserve((size_t)records * sizeof(uint64_t));
}

void ChoosePositions::run(const Step& step, int64_t task, int thread) {
  const Piece piece = pieces_[(size_t)task];
  const Tile& tile = tiles_[(size_t)piece.tile];
  float* scores = scratch_.as<float>() + thread * scratch_floats_;
  float* scratch = scores + tile.tokens * kSegment;
  AttentionUnit unit{};
  unit.q = unit.q_rest = step.buffers[(size_t)q_] + tile.first * how_.heads * how_.cache->dim;
  unit.positions = step.batch.positions + tile.first;
  unit.ends = seen_.data() + tile.first;
  unit.tokens = tile.tokens;
  unit.block_table = step.batch.table(group_, tile.sequence);
  std::vector<Best> best;
  for (int64_t token = 0; token < tile.tokens; ++token)
    best.emplace_back(held_.as<uint64_t>() + thread * entries_ + token * Best::room(number_), number_);
  const int64_t last = tile.segments * (piece.number + 1) / tile.pieces;
  for (int64_t segment = tile.segments * piece.number / tile.pieces; segment < last; ++segment) {
    unit.first_segment = segment, unit.last_segment = segment + 1;
    step.kernels.score_segment(how_, unit, step.buffers[(size_t)factors_] + tile.first * how_.heads, scores,
                               scratch);
    for (int64_t token = 0; token < tile.tokens; ++token) {
      const int64_t start = segment * kSegment, seen = unit.ends[token];
      for (int64_t at = start; at < std::min(seen, start + kSegment); ++at)
        best[(size_t)token].add(Best::entry(scores[token * kSegment + at - start], at));
    }
  }
  for (int64_t token = 0; token < tile.tokens; ++token) {
    Best& own = best[(size_t)token];
    if (tile.pieces == 1) {
      own.write(list(step, tile.first + token));
      continue;
    }
    const uint64_t* held = held_.as<uint64_t>() + thread * entries_ + token * Best::room(number_);
    uint64_t* record =
        records_.as<uint64_t>() + tile.records + (token * tile.pieces + piece.number) * number_;
    std::fill(std::copy(held, held + own.shrink(), record), record + number_, 0);
  }
}

double ChoosePositions::operations(const Step&) const {
  double total = 0;
  for (const Tile& tile : tiles_) total += (double)(work(tile) * kSegment);
  return 2 * total * (double)how_.cache->dim;
}

void MergeBest::prepare(const Step& step) {
  held_.reserve((size_t)(Best::room(of_->number_) * step.threads) * sizeof(uint64_t));
}

void MergeBest::run(const Step& step, int64_t task, int thread) {
  const auto [number, token] = of_->divided_[(size_t)task];
  const ChoosePositions::Tile& tile = of_->tiles_[(size_t)number];
  const int64_t count = tile.pieces * of_->number_;
  const uint64_t* records = of_->records_.as<uint64_t>() + tile.records + token * count;
  Best best(held_.as<uint64_t>() + thread * Best::room(of_->number_), of_->number_);
  for (int64_t i = 0; i < count; ++i) best.add(records[i]);
  best.write(of_->list(step, tile.first + token));
}

}  // namespace quire
