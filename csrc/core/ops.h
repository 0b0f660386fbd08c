// The ops of quire.program.ops on buffers. Values are identified by buffer numbers.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "executor.h"
#include "matrix.h"

namespace quire {

using Vector = std::vector<float>;

// Bounds what an activation gets: gates by `limit`, and ups by plus and minus that. NaN stays.
inline void limit_gates(float limit, const float* x, float* out, int64_t count) {
  for (int64_t i = 0; i < count; ++i) out[i] = x[i] > limit ? limit : x[i];
}
inline void limit_ups(float limit, const float* x, float* out, int64_t count) {
  for (int64_t i = 0; i < count; ++i) out[i] = x[i] > limit ? limit : x[i] < -limit ? -limit : x[i];
}

struct Moments {
  double mean, square;  // the means of some numbers, and of their squares
};
Moments moments(const float* x, int64_t count);

// Rows of f32, f16 or bf16 in memory that the caller keeps.
struct StoredTable {
  Format format;
  int64_t rows, width;
  const uint8_t* data;
};

// The row of a table that a token has: that of its position, or of its id, but `same` for the id `replaced`.
// Row 0 is that of what is beyond the table.
struct RowOfToken {
  bool by_position;
  int64_t replaced = -1, same = -1;

  int64_t row(const Batch& batch, int64_t token, int64_t rows) const {
    int64_t id = by_position ? batch.positions[token] : batch.token_ids[token];
    if (!by_position && id == replaced) id = same;
    return id < rows ? id : 0;
  }
};

// out[t] = table[ids[t]], where ids are token ids or positions; of ids beyond the table, its row 0.
class Embed : public Op {
 public:
  Embed(int64_t out, std::shared_ptr<const Matrix> table, RowOfToken of)
      : out_(out), table_(std::move(table)), of_(of) {}
  bool row_wise() const override { return true; }
  void run_rows(const Step& step, int64_t first, int64_t last) override;

 private:
  int64_t out_;
  std::shared_ptr<const Matrix> table_;
  RowOfToken of_;
};

// The same with a table as a checkpoint stores it, row after row, which is read where it is.
class EmbedStored : public Op {
 public:
  EmbedStored(int64_t out, const StoredTable& table, RowOfToken of) : out_(out), table_(table), of_(of) {}
  bool row_wise() const override { return true; }
  void run_rows(const Step& step, int64_t first, int64_t last) override;

 private:
  int64_t out_;
  StoredTable table_;
  RowOfToken of_;
};

// out[l] = x[logit_rows[l]].
class SampledRows : public Op {
 public:
  SampledRows(int64_t out, int64_t x, int64_t width) : out_(out), x_(x), width_(width) {}
  bool row_wise() const override { return true; }
  Count rows() const override { return Count::logits; }
  void run_rows(const Step& step, int64_t first, int64_t last) override;

 private:
  int64_t out_, x_, width_;
};

// out[t] = table[number of `separator` tokens before t in its row], or its last row if that has fewer.
class EmbedSegments : public Op {
 public:
  EmbedSegments(int64_t out, std::shared_ptr<const Matrix> table, int64_t separator)
      : out_(out), table_(std::move(table)), separator_(separator) {}
  void prepare(const Step& step) override;
  bool row_wise() const override { return true; }
  void run_rows(const Step& step, int64_t first, int64_t last) override;

 private:
  int64_t out_;
  std::shared_ptr<const Matrix> table_;
  int64_t separator_;
  std::vector<int64_t> segments_;  // of each token
};

// out[l] = the mean of x over the tokens of the sequence of logit row l, or x of its first token.
class PoolRows : public Op {
 public:
  PoolRows(int64_t out, int64_t x, int64_t width, bool mean) : out_(out), x_(x), width_(width), mean_(mean) {}
  bool row_wise() const override { return true; }
  Count rows() const override { return Count::logits; }
  void run_rows(const Step& step, int64_t first, int64_t last) override;

 private:
  int64_t out_, x_, width_;
  bool mean_;
};

// out[t] = the hidden states of the position before token t, which the batch brings.
class PreviousHidden : public Op {
 public:
  PreviousHidden(int64_t out, int64_t width) : out_(out), width_(width) {}
  bool row_wise() const override { return true; }
  void run_rows(const Step& step, int64_t first, int64_t last) override;

 private:
  int64_t out_, width_;
};

// Applies a function to each row independently: out = function(x, y).
class RowWise : public Op {
 public:
  using Function = std::function<void(const Step&, const float* x, const float* y, float* out, int64_t rows)>;
  // Widths are of one row; y may be absent (-1).
  RowWise(Count count, int64_t out, int64_t out_width, int64_t x, int64_t x_width, int64_t y, int64_t y_width,
          Function function)
      : count_(count),
        out_(out),
        out_width_(out_width),
        x_(x),
        x_width_(x_width),
        y_(y),
        y_width_(y_width),
        function_(std::move(function)) {}
  bool row_wise() const override { return true; }
  Count rows() const override { return count_; }
  void run_rows(const Step& step, int64_t first, int64_t last) override;

 private:
  Count count_;
  int64_t out_, out_width_, x_, x_width_, y_, y_width_;
  Function function_;
};

// The cosines and sines of a step, computed once for all layers with the same rotation.
class RopeTable : public Op {
 public:
  // `scale` is a factor of cosine and sine. With `axes` [pairs], tokens have three positions where the batch
  // says so, by one of which each pair rotates. They rotate as if they were so many positions `behind`.
  RopeTable(int64_t pairs, double scale, std::vector<int64_t> axes = {}, int64_t behind = 0)
      : pairs_(pairs), scale_(scale), axes_(std::move(axes)), behind_(behind) {}
  // By the places [tokens, axes] that are the value `places`; each rotates an equal part of the pairs.
  RopeTable(int64_t pairs, int64_t places, int64_t axes, Vector frequencies)
      : pairs_(pairs), places_(places), num_axes_(axes), of_places_(std::move(frequencies)) {}
  // Sets the frequencies [pairs] of a context variant (quire.program.rope).
  void set(int64_t variant, Vector frequencies) { frequencies_[variant] = std::move(frequencies); }
  void prepare(const Step& step) override;
  bool row_wise() const override { return true; }
  void run_rows(const Step& step, int64_t first, int64_t last) override;

  int64_t pairs() const { return pairs_; }
  const float* cos(int64_t token) const { return cos_.data() + token * pairs_; }
  const float* sin(int64_t token) const { return sin_.data() + token * pairs_; }

 private:
  // Returns the angle of a pair of a token, rounded to float as in training.
  float angle(const Step& step, int64_t token, int64_t pair, const Vector* frequencies) const;

  int64_t pairs_;
  double scale_ = 1;
  std::vector<int64_t> axes_;
  int64_t behind_ = 0;
  int64_t places_ = -1, num_axes_ = 0;
  Vector of_places_;
  std::map<int64_t, Vector> frequencies_;
  Vector cos_, sin_;
};

class Rotary : public Op {
 public:
  // Rotates numbers from `first` on of each head; `inverse`: by the negated angle.
  Rotary(Count count, int64_t out, int64_t x, int64_t heads, int64_t dim, const RopeTable* table,
         bool interleaved, int64_t first, bool inverse)
      : count_(count),
        out_(out),
        x_(x),
        heads_(heads),
        dim_(dim),
        table_(table),
        interleaved_(interleaved),
        first_(first),
        inverse_(inverse) {}
  bool row_wise() const override { return true; }
  Count rows() const override { return count_; }
  void run_rows(const Step& step, int64_t first, int64_t last) override;

 private:
  void rotate(const Step& step, int64_t row, const float* cos, const float* sin) const;

  Count count_;
  int64_t out_, x_, heads_, dim_;
  const RopeTable* table_;
  bool interleaved_;
  int64_t first_;
  bool inverse_;
};

class ScaleByPosition : public Op {
 public:
  ScaleByPosition(int64_t out, int64_t x, int64_t width, double beta, int64_t period, int64_t first)
      : out_(out), x_(x), width_(width), beta_(beta), period_(period), first_(first) {}
  bool row_wise() const override { return true; }
  void run_rows(const Step& step, int64_t first, int64_t last) override;

 private:
  int64_t out_, x_, width_;
  double beta_;
  int64_t period_, first_;
};

// Packs tile `tile` of rows of x, `stride` apart, for products with a weight, in the order of its inputs.
void pack_tile(const Step& step, const PackedActivations& packed, const float* x, int64_t stride,
               const Panels& weight, int64_t tile);

// Packs the rows of a value for products with weights that take the same packed activations. The memory is
// shared by all Pack ops of a program: the next one overwrites it.
class Pack : public Op {
 public:
  Pack(Count count, int64_t x, int64_t width, const Panels& weight, std::shared_ptr<Memory> packed)
      : count_(count), x_(x), width_(width), weight_(weight), packed_(std::move(packed)) {}
  void prepare(const Step& step) override;
  bool row_wise() const override { return true; }
  Count rows() const override { return count_; }
  void run_rows(const Step& step, int64_t first, int64_t last) override;

 private:
  Count count_;
  int64_t x_, width_;
  Panels weight_;  // one of them
  std::shared_ptr<Memory> packed_;
};

// Products of several matrices with the same activations, in one phase. Tasks are numbered node by node: none
// has panels of two nodes.
class Multiply : public Op {
 public:
  struct Part {
    std::shared_ptr<const Matrix> weight, up;  // `up` of a gated product, or null
    Vector bias;                               // or empty
    Activation activation;
    int64_t out;
  };
  Multiply(Count count, std::shared_ptr<Memory> packed) : count_(count), packed_(std::move(packed)) {}
  // All weights must have one width, and take the same packed activations.
  void add(Part part) { parts_.push_back(std::move(part)); }
  void prepare(const Step& step) override;
  int64_t tasks(const Step& step) const override;
  int64_t first_task(const Step&, int node) const override {
    return first_task_[(size_t)node * parts_.size()];
  }
  void run(const Step& step, int64_t task, int thread) override;
  double operations(const Step& step) const override;

 private:
  Count count_;
  std::shared_ptr<Memory> packed_;
  std::vector<Part> parts_;
  std::vector<int64_t> first_task_, panels_a_task_;  // by node and part; by part
};

}  // namespace quire
