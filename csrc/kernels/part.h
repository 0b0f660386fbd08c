// Parts of sixteen lanes: machine registers, for the sums of inner loops.
//
// Where sixteen lanes are two or four registers, GCC keeps such a vector in memory when it is used in parts,
// and stores a sum after every addition. Loops whose sums are Parts have none there.
#pragma once

#include "half.h"
#include "vec.h"

namespace quire::QUIRE_ISA {

#if defined(__AVX512F__)
constexpr int kParts = 1, kPartRows = 8;  // rows of a panel whose sums fit in registers
#elif defined(__AVX2__)
constexpr int kParts = 2, kPartRows = 4;
#elif defined(QUIRE_NEON)
constexpr int kParts = 4, kPartRows = 4;
#else
constexpr int kParts = 1, kPartRows = 8;
#endif

constexpr int kPartLanes = kLanes / kParts;
typedef float Part __attribute__((vector_size(4 * kPartLanes)));
typedef uint32_t PartU __attribute__((vector_size(4 * kPartLanes)));

#if defined(QUIRE_NEON)
QUIRE_INLINE Part fma(Part a, Part b, Part c) {
  return (Part)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
}
#endif

// Broadcasts a number: unlike x + Part{}, keeps the sign of zero.
QUIRE_INLINE Part splat_part(float x) { return x - Part{}; }

QUIRE_INLINE Part load_part_f16(const uint16_t* from) {
#if defined(__AVX512F__)
  return load_f16(from);
#elif defined(__AVX2__)
  return (Part)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
#elif defined(QUIRE_NEON)
  return (Part)vcvt_f32_f16(load_as<float16x4_t>(from));
#else
  return load_f16(from);
#endif
}

}  // namespace quire::QUIRE_ISA
