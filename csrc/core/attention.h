// The ops around the cache of keys and values: writing to it, and attention over it.
#pragma once

#include <vector>

#include "../kernels/attention.h"
#include "executor.h"

namespace quire {

// The keys and values of each token into the block and place of its position. Neighbours share lines of
// memory, so that one thread writes all tokens of a block.
class WriteKV : public Op {
 public:
  WriteKV(int64_t k, int64_t v, const KVLayer* cache, int64_t group)
      : k_(k), v_(v), cache_(cache), group_(group) {}

  void prepare(const Step& step) override;
  int64_t tasks(const Step&) const override { return (int64_t)ends_.size(); }
  void run(const Step& step, int64_t task, int thread) override;

 private:
  int64_t k_, v_;  // buffers
  const KVLayer* cache_;
  int64_t group_;              // whose block tables these are
  std::vector<int64_t> ends_;  // task i writes tokens [end of i - 1, end of i)
};

// Attention in tasks of about equal work: tiles of tokens for each head of the cache, cut into runs of
// segments where few tokens have a long context. What is cut leaves records that MergeSegments, which must
// follow, puts together; the sums are the same either way.
class Attend : public Op {
 public:
  Attend(int64_t q, int64_t out, const Attention& how, int64_t group)
      : q_(q), out_(out), how_(how), group_(group) {}

  void prepare(const Step& step) override;
  int64_t tasks(const Step&) const override { return (int64_t)task_ends_.size(); }
  void run(const Step& step, int64_t task, int thread) override;

 private:
  friend class MergeSegments;

  // Tokens of one sequence that are computed together.
  struct Tile {
    int64_t sequence, first, tokens;  // `first` counts in the step
    int64_t first_segment, segments;
    int64_t positions;  // that its tokens see, from the first to the last
    int64_t pieces;     // units for each head, one after the other
    int64_t records;    // where its records begin, if in pieces: [head][row][segment]
  };
  struct Piece {
    int64_t tile, head, number;
  };

  void list_tiles(const Batch& batch);
  void cut_tiles(int threads);
  void list_pieces();
  AttentionUnit unit(const Step& step, const Piece& piece) const;

  int64_t q_, out_;  // buffers
  const Attention how_;
  const int64_t group_;  // whose block tables these are
  std::vector<Tile> tiles_;
  std::vector<Piece> pieces_;
  std::vector<int64_t> task_ends_;  // task i does pieces [end of i - 1, end of i)
  std::vector<int64_t> cut_;        // tiles that are in pieces
  int64_t scratch_floats_ = 0;      // of a thread
  Memory scratch_, records_;
};

// Puts together the tokens whose segments were found in pieces.
class MergeSegments : public Op {
 public:
  explicit MergeSegments(const Attend* attend) : attend_(attend) {}

  bool row_wise() const override { return true; }
  void run_rows(const Step& step, int64_t first, int64_t last) override;

 private:
  const Attend* attend_;
};

}  // namespace quire
