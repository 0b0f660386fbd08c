// Products of the vector of each head with a matrix of its own (quire.program.ops.linear.LinearByHead).
#pragma once

#include <memory>
#include <vector>

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

class MultiplyByHead : public Op {  // a task: some panels of one head; node by node
 public:
  MultiplyByHead(std::shared_ptr<HeadProducts> of, int64_t out) : of_(std::move(of)), out_(out) {}
  void prepare(const Step& step) override;
  int64_t tasks(const Step& step) const override;
  int64_t first_task(const Step&, int node) const override { return first_task_[(size_t)node]; }
  void run(const Step& step, int64_t task, int thread) override;

 private:
  std::shared_ptr<HeadProducts> of_;
  int64_t out_;
  std::vector<int64_t> first_task_;  // by node
};

}  // namespace quire
