// What is done to one head before it is read or stored: rotation, and rounding to bfloat16.
#pragma once

#include "vector_math.h"

namespace quire::QUIRE_ISA {

// Turns the pairs (d, d + half) of the first 2 half elements. turn: [half] cosines, then sines.
QUIRE_INLINE void rotate_head(float* head, const float* turn, int64_t half) {
  int64_t d = 0;
  for (; d + kLanes <= half; d += kLanes) {
    const vf x = load(head + d), y = load(head + half + d), cosine = load(turn + d), sine = load(turn + half + d);
    store(head + d, fma(x, cosine, -(y * sine)));
    store(head + half + d, fma(y, cosine, x * sine));
  }
  for (; d < half; ++d) {
    const float x = head[d], y = head[half + d], cosine = turn[d], sine = turn[half + d];
    head[d] = fma(x, cosine, -(y * sine));
    head[half + d] = fma(y, cosine, x * sine);
  }
}

QUIRE_INLINE void narrow_head(const float* head, int64_t depth, uint16_t* to) {
  int64_t d = 0;
  for (; d + kLanes <= depth; d += kLanes) store_bf16(to + d, load(head + d));
  for (; d < depth; ++d) to[d] = to_bf16(head[d]);
}

}  // namespace quire::QUIRE_ISA
