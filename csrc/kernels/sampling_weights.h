// Weights of tokens, exp((logit - maximum) / temperature) in float64, and their sums. Part of sampling.cpp
// and choose.cpp.
//
// Weights have a relative error below 1e-14, so a draw differs from the definition only if `u`, top_p or
// min_p is that close to a boundary between two tokens. Sums are first within each block of 1,024 tokens, by
// vector lane; then over the blocks, in order.
#pragma once

#include "sampling.h"
#include "vec.h"

namespace quire::QUIRE_ISA {

namespace {

// Vectors of the machine's width: GCC splits wider vectors of doubles into scalars.
#if defined(__AVX512DQ__)
constexpr int kBytes = 64;
#elif defined(__AVX2__)
constexpr int kBytes = 32;
#else
constexpr int kBytes = 16;
#endif
constexpr int kWide = kBytes / 4, kHalf = kBytes / 8;  // floats and doubles in a vector

typedef float V __attribute__((vector_size(kBytes)));
typedef int32_t K __attribute__((vector_size(kBytes)));
typedef uint32_t U __attribute__((vector_size(kBytes)));
typedef double D __attribute__((vector_size(kBytes)));
typedef int64_t L __attribute__((vector_size(kBytes)));
typedef float N __attribute__((vector_size(kBytes / 2)));  // as many floats as doubles in a vector

// greater(v, w): w where v is NaN. bits_of: one bit per lane of a comparison. The masks keep all lanes:
// without them GCC 12 warns about its own headers.
#if defined(__AVX512DQ__)
QUIRE_INLINE V greater(V v, V w) { return (V)_mm512_maskz_max_ps(0xffff, (__m512)v, (__m512)w); }
QUIRE_INLINE D greater(D v, D w) { return (D)_mm512_maskz_max_pd(0xff, (__m512d)v, (__m512d)w); }
QUIRE_INLINE D fma(D a, D b, D c) { return (D)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c); }
QUIRE_INLINE D widen(N v) { return (D)_mm512_maskz_cvtps_pd(0xff, (__m256)v); }
QUIRE_INLINE uint32_t bits_of(K lanes) { return _mm512_movepi32_mask((__m512i)lanes); }
#elif defined(__AVX2__)
QUIRE_INLINE V greater(V v, V w) { return (V)_mm256_max_ps((__m256)v, (__m256)w); }
QUIRE_INLINE D greater(D v, D w) { return (D)_mm256_max_pd((__m256d)v, (__m256d)w); }
QUIRE_INLINE D fma(D a, D b, D c) { return (D)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c); }
QUIRE_INLINE D widen(N v) { return (D)_mm256_cvtps_pd((__m128)v); }
QUIRE_INLINE uint32_t bits_of(K lanes) { return (uint32_t)_mm256_movemask_ps((__m256)lanes); }
#else
QUIRE_INLINE V greater(V v, V w) { return v > w ? v : w; }
QUIRE_INLINE D greater(D v, D w) { return v > w ? v : w; }
#if defined(QUIRE_NEON)
QUIRE_INLINE D fma(D a, D b, D c) { return (D)vfmaq_f64((float64x2_t)c, (float64x2_t)a, (float64x2_t)b); }
#else
QUIRE_INLINE D fma(D a, D b, D c) { return a * b + c; }
#endif
QUIRE_INLINE D widen(N v) { return __builtin_convertvector(v, D); }
QUIRE_INLINE uint32_t bits_of(K lanes) {
  return (lanes[0] & 1) | (lanes[1] & 2) | (lanes[2] & 4) | (lanes[3] & 8);
}
#endif

// Stores the lanes of `keep` contiguously; the rest of the vector is arbitrary.
template <typename T>
QUIRE_INLINE void compress(T* to, K v, uint32_t keep) {
#if defined(__AVX512DQ__)
  store_as(to, _mm512_maskz_compress_epi32((__mmask16)keep, (__m512i)v));
#else
  if (keep == (1u << kWide) - 1) return store_as(to, v);
  T lanes[kWide];
  store_as(lanes, v);
  for (; keep; keep &= keep - 1) *to++ = lanes[__builtin_ctz(keep)];
#endif
}

// Loads the row from `i` on; lanes beyond its end are -inf, which has weight zero.
template <typename T>
QUIRE_INLINE T load_row(const float* x, int64_t i, int64_t count) {
  constexpr int64_t lanes = sizeof(T) / sizeof(float);
  if (count - i >= lanes) return load_as<T>(x + i);
  T v = T{} - __builtin_inff();
  for (int64_t j = i; j < count; ++j) v[j - i] = x[j];
  return v;
}

// The bits of the first `count` lanes.
QUIRE_INLINE uint32_t lanes_below(int64_t count) { return count >= kWide ? ~0u : (1u << count) - 1; }

constexpr int64_t kBlock = 1024;  // tokens summed separately

QUIRE_INLINE int64_t block_end(int64_t first, int64_t count) {
  return count - first < kBlock ? count : first + kBlock;
}

struct Scratch {
  double *weights, *blocks;  // [count], [blocks]
  float *logits, *columns;   // [count], of the tokens kept; [blocks * kWide]
  int32_t *ids, *keys;       // [count], of the tokens kept; [count]

  Scratch(void* memory, int64_t count) {
    const int64_t padded = round_up(count, 16) + 16;  // stores write whole vectors
    weights = (double*)memory;
    blocks = weights + padded;
    logits = (float*)(blocks + ceil_div(count, kBlock));
    columns = logits + padded;
    ids = (int32_t*)(columns + ceil_div(count, kBlock) * kWide);
    keys = ids + padded;
  }
};

// The parameters of exp((logit - maximum) / temperature).
struct Weighing {
  double maximum, scale;

  Weighing(double maximum, double temperature) : maximum(maximum) {
    scale = 1.44269504088896340736 / temperature;
    if (scale > 1.7e308) scale = 1.7e308;  // a tiny temperature: 0 * inf would not be 0
  }
};

#if defined(__AVX512DQ__)
// The bits of 2^(i / 16), less i << 48, the excess from adding sixteenths to the exponent.
alignas(64) constexpr int64_t kSixteenths[16] = {
    0x3ff0000000000000, 0x3fefb5586cf9890f, 0x3fef72b83c7d517b, 0x3fef387a6e756238,
    0x3fef06fe0a31b715, 0x3feedea64c123422, 0x3feebfdad5362a27, 0x3feeab07dd485429,
    0x3feea09e667f3bcd, 0x3feea11473eb0187, 0x3feeace5422aa0db, 0x3feec49182a3f090,
    0x3feee89f995ad3ad, 0x3fef199bdd85529c, 0x3fef5818dcfba487, 0x3fefa4afa2a490da,
};
#endif

// Returns 2^y for y <= 0. At the lower limit, -1023, exponent and result become 0.
QUIRE_INLINE D exp2(D y) {
  y = greater(y, D{} - 1023.0);
#if defined(__AVX512DQ__)
  const D magic = D{} + 0x1.8p48;  // rounds to sixteenths
  const D shifted = y + magic, f = y - (shifted - magic);
  const L sixteenth = (L)_mm512_permutex2var_epi64(load_as<__m512i>(kSixteenths), (__m512i)shifted,
                                                   load_as<__m512i>(kSixteenths + 8));
  const D power = (D)(sixteenth + ((L)shifted << 48));
  D p = D{} + 0.0013333744338239965;  // (2^f - 1) / f on [-1/32, 1/32], 1e-14 off
  p = fma(p, f, D{} + 0.009618317140580765);
  p = fma(p, f, D{} + 0.05550410866027587);
  p = fma(p, f, D{} + 0.24022650691319414);
  p = fma(p, f, D{} + 0.6931471805599453);
  return fma(power * f, p, power);
#else
  const D magic = D{} + 0x1.8p52;  // rounds to integers
  const D shifted = y + magic, f = y - (shifted - magic);
  D p = D{} + 7.070977866508138e-09;  // 2^f on [-1/2, 1/2], 6e-16 off
  p = fma(p, f, D{} + 1.0205905413765595e-07);
  p = fma(p, f, D{} + 1.3215451633221434e-06);
  p = fma(p, f, D{} + 1.5252672924850737e-05);
  p = fma(p, f, D{} + 1.5403530424776529e-04);
  p = fma(p, f, D{} + 1.3333558200794592e-03);
  p = fma(p, f, D{} + 9.618129107618665e-03);
  p = fma(p, f, D{} + 5.550410866465167e-02);
  p = fma(p, f, D{} + 0.24022650695910072);
  p = fma(p, f, D{} + 0.6931471805599453);
  p = fma(p, f, D{} + 1.0);
  return (D)((L)p + ((L)shifted << 52));
#endif
}

QUIRE_INLINE D weigh(N logits, const Weighing& weighing) {
  return exp2((widen(logits) - weighing.maximum) * weighing.scale);
}

// Computes out [count, up to a multiple of 16].
inline void weigh(const float* x, int64_t count, Weighing weighing, double* out) {
  for (int64_t i = 0; i < count; i += kHalf) store_as(out + i, weigh(load_row<N>(x, i, count), weighing));
}

// Returns the sum of the weights of a block, prefetching the next one.
double sum_block(const float* x, int64_t count, Weighing weighing) {
  D even{}, odd{};
  for (int64_t i = 0; i < count; i += 2 * kHalf) {
    if (i % 16 == 0) prefetch(x + kBlock + i);
    even += weigh(load_row<N>(x, i, count), weighing);
    if (i + kHalf < count) odd += weigh(load_row<N>(x, i + kHalf, count), weighing);
  }
  even += odd;
  double sum = 0;
  for (int i = 0; i < kHalf; ++i) sum += even[i];
  return sum;
}

// Returns the sum of all weights; stores those of the blocks if `blocks` is not null.
double sum(const float* x, int64_t count, Weighing weighing, double* blocks) {
  double total = 0;
  for (int64_t i = 0; i < count; i += kBlock) {
    const double weight = sum_block(x + i, block_end(i, count) - i, weighing);
    if (blocks) blocks[i / kBlock] = weight;
    total += weight;
  }
  return total;
}

}  // namespace

}  // namespace quire::QUIRE_ISA
