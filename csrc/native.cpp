#include "native.h"

namespace quire {

void Native::write_kv(int64_t k, int64_t v, std::shared_ptr<KVCache> cache, int64_t layer) {
  executor_.add(std::make_unique<WriteKV>(k, v, cache->layer(layer), KVPlace{cache->group()}));
  caches_.push_back(std::move(cache));
}

void Native::attend(const std::string& rows, int64_t out, int64_t q, std::shared_ptr<KVCache> cache,
                    int64_t layer, int64_t heads, float scale, int64_t window, bool chunked, float softcap,
                    std::optional<Floats> sinks, bool causal) {
  const KVLayer* of = cache->layer(layer);
  const Attention how{of, heads, of->heads, scale, window, softcap, of_scores_.keep(sinks), chunked, false};
  add_attention(count(rows), q, -1, out, how, {cache->group()}, causal);
  caches_.push_back(std::move(cache));
}

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
  add_attention(Count::tokens, q, q_rest, out, how, {cache->group()}, false, {chosen});
  caches_.push_back(std::move(cache));
}

void Native::attend_vectors(int64_t out, int64_t q, std::shared_ptr<KVCache> cache, int64_t layer,
                            int64_t heads, float scale, int64_t window, std::optional<Floats> sinks,
                            std::optional<std::shared_ptr<KVCache>> entries, int64_t entry_layer,
                            int64_t chosen, int64_t number) {
  const int64_t groups = latent_groups(heads);
  Attention how{cache->layer(layer), heads, groups, scale, window, 0, of_scores_.keep(sinks), false, false};
  how.chosen = number;
  how.listed = true;
  Attend::Lists lists{chosen};
  if (entries) {
    how.entries = (*entries)->layer(entry_layer);
    lists.entry_group = (*entries)->group();
    caches_.push_back(std::move(*entries));
  }
  add_attention(Count::tokens, q, -1, out, how, {cache->group()}, true, lists);
  caches_.push_back(std::move(cache));
}

void Native::compress(int64_t out, int64_t values, int64_t gates, std::shared_ptr<KVCache> cache,
                      int64_t layer, Floats bias, int64_t every, int64_t dim) {
  const Compression how{cache->layer(layer), nullptr, every, dim};
  executor_.add(std::make_unique<KeepInputs>(values, gates, how.cache, cache->group()));
  executor_.add(std::make_unique<Compress>(out, how, vector(bias), cache->group()));
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

void Native::gate(const std::string& rows, int64_t out, int64_t gate, int64_t up, int64_t width,
                  const std::string& name, float limit) {
  const Activation a = activation(name);
  row_wise(rows, out, width, gate, width, up,
           [=](const Step& s, const float* g, const float* u, float* out, int64_t n) {
             if (limit == 0) return s.kernels.gate(a, g, u, out, n * width);
             Vector bounded((size_t)width);
             for (; n > 0; --n, g += width, u += width, out += width) {
               limit_gates(limit, g, out, width);
               limit_ups(limit, u, bounded.data(), width);
               s.kernels.gate(a, out, bounded.data(), out, width);
             }
           });
}

void Native::gated_norm(const std::string& rows, int64_t out, int64_t x, int64_t gate, int64_t width,
                        Floats weight, float eps, const std::string& name, bool gate_first, int64_t groups) {
  auto w = std::make_shared<Vector>(vector(weight));
  const Activation a = activation(name);
  row_wise(rows, out, width, x, width, gate,
           [=](const Step& s, const float* x, const float* g, float* out, int64_t n) {
             const int64_t part = (int64_t)w->size() / groups;
             if (gate_first) s.kernels.gate(a, g, x, out, n * width);
             const float* from = gate_first ? out : x;
             for (int64_t i = 0; i < n * width / part; ++i)
               s.kernels.norm({w->data() + i % groups * part, nullptr, part, eps, 0, false}, from + i * part,
                              out + i * part, 1);
             if (!gate_first) s.kernels.gate(a, g, out, out, n * width);
           });
}

void Native::repeat_streams(const std::string& rows, int64_t out, int64_t x, int64_t streams,
                            int64_t hidden) {
  row_wise(rows, out, streams * hidden, x, hidden, -1,
           [=](const Step&, const float* x, const float*, float* out, int64_t n) {
             for (; n > 0; --n, x += hidden)
               for (int64_t i = 0; i < streams; ++i) out = std::copy_n(x, hidden, out);
           });
}

void Native::stream_weights(const std::string& rows, int64_t out, int64_t x, int64_t mixed, int64_t streams,
                            int64_t hidden, Floats base, Floats scale, double eps, double floor,
                            int64_t rounds) {
  const StreamWeights of(streams, hidden, vector(base), vector(scale), eps, floor, rounds);
  const int64_t width = of.width();
  row_wise(
      rows, out, width, x, streams * hidden, mixed,
      [=](const Step&, const float* x, const float* mixed, float* out, int64_t n) {
        for (; n > 0; --n, x += streams * hidden, mixed += width, out += width) of.compute(x, mixed, out);
      },
      width);
}

void Native::collapse_streams(const std::string& rows, int64_t out, int64_t x, int64_t w, int64_t w_width,
                              int64_t streams, int64_t hidden) {
  row_wise(
      rows, out, hidden, x, streams * hidden, w,
      [=](const Step&, const float* x, const float* w, float* out, int64_t n) {
        for (; n > 0; --n, x += streams * hidden, w += w_width, out += hidden)
          quire::collapse_streams(x, w, out, streams, hidden);
      },
      w_width);
}

void Native::mix_streams(int64_t out, int64_t x, int64_t y, int64_t w, int64_t streams, int64_t hidden) {
  executor_.add(std::make_unique<MixStreams>(out, x, y, w, streams, hidden));
}

void Native::experts(int64_t out, int64_t x, int64_t scores, std::vector<std::optional<MatrixPtr>> matrices,
                     std::vector<std::optional<Floats>> biases, Routing routing, const std::string& name,
                     float limit, bool shifted) {
  ExpertWeights weights{matrices.at(0).value_or(nullptr),
                        matrices.at(1).value(),
                        matrices.at(2).value(),
                        vector(biases.at(0)),
                        vector(biases.at(1)),
                        vector(biases.at(2))};
  auto state = std::make_shared<ExpertsState>(std::move(weights), std::move(routing), activation(name), limit,
                                              shifted);
  executor_.add(std::make_unique<ChooseExperts>(state, scores));
  executor_.add(std::make_unique<RouteExperts>(state));
  executor_.add(std::make_unique<GatherExperts>(state, x));
  executor_.add(std::make_unique<MultiplyExperts>(state, MultiplyExperts::Which::gate_up));
  executor_.add(std::make_unique<ActivateExperts>(state));
  executor_.add(std::make_unique<MultiplyExperts>(state, MultiplyExperts::Which::down));
  executor_.add(std::make_unique<SumExperts>(state, out));
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
