#include "native.h"

namespace quire {

void Native::attend_rows(int64_t out, int64_t q, int64_t k, int64_t v, int64_t heads, int64_t groups,
                         int64_t dim, int64_t value_dim, float scale, int64_t reach,
                         std::optional<Floats> biases, int64_t first_after, bool halves, bool windowed) {
  auto& own = row_caches_[{groups, dim, value_dim, windowed}];
  const KVFormat format = halves ? KVFormat::bf16 : KVFormat::f32;
  if (!own) own = std::make_shared<RowCache>(format, groups, dim, value_dim);
  executor_.add(std::make_unique<WriteKV>(k, v, own->layer(), KVPlace{-1, own, windowed}));
  Attention how{own->layer(), heads, groups, scale, reach, 0, nullptr, false, true};
  how.biases = of_scores_.keep(biases);
  how.num_biases = biases ? (int64_t)biases->size() / heads : 0;
  how.first_after = first_after;
  add_attention(Count::tokens, q, -1, out, how, {-1, own, windowed});
}

void Native::attend_latents(int64_t out, int64_t q, int64_t q_rest, std::shared_ptr<KVCache> cache,
                            int64_t layer, int64_t heads, float scale, int64_t chosen, int64_t number) {
  Attention how{cache->layer(layer), heads, latent_groups(heads), scale, 0, 0, nullptr, false, false};
  how.chosen = number;
  add_attention(Count::tokens, q, q_rest, out, how, {cache->group()}, false, chosen);
  caches_.push_back(std::move(cache));
}

void Native::choose_positions(int64_t out, int64_t q, int64_t factors, std::shared_ptr<KVCache> cache,
                              int64_t layer, int64_t heads, int64_t number) {
  const Attention how{cache->layer(layer), heads, 1, 1, 0, 0, nullptr, false, false};
  auto choose = std::make_unique<ChoosePositions>(q, factors, out, how, cache->group(), number);
  auto merge = std::make_unique<MergeBest>(choose.get());
  executor_.add(std::move(choose));
  executor_.add(std::move(merge));
  caches_.push_back(std::move(cache));
}

nb::ndarray<nb::numpy, float, nb::ndim<2>> Native::run(
    Ints token_ids, Ints positions, Ints row_offsets, const std::vector<Table>& tables, Ints slots,
    Ints variants, Ints logit_rows, const Snapshots& restored, const Snapshots& saved, int64_t output,
    int64_t width, const Adapters& adapters, const std::optional<Ints>& visible_ends) {
  std::vector<const int64_t*> rows;
  for (const auto& cache : caches_)
    if ((size_t)cache->group() >= tables.size())
      throw nb::value_error("expected a block table per cache group");
  for (const Table& table : tables)
    for (size_t row = 0; row < slots.size(); ++row) rows.push_back(table.data() + row * table.shape(1));
  const std::vector<Snapshot> before = snapshots(restored), after = snapshots(saved);
  std::vector<const Adapter*> by_row(slots.size());
  for (size_t row = 0; row < std::min(by_row.size(), adapters.size()); ++row)
    by_row[row] = adapters[row] ? adapters[row]->get() : nullptr;
  Batch batch{(int64_t)token_ids.size(),
              (int64_t)slots.size(),
              (int64_t)logit_rows.size(),
              token_ids.data(),
              positions.data(),
              row_offsets.data(),
              rows.data(),
              slots.data(),
              variants.data(),
              logit_rows.data(),
              before,
              after,
              by_row.data()};
  if (visible_ends) batch.visible_ends = visible_ends->data();
  float* logits;
  {
    nb::gil_scoped_release unlocked;
    logits = executor_.run(batch, output);
  }
  return nb::ndarray<nb::numpy, float, nb::ndim<2>>(logits, {logit_rows.size(), (size_t)width}, nb::handle());
}

}  // namespace quire
