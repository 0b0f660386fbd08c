// Images of prompts: patches, encoded by a vision tower when a row first computes a token of them.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "executor.h"
#include "matrix.h"
#include "ops.h"

namespace quire {

// An image of a slot. Its tokens, `rows` of `line`, begin at position `first`; between two rows are `gap`
// others. The tower takes `patches` of `columns` numbers, and gave `embedded` [tokens, width]. Tokens of a
// `whole` one see each other. A tower with windows takes these one after the other: `windows` are where their
// patches begin, and the end, `places` which of its rows each token has; both are empty otherwise.
struct Image {
  int64_t first, rows, line, gap;
  bool whole;
  std::vector<int64_t> windows = {}, places = {};
  int64_t columns = 0;
  Vector patches = {}, embedded = {};

  int64_t tokens() const { return rows * line; }
  int64_t end() const { return first + rows * (line + gap) - gap; }
  // Returns the token at a position, -1 between rows.
  int64_t token_at(int64_t position) const {
    const int64_t row = (position - first) / (line + gap), at = (position - first) % (line + gap);
    return at < line ? row * line + at : -1;
  }
};

// By which positions the tokens of a prompt with images rotate: three for each up to the last image,
// [known, 3]; later ones are `shift` away from their own.
struct RotaryPositions {
  std::vector<int64_t> known;
  int64_t shift;

  int64_t of(int64_t position, int64_t axis) const {
    const size_t at = (size_t)(position * 3 + axis);
    return at < known.size() ? known[at] : position + shift;
  }
};

// Encodes images, one after the other. The executor of the tower must share the threads of the program.
class Tower {
 public:
  Tower(Executor& executor, int64_t output, int64_t width)
      : executor_(executor), output_(output), width_(width) {}

  int64_t width() const { return width_; }
  // Encodes an image until `share` of it is done; with 1 it gets what was embedded. One without patches goes
  // on where the call before ended.
  void encode(Image& image, double share);

 private:
  void begin(Image& image);

  Executor& executor_;
  int64_t output_, width_;
  // Of the image begun last
  Vector patches_;
  std::vector<int64_t> zeros_, positions_, offsets_, windows_, within_, places_;
  Batch batch_{}, by_window_{};
};

// out = x, with what the batch brings for the tokens of images in its place, or added to it: columns from
// `column` on.
class PlaceImages : public Op {
 public:
  PlaceImages(int64_t out, int64_t x, int64_t width, int64_t column, bool added)
      : out_(out), x_(x), width_(width), column_(column), added_(added) {}
  bool row_wise() const override { return true; }
  void run_rows(const Step& step, int64_t first, int64_t last) override;

 private:
  int64_t out_, x_, width_, column_;
  bool added_;
};

// A sum of rows of a table: `number` rows, then their factors, are the numbers of x.
RowWise::Function mixed_rows(std::shared_ptr<const Matrix> table, int64_t number);
// Means over `number` rows of x [.., width], which are one row of RowWise.
RowWise::Function mean_of_rows(int64_t number, int64_t width);

}  // namespace quire
