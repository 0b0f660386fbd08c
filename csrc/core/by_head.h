// Products of the vector of each head with a matrix of its own (quire.program.ops.linear.LinearByHead).
#pragma once

#include <memory>

#include "ops.h"

namespace quire {

// The matrices, one for each head, and the packed activations of all heads.
struct HeadProducts {
  std::shared_ptr<const Matrix> weight;
  Count count;
  Memory packed;

  PackedActivations of(const Step& step, int64_t head) const;
};

class PackByHead : public Op {
 public:
  PackByHead(std::shared_ptr<HeadProducts> of, int64_t x) : of_(std::move(of)), x_(x) {}
  void prepare(const Step& step) override;
  bool row_wise() const override { return true; }
  Count rows() const override { return of_->count; }
  void run_rows(const Step& step, int64_t first, int64_t last) override;

 private:
  std::shared_ptr<HeadProducts> of_;
  int64_t x_;
};

class MultiplyByHead : public Op {  // a task: some panels of one head
 public:
  MultiplyByHead(std::shared_ptr<HeadProducts> of, int64_t out) : of_(std::move(of)), out_(out) {}
  int64_t tasks(const Step& step) const override;
  void run(const Step& step, int64_t task, int thread) override;

 private:
  int64_t chunks() const;
  std::shared_ptr<HeadProducts> of_;
  int64_t out_;
};

}  // namespace quire
