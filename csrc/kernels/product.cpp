// Matrix products: rows laid out for them, and panels times rows with what follows at once.

#include "activation.h"
#include "table.h"
#include "tile.h"

namespace quire::QUIRE_ISA {

namespace {

// Rows into tiles.

void pack_f32(const float* x, int64_t stride, int64_t m_rows, int64_t inputs, uint8_t* out) {
  float* to = (float*)out;
  for (int64_t k = 0; k < inputs; ++k)
    for (int64_t m = 0; m < m_rows; ++m) to[k * m_rows + m] = x[m * stride + k];
}

void pack_bf16(const float* x, int64_t stride, int64_t m_rows, int64_t inputs, uint8_t* out) {
  uint32_t* to = (uint32_t*)out;
  for (int64_t k = 0; k < inputs; k += kLanes) {
    const int64_t count = inputs - k, words = count < kLanes ? ceil_div(count, 2) : kLanes / 2;
    for (int64_t m = 0; m < m_rows; ++m) {
      uint32_t pairs[kLanes / 2];
      store_as(pairs, to_bf16(load_some(x + m * stride + k, count)));
      for (int64_t i = 0; i < words; ++i) to[(k / 2 + i) * m_rows + m] = pairs[i];
    }
  }
}

// The largest magnitude of a row group as bits: larger than those of any number if one is not finite.
int32_t magnitude(const float* x, int64_t count) {
  I top{};
  for (int64_t k = 0; k < count; k += kLanes) top = max(top, (I)abs(load_some(x + k, count - k)));
  return reduce_max(top);
}

// 32 numbers times `inverse`, to the nearest integers, as the bytes of 8 words; their sum.
int32_t quantize_group(const float* x, int64_t count, float inverse, int32_t* words) {
  const I low = to_int(load_some(x, count) * inverse);
  const I high = count > kLanes ? to_int(load_some(x + kLanes, count - kLanes) * inverse) : I{};
  store_as(words, to_s8(low));
  store_as(words + 4, to_s8(high));
  const I halves = add_halves(low + high);
  return halves[0] + halves[8];
}

// `x` are rows of one tile. A row group is quantized while it is in registers or the nearest cache.
void pack_quantized(const float* x, int64_t stride, int64_t m_rows, int64_t inputs, int32_t zero,
                    int64_t row_group, uint8_t* out) {
  const int64_t groups = ceil_div(inputs, kGroup);
  int32_t* quads = (int32_t*)out;
  int32_t* begin = quads + groups * (kGroup / 4) * m_rows;
  float* scales = (float*)(begin + groups * m_rows);
  for (int64_t first = 0; first < inputs; first += row_group) {
    for (int64_t m = 0; m < m_rows; ++m) {  // rows lie between each other: a line is filled while it is near
      const float* from = x + m * stride + first;
      const int64_t count = inputs - first < row_group ? inputs - first : row_group;
      const int32_t bits = magnitude(from, count);
      float largest;
      __builtin_memcpy(&largest, &bits, 4);
      const bool finite = bits < 0x7f800000;
      const float ratio = 127.0f / largest;  // beyond a float for what is next to nothing, which becomes zero
      const float inverse = finite && ratio <= 3.4028235e38f ? ratio : 0.0f;
      scales[first / row_group * m_rows + m] = finite ? largest / 127.0f : __builtin_nanf("");
      for (int64_t k = 0; k < count; k += kGroup) {
        const int64_t group = (first + k) / kGroup;
        int32_t words[kGroup / 4]{};
        const int32_t sum = finite ? quantize_group(from + k, count - k, inverse, words) : 0;
        for (int i = 0; i < kGroup / 4; ++i) quads[(group * (kGroup / 4) + i) * m_rows + m] = words[i];
        begin[group * m_rows + m] = -zero * sum;
      }
    }
  }
}

// One panel's part of a product for one tile of rows.
template <int M>
void panel_tile(const Product& p, int64_t panel, const uint8_t* x, const Ahead& ahead, int64_t first_row) {
  F out[M];
  tile<M>(p.weight, panel, x, ahead, out);
  const int64_t column = panel * kPanel, count = p.weight.outputs - column;
  if (p.bias) {
    const F bias = load_some(p.bias + column, count);
    for (int m = 0; m < M; ++m) out[m] += bias;
  }
  if (p.activation != Activation::none)
    for (int m = 0; m < M; ++m) out[m] = activate(p.activation, out[m]);
  if (p.up) {
    F up[M];
    tile<M>(*p.up, panel, x, ahead, up);
    for (int m = 0; m < M; ++m) out[m] *= up[m];
  }
  for (int m = 0; m < M; ++m) store_some(p.out + (first_row + m) * p.stride + column, out[m], count);
}

using PanelTile = void (*)(const Product&, int64_t, const uint8_t*, const Ahead&, int64_t);
constexpr PanelTile kPanelTiles[kTile] = {panel_tile<1>, panel_tile<2>, panel_tile<3>, panel_tile<4>,
                                          panel_tile<5>, panel_tile<6>, panel_tile<7>, panel_tile<8>};

}  // namespace

RowFormat row_format(Format weight) {
  switch (weight) {
    case Format::int8:
      return RowFormat::for_int8;
    case Format::int4:
      return RowFormat::for_int4;
#if defined(__AVX512BF16__)
    case Format::bf16:
      return RowFormat::bf16;
#endif
    default:
      return RowFormat::f32;
  }
}

void pack_rows(const Rows& rows, const float* x, int64_t stride, int64_t tile) {
  const int64_t m_rows = rows.tile_rows(tile);
  const float* from = x + tile * kTile * stride;
  uint8_t* to = rows.tile(tile);
  switch (rows.format) {
    case RowFormat::f32:
      return pack_f32(from, stride, m_rows, rows.inputs, to);
    case RowFormat::bf16:
      return pack_bf16(from, stride, m_rows, rows.inputs, to);
    case RowFormat::for_int8:
      return pack_quantized(from, stride, m_rows, rows.inputs, 128, row_group(rows.format), to);
    case RowFormat::for_int4:
      return pack_quantized(from, stride, m_rows, rows.inputs, 8, row_group(rows.format), to);
  }
}

// All rows times panels [first, last). Few tiles pass over a panel that is in the nearest cache, while the
// next one comes from memory. Many tiles, which are too large to be read again for every panel, pass over all
// panels, which stay in the second level cache.
void multiply(const Product& product, const Rows& rows, int64_t first, int64_t last) {
  constexpr int64_t kFewTiles = 4;
  const int64_t tiles = rows.tiles(), bytes = product.weight.panel_bytes();
  const bool few = tiles <= kFewTiles;
  const auto run = [&](int64_t panel, int64_t t) {
    const Ahead ahead(bytes, few ? t : 0, few ? tiles : 1);
    kPanelTiles[rows.tile_rows(t) - 1](product, panel, rows.tile(t), ahead, t * kTile);
  };
  if (few) {
    for (int64_t panel = first; panel < last; ++panel)
      for (int64_t t = 0; t < tiles; ++t) run(panel, t);
  } else {
    for (int64_t t = 0; t < tiles; ++t)
      for (int64_t panel = first; panel < last; ++panel) run(panel, t);
  }
}

}  // namespace quire::QUIRE_ISA
