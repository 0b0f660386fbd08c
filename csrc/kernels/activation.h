// The activation functions of quire.program.numerics.
#pragma once

#include "kernels.h"
#include "vec.h"

namespace quire::QUIRE_ISA {

QUIRE_INLINE F activate(Activation activation, F x) {
  switch (activation) {
    case Activation::none:
      return x;
    case Activation::silu:
      return x * sigmoid(x);
    case Activation::relu:
      return x < 0.0f ? F{} : x;
    case Activation::gelu_tanh: {  // Hendrycks and Gimpel, arXiv:1606.08415
      const F inner = 0.79788456080286541f * fma(x * x * 0.044715f, x, x);
      return 0.5f * x * (1.0f + tanh(inner));
    }
  }
  return x;
}

}  // namespace quire::QUIRE_ISA
