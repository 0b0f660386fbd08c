// Texts of token ids in which the longest repetition of the end of a text is found, in microseconds.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

namespace quire {

constexpr int32_t kBoundary = -1;      // stands between texts: no match and no continuation runs across it
constexpr int64_t kLongestMatch = 32;  // tokens
// Lengths of the ends of texts by which earlier places are looked up: each place is in a chain of those with
// the same hash, for each of these lengths.
constexpr std::array<int64_t, 3> kOrders = {1, 3, 8};
using Hashes = std::array<uint32_t, kOrders.size()>;

// The last tokens of a text, the last one first, up to kLongestMatch or a boundary.
struct Ending {
  std::array<int32_t, kLongestMatch> token_ids;
  int64_t length = 0;
  Hashes hashes;
};

// A place where an ending stands, too: its last `length` tokens are those before `position`.
struct Match {
  int64_t length = 0, position = 0;
};

// A text and its index. With a `capacity` above 0 it keeps that many of its last tokens, a power of two;
// otherwise all. A text may continue one `before` it, which must not change any more: several texts can share
// their beginning. Positions count from the first token ever appended.
class TextIndex {
 public:
  explicit TextIndex(std::shared_ptr<const TextIndex> before = nullptr, int64_t capacity = 0);

  void append(int32_t token_id);
  void reserve(int64_t count);  // makes room for so many more tokens, as far as it keeps them

  int64_t size() const { return size_; }  // tokens, without those of the text before
  int64_t nbytes() const;                 // without those of the text before
  Ending ending() const;

  // Returns the longest match of an ending that is longer than `least` and after which a token follows: of
  // several, the last one. Each chain is followed for at most `most` places, and as many in the text before.
  Match longest(const Ending& ending, int64_t least, int64_t most) const;

  // Writes the tokens from a position on, at most `count`; returns their number. After the last token follow
  // those that were written first, as in a text that repeats itself.
  int64_t copy(int64_t position, int64_t count, int32_t* token_ids) const;

  // Appends the tokens of another text, without those of the text before it, and a boundary.
  void append_text(const TextIndex& other);

 private:
  int64_t oldest() const { return end_ - size_; }
  size_t place(int64_t position) const { return (size_t)(position & (int64_t)(token_ids_.size() - 1)); }
  int32_t at(int64_t position) const {
    return position < oldest() ? before_->at(position) : token_ids_[place(position)];
  }
  int64_t begin() const { return before_ ? before_->begin() : oldest(); }
  void enter();
  void grow(int64_t places);
  void search(const TextIndex& whole, size_t order, const Ending& ending, int64_t most, Match& best) const;

  const std::shared_ptr<const TextIndex> before_;
  const int64_t capacity_;
  int64_t end_, size_ = 0;          // tokens kept
  std::vector<int32_t> token_ids_;  // by position, modulo the number of places, which is a power of two
  // By order: the last position after an ending with this hash, and before each position the one before with
  // its hash, in their low 32 bits. What was overwritten or never written is found out by comparing tokens.
  std::array<std::vector<uint32_t>, kOrders.size()> last_, previous_;
};

}  // namespace quire
