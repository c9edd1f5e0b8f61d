// Floats of 8 and 4 bits, widened vector by vector (small_floats.h says what the codes stand for).
//
// An e4m3 code is a float16 whose exponent is 8 too small once its bits are moved to where float16 has them: sign and
// exponent by one conversion, subnormal ones too, which no float32 arithmetic meets before they are normal. An e2m1
// code is the index of a table that lies in a register.
#pragma once

#include "simd.h"
#include "small_floats.h"

namespace quire::QUIRE_ISA {

// What a widened e4m3 code still has to be multiplied with.
#if defined(__F16C__) || defined(__AVX512F__)
inline constexpr float kE4M3Factor = 256.0f;
#else
inline constexpr float kE4M3Factor = 1.0f;
#endif

struct PairOfVectors {
  vf low;
  vf high;
};

#if defined(__AVX512F__)
// The upper (kUpper) or lower bytes of 16-bit words, as float16.
template <bool kUpper>
QUIRE_INLINE __m512i e4m3_as_f16(__m512i words) {
  if constexpr (!kUpper) words = _mm512_slli_epi16(words, 8);
  return _mm512_and_si512(_mm512_srai_epi16(words, 1), _mm512_set1_epi16(static_cast<int16_t>(0xbf80)));
}
QUIRE_INLINE vf f16_to_float(__m256i half) { return (vf)_mm512_maskz_cvtph_ps(0xffff, half); }
#elif defined(__F16C__)
template <bool kUpper>
QUIRE_INLINE __m128i e4m3_as_f16(__m128i words) {
  if constexpr (!kUpper) words = _mm_slli_epi16(words, 8);
  return _mm_and_si128(_mm_srai_epi16(words, 1), _mm_set1_epi16(static_cast<int16_t>(0xbf80)));
}
QUIRE_INLINE vf f16_to_float(__m128i half) { return (vf)_mm256_cvtph_ps(half); }
#endif

// kLanes codes side by side, up to kE4M3Factor.
QUIRE_INLINE vf load_e4m3(const uint8_t* codes) {
#if defined(__AVX512F__)
  const __m256i words = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
  return f16_to_float(_mm512_castsi512_si256(e4m3_as_f16<false>(_mm512_castsi256_si512(words))));
#elif defined(__F16C__)
  return f16_to_float(
      e4m3_as_f16<false>(_mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes)))));
#else
  vf value;
  for (int lane = 0; lane < kLanes; ++lane) value[lane] = e4m3_value(codes[lane]);
  return value;
#endif
}

// Code `place` of 4 in each word, up to kE4M3Factor. What is the same for two or four places is computed once.
QUIRE_INLINE vf e4m3_of_word(vi words, int place) {
#if defined(__AVX512F__)
  const __m512i codes = (__m512i)words;
  const __m512i half = place % 2 == 0 ? e4m3_as_f16<false>(codes) : e4m3_as_f16<true>(codes);
  const vf low = f16_to_float(_mm512_castsi512_si256(half));  // places 0 and 2, or 1 and 3, of the first 8 words
  const vf high = f16_to_float(_mm512_maskz_extracti64x4_epi64(0xff, half, 1));
  if (place < 2)
    return __builtin_shufflevector(low, high, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  return __builtin_shufflevector(low, high, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
#elif defined(__F16C__)
  const __m128i first = _mm256_castsi256_si128((__m256i)words), second = _mm256_extracti128_si256((__m256i)words, 1);
  const vf low = f16_to_float(place % 2 == 0 ? e4m3_as_f16<false>(first) : e4m3_as_f16<true>(first));
  const vf high = f16_to_float(place % 2 == 0 ? e4m3_as_f16<false>(second) : e4m3_as_f16<true>(second));
  if (place < 2) return __builtin_shufflevector(low, high, 0, 2, 4, 6, 8, 10, 12, 14);
  return __builtin_shufflevector(low, high, 1, 3, 5, 7, 9, 11, 13, 15);
#else
  vf value;
  for (int lane = 0; lane < kLanes; ++lane) value[lane] = e4m3_value(words[lane] >> (8 * place) & 0x7f);
  return bit_cast<vf>(bit_cast<vi>(value) | (words << (24 - 8 * place) & static_cast<int32_t>(0x80000000u)));
#endif
}

// e4m3 codes of finite numbers, one a word: to nearest, ties to even, not beyond the largest. (Others give any code.)
QUIRE_INLINE vi e4m3_codes(vf x) {
  const vi sign = bit_cast<vi>(x) & static_cast<int32_t>(0x80000000u);
  const vf size = min(bit_cast<vf>(bit_cast<vi>(x) & 0x7fffffff), broadcast(kE4M3Largest));
  const vi bits = bit_cast<vi>(size);
  const vi normal = ((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - (120 << 3);
  const vf magic = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
  const vi subnormal = bit_cast<vi>(size * 0x1p9f + magic) - bit_cast<vi>(magic);
  return (size < 0x1p-6f ? subnormal : normal) | (bit_cast<vi>(bit_cast<vu>(sign) >> 24));
}

// Code j of 2 in each of 32 words of 16 bits, up to kE4M3Factor: kLanes columns from part * kLanes on, and as many from
// 16 columns further.
template <int j>
QUIRE_INLINE PairOfVectors load_e4m3_pair(const std::byte* words, [[maybe_unused]] int part) {
#if defined(__AVX512F__)
  const __m512i half = e4m3_as_f16<j == 1>(load_as<__m512i>(words));
  return {f16_to_float(_mm512_castsi512_si256(half)), f16_to_float(_mm512_maskz_extracti64x4_epi64(0xff, half, 1))};
#elif defined(__F16C__)
  const std::byte* low = words + part * kLanes * 2;
  return {f16_to_float(e4m3_as_f16<j == 1>(load_as<__m128i>(low))),
          f16_to_float(e4m3_as_f16<j == 1>(load_as<__m128i>(low + 32)))};
#else
  const auto* codes = reinterpret_cast<const uint8_t*>(words) + part * kLanes * 2 + j;
  PairOfVectors pair;
  for (int lane = 0; lane < kLanes; ++lane) {
    pair.low[lane] = e4m3_value(codes[2 * lane]);
    pair.high[lane] = e4m3_value(codes[2 * lane + 32]);
  }
  return pair;
#endif
}

// What a widened e2m1 code still has to be multiplied with.
#if defined(__AVX2__) && !defined(__AVX512F__)
inline constexpr float kE2M1Factor = 0.5f;
#else
inline constexpr float kE2M1Factor = 1.0f;
#endif

// The e2m1 codes in bits kPlace .. kPlace + 3 of each word, up to kE2M1Factor.
template <int kPlace>
QUIRE_INLINE vf e2m1_at(vi words) {
#if defined(__AVX512F__)
  const __m512 values = _mm512_set_ps(-6.0f, -4.0f, -3.0f, -2.0f, -1.5f, -1.0f, -0.5f, -0.0f, 6.0f, 4.0f, 3.0f, 2.0f,
                                      1.5f, 1.0f, 0.5f, 0.0f);
  return (vf)_mm512_maskz_permutexvar_ps(0xffff, (__m512i)(words >> kPlace), values);  // looks at 4 bits alone
#elif defined(__AVX2__)
  // All four bytes at once, doubled: what is the same for four places is computed once.
  const __m256i doubled =
      _mm256_broadcastsi128_si256(_mm_set_epi8(-12, -8, -6, -4, -3, -2, -1, 0, 12, 8, 6, 4, 3, 2, 1, 0));
  const vi codes = (kPlace % 8 == 0 ? words : words >> 4) & 0x0f0f0f0f;
  const vi bytes = (vi)_mm256_shuffle_epi8(doubled, (__m256i)codes);
  return to_float(bytes << (24 - kPlace / 8 * 8) >> 24);
#else
  vf value;
  for (int lane = 0; lane < kLanes; ++lane) value[lane] = e2m1_value(words[lane] >> kPlace & 15);
  return value;
#endif
}

// kLanes e8m0 codes.
QUIRE_INLINE vf load_e8m0(const uint8_t* codes) {
#if defined(__AVX512F__)
  const vi wide = (vi)_mm512_maskz_cvtepu8_epi32(0xffff, _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
#elif defined(__AVX2__)
  const vi wide = (vi)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes)));
#else
  const vi wide = __builtin_convertvector(load_as<vu8>(codes), vi);
#endif
  const vi bits = wide << 23;
  return bit_cast<vf>(bits == 0 ? broadcast_int(0x00400000) : bits);  // the smallest is subnormal
}

}  // namespace quire::QUIRE_ISA
