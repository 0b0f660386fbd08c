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

// Returns the indices of the largest numbers, best first; ties go to the lower index.
std::vector<int64_t> best(const float* numbers, int64_t count, int64_t chosen) {
  std::vector<int64_t> order = first_of(count);
  std::partial_sort(order.begin(), order.begin() + chosen, order.end(), [&](int64_t a, int64_t b) {
    return numbers[a] > numbers[b] || (numbers[a] == numbers[b] && a < b);
  });
  order.resize((size_t)chosen);
  return order;
}

// Returns ln(1 + e^x).
double softplus(double x) { return std::max(x, 0.0) + std::log1p(std::exp(-std::abs(x))); }

// Computes the softmax of the scores, or a function of each.
void find_affinities(Routing::Affinity how, const float* scores, std::vector<double>& out) {
  const size_t count = out.size();
  if (how == Routing::Affinity::sigmoid) {
    for (size_t e = 0; e < count; ++e) out[e] = 1 / (1 + std::exp(-(double)scores[e]));
    return;
  }
  if (how == Routing::Affinity::sqrtsoftplus) {
    for (size_t e = 0; e < count; ++e) out[e] = std::sqrt(softplus(scores[e]));
    return;
  }
  const double top = *std::max_element(scores, scores + count);
  double total = 0;
  for (size_t e = 0; e < count; ++e) total += out[e] = std::exp((double)scores[e] - top);
  for (double& affinity : out) affinity /= total;
}

// Gives the experts of all groups but the best the rank minus infinity.
void drop_groups(const Routing& how, std::vector<float>& ranks) {
  const int64_t size = (int64_t)ranks.size() / how.groups;
  std::vector<float> of_group;
  for (int64_t g = 0; g < how.groups; ++g) {
    const float* group = ranks.data() + g * size;
    const std::vector<int64_t> two = best(group, size, how.by_two ? 2 : 1);
    of_group.push_back(how.by_two ? group[two[0]] + group[two[1]] : group[two[0]]);
  }
  const std::vector<int64_t> order = best(of_group.data(), how.groups, how.groups);
  for (int64_t i = how.kept_groups; i < how.groups; ++i)
    std::fill_n(ranks.begin() + order[(size_t)i] * size, size, -INFINITY);
}

// Returns the experts of one token, best first, and computes the affinities of all.
std::vector<int64_t> choose(const Routing& how, const float* scores, std::vector<double>& affinities,
                            std::vector<float>& ranks) {
  find_affinities(how.affinity, scores, affinities);
  for (size_t e = 0; e < ranks.size(); ++e)
    ranks[e] = (float)affinities[e] + (how.bias.empty() ? 0.0f : how.bias[e]);
  if (std::any_of(ranks.begin(), ranks.end(), [](float rank) { return std::isnan(rank); })) {
    std::fill(affinities.begin(), affinities.end(), NAN);
    return first_of(how.chosen);
  }
  if (how.groups > 1) drop_groups(how, ranks);
  return best(ranks.data(), (int64_t)ranks.size(), how.chosen);
}

// Chooses the experts of one token by score, and computes the share of each: its softmax among the scores
// left that are near it.
std::vector<int64_t> choose_apart(const Routing& how, const float* scores, std::vector<double>& shares) {
  const int64_t count = (int64_t)shares.size();
  if (std::any_of(scores, scores + count, [](float score) { return std::isnan(score); })) {
    std::fill(shares.begin(), shares.end(), NAN);
    return first_of(how.chosen);
  }
  std::vector<int64_t> picked = best(scores, count, how.chosen);
  for (auto chosen = picked.begin(); chosen != picked.end(); ++chosen) {
    const double top = scores[*chosen];
    double total = 0;
    for (int64_t e = 0; e < count; ++e) {
      const double score = scores[e], scale = std::max(std::abs(score), top);
      const bool far = (top - score) / scale > how.margin;
      if (!far && std::find(picked.begin(), chosen, e) == chosen) total += std::exp(score - top);
    }
    shares[(size_t)*chosen] = 1 / total;
  }
  if (std::any_of(picked.begin(), picked.end(), [&](int64_t e) { return std::isnan(shares[(size_t)e]); }))
    std::fill(shares.begin(), shares.end(), NAN);
  return picked;
}

// Returns the experts that are listed for a token id, and computes the affinities of all.
std::vector<int64_t> listed(const Routing& how, int64_t id, const float* scores,
                            std::vector<double>& affinities) {
  find_affinities(how.affinity, scores, affinities);
  const int64_t first = id * how.chosen;
  const auto at = how.listed.begin() + (first < (int64_t)how.listed.size() ? first : 0);
  return {at, at + how.chosen};
}

// Returns the bytes of a packed row that fit the form of activations of any expert.
int64_t row_bytes(const Step& step, const Matrix& weight) {
  int64_t most = 0;
  for (int64_t i = 0; i < (weight.joined() ? weight.count() : 1); ++i) {
    const ActivationFormat format = step.kernels.activation_format(weight.panels(i));
    most = std::max(most, PackedActivations::row_bytes(format, weight.inputs()));
  }
  return most;
}

}  // namespace

PackedActivations ExpertsState::packed(const Step& step, const Memory& from, const Group& group,
                                       const Matrix& weight) const {
  const ActivationFormat format = step.kernels.activation_format(weight.panels(group.expert));
  return {format, group.rows, weight.inputs(), from.as<uint8_t>() + group.first * row_bytes(step, weight)};
}

bool ExpertsState::shared(const Step& step, int64_t expert) const {
  if (!weights.gate) return true;
  const Panels gate = weights.gate->panels(expert), up = weights.up->panels(expert);
  if (step.kernels.activation_format(gate) != step.kernels.activation_format(up)) return false;
  if (gate.order == nullptr || up.order == nullptr) return gate.order == up.order;
  return std::equal(gate.order, gate.order + gate.inputs, up.order);
}

void RouteExperts::prepare(const Step& step) {
  const int64_t slots = step.batch.tokens * s_->chosen();
  s_->gathered.reserve((size_t)(slots * s_->hidden()) * sizeof(float));
  if (s_->weights.gate) s_->gates.reserve((size_t)(slots * s_->inner()) * sizeof(float));
  s_->ups.reserve((size_t)(slots * s_->inner()) * sizeof(float));
  s_->downs.reserve((size_t)(slots * s_->hidden()) * sizeof(float));
  s_->packed_hidden.reserve((size_t)(slots * row_bytes(step, s_->weights.first())));
  s_->packed_inner.reserve((size_t)(slots * row_bytes(step, *s_->weights.down)));
}

void ChooseExperts::prepare(const Step& step) {
  s_->picked.resize((size_t)(step.batch.tokens * s_->chosen()));
  s_->picked_shares.resize(s_->picked.size());
}

void ChooseExperts::run_rows(const Step& step, int64_t first, int64_t last) {
  const Routing& how = s_->routing;
  const int64_t experts = s_->experts();
  std::vector<double> affinities((size_t)experts);
  std::vector<float> ranks((size_t)experts);
  for (int64_t t = first; t < last; ++t) {
    const float* scores = step.buffers[scores_] + t * experts;
    const std::vector<int64_t> picked = !how.listed.empty()
                                            ? listed(how, step.batch.token_ids[t], scores, affinities)
                                        : how.margin < 0 ? choose(how, scores, affinities, ranks)
                                                         : choose_apart(how, scores, affinities);
    double total = 0;
    for (int64_t e : picked) total += affinities[(size_t)e];
    const double divisor = how.normalized ? total + how.floor : 1;
    size_t at = (size_t)(t * how.chosen);
    for (int64_t e : picked) {
      const double factor = how.factors.empty() ? 1 : how.factors[(size_t)e];
      s_->picked_shares[at] = (float)(how.scaling * (affinities[(size_t)e] / divisor) * factor);
      s_->picked[at++] = e;
    }
  }
}

void RouteExperts::run(const Step& step, int64_t, int) {
  ExpertsState& s = *s_;
  const int64_t tokens = step.batch.tokens;
  of_.assign((size_t)s.experts(), {});
  for (size_t i = 0; i < s.picked.size(); ++i)
    of_[(size_t)s.picked[i]].push_back({(int64_t)i / s.chosen(), s.picked_shares[i]});
  s.token.clear();
  s.share.clear();
  s.groups.clear();
  s.tiles.clear();
  std::vector<int64_t> filled((size_t)tokens, 0);
  s.slot_of.assign((size_t)(tokens * s.chosen()), 0);
  for (int64_t e = 0; e < s.experts(); ++e) {
    if (of_[(size_t)e].empty()) continue;
    s.groups.push_back({e, (int64_t)s.token.size(), (int64_t)of_[(size_t)e].size(), s.shared(step, e)});
    if (!s.groups.back().shared)
      s.packed_up.reserve((size_t)(tokens * s.chosen() * row_bytes(step, *s.weights.up)));
    for (const auto& [token, share] : of_[(size_t)e]) {
      s.slot_of[(size_t)(token * s.chosen() + filled[(size_t)token]++)] = (int64_t)s.token.size();
      s.token.push_back(token);
      s.share.push_back(share);
    }
  }
  for (const ExpertsState::Group& group : s.groups)
    for (int64_t t = 0; t < ceil_div(group.rows, kTile); ++t) s.tiles.push_back({&group, t});
}

void ExpertsPass::prepare(const Step& step) {
  if (of_nodes_.empty()) of_nodes_ = std::vector<Counter>((size_t)step.nodes.count());
  for (Counter& counter : of_nodes_) counter.next.store(0);
}

void ExpertsPass::run(const Step& step, int64_t, int thread) {
  for (int i = 0; i < step.nodes.count(); ++i) {
    const int node = (step.nodes.of_thread(thread) + i) % step.nodes.count();
    const int64_t count = parts(step, node);
    std::atomic<int64_t>& next = of_nodes_[(size_t)node].next;
    for (int64_t number; (number = next.fetch_add(1)) < count;) part(step, node, number);
  }
}

void GatherExperts::tile(const Step& step, const ExpertsState::Tile& tile) {
  const PackedActivations packed = s_->packed(step, s_->packed_hidden, *tile.group, s_->weights.first());
  const int64_t width = s_->hidden();
  float* gathered = s_->gathered.as<float>() + tile.group->first * width;
  for (int64_t i = tile.number * kTile; i < tile.number * kTile + packed.tile_rows(tile.number); ++i) {
    const size_t slot = (size_t)(tile.group->first + i);
    const float* from = step.buffers[x_] + s_->token[slot] * width;
    if (s_->routing.on_inputs) {
      step.kernels.scale(from, s_->share[slot], gathered + i * width, width);
    } else {
      std::memcpy(gathered + i * width, from, (size_t)width * sizeof(float));
    }
  }
  pack_tile(step, packed, gathered, width, s_->weights.first().panels(tile.group->expert), tile.number);
  if (tile.group->shared) return;
  const Matrix& up = *s_->weights.up;
  pack_tile(step, s_->packed(step, s_->packed_up, *tile.group, up), gathered, width,
            up.panels(tile.group->expert), tile.number);
}

MultiplyExperts::Own MultiplyExperts::own(const Step& step, int node) const {
  const Section section =
      (which_ == Which::down ? s_->weights.down : s_->weights.up)->section(step.nodes, node);
  const auto group = [&](int64_t expert) {  // the first one from this expert on
    const auto before = [](const ExpertsState::Group& one, int64_t other) { return one.expert < other; };
    return std::lower_bound(s_->groups.begin(), s_->groups.end(), expert, before) - s_->groups.begin();
  };
  const int64_t first = group(section.first_matrix), groups = group(section.last_matrix) - first;
  const int64_t chunks = ceil_div(section.last_panel - section.first_panel, kPanelsAPart);
  return {first, groups, section.first_panel, section.last_panel, chunks};
}

int64_t MultiplyExperts::parts(const Step& step, int node) const {
  const Own of = own(step, node);
  return of.groups * of.chunks * matrices();
}

void MultiplyExperts::part(const Step& step, int node, int64_t number) {
  const bool down = which_ == Which::down;
  const Own of = own(step, node);
  const bool second = !down && number % matrices() == matrices() - 1;  // gate and up alternate
  number /= matrices();
  const ExpertsState::Group& group = s_->groups[(size_t)(of.first_group + number / of.chunks)];
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
  const bool own = second && !group.shared;
  const Memory& from = down ? s_->packed_inner : own ? s_->packed_up : s_->packed_hidden;
  const PackedActivations packed = s_->packed(step, from, group, down || own ? matrix : w.first());
  const int64_t first = of.first_panel + number % of.chunks * kPanelsAPart;
  step.kernels.multiply(product, packed, first, std::min(first + kPanelsAPart, of.last_panel));
}

void ActivateExperts::tile(const Step& step, const ExpertsState::Tile& tile) {
  const int64_t width = s_->inner();
  const PackedActivations packed = s_->packed(step, s_->packed_inner, *tile.group, *s_->weights.down);
  float* gates = s_->gates.as<float>() + tile.group->first * width;
  float* ups = s_->ups.as<float>() + tile.group->first * width;
  const int64_t first = tile.number * kTile * width, count = packed.tile_rows(tile.number) * width;
  if (!s_->weights.gate) {
    gates = ups;
    step.kernels.activate(s_->activation, ups + first, ups + first, count);
  } else if (s_->limit > 0 && s_->shifted) {
    step.kernels.bounded_gate(s_->limit, gates + first, ups + first, gates + first, count);
  } else {
    if (s_->limit > 0) {
      limit_gates(s_->limit, gates + first, gates + first, count);
      limit_ups(s_->limit, ups + first, ups + first, count);
    }
    step.kernels.gate(s_->activation, gates + first, ups + first, gates + first, count);
  }
  pack_tile(step, packed, gates, width, s_->weights.down->panels(tile.group->expert), tile.number);
}

void SumExperts::run_rows(const Step& step, int64_t first, int64_t last) {
  const int64_t width = s_->weights.down->outputs();
  for (int64_t t = first; t < last; ++t) {
    float* out = step.buffers[out_] + t * width;
    std::memset(out, 0, (size_t)width * sizeof(float));
    for (int64_t i = 0; i < s_->chosen(); ++i) {
      const int64_t slot = s_->slot_of[(size_t)(t * s_->chosen() + i)];
      const float* from = s_->downs.as<float>() + slot * width;
      const float share = s_->routing.on_inputs ? 1.0f : s_->share[(size_t)slot];
      for (int64_t j = 0; j < width; ++j) out[j] += share * from[j];
    }
  }
}

}  // namespace quire
