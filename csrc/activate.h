// The functions that results of a product go through. Each lane is computed by the same operations whatever its place.
#pragma once

#include "kernels.h"
#include "vector_math.h"

namespace quire::QUIRE_ISA {

QUIRE_INLINE vf activate(vf x, Activation activation) {
  switch (activation) {
    case Activation::kRelu:
      return x > 0.0f ? x : (x != x ? x : zero());
    case Activation::kSilu:
      return x * sigmoid(x);
    case Activation::kGelu:
      return x * 0.5f * (erf(x * 0.70710678118654752f) + 1.0f);
    case Activation::kGeluTanh:
      return x * 0.5f * (tanh(fma(x * x * x, broadcast(0.044715f), x) * 0.79788456080286536f) + 1.0f);
    case Activation::kQuickGelu:
      return x * sigmoid(x * 1.702f);
    case Activation::kNone:
      break;
  }
  return x;
}

}  // namespace quire::QUIRE_ISA
