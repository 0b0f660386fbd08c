#include "images.h"

#include <algorithm>
#include <cstring>
#include <numeric>

namespace quire {

void Tower::encode(Image& image, double share) {
  if (!image.patches.empty()) begin(image);
  executor_.advance(share);
  if (share < 1) return;
  const float* found = executor_.buffer(output_);
  image.embedded.resize((size_t)(image.tokens() * width_));
  for (int64_t token = 0; token < image.tokens(); ++token) {
    const int64_t place = places_.empty() ? token : places_[(size_t)token];
    std::copy_n(found + place * width_, width_, image.embedded.data() + token * width_);
  }
}

void Tower::begin(Image& image) {
  const int64_t patches = (int64_t)image.patches.size() / image.columns;
  patches_ = std::move(image.patches);
  zeros_.assign((size_t)patches, 0);
  positions_.resize((size_t)patches);
  offsets_ = {0, patches};
  std::iota(positions_.begin(), positions_.end(), 0);
  const int64_t *places = positions_.data(), *zero = zeros_.data();
  batch_ = {patches, 1, image.tokens(), zero, places, offsets_.data(), nullptr, zero, zero, places};
  batch_.hidden = patches_.data();
  places_ = std::move(image.places);
  windows_ = std::move(image.windows);
  if (!windows_.empty()) {
    within_.resize((size_t)patches);
    for (size_t window = 0; window + 1 < windows_.size(); ++window)
      std::iota(within_.begin() + windows_[window], within_.begin() + windows_[window + 1], 0);
    by_window_ = batch_;
    by_window_.sequences = (int64_t)windows_.size() - 1;
    by_window_.positions = within_.data();
    by_window_.row_offsets = windows_.data();
    batch_.windows = &by_window_;
  }
  executor_.begin(batch_);
}

void PlaceImages::run_rows(const Step& step, int64_t first, int64_t last) {
  const Batch& batch = step.batch;
  float* out = step.buffers[out_];
  const float* x = step.buffers[x_];
  std::memcpy(out + first * width_, x + first * width_, (size_t)((last - first) * width_) * sizeof(float));
  const auto begin = std::lower_bound(batch.image_tokens.begin(), batch.image_tokens.end(), first);
  for (auto at = begin; at != batch.image_tokens.end() && *at < last; ++at) {
    const float* given = batch.image_rows[at - batch.image_tokens.begin()] + column_;
    float* row = out + *at * width_;
    if (added_)
      step.kernels.add(row, given, row, width_);
    else
      std::memcpy(row, given, (size_t)width_ * sizeof(float));
  }
}

RowWise::Function mixed_rows(std::shared_ptr<const Matrix> table, int64_t number) {
  return [table, number](const Step& step, const float* x, const float*, float* out, int64_t rows) {
    const Panels panels = table->panels();
    Vector row((size_t)panels.inputs);
    for (; rows > 0; --rows, x += 2 * number, out += panels.inputs) {
      for (int64_t j = 0; j < number; ++j) {
        step.kernels.lookup(panels, (int64_t)x[j], row.data());
        float* to = j == 0 ? out : row.data();
        step.kernels.scale(row.data(), x[number + j], to, panels.inputs);
        if (j > 0) step.kernels.add(out, row.data(), out, panels.inputs);
      }
    }
  };
}

RowWise::Function mean_of_rows(int64_t number, int64_t width) {
  return [number, width](const Step&, const float* x, const float*, float* out, int64_t rows) {
    std::vector<double> sums((size_t)width);
    for (; rows > 0; --rows, x += number * width, out += width) {
      std::fill(sums.begin(), sums.end(), 0.0);
      for (int64_t i = 0; i < number; ++i)
        for (int64_t k = 0; k < width; ++k) sums[(size_t)k] += x[i * width + k];
      for (int64_t k = 0; k < width; ++k) out[k] = (float)(sums[(size_t)k] / (double)number);
    }
  };
}

}  // namespace quire
