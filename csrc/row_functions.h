// Functions of rows that need no kernel of their own.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>

#include "core/ops.h"

namespace quire {

// Keeps what is beyond so many standard deviations above the mean of a row, less that cutoff.
inline void keep_above(const float* x, float* out, int64_t width, double deviations) {
  const Moments of = moments(x, width);
  const double variance = std::max(of.square - of.mean * of.mean, 0.0);
  const float cutoff = (float)(of.mean + deviations * std::sqrt(variance));
  for (int64_t i = 0; i < width; ++i) {
    const float above = x[i] - cutoff;
    out[i] = above < 0 ? 0 : above;
  }
}

// Returns x, but at least `low`, then at most `high`. What is no number stays so.
inline float clipped(float x, float low, float high) {
  const float raised = x < low ? low : x;
  return raised > high ? high : raised;
}

// (x - bias) * factors, for rows as wide as these.
inline RowWise::Function standardized(Vector bias, Vector factors) {
  return [bias = std::move(bias), factors = std::move(factors)](const Step&, const float* x, const float*,
                                                                float* out, int64_t rows) {
    const size_t width = bias.size();
    for (; rows > 0; --rows, x += width, out += width)
      for (size_t i = 0; i < width; ++i) out[i] = (x[i] - bias[i]) * factors[i];
  };
}

// Returns positive x^2 + beta x above 0, negative (e^x - 1 - x) + beta x below (quire.program.ops.Xielu).
inline float xielu(float x, float positive, float negative, float beta) {
  return (x < 0 ? negative * (std::exp(x) - 1 - x) : positive * x * x) + beta * x;
}

}  // namespace quire
