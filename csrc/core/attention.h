// Ops on the cache of keys and values: writing, and attention.
#pragma once

#include <vector>

#include "../kernels/attention.h"
#include "executor.h"

namespace quire {

// Writes the keys and values of each token into the block and offset of its position. Adjacent tokens share
// cache lines, so one thread writes all tokens of a block.
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
  int64_t group_;              // cache group of the block tables
  std::vector<int64_t> ends_;  // task i writes tokens [end of i - 1, end of i)
};

// Attention in tasks of about equal work: tiles of tokens per cache head, split into runs of segments if few
// tokens have a long context. Split tiles leave records, which the following MergeSegments combines; the sums
// are the same either way.
class Attend : public Op {
 public:
  Attend(int64_t q, int64_t out, const Attention& how, int64_t group)
      : q_(q), out_(out), how_(how), group_(group) {}

  void prepare(const Step& step) override;
  int64_t tasks(const Step&) const override { return (int64_t)task_ends_.size(); }
  void run(const Step& step, int64_t task, int thread) override;

 private:
  friend class MergeSegments;

  // Tokens of one sequence computed together.
  struct Tile {
    int64_t sequence, first, tokens;  // `first` is an index in the step
    int64_t first_segment, segments;
    int64_t positions;  // visible to any of its tokens
    int64_t pieces;     // consecutive units per head
    int64_t records;    // start of its records, if split: [head][row][segment]
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
  const int64_t group_;  // cache group of the block tables
  std::vector<Tile> tiles_;
  std::vector<Piece> pieces_;
  std::vector<int64_t> task_ends_;  // task i computes pieces [end of i - 1, end of i)
  std::vector<int64_t> cut_;        // tiles that are split
  int64_t scratch_floats_ = 0;      // per thread
  Memory scratch_, records_;
};

// Combines the records of split tiles.
class MergeSegments : public Op {
 public:
  explicit MergeSegments(const Attend* attend) : attend_(attend) {}

  bool row_wise() const override { return true; }
  void run_rows(const Step& step, int64_t first, int64_t last) override;

 private:
  const Attend* attend_;
};

}  // namespace quire
