#include "text_index.h"

#include <algorithm>
#include <stdexcept>

namespace quire {

namespace {

constexpr int64_t kFirstPlaces = 64;

// Calls `token` with 0, 1, ... for the last tokens, the last one first, up to the highest of kOrders.
template <typename Token>
Hashes hashes(int64_t length, const Token& token) {
  Hashes found{};
  uint32_t hash = 0;
  for (size_t order = 0, i = 0; order < kOrders.size() && kOrders[order] <= length; ++order) {
    for (; (int64_t)i < kOrders[order]; ++i) hash = (hash ^ (uint32_t)token((int64_t)i)) * 0x9E3779B1u;
    found[order] = hash ^ hash >> 15;
  }
  return found;
}

}  // namespace

TextIndex::TextIndex(std::shared_ptr<const TextIndex> before, int64_t capacity)
    : before_(std::move(before)), capacity_(capacity), end_(before_ ? before_->end_ : 0) {
  if (capacity < 0 || (capacity & (capacity - 1)) != 0)
    throw std::invalid_argument("a capacity is 0 or a power of two");
  if (before_ && capacity) throw std::invalid_argument("a text that continues another one keeps all tokens");
}

void TextIndex::append(int32_t token_id) {
  if (size_ == (int64_t)token_ids_.size()) reserve(1);
  token_ids_[place(end_++)] = token_id;
  size_ = std::min(size_ + 1, (int64_t)token_ids_.size());
  enter();
}

// Enters the last position into the chains.
void TextIndex::enter() {
  const int64_t length = end_ - begin();
  const Hashes found = hashes(length, [&](int64_t i) { return at(end_ - 1 - i); });
  for (size_t order = 0; order < kOrders.size() && kOrders[order] <= length; ++order) {
    uint32_t& last = last_[order][found[order] & (last_[order].size() - 1)];
    previous_[order][place(end_)] = last;
    last = (uint32_t)end_;
  }
}

void TextIndex::reserve(int64_t count) {
  int64_t places = std::max(kFirstPlaces, (int64_t)token_ids_.size());
  while (places < size_ + count) places *= 2;
  if (capacity_) places = std::min(places, capacity_);
  if (places > (int64_t)token_ids_.size()) grow(places);
}

void TextIndex::grow(int64_t places) {
  std::vector<int32_t> kept((size_t)size_);
  for (int64_t i = 0; i < size_; ++i) kept[(size_t)i] = at(oldest() + i);
  token_ids_.assign((size_t)places, kBoundary);
  for (size_t order = 0; order < kOrders.size(); ++order) {
    last_[order].assign((size_t)places, 0);
    previous_[order].assign((size_t)places, 0);
  }
  end_ -= size_;
  size_ = 0;
  for (const int32_t token_id : kept) append(token_id);
}

int64_t TextIndex::nbytes() const {
  return (int64_t)(token_ids_.capacity() * (1 + 2 * kOrders.size()) * sizeof(int32_t));
}

Ending TextIndex::ending() const {
  Ending found;
  const int64_t length = std::min(kLongestMatch, end_ - begin());
  while (found.length < length) {
    const int32_t token_id = at(end_ - 1 - found.length);
    if (token_id == kBoundary) break;
    found.token_ids[(size_t)found.length++] = token_id;
  }
  found.hashes = hashes(found.length, [&](int64_t i) { return found.token_ids[(size_t)i]; });
  return found;
}

Match TextIndex::longest(const Ending& ending, int64_t least, int64_t most) const {
  Match best{least, 0};
  for (size_t order = kOrders.size(); order-- > 0 && best.length == least;) {
    if (kOrders[order] > ending.length) continue;
    if (order + 1 < kOrders.size() && kOrders[order + 1] <= least + 1) break;  // the last order found those
    for (const TextIndex* text = this; text; text = text->before_.get())
      text->search(*this, order, ending, most, best);
  }
  return best.length > least ? best : Match();
}

// Follows a chain of this text, the last place first. `whole` is this text or one that continues it.
void TextIndex::search(const TextIndex& whole, size_t order, const Ending& ending, int64_t most,
                       Match& best) const {
  if (token_ids_.empty()) return;
  const int64_t begin = whole.begin();
  uint32_t link = last_[order][ending.hashes[order] & (last_[order].size() - 1)];
  for (int64_t position = end_ + 1; most > 0 && best.length < ending.length; --most) {
    const int64_t next = end_ - (int64_t)((uint32_t)end_ - link);
    if (next >= position || next <= oldest()) return;
    position = next;
    link = previous_[order][place(position)];
    if (position == whole.end_ || whole.at(position) == kBoundary) continue;
    int64_t length = 0;
    while (length < ending.length && position - length > begin &&
           whole.at(position - 1 - length) == ending.token_ids[(size_t)length])
      ++length;
    if (length >= kOrders[order] && length > best.length) best = {length, position};
  }
}

int64_t TextIndex::copy(int64_t position, int64_t count, int32_t* token_ids) const {
  const int64_t period = end_ - position;
  for (int64_t i = 0; i < count; ++i) {
    const int32_t token_id = at(position + i % period);
    if (token_id == kBoundary) return i;
    token_ids[i] = token_id;
  }
  return count;
}

void TextIndex::append_text(const TextIndex& other) {
  reserve(other.size_ + 1);
  for (int64_t position = other.oldest(); position < other.end_; ++position) append(other.at(position));
  append(kBoundary);
}

}  // namespace quire
