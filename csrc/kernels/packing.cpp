// Packing: converts a checkpoint's matrix to panels, quantized to 8 or 4 bits if the panels are.
//
// quire/quantize/round_to_nearest.py defines the bits of quantized weights: every operation is rounded
// individually, in the order written there. Lanes are outputs, so that a group of 32 inputs is processed for
// 16 outputs at once, and no sum goes across lanes.

#include "packing.h"

#include "table.h"
#include "vec.h"

namespace quire::QUIRE_ISA {

namespace {

// As many outputs as fit in one register: GCC 12 turns comparisons of wider vectors into scalar code.
#if defined(__AVX512F__)
constexpr int kWide = 16;
#elif defined(__AVX2__)
constexpr int kWide = 8;
#else
constexpr int kWide = 4;
#endif
typedef float V __attribute__((vector_size(kWide * 4)));
typedef int32_t N __attribute__((vector_size(kWide * 4)));
typedef uint32_t W __attribute__((vector_size(kWide * 4)));

QUIRE_INLINE V all(float x) { return V{} + x; }
QUIRE_INLINE V magnitude(V x) { return (V)((N)x & 0x7fffffff); }
QUIRE_INLINE V clamp(V x, float low, float high) {
  x = x > low ? x : all(low);
  return x < high ? x : all(high);
}

// Rounds to the nearest integer, ties to even; |x| must be below 2^22. Never returns -0.
constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: adding it rounds off the fraction
QUIRE_INLINE V nearest(V x) { return (x + kMagic) - kMagic; }
QUIRE_INLINE N to_integer(V x) { return (N)(x + kMagic) - (N)all(kMagic); }

// Returns 1 / scale, and 0 for groups with scale 0, which round to 0.
QUIRE_INLINE V inverse(V scale) { return scale == 0.0f ? V{} : 1.0f / scale; }

// Converts sixteen contiguous numbers of a checkpoint.
QUIRE_INLINE F widen(Format format, const uint8_t* from) {
  if (format == Format::f32) return load_as<F>(from);
  return format == Format::f16 ? load_f16((const uint16_t*)from) : load_bf16((const uint16_t*)from);
}

float widen_one(Format format, const uint8_t* from) {
  if (format == Format::f32) return *(const float*)from;
  if (format == Format::f16) return half_to_float(*(const uint16_t*)from);
  const uint32_t bits = (uint32_t)*(const uint16_t*)from << 16;
  float out;
  __builtin_memcpy(&out, &bits, 4);
  return out;
}

// Fetches a group of inputs, contiguous in the source, of 16 outputs. Transposes words of 4 bytes first.
void fetch_whole(const Source& source, const uint8_t* from, float* out) {
  alignas(64) uint32_t words[kGroup][kPanel];
  const int count = source.format == Format::f32 ? kGroup : kGroup / 2;
  for (int lane = 0; lane < kPanel; ++lane) {
    uint32_t row[kGroup];
    __builtin_memcpy(row, from + lane * source.output_stride, (size_t)count * 4);
    for (int i = 0; i < count; ++i) words[i][lane] = row[i];
  }
  if (source.format == Format::f32) {
    __builtin_memcpy(out, words, sizeof(words));
    return;
  }
  for (int i = 0; i < count; ++i, out += 2 * kPanel) {
    const U pair = load_as<U>(words[i]);
    if (source.format == Format::bf16) {
      store(out, (F)(pair << 16));
      store(out + kPanel, (F)(pair & 0xffff0000u));
    } else {
      uint16_t halves[2][kPanel];
      store_as(halves[0], __builtin_convertvector(pair & 0xffffu, H));
      store_as(halves[1], __builtin_convertvector(pair >> 16, H));
      store(out, load_f16(halves[0]));
      store(out + kPanel, load_f16(halves[1]));
    }
  }
}

// Fetches the numbers of a panel as [inputs, up to whole groups][16], padded with zeros.
void fetch(const Source& source, int64_t panel, float* out) {
  const int64_t size = source.format == Format::f32 ? 4 : 2, first = panel * kPanel;
  const int64_t lanes = source.outputs - first < kPanel ? source.outputs - first : kPanel;
  const uint8_t* from = source.data + first * source.output_stride;
  for (int64_t k = 0; k < source.inputs;
       k += kGroup, out += kGroup * kPanel, from += kGroup * source.input_stride) {
    const int64_t count = source.inputs - k < kGroup ? source.inputs - k : kGroup;
    if (lanes == kPanel && count == kGroup && source.input_stride == size) {
      fetch_whole(source, from, out);
    } else if (lanes == kPanel && source.output_stride == size) {
      for (int64_t i = 0; i < kGroup; ++i)
        store(out + i * kPanel, i < count ? widen(source.format, from + i * source.input_stride) : F{});
    } else {
      __builtin_memset(out, 0, kGroup * kPanel * sizeof(float));
      for (int64_t i = 0; i < count; ++i)
        for (int64_t lane = 0; lane < lanes; ++lane)
          out[i * kPanel + lane] =
              widen_one(source.format, from + i * source.input_stride + lane * source.output_stride);
    }
  }
}

// Packs a panel of floating point numbers, unchanged or as f32.
void pack_floats(const float* x, Format format, int64_t inputs, uint8_t* out) {
  if (format == Format::f32) {
    __builtin_memcpy(out, x, (size_t)inputs * kPanel * sizeof(float));
  } else if (format == Format::f16) {
    for (int64_t k = 0; k < inputs; ++k) store_as(out + k * 32, to_f16(load(x + k * kPanel)));
  } else {
    for (int64_t k = 0; k < inputs; k += 2) {
      const U even = (U)load(x + k * kPanel), odd = (U)load(x + (k + 1) * kPanel);
      store_as(out + k * 32, (even >> 16) | (odd & 0xffff0000u));
    }
  }
}

// The following functions process one group, [32][16], for as many outputs as fit in a register.

// Returns for each output the number with the largest magnitude, the first of equals.
QUIRE_INLINE V largest(const float* x) {
  V found = load_as<V>(x);
  N top = (N)magnitude(found);  // as bits, which have the same order, with infinity and NaN greatest
  for (int k = 1; k < kGroup; ++k) {
    const V v = load_as<V>(x + k * kPanel);
    const N bits = (N)magnitude(v);
    found = bits > top ? v : found;
    top = bits > top ? bits : top;
  }
  return found;
}

// A candidate for the block scale of int8: `step` from the least that makes no number larger than 127.
QUIRE_INLINE V candidate8(V found, V channel, float step) {
  const V amax = magnitude(found), most = clamp((amax / 127.0f) / channel, 0.0f, 127.0f);
  const V whole = nearest(most), first = whole < most ? whole + 1.0f : whole;  // the ceiling
  const V scale = amax > 0.0f ? clamp(first + step, 1.0f, 127.0f) : V{};
  return channel == 0.0f ? V{} : scale;
}

// A candidate for the block scale of int4: `factor` times the one that maps the largest number to -8.
QUIRE_INLINE V candidate4(V found, V channel, float factor) {
  const V scale = nearest(clamp((factor * (found / -8.0f)) / channel, -127.0f, 127.0f));
  const V some = scale == 0.0f && magnitude(found) > 0.0f ? all(1.0f) : scale;
  return channel == 0.0f ? V{} : some;
}

template <bool Int4>
QUIRE_INLINE V bounded(V x) {
  return Int4 ? clamp(x, -8.0f, 7.0f) : clamp(x, -127.0f, 127.0f);
}

// Returns the candidate with the least error for a group. Several are tried in one pass, since their sums are
// independent.
template <bool Int4>
QUIRE_INLINE V best_block_scale(const float* x, V found, V channel, const float* tries, int64_t num_tries) {
  constexpr int kTogether = 5;
  V best{}, least{};
  for (int64_t first = 0; first < num_tries; first += kTogether) {
    V block_scales[kTogether], scale[kTogether], inv[kTogether], error[kTogether];
    for (int t = 0; t < kTogether; ++t) {
      const float how = tries[first + t < num_tries ? first + t : first];  // repeating one has no effect
      block_scales[t] = Int4 ? candidate4(found, channel, how) : candidate8(found, channel, how);
      scale[t] = channel * block_scales[t];
      inv[t] = inverse(scale[t]);
      error[t] = V{};
    }
    for (int k = 0; k < kGroup; ++k) {
      const V v = load_as<V>(x + k * kPanel);
      for (int t = 0; t < kTogether; ++t) {
        const V rest = v - scale[t] * nearest(bounded<Int4>(v * inv[t]));
        error[t] = error[t] + rest * rest;
      }
    }
    for (int t = 0; t < kTogether; ++t) {
      const bool none = first + t == 0;
      best = none ? block_scales[t] : error[t] < least ? block_scales[t] : best;
      least = none ? error[t] : error[t] < least ? error[t] : least;
    }
  }
  return best;
}

// Stores a group in the layout of kernels.h, in words of 4 inputs of int8 or 8 of int4.
template <bool Int4>
QUIRE_INLINE void store_group(const float* x, V scale, uint8_t* out) {
  constexpr int kInputs = Int4 ? 8 : 4;
  const V inv = inverse(scale);
  for (int k = 0; k < kGroup; k += kInputs, out += 64) {
    W word{};
    for (int i = 0; i < kInputs; ++i) {
      const N q = to_integer(bounded<Int4>(load_as<V>(x + (k + i) * kPanel) * inv));
      word |= (W)(q + (Int4 ? 8 : 128)) << (8 * (i % 4) + i / 4 * 4);
    }
    store_as(out, word);
  }
}

// Packs outputs [lane, lane + kWide) of a panel. Returns false if a number is not finite. `found` has space
// for [groups][16].
template <bool Int4>
bool pack_quantized(const float* x, const Panels& to, int64_t panel, int lane, const float* tries,
                    int64_t num_tries, float* found) {
  constexpr int64_t kNumbers = kGroup * kPanel;
  const int64_t groups = to.groups();
  uint8_t* values = (uint8_t*)to.values + panel * to.panel_bytes() + lane * 4;
  int8_t* block_scales = (int8_t*)to.block_scales + panel * groups * kPanel + lane;
  N top{};
  for (int64_t g = 0; g < groups; ++g) {
    const V m = largest(x + g * kNumbers + lane);
    const N bits = (N)magnitude(m);
    top = bits > top ? bits : top;
    store_as(found + g * kPanel + lane, m);
  }
  for (int i = 0; i < kWide; ++i)
    if (top[i] >= 0x7f800000) return false;
  V channel = ((V)top / (Int4 ? 7.0f : 127.0f)) / 127.0f;
  channel = channel < 0x1p-126f ? V{} : channel;
  store_as((float*)to.channels + panel * kPanel + lane, channel);
  for (int64_t g = 0; g < groups; ++g) {
    const float* from = x + g * kNumbers + lane;
    const V m = load_as<V>(found + g * kPanel + lane);
    const V block_scale = best_block_scale<Int4>(from, m, channel, tries, num_tries);
    store_group<Int4>(from, channel * block_scale, values + g * (Int4 ? kNumbers / 2 : kNumbers));
    const N integers = to_integer(block_scale);
    for (int i = 0; i < kWide; ++i) block_scales[g * kPanel + i] = (int8_t)integers[i];
  }
  return true;
}

}  // namespace

bool pack_panels(const Source& source, const Panels& to, int64_t first, int64_t last, const float* tries,
                 int64_t num_tries, float* scratch) {
  float* found = scratch + round_up(source.inputs, kGroup) * kPanel;
  const auto quantized = to.format == Format::int4 ? pack_quantized<true> : pack_quantized<false>;
  for (int64_t panel = first; panel < last; ++panel) {
    fetch(source, panel, scratch);
    if (!to.quantized()) {
      pack_floats(scratch, to.format, to.inputs, (uint8_t*)to.values + panel * to.panel_bytes());
      continue;
    }
    for (int lane = 0; lane < kPanel; lane += kWide)
      if (!quantized(scratch, to, panel, lane, tries, num_tries, found)) return false;
  }
  return true;
}

}  // namespace quire::QUIRE_ISA
