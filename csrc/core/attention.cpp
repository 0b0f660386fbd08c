#include "attention.h"

#include <algorithm>

namespace quire {

namespace {

constexpr int64_t kTasksPerThread = 4;   // bounds the delay by a thread that is preempted
constexpr int64_t kWorthATask = 1 << 8;  // rows times positions: about two microseconds

// Returns the row of token `token` of the step.
int64_t sequence_of(const Batch& batch, int64_t token) {
  const int64_t* end = batch.row_offsets + batch.sequences + 1;
  return std::upper_bound(batch.row_offsets, end, token) - batch.row_offsets - 1;
}

// A fixed amount is added to the rows, since keys and values are converted once for few rows as for many.
int64_t work(int64_t rows, int64_t positions) { return (rows + 4) * positions; }

}  // namespace

void RowCache::prepare(const Batch& batch) {
  first_.clear();
  int64_t count = 0;
  for (int64_t sequence = 0; sequence < batch.sequences; ++sequence) {
    first_.push_back(count);
    count += ceil_div(batch.row_offsets[sequence + 1] - batch.row_offsets[sequence], kPartition);
  }
  for (int64_t block = (int64_t)blocks_.size(); block < count; ++block) blocks_.push_back(block);
  const int64_t positions = count * layer_.heads * kPartition;
  const size_t bytes = layer_.format == KVFormat::f32 ? sizeof(float) : sizeof(uint16_t);
  keys_.reserve((size_t)(positions * layer_.dim) * bytes);
  values_.reserve((size_t)(positions * layer_.value_dim) * bytes);
  layer_.keys = keys_.as<uint8_t>();
  layer_.values = values_.as<uint8_t>();
}

void WriteKV::prepare(const Step& step) {
  const Batch& batch = place_.of(step.batch);
  if (place_.own) place_.own->prepare(batch);
  ends_.clear();
  int64_t first = 0;
  for (int64_t token = 1; token < batch.tokens; ++token) {
    const int64_t position = batch.positions[token];
    const bool apart = position % kPartition == 0 || position != batch.positions[token - 1] + 1;
    if (!apart || token - first < kTile) continue;
    ends_.push_back(token);
    first = token;
  }
  if (batch.tokens > 0) ends_.push_back(batch.tokens);
}

void WriteKV::run(const Step& step, int64_t task, int) {
  const Batch& batch = place_.of(step.batch);
  const int64_t first = task > 0 ? ends_[(size_t)task - 1] : 0, last = ends_[(size_t)task];
  const int64_t values = cache_->heads * cache_->value_dim;
  const int64_t keys = cache_->heads * cache_->dim - (cache_->latent ? values : 0);
  int64_t sequence = sequence_of(batch, first);
  for (int64_t token = first; token < last; ++token) {
    while (token >= batch.row_offsets[sequence + 1]) ++sequence;
    const int64_t position = batch.positions[token], vector = position / cache_->every;
    if ((position + 1) % cache_->every) continue;
    const int64_t block = place_.table(batch, sequence)[cache_->block_of(vector)];
    step.kernels.write_kv(*cache_, block, vector % cache_->block_size,
                          step.buffers[(size_t)k_] + token * keys, step.buffers[(size_t)v_] + token * values);
  }
}

void Attend::prepare(const Step& step) {
  list_runs(place_.of(step.batch));
  list_tiles();
  cut_tiles(step.threads);
  list_pieces();
  int64_t rows = 0;
  for (const Tile& tile : tiles_) rows = std::max(rows, tile.tokens * how_.group());
  scratch_floats_ = round_up(attention_scratch(rows, *how_.cache), 1024);  // whole pages
  scratch_.reserve((size_t)(scratch_floats_ * step.threads) * sizeof(float));
}

void Attend::list_runs(const Batch& batch) {
  const int64_t* ends = causal_ ? nullptr : batch.visible_ends;
  runs_.clear();
  if (count_ == Count::tokens) {
    positions_ = batch.positions;
    ends_ = ends;
    for (int64_t sequence = 0; sequence < batch.sequences; ++sequence) {
      const int64_t begin = batch.row_offsets[sequence];
      const int64_t count = batch.row_offsets[sequence + 1] - begin;
      runs_.push_back({sequence, begin, count, batch.positions[begin] + count});
    }
    return;
  }
  sampled_.clear(), sampled_ends_.clear();
  for (int64_t row = 0; row < batch.logits; ++row) {
    const int64_t token = batch.logit_rows[row], sequence = sequence_of(batch, token);
    const bool follows = row > 0 && token == batch.logit_rows[row - 1] + 1;
    sampled_.push_back(batch.positions[token]);
    if (ends) sampled_ends_.push_back(ends[token]);
    if (follows && runs_.back().sequence == sequence) {
      ++runs_.back().count;
    } else {
      runs_.push_back({sequence, row, 1});
    }
  }
  positions_ = sampled_.data();
  ends_ = ends ? sampled_ends_.data() : nullptr;
}

void Attend::list_tiles() {
  const int64_t most = std::max<int64_t>(1, kUnitRows / how_.group());
  tiles_.clear();
  for (const Run& run : runs_) {  // long contexts first
    int64_t see_all = run.count;  // tokens; the others attend to positions of their own
    if (how_.chosen) see_all = std::clamp<int64_t>(how_.chosen - positions_[run.first], 0, run.count);
    if (how_.listed) see_all = 0;
    for (int64_t at = run.count - 1; at >= see_all; --at) add_tile(run, at, 1);
    for (int64_t at = (ceil_div(see_all, most) - 1) * most; at >= 0; at -= most)
      add_tile(run, at, std::min(most, see_all - at));
  }
}

void Attend::add_tile(const Run& run, int64_t at, int64_t tokens) {
  const int64_t first = run.first + at, last = first + tokens - 1;
  const int64_t listed = how_.num_listed(positions_[first]);
  const int64_t oldest = listed ? 0 : how_.oldest(positions_[first]);
  const int64_t end = listed ? listed : ends_ ? ends_[last] : how_.newest(positions_[last], run.length) + 1;
  const int64_t first_segment = oldest / kSegment, segments = ceil_div(end, kSegment) - first_segment;
  tiles_.push_back({run.sequence, first, tokens, first_segment, segments, end - oldest, 1, run.length, 0});
}

// Splits tiles with more than their share of the work, between segments.
void Attend::cut_tiles(int threads) {
  cut_.clear();
  if (threads == 1) return;
  int64_t total = 0, records = 0;
  for (const Tile& tile : tiles_) total += work(tile.tokens * how_.group(), tile.positions) * how_.groups;
  const int64_t share = std::max(kWorthATask, total / (kTasksPerThread * threads));
  for (Tile& tile : tiles_) {
    tile.pieces = std::min(tile.segments, ceil_div(work(tile.tokens * how_.group(), tile.positions), share));
    if (tile.pieces == 1) continue;
    tile.records = records;
    records += tile.tokens * how_.heads * tile.segments * record_floats(how_.cache->value_dim);
    cut_.push_back(&tile - tiles_.data());
  }
  records_.reserve((size_t)records * sizeof(float));
}

// Adjacent pieces that are too small for separate tasks share one.
void Attend::list_pieces() {
  pieces_.clear();
  task_ends_.clear();
  int64_t gathered = 0;
  for (size_t i = 0; i < tiles_.size(); ++i) {
    const Tile& tile = tiles_[i];
    for (int64_t group = 0; group < how_.groups; ++group) {
      for (int64_t number = 0; number < tile.pieces; ++number) {
        pieces_.push_back({(int64_t)i, group, number});
        gathered += work(tile.tokens * how_.group(), tile.positions) / tile.pieces;
        if (gathered < kWorthATask) continue;
        task_ends_.push_back((int64_t)pieces_.size());
        gathered = 0;
      }
    }
  }
  if (gathered > 0) task_ends_.push_back((int64_t)pieces_.size());
}

AttentionUnit Attend::unit(const Step& step, const Piece& piece) const {
  const Tile& tile = tiles_[(size_t)piece.tile];
  const Batch& batch = place_.of(step.batch);
  const KVLayer& cache = *how_.cache;
  const int64_t heads = tile.first * how_.heads, rest = cache.dim - cache.value_dim;
  const int64_t first = tile.segments * piece.number / tile.pieces;
  const int64_t last = tile.segments * (piece.number + 1) / tile.pieces;
  AttentionUnit unit{};
  unit.q = step.buffers[(size_t)q_] + heads * (cache.latent ? cache.value_dim : cache.dim);
  unit.q_rest = q_rest_ < 0 ? unit.q : step.buffers[(size_t)q_rest_] + heads * rest;
  unit.out = step.buffers[(size_t)out_] + heads * cache.value_dim;
  unit.positions = positions_ + tile.first;
  unit.ends = ends_ ? ends_ + tile.first : nullptr;
  list_vectors(step, tile, unit);
  unit.tokens = tile.tokens;
  unit.group = piece.group;
  unit.block_table = place_.table(batch, tile.sequence);
  unit.length = tile.length;
  unit.first_segment = tile.first_segment + first;
  unit.last_segment = tile.first_segment + last;
  if (tile.pieces > 1) {
    const int64_t record = record_floats(cache.value_dim), rows = tile.tokens * how_.group();
    unit.row_stride = tile.segments * record;
    unit.records =
        records_.as<float>() + tile.records + piece.group * rows * unit.row_stride + first * record;
  }
  return unit;
}

// Says which vectors take the place of the context of a token, if any do.
void Attend::list_vectors(const Step& step, const Tile& tile, AttentionUnit& unit) const {
  const int64_t position = positions_[tile.first];
  unit.listed = how_.num_listed(position);
  if (!unit.listed) return;
  unit.recent = how_.listed ? how_.num_recent(position) : 0;
  unit.entry_table = step.batch.table(how_.entries ? lists_.entry_group : place_.group, tile.sequence);
  const bool all = how_.listed && (!how_.entries || (position + 1) / how_.entries->every <= how_.chosen);
  if (how_.chosen && !all)
    unit.chosen = (const int32_t*)step.buffers[(size_t)lists_.chosen] + tile.first * how_.chosen;
}

void Attend::run(const Step& step, int64_t task, int thread) {
  float* scratch = scratch_.as<float>() + thread * scratch_floats_;
  for (int64_t i = task ? task_ends_[(size_t)task - 1] : 0; i < task_ends_[(size_t)task]; ++i)
    step.kernels.attend(how_, unit(step, pieces_[(size_t)i]), scratch);
}

double Attend::operations(const Step&) const {
  double pairs = 0;
  for (const Tile& tile : tiles_) pairs += (double)(tile.tokens * tile.positions);
  return 2 * pairs * (double)(how_.heads * (how_.cache->dim + how_.cache->value_dim));
}

void MergeSegments::run_rows(const Step& step, int64_t first, int64_t last) {
  const Attention& how = attend_->how_;
  const int64_t dim = how.cache->value_dim, group = how.group();
  for (const int64_t cut : attend_->cut_) {
    const Attend::Tile& tile = attend_->tiles_[(size_t)cut];
    const int64_t end = std::min(last, tile.first + tile.tokens);
    for (int64_t token = std::max(first, tile.first); token < end; ++token) {
      for (int64_t head = 0; head < how.heads; ++head) {
        const int64_t row = head / group * tile.tokens * group + (token - tile.first) * group + head % group;
        const float* records =
            attend_->records_.as<float>() + tile.records + row * tile.segments * record_floats(dim);
        float* out = step.buffers[(size_t)attend_->out_] + (token * how.heads + head) * dim;
        step.kernels.merge_segments(how, head, records, tile.segments, out);
      }
    }
  }
}

}  // namespace quire
