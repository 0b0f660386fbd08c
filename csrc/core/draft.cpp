#include "draft.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>

namespace quire {

DraftModel::DraftModel(Executor& executor, const DraftShape& shape, int64_t slots)
    : executor_(executor),
      shape_(shape),
      slots_((size_t)slots),
      filled_((size_t)shape.blocks),
      claimed_((size_t)shape.blocks),
      hidden_(shape.blocks + slots * shape.spare, shape.block_size, shape.hidden) {}

void DraftModel::apply(const std::vector<PlannedRow>& rows, const Deltas& deltas) {
  std::vector<std::pair<int64_t, int64_t>> fresh;  // slots and where their rows start
  for (const Deltas::Admission& one : deltas.admitted) {
    slots_.at((size_t)one.slot) = Slot();
    for (const PlannedRow& row : rows)
      if (row.slot == one.slot) fresh.emplace_back(row.slot, row.start);
  }
  for (const Deltas::Grant& grant : deltas.granted) {
    if (grant.group != shape_.group) continue;
    int64_t cached = 0;  // blocks from the prefix cache
    for (const auto& [number, start] : fresh) {
      if (number != grant.slot) continue;
      Slot& slot = slots_[(size_t)number];
      slot.computed = slot.room = grant.first * shape_.block_size;
      cached = std::max<int64_t>(0, start / shape_.block_size - grant.first);
    }
    for (size_t i = (size_t)cached; i < grant.blocks.size(); ++i) filled_.at((size_t)grant.blocks[i]) = 0;
  }
}

void DraftModel::keep(const Batch& batch, const Executor& target) {
  if (shape_.hidden == 0) return;
  const float* given = target.buffer(shape_.given);
  for (int64_t sequence = 0; sequence < batch.sequences; ++sequence) {
    const int64_t* table = batch.table(shape_.group, sequence);
    for (int64_t t = batch.row_offsets[sequence]; t < batch.row_offsets[sequence + 1]; ++t)
      hidden_.put(table, batch.positions[t], given + t * shape_.hidden);
  }
}

void DraftModel::propose(const std::vector<PlannedRow>& rows, const SampledResults& results,
                         const Slots& slots, Sampler& sampler, int64_t count,
                         std::vector<std::vector<int64_t>>& proposed) {
  proposed.assign(rows.size(), {});
  const std::vector<Lagging> chosen = lagging(rows, results, slots);
  if (chosen.empty()) return;
  std::vector<Lagging> active;
  arrays_.clear();
  for (const Lagging& one : chosen) {
    const std::vector<int64_t>& table = slots.table(one.slot, shape_.group);
    Slot& slot = slots_[(size_t)one.slot];
    extend_table(one.slot, table);
    add(slots, one.slot, slots.token_ids(one.slot).data() + one.start, one.start, one.end - one.start,
        one.samples);
    fill(one.start, one.end, table);
    slot.computed = one.end;
    slot.room = (int64_t)table.size() * shape_.block_size;
    if (one.samples) active.push_back(one);
  }
  const float* logits = run();
  std::vector<Proposing> drawing;
  std::vector<int64_t> drawn;
  for (int64_t left = count; left > 0 && !active.empty(); --left) {
    drawing.clear();
    for (const Lagging& one : active)
      drawing.push_back({one.slot, proposed[one.row].data(), (int64_t)proposed[one.row].size()});
    sampler.propose(executor_.pool(), logits, shape_.width, drawing, drawn);
    std::vector<Lagging> next;
    arrays_.clear();
    for (size_t i = 0; i < active.size(); ++i) {
      if (drawn[i] < 0) continue;
      proposed[active[i].row].push_back(drawn[i]);
      const int64_t place = active[i].end++;  // of the token
      if (left == 1 || place >= shape_.max_len) continue;
      add(slots, active[i].slot, &drawn[i], place, 1, true);
      slots_[(size_t)active[i].slot].guessed.push_back(drawn[i]);
      next.push_back(active[i]);
    }
    active = std::move(next);
    if (!active.empty()) logits = run();
  }
}

std::vector<DraftModel::Lagging> DraftModel::lagging(const std::vector<PlannedRow>& rows,
                                                     const SampledResults& results, const Slots& slots) {
  std::vector<Lagging> wanted, chosen;
  for (size_t i = 0; i < rows.size(); ++i) {
    const PlannedRow& row = rows[i];
    if (results.faults[i] != (int64_t)Fault::none || (row.sample && results.counts[i] == 0)) continue;
    const std::vector<int64_t>& tokens = slots.token_ids(row.slot);
    const int64_t known = (int64_t)tokens.size();
    const int64_t end = std::min(row.sample ? known : row.start + row.count, shape_.max_len);
    const bool samples = row.sample && end == known;
    int64_t oldest = shape_.window > 0 ? std::max<int64_t>(0, row.start - shape_.window + 1) : 0;
    oldest -= oldest % shape_.block_size;
    const int64_t computed = advance(row.slot, tokens, slots.table(row.slot, shape_.group), oldest);
    const int64_t start = std::min(computed, end - samples);
    const int64_t seen = shape_.reach > 0 ? std::max<int64_t>(0, start - shape_.reach + 1) : 0;
    if (start < end && seen >= oldest) wanted.push_back({i, row.slot, start, end, samples});
  }
  std::stable_sort(wanted.begin(), wanted.end(),
                   [](const Lagging& a, const Lagging& b) { return a.end - a.start < b.end - b.start; });
  ++pass_;
  int64_t left = shape_.max_tokens;
  for (Lagging& one : wanted) {
    const std::vector<int64_t>& table = slots.table(one.slot, shape_.group);
    int64_t end = std::min(one.end, one.start + left);
    const int64_t last = std::min(ceil_div(end, shape_.block_size), (int64_t)table.size());
    for (int64_t number = one.start / shape_.block_size; number < last; ++number) {
      int64_t& claimed = claimed_.at((size_t)table[(size_t)number]);
      if (claimed == pass_) {
        end = std::max(one.start, number * shape_.block_size);
        break;
      }
      claimed = pass_;
    }
    if (end <= one.start) continue;
    left -= end - one.start;
    chosen.push_back({one.row, one.slot, one.start, end, one.samples && end == one.end});
  }
  std::sort(chosen.begin(), chosen.end(), [](const Lagging& a, const Lagging& b) { return a.row < b.row; });
  return chosen;
}

// Returns the number of leading positions of a slot that are computed, and keeps it.
int64_t DraftModel::advance(int64_t number, const std::vector<int64_t>& tokens,
                            const std::vector<int64_t>& table, int64_t oldest) {
  Slot& slot = slots_.at((size_t)number);
  const int64_t first = slot.computed, known = (int64_t)tokens.size(), size = shape_.block_size;
  if (shape_.hidden > 0) slot.guessed.clear();  // computed with hidden states that are its own
  for (const int64_t token : slot.guessed) {
    if (slot.computed >= std::min(known, slot.room) || tokens[(size_t)slot.computed] != token) break;
    ++slot.computed;
  }
  slot.guessed.clear();
  slot.computed = std::min(slot.computed, slot.room);
  fill(first, slot.computed, table);
  const int64_t end = std::min(known, (int64_t)table.size() * size);
  while (oldest <= slot.computed && slot.computed < end) {
    const int64_t filled = filled_.at((size_t)table[(size_t)(slot.computed / size)]);
    if (filled <= slot.computed % size) break;
    slot.computed += filled - slot.computed % size;
  }
  return slot.computed;
}

// Notes that positions [first, last) were computed with known tokens.
void DraftModel::fill(int64_t first, int64_t last, const std::vector<int64_t>& table) {
  const int64_t size = shape_.block_size, end = std::min(ceil_div(last, size), (int64_t)table.size());
  for (int64_t number = first / size; number < end; ++number)
    filled_.at((size_t)table[(size_t)number]) = std::min(size, last - number * size);
}

void DraftModel::extend_table(int64_t number, const std::vector<int64_t>& table) {
  std::vector<int64_t>& own = slots_[(size_t)number].table;
  own = table;
  for (int64_t i = 0; i < shape_.spare; ++i) own.push_back(shape_.blocks + number * shape_.spare + i);
}

void DraftModel::add(const Slots& slots, int64_t number, const int64_t* tokens, int64_t start, int64_t count,
                     bool samples) {
  if (start + count > (int64_t)slots_[(size_t)number].table.size() * shape_.block_size)
    throw std::out_of_range("the draft model has no block for a position");
  for (int64_t i = 0; i < count; ++i) {
    arrays_.token_ids.push_back(tokens[i] < shape_.width ? tokens[i] : 0);  // the target may know more tokens
    arrays_.positions.push_back(start + i);
  }
  if (samples) arrays_.logit_rows.push_back((int64_t)arrays_.token_ids.size() - 1);
  arrays_.end_row(number, slots.variant(number));
}

const float* DraftModel::run() {
  for (int64_t group = 0; group < shape_.groups; ++group)
    for (const int64_t number : arrays_.slots) arrays_.tables.push_back(slots_[(size_t)number].table.data());
  Batch batch = arrays_.batch();
  if (shape_.hidden == 0) return executor_.run(batch, shape_.output);
  before_.resize((size_t)(batch.tokens * shape_.hidden));
  for (int64_t sequence = 0; sequence < batch.sequences; ++sequence)
    for (int64_t t = batch.row_offsets[sequence]; t < batch.row_offsets[sequence + 1]; ++t)
      hidden_.before(batch.table(0, sequence), batch.positions[t], before_.data() + t * shape_.hidden);
  batch.hidden = before_.data();
  const float* logits = executor_.run(batch, shape_.output);
  const float* own = executor_.buffer(shape_.own);
  for (int64_t l = 0, sequence = 0; l < batch.logits; ++l, own += shape_.hidden) {
    while (batch.row_offsets[sequence + 1] <= batch.logit_rows[l]) ++sequence;
    hidden_.put(batch.table(0, sequence), batch.positions[batch.logit_rows[l]], own);
  }
  return logits;
}

}  // namespace quire
