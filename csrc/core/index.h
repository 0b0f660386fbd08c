// Ops that choose the positions, or entries, that tokens attend to, by scores of cached index keys.
#pragma once

#include <vector>

#include "../kernels/attention.h"
#include "executor.h"

namespace quire {

// The best of scored positions: the highest scores, of equal ones the lowest positions; NaN counts as
// infinity. They are the same in whatever order positions come.
class Best {
 public:
  static int64_t room(int64_t number) { return 2 * number; }  // entries of `held`

  Best(uint64_t* held, int64_t number) : held_(held), number_(number) {}

  static uint64_t entry(float score, int64_t position);
  void add(uint64_t entry) {
    if (entry <= passed_) return;
    held_[count_++] = entry;
    if (count_ == room(number_)) shrink();
  }
  // Leaves at most `number` entries; returns how many.
  int64_t shrink();
  // Writes the positions of all `number` entries, ascending.
  void write(int32_t* positions);

 private:
  uint64_t* held_;
  int64_t number_, count_ = 0;
  uint64_t passed_ = 0;  // entries up to this one are not among the best
};

// Writes lists of positions [tokens, number] for tokens that see more than `number`; those of others are
// arbitrary. Tiles of tokens whose context is divided leave the best of each part, which MergeBest combines.
class ChoosePositions : public Op {
 public:
  ChoosePositions(int64_t q, int64_t factors, int64_t out, const Attention& how, int64_t group,
                  int64_t number)
      : q_(q), factors_(factors), out_(out), how_(how), group_(group), number_(number) {}

  void prepare(const Step& step) override;
  int64_t tasks(const Step&) const override { return (int64_t)pieces_.size(); }
  void run(const Step& step, int64_t task, int thread) override;
  double operations(const Step&) const override;

 private:
  friend class MergeBest;

  struct Tile {
    int64_t sequence, first, tokens, segments;
    int64_t pieces;
    int64_t records;  // start of its records, if divided: [token][piece][number]
  };
  struct Piece {
    int64_t tile, number;
  };

  int64_t work(const Tile& tile) const;
  int32_t* list(const Step& step, int64_t token) const {
    return (int32_t*)step.buffers[(size_t)out_] + token * number_;
  }

  int64_t q_, factors_, out_;  // buffers
  const Attention how_;
  const int64_t group_, number_;
  std::vector<int64_t> seen_;  // positions or entries, by token
  std::vector<Tile> tiles_;
  std::vector<Piece> pieces_;
  std::vector<Piece> divided_;                // tokens of divided tiles
  int64_t scratch_floats_ = 0, entries_ = 0;  // per thread
  Memory scratch_, held_, records_;
};

class MergeBest : public Op {
 public:
  explicit MergeBest(const ChoosePositions* chosen) : of_(chosen) {}

  void prepare(const Step& step) override;
  int64_t tasks(const Step&) const override { return (int64_t)of_->divided_.size(); }
  void run(const Step& step, int64_t task, int thread) override;

 private:
  const ChoosePositions* of_;
  Memory held_;
};

}  // namespace quire
