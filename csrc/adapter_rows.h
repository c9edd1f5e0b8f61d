// Rows of the matrices of adapters: A times rows of x, and how elements of A and B are read.
#pragma once

#include "adapters.h"
#include "simd.h"

namespace quire::QUIRE_ISA {
namespace {

inline constexpr int64_t kTurn = kAdapterAlignment;  // columns of a panel of B, inputs of a panel of A
inline constexpr int kTurnVectors = static_cast<int>(kTurn) / kLanes;
inline constexpr int64_t kDotRows = 3;        // rows of x that are multiplied at once
inline constexpr int64_t kShrinkAhead = 1024;  // bytes ahead of the reading that a stream of A is asked for

QUIRE_INLINE vf load_adapter(const float* from, WeightType) { return load(from); }
QUIRE_INLINE vf load_adapter(const uint16_t* from, WeightType type) {
  return type == WeightType::kF16 ? load_f16(from) : load_bf16(from);
}

// kBlocks blocks of rows of A, `apart` elements from one to the next, times kCount rows of x.
template <WeightType kType, class Element, int kBlocks, int kCount>
QUIRE_INLINE void dots(const Element* a, int64_t apart, const float* const* x, int64_t size, float (*sums)[kDotRows]) {
  constexpr int kBlockRows = kBlocks * static_cast<int>(kAdapterRanks);
  constexpr int64_t kStep = kAdapterRanks * kTurn;
  vf total[kBlockRows][kCount] = {};
  const auto add = [&](const Element* from, const vf* values) {
    for (int r = 0; r < kBlockRows; ++r) {
      const vf weight = load_adapter(from + r / kAdapterRanks * apart + r % kAdapterRanks * kTurn, kType);
      for (int t = 0; t < kCount; ++t) total[r][t] = fma(values[t], weight, total[r][t]);
    }
  };
  for (int64_t k = 0; k < size; k += kTurn, a += kStep) {
    for (int b = 0; b < kBlocks; ++b)
      for (int64_t line = 0; line < kStep * static_cast<int64_t>(sizeof(Element)); line += 64)
        __builtin_prefetch(reinterpret_cast<const std::byte*>(a + b * apart) + kShrinkAhead + line, 0, 3);
    for (int v = 0; v < kTurnVectors; ++v) {
      const int64_t left = size - k - v * kLanes;
      if (left <= 0) break;
      vf values[kCount];
      for (int t = 0; t < kCount; ++t) {
        const float* from = x[t] + k + v * kLanes;
        values[t] = left >= kLanes ? load(from) : load_some(from, left);
      }
      add(a + v * kLanes, values);
    }
  }
  for (int r = 0; r < kBlockRows; ++r)
    for (int t = 0; t < kCount; ++t) sums[r][t] = sum_lanes(total[r][t]);
}

}  // namespace
}  // namespace quire::QUIRE_ISA
