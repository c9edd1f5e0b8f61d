// Products of bfloat16 pairs as AVX512-BF16 has them, for instruction sets that multiply bfloat16 (QUIRE_BF16_DOT).
//
// vdpbf16ps, in each lane: sum = fma(x1, w1, sum), then sum = fma(x0, w0, sum): the upper of the two values first, each
// step rounded once, to nearest. What is subnormal, operand or result, counts as zero of its sign. The rounding mode of
// the process has no say. With QUIRE_EMULATE_BF16 the same is made of plain operations, bit for bit: a product of two
// bfloat16 is exact in double precision, and its sum with a float32, rounded to double and then to float32, is rounded
// as if at once (where a sum does not fit a double, its terms are so far apart that it lies next to one of them, and
// both have fewer digits than a tie would need).
#pragma once

#include "simd.h"

#if defined(__AVX512BF16__) || defined(QUIRE_EMULATE_BF16)
#define QUIRE_BF16_DOT 1

namespace quire::QUIRE_ISA {

#if defined(QUIRE_EMULATE_BF16)

namespace bf16 {

typedef double vd __attribute__((vector_size(2 * QUIRE_VECTOR_BYTES)));

QUIRE_INLINE vf flush(vf value) {
  const vu bits = bit_cast<vu>(value);
  return bit_cast<vf>((bits & 0x7f800000u) == 0u ? bits & 0x80000000u : bits);
}

QUIRE_INLINE vf add_product(vf sum, vf x, vf w) {
  const vd product = __builtin_convertvector(flush(x), vd) * __builtin_convertvector(flush(w), vd);
  return flush(__builtin_convertvector(product + __builtin_convertvector(flush(sum), vd), vf));
}

}  // namespace bf16

// sum + the products of two bfloat16 in each word of x and w; the lower half is the first of a pair.
QUIRE_INLINE vf dot_bf16(vf sum, vu x, vu w) {
  sum = bf16::add_product(sum, bit_cast<vf>(x & 0xffff0000u), bit_cast<vf>(w & 0xffff0000u));
  return bf16::add_product(sum, bit_cast<vf>(x << 16), bit_cast<vf>(w << 16));
}

// kLanes values rounded to nearest, ties to even; subnormal ones to zero. NaN stays NaN.
QUIRE_INLINE void round_bf16(uint16_t* address, vf value) { store_bf16(address, bf16::flush(value)); }

// Two vectors, one behind the other.
QUIRE_INLINE void round_bf16_pair(uint16_t* address, vf first, vf second) {
  round_bf16(address, first);
  round_bf16(address + kLanes, second);
}

#else

QUIRE_INLINE vf dot_bf16(vf sum, vu x, vu w) {
  return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)w);
}

QUIRE_INLINE void round_bf16(uint16_t* address, vf value) {
  const __m256bh narrow = _mm512_cvtneps_pbh((__m512)value);
  std::memcpy(address, &narrow, sizeof(narrow));
}

QUIRE_INLINE void round_bf16_pair(uint16_t* address, vf first, vf second) {
  const __m512bh narrow = _mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
  std::memcpy(address, &narrow, sizeof(narrow));
}

#endif

// A row of `depth` values, scaled and rounded.
QUIRE_INLINE void round_scaled_bf16(const float* from, float scale, int64_t depth, uint16_t* to) {
  int64_t d = 0;
  for (; d + kLanes <= depth; d += kLanes) round_bf16(to + d, load(from + d) * broadcast(scale));
  if (d < depth) round_bf16(to + d, load_some(from + d, depth - d) * broadcast(scale));
}

}  // namespace quire::QUIRE_ISA

#endif
