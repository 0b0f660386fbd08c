// The gated delta rule.

#include "delta.h"

#include "functions.h"
#include "kv.h"
#include "table.h"

namespace quire::QUIRE_ISA {

namespace {

constexpr int64_t kTokens = 4;  // computed together, so that a state is read once for them
constexpr float kEps = 1e-6f;

// out = x * factor / sqrt(sum of squares + eps), zeros after its end.
QUIRE_INLINE void unit(const float* x, int64_t dim, float factor, float* out) {
  F squares{};
  for (int64_t i = 0; i < dim; i += kLanes) {
    const F v = load_some(x + i, dim - i);
    squares = fma(v, v, squares);
  }
  const float length = __builtin_sqrtf(reduce_add(squares) + kEps);
  for (int64_t i = 0; i < dim; i += kLanes) store(out + i, load_some(x + i, dim - i) / length * factor);
}

// Returns the dot products of x with sixteen vectors, one in each lane.
QUIRE_INLINE F dots(const float* x, const float* vectors, int64_t stride) {
  F sums[kLanes]{};
  for (int64_t i = 0; i < stride; i += kLanes) {
    const F v = load(x + i);
    for (int s = 0; s < kLanes; ++s) sums[s] = fma(v, load(vectors + s * stride + i), sums[s]);
  }
  return sum_each(sums);
}

// out[r] = sum over i of x[r, i] * rows[i], with lanes over some columns of the rows; all have `stride`.
template <int Rows, int Vectors>
QUIRE_INLINE void multiply_columns(const float* x, int64_t stride, const float* rows, int64_t dim,
                                   int64_t width, int64_t column, float* out, int64_t out_stride) {
  F sums[Rows][Vectors]{};
  for (int64_t i = 0; i < dim; ++i) {
    F row[Vectors];
    for (int v = 0; v < Vectors; ++v) {
      const int64_t at = column + v * kLanes;
      row[v] = Vectors > 1 ? load(rows + i * width + at) : load_some(rows + i * width + at, width - at);
    }
    for (int r = 0; r < Rows; ++r)
      for (int v = 0; v < Vectors; ++v) sums[r][v] = fma(splat(x[r * stride + i]), row[v], sums[r][v]);
  }
  for (int r = 0; r < Rows; ++r)
    for (int v = 0; v < Vectors; ++v) store(out + r * out_stride + column + v * kLanes, sums[r][v]);
}

template <int Rows>
void multiply_state(const float* x, int64_t stride, const float* state, int64_t dim, int64_t width,
                    float* out, int64_t out_stride) {
  int64_t column = 0;
  for (; column + 2 * kLanes <= width; column += 2 * kLanes)
    multiply_columns<Rows, 2>(x, stride, state, dim, width, column, out, out_stride);
  for (; column < width; column += kLanes)
    multiply_columns<Rows, 1>(x, stride, state, dim, width, column, out, out_stride);
}

// The numbers of one position: products of its key (first) and query with keys and with the state.
struct Position {
  float products[2][kDeltaChunk];
  const float* from_state[2];  // [value_dim]; null: zeros
};

// u of a position and its output, from those before it in the chunk and from the state at its start.
struct Sums {
  const float *for_u, *for_out;  // weights of positions
  float* u;
  int64_t stride, at;
  F since;
  const float *state_for_u, *state_for_out;  // or null

  template <int Vectors>
  QUIRE_INLINE void columns(float beta, const float* value, float* out, int64_t n, int64_t i) const {
    F told[Vectors]{}, sum[Vectors]{};
    for (int v = 0; state_for_u && v < Vectors; ++v) {
      told[v] = since * load(state_for_u + i + v * kLanes);
      sum[v] = since * load(state_for_out + i + v * kLanes);
    }
    for (int64_t s = 0; s < at; ++s) {
      for (int v = 0; v < Vectors; ++v) {
        const F known = load(u + s * stride + i + v * kLanes);
        told[v] = fma(splat(for_u[s]), known, told[v]);
        sum[v] = fma(splat(for_out[s]), known, sum[v]);
      }
    }
    for (int v = 0; v < Vectors; ++v) {
      const int64_t first = i + v * kLanes;
      const F own = beta * (load_some(value + first, n - first) - told[v]);
      store(u + at * stride + first, own);
      store_some(out + first, fma(splat(for_out[at]), own, sum[v]), n - first);
    }
  }
};

// Computes u and the output of one position of a head, from the weights of the positions up to it and what
// remains of the state.
QUIRE_INLINE void mix(const DeltaPiece& piece, int64_t head, int64_t token,
                      const float (&weights)[2][kDeltaChunk], F since, const Position& of) {
  const DeltaShape& shape = piece.shape;
  const int64_t at = piece.place + token, stride = shape.value_stride(), n = shape.value_dim;
  float* u = piece.u + head * kDeltaChunk * stride;
  const float beta = piece.betas[token * shape.heads + head];
  const float* value = piece.values + token * piece.value_width + head * n;
  float* out = piece.out + token * piece.out_width + head * n;
  const Sums sums{weights[0], weights[1], u, stride, at, since, of.from_state[0], of.from_state[1]};
  int64_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes) sums.columns<4>(beta, value, out, n, i);
  for (; i < n; i += kLanes) sums.columns<1>(beta, value, out, n, i);
}

// Computes a position of a head with one decay: its weights are products times what has fallen since.
void step(const DeltaPiece& piece, int64_t head, int64_t token, const Position& of) {
  const int64_t at = piece.place + token;
  float* totals = piece.totals + head * kDeltaChunk;
  const float total = piece.decays[token * piece.shape.heads + head] + (at > 0 ? totals[at - 1] : 0.0f);
  totals[at] = total;
  float weights[2][kDeltaChunk];
  for (int64_t s = 0; s <= at; s += kLanes) {
    const F fallen = exp(splat(total) - load(totals + s));
    for (int w = 0; w < 2; ++w) store(weights[w] + s, load(of.products[w] + s) * fallen);
  }
  mix(piece, head, token, weights, exp(splat(total)), of);
}

// With a decay for each channel. G falls from position to position, so no exponent is above zero; e^-G by
// itself would overflow. A token and a head take an exponential for each number of a key and each position of
// the chunk so far: with 128 numbers 4,000 on average, and 2.6 million in the 20 layers of 32 heads of
// Kimi-Linear-48B, whose products take 6 billion operations for a token.

// Computes G of some positions of a head. What is beyond the end of keys is multiplied by their zeros.
void add_decays(const DeltaPiece& piece, int64_t head, int64_t first, int64_t tokens) {
  const int64_t n = piece.shape.key_dim, stride = piece.shape.key_stride();
  const float* bias = piece.bias + head * n;
  const F rate = splat(piece.rates[head]);
  for (int64_t t = first; t < first + tokens; ++t) {
    const float* decay = piece.decays + t * piece.decay_width + head * n;
    float* total = piece.totals + (head * kDeltaChunk + piece.place + t) * stride;
    for (int64_t i = 0; i < stride; i += kLanes) {
      const F g = rate * softplus(load_some(decay + i, n - i) + load_some(bias + i, n - i));
      store(total + i, piece.place + t > 0 ? load(total - stride + i) + g : g);
    }
  }
}

// out = x times what has fallen of each number from one G to a later one (null: from zero).
QUIRE_INLINE void fall(const float* x, const float* later, const float* earlier, int64_t stride, float* out) {
  for (int64_t i = 0; i < stride; i += kLanes) {
    const F from = earlier ? load(earlier + i) : F{};
    store(out + i, load(x + i) * exp_negative(load(later + i) - from));
  }
}

// Computes a position of a head, whose key and query are a pair.
void step_by_channel(const DeltaPiece& piece, int64_t head, int64_t token, const float* pair,
                     const Position& of) {
  const int64_t at = piece.place + token, stride = piece.shape.key_stride();
  const float* totals = piece.totals + head * kDeltaChunk * stride;
  const float* own = totals + at * stride;
  float weights[2][kDeltaChunk];
  for (int64_t begin = 0; begin <= at; begin += kLanes) {
    F sums[2][kLanes]{};
    for (int64_t s = begin; s < least(begin + kLanes, at + 1); ++s) {
      const float *key = piece.keys + s * stride, *total = totals + s * stride;
      Split<Part> both[2]{};
      for (int64_t i = 0; i < stride; i += kLanes)
        for (int p = 0; p < kParts; ++p) {
          const int64_t lane = i + p * kPartLanes;
          const Part fallen = exp_negative(load_as<Part>(own + lane) - load_as<Part>(total + lane));
          const Part known = load_as<Part>(key + lane) * fallen;
          for (int w = 0; w < 2; ++w)
            both[w].parts[p] = fma(load_as<Part>(pair + w * stride + lane), known, both[w].parts[p]);
        }
      for (int w = 0; w < 2; ++w) sums[w][s - begin] = joined(both[w]);
    }
    for (int w = 0; w < 2; ++w) store(weights[w] + begin, sum_each(sums[w]));
  }
  mix(piece, head, token, weights, splat(1.0f), of);
}

// Rows of a state at the end of a chunk, at most kTokens. Keys or u are multiplied by what has fallen since.
struct Rows {
  const float* keys;
  int64_t key_stride;
  const float* u;
  int64_t stride;
  float since[kTokens];  // what remains of the rows before
  const float* before;   // or null
  float* after;
  int64_t n, count;

  template <int Vectors>
  QUIRE_INLINE void columns(int64_t i) const {
    F sums[kTokens][Vectors]{};
    for (int64_t r = 0; before && r < count; ++r)
      for (int v = 0; v < Vectors; ++v) {
        const int64_t first = i + v * kLanes;
        sums[r][v] = since[r] * load_some(before + r * n + first, n - first);
      }
    for (int64_t s = 0; s < kDeltaChunk; ++s)
      for (int v = 0; v < Vectors; ++v) {
        const F one = load(u + s * stride + i + v * kLanes);
        for (int r = 0; r < kTokens; ++r)  // beyond the last row there are zeros, which are not stored
          sums[r][v] = fma(splat(keys[s * key_stride + r]), one, sums[r][v]);
      }
    for (int64_t r = 0; r < count; ++r)
      for (int v = 0; v < Vectors; ++v) {
        const int64_t first = i + v * kLanes;
        store_some(after + r * n + first, sums[r][v], n - first);
      }
  }
};

// Computes the state of a head at the end of a chunk; `since` of a row tells what remains of it.
template <typename Since>
QUIRE_INLINE void finish_rows(const DeltaPiece& piece, int64_t head, const float* keys, const float* u,
                              const Since& since) {
  const DeltaShape& shape = piece.shape;
  const int64_t n = shape.value_dim, size = shape.key_dim * n;
  const float* before = piece.before ? piece.before + head * size : nullptr;
  float* after = piece.after + head * size;
  for (int64_t row = 0; row < shape.key_dim; row += kTokens) {
    const Rows rows{keys + row,
                    shape.key_stride(),
                    u,
                    shape.value_stride(),
                    {since(row), since(row + 1), since(row + 2), since(row + 3)},
                    before ? before + row * n : nullptr,
                    after + row * n,
                    n,
                    least(kTokens, shape.key_dim - row)};
    int64_t i = 0;
    for (; i + 2 * kLanes <= n; i += 2 * kLanes) rows.columns<2>(i);
    for (; i < n; i += kLanes) rows.columns<1>(i);
  }
}

void finish(const DeltaPiece& piece, int64_t head, float* fallen_u) {
  const int64_t stride = piece.shape.value_stride();
  const float* totals = piece.totals + head * kDeltaChunk;
  const float* u = piece.u + head * kDeltaChunk * stride;
  const float total = totals[kDeltaChunk - 1];
  float fallen[kDeltaChunk];
  for (int64_t s = 0; s < kDeltaChunk; s += kLanes) store(fallen + s, exp(splat(total) - load(totals + s)));
  for (int64_t s = 0; s < kDeltaChunk; ++s)
    for (int64_t i = 0; i < stride; i += kLanes)
      store(fallen_u + s * stride + i, load(u + s * stride + i) * fallen[s]);
  const float since = exp(splat(total))[0];
  finish_rows(piece, head, piece.keys, fallen_u, [=](int64_t) { return since; });
}

void finish_by_channel(const DeltaPiece& piece, int64_t head, float* fallen_keys) {
  const DeltaShape& shape = piece.shape;
  const int64_t stride = shape.key_stride();
  const float* totals = piece.totals + head * kDeltaChunk * stride;
  const float* last = totals + (kDeltaChunk - 1) * stride;
  for (int64_t s = 0; s < kDeltaChunk; ++s)
    fall(piece.keys + s * stride, last, totals + s * stride, stride, fallen_keys + s * stride);
  const float* u = piece.u + head * kDeltaChunk * shape.value_stride();
  const auto since = [=](int64_t row) { return exp_negative(splat(last[row]))[0]; };
  finish_rows(piece, head, fallen_keys, u, since);
}

}  // namespace

void apply_delta_rule(const DeltaPiece& piece) {
  const DeltaShape& shape = piece.shape;
  const int64_t keys = shape.key_stride(), values = shape.value_stride();
  const float root = 1.0f / __builtin_sqrtf((float)shape.key_dim);
  // Keys and queries of kTokens positions in turn; their products with a state; u of a chunk. By channel also
  // those keys and queries, and later the keys of a chunk, after they fell.
  float *pairs = piece.scratch, *from_state = pairs + 2 * kTokens * keys;
  float *fallen_u = from_state, *fallen_keys = from_state + kDeltaChunk * values;
  for (int64_t first = 0; first < piece.count; first += kTokens) {
    const int64_t tokens = least(kTokens, piece.count - first);
    Position of[kTokens];
    for (int64_t t = 0; t < tokens; ++t) {
      const int64_t at = piece.place + first + t, input = (first + t) * piece.key_width;
      float *key = pairs + 2 * t * keys, *query = key + keys;
      unit(piece.new_keys + input, shape.key_dim, 1.0f, key);
      unit(piece.queries + input, shape.key_dim, root, query);
      __builtin_memcpy(piece.keys + at * keys, key, (size_t)keys * sizeof(float));
      for (int64_t s = 0; s <= at && !shape.by_channel; s += kLanes) {
        store(of[t].products[0] + s, dots(key, piece.keys + s * keys, keys));
        store(of[t].products[1] + s, dots(query, piece.keys + s * keys, keys));
      }
      for (int w = 0; w < 2; ++w)
        of[t].from_state[w] = piece.before ? from_state + (2 * t + w) * values : nullptr;
    }
    for (int64_t head = 0; head < shape.heads; ++head) {
      const float* asked = pairs;
      if (shape.by_channel) {
        add_decays(piece, head, first, tokens);
        const float* totals = piece.totals + (head * kDeltaChunk + piece.place + first) * keys;
        for (int64_t i = 0; piece.before && i < 2 * tokens; ++i)
          fall(pairs + i * keys, totals + i / 2 * keys, nullptr, keys, fallen_keys + i * keys);
        asked = fallen_keys;
      }
      if (piece.before) {
        const float* state = piece.before + head * shape.key_dim * shape.value_dim;
        if (tokens == kTokens) {
          multiply_state<2 * kTokens>(asked, keys, state, shape.key_dim, shape.value_dim, from_state, values);
        } else {
          for (int64_t t = 0; t < tokens; ++t)
            multiply_state<2>(asked + 2 * t * keys, keys, state, shape.key_dim, shape.value_dim,
                              from_state + 2 * t * values, values);
        }
      }
      for (int64_t t = 0; t < tokens; ++t) {
        if (shape.by_channel)
          step_by_channel(piece, head, first + t, pairs + 2 * t * keys, of[t]);
        else
          step(piece, head, first + t, of[t]);
      }
    }
  }
  if (!piece.after || piece.place + piece.count < kDeltaChunk) return;
  for (int64_t head = 0; head < shape.heads; ++head) {
    if (shape.by_channel)
      finish_by_channel(piece, head, fallen_keys);
    else
      finish(piece, head, fallen_u);
  }
}

}  // namespace quire::QUIRE_ISA
