// The interface of kernels: their data layouts, and the table of functions of an instruction set.
//
// Nothing here depends on an instruction set. Each fills one Kernels table from the same sources.
#pragma once

#include <cstddef>
#include <cstdint>

#include "coding.h"

namespace quire {

// Changes with the layout of Panels: part of the key of packed weights on disk.
constexpr int kPackingVersion = 3;

constexpr int kPanel = 16;  // outputs in a panel of a packed matrix
constexpr int kTile = 8;    // rows of activations multiplied together
constexpr int kGroup = 32;  // inputs that share an 8-bit block scale

QUIRE_INLINE constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
QUIRE_INLINE constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

// The format of the values of a packed matrix.
enum class Format : int32_t { f32, f16, bf16, int8, int4, coded };

// A matrix [outputs, inputs] in panels of 16 outputs, the last one padded with zeros.
//
//   f32, f16   [panel][input][16]
//   bf16       [panel][pair of inputs][16][2]
//   int8       [panel][4 inputs][16][4], unsigned: q + 128; inputs padded to whole groups of 32
//   int4       [panel][8 inputs][16][4]: of 4 bytes, the low halves are inputs 0..3 and the high ones 4..7,
//              unsigned: q + 8
//   coded      codes and scales of other formats: coding.h
//
// A weight of int8 or int4 is channels[output] * block_scales[group of inputs][output] * q.
struct Panels {
  Format format;
  Coding coding;  // coded only
  int64_t outputs, inputs;
  const uint8_t* values;
  const int8_t* block_scales;  // [panel][group][16], int8 and int4 only
  const float* channels;       // [panel][16], int8 and int4 only
  const int32_t* order;        // [inputs]: input k of a row is activation order[k]; null: k. coded only
  const float* table;          // [16]: the numbers of Meaning::floats

  QUIRE_INLINE int64_t panels() const { return ceil_div(outputs, kPanel); }
  QUIRE_INLINE int64_t groups() const { return ceil_div(inputs, kGroup); }
  QUIRE_INLINE bool quantized() const { return format == Format::int8 || format == Format::int4; }
  // Bytes of values of one panel.
  QUIRE_INLINE int64_t panel_bytes() const {
    switch (format) {
      case Format::f32:
        return inputs * 64;
      case Format::f16:
        return inputs * 32;
      case Format::bf16:
        return ceil_div(inputs, 2) * 64;
      case Format::int8:
        return groups() * kGroup * kPanel;
      case Format::int4:
        return groups() * kGroup * kPanel / 2;
      case Format::coded:
        return coding.panel_bytes(inputs);
    }
    return 0;
  }
};

// The place of an 8-bit float in a unit: one instruction takes each half of 64 codes apart into pairs of
// inputs.
QUIRE_INLINE constexpr int64_t float8_place(int64_t input, int64_t output) {
  return input / 4 * 64 + output / 4 * 16 + input / 2 % 2 * 8 + output % 4 * 2 + input % 2;
}

// The layout of activations packed for a product, in tiles of 8 rows (the last with M <= 8 rows):
//
//   f32          [input][M]
//   bf16         [pair of inputs][M][2]; with AMX rows [M][inputs], padded with zeros
//   bf16_pairs   [pair of inputs][M][2], padded with zeros: for 8-bit floats
//   rows         int8 [4 inputs][M][4]; int32 [M]: initial values of the sums; f32 [M]: scales. For W8A8;
//                with AMX each row by itself, 64-byte aligned
//   for_int8/4   int8 [4 inputs][M][4], on ARM [8 inputs][M][8];
//                int32 [group of 32][M]: initial values of the accumulators of a group
//                (minus the zero point of the weights times the sum of the row's values, plus a constant that
//                saves the kernel an instruction); for_int8 also int16 [two groups][M][2]: block scales, that
//                of the first group last; f32 [span][M]: scales
//
//   spans_128/32 int8 [4 inputs][M][4]; int32 [n inputs][M] for n = 16, 32, 64, 128: minus the sums of n
//                values; f32 [span of 128 or 32][M]: scales. For coded weights of few bits, and of more
//
// For int4 weights an activation is scale * q; for int8 weights, whose own error is small, scale * block
// scale * q, with a block scale of 0 to 127 per group.
enum class ActivationFormat : int32_t {
  f32,
  bf16,
  for_int8,
  for_int4,
  spans_128,
  spans_32,
  rows,
  bf16_pairs
};

constexpr int kSpan = 128;  // inputs of a quantized activation that share a float32 scale

// The sums of a row of spans_128 and spans_32: those of 16, 32, 64 and 128 inputs.
QUIRE_INLINE constexpr int64_t sums_before(int64_t of, int64_t inputs) {
  int64_t count = 0;
  for (int64_t n = 16; n < of; n *= 2) count += ceil_div(round_up(inputs, kGroup), n);
  return count;
}

struct PackedActivations {
  ActivationFormat format;
  int64_t rows, inputs;
  uint8_t* data;

  QUIRE_INLINE int64_t tiles() const { return ceil_div(rows, kTile); }
  QUIRE_INLINE int64_t tile_rows(int64_t tile) const {
    return rows - tile * kTile < kTile ? rows - tile * kTile : kTile;
  }
  QUIRE_INLINE static int64_t row_bytes(ActivationFormat format, int64_t inputs) {
    const int64_t padded = round_up(inputs, kGroup);
    if (format == ActivationFormat::f32) return padded * 4;
    if (format == ActivationFormat::bf16 || format == ActivationFormat::bf16_pairs) return padded * 2;
    if (format == ActivationFormat::rows) return round_up(padded + 8, 64);
    if (format == ActivationFormat::spans_128 || format == ActivationFormat::spans_32)
      return padded + 4 * (sums_before(256, inputs) + ceil_div(padded, span_of(format)));
    const int64_t block_scales = format == ActivationFormat::for_int8 ? ceil_div(padded, 2 * kGroup) * 4 : 0;
    return padded + padded / kGroup * 4 + block_scales + ceil_div(padded, kSpan) * 4;
  }
  QUIRE_INLINE static int64_t span_of(ActivationFormat format) {
    return format == ActivationFormat::spans_32 ? kGroup : kSpan;
  }
  QUIRE_INLINE uint8_t* tile(int64_t t) const { return data + t * kTile * row_bytes(format, inputs); }
};

enum class Activation : int32_t { none, silu, gelu, gelu_tanh, relu, relu2, sigmoid, tanh };

// A product of activations with one matrix: out = act(x weight^T + bias), or, with `up`,
// out = act(x weight^T) * (x up^T). out is [rows, stride].
struct Product {
  Panels weight;
  const Panels* up;
  const float* bias;  // [outputs] or null
  Activation activation;
  float* out;
  int64_t stride;
};

// A norm over the last axis: x / sqrt(mean(x^2) + eps) * (weight + offset), or LayerNorm when `centered`.
struct Norm {
  const float* weight;
  const float* bias;  // or null
  int64_t width;
  float eps, offset;
  bool centered;
};

// The layout of cached keys and values: keys [block][head][dim][block_size], values
// [block][head][block_size][dim]; int8 has a scale per token and head, [block][head][block_size], for keys
// and for values. Layers of one shape share an array in which a block of all layers is contiguous, so blocks
// of a layer are `stride` heads apart. So the first use of a block touches few pages of memory.
//
// A latent cache has no separate keys: one vector of a token, [block][block_size][dim], is the key of all
// heads, and its first `value_dim` numbers are their value. int8 has one scale for these, and one for the
// rest, if there is any. It may be an entry of several tokens, in the block of the last.
enum class KVFormat : int32_t { f32, f16, bf16, int8 };

struct KVLayer {
  KVFormat format;
  int64_t heads, dim, value_dim, block_size, stride;
  uint8_t *keys, *values;
  float *key_scales, *value_scales;  // int8 only
  bool latent;                       // one vector of each token, in `values`
  int64_t every = 1;                 // tokens of an entry; of entries block_size is their number in a block
  int64_t apart = 1;                 // blocks of tokens from an entry to the next, if it takes whole blocks

  // Always inlined: shared by kernels of several instruction sets.
  [[gnu::always_inline]] int64_t value_stride() const { return latent ? dim : value_dim; }
  // Returns the place in a block table of the block that has a vector of each token, or an entry.
  [[gnu::always_inline]] int64_t block_of(int64_t vector) const {
    return (vector / block_size + 1) * apart - 1;
  }
};

struct Source;     // packing.h
struct Attention;  // attention.h
struct AttentionUnit;
struct Compression;  // compress.h
struct Convolution;  // states.h
struct Recurrence;
struct DeltaPiece;  // delta.h
struct SpacePiece;  // state_space.h
struct Greatest;    // sampling.h
struct Edits;
struct Choosing;
struct Chosen;

// The functions of one instruction set. Rows of values are float32 and contiguous.
struct Kernels {
  const char* isa;

  ActivationFormat (*activation_format)(const Panels& weight);
  // Pack tile `tile` of activations x [.., stride].
  void (*pack_activations)(const PackedActivations& packed, const float* x, int64_t stride, int64_t tile);
  void (*multiply)(const Product& product, const PackedActivations& packed, int64_t first_panel,
                   int64_t last_panel);

  // Fill panels [first, last) of `to` from a checkpoint's matrix, quantized or unchanged. Returns false if a
  // number is not finite and `to` is quantized. scratch has packing_scratch(inputs) floats.
  bool (*pack_panels)(const Source& source, const Panels& to, int64_t first, int64_t last, const float* tries,
                      int64_t num_tries, float* scratch);

  // out [width] = row `row` of a packed matrix.
  void (*lookup)(const Panels& table, int64_t row, float* out);
  void (*add)(const float* x, const float* y, float* out, int64_t count);
  void (*scale)(const float* x, float factor, float* out, int64_t count);
  void (*soft_cap)(const float* x, float cap, float* out, int64_t count);
  void (*activate)(Activation activation, const float* x, float* out, int64_t count);
  void (*gate)(Activation activation, const float* gate, const float* up, float* out, int64_t count);
  // gpt-oss: g * sigmoid(1.702 g) * (u + 1), with g at most the limit and |u| at most the limit.
  void (*bounded_gate)(float limit, const float* gate, const float* up, float* out, int64_t count);
  void (*norm)(const Norm& norm, const float* x, float* out, int64_t count);  // count vectors of norm.width
  // Rotate the first 2 * pairs numbers of each head of one token, cos and sin [pairs].
  void (*rotate)(const float* x, float* out, const float* cos, const float* sin, int64_t heads, int64_t dim,
                 int64_t pairs, bool interleaved);

  // Write one token's keys and values [heads, dim] to the cache. Of a latent vector, `v` is the first part.
  void (*write_kv)(const KVLayer& cache, int64_t block, int64_t offset, const float* k, const float* v);
  void (*attend)(const Attention& how, const AttentionUnit& unit, float* scratch);
  void (*merge_segments)(const Attention& how, int64_t head, const float* records, int64_t count, float* out);
  // scores [tokens, kSegment] of the first segment of a unit: the sum over heads of factors [tokens, heads]
  // times the product of query and key where it is positive. Those of invisible positions are arbitrary.
  void (*score_segment)(const Attention& how, const AttentionUnit& unit, const float* factors, float* scores,
                        float* scratch);

  // out [dim] = the entry of the tokens up to `position`, by the block table of their sequence.
  void (*compress)(const Compression& how, const int64_t* table, int64_t position, float* out);
  void (*convolve)(const Convolution& of);
  void (*recur)(const Recurrence& of);
  void (*apply_delta_rule)(const DeltaPiece& piece);
  // Store count numbers in this format.
  void (*keep)(KVFormat format, const float* x, uint8_t* to, int64_t count);

  Chosen (*choose)(const float* logits, int64_t count, const Edits& edits, const Choosing& how,
                   void* scratch);
  Greatest (*greatest)(const float* logits, int64_t count);
  double (*exp_sum)(const float* logits, int64_t count, double maximum);
  int64_t (*rank)(const float* logits, int64_t count, int64_t id);
  void (*top_ids)(const float* logits, int64_t count, int64_t k, int64_t* ids, void* scratch);

  void (*apply_state_space)(const SpacePiece& piece);
};

}  // namespace quire
