// Vectors of floats, one width for each instruction set that this file is compiled for. Arithmetic is the compiler's
// own on vector types; only what it does not express well is written with intrinsics. No contraction of a * b + c is
// left to the compiler (-ffp-contract=off): a fused operation is written `fma`, so that every kernel of an
// instruction set rounds alike.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define QUIRE_VECTOR_BYTES 64
#elif defined(__AVX2__)
#define QUIRE_VECTOR_BYTES 32
#else
#define QUIRE_VECTOR_BYTES 16
#endif

#define QUIRE_INLINE inline __attribute__((always_inline))

namespace quire::QUIRE_ISA {

inline constexpr int kLanes = QUIRE_VECTOR_BYTES / 4;

typedef float vf __attribute__((vector_size(QUIRE_VECTOR_BYTES)));
typedef int32_t vi __attribute__((vector_size(QUIRE_VECTOR_BYTES)));
typedef uint32_t vu __attribute__((vector_size(QUIRE_VECTOR_BYTES)));
typedef uint16_t vu16 __attribute__((vector_size(QUIRE_VECTOR_BYTES / 2)));
typedef int8_t vs8 __attribute__((vector_size(QUIRE_VECTOR_BYTES / 4)));
typedef uint8_t vu8 __attribute__((vector_size(QUIRE_VECTOR_BYTES / 4)));

template <class To, class From>
QUIRE_INLINE To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

template <class V>
QUIRE_INLINE V load_as(const void* address) {
  V value;
  std::memcpy(&value, address, sizeof(V));
  return value;
}

QUIRE_INLINE vf load(const float* address) { return load_as<vf>(address); }
QUIRE_INLINE void store(float* address, vf value) { std::memcpy(address, &value, sizeof(vf)); }
QUIRE_INLINE vf zero() { return vf{}; }

QUIRE_INLINE vf broadcast(float value) {
#if defined(__AVX512F__)
  return (vf)_mm512_set1_ps(value);
#elif defined(__AVX2__)
  return (vf)_mm256_set1_ps(value);
#else
  return vf{value, value, value, value};
#endif
}

QUIRE_INLINE vi broadcast_int(int32_t value) {
#if defined(__AVX512F__)
  return (vi)_mm512_set1_epi32(value);
#elif defined(__AVX2__)
  return (vi)_mm256_set1_epi32(value);
#else
  return vi{value, value, value, value};
#endif
}

// a * b + c, rounded once where the instruction set has it (twice on the portable one).
QUIRE_INLINE vf fma(vf a, vf b, vf c) {
#if defined(__AVX512F__)
  return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

QUIRE_INLINE float fma(float a, float b, float c) {
#if defined(__FMA__)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

// The larger of two; b where either is NaN.
QUIRE_INLINE vf max(vf a, vf b) {
#if defined(__AVX512F__)
  return (vf)_mm512_maskz_max_ps(0xffff, (__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return a > b ? a : b;
#endif
}

QUIRE_INLINE vf min(vf a, vf b) {
#if defined(__AVX512F__)
  return (vf)_mm512_maskz_min_ps(0xffff, (__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (vf)_mm256_min_ps((__m256)a, (__m256)b);
#else
  return a < b ? a : b;
#endif
}

QUIRE_INLINE vf to_float(vi value) { return __builtin_convertvector(value, vf); }

// kLanes elements of another type, widened.
QUIRE_INLINE vf load_bf16(const uint16_t* address) {
#if defined(__AVX512F__)
  // (g++ 12 makes two halves of the plain form, here and for 8 bits. Full masks cost nothing and silence it.)
  vu wide = (vu)_mm512_maskz_cvtepu16_epi32(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(address)));
#elif defined(__AVX2__)
  vu wide = (vu)_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(address)));
#else
  vu wide = __builtin_convertvector(load_as<vu16>(address), vu);
#endif
  return bit_cast<vf>(wide << 16);
}

QUIRE_INLINE vf load_f16(const uint16_t* address) {
#if defined(__AVX512F__)
  // (With a full mask, which costs nothing: the plain form warns in g++ 12.)
  return (vf)_mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(address)));
#elif defined(__F16C__)
  return (vf)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(address)));
#else
  vf value;
  for (int lane = 0; lane < kLanes; ++lane) {
    uint32_t half = address[lane], sign = (half & 0x8000u) << 16, rest = half & 0x7fffu;
    float number;
    if (rest >= 0x7c00u) {
      number = bit_cast<float>(0x7f800000u | (rest & 0x3ffu) << 13);
    } else {  // Exponent moved by multiplication, which also makes subnormals right.
      number = bit_cast<float>(rest << 13) * bit_cast<float>((254u - 15u) << 23);
    }
    value[lane] = bit_cast<float>(bit_cast<uint32_t>(number) | sign);
  }
  return value;
#endif
}

QUIRE_INLINE vf load_i8(const int8_t* address) {
#if defined(__AVX512F__)
  return to_float((vi)_mm512_maskz_cvtepi8_epi32(0xffff, _mm_loadu_si128(reinterpret_cast<const __m128i*>(address))));
#elif defined(__AVX2__)
  return to_float((vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(address))));
#else
  return to_float(__builtin_convertvector(load_as<vs8>(address), vi));
#endif
}

// Rounds to nearest, ties to even, as every conversion to bfloat16 does; NaN stays NaN.
QUIRE_INLINE uint16_t to_bf16(float value) {
  uint32_t bits = bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>(bits >> 16 | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

QUIRE_INLINE void store_bf16(uint16_t* address, vf value) {
  vu bits = bit_cast<vu>(value);
  vu rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  vu nan = (bits >> 16) | 0x40u;
  vu chosen = (bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded;
#if defined(__AVX512F__)
  __m256i narrow = _mm512_maskz_cvtepi32_epi16(0xffff, (__m512i)chosen);
#elif defined(__AVX2__)
  __m256i pairs = _mm256_permute4x64_epi64(_mm256_packus_epi32((__m256i)chosen, (__m256i)chosen), 0x08);
  __m128i narrow = _mm256_castsi256_si128(pairs);
#else
  vu16 narrow = __builtin_convertvector(chosen, vu16);
#endif
  std::memcpy(address, &narrow, sizeof(narrow));
}

// Lane i of the result is lane i ^ kDistance.
template <int kDistance, class Lanes = std::make_integer_sequence<int, kLanes>>
struct Exchange;
template <int kDistance, int... kLane>
struct Exchange<kDistance, std::integer_sequence<int, kLane...>> {
  static QUIRE_INLINE vf apply(vf value) { return __builtin_shufflevector(value, value, (kLane ^ kDistance)...); }
};

// Sum and maximum over lanes, in every lane; by halves: the order is fixed.
QUIRE_INLINE vf sum_everywhere(vf value) {
  if constexpr (kLanes > 8) value += Exchange<8>::apply(value);
  if constexpr (kLanes > 4) value += Exchange<4>::apply(value);
  value += Exchange<2>::apply(value);
  return value + Exchange<1>::apply(value);
}

QUIRE_INLINE vf max_everywhere(vf value) {
  if constexpr (kLanes > 8) value = max(value, Exchange<8>::apply(value));
  if constexpr (kLanes > 4) value = max(value, Exchange<4>::apply(value));
  value = max(value, Exchange<2>::apply(value));
  return max(value, Exchange<1>::apply(value));
}

QUIRE_INLINE float sum_lanes(vf value) { return sum_everywhere(value)[0]; }
QUIRE_INLINE float max_lanes(vf value) { return max_everywhere(value)[0]; }

// The first `count` elements (0 <= count <= kLanes), `fill` in the others. Nothing beyond them is touched.
QUIRE_INLINE vf load_some(const float* address, int64_t count, float fill = 0.0f) {
  float lane[kLanes];
  for (int i = 0; i < kLanes; ++i) lane[i] = i < count ? address[i] : fill;
  return load(lane);
}

QUIRE_INLINE void store_some(float* address, vf value, int64_t count) {
  float lane[kLanes];
  store(lane, value);
  for (int64_t i = 0; i < count; ++i) address[i] = lane[i];
}

}  // namespace quire::QUIRE_ISA
