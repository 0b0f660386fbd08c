// Matrix products: of packed activations with panels, including epilogues.

#include "activation.h"
#include "table.h"
#include "tile.h"
#if defined(QUIRE_AMX)
#include "amx_tile.h"
#endif

namespace quire::QUIRE_ISA {

namespace {

QUIRE_INLINE void store_rows(const Product& p, int64_t column, int64_t first_row, int64_t rows,
                             const F* from) {
  float* to = p.out + first_row * p.stride + column;
  const int64_t count = p.weight.outputs - column;
  if (count >= kLanes) {
    for (int64_t m = 0; m < rows; ++m) store(to + m * p.stride, from[m]);
  } else {
    for (int64_t m = 0; m < rows; ++m) store_some(to + m * p.stride, from[m], count);
  }
}

// Where sixteen lanes are several registers, this would be most of the code of every tile.
#if defined(__AVX512F__)
QUIRE_INLINE
#else
__attribute__((noinline))
#endif
void activate_rows(Activation activation, int64_t rows, F* x) {
  for (int64_t m = 0; m < rows; ++m) x[m] = activate(activation, x[m]);
}

// Computes N panels of a product for up to M rows, or for `tiles` tiles of M; for a gated product, the gate
// first. `sums(weight, out)` computes the dot products of the rows, [tile][N][M].
template <int M, int N = 1, int Tiles = 1, typename Sums>
QUIRE_INLINE void panel_rows(const Product& p, int64_t panel, int64_t first, int64_t rows, Sums sums,
                             int64_t tiles = 1) {
  F out[Tiles * N * M], gate[Tiles * N * M];
  for (const Panels* weight = &p.weight;; weight = p.up) {
    sums(*weight, out);
    for (int64_t i = 0; i < tiles * N; ++i) {
      const int64_t column = (panel + i % N) * kPanel, count = p.weight.outputs - column;
      const int64_t first_row = first + i / N * M;
      F *const own = out + i * M, *const own_gate = gate + i * M;
      if (weight == p.up) {
        for (int64_t m = 0; m < rows; ++m) own[m] *= own_gate[m];
        store_rows(p, column, first_row, rows, own);
        continue;
      }
      if (p.bias) {
        const F bias = load_some(p.bias + column, count);
        for (int64_t m = 0; m < rows; ++m) own[m] += bias;
      }
      if (p.activation != Activation::none) activate_rows(p.activation, rows, own);
      for (int64_t m = 0; m < rows; ++m) own_gate[m] = own[m];
      if (!p.up) store_rows(p, column, first_row, rows, own);
    }
    if (!p.up || weight == p.up) return;
  }
}

template <int M, Format Of>
void panel_tile(const Product& p, int64_t panel, const uint8_t* x, const PanelPrefetch& ahead,
                int64_t first_row) {
  panel_rows<M>(p, panel, first_row, M,
                [&](const Panels& weight, F* out) { tile<M, Of>(weight, panel, x, ahead, out); });
}

// One function per format and number of rows, so that the loops of a tile are compiled in their context.
using PanelTile = void (*)(const Product&, int64_t, const uint8_t*, const PanelPrefetch&, int64_t);
template <Format Of>
constexpr PanelTile kPanelTiles[kTile] = {panel_tile<1, Of>, panel_tile<2, Of>, panel_tile<3, Of>,
                                          panel_tile<4, Of>, panel_tile<5, Of>, panel_tile<6, Of>,
                                          panel_tile<7, Of>, panel_tile<8, Of>};

const PanelTile* panel_tiles(Format weight) {
  switch (weight) {
    case Format::f32:
      return kPanelTiles<Format::f32>;
    case Format::f16:
      return kPanelTiles<Format::f16>;
    case Format::bf16:
      return kPanelTiles<Format::bf16>;
    case Format::int8:
      return kPanelTiles<Format::int8>;
    case Format::int4:
      return kPanelTiles<Format::int4>;
    case Format::coded:
      return kPanelTiles<Format::coded>;
  }
  return nullptr;
}

// Whole tiles and panels that are multiplied together, by one function or, where that is null, one by one.
struct Together {
  CodedTiles (*function)(const Panels&) = nullptr;
  int64_t tiles = 1, panels = 1;
};

// Returns what is multiplied together: two panels with many rows, and scales unpacked once for several tiles.
// W8A8 has none, and two tiles alone read one panel once and in order, as a processor fetches it from memory
// by itself.
Together together(const Product& p, int64_t rows) {
  const int64_t whole = rows / kTile;
  if (whole == 0 || !wide_tiles(p.weight) || (p.up && !wide_tiles(*p.up))) return {};
  if (p.weight.coding.meaning != Meaning::rows) return {wide_tiles, kWideTiles, 2};
  const bool both = !p.up || p.up->coding.meaning == Meaning::rows;
  if (both && rows == 2 * kTile) return {[](const Panels&) { return two_row_tiles(); }, 2, 1};
  return {wide_tiles, 1, 2};
}

// Multiplies tiles of eight rows with N panels.
template <int N>
void tiles_together(const Product& p, const Together& how, int64_t panel, const Tiles& tiles,
                    const PanelPrefetch& ahead, int64_t first_row) {
  panel_rows<kTile, N, kWideTiles>(
      p, panel, first_row, kTile,
      [&](const Panels& weight, F* out) { how.function(weight)(weight, panel, tiles, ahead, out); },
      tiles.count);
}

// Calls run(panel, part, ahead) for every panel of [first, last), or for the first of every `together`, and
// all parts of the rows. Few rows are all multiplied with a panel in the L1 cache while the next panel is
// fetched from memory. Many rows, which are too large to be read again for every panel, are multiplied part
// by part with all panels, which stay in the L2 cache.
template <typename Run>
QUIRE_INLINE void walk(const Product& product, int64_t rows, int64_t parts, int64_t together, int64_t first,
                       int64_t last, Run run) {
  constexpr int64_t kFewRows = 4 * kTile;
  const int64_t bytes = product.weight.panel_bytes();
  if (rows <= kFewRows) {
    for (int64_t panel = first; panel < last; panel += together)
      for (int64_t part = 0; part < parts; ++part)
        run(panel, part, PanelPrefetch(bytes, together, part, parts));
  } else {
    for (int64_t part = 0; part < parts; ++part)
      for (int64_t panel = first; panel < last; panel += together)
        run(panel, part, PanelPrefetch(bytes, together, 0, 1));
  }
}

#if defined(QUIRE_AMX)
template <int M>
void few_bf16(const Product& product, const PackedActivations& packed, int64_t first, int64_t last) {
  const int64_t row_bytes = PackedActivations::row_bytes(packed.format, packed.inputs);
  walk(product, M, 1, 1, first, last, [&](int64_t panel, int64_t, const PanelPrefetch& ahead) {
    panel_rows<M>(product, panel, 0, M, [&](const Panels& weight, F* out) {
      const uint8_t* values = weight.values + panel * weight.panel_bytes();
      few_rows_bf16<M>(values, packed.inputs, packed.data, row_bytes, ahead, out);
    });
  });
}
constexpr void (*kFewBf16[])(const Product&, const PackedActivations&, int64_t, int64_t) = {
    few_bf16<1>, few_bf16<2>, few_bf16<3>, few_bf16<4>};

// Multiplies rows [begin, begin + parts * count), `count` at a time.
template <typename Tile>
void amx_parts(const Product& product, const PackedActivations& packed, int64_t begin, int64_t parts,
               int64_t count, int64_t first, int64_t last) {
  if (parts == 0) return;
  const int64_t row_bytes = PackedActivations::row_bytes(packed.format, packed.inputs);
  tiles_begin(amx_shapes(count));
  walk(product, parts * count, parts, Tile::kPanels, first, last,
       [&](int64_t panel, int64_t part, const PanelPrefetch& ahead) {
         const int64_t row = begin + part * count;
         const uint8_t* const x = packed.data + row * row_bytes;
         const auto multiply = [&]<int N>() {
           panel_rows<kAmxRows, N>(product, panel, row, count, [&](const Panels& weight, F* out) {
             const Tile tile(weight, panel, x, row_bytes, ahead);
             count > 16 ? tile.template run<true, N>(count, out) : tile.template run<false, N>(count, out);
           });
         };
         panel + Tile::kPanels <= last ? multiply.template operator()<Tile::kPanels>()
                                       : multiply.template operator()<1>();
       });
  tiles_end();
}

template <typename Tile>
void amx(const Product& product, const PackedActivations& packed, int64_t first, int64_t last) {
  const int64_t whole = packed.rows / kAmxRows, rest = packed.rows % kAmxRows;
  amx_parts<Tile>(product, packed, 0, whole, kAmxRows, first, last);
  amx_parts<Tile>(product, packed, whole * kAmxRows, rest > 0, rest, first, last);
}
#endif

}  // namespace

// Multiplies all rows with panels [first, last).
void multiply(const Product& product, const PackedActivations& packed, int64_t first, int64_t last) {
#if defined(QUIRE_AMX)
  constexpr int64_t kFew = sizeof(kFewBf16) / sizeof(*kFewBf16);  // rows that vectors multiply
  if (packed.format == ActivationFormat::bf16) {
    const NormalNumbers normal;
    if (packed.rows <= kFew) return kFewBf16[packed.rows - 1](product, packed, first, last);
    return amx<AmxBf16>(product, packed, first, last);
  }
  if (packed.format == ActivationFormat::rows && packed.rows > kFew)
    return amx<AmxRows>(product, packed, first, last);
#endif
  const PanelTile* const panel_tile = panel_tiles(product.weight.format);
  const int64_t tiles = packed.tiles();
  const Together how = together(product, packed.rows);
  walk(product, packed.rows, ceil_div(tiles, how.tiles), how.panels, first, last,
       [&](int64_t panel, int64_t part, const PanelPrefetch& ahead) {
         int64_t t = part * how.tiles;
         const int64_t end = t + how.tiles < tiles ? t + how.tiles : tiles;
         const int64_t whole = end * kTile <= packed.rows ? end : end - 1;
         if (how.function && t < whole && panel + how.panels <= last) {
           const int64_t bytes = kTile * PackedActivations::row_bytes(packed.format, packed.inputs);
           const Tiles together{packed.tile(t), bytes, whole - t};
           how.panels == 2 ? tiles_together<2>(product, how, panel, together, ahead, t * kTile)
                           : tiles_together<1>(product, how, panel, together, ahead, t * kTile);
           t = whole;
         }
         for (; t < end; ++t)
           for (int64_t one = panel; one < panel + how.panels && one < last; ++one)
             panel_tile[packed.tile_rows(t) - 1](product, one, packed.tile(t), ahead, t * kTile);
       });
}

}  // namespace quire::QUIRE_ISA
