// Parts of sixteen lanes: machine registers, for the sums of inner loops.
//
// Where sixteen lanes are two or four registers, GCC keeps such a vector in memory when it is used in parts,
// and stores a sum after every addition. Loops whose sums are Parts have none there. vec.h makes the
// operations of sixteen lanes of these.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "kernels.h"
#include "neon.h"

#if defined(__AVX512F__)
#define QUIRE_PARTS 1
#elif defined(__AVX2__)
#define QUIRE_PARTS 2
#elif defined(QUIRE_NEON)
#define QUIRE_PARTS 4
#else
#define QUIRE_PARTS 1
#endif

namespace quire::QUIRE_ISA {

constexpr int kLanes = 16, kParts = QUIRE_PARTS, kPartLanes = kLanes / kParts;
constexpr int kPartRows = kParts > 1 ? 4 : 8;  // rows of a panel whose sums fit in registers
typedef float Part __attribute__((vector_size(4 * kPartLanes)));
typedef int32_t PartI __attribute__((vector_size(4 * kPartLanes)));
typedef uint32_t PartU __attribute__((vector_size(4 * kPartLanes)));

// Returns a * b + c, rounded once if the machine can; always the same way within one instruction set.
QUIRE_INLINE Part fma(Part a, Part b, Part c) {
#if defined(__AVX512F__)
  return (Part)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
  return (Part)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(QUIRE_NEON)
  return (Part)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

// Broadcasts a number: unlike x + Part{}, keeps the sign of zero.
QUIRE_INLINE Part splat_part(float x) { return x - Part{}; }

QUIRE_INLINE Part select(PartI mask, Part yes, Part no) { return mask ? yes : no; }
QUIRE_INLINE PartI select(PartI mask, PartI yes, PartI no) { return mask ? yes : no; }
QUIRE_INLINE Part max(Part a, Part b) { return a > b ? a : b; }
QUIRE_INLINE Part min(Part a, Part b) { return a < b ? a : b; }
QUIRE_INLINE PartI max(PartI a, PartI b) { return a > b ? a : b; }
QUIRE_INLINE Part abs(Part a) { return (Part)((PartI)a & 0x7fffffff); }
QUIRE_INLINE Part to_float(PartI a) { return __builtin_convertvector(a, Part); }

// Rounds to the nearest integer, ties to even; |x| must be below 2^22.
QUIRE_INLINE PartI to_int(Part x) {
  const Part magic = splat_part(12582912.0f);  // 1.5 * 2^23: adding it rounds off the fraction
  return (PartI)(x + magic) - (PartI)magic;
}

#if defined(__AVX2__) || defined(QUIRE_NEON)
QUIRE_INLINE Part load_part_f16(const uint16_t* from) {
#if defined(__AVX512F__)
  return (Part)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#elif defined(__AVX2__)
  return (Part)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
#else
  return (Part)vcvt_f32_f16(vld1_f16((const float16_t*)from));
#endif
}
#endif

// GCC widens eight numbers of 16 bits in halves, and bytes one at a time where a part has eight or four.
QUIRE_INLINE PartU load_part_u16(const uint16_t* from) {
#if defined(__AVX512F__)
  return (PartU)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from));
#elif defined(__AVX2__)
  return (PartU)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)from));
#else
  typedef uint16_t Halves __attribute__((vector_size(2 * kPartLanes)));
  Halves halves;
  __builtin_memcpy(&halves, from, sizeof(halves));
  return __builtin_convertvector(halves, PartU);
#endif
}

QUIRE_INLINE PartI load_part_s8(const int8_t* from) {
#if defined(__AVX512F__)
  return (PartI)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from));
#elif defined(__AVX2__)
  return (PartI)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from));
#elif defined(QUIRE_NEON)
  int32_t four;
  __builtin_memcpy(&four, from, sizeof(four));
  return (PartI)vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(four)))));
#else
  typedef int8_t Bytes __attribute__((vector_size(kPartLanes)));
  Bytes bytes;
  __builtin_memcpy(&bytes, from, sizeof(bytes));
  return __builtin_convertvector(bytes, PartI);
#endif
}

}  // namespace quire::QUIRE_ISA
