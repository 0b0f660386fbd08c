#include "slots.h"

#include <algorithm>
#include <stdexcept>

namespace quire {

void BatchArrays::clear() {
  token_ids.clear(), positions.clear(), slots.clear(), variants.clear(), logit_rows.clear(), tables.clear();
  adapters.clear(), rotary.clear(), image_tokens.clear(), image_rows.clear();
  visible_ends.clear();
  row_offsets.assign(1, 0);
}

void BatchArrays::end_row(int64_t slot, int64_t variant, const Adapter* adapter) {
  row_offsets.push_back((int64_t)token_ids.size());
  slots.push_back(slot);
  variants.push_back(variant);
  adapters.push_back(adapter);
}

Batch BatchArrays::batch() const {
  Batch batch{(int64_t)token_ids.size(),
              (int64_t)slots.size(),
              (int64_t)logit_rows.size(),
              token_ids.data(),
              positions.data(),
              row_offsets.data(),
              tables.data(),
              slots.data(),
              variants.data(),
              logit_rows.data()};
  batch.adapters = adapters.data();
  if (!rotary.empty()) batch.rotary = rotary.data();
  batch.image_tokens = image_tokens;
  batch.image_rows = image_rows.data();
  if (!visible_ends.empty()) batch.visible_ends = visible_ends.data();
  return batch;
}

void Slots::apply(const Deltas& deltas) {
  for (const Deltas::Frequencies& of : deltas.frequencies) of.table->set(of.variant, of.values);
  for (const int64_t number : deltas.released) {
    Slot& slot = slots_.at((size_t)number);
    slot.token_ids.clear();
    slot.adapter.reset();
    slot.positions.reset(), slot.images.clear();
    for (auto& table : slot.tables) table.clear();
  }
  for (const Deltas::Admission& admission : deltas.admitted) {
    Slot& slot = slots_.at((size_t)admission.slot);
    slot.variant = admission.variant;
    slot.num_prompt = admission.params.num_prompt_tokens;
    slot.scores_prompt = admission.params.prompt_logprobs.has_value();
    slot.token_ids = admission.token_ids;
    slot.adapter = admission.adapter;
  }
  for (const Deltas::Rotation& rotation : deltas.rotated)
    slots_.at((size_t)rotation.slot).positions = std::make_unique<RotaryPositions>(rotation.positions);
  for (const Deltas::Grant& grant : deltas.granted) {
    std::vector<int64_t>& table = slots_.at((size_t)grant.slot).tables.at((size_t)grant.group);
    const size_t end = (size_t)grant.first + grant.blocks.size();
    if (table.size() < end) table.resize(end);
    std::copy(grant.blocks.begin(), grant.blocks.end(), table.begin() + grant.first);
  }
}

void Slots::drop_images(const std::vector<PlannedRow>& rows) {
  for (const PlannedRow& row : rows)
    std::erase_if(slots_.at((size_t)row.slot).images,
                  [&](const Image& image) { return image.end() <= row.start + row.count; });
}

void Slots::lay_out_images(const PlannedRow& row, const Slot& slot, bool whole) {
  const int64_t end = row.start + row.count, offset = (int64_t)arrays_.token_ids.size() - end;
  for (int64_t position = row.start; position < end; ++position)
    for (int64_t axis = 0; axis < 3; ++axis)
      arrays_.rotary.push_back(slot.positions ? slot.positions->of(position, axis) : position);
  for (int64_t position = row.start; whole && position < end; ++position)
    arrays_.visible_ends.push_back(position + 1);
  for (const Image& image : slot.images) {
    const int64_t width = (int64_t)image.embedded.size() / image.tokens();
    const int64_t last = std::min(end, image.end());
    for (int64_t position = std::max(row.start, image.first); position < last; ++position) {
      const int64_t token = image.token_at(position);
      if (token < 0) continue;
      arrays_.image_tokens.push_back(offset + position);
      if (image.whole) arrays_.visible_ends[(size_t)(offset + position)] = image.end();
      arrays_.image_rows.push_back(image.embedded.data() + token * width);
    }
  }
}

Batch Slots::lay_out(const std::vector<PlannedRow>& rows) {
  arrays_.clear();
  std::vector<int64_t>& token_ids = arrays_.token_ids;
  const bool seeing = std::any_of(rows.begin(), rows.end(), [&](const PlannedRow& row) {
    return slots_.at((size_t)row.slot).positions != nullptr;
  });
  const bool whole = std::any_of(rows.begin(), rows.end(), [&](const PlannedRow& row) {
    const std::vector<Image>& images = slots_[(size_t)row.slot].images;
    return std::any_of(images.begin(), images.end(), [](const Image& image) { return image.whole; });
  });
  for (const PlannedRow& row : rows) {
    Slot& slot = slots_.at((size_t)row.slot);
    slot.token_ids.insert(slot.token_ids.end(), row.drafted.begin(), row.drafted.end());
    const int64_t end = row.start + row.count;
    if (end > (int64_t)slot.token_ids.size()) throw std::out_of_range("a row computes unknown tokens");
    token_ids.insert(token_ids.end(), slot.token_ids.begin() + row.start, slot.token_ids.begin() + end);
    for (int64_t position = row.start; position < end; ++position) arrays_.positions.push_back(position);
    for (int64_t i = row.logits; i > 0; --i) arrays_.logit_rows.push_back((int64_t)token_ids.size() - i);
    if (seeing) lay_out_images(row, slot, whole);
    arrays_.end_row(row.slot, slot.variant, slot.adapter.get());
  }
  for (size_t group = 0; group < groups_; ++group)
    for (const PlannedRow& row : rows)
      arrays_.tables.push_back(slots_[(size_t)row.slot].tables[group].data());
  return arrays_.batch();
}

std::vector<SampledRow> Slots::sampled(const std::vector<PlannedRow>& rows) const {
  std::vector<SampledRow> asked;
  int64_t logits = 0;
  for (const PlannedRow& row : rows) {
    const Slot& slot = slots_[(size_t)row.slot];
    const int64_t end = row.start + row.count, followed = end - row.logits + 1;  // the first scored token
    const int64_t num_sampled = row.sample ? 1 + (int64_t)row.drafted.size() : 0;
    SampledRow sampled{};
    sampled.slot = row.slot;
    sampled.first_scored = logits;
    if (slot.scores_prompt)
      sampled.num_scored = std::max<int64_t>(0, std::min(end + 1, slot.num_prompt) - followed);
    sampled.following = slot.token_ids.data() + followed;
    logits += row.logits;
    sampled.num_sampled = num_sampled;
    sampled.first_sampled = logits - num_sampled;
    sampled.drafted = row.drafted.data();
    asked.push_back(sampled);
  }
  return asked;
}

void Slots::extend(const std::vector<PlannedRow>& rows, const SampledResults& results) {
  const int64_t* token_ids = results.token_ids.data();
  for (size_t i = 0; i < rows.size(); ++i) {
    std::vector<int64_t>& known = slots_[(size_t)rows[i].slot].token_ids;
    known.resize(known.size() - rows[i].drafted.size());
    known.insert(known.end(), token_ids, token_ids + results.counts[i]);
    token_ids += results.counts[i];
    // Any token: a next row in flight computes with it, and is dropped.
    if (rows[i].sample && results.counts[i] == 0) known.push_back(0);
  }
}

}  // namespace quire
