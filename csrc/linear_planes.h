// Integers out of the bits that a panel has of them, four values of k in the bytes of a word, a word for each column.
#pragma once

#include "packed.h"
#include "simd.h"

namespace quire::QUIRE_ISA {

typedef uint8_t vb __attribute__((vector_size(QUIRE_VECTOR_BYTES)));

// The portable form is long: it is not copied to where it is used.
#if defined(__AVX2__)
#define QUIRE_SHORT QUIRE_INLINE
#else
#define QUIRE_SHORT [[gnu::noinline]] static
#endif

// One plane of a bit: 4 bits for each of kLanes columns, added to their bytes as bit `place`.
template <int place>
QUIRE_SHORT vi with_bits(vi words, const std::byte* bits) {
#if defined(__AVX512F__)
  return (vi)_mm512_mask_add_epi8((__m512i)words, load_as<uint64_t>(bits), (__m512i)words, _mm512_set1_epi8(1 << place));
#elif defined(__AVX2__)
  const __m256i each = _mm256_shuffle_epi8(_mm256_set1_epi32(load_as<int32_t>(bits)),
                                           _mm256_set_epi64x(0x0303030303030303, 0x0202020202020202, 0x0101010101010101, 0));
  const __m256i own = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201u));
  const __m256i is_set = _mm256_cmpeq_epi8(_mm256_and_si256(each, own), own);
  return words | (vi)_mm256_and_si256(is_set, _mm256_set1_epi8(1 << place));
#else
  const auto all = load_as<uint16_t>(bits);
  vb each;
  for (int i = 0; i < 16; ++i) each[i] = static_cast<uint8_t>((all >> i & 1) << place);
  return words | (vi)each;
#endif
}

// What a table has for each byte, 0 .. 15, of a word.
[[maybe_unused]] QUIRE_SHORT vi looked_up(const uint8_t (&table)[16], vi places) {
#if defined(__AVX512F__)
  const __m512i own = _mm512_maskz_broadcast_i32x4(0xffff, _mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
  return (vi)_mm512_shuffle_epi8(own, (__m512i)places);
#elif defined(__AVX2__)
  const __m256i own = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
  return (vi)_mm256_shuffle_epi8(own, (__m256i)places);
#else
  vb bytes = (vb)places;
  for (int i = 0; i < QUIRE_VECTOR_BYTES; ++i) bytes[i] = table[bytes[i]];
  return (vi)bytes;
#endif
}

// The numbers of nl4, kNonlinearBias larger.
alignas(16) inline constexpr uint8_t kNonlinearTable[16] = {0,   23,  44,  62,  78,  92,  105, 117,
                                                            128, 140, 152, 165, 180, 196, 216, 240};

// Integers of a type: kQuads vectors of four values of k, which lie in kBytes of a panel. get: the one of `quad`, of kLanes
// columns from `column` on, each value stored_bias larger than it is.
template <WeightType kType>
struct Quads {
  static constexpr bool kPlanes = has_planes(kType);
  static constexpr int kLowBits = kPlanes ? low_plane_bits(kType) : 4, kHighBits = kPlanes ? high_plane_bits(kType) : 0;
  static constexpr int kQuads = kPlanes ? static_cast<int>(plane_values(kType)) / 4 : 2;
  static constexpr int64_t kLowBytes = kQuads * kPanel * kLowBits / 2;
  static constexpr int64_t kBytes = kLowBytes + kQuads * kPanel * kHighBits / 2;

  static QUIRE_INLINE vi get(const std::byte* panel, int quad, int64_t column) {
    vi words;
    if constexpr (kLowBits == 4) {
      words = load_as<vi>(panel + quad / 2 * kPanel * 4 + column * 4);
      words = (quad % 2 ? words >> 4 : words) & 0x0f0f0f0f;
    } else {
      words = (load_as<vi>(panel + column * 4) >> (2 * quad)) & 0x03030303;
    }
    if constexpr (kType == WeightType::kNL4) words = looked_up(kNonlinearTable, words);
    const std::byte* high = panel + kLowBytes;
    if constexpr (kType == WeightType::kI3) words = with_bits<kLowBits>(words, high + quad * 16 + column / 2);
    if constexpr (kType == WeightType::kI5) {
      const vi upper = load_as<vi>(high + column * 4);
      words = words | ((quad < 4 ? upper << (4 - quad) : upper >> (quad - 4)) & 0x10101010);
    }
    if constexpr (kHighBits == 2) {
      const vi upper = load_as<vi>(high + column * 4);
      words = words | ((quad < 2 ? upper << (4 - 2 * quad) : upper >> (2 * quad - 4)) & 0x30303030);
    }
    return words;
  }

  // The values themselves, in signed bytes.
  static QUIRE_INLINE vi get_signed(const std::byte* panel, int quad, int64_t column, int bias) {
    return (vi)((vb)get(panel, quad, column) - static_cast<uint8_t>(bias));
  }
};

}  // namespace quire::QUIRE_ISA
