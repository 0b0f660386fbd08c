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

int64_t MultiplyByHead::chunks() const { return ceil_div(of_->weight->panels().panels(), kPanelsATask); }

int64_t MultiplyByHead::tasks(const Step& step) const {
  return step.count(of_->count) == 0 ? 0 : of_->weight->count() * chunks();
}

void MultiplyByHead::run(const Step& step, int64_t task, int) {
  const Matrix& weight = *of_->weight;
  const int64_t head = task / chunks(), first = task % chunks() * kPanelsATask, outputs = weight.outputs();
  const Product product{
      weight.panels(head),     nullptr, nullptr, Activation::none, step.buffers[out_] + head * outputs,
      weight.count() * outputs};
  const int64_t last = std::min(first + kPanelsATask, product.weight.panels());
  step.kernels.multiply(product, of_->of(step, head), first, last);
}

}  // namespace quire
