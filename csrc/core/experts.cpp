#include "experts.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

namespace quire {

namespace {

constexpr int64_t kPanelsAPart = 8;

Vector slice(const Vector& biases, int64_t expert, int64_t outputs) {
  if (biases.empty()) return {};
  return Vector(biases.begin() + expert * outputs, biases.begin() + (expert + 1) * outputs);
}

std::vector<int64_t> first_of(int64_t count) {
  std::vector<int64_t> order((size_t)count);
  std::iota(order.begin(), order.end(), 0);
  return order;
}

// Returns the indices of the largest scores, best first; ties go to the lower index.
std::vector<int64_t> best(const float* scores, int64_t experts, int64_t chosen) {
  std::vector<int64_t> order = first_of(experts);
  std::partial_sort(order.begin(), order.begin() + chosen, order.end(), [&](int64_t a, int64_t b) {
    return scores[a] > scores[b] || (scores[a] == scores[b] && a < b);
  });
  order.resize((size_t)chosen);
  return order;
}

}  // namespace

PackedActivations ExpertsState::packed(const Step& step, const Memory& from, const Group& group,
                                       int64_t inputs) const {
  const ActivationFormat format = step.kernels.activation_format(weights.gate->format());
  return {format, group.rows, inputs,
          from.as<uint8_t>() + group.first * PackedActivations::row_bytes(format, inputs)};
}

void RouteExperts::prepare(const Step& step) {
  const int64_t slots = step.batch.tokens * s_->chosen;
  const ActivationFormat format = step.kernels.activation_format(s_->weights.gate->format());
  s_->gathered.reserve((size_t)(slots * s_->hidden()) * sizeof(float));
  s_->gates.reserve((size_t)(slots * s_->inner()) * sizeof(float));
  s_->ups.reserve((size_t)(slots * s_->inner()) * sizeof(float));
  s_->downs.reserve((size_t)(slots * s_->hidden()) * sizeof(float));
  s_->packed_hidden.reserve((size_t)(slots * PackedActivations::row_bytes(format, s_->hidden())));
  s_->packed_inner.reserve((size_t)(slots * PackedActivations::row_bytes(format, s_->inner())));
}

void RouteExperts::run(const Step& step, int64_t, int) {
  ExpertsState& s = *s_;
  const int64_t tokens = step.batch.tokens, experts = s.experts();
  std::vector<std::vector<std::pair<int64_t, float>>> of(static_cast<size_t>(experts));  // (token, share)
  for (int64_t t = 0; t < tokens; ++t) {
    const float* scores = step.buffers[scores_] + t * experts;
    const bool numbers =
        std::none_of(scores, scores + experts, [](float score) { return std::isnan(score); });
    const std::vector<int64_t> picked = numbers ? best(scores, experts, s.chosen) : first_of(s.chosen);
    const float top = numbers ? scores[picked[0]] : NAN;
    float total = 0;
    if (s.over_chosen) {
      for (int64_t e : picked) total += std::exp(scores[e] - top);
    } else {
      for (int64_t e = 0; e < experts; ++e) total += std::exp(scores[e] - top);
    }
    for (int64_t e : picked) of[(size_t)e].push_back({t, std::exp(scores[e] - top) / total});
  }
  s.token.clear();
  s.share.clear();
  s.groups.clear();
  s.tiles.clear();
  std::vector<int64_t> filled((size_t)tokens, 0);
  s.slot_of.assign((size_t)(tokens * s.chosen), 0);
  for (int64_t e = 0; e < experts; ++e) {
    if (of[(size_t)e].empty()) continue;
    s.groups.push_back({e, (int64_t)s.token.size(), (int64_t)of[(size_t)e].size()});
    for (const auto& [token, share] : of[(size_t)e]) {
      s.slot_of[(size_t)(token * s.chosen + filled[(size_t)token]++)] = (int64_t)s.token.size();
      s.token.push_back(token);
      s.share.push_back(share);
    }
  }
  for (const ExpertsState::Group& group : s.groups)
    for (int64_t t = 0; t < ceil_div(group.rows, kTile); ++t) s.tiles.push_back({&group, t});
}

void ExpertsPass::run(const Step& step, int64_t, int) {
  const int64_t count = parts(step);
  for (int64_t number; (number = next_.fetch_add(1)) < count;) part(step, number);
}

void GatherExperts::part(const Step& step, int64_t number) {
  const ExpertsState::Tile& tile = s_->tiles[(size_t)number];
  const PackedActivations packed = s_->packed(step, s_->packed_hidden, *tile.group, s_->hidden());
  const int64_t width = s_->hidden();
  float* gathered = s_->gathered.as<float>() + tile.group->first * width;
  for (int64_t i = tile.number * kTile; i < tile.number * kTile + packed.tile_rows(tile.number); ++i)
    std::memcpy(gathered + i * width, step.buffers[x_] + s_->token[(size_t)(tile.group->first + i)] * width,
                (size_t)width * sizeof(float));
  step.kernels.pack_activations(packed, gathered, width, tile.number);
}

int64_t MultiplyExperts::chunks() const {
  const bool down = which_ == Which::down;
  return ceil_div((down ? s_->weights.down : s_->weights.gate)->panels().panels(), kPanelsAPart);
}

int64_t MultiplyExperts::parts(const Step&) const {
  return (int64_t)s_->groups.size() * chunks() * (which_ == Which::down ? 1 : 2);
}

void MultiplyExperts::part(const Step& step, int64_t number) {
  const bool down = which_ == Which::down;
  const bool second = !down && number % 2;  // gate and up alternate
  if (!down) number /= 2;
  const ExpertsState::Group& group = s_->groups[(size_t)(number / chunks())];
  const ExpertWeights& w = s_->weights;
  const Matrix& matrix = down ? *w.down : second ? *w.up : *w.gate;
  const Vector& biases = down ? w.down_bias : second ? w.up_bias : w.gate_bias;
  const Memory& out = down ? s_->downs : second ? s_->ups : s_->gates;
  const Vector bias = slice(biases, group.expert, matrix.outputs());
  const Product product{matrix.panels(group.expert),
                        nullptr,
                        bias.empty() ? nullptr : bias.data(),
                        Activation::none,
                        out.as<float>() + group.first * matrix.outputs(),
                        matrix.outputs()};
  const PackedActivations packed =
      s_->packed(step, down ? s_->packed_inner : s_->packed_hidden, group, matrix.inputs());
  const int64_t first = number % chunks() * kPanelsAPart;
  step.kernels.multiply(product, packed, first, std::min(first + kPanelsAPart, product.weight.panels()));
}

void ActivateExperts::part(const Step& step, int64_t number) {
  const ExpertsState::Tile& tile = s_->tiles[(size_t)number];
  const int64_t width = s_->inner();
  const PackedActivations packed = s_->packed(step, s_->packed_inner, *tile.group, width);
  float* gates = s_->gates.as<float>() + tile.group->first * width;
  float* ups = s_->ups.as<float>() + tile.group->first * width;
  const int64_t first = tile.number * kTile * width, count = packed.tile_rows(tile.number) * width;
  if (s_->limit > 0) {
    step.kernels.bounded_gate(s_->limit, gates + first, ups + first, gates + first, count);
  } else {
    step.kernels.gate(s_->activation, gates + first, ups + first, gates + first, count);
  }
  step.kernels.pack_activations(packed, gates, width, tile.number);
}

void SumExperts::run_rows(const Step& step, int64_t first, int64_t last) {
  const int64_t width = s_->weights.down->outputs();
  for (int64_t t = first; t < last; ++t) {
    float* out = step.buffers[out_] + t * width;
    std::memset(out, 0, (size_t)width * sizeof(float));
    for (int64_t i = 0; i < s_->chosen; ++i) {
      const int64_t slot = s_->slot_of[(size_t)(t * s_->chosen + i)];
      const float* from = s_->downs.as<float>() + slot * width;
      const float share = s_->share[(size_t)slot];
      for (int64_t j = 0; j < width; ++j) out[j] += share * from[j];
    }
  }
}

}  // namespace quire
