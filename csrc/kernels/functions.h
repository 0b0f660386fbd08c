// Mathematical functions of the lanes of a Part, and of sixteen.
#pragma once

#include "vec.h"

namespace quire::QUIRE_ISA {

// Returns 2^n * p for integer n; infinity or zero beyond the range of a float.
QUIRE_INLINE Part scale_by_power(Part p, Part n) {
#if defined(__AVX512F__)
  return (Part)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
  const PartI whole = to_int(n),
              half = whole >> 1;  // in two factors: n may be 128, whose power exceeds a float
  return p * (Part)((half + 127) << 23) * (Part)((whole - half + 127) << 23);
#endif
}

// Returns e^x to 2 units in the last place: 2^n times a polynomial on [-ln 2 / 2, ln 2 / 2].
QUIRE_INLINE Part exp(Part x) {
  const Part clamped =
      min(splat_part(89.0f), max(splat_part(-104.0f), x));  // the order of the operands preserves NaN
#if defined(__AVX512F__)
  const Part n = (Part)_mm512_roundscale_ps((__m512)(clamped * 1.44269504088896341f), 8);
#else
  const Part n = to_float(to_int(clamped * 1.44269504088896341f));
#endif
  Part r = fma(n, splat_part(-0.693359375f), clamped);
  r = fma(n, splat_part(2.12194440e-4f), r);
  Part p = splat_part(1.9875691500e-4f);
  p = fma(p, r, splat_part(1.3981999507e-3f));
  p = fma(p, r, splat_part(8.3334519073e-3f));
  p = fma(p, r, splat_part(4.1665795894e-2f));
  p = fma(p, r, splat_part(1.6666665459e-1f));
  p = fma(p, r, splat_part(5.0000001201e-1f));
  return scale_by_power(fma(p * r, r, r) + 1.0f, n);
}

// Returns e^x for x <= 0 to one unit in the last place, and exactly 1 at 0; 0 below -87.7; NaN of NaN.
QUIRE_INLINE Part exp_negative(Part x) {
  x = max(splat_part(-88.0f), x);
  // 2^n without a conversion: the lowest bits of `shifted` are n + 127, the exponent of a float; that of -127
  // makes 0.
  const Part bias = splat_part(12582912.0f + 127.0f),
             shifted = fma(x, splat_part(1.44269504088896341f), bias);
  const Part power = (Part)((PartI)shifted << 23);
  const Part r = fma(shifted - bias, splat_part(-0.693147182464599609f), x), r2 = r * r;
  // Minimax for |r| <= ln 2 / 2: relative error 9.2e-8. In pairs: the sums wait less for each other.
  const Part low = fma(splat_part(9.9999970543e-1f), r, splat_part(1.0f));
  const Part middle = fma(splat_part(1.6667640067e-1f), r, splat_part(4.9999146143e-1f));
  const Part high = fma(splat_part(8.2902294979e-3f), r, splat_part(4.1898390805e-2f));
  return fma(fma(high, r2, middle), r2, low) * power;
}

// Returns ln(1 + e^x) to two units in the last place.
QUIRE_INLINE Part softplus(Part x) {
  const Part e = exp_negative(-abs(x)), z = e / (e + 2.0f), z2 = z * z;
  // ln(1 + e) = 2 atanh z with z <= 1/3: a fit of atanh z / z, relative error 1.6e-8.
  Part p = splat_part(1.3433774691e-1f);
  p = fma(p, z2, splat_part(1.4116977956e-1f));
  p = fma(p, z2, splat_part(2.0003835431e-1f));
  p = fma(p, z2, splat_part(3.3333319833e-1f));
  const Part twice = z + z;
  return max(splat_part(0.0f), x) + fma(twice * z2, p, twice);
}

QUIRE_INLINE Part sigmoid(Part x) { return 1.0f / (1.0f + exp(-x)); }

// Returns (1 - e^-2|x|) / (1 + e^-2|x|) with the sign of x; a series where that would cancel.
QUIRE_INLINE Part tanh(Part x) {
  const Part a = abs(x), e = exp(a * -2.0f), x2 = x * x;
  const Part far = (1.0f - e) / (1.0f + e);
  Part p = splat_part(-5.70498872745e-3f);  // Cephes tanhf, |x| < 0.625
  p = fma(p, x2, splat_part(2.06390887954e-2f));
  p = fma(p, x2, splat_part(-5.37397155531e-2f));
  p = fma(p, x2, splat_part(1.33314422036e-1f));
  p = fma(p, x2, splat_part(-3.33332819422e-1f));
  const Part near = fma(p * x2, x, x);
  const Part signed_far = (Part)((PartI)far | ((PartI)x & (int32_t)0x80000000));
  return select(a < 0.625f, near, select(x != x, x, signed_far));
}

#if QUIRE_PARTS > 1
QUIRE_INLINE F exp(F x) { return QUIRE_BY_PARTS(exp, x); }
QUIRE_INLINE F exp_negative(F x) { return QUIRE_BY_PARTS(exp_negative, x); }
QUIRE_INLINE F softplus(F x) { return QUIRE_BY_PARTS(softplus, x); }
QUIRE_INLINE F sigmoid(F x) { return QUIRE_BY_PARTS(sigmoid, x); }
QUIRE_INLINE F tanh(F x) { return QUIRE_BY_PARTS(tanh, x); }
#endif

}  // namespace quire::QUIRE_ISA
