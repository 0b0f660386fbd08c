// Row-wise and elementwise functions.

#include "activation.h"
#include "functions.h"
#include "table.h"

namespace quire::QUIRE_ISA {

namespace {

template <typename Function>
QUIRE_INLINE void each(int64_t count, float* out, Function function) {
  for (int64_t i = 0; i < count; i += kLanes) store_some(out + i, function(i, count - i), count - i);
}

}  // namespace

void add(const float* x, const float* y, float* out, int64_t count) {
  each(count, out, [&](int64_t i, int64_t n) { return load_some(x + i, n) + load_some(y + i, n); });
}

void scale(const float* x, float factor, float* out, int64_t count) {
  each(count, out, [&](int64_t i, int64_t n) { return load_some(x + i, n) * factor; });
}

void soft_cap(const float* x, float cap, float* out, int64_t count) {
  each(count, out, [&](int64_t i, int64_t n) { return cap * tanh(load_some(x + i, n) / cap); });
}

void activate(Activation activation, const float* x, float* out, int64_t count) {
  each(count, out, [&](int64_t i, int64_t n) { return activate(activation, load_some(x + i, n)); });
}

void gate(Activation activation, const float* gate, const float* up, float* out, int64_t count) {
  each(count, out, [&](int64_t i, int64_t n) {
    return activate(activation, load_some(gate + i, n)) * load_some(up + i, n);
  });
}

void bounded_gate(float limit, const float* gate, const float* up, float* out, int64_t count) {
  each(count, out, [&](int64_t i, int64_t n) {
    const F g = load_some(gate + i, n), u = load_some(up + i, n);
    const F low = g > limit ? splat(limit) : g;  // ordered so that NaN is preserved
    const F bounded = u > limit ? splat(limit) : u < -limit ? splat(-limit) : u;
    return low * sigmoid(1.702f * low) * (bounded + 1.0f);
  });
}

void norm(const Norm& norm, const float* x, float* out, int64_t count) {
  const int64_t width = norm.width;
  for (int64_t row = 0; row < count; ++row, x += width, out += width) {
    float mean = 0;
    if (norm.centered) {
      F sum{};
      for (int64_t i = 0; i < width; i += kLanes) sum += load_some(x + i, width - i);
      mean = reduce_add(sum) / (float)width;
    }
    F squares{};
    for (int64_t i = 0; i < width; i += kLanes) {
      F v = load_some(x + i, width - i);
      if (norm.centered) {  // lanes beyond the width stay zero
        v -= mean;
        if (width - i < kLanes)
          for (int64_t j = width - i; j < kLanes; ++j) v[j] = 0;
      }
      squares = fma(v, v, squares);
    }
    const float inverse = 1.0f / __builtin_sqrtf(reduce_add(squares) / (float)width + norm.eps);
    for (int64_t i = 0; i < width; i += kLanes) {
      F v = (load_some(x + i, width - i) - mean) * inverse *
            (load_some(norm.weight + i, width - i) + norm.offset);
      if (norm.bias) v += load_some(norm.bias + i, width - i);
      store_some(out + i, v, width - i);
    }
  }
}

void rotate(const float* x, float* out, const float* cos, const float* sin, int64_t heads, int64_t dim,
            int64_t pairs, bool interleaved) {
  for (int64_t head = 0; head < heads; ++head, x += dim, out += dim) {
    if (interleaved) {
      for (int64_t i = 0; i < pairs; ++i) {
        const float a = x[2 * i], b = x[2 * i + 1];
        out[2 * i] = a * cos[i] - b * sin[i];
        out[2 * i + 1] = b * cos[i] + a * sin[i];
      }
    } else {
      for (int64_t i = 0; i < pairs; i += kLanes) {
        const int64_t n = pairs - i;
        const F a = load_some(x + i, n), b = load_some(x + pairs + i, n);
        const F c = load_some(cos + i, n), s = load_some(sin + i, n);
        store_some(out + i, a * c - b * s, n);
        store_some(out + pairs + i, b * c + a * s, n);
      }
    }
    if (out != x) __builtin_memcpy(out + 2 * pairs, x + 2 * pairs, (size_t)(dim - 2 * pairs) * sizeof(float));
  }
}

void lookup(const Panels& table, int64_t row, float* out) {
  if (table.format == Format::coded) return lookup_coded(table, row, out);
  const int64_t panel = row / kPanel, lane = row % kPanel, inputs = table.inputs;
  const uint8_t* values = table.values + panel * table.panel_bytes();
  if (table.quantized()) {
    const float channel = table.channels[row];
    const int8_t* block_scales = table.block_scales + panel * table.groups() * kPanel + lane;
    for (int64_t k = 0; k < inputs; ++k) {
      const float scale = channel * (float)block_scales[k / kGroup * kPanel];
      int q;
      if (table.format == Format::int8) {
        q = values[k / 4 * 64 + lane * 4 + k % 4] - 128;
      } else {
        const uint8_t both = values[k / 8 * 64 + lane * 4 + k % 4];
        q = (k % 8 < 4 ? both & 15 : both >> 4) - 8;
      }
      out[k] = scale * (float)q;
    }
    return;
  }
  const float* f32 = (const float*)values;
  const uint16_t* u16 = (const uint16_t*)values;
  for (int64_t k = 0; k < inputs; ++k) {
    if (table.format == Format::f32) {
      out[k] = f32[k * kPanel + lane];
    } else if (table.format == Format::f16) {
      out[k] = half_to_float(u16[k * kPanel + lane]);
    } else {
      const uint32_t bits = (uint32_t)u16[k / 2 * 2 * kPanel + lane * 2 + k % 2] << 16;
      __builtin_memcpy(out + k, &bits, 4);
    }
  }
}

}  // namespace quire::QUIRE_ISA
