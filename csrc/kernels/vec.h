// Vectors of sixteen lanes on every instruction set, the language of the kernels.
//
// The vector types of GCC and Clang have any width and become one, two or four machine registers. Intrinsics
// are used only where the compiler does not find the instruction. This header is compiled once per
// instruction set, in its own namespace, and uses nothing of the standard library that could be shared
// between them: a function compiled for AVX-512 must never be called on an older machine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels.h"
#include "part.h"

#ifndef QUIRE_ISA
#error "QUIRE_ISA names the namespace of the instruction set this file is compiled for"
#endif

namespace quire::QUIRE_ISA {

typedef float F __attribute__((vector_size(64)));    // 16 floats
typedef int32_t I __attribute__((vector_size(64)));  // 16 integers
typedef uint32_t U __attribute__((vector_size(64)));
typedef uint8_t B64 __attribute__((vector_size(64)));  // 64 bytes
typedef int8_t S8 __attribute__((vector_size(16)));    // 16 bytes
typedef uint16_t H __attribute__((vector_size(32)));   // 16 half-width numbers

// Unaligned loads and stores.

template <typename V, typename T>
QUIRE_INLINE V load_as(const T* from) {
  V v;
  __builtin_memcpy(&v, from, sizeof(V));
  return v;
}

template <typename V, typename T>
QUIRE_INLINE void store_as(T* to, V v) {
  __builtin_memcpy(to, &v, sizeof(V));
}

QUIRE_INLINE F load(const float* from) { return load_as<F>(from); }
QUIRE_INLINE I load(const int32_t* from) { return load_as<I>(from); }
QUIRE_INLINE void store(float* to, F v) { store_as(to, v); }
QUIRE_INLINE void store(int32_t* to, I v) { store_as(to, v); }

// Broadcasts a number. Written out, since adding to zero would have to turn -0 into 0, which costs an
// instruction.
QUIRE_INLINE F splat(float x) { return F{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
QUIRE_INLINE I splat(int32_t x) { return I{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }

// Loads the first `count` lanes; the others are zero, and memory beyond is not accessed.
QUIRE_INLINE F load_some(const float* from, int64_t count) {
  if (count >= kLanes) return load(from);
  F v{};
  for (int64_t i = 0; i < count; ++i) v[i] = from[i];
  return v;
}

QUIRE_INLINE void store_some(float* to, F v, int64_t count) {
  if (count >= kLanes) return store(to, v);
  for (int64_t i = 0; i < count; ++i) to[i] = v[i];
}

// Arithmetic.

template <typename P>
struct Split {
  P parts[kParts];
};
QUIRE_INLINE Split<Part> split(F x) { return __builtin_bit_cast(Split<Part>, x); }
QUIRE_INLINE Split<PartI> split(I x) { return __builtin_bit_cast(Split<PartI>, x); }
QUIRE_INLINE Part first_part(F x) { return split(x).parts[0]; }
QUIRE_INLINE F joined(const Split<Part>& x) { return __builtin_bit_cast(F, x); }
QUIRE_INLINE I joined(const Split<PartI>& x) { return __builtin_bit_cast(I, x); }

// Applies a function of Parts to sixteen lanes.
template <typename Function, typename... V>
QUIRE_INLINE auto by_parts(const Function& function, V... x) {
  const auto apply = [&](const auto&... of) {
    Split<decltype(function(of.parts[0]...))> out;
    for (int i = 0; i < kParts; ++i) out.parts[i] = function(of.parts[i]...);
    return joined(out);
  };
  return apply(split(x)...);
}

#if QUIRE_PARTS > 1
// What part.h has for sixteen lanes. GCC would compute `a > b ? a : b` of these one lane at a time.
#define QUIRE_BY_PARTS(name, ...) by_parts([](auto... parts) { return name(parts...); }, __VA_ARGS__)
QUIRE_INLINE F fma(F a, F b, F c) { return QUIRE_BY_PARTS(fma, a, b, c); }
QUIRE_INLINE F select(I mask, F yes, F no) { return QUIRE_BY_PARTS(select, mask, yes, no); }
QUIRE_INLINE I select(I mask, I yes, I no) { return QUIRE_BY_PARTS(select, mask, yes, no); }
QUIRE_INLINE F max(F a, F b) { return QUIRE_BY_PARTS(max, a, b); }
QUIRE_INLINE F min(F a, F b) { return QUIRE_BY_PARTS(min, a, b); }
QUIRE_INLINE I max(I a, I b) { return QUIRE_BY_PARTS(max, a, b); }
QUIRE_INLINE F abs(F a) { return (F)((I)a & 0x7fffffff); }
QUIRE_INLINE F to_float(I a) { return QUIRE_BY_PARTS(to_float, a); }
QUIRE_INLINE I to_int(F x) { return QUIRE_BY_PARTS(to_int, x); }
#endif

// Sums and maxima over the lanes, by halving: the same order everywhere.

QUIRE_INLINE float reduce_add(F x) {
  float v[kLanes];
  store(v, x);
  for (int half = 8; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) v[i] += v[i + half];
  return v[0];
}

QUIRE_INLINE int32_t reduce_max(I x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_epi32((__m512i)x);
#endif
  int32_t v[kLanes];
  store(v, x);
  for (int half = 8; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) v[i] = v[i] > v[i + half] ? v[i] : v[i + half];
  return v[0];
}

// Lane m of the result is the reduction of the lanes of x[m] by `function`, by halving.
template <typename V, int N, typename Function>
QUIRE_INLINE V across(const V (&x)[N], Function function) {
#if defined(__AVX512F__)
  static_assert(N == 8);
#define QUIRE_SHUFFLE(...) __builtin_shufflevector(a, b, __VA_ARGS__)
  V y[4];  // rows 2i and 2i + 1, 8 lanes each
  for (int i = 0; i < 4; ++i) {
    const V a = x[2 * i], b = x[2 * i + 1];
    y[i] = function(QUIRE_SHUFFLE(0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23),
                    QUIRE_SHUFFLE(8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31));
  }
  V z[2];  // four rows, 4 lanes each
  for (int i = 0; i < 2; ++i) {
    const V a = y[2 * i], b = y[2 * i + 1];
    z[i] = function(QUIRE_SHUFFLE(0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27),
                    QUIRE_SHUFFLE(4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31));
  }
  V a = z[0], b = z[1];
  a = function(QUIRE_SHUFFLE(0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29),
               QUIRE_SHUFFLE(2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31));
  b = a;
  a = function(a, QUIRE_SHUFFLE(1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14));
  return QUIRE_SHUFFLE(0, 4, 8, 12, 2, 6, 10, 14, 0, 4, 8, 12, 2, 6, 10, 14);
#undef QUIRE_SHUFFLE
#else
  static_assert(N % 4 == 0 && N <= kLanes);
  typedef decltype(x[0][0] + 0) Number;
  typedef Number Four __attribute__((vector_size(16)));
  V out{};
  for (int m = 0; m < N; m += 4) {
    Four y[4];  // of each row, 4 lanes
    for (int i = 0; i < 4; ++i) {
      Four of[4];
      __builtin_memcpy(of, &x[m + i], sizeof(V));
      y[i] = function(function(of[0], of[2]), function(of[1], of[3]));
    }
    Four z[2];  // of two rows, 2 lanes each
    for (int i = 0; i < 2; ++i) {
      const Four a = y[2 * i], b = y[2 * i + 1];
      z[i] = function(__builtin_shufflevector(a, b, 0, 1, 4, 5), __builtin_shufflevector(a, b, 2, 3, 6, 7));
    }
    const Four all = function(__builtin_shufflevector(z[0], z[1], 0, 2, 4, 6),
                              __builtin_shufflevector(z[0], z[1], 1, 3, 5, 7));
    __builtin_memcpy((Number*)&out + m, &all, sizeof(all));
  }
  return out;
#endif
}

// Returns the sum of each half of the lanes, in all lanes of that half.
QUIRE_INLINE I add_halves(I x) {
  x += __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
  x += __builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
  x += __builtin_shufflevector(x, x, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
  return x;
}

// Narrow formats.

QUIRE_INLINE U widen(H x) {
#if defined(__AVX512F__)
  return (U)_mm512_cvtepu16_epi32((__m256i)x);
#else
  PartU out[kParts];
  for (int i = 0; i < kParts; ++i) out[i] = load_part_u16((const uint16_t*)&x + i * kPartLanes);
  return __builtin_bit_cast(U, out);
#endif
}

QUIRE_INLINE F from_bf16(H x) { return (F)(widen(x) << 16); }

QUIRE_INLINE F load_bf16(const uint16_t* from) { return from_bf16(load_as<H>(from)); }

// Rounds to nearest, ties to even; NaN stays NaN.
QUIRE_INLINE H to_bf16(F x) {
#if defined(__AVX512BF16__)
  return (H)_mm512_cvtneps_pbh((__m512)x);
#else
  U bits = (U)x;
  U rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  U quiet = (bits >> 16) | 0x40;
  return __builtin_convertvector((U)select(x != x, (I)quiet, (I)rounded), H);
#endif
}

QUIRE_INLINE float half_to_float(uint16_t h) {
  uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = (h >> 10) & 31, mantissa = h & 1023, bits;
  if (exponent == 31) {
    bits = sign | 0x7f800000 | (mantissa << 13);
  } else if (exponent != 0) {
    bits = sign | ((exponent + 112) << 23) | (mantissa << 13);
  } else {
    float value = (float)mantissa * (1.0f / 16777216.0f);  // 2^-24
    return sign ? -value : value;
  }
  float out;
  __builtin_memcpy(&out, &bits, 4);
  return out;
}

QUIRE_INLINE uint16_t float_to_half(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  uint32_t sign = (bits >> 16) & 0x8000, magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return (uint16_t)(sign | 0x7e00);
  if (magnitude >= 0x477ff000) return (uint16_t)(sign | 0x7c00);  // rounds to infinity
  if (magnitude < 0x38800000) {                                   // subnormal
    float scaled;
    __builtin_memcpy(&scaled, &magnitude, 4);
    return (uint16_t)(sign | (uint32_t)(int32_t)__builtin_rintf(scaled * 16777216.0f));
  }
  uint32_t rounded = magnitude + 0xfff + ((magnitude >> 13) & 1);
  return (uint16_t)(sign | ((rounded - 0x38000000) >> 13));
}

#if !defined(__AVX2__) && !defined(QUIRE_NEON)
QUIRE_INLINE Part load_part_f16(const uint16_t* from) {
  Part out;
  for (int i = 0; i < kPartLanes; ++i) out[i] = half_to_float(from[i]);
  return out;
}
#endif

QUIRE_INLINE F load_f16(const uint16_t* from) {
  Part out[kParts];
  for (int i = 0; i < kParts; ++i) out[i] = load_part_f16(from + i * kPartLanes);
  return __builtin_bit_cast(F, out);
}

QUIRE_INLINE H to_f16(F x) {
#if defined(__AVX512F__)
  return (H)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(QUIRE_NEON)
  float32x4_t from[4];
  float16x4_t out[4];
  __builtin_memcpy(from, &x, 64);
  for (int i = 0; i < 4; ++i) out[i] = vcvt_f16_f32(from[i]);
  return __builtin_bit_cast(H, out);
#else
  H out;
  for (int i = 0; i < kLanes; ++i) out[i] = float_to_half(x[i]);
  return out;
#endif
}

QUIRE_INLINE I load_s8(const int8_t* from) {
  Split<PartI> out;
  for (int i = 0; i < kParts; ++i) out.parts[i] = load_part_s8(from + i * kPartLanes);
  return joined(out);
}

// Converts lanes to bytes, which must fit.
QUIRE_INLINE S8 to_s8(I x) {
#if defined(__AVX512F__)
  return (S8)_mm512_cvtepi32_epi8((__m512i)x);
#else
  return __builtin_convertvector(x, S8);
#endif
}

// Dot products. Lane i of `w` has the 4 bytes (2 bf16) of output i; `x` has those of one row, for all lanes.

// acc[i] + sum over j < 4 of w[4i + j] * x[j], w unsigned (at most 127 if Small), x signed; exact. `x` points
// to the four bytes.
template <bool Small>
QUIRE_INLINE I dot4(I acc, B64 w, const int32_t* x) {
#if defined(__AVX512VNNI__)
  // Written out because GCC uses a register and an instruction to broadcast x, which this instruction does.
  asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(w), "m"(*x));
  return acc;
#elif defined(__AVX512BW__)
  const __m512i xs = _mm512_set1_epi32(*x);
  if constexpr (Small) {
    const __m512i pairs = _mm512_maddubs_epi16((__m512i)w, xs);
    return (I)_mm512_add_epi32((__m512i)acc, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
  }
  // Pairs of bytes up to 255 would saturate 16 bits: even and odd bytes are multiplied separately.
  const __m512i low = _mm512_set1_epi16(255);
  const __m512i even =
      _mm512_madd_epi16(_mm512_and_si512((__m512i)w, low), _mm512_srai_epi16(_mm512_slli_epi16(xs, 8), 8));
  const __m512i odd = _mm512_madd_epi16(_mm512_srli_epi16((__m512i)w, 8), _mm512_srai_epi16(xs, 8));
  return (I)_mm512_add_epi32((__m512i)acc, _mm512_add_epi32(even, odd));
#elif defined(__AVX2__)
  __m256i a[2], b[2];
  __builtin_memcpy(a, &acc, 64);
  __builtin_memcpy(b, &w, 64);
  const __m256i xs = _mm256_set1_epi32(*x);
  for (int i = 0; i < 2; ++i) {
#if defined(__AVXVNNI__)
    a[i] = _mm256_dpbusd_avx_epi32(a[i], b[i], xs);
#else
    if constexpr (Small) {
      const __m256i pairs = _mm256_maddubs_epi16(b[i], xs);
      a[i] = _mm256_add_epi32(a[i], _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    } else {
      const __m256i even = _mm256_madd_epi16(_mm256_and_si256(b[i], _mm256_set1_epi16(255)),
                                             _mm256_srai_epi16(_mm256_slli_epi16(xs, 8), 8));
      const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(b[i], 8), _mm256_srai_epi16(xs, 8));
      a[i] = _mm256_add_epi32(a[i], _mm256_add_epi32(even, odd));
    }
#endif
  }
  I out;
  __builtin_memcpy(&out, a, 64);
  return out;
#elif defined(QUIRE_NEON)
  int32x4_t a[4];
  uint8x16_t b[4];
  __builtin_memcpy(a, &acc, 64);
  __builtin_memcpy(b, &w, 64);
  dot4_quarters<Small>(a, b, vreinterpretq_s8_s32(vdupq_n_s32(*x)));
  return __builtin_bit_cast(I, a);
#else
  int8_t xs[4];
  __builtin_memcpy(xs, x, 4);
  const U words = (U)w;  // the first byte is the lowest: requires little endian
  for (int j = 0; j < 4; ++j) acc += (I)((words >> (8 * j)) & 255) * (int32_t)xs[j];
  return acc;
#endif
}

#if defined(__AVX512VNNI__)
// The same with x in a register, for several w.
QUIRE_INLINE I dot4(I acc, B64 w, I x) {
  return (I)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, (__m512i)x);
}

// acc[i] + a[2i] * b[2i] + a[2i + 1] * b[2i + 1] of 16-bit integers, exact.
QUIRE_INLINE I dot2_s16(I acc, I a, I b) {
  return (I)_mm512_dpwssd_epi32((__m512i)acc, (__m512i)a, (__m512i)b);
}

// Takes the lower 16 bits of each lane from `low`, the upper ones from `high`.
QUIRE_INLINE I join_s16(I low, I high) {
  return (I)_mm512_mask_blend_epi16(0xaaaaaaaa, (__m512i)low, (__m512i)high);
}

QUIRE_INLINE I multiply_s16(I a, I b) { return (I)_mm512_mullo_epi16((__m512i)a, (__m512i)b); }
#endif

#if defined(__AVX512BF16__)
// acc[i] + w[2i] * x[0] + w[2i + 1] * x[1].
QUIRE_INLINE F dot2_bf16(F acc, B64 w, int32_t x) {
  return (F)_mm512_dpbf16_ps((__m512)acc, (__m512bh)w, (__m512bh)_mm512_set1_epi32(x));
}
#endif

QUIRE_INLINE void prefetch(const void* where) { __builtin_prefetch(where, 0, 3); }

}  // namespace quire::QUIRE_ISA
