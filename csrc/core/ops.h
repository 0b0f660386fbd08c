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

// out[t] = table[ids[t]], where ids are token ids or positions.
class Embed : public Op {
 public:
  Embed(int64_t out, std::shared_ptr<const Matrix> table, bool by_position)
      : out_(out), table_(std::move(table)), by_position_(by_position) {}
  bool row_wise() const override { return true; }
  void run_rows(const Step& step, int64_t first, int64_t last) override;

 private:
  int64_t out_;
  std::shared_ptr<const Matrix> table_;
  bool by_position_;
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

// Applies a function to each row independently: out = function(x, y).
class RowWise : public Op {
 public:
  using Function = std::function<void(const Step&, const float* x, const float* y, float* out, int64_t rows)>;
  // Widths are of one row; y may be absent (-1).
  RowWise(Count count, int64_t out, int64_t out_width, int64_t x, int64_t x_width, int64_t y,
          Function function)
      : count_(count),
        out_(out),
        out_width_(out_width),
        x_(x),
        x_width_(x_width),
        y_(y),
        function_(std::move(function)) {}
  bool row_wise() const override { return true; }
  Count rows() const override { return count_; }
  void run_rows(const Step& step, int64_t first, int64_t last) override;

 private:
  Count count_;
  int64_t out_, out_width_, x_, x_width_, y_;
  Function function_;
};

// The cosines and sines of a step, computed once for all layers with the same rotation.
class RopeTable : public Op {
 public:
  // `scale` is a factor of cosine and sine.
  RopeTable(int64_t pairs, double scale) : pairs_(pairs), scale_(scale) {}
  // Sets the frequencies [pairs] of a context variant (quire.program.rope).
  void set(int64_t variant, Vector frequencies) { frequencies_[variant] = std::move(frequencies); }
  void prepare(const Step& step) override;
  bool row_wise() const override { return true; }
  void run_rows(const Step& step, int64_t first, int64_t last) override;

  int64_t pairs() const { return pairs_; }
  const float* cos(int64_t token) const { return cos_.data() + token * pairs_; }
  const float* sin(int64_t token) const { return sin_.data() + token * pairs_; }

 private:
  int64_t pairs_;
  double scale_;
  std::map<int64_t, Vector> frequencies_;
  Vector cos_, sin_;
};

class Rotary : public Op {
 public:
  Rotary(int64_t out, int64_t x, int64_t heads, int64_t dim, const RopeTable* table, bool interleaved)
      : out_(out), x_(x), heads_(heads), dim_(dim), table_(table), interleaved_(interleaved) {}
  bool row_wise() const override { return true; }
  void run_rows(const Step& step, int64_t first, int64_t last) override;

 private:
  int64_t out_, x_, heads_, dim_;
  const RopeTable* table_;
  bool interleaved_;
};

// Packs the rows of a value for products with weights of one format. The memory is shared by all Pack ops of
// a program: the next one overwrites it.
class Pack : public Op {
 public:
  Pack(Count count, int64_t x, int64_t width, Format weight, std::shared_ptr<Memory> packed)
      : count_(count), x_(x), width_(width), weight_(weight), packed_(std::move(packed)) {}
  void prepare(const Step& step) override;
  bool row_wise() const override { return true; }
  Count rows() const override { return count_; }
  void run_rows(const Step& step, int64_t first, int64_t last) override;

 private:
  Count count_;
  int64_t x_, width_;
  Format weight_;
  std::shared_ptr<Memory> packed_;
};

// Products of several matrices with the same activations, in one phase.
class Multiply : public Op {
 public:
  struct Part {
    std::shared_ptr<const Matrix> weight, up;  // `up` of a gated product, or null
    Vector bias;                               // or empty
    Activation activation;
    int64_t out;
  };
  Multiply(Count count, std::shared_ptr<Memory> packed) : count_(count), packed_(std::move(packed)) {}
  // All weights must have one format and width.
  void add(Part part) { parts_.push_back(std::move(part)); }
  void prepare(const Step& step) override;
  int64_t tasks(const Step& step) const override;
  void run(const Step& step, int64_t task, int thread) override;

 private:
  Count count_;
  std::shared_ptr<Memory> packed_;
  std::vector<Part> parts_;
  std::vector<int64_t> first_task_, panels_a_task_;  // by part
};

}  // namespace quire
