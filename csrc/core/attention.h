// Ops on the cache of keys and values: writing, and attention.
#pragma once

#include <memory>
#include <stdexcept>
#include <vector>

#include "../kernels/attention.h"
#include "executor.h"

namespace quire {

constexpr int64_t kLatentHeads = 32;  // most heads that share a conversion of latents

// Returns in how many groups heads read latents: enough for threads, few enough to share conversions.
inline int64_t latent_groups(int64_t heads) {
  int64_t groups = 1;
  while (heads / groups > kLatentHeads || heads % groups) ++groups;
  return groups;
}

// Keys and values of the tokens of one step, for ops whose rows see only themselves: like a cache whose
// blocks lie row after row. Ops that run one after the other may share it.
class RowCache {
 public:
  RowCache(KVFormat format, int64_t heads, int64_t dim, int64_t value_dim)
      : layer_{format, heads, dim, value_dim, kPartition, heads, nullptr, nullptr, nullptr, nullptr, false} {}

  void prepare(const Batch& batch);
  const KVLayer* layer() const { return &layer_; }
  const int64_t* table(int64_t sequence) const { return blocks_.data() + first_[(size_t)sequence]; }

 private:
  KVLayer layer_;
  std::vector<int64_t> blocks_, first_;  // ids of all blocks, and where those of each sequence begin
  Memory keys_, values_;
};

// Where the keys and values of a step are: in the blocks of a cache group, or in `own`, which may be of the
// windows of a tower.
struct KVPlace {
  int64_t group;
  std::shared_ptr<RowCache> own = nullptr;
  bool windowed = false;

  // Returns the batch whose sequences see themselves alone.
  const Batch& of(const Batch& batch) const {
    if (!windowed) return batch;
    if (!batch.windows) throw std::invalid_argument("this batch brings no windows");
    return *batch.windows;
  }
  const int64_t* table(const Batch& batch, int64_t sequence) const {
    return own ? own->table(sequence) : batch.table(group, sequence);
  }
};

// Writes the keys and values of each token into the block and offset of its position. Adjacent tokens share
// cache lines, so one thread writes all tokens of a block.
class WriteKV : public Op {
 public:
  WriteKV(int64_t k, int64_t v, const KVLayer* cache, KVPlace place)
      : k_(k), v_(v), cache_(cache), place_(std::move(place)) {}

  void prepare(const Step& step) override;
  int64_t tasks(const Step&) const override { return (int64_t)ends_.size(); }
  void run(const Step& step, int64_t task, int thread) override;

 private:
  int64_t k_, v_;  // buffers
  const KVLayer* cache_;
  KVPlace place_;
  std::vector<int64_t> ends_;  // task i writes tokens [end of i - 1, end of i)
};

// Attention in tasks of about equal work: tiles of tokens per group of heads, split into runs of segments if
// few tokens have a long context. Split tiles leave records, which the following MergeSegments combines; the
// sums are the same either way.
class Attend : public Op {
 public:
  // What takes the place of contexts: `chosen` are lists of the positions, or entries, that tokens attend to,
  // if they see more than how.chosen. Those of how.entries are in the blocks of a group.
  struct Lists {
    int64_t chosen = -1;  // buffer
    int64_t entry_group = -1;
  };

  // Of all tokens, or of those that need logits. `q_rest` is -1 unless the cache has latents with a rest. If
  // `causal`, they see nothing after themselves, even if the batch has ends of what they see.
  Attend(Count count, int64_t q, int64_t q_rest, int64_t out, const Attention& how, KVPlace place,
         bool causal, Lists lists)
      : count_(count),
        q_(q),
        q_rest_(q_rest),
        out_(out),
        how_(how),
        place_(std::move(place)),
        causal_(causal),
        lists_(lists) {}

  void prepare(const Step& step) override;
  int64_t tasks(const Step&) const override { return (int64_t)task_ends_.size(); }
  void run(const Step& step, int64_t task, int thread) override;
  double operations(const Step&) const override;

 private:
  friend class MergeSegments;

  // Rows of q that are adjacent tokens of one sequence.
  struct Run {
    int64_t sequence, first, count;
    int64_t length = 0;  // of the sequence
  };
  // Those computed together.
  struct Tile {
    int64_t sequence, first, tokens;  // `first` is a row of q
    int64_t first_segment, segments;
    int64_t positions;  // visible to any of its tokens
    int64_t pieces;     // consecutive units per group of heads
    int64_t length;     // of the sequence
    int64_t records;    // start of its records, if split: [head][row][segment]
  };
  struct Piece {
    int64_t tile, group, number;
  };

  void list_runs(const Batch& batch);
  void list_tiles();
  void add_tile(const Run& run, int64_t at, int64_t tokens);
  void cut_tiles(int threads);
  void list_pieces();
  AttentionUnit unit(const Step& step, const Piece& piece) const;
  void list_vectors(const Step& step, const Tile& tile, AttentionUnit& unit) const;

  const Count count_;
  int64_t q_, q_rest_, out_;  // buffers
  const Attention how_;
  const KVPlace place_;
  const bool causal_;
  const Lists lists_;
  std::vector<Run> runs_;
  const int64_t* positions_ = nullptr;           // of the rows of q
  const int64_t* ends_ = nullptr;                // of what they see, or null
  std::vector<int64_t> sampled_, sampled_ends_;  // those of tokens that need logits
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
  Count rows() const override { return attend_->count_; }
  void run_rows(const Step& step, int64_t first, int64_t last) override;

 private:
  const Attend* attend_;
};

}  // namespace quire
