// The activation functions of quire.program.numerics.
#pragma once

#include "functions.h"
#include "kernels.h"

namespace quire::QUIRE_ISA {

// Returns x Phi(x): x times the probability that a normal variable is less. Of the upper tail,
// erfc(|x| / sqrt 2), the negative logarithm is a polynomial: relative error 2e-7, or 3e-3 beyond 8.
QUIRE_INLINE Part gelu(Part x) {
  constexpr float kTerms[] = {6.625826642903121e-08f,  -1.131945055021788e-06f, 1.0990122973453254e-05f,
                              -6.562953058164567e-05f, 2.2215525677e-04f,       -3.716735591297038e-05f,
                              -4.788692109286785e-03f, 3.634097799658775e-02f,  3.1830814480781555e-01f,
                              7.978847622871399e-01f};
  const Part a = abs(x);
  Part p = splat_part(-1.6777002009860098e-09f);
  for (const float term : kTerms) p = fma(p, a, splat_part(term));
  const Part tail = select(a < 9.0f, exp(-p * a), Part{});
  return 0.5f * x * select(x < 0.0f, tail, 2.0f - tail);
}

// Returns x sigmoid(x), with e^-|x|, which neither overflows nor needs a second division.
QUIRE_INLINE Part silu(Part x) {
  const Part power = exp_negative((Part)((PartI)x | (int32_t)0x80000000));
  return select(x < 0.0f, x * power, x) / (1.0f + power);
}

QUIRE_INLINE Part activate(Activation activation, Part x) {
  switch (activation) {
    case Activation::none:
      return x;
    case Activation::silu:
      return silu(x);
    case Activation::relu:
      return select(x < 0.0f, Part{}, x);
    case Activation::relu2:
      return select(x < 0.0f, Part{}, x * x);
    case Activation::sigmoid:
      return sigmoid(x);
    case Activation::tanh:
      return tanh(x);
    case Activation::gelu:
      return gelu(x);
    case Activation::gelu_tanh: {  // Hendrycks and Gimpel, arXiv:1606.08415
      const Part inner = 0.79788456080286541f * fma(x * x * 0.044715f, x, x);
      return 0.5f * x * (1.0f + tanh(inner));
    }
  }
  return x;
}

#if QUIRE_PARTS > 1
QUIRE_INLINE F activate(Activation activation, F x) {
  return by_parts([&](Part part) { return activate(activation, part); }, x);
}
#endif

}  // namespace quire::QUIRE_ISA
