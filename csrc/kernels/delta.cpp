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

// Computes u and the output of one position of a head.
void step(const DeltaPiece& piece, int64_t head, int64_t token, const Position& of) {
  const DeltaShape& shape = piece.shape;
  const int64_t at = piece.place + token, stride = shape.value_stride(), n = shape.value_dim;
  float* totals = piece.totals + head * kDeltaChunk;
  float* u = piece.u + head * kDeltaChunk * stride;
  const float total = piece.decays[token * piece.gates + head] + (at > 0 ? totals[at - 1] : 0.0f);
  totals[at] = total;
  float weights[2][kDeltaChunk];
  for (int64_t s = 0; s <= at; s += kLanes) {
    const F fallen = exp(splat(total) - load(totals + s));
    for (int w = 0; w < 2; ++w) store(weights[w] + s, load(of.products[w] + s) * fallen);
  }
  const F since = exp(splat(total));
  const float beta = piece.betas[token * piece.gates + head];
  const float* value = piece.values + token * piece.width + head * n;
  float* out = piece.out + token * piece.out_width + head * n;
  const Sums sums{weights[0], weights[1], u, stride, at, since, of.from_state[0], of.from_state[1]};
  int64_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes) sums.columns<4>(beta, value, out, n, i);
  for (; i < n; i += kLanes) sums.columns<1>(beta, value, out, n, i);
}

// Rows of a state at the end of a chunk, at most kTokens.
struct Rows {
  const float* keys;
  int64_t key_stride;
  const float* u;  // each multiplied by what has fallen since
  int64_t stride;
  F since;
  const float* before;  // or null
  float* after;
  int64_t n, count;

  template <int Vectors>
  QUIRE_INLINE void columns(int64_t i) const {
    F sums[kTokens][Vectors]{};
    for (int64_t r = 0; before && r < count; ++r)
      for (int v = 0; v < Vectors; ++v) {
        const int64_t first = i + v * kLanes;
        sums[r][v] = since * load_some(before + r * n + first, n - first);
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

// Computes the states at the end of a chunk.
void finish(const DeltaPiece& piece, int64_t head, float* fallen_u) {
  const DeltaShape& shape = piece.shape;
  const int64_t stride = shape.value_stride(), n = shape.value_dim, keys = shape.key_stride();
  const float* totals = piece.totals + head * kDeltaChunk;
  const float* u = piece.u + head * kDeltaChunk * stride;
  const float total = totals[kDeltaChunk - 1];
  float fallen[kDeltaChunk];
  for (int64_t s = 0; s < kDeltaChunk; s += kLanes) store(fallen + s, exp(splat(total) - load(totals + s)));
  for (int64_t s = 0; s < kDeltaChunk; ++s)
    for (int64_t i = 0; i < stride; i += kLanes)
      store(fallen_u + s * stride + i, load(u + s * stride + i) * fallen[s]);
  const F since = exp(splat(total));
  const int64_t size = shape.key_dim * n;
  const float* before = piece.before ? piece.before + head * size : nullptr;
  float* after = piece.after + head * size;
  for (int64_t row = 0; row < shape.key_dim; row += kTokens) {
    const Rows rows{piece.keys + row, keys,  fallen_u,
                    stride,           since, before ? before + row * n : nullptr,
                    after + row * n,  n,     least(kTokens, shape.key_dim - row)};
    int64_t i = 0;
    for (; i + 2 * kLanes <= n; i += 2 * kLanes) rows.columns<2>(i);
    for (; i < n; i += kLanes) rows.columns<1>(i);
  }
}

}  // namespace

void apply_delta_rule(const DeltaPiece& piece) {
  const DeltaShape& shape = piece.shape;
  const int64_t keys = shape.key_stride(), values = shape.value_stride();
  const float root = 1.0f / __builtin_sqrtf((float)shape.key_dim);
  // Keys and queries of kTokens positions in turn; their products with a state; u of a chunk.
  float *pairs = piece.scratch, *from_state = pairs + 2 * kTokens * keys;
  float* fallen_u = from_state;
  for (int64_t first = 0; first < piece.count; first += kTokens) {
    const int64_t tokens = least(kTokens, piece.count - first);
    Position of[kTokens];
    for (int64_t t = 0; t < tokens; ++t) {
      const int64_t at = piece.place + first + t, input = (first + t) * piece.width;
      float *key = pairs + 2 * t * keys, *query = key + keys;
      unit(piece.new_keys + input, shape.key_dim, 1.0f, key);
      unit(piece.queries + input, shape.key_dim, root, query);
      __builtin_memcpy(piece.keys + at * keys, key, (size_t)keys * sizeof(float));
      for (int64_t s = 0; s <= at; s += kLanes) {
        store(of[t].products[0] + s, dots(key, piece.keys + s * keys, keys));
        store(of[t].products[1] + s, dots(query, piece.keys + s * keys, keys));
      }
      for (int w = 0; w < 2; ++w)
        of[t].from_state[w] = piece.before ? from_state + (2 * t + w) * values : nullptr;
    }
    for (int64_t head = 0; head < shape.heads; ++head) {
      if (piece.before) {
        const float* state = piece.before + head * shape.key_dim * shape.value_dim;
        if (tokens == kTokens) {
          multiply_state<2 * kTokens>(pairs, keys, state, shape.key_dim, shape.value_dim, from_state, values);
        } else {
          for (int64_t t = 0; t < tokens; ++t)
            multiply_state<2>(pairs + 2 * t * keys, keys, state, shape.key_dim, shape.value_dim,
                              from_state + 2 * t * values, values);
        }
      }
      for (int64_t t = 0; t < tokens; ++t) step(piece, head, first + t, of[t]);
    }
  }
  if (piece.after && piece.place + piece.count == kDeltaChunk)
    for (int64_t head = 0; head < shape.heads; ++head) finish(piece, head, fallen_u);
}

}  // namespace quire::QUIRE_ISA
