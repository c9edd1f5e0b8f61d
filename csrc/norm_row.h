// The norm of one row: of a layer of its own, and of the rows that a linear layer packs.
#pragma once

#include "kernels.h"
#include "vector_math.h"

namespace quire::QUIRE_ISA {
namespace {

// The sum over k of each(vector k), the last vector filled up with `fill`: four sums side by side, then lane by lane.
// The width alone decides the order.
template <class Each>
QUIRE_INLINE float sum_row(const float* x, int64_t width, float fill, Each each) {
  vf sums[4] = {zero(), zero(), zero(), zero()};
  int64_t k = 0;
  for (; k + 4 * kLanes <= width; k += 4 * kLanes)
    for (int i = 0; i < 4; ++i) sums[i] = each(load(x + k + i * kLanes), sums[i]);
  for (; k + kLanes <= width; k += kLanes) sums[0] = each(load(x + k), sums[0]);
  if (k < width) sums[1] = each(load_some(x + k, width - k, fill), sums[1]);
  return sum_lanes((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

// y = the norm of x; they may be the same place.
QUIRE_INLINE void norm_row(const RowNorm& norm, const float* x, int64_t width, float* y) {
  const float size = static_cast<float>(width);
  float mean = 0;
  if (norm.subtract_mean) mean = sum_row(x, width, 0.0f, [](vf value, vf sum) { return sum + value; }) / size;
  const float squares = sum_row(x, width, mean, [=](vf value, vf sum) {
    vf d = value - mean;
    return fma(d, d, sum);
  });
  const float scale = 1.0f / __builtin_sqrtf(squares / size + norm.epsilon);
  int64_t k = 0;
  for (; k + kLanes <= width; k += kLanes) {
    vf value = (load(x + k) - mean) * scale;
    if (norm.weight) value *= load(norm.weight + k);
    if (norm.bias) value += load(norm.bias + k);
    store(y + k, value);
  }
  if (k < width) {
    const int64_t count = width - k;
    vf value = (load_some(x + k, count) - mean) * scale;
    if (norm.weight) value *= load_some(norm.weight + k, count);
    if (norm.bias) value += load_some(norm.bias + k, count);
    store_some(y + k, value, count);
  }
}

}  // namespace
}  // namespace quire::QUIRE_ISA
