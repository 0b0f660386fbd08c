// Scores of cached index keys, by which tokens choose the positions that they attend to.

#include "attention.h"
#include "panel_products.h"
#include "table.h"

namespace quire::QUIRE_ISA {

namespace {

// Sums one panel of the scores of all heads of a token, where they are positive or NaN.
template <KVFormat Form>
QUIRE_INLINE void sum_heads(const Work& w, int64_t token, int64_t i, const float* factors, float* to) {
  const bool scaled = Form == KVFormat::int8 && !w.cache.latent;  // else keys are laid out with their scales
  for (int64_t j = i; j < i + kPanel; j += kPartLanes) {
    Part sum{};
    for (int64_t head = 0; head < w.group; ++head) {
      Part x = load_as<Part>(w.weights + (token * w.group + head) * kPartition + j);
      if (scaled) x *= load_as<Part>(w.key_scales + j);
      sum = fma(select(x < Part{}, Part{}, x), splat_part(factors[head]), sum);
    }
    store_as(to + j, sum);
  }
}

template <KVFormat Form>
void score_unit(const Work& w, const float* factors, float* scores) {
  constexpr bool kPaired = kPairs<Form>;
  lay_queries<kPaired>(w);
  const int64_t first = w.unit.first_segment * kSegment;
  const int64_t end = least(first + kSegment, w.newest(w.rows - 1) + 1);
  for (int64_t start = first; start < end; start += kPartition) {
    const int64_t high = least(end - start, kPartition);
    if (Form == KVFormat::int8 && !w.cache.latent) copy_scales(w, start, 0, high);
    PartitionPrefetch ahead(w, sizeof(typename Stored<Form>::Type), start + kPartition, end);
    by_panel(0, high, [&](int64_t low, int64_t last) {
      if (w.cache.latent) {
        lay_latent_keys<Form, kPaired>(w, start, low, last);
      } else {
        lay_keys<Form, kPaired>(w, start, low, last);
      }
      ahead.some();
    });
    const LaidPanels keys{w.keys, w.width * kPanel, ahead};
    for (int64_t row = 0; row < w.rows; row += kRows) {
      const Operands operands{ceil_div(high, kPanel),
                              w.queries + row * w.width,
                              w.width,
                              kPaired ? ceil_div(w.dim, 2) : w.dim,
                              w.weights + row * kPartition,
                              kPartition,
                              nullptr};
      accumulate<kPaired>(least(kRows, w.rows - row), operands, keys);
    }
    for (int64_t token = 0; token < w.unit.tokens; ++token)
      for (int64_t i = 0; i < high; i += kPanel)
        sum_heads<Form>(w, token, i, factors + token * w.group, scores + token * kSegment + start - first);
  }
}

}  // namespace

void score_segment(const Attention& how, const AttentionUnit& unit, const float* factors, float* scores,
                   float* scratch) {
  const Work w = start(how, unit, scratch);
  switch (how.cache->format) {
    case KVFormat::f32:
      return score_unit<KVFormat::f32>(w, factors, scores);
    case KVFormat::f16:
      return score_unit<KVFormat::f16>(w, factors, scores);
    case KVFormat::bf16:
      return score_unit<KVFormat::bf16>(w, factors, scores);
    case KVFormat::int8:
      return score_unit<KVFormat::int8>(w, factors, scores);
  }
}

}  // namespace quire::QUIRE_ISA
