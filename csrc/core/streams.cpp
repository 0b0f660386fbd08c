#include "streams.h"

#include <algorithm>
#include <cmath>

namespace quire {

namespace {

double opened(double x) { return 1 / (1 + std::exp(-x)); }

// Divides `count` numbers, `stride` apart, by their sum and `floor`.
void divide_by_sum(double* first, int64_t count, int64_t stride, double floor) {
  double sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += first[i * stride];
  for (int64_t i = 0; i < count; ++i) first[i * stride] /= sum + floor;
}

}  // namespace

void StreamWeights::compute(const float* x, const float* mixed, float* out) const {
  const double root = std::sqrt(moments(x, streams_ * hidden_).square + eps_);
  const auto raw = [&](int64_t i) {
    const int64_t part = std::min<int64_t>(i / streams_, 2);
    return (double)mixed[i] / root * scale_[(size_t)part] + base_[(size_t)i];
  };
  for (int64_t i = 0; i < streams_; ++i) out[i] = (float)(opened(raw(i)) + floor_);
  if (width() == streams_) return;
  for (int64_t i = streams_; i < 2 * streams_; ++i) out[i] = (float)(2 * opened(raw(i)));
  std::vector<double> matrix((size_t)(streams_ * streams_));
  for (int64_t i = 0; i < streams_ * streams_; ++i) matrix[(size_t)i] = raw(2 * streams_ + i);
  make_doubly_stochastic(matrix.data());
  std::copy(matrix.begin(), matrix.end(), out + 2 * streams_);
}

void StreamWeights::make_doubly_stochastic(double* matrix) const {
  const int64_t n = streams_;
  for (double* row = matrix; row < matrix + n * n; row += n) {
    const double top = *std::max_element(row, row + n);
    for (int64_t i = 0; i < n; ++i) row[i] = std::exp(row[i] - top);
    divide_by_sum(row, n, 1, 0);
    for (int64_t i = 0; i < n; ++i) row[i] += floor_;
  }
  for (int64_t round = 0; round < rounds_; ++round) {
    for (int64_t i = 0; i < n && round > 0; ++i) divide_by_sum(matrix + i * n, n, 1, floor_);
    for (int64_t i = 0; i < n; ++i) divide_by_sum(matrix + i, n, n, floor_);
  }
}

void collapse_streams(const float* x, const float* w, float* out, int64_t streams, int64_t hidden) {
  for (int64_t i = 0; i < hidden; ++i) out[i] = w[0] * x[i];
  for (int64_t s = 1; s < streams; ++s)
    for (int64_t i = 0; i < hidden; ++i) out[i] += w[s] * x[s * hidden + i];
}

void MixStreams::run_rows(const Step& step, int64_t first, int64_t last) {
  const int64_t n = streams_;
  for (int64_t t = first; t < last; ++t) {
    const float *x = step.buffers[x_] + t * n * hidden_, *y = step.buffers[y_] + t * hidden_;
    const float *post = step.buffers[w_] + t * n * (n + 2) + n, *matrix = post + n;
    float* out = step.buffers[out_] + t * n * hidden_;
    for (int64_t k = 0; k < n; ++k, out += hidden_) {
      for (int64_t i = 0; i < hidden_; ++i) out[i] = post[k] * y[i];
      for (int64_t j = 0; j < n; ++j) {
        const float weight = matrix[j * n + k];
        for (int64_t i = 0; i < hidden_; ++i) out[i] += weight * x[j * hidden_ + i];
      }
    }
  }
}

}  // namespace quire
