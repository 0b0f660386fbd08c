// Short convolutions and gated recurrences. Products and sums are rounded separately, as in the reference.

#include "states.h"

#include "activation.h"
#include "kv.h"
#include "table.h"

namespace quire::QUIRE_ISA {

namespace {

template <KVFormat Form>
QUIRE_INLINE F read(const uint8_t* from, int64_t channel, int64_t count) {
  using T = typename Stored<Form>::Type;
  T copy[kLanes];
  return load_stored<Form>(readable((const T*)from + channel, count, copy));
}

template <KVFormat Form>
QUIRE_INLINE void write(uint8_t* to, int64_t channel, F x, int64_t count) {
  using T = typename Stored<Form>::Type;
  T narrow[kLanes];
  store_as(narrow, Stored<Form>::narrow(x));
  __builtin_memcpy((T*)to + channel, narrow, (size_t)least(count, kLanes) * sizeof(T));
}

// Loads numbers rounded to their stored format.
template <KVFormat Form>
QUIRE_INLINE F load_as_kept(const float* from, int64_t count) {
  typename Stored<Form>::Type narrow[kLanes];
  store_as(narrow, Stored<Form>::narrow(load_some(from, count)));
  return load_stored<Form>(narrow);
}

template <KVFormat Form>
void convolve_as(const Convolution& c) {
  for (int64_t t = 0; t < c.count; ++t) {
    for (int64_t channel = 0; channel < c.channels; channel += kLanes) {
      const int64_t n = c.channels - channel;
      F sum{};
      for (int64_t i = 0; i < c.kernel; ++i) {
        const int64_t from = t - c.kernel + 1 + i, position = c.start + from;
        F x{};
        if (from >= 0) {
          x = load_as_kept<Form>(c.x + from * c.width + channel, n);
        } else if (position >= 0) {
          x = read<Form>(c.kept_x + position % c.kept.history * c.kept.pitch, channel, n);
        }
        const F product = x * load_some(c.weight + i * c.width + channel, n);
        sum = i ? sum + product : product;
      }
      if (c.bias) sum += load_some(c.bias + channel, n);
      store_some(c.out + t * c.width + channel, activate(c.activation, sum), n);
    }
  }
}

// Computes several independent vectors, to hide the latency of their chains.
template <KVFormat Form, int Vectors>
QUIRE_INLINE void recur_lanes(const Recurrence& r, int64_t channel, int64_t count) {
  const int64_t n = Vectors > 1 ? kLanes : count;
  F h[Vectors]{};
  for (int v = 0; r.before && v < Vectors; ++v) h[v] = read<Form>(r.before, channel + v * kLanes, n);
  for (int64_t position = r.begin; position < r.start; ++position) {
    const int64_t place = position % r.kept.history * r.kept.pitch;
    for (int v = 0; v < Vectors; ++v) {
      const F decay = read<Form>(r.kept_decay + place, channel + v * kLanes, n);
      h[v] = decay * h[v] + read<Form>(r.kept_x + place, channel + v * kLanes, n);
    }
  }
  for (int64_t t = 0; t < r.end - r.start; ++t) {
    const int64_t place = t * r.width + channel;
    for (int v = 0; v < Vectors; ++v) {
      const F decay = load_as_kept<Form>(r.decay + place + v * kLanes, n);
      h[v] = decay * h[v] + load_as_kept<Form>(r.x + place + v * kLanes, n);
      store_some(r.out + place + v * kLanes, h[v], n);
    }
  }
  for (int v = 0; r.after && v < Vectors; ++v) write<Form>(r.after, channel + v * kLanes, h[v], n);
}

template <KVFormat Form>
void recur_as(const Recurrence& r) {
  int64_t channel = 0;
  for (; channel + 4 * kLanes <= r.channels; channel += 4 * kLanes)
    recur_lanes<Form, 4>(r, channel, 4 * kLanes);
  for (; channel < r.channels; channel += kLanes) recur_lanes<Form, 1>(r, channel, r.channels - channel);
}

template <KVFormat Form>
void keep_as(const float* x, uint8_t* to, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes) write<Form>(to, i, load_some(x + i, count - i), count - i);
}

// Calls the instance of a function for a format.
template <typename Function>
void in_format(KVFormat format, Function function) {
  switch (format) {
    case KVFormat::f16:
      return function.template operator()<KVFormat::f16>();
    case KVFormat::bf16:
      return function.template operator()<KVFormat::bf16>();
    default:
      return function.template operator()<KVFormat::f32>();
  }
}

}  // namespace

void convolve(const Convolution& of) {
  in_format(of.kept.format, [&]<KVFormat Form>() { convolve_as<Form>(of); });
}

void recur(const Recurrence& of) {
  in_format(of.kept.format, [&]<KVFormat Form>() { recur_as<Form>(of); });
}

void keep(KVFormat format, const float* x, uint8_t* to, int64_t count) {
  in_format(format, [&]<KVFormat Form>() { keep_as<Form>(x, to, count); });
}

}  // namespace quire::QUIRE_ISA
