#include "by_head.h"

#include <algorithm>

namespace quire {

namespace {

constexpr int64_t kPanelsATask = 8;

}  // namespace

PackedActivations HeadProducts::of(const Step& step, int64_t head) const {
  const ActivationFormat format = step.kernels.activation_format(weight->panels());
  const int64_t rows = step.count(count), inputs = weight->inputs();
  const int64_t bytes = round_up(rows, kTile) * PackedActivations::row_bytes(format, inputs);
  return {format, rows, inputs, packed.as<uint8_t>() + head * bytes};
}

void PackByHead::prepare(const Step& step) {
  const int64_t rows = round_up(std::max<int64_t>(step.count(of_->count), 1), kTile);
  const ActivationFormat format = step.kernels.activation_format(of_->weight->panels());
  const int64_t bytes = rows * PackedActivations::row_bytes(format, of_->weight->inputs());
  of_->packed.reserve((size_t)(of_->weight->count() * bytes));
}

void PackByHead::run_rows(const Step& step, int64_t first, int64_t) {
  const int64_t heads = of_->weight->count(), inputs = of_->weight->inputs();
  for (int64_t head = 0; head < heads; ++head)
    pack_tile(step, of_->of(step, head), step.buffers[x_] + head * inputs, heads * inputs,
              of_->weight->panels(head), first / kTile);
}

void MultiplyByHead::prepare(const Step& step) {
  first_task_.assign(1, 0);
  for (int node = 0; node < step.nodes.count(); ++node) {
    const Section own = of_->weight->section(step.nodes, node);
    const int64_t chunks = ceil_div(own.last_panel - own.first_panel, kPanelsATask);
    first_task_.push_back(first_task_.back() + (own.last_matrix - own.first_matrix) * chunks);
  }
}

int64_t MultiplyByHead::tasks(const Step& step) const {
  return step.count(of_->count) == 0 ? 0 : first_task_.back();
}

void MultiplyByHead::run(const Step& step, int64_t task, int) {
  const auto after = std::upper_bound(first_task_.begin(), first_task_.end(), task);
  const Matrix& weight = *of_->weight;
  const Section own = weight.section(step.nodes, (int)(after - first_task_.begin()) - 1);
  const int64_t number = task - after[-1], chunks = ceil_div(own.last_panel - own.first_panel, kPanelsATask);
  const int64_t head = own.first_matrix + number / chunks, outputs = weight.outputs();
  const int64_t first = own.first_panel + number % chunks * kPanelsATask;
  const Product product{
      weight.panels(head),     nullptr, nullptr, Activation::none, step.buffers[out_] + head * outputs,
      weight.count() * outputs};
  const int64_t last = std::min(first + kPanelsATask, own.last_panel);
  step.kernels.multiply(product, of_->of(step, head), first, last);
}

}  // namespace quire
