// The Python interface of a program recorded for this machine, and of its caches.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/adapters.h"
#include "core/attention.h"
#include "core/by_head.h"
#include "core/compress.h"
#include "core/delta.h"
#include "core/executor.h"
#include "core/experts.h"
#include "core/images.h"
#include "core/index.h"
#include "core/isa.h"
#include "core/ops.h"
#include "core/state.h"
#include "core/state_space.h"
#include "core/streams.h"
#include "kv_cache.h"
#include "native_values.h"
#include "row_functions.h"

namespace quire {

// A program that is recorded op by op, then run. Values are identified by buffer numbers.
class Native {
 public:
  Native(const std::string& isa, const Nodes& nodes)
      : executor_(kernels_of(isa), std::make_shared<ThreadPool>(nodes)) {}
  Native(const std::string& isa, int threads) : Native(isa, Nodes(threads)) {}
  // A program that runs with the threads of another one, also between the parts of a run.
  Native(const std::string& isa, const Native& beside)
      : executor_(kernels_of(isa), beside.executor_.shared_pool()) {}

  int64_t buffer(const std::string& rows, int64_t width) { return executor_.add_buffer(count(rows), width); }

  // The id `replaced` has the row of the id `same`.
  void embed(int64_t out, MatrixPtr table, bool by_position, int64_t replaced, int64_t same) {
    executor_.add(std::make_unique<Embed>(out, std::move(table), RowOfToken{by_position, replaced, same}));
  }
  void embed_stored(int64_t out, Stored table, const std::string& format, bool by_position, int64_t replaced,
                    int64_t same) {
    const Format kind = format == "f32" ? Format::f32 : format == "f16" ? Format::f16 : Format::bf16;
    if (table.itemsize() != (kind == Format::f32 ? 4 : 2)) throw nb::value_error("table of another format");
    const StoredTable stored{kind, (int64_t)table.shape(0), (int64_t)table.shape(1),
                             (const uint8_t*)table.data()};
    executor_.add(std::make_unique<EmbedStored>(out, stored, RowOfToken{by_position, replaced, same}));
  }
  void sampled_rows(int64_t out, int64_t x, int64_t width) {
    executor_.add(std::make_unique<SampledRows>(out, x, width));
  }

  void embed_segments(int64_t out, MatrixPtr table, int64_t separator) {
    executor_.add(std::make_unique<EmbedSegments>(out, std::move(table), separator));
  }
  void pool_rows(int64_t out, int64_t x, int64_t width, bool mean) {
    executor_.add(std::make_unique<PoolRows>(out, x, width, mean));
  }
  void previous_hidden(int64_t out, int64_t width) {
    executor_.add(std::make_unique<PreviousHidden>(out, width));
  }
  void join(const std::string& rows, int64_t out, int64_t x, int64_t m, int64_t y, int64_t n) {
    row_wise(
        rows, out, m + n, x, m, y,
        [=](const Step&, const float* x, const float* y, float* out, int64_t count) {
          for (; count > 0; --count, x += m, y += n) out = std::copy_n(y, n, std::copy_n(x, m, out));
        },
        n);
  }

  void add(const std::string& rows, int64_t out, int64_t x, int64_t y, int64_t width) {
    row_wise(rows, out, width, x, width, y,
             [width](const Step& s, const float* x, const float* y, float* out, int64_t n) {
               s.kernels.add(x, y, out, n * width);
             });
  }
  void scale(const std::string& rows, int64_t out, int64_t x, int64_t width, float factor) {
    row_wise(rows, out, width, x, width, -1,
             [=](const Step& s, const float* x, const float*, float* out, int64_t n) {
               s.kernels.scale(x, factor, out, n * width);
             });
  }
  // The weight is as wide as the last axis of x, or one number.
  void scale_by_weight(const std::string& rows, int64_t out, int64_t x, int64_t width, Floats weight) {
    if (weight.size() == 1) return scale(rows, out, x, width, weight.data()[0]);
    auto w = std::make_shared<Vector>(vector(weight));
    row_wise(rows, out, width, x, width, -1,
             [=](const Step& s, const float* x, const float*, float* out, int64_t n) {
               const int64_t last = (int64_t)w->size();
               for (int64_t at = 0; at < n * width; at += last)
                 s.kernels.gate(Activation::none, x + at, w->data(), out + at, last);
             });
  }
  void scale_by_position(int64_t out, int64_t x, int64_t width, double beta, int64_t period, int64_t first) {
    executor_.add(std::make_unique<ScaleByPosition>(out, x, width, beta, period, first));
  }
  void soft_cap(const std::string& rows, int64_t out, int64_t x, int64_t width, float cap) {
    row_wise(rows, out, width, x, width, -1,
             [=](const Step& s, const float* x, const float*, float* out, int64_t n) {
               s.kernels.soft_cap(x, cap, out, n * width);
             });
  }
  void clip(const std::string& rows, int64_t out, int64_t x, int64_t width, float low, float high) {
    row_wise(rows, out, width, x, width, -1,
             [=](const Step&, const float* x, const float*, float* out, int64_t n) {
               for (int64_t i = 0; i < n * width; ++i) out[i] = clipped(x[i], low, high);
             });
  }
  void standardize(const std::string& rows, int64_t out, int64_t x, Floats bias, Floats factors) {
    row_wise(rows, out, (int64_t)bias.size(), x, (int64_t)bias.size(), -1,
             standardized(vector(bias), vector(factors)));
  }
  void xielu(const std::string& rows, int64_t out, int64_t x, int64_t width, float positive, float negative,
             float beta) {
    row_wise(rows, out, width, x, width, -1,
             [=](const Step&, const float* x, const float*, float* out, int64_t n) {
               for (int64_t i = 0; i < n * width; ++i) out[i] = quire::xielu(x[i], positive, negative, beta);
             });
  }
  void unary(const std::string& rows, int64_t out, int64_t x, int64_t width, const std::string& name) {
    const Activation a = activation(name);
    row_wise(rows, out, width, x, width, -1,
             [=](const Step& s, const float* x, const float*, float* out, int64_t n) {
               s.kernels.activate(a, x, out, n * width);
             });
  }
  // With a limit, unless it is 0, of the gate and of up (quire.program.ops.GatedActivation).
  void gate(const std::string& rows, int64_t out, int64_t gate, int64_t up, int64_t width,
            const std::string& name, float limit);
  // The same with one gate for each row.
  void gate_rows(const std::string& rows, int64_t out, int64_t gate, int64_t up, int64_t width,
                 const std::string& name) {
    const Activation a = activation(name);
    row_wise(
        rows, out, width, up, width, gate,
        [=](const Step& s, const float* u, const float* g, float* out, int64_t n) {
          for (int64_t i = 0; i < n; ++i) {
            float factor;
            s.kernels.activate(a, g + i, &factor, 1);
            s.kernels.scale(u + i * width, factor, out + i * width, width);
          }
        },
        1);
  }
  void match_magnitude(const std::string& rows, int64_t out, int64_t x, int64_t like, int64_t width,
                       double floor) {
    row_wise(rows, out, width, x, width, like,
             [=](const Step& s, const float* x, const float* like, float* out, int64_t n) {
               for (int64_t at = 0; at < n * width; at += width) {
                 const double own = std::max(moments(x + at, width).square, floor);
                 const float factor = (float)std::sqrt(moments(like + at, width).square / own);
                 s.kernels.scale(x + at, factor, out + at, width);
               }
             });
  }
  void above_cutoff(const std::string& rows, int64_t out, int64_t x, int64_t width, double deviations) {
    row_wise(rows, out, width, x, width, -1,
             [=](const Step&, const float* x, const float*, float* out, int64_t n) {
               for (int64_t i = 0; i < n; ++i) keep_above(x + i * width, out + i * width, width, deviations);
             });
  }
  void slice(const std::string& rows, int64_t out, int64_t width, int64_t x, int64_t x_width, int64_t first) {
    row_wise(rows, out, width, x, x_width, -1,
             [=](const Step&, const float* x, const float*, float* out, int64_t n) {
               for (int64_t i = 0; i < n; ++i)
                 std::memcpy(out + i * width, x + i * x_width + first, (size_t)width * sizeof(float));
             });
  }
  void norm(const std::string& rows, int64_t out, int64_t x, int64_t width, Floats weight,
            std::optional<Floats> bias, float eps, float offset, bool centered) {
    auto w = std::make_shared<Vector>(vector(weight)), b = std::make_shared<Vector>(vector(bias));
    row_wise(rows, out, width, x, width, -1,
             [=](const Step& s, const float* x, const float*, float* out, int64_t n) {
               const int64_t last = (int64_t)w->size();
               s.kernels.norm({w->data(), b->empty() ? nullptr : b->data(), last, eps, offset, centered}, x,
                              out, n * (width / last));
             });
  }

  // Of each of `groups` parts of a vector of x, then multiplied by the activated gate; or (`gate_first`) of
  // their product.
  void gated_norm(const std::string& rows, int64_t out, int64_t x, int64_t gate, int64_t width, Floats weight,
                  float eps, const std::string& name, bool gate_first, int64_t groups);

  void repeat_streams(const std::string& rows, int64_t out, int64_t x, int64_t streams, int64_t hidden);
  void stream_weights(const std::string& rows, int64_t out, int64_t x, int64_t mixed, int64_t streams,
                      int64_t hidden, Floats base, Floats scale, double eps, double floor, int64_t rounds);
  void collapse_streams(const std::string& rows, int64_t out, int64_t x, int64_t w, int64_t w_width,
                        int64_t streams, int64_t hidden);
  void mix_streams(int64_t out, int64_t x, int64_t y, int64_t w, int64_t streams, int64_t hidden);

  // Returns the number of the table, for `rotary` and `frequencies`.
  int64_t rope_table(int64_t pairs, double scale, std::vector<int64_t> axes, int64_t behind) {
    return add_rope(std::make_unique<RopeTable>(pairs, scale, std::move(axes), behind));
  }
  int64_t place_table(int64_t places, int64_t axes, int64_t pairs, Floats frequencies) {
    return add_rope(std::make_unique<RopeTable>(pairs, places, axes, vector(frequencies)));
  }
  void frequencies(int64_t table, int64_t variant, Floats values) {
    ropes_.at((size_t)table)->set(variant, vector(values));
  }
  void rotary(const std::string& rows, int64_t out, int64_t x, int64_t heads, int64_t dim, int64_t table,
              bool interleaved, int64_t first, bool inverse) {
    const RopeTable* of = ropes_.at((size_t)table);
    executor_.add(std::make_unique<Rotary>(count(rows), out, x, heads, dim, of, interleaved, first, inverse));
  }

  // Packs the rows of x for the following products.
  void pack(const std::string& rows, int64_t x, int64_t width, const Matrix& like) {
    executor_.add(std::make_unique<Pack>(count(rows), x, width, like.panels(), packed_));
  }
  // Starts a phase of products; `linear` and `gated_linear` add to it.
  void products(const std::string& rows) {
    auto multiply = std::make_unique<Multiply>(count(rows), packed_);
    multiply_ = multiply.get();
    executor_.add(std::move(multiply));
  }
  void linear(int64_t out, MatrixPtr weight, std::optional<Floats> bias) {
    multiply_->add({std::move(weight), nullptr, vector(bias), Activation::none, out});
  }
  void gated_linear(int64_t out, MatrixPtr gate, MatrixPtr up, const std::string& name) {
    multiply_->add({std::move(gate), std::move(up), {}, activation(name), out});
  }

  // Adds what adapters say to the products before. `targets` are pairs of a product's value and its site.
  void add_adapters(const std::string& rows, int64_t x, int64_t width,
                    const std::vector<std::pair<int64_t, int64_t>>& targets) {
    AdapterTiles*& tiles = adapter_tiles_[(size_t)count(rows)];
    if (tiles == nullptr) {
      auto found = std::make_unique<AdapterTiles>(count(rows));
      tiles = found.get();
      executor_.add(std::move(found));
    }
    std::vector<AddAdapters::Target> places;
    for (const auto& [out, site] : targets) places.push_back({out, site});
    executor_.add(std::make_unique<AddAdapters>(tiles, x, width, std::move(places)));
  }

  void experts(int64_t out, int64_t x, int64_t scores, std::vector<std::optional<MatrixPtr>> matrices,
               std::vector<std::optional<Floats>> biases, Routing routing, const std::string& name,
               float limit, bool shifted);

  void write_kv(int64_t k, int64_t v, std::shared_ptr<KVCache> cache, int64_t layer);
  // `causal`: tokens see none after their own, whatever the batch says.
  void attend(const std::string& rows, int64_t out, int64_t q, std::shared_ptr<KVCache> cache, int64_t layer,
              int64_t heads, float scale, int64_t window, bool chunked, float softcap,
              std::optional<Floats> sinks, bool causal);
  // With lists of `number` positions in the buffer `chosen` (choose_positions), of these.
  void attend_latents(int64_t out, int64_t q, int64_t q_rest, std::shared_ptr<KVCache> cache, int64_t layer,
                      int64_t heads, float scale, int64_t chosen, int64_t number);
  // To the vectors of a window, then to entries, if there is a cache of these: to all, or lists of `number`.
  void attend_vectors(int64_t out, int64_t q, std::shared_ptr<KVCache> cache, int64_t layer, int64_t heads,
                      float scale, int64_t window, std::optional<Floats> sinks,
                      std::optional<std::shared_ptr<KVCache>> entries, int64_t entry_layer, int64_t chosen,
                      int64_t number);
  void compress(int64_t out, int64_t values, int64_t gates, std::shared_ptr<KVCache> cache, int64_t layer,
                Floats bias, int64_t every, int64_t dim);
  // Must follow the write of the keys, of positions or entries.
  void choose_positions(int64_t out, int64_t q, int64_t factors, std::shared_ptr<KVCache> cache,
                        int64_t layer, int64_t heads, int64_t number);
  // Of q over the k and v of the same row, or if `windowed` the same window, on both sides of each token;
  // `reach` 0: over all of it. With `halves` keys and values are kept in bfloat16.
  void attend_rows(int64_t out, int64_t q, int64_t k, int64_t v, int64_t heads, int64_t groups, int64_t dim,
                   int64_t value_dim, float scale, int64_t reach, std::optional<Floats> biases,
                   int64_t first_after, bool halves, bool windowed);
  void linear_by_head(const std::string& rows, int64_t out, int64_t x, MatrixPtr weight) {
    auto of = std::make_shared<HeadProducts>(HeadProducts{std::move(weight), count(rows), {}});
    executor_.add(std::make_unique<PackByHead>(of, x));
    executor_.add(std::make_unique<MultiplyByHead>(of, out));
  }

  // Must precede all ops that read these states.
  void restore_states(std::shared_ptr<StateCache> cache) {
    executor_.add(std::make_unique<RestoreStates>(cache.get()));
    states_.push_back(std::move(cache));
  }
  void convolve(int64_t out, int64_t x, const StateCache& cache, int64_t layer, Floats weight,
                std::optional<Floats> bias, const std::string& name) {
    executor_.add(std::make_unique<ShortConvolution>(out, x, &cache, layer, vector(weight), vector(bias),
                                                     activation(name)));
  }
  void recur(int64_t out, int64_t x, int64_t decay, const StateCache& cache, int64_t layer) {
    executor_.add(std::make_unique<GatedRecurrence>(out, x, decay, &cache, layer));
  }

  void delta_rule(int64_t out, int64_t q, int64_t k, int64_t v, int64_t decay, int64_t beta,
                  const StateCache& cache, int64_t layer, Floats log_rate, Floats bias, int64_t key_heads,
                  int64_t key_dim, float beta_factor) {
    const DeltaOptions options{key_heads, key_dim, beta_factor, vector(log_rate), vector(bias)};
    const DeltaInputs inputs{q, k, v, decay, beta};
    executor_.add(std::make_unique<DeltaRule>(out, inputs, &cache, layer, options, deltas_));
  }

  void state_space(int64_t out, int64_t x, int64_t step, const StateCache& cache, int64_t layer,
                   Floats log_rate, Floats bias, Floats skip, int64_t groups, int64_t state_dim, float low,
                   float high) {
    SpaceOptions options{groups, state_dim, low, high, vector(log_rate), vector(bias), vector(skip)};
    const int64_t width = cache.shape().width / state_dim, shared = groups * state_dim;
    executor_.add(std::make_unique<StateSpace>(out, x, step, &cache, layer, std::move(options), deltas_));
    executor_.add(std::make_unique<KeepShared>(x, width + 2 * shared, width, shared, &cache, layer));
  }

  Executor& executor() { return executor_; }
  RopeTable* rope(int64_t table) const { return ropes_.at((size_t)table); }

  // Computes a batch; returns the logits [L, width] in buffer `output`, valid until the next run.
  nb::ndarray<nb::numpy, float, nb::ndim<2>> run(Ints token_ids, Ints positions, Ints row_offsets,
                                                 const std::vector<Table>& tables, Ints slots, Ints variants,
                                                 Ints logit_rows, const Snapshots& restored,
                                                 const Snapshots& saved, int64_t output, int64_t width,
                                                 const Adapters& adapters,
                                                 const std::optional<Ints>& visible_ends);

  // Of images: patches become rows of tokens, and these get their places among the tokens of a prompt.
  void mixed_rows(int64_t out, int64_t places, MatrixPtr table, int64_t number) {
    const int64_t width = table->panels().inputs;
    row_wise("T", out, width, places, 2 * number, -1, quire::mixed_rows(std::move(table), number));
  }
  void join_rows(int64_t out, int64_t x, int64_t width) {
    row_wise("L", out, width, x, width, -1,
             [width](const Step&, const float* x, const float*, float* out, int64_t n) {
               std::copy_n(x, n * width, out);
             });
  }
  void mean_of_rows(int64_t out, int64_t x, int64_t number, int64_t width) {
    row_wise("L", out, width, x, number * width, -1, quire::mean_of_rows(number, width));
  }
  void place_images(int64_t out, int64_t x, int64_t width, int64_t column, bool added) {
    executor_.add(std::make_unique<PlaceImages>(out, x, width, column, added));
  }

 private:
  int64_t add_rope(std::unique_ptr<RopeTable> table) {
    ropes_.push_back(table.get());
    executor_.add(std::move(table));
    return (int64_t)ropes_.size() - 1;
  }
  void add_attention(Count count, int64_t q, int64_t q_rest, int64_t out, const Attention& how, KVPlace place,
                     bool causal = false, Attend::Lists lists = {}) {
    auto attend = std::make_unique<Attend>(count, q, q_rest, out, how, std::move(place), causal, lists);
    auto merge = std::make_unique<MergeSegments>(attend.get());
    executor_.add(std::move(attend));
    executor_.add(std::move(merge));
  }
  void row_wise(const std::string& rows, int64_t out, int64_t out_width, int64_t x, int64_t x_width,
                int64_t y, RowWise::Function function, int64_t y_width = -1) {
    executor_.add(std::make_unique<RowWise>(count(rows), out, out_width, x, x_width, y,
                                            y_width < 0 ? x_width : y_width, std::move(function)));
  }

  Executor executor_;
  std::shared_ptr<Memory> packed_ = std::make_shared<Memory>(), deltas_ = std::make_shared<Memory>();
  std::vector<std::shared_ptr<KVCache>> caches_;  // keeps alive what ops refer to
  std::vector<std::shared_ptr<StateCache>> states_;
  std::map<std::array<int64_t, 4>, std::shared_ptr<RowCache>> row_caches_;  // by sizes, and if of windows
  KeptNumbers of_scores_;                                                   // sinks and biases of attention
  std::vector<RopeTable*> ropes_;
  Multiply* multiply_ = nullptr;
  std::array<AdapterTiles*, 2> adapter_tiles_{};  // by Count
};

}  // namespace quire
