// Mamba-2's state space.

#include "state_space.h"

#include "functions.h"
#include "kv.h"
#include "table.h"

namespace quire::QUIRE_ISA {

namespace {

constexpr int64_t kTokens = 4;  // computed together, so that a state is read once for them

QUIRE_INLINE int64_t padded(int64_t dim) { return (dim + kLanes - 1) / kLanes * kLanes; }

// Loads a vector of several, which are whole, or of the last numbers.
template <int Vectors>
QUIRE_INLINE F load_of(const float* from, int64_t count) {
  return Vectors > 1 ? load(from) : load_some(from, count);
}

// Returns the dot products of x with sixteen vectors from number `first` on, at most number `last`.
QUIRE_INLINE F dots(const float* x, const float* const* vectors, int64_t first, int64_t last, int64_t dim) {
  F sums[kLanes]{};
  for (int64_t i = 0; i < dim; i += kLanes) {
    const F v = load_some(x + i, dim - i);
    for (int s = 0; s < kLanes; ++s)
      sums[s] = fma(v, load_some(vectors[least(first + s, last)] + i, dim - i), sums[s]);
  }
  return sum_each(sums);
}

// out[t] = sum over i of c[t, i] * state[i], of some columns.
template <int Tokens, int Vectors>
QUIRE_INLINE void multiply_columns(const float* c, int64_t stride, const float* state,
                                   const SpaceShape& shape, int64_t column, float* out) {
  F sums[Tokens][Vectors]{};
  for (int64_t i = 0; i < shape.state_dim; ++i) {
    F row[Vectors];
    for (int v = 0; v < Vectors; ++v) {
      const int64_t at = column + v * kLanes;
      row[v] = load_of<Vectors>(state + i * shape.dim + at, shape.dim - at);
    }
    for (int t = 0; t < Tokens; ++t)
      for (int v = 0; v < Vectors; ++v) sums[t][v] = fma(splat(c[t * stride + i]), row[v], sums[t][v]);
  }
  for (int t = 0; t < Tokens; ++t)
    for (int v = 0; v < Vectors; ++v) store(out + t * padded(shape.dim) + column + v * kLanes, sums[t][v]);
}

template <int Tokens>
void multiply_state(const float* c, int64_t stride, const float* state, const SpaceShape& shape, float* out) {
  int64_t column = 0;
  for (; column + 2 * kLanes <= shape.dim; column += 2 * kLanes)
    multiply_columns<Tokens, 2>(c, stride, state, shape, column, out);
  for (; column < shape.dim; column += kLanes)
    multiply_columns<Tokens, 1>(c, stride, state, shape, column, out);
}

// One position of a head.
struct Position {
  const SpacePiece& piece;
  int64_t head, token, at;
  const float* weights;     // of u of the positions up to this one
  F since;                  // what is left of the state
  const float* from_state;  // its product with C; null: zeros

  template <int Vectors>
  QUIRE_INLINE void columns(int64_t i) const {
    const int64_t dim = piece.shape.dim, n = dim - i, first = head * dim + i;
    F sums[Vectors]{};
    for (int v = 0; from_state && v < Vectors; ++v) sums[v] = since * load(from_state + i + v * kLanes);
    for (int64_t s = 0; s < at; ++s)
      for (int v = 0; v < Vectors; ++v)
        sums[v] = fma(splat(weights[s]), load_of<Vectors>(piece.u[s] + first + v * kLanes, n), sums[v]);
    for (int v = 0; v < Vectors; ++v) {
      const int64_t channel = first + v * kLanes;
      const F x = load_of<Vectors>(piece.x + token * piece.width + channel, n);
      const F own = piece.steps[token * piece.shape.heads + head] * x;
      store_some(piece.new_u + token * piece.shape.heads * dim + channel, own, n - v * kLanes);
      const F out = fma(splat(piece.skip[head]), x, fma(splat(weights[at]), own, sums[v]));
      store_some(piece.out + token * piece.out_width + channel, out, n - v * kLanes);
    }
  }
};

void step(const SpacePiece& piece, int64_t head, int64_t token, const float* products,
          const float* from_state) {
  const int64_t at = piece.place + token, dim = piece.shape.dim;
  float* totals = piece.totals + head * kSpaceChunk;
  const float total = piece.decays[token * piece.shape.heads + head] + (at > 0 ? totals[at - 1] : 0.0f);
  totals[at] = total;
  float weights[kSpaceChunk];
  for (int64_t s = 0; s <= at; s += kLanes)
    store(weights + s, load(products + s) * exp(splat(total) - load(totals + s)));
  const Position position{piece, head, token, at, weights, exp(splat(total)), from_state};
  int64_t i = 0;
  for (; i + 4 * kLanes <= dim; i += 4 * kLanes) position.columns<4>(i);
  for (; i < dim; i += kLanes) position.columns<1>(i);
}

// Some columns of `Rows` rows of a state at the end of a chunk.
template <int Rows, int Vectors>
QUIRE_INLINE void finish_columns(const SpacePiece& piece, int64_t row, const float* fallen_u, F since,
                                 const float* before, float* after, int64_t i) {
  const int64_t dim = piece.shape.dim, stride = padded(dim), n = dim - i;
  F sums[Rows][Vectors]{};
  for (int r = 0; before && r < Rows; ++r)
    for (int v = 0; v < Vectors; ++v)
      sums[r][v] = since * load_of<Vectors>(before + (row + r) * dim + i + v * kLanes, n);
  for (int64_t s = 0; s < kSpaceChunk; ++s)
    for (int v = 0; v < Vectors; ++v) {
      const F one = load(fallen_u + s * stride + i + v * kLanes);
      for (int r = 0; r < Rows; ++r) sums[r][v] = fma(splat(piece.b[s][row + r]), one, sums[r][v]);
    }
  for (int r = 0; r < Rows; ++r)
    for (int v = 0; v < Vectors; ++v)
      store_some(after + (row + r) * dim + i + v * kLanes, sums[r][v], n - v * kLanes);
}

template <int Rows>
void finish_rows(const SpacePiece& piece, int64_t row, const float* fallen_u, F since, const float* before,
                 float* after) {
  int64_t i = 0;
  for (; i + 2 * kLanes <= piece.shape.dim; i += 2 * kLanes)
    finish_columns<Rows, 2>(piece, row, fallen_u, since, before, after, i);
  for (; i < piece.shape.dim; i += kLanes)
    finish_columns<Rows, 1>(piece, row, fallen_u, since, before, after, i);
}

// Computes the state of a head at the end of a chunk.
void finish(const SpacePiece& piece, int64_t head, float* fallen_u) {
  const SpaceShape& shape = piece.shape;
  const float* totals = piece.totals + head * kSpaceChunk;
  const F total = splat(totals[kSpaceChunk - 1]);
  for (int64_t s = 0; s < kSpaceChunk; ++s) {
    const F fallen = exp(total - splat(totals[s]));
    for (int64_t i = 0; i < shape.dim; i += kLanes)
      store(fallen_u + s * padded(shape.dim) + i,
            load_some(piece.u[s] + head * shape.dim + i, shape.dim - i) * fallen);
  }
  const F since = exp(total);
  const int64_t size = shape.state_dim * shape.dim;
  const float* before = piece.before ? piece.before + head * size : nullptr;
  float* after = piece.after + head * size;
  int64_t row = 0;
  for (; row + kTokens <= shape.state_dim; row += kTokens)
    finish_rows<kTokens>(piece, row, fallen_u, since, before, after);
  for (; row < shape.state_dim; ++row) finish_rows<1>(piece, row, fallen_u, since, before, after);
}

}  // namespace

void apply_state_space(const SpacePiece& piece) {
  const SpaceShape& shape = piece.shape;
  for (int64_t first = 0; first < piece.count; first += kTokens) {
    const int64_t tokens = least(kTokens, piece.count - first);
    const float* c = piece.c + first * piece.width;
    float products[kTokens][kSpaceChunk];
    for (int64_t t = 0; t < tokens; ++t) {
      const int64_t at = piece.place + first + t;
      for (int64_t s = 0; s <= at; s += kLanes)
        store(products[t] + s, dots(c + t * piece.width, piece.b, s, at, shape.state_dim));
    }
    for (int64_t head = 0; head < shape.heads; ++head) {
      const float* state = piece.before ? piece.before + head * shape.state_dim * shape.dim : nullptr;
      const int64_t stride = padded(shape.dim);
      if (state && tokens == kTokens) {
        multiply_state<kTokens>(c, piece.width, state, shape, piece.scratch);
      } else if (state) {
        for (int64_t t = 0; t < tokens; ++t)
          multiply_state<1>(c + t * piece.width, piece.width, state, shape, piece.scratch + t * stride);
      }
      for (int64_t t = 0; t < tokens; ++t)
        step(piece, head, first + t, products[t], state ? piece.scratch + t * stride : nullptr);
    }
  }
  if (piece.after)
    for (int64_t head = 0; head < shape.heads; ++head) finish(piece, head, piece.scratch);
}

}  // namespace quire::QUIRE_ISA
