// Packing of activations for products, in tiles of eight rows (kernels.h).

#include "interleave.h"
#include "packed_rows.h"
#include "table.h"
#include "tile.h"

namespace quire::QUIRE_ISA {

namespace {

void pack_f32(const float* x, int64_t stride, int64_t m_rows, int64_t inputs, uint8_t* out) {
  float* to = (float*)out;
  for (int64_t k = 0; k < inputs; ++k)
    for (int64_t m = 0; m < m_rows; ++m) to[k * m_rows + m] = x[m * stride + k];
}

// Contiguous rows, padded with zeros, as AMX takes them.
void pack_bf16_rows(const float* x, int64_t stride, int64_t m_rows, int64_t inputs, uint8_t* out) {
  const int64_t bytes = PackedActivations::row_bytes(ActivationFormat::bf16, inputs);
  for (int64_t m = 0; m < m_rows; ++m)
    for (int64_t k = 0; k < bytes / 2; k += kLanes)
      store_as(out + m * bytes + k * 2,
               to_bf16(k < inputs ? load_some(x + m * stride + k, inputs - k) : F{}));
}

void pack_bf16_pairs(const float* x, int64_t stride, int64_t m_rows, int64_t inputs, uint8_t* out) {
  uint32_t* to = (uint32_t*)out;
  for (int64_t k = 0; k < round_up(inputs, kGroup); k += kLanes) {
    for (int64_t m = 0; m < m_rows; ++m) {
      uint32_t pairs[kLanes / 2]{};
      if (k < inputs) store_as(pairs, to_bf16(load_some(x + m * stride + k, inputs - k)));
      for (int64_t i = 0; i < kLanes / 2; ++i) to[(k / 2 + i) * m_rows + m] = pairs[i];
    }
  }
}

// The parts of a tile of quantized activations.
template <bool Int4, int Rows>
class QuantizedRows {
 public:
  QUIRE_INLINE QuantizedRows(int64_t inputs, uint8_t* out)
      : groups_(ceil_div(inputs, kGroup)),
        quads_((int32_t*)out),
        begin_(quads_ + groups_ * (kGroup / 4) * Rows),
        block_scales_((int16_t*)(begin_ + groups_ * Rows)),
        scales_((float*)(begin_ + groups_ * Rows) + (Int4 ? 0 : ceil_div(groups_, 2) * Rows)) {}

  // Packs at most 128 numbers of every row, from group `first` on.
  QUIRE_INLINE void pack_span(const float* x, int64_t stride, int64_t count, int64_t first) const {
    constexpr float kSteps = Int4 ? 127.0f : 127.0f * 127.0f;
    constexpr int64_t kMeasured = Int4 ? kSpan : kGroup;  // inputs whose largest magnitude is needed
    int32_t tops[kSpan / kMeasured][kTile]{}, top[kTile]{};
    for (int64_t k = 0; k < count; k += kMeasured) {
      int32_t* const own = tops[k / kMeasured];
      magnitudes<Rows>(x + k, stride, count - k < kMeasured ? count - k : kMeasured, own);
      for (int m = 0; m < Rows; ++m) top[m] = own[m] > top[m] ? own[m] : top[m];
    }
    float inverses[kTile];
    for (int m = 0; m < Rows; ++m) {
      const Steps steps = steps_of(top[m], kSteps);
      inverses[m] = steps.factor;
      scales_[first / (kSpan / kGroup) * Rows + m] = steps.scale * (Int4 ? 1.0f : 16.0f);
    }
    for (int64_t i = 0; i * kGroup < count; ++i) {
      const int64_t rest = count - i * kGroup;
      pack_group(x + i * kGroup, stride, rest < kGroup ? rest : kGroup, inverses,
                 Int4 ? nullptr : tops[Int4 ? 0 : i], first + i);
    }
  }

 private:
  // Returns the smallest block scale that a group needs.
  QUIRE_INLINE static float block_scale_of(float top, float inverse) {
    const float block_scale = __builtin_ceilf(top * (inverse / 127.0f));
    return block_scale > 127.0f ? 127.0f : block_scale;  // the division may have been rounded up
  }

  // Packs a group of each row, with the largest magnitudes `tops` where groups have block scales.
  QUIRE_INLINE void pack_group(const float* x, int64_t stride, int64_t count, const float* inverses,
                               const int32_t* tops, int64_t group) const {
    float factors[kTile];
    for (int m = 0; m < Rows; ++m) factors[m] = inverses[m];
    if constexpr (!Int4) {
      float block_scales[kTile];
      for (int m = 0; m < Rows; ++m) {
        const float scale = block_scale_of(__builtin_bit_cast(float, tops[m]), inverses[m]);
        block_scales[m] = inverses[m] > 0 ? scale : 0.0f;
        factors[m] = block_scales[m] > 0 ? inverses[m] / block_scales[m] : 0.0f;
      }
      for (int m = 0; m < Rows; ++m) block_scale_at(group, m) = (int16_t)block_scales[m];
    }
    GroupSums sums;
    quantize_rows<Rows, kPairsOfQuads>(x, stride, count, factors, quads_ + group * kGroupWords * Rows, sums);
    for (int m = 0; m < Rows; ++m)
      begin_[group * Rows + m] = (Int4 ? -8 : -128) * sums.total(m) + begin_of_group<Int4>(group, Rows);
  }

  int16_t& block_scale_at(int64_t group, int64_t m) const {
    return block_scales_[(group / 2 * Rows + m) * 2 + 1 - group % 2];
  }

  const int64_t groups_;
  int32_t *const quads_, *const begin_;
  int16_t* const block_scales_;
  float* const scales_;
};

// `x` are rows of one tile. Packs a span of every row, then the next span: rows are interleaved, so a cache
// line of the tile is filled while it is cached.
template <bool Int4, int Rows>
void pack_quantized(const float* x, int64_t stride, int64_t inputs, uint8_t* out) {
  const QuantizedRows<Int4, Rows> rows(inputs, out);
  for (int64_t k = 0; k < inputs; k += kSpan)
    rows.pack_span(x + k, stride, inputs - k < kSpan ? inputs - k : kSpan, k / kGroup);
}

using PackQuantized = void (*)(const float*, int64_t, int64_t, uint8_t*);
template <bool Int4>
constexpr PackQuantized kPackQuantized[kTile] = {
    pack_quantized<Int4, 1>, pack_quantized<Int4, 2>, pack_quantized<Int4, 3>, pack_quantized<Int4, 4>,
    pack_quantized<Int4, 5>, pack_quantized<Int4, 6>, pack_quantized<Int4, 7>, pack_quantized<Int4, 8>};

ActivationFormat activations_of(const Coding& coding) {
#if defined(__AVX512BF16__)
  constexpr ActivationFormat kFloats = ActivationFormat::bf16_pairs;
#else
  constexpr ActivationFormat kFloats = ActivationFormat::f32;
#endif
  switch (coding.meaning) {
    case Meaning::rows:
      return ActivationFormat::rows;
    case Meaning::e4m3:
    case Meaning::e5m2:
      return kFloats;
    case Meaning::floats:
      return ActivationFormat::f32;
    default:
      return coding.span() == kSpan ? ActivationFormat::spans_128 : ActivationFormat::spans_32;
  }
}

}  // namespace

ActivationFormat activation_format(const Panels& weight) {
  switch (weight.format) {
    case Format::coded:
      return activations_of(weight.coding);
    case Format::int8:
      return ActivationFormat::for_int8;
    case Format::int4:
      return ActivationFormat::for_int4;
#if defined(__AVX512BF16__)
    case Format::bf16:
      return ActivationFormat::bf16;
#endif
    default:
      return ActivationFormat::f32;
  }
}

void pack_activations(const PackedActivations& packed, const float* x, int64_t stride, int64_t tile) {
  const int64_t m_rows = packed.tile_rows(tile);
  const float* from = x + tile * kTile * stride;
  uint8_t* to = packed.tile(tile);
  switch (packed.format) {
    case ActivationFormat::f32:
      return pack_f32(from, stride, m_rows, packed.inputs, to);
    case ActivationFormat::bf16:
      if constexpr (kByRow) return pack_bf16_rows(from, stride, m_rows, packed.inputs, to);
      return pack_bf16_pairs(from, stride, m_rows, packed.inputs, to);
    case ActivationFormat::bf16_pairs:
      return pack_bf16_pairs(from, stride, m_rows, packed.inputs, to);
    case ActivationFormat::rows:
      return pack_rows(from, stride, m_rows, packed.inputs, to);
    case ActivationFormat::for_int8:
      return kPackQuantized<false>[m_rows - 1](from, stride, packed.inputs, to);
    case ActivationFormat::for_int4:
      return kPackQuantized<true>[m_rows - 1](from, stride, packed.inputs, to);
    case ActivationFormat::spans_128:
    case ActivationFormat::spans_32:
      return pack_spans(from, stride, m_rows, packed.inputs, PackedActivations::span_of(packed.format), to);
  }
}

}  // namespace quire::QUIRE_ISA
