// Attention in dot products of words: elements are multiplied as the cache stores them, two or four to a lane.
//
// 8-bit elements (VNNI): queries and weights are whole numbers of 24 bits, with a scale for each row (weights: for each
// row and tile), in three digits of 8 bits; sums of whole numbers are exact in any order. That rounds about as float32
// does, takes three instructions for four products of 16 lanes where floats take four, and nothing has to be widened.
// bfloat16 elements (AVX512-BF16): queries and weights are rounded to bfloat16, sums are float32.
#pragma once

#include <type_traits>

#include "attention_tiles.h"
#include "bf16_dot.h"

namespace quire::QUIRE_ISA {

inline constexpr float kLog2e = 1.44269504088896341f;
// Words of a row's weights: as many as a tile can have, and those of one part or digit.
inline constexpr int kWeightWords = kKeyTile;
inline constexpr int kDigitWords = kKeyTile / 4;
inline constexpr int kQueryDigitWords = kMaxHeadDim / 4;

#if defined(__AVX512VNNI__)
inline constexpr bool kDigitProducts = true;

// 8-bit elements. A row of queries: the digits' words, lowest digit first, then QueryScale.
struct Digits {
  static constexpr int kParts = 3;
  static constexpr int kQueryWords = kQueryDigitWords, kPartWords = kDigitWords;
  using Sum = vi;

  struct QueryScale {
    int32_t corrections[kParts];  // minus 128 times the sum of a digit: keys are multiplied as value + 128
    float factor;                 // of the whole number
  };
  static const QueryScale& query_scale(const float* row) {
    return *reinterpret_cast<const QueryScale*>(row + kParts * kQueryWords);
  }

  // A little less than what the digits hold, so that rounding never exceeds it. Scales have a lower bound, far below
  // what matters, so that their inverses are finite.
  static constexpr float kLargestQuery = 8355000.0f, kLargestWeight = 16777000.0f, kSmallest = 1e-30f;

  // NaN for anything that is not finite, so that it is not taken for a number.
  static QUIRE_INLINE float scale_of(vu size_bits, float& inverse, float largest) {
    const float size = bit_cast<float>(_mm512_reduce_max_epu32((__m512i)size_bits));  // NaN counts more than infinity
    const float top = size < kSmallest ? kSmallest : size;
    inverse = largest / top;
    return top / largest + (top - top);
  }

  static void load_query(const float* from, float scale, int64_t depth, float* row) {
    alignas(64) float scaled[kMaxHeadDim + kLanes];
    vu size{};
    for (int64_t d = 0; d < depth; d += kLanes) {
      const vf part = d + kLanes <= depth ? load(from + d) : load_some(from + d, depth - d);
      store(scaled + d, part * broadcast(scale));
      size = (vu)_mm512_maskz_max_epu32(0xffff, (__m512i)size, (__m512i)(load_as<vu>(scaled + d) & 0x7fffffffu));
    }
    auto& place = *reinterpret_cast<QueryScale*>(row + kParts * kQueryWords);
    float inverse;
    place.factor = scale_of(size, inverse, kLargestQuery);
    auto* words = reinterpret_cast<std::byte*>(row);
    vi digit_sums[kParts] = {};
    for (int64_t d = 0; d < depth; d += kLanes) {
      vi rest = (vi)_mm512_maskz_cvtps_epi32(0xffff, (__m512)(load(scaled + d) * broadcast(inverse)));
      for (int part = 0; part < kParts; ++part) {
        const vi digit = rest << 24 >> 24;  // signed
        rest = (rest - digit) >> 8;
        digit_sums[part] += digit;
        store_bytes(words + part * kQueryWords * kWordBytes + d, digit);
      }
    }
    for (int part = 0; part < kParts; ++part)
      place.corrections[part] = -128 * _mm512_reduce_add_epi32((__m512i)digit_sums[part]);
  }

  static QUIRE_INLINE vi start_score(const float* query, int part) {
    return broadcast_int(query_scale(query).corrections[part]);
  }
  static QUIRE_INLINE vi key(vi words) { return words ^ static_cast<int32_t>(0x80808080u); }
  static QUIRE_INLINE vi add_score(vi sum, vi query, vi key) {
    return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)key, (__m512i)query);
  }
  static QUIRE_INLINE vf whole(const vi& low, const vi& middle, const vi& high) {
    return fma(to_float(high), broadcast(65536.0f), fma(to_float(middle), broadcast(256.0f), to_float(low)));
  }
  template <int kCount>
  static QUIRE_INLINE vf finish_score(const float* query, const vi (&sum)[kParts][kCount], int i) {
    return whole(sum[0][i], sum[1][i], sum[2][i]) * broadcast(query_scale(query).factor);
  }

  // What a row's weights are multiplied with to be whole numbers, and what a number then stands for. A weight is at
  // most 1 before its value's scale, and the sum of a row's weights at least 1 in the end: it is the largest scale
  // that counts, of the keys that the row sees.
  struct WeightScale {
    vf scales[kTileVectors];
    float factor;

    QUIRE_INLINE void set(const KeyTile& tile, const Live& live, const Sight& sight) {
      vu size{};
#pragma GCC unroll 16
      for (int i = 0; i < kTileVectors; ++i) {
        scales[i] = live.has(i) ? sight.choose(i, load_scales(tile.value_scales, i), zero()) : zero();
        size = (vu)_mm512_maskz_max_epu32(0xffff, (__m512i)size, (__m512i)bit_cast<vu>(scales[i]));
      }
      float inverse;
      factor = scale_of(size, inverse, kLargestWeight);
#pragma GCC unroll 16
      for (int i = 0; i < kTileVectors; ++i) scales[i] *= broadcast(inverse);
    }
  };

  static QUIRE_INLINE vf weight(vf score, vf maximum, vf) { return exp_weight(score - maximum); }
  // Weights of a row, in words of four keys for each digit.
  static QUIRE_INLINE void store_weights(const vf* weights, const WeightScale& scale, std::byte* words) {
#pragma GCC unroll 16
    for (int i = 0; i < kTileVectors; ++i) {
      const vi number = (vi)_mm512_maskz_cvtps_epi32(0xffff, (__m512)(weights[i] * scale.scales[i]));
      for (int part = 0; part < kParts; ++part)
        store_bytes(words + part * kPartWords * kWordBytes + i * kLanes, number >> (8 * part));
    }
  }

  static QUIRE_INLINE vi start_value(vf) { return vi{}; }
  static QUIRE_INLINE vi value(vi words, int64_t, int64_t, int64_t) { return words; }  // unseen keys: digits of 0
  static QUIRE_INLINE vi add_value(vi sum, vi weights, vi value) {
    return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, (__m512i)value);
  }
  template <int kCount>
  static QUIRE_INLINE vf finish_value(const vi (&sum)[kParts][kCount], int i, vf before, float factor) {
    return fma(whole(sum[0][i], sum[1][i], sum[2][i]), broadcast(factor), before);
  }

  // The lowest byte of each lane.
  static QUIRE_INLINE void store_bytes(std::byte* to, vi value) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_maskz_cvtepi32_epi8(0xffff, (__m512i)value));
  }
};
static_assert(Digits::kParts * kQueryDigitWords + sizeof(Digits::QueryScale) / 4 <= kRowStride);
static_assert(Digits::kParts * kDigitWords <= kWeightWords);
#else
inline constexpr bool kDigitProducts = false;
struct Digits;
#endif

#if defined(QUIRE_BF16_DOT)
inline constexpr bool kPairProducts = true;

// bfloat16 elements. A row of queries: words of two.
struct Pairs {
  static constexpr int kParts = 1;
  static constexpr int kQueryWords = 0, kPartWords = 0;  // between parts
  using Sum = vf;

  static void load_query(const float* from, float scale, int64_t depth, float* row) {
    round_scaled_bf16(from, scale, depth, reinterpret_cast<uint16_t*>(row));
  }

  static QUIRE_INLINE vf start_score(const float*, int) { return zero(); }
  static QUIRE_INLINE vi key(vi words) { return words; }
  static QUIRE_INLINE vf add_score(vf sum, vi query, vi key) {
    return dot_bf16(sum, bit_cast<vu>(query), bit_cast<vu>(key));
  }
  template <int kCount>
  static QUIRE_INLINE vf finish_score(const float*, const vf (&sum)[kParts][kCount], int i) {
    return sum[0][i];
  }

  struct WeightScale {
    static constexpr float factor = 1;
    QUIRE_INLINE void set(const KeyTile&, const Live&, const Sight&) {}
  };
  // e^(score - maximum) for weights that are rounded to bfloat16: the error of 2^r, 3e-6 of the weight, is a thousandth of
  // that rounding's. scaled: -maximum * kLog2e. 0 for minus infinity, NaN for NaN.
  static QUIRE_INLINE vf weight(vf score, [[maybe_unused]] vf maximum, [[maybe_unused]] vf scaled) {
#if defined(__AVX512BF16__)
    const vf x = max(broadcast(-160.0f), fma(score, broadcast(kLog2e), scaled));  // 2^-160 is zero; NaN stays NaN
    const vf r = (vf)_mm512_maskz_reduce_ps(0xffff, (__m512)x, 1);                // x - floor(x)
    vf p = broadcast(1.34267e-2f);
    p = fma(p, r, broadcast(5.224245e-2f));
    p = fma(p, r, broadcast(2.4128022e-1f));
    p = fma(p, r, broadcast(6.9304484e-1f));
    p = fma(p, r, broadcast(1.0f));
    return (vf)_mm512_maskz_scalef_ps(0xffff, (__m512)p, (__m512)x);  // times 2^floor(x)
#else
    return exp_weight(score - maximum);
#endif
  }
  static QUIRE_INLINE void store_weights(const vf* weights, const WeightScale&, std::byte* words) {
    for (int i = 0; i < kTileVectors; ++i)
      round_bf16(reinterpret_cast<uint16_t*>(words) + i * kLanes, weights[i]);
  }

  static QUIRE_INLINE vf start_value(vf before) { return before; }
  // What lies beside the first or the last key may be anything, and 0 times that is not always 0.
  static QUIRE_INLINE vi value(vi words, int64_t key, int64_t low, int64_t high) {
    if (key < low) words &= static_cast<int32_t>(0xffff0000u);
    if (key + 1 >= high) words &= 0xffff;
    return words;
  }
  static QUIRE_INLINE vf add_value(vf sum, vi weights, vi value) {
    return dot_bf16(sum, bit_cast<vu>(weights), bit_cast<vu>(value));
  }
  template <int kCount>
  static QUIRE_INLINE vf finish_value(const vf (&sum)[kParts][kCount], int i, vf, float) {
    return sum[0][i];
  }
};
#else
inline constexpr bool kPairProducts = false;
struct Pairs;
#endif

// Whether elements of a type can be multiplied as they are stored, and how.
template <CacheType T>
inline constexpr bool kHasDots = T == CacheType::kI8 ? kDigitProducts : T == CacheType::kBF16 && kPairProducts;
template <CacheType T>
using Dots = std::conditional_t<T == CacheType::kI8, Digits, Pairs>;

// Rows whose sums are in registers at a time, and vectors of keys or values with them.
template <class D>
constexpr int dot_rows(int rows) {
  return D::kParts == 1 ? rows : rows <= 4 ? rows : rows % 4 == 0 ? 4 : 3;
}
template <class D>
constexpr int dot_vectors(int rows, int most) {
  for (int count = most; count > 1; count /= 2)
    if ((rows * D::kParts + 1) * count + 1 <= (kLanes == 16 ? 32 : 16)) return count;
  return 1;
}

// Where the tile that comes next is asked for: of decodes, whose few rows are multiplied as fast as keys and values come
// in, into the L1 cache; else into the L2 cache, where it pushes out nothing that other rows still need.
template <CacheType T, int R>
inline constexpr bool kIsNear = T == CacheType::kBF16 && R <= 8;
template <bool kNear>
QUIRE_INLINE void expect(const std::byte* address) {
  if constexpr (kNear)
    prefetch_near(address);
  else
    prefetch(address);
}

// As score_vectors: exact, or in order of d.
template <CacheType T, int R, int kCount, bool kNear>
QUIRE_INLINE void dot_scores(const float* query, const KeyTile& tile, const KeyTile& next, int first, int64_t depth,
                             float* scores) {
  using D = Dots<T>;
  const std::byte* keys[kCount];
  const std::byte* ahead[kCount];
#pragma GCC unroll 16
  for (int i = 0; i < kCount; ++i) {
    const int vector = first + i;
    keys[i] = tile.keys[vector / kSubtileVectors] + vector % kSubtileVectors * kLanes * kWordBytes;
    ahead[i] = next.keys[vector / kSubtileVectors];
  }
  typename D::Sum sum[R][D::kParts][kCount];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
    for (int part = 0; part < D::kParts; ++part)
#pragma GCC unroll 16
      for (int i = 0; i < kCount; ++i) sum[r][part][i] = D::start_score(query + r * kRowStride, part);
  for (int64_t word = 0; word < depth / word_elements(T); ++word) {
    const int64_t offset = word * kSubtile * kWordBytes;
    vi key[kCount];
#pragma GCC unroll 16
    for (int i = 0; i < kCount; i += kSubtileVectors) expect<kNear>(ahead[i] + offset);
#pragma GCC unroll 16
    for (int i = 0; i < kCount; ++i) key[i] = D::key(load_words(keys[i] + offset));
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
      for (int part = 0; part < D::kParts; ++part) {
        const float* place = query + r * kRowStride + part * D::kQueryWords + word;
        const vi q = broadcast_int(load_as<int32_t>(place));
#pragma GCC unroll 16
        for (int i = 0; i < kCount; ++i) sum[r][part][i] = D::add_score(sum[r][part][i], q, key[i]);
      }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
    for (int i = 0; i < kCount; ++i)
      store(scores + r * kKeyTile + (first + i) * kLanes,
            D::template finish_score<kCount>(query + r * kRowStride, sum[r], i));
}

template <CacheType T, int R>
void dot_score_rows(const float* query, const KeyTile& tile, const KeyTile& next, int64_t low, int64_t high,
                    int64_t depth, float* scores) {
  constexpr int kRows = dot_rows<Dots<T>>(R), kWide = dot_vectors<Dots<T>>(kRows, 4);
  for (int first = static_cast<int>(low) / (kWide * kLanes) * kWide; first * kLanes < high; first += kWide)
#pragma GCC unroll 16
    for (int r = 0; r < R; r += kRows)
      dot_scores<T, kRows, kWide, kIsNear<T, R>>(query + r * kRowStride, tile, r == 0 ? next : tile, first, depth,
                                  scores + r * kKeyTile);
}

// As value_vectors, of weights in words.
template <CacheType T, int R, int kCount, bool kHalf, bool kNear>
QUIRE_INLINE void dot_values(const std::byte* weights, const KeyTile& tile, const KeyTile& next, int64_t low,
                             int64_t high, int64_t depth, int64_t at, const float* decay, const float* factors,
                             float* sums) {
  using D = Dots<T>;
  constexpr int kElements = word_elements(T);
  typename D::Sum sum[R][D::kParts][kCount];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
    for (int part = 0; part < D::kParts; ++part)
#pragma GCC unroll 16
      for (int i = 0; i < kCount; ++i)
        sum[r][part][i] = D::start_value(load(sums + r * kRowStride + at + i * kLanes) * broadcast(decay[r]));
  if (low >= high) __builtin_unreachable();
  const auto first = static_cast<uint64_t>(low) / kElements, last = static_cast<uint64_t>(high - 1) / kElements;
  const uint64_t stride = static_cast<uint64_t>(depth) * kWordBytes, start = static_cast<uint64_t>(at) * kWordBytes;
  for (uint64_t word = first; word <= last; ++word) {
    constexpr uint64_t kSubtileWords = kSubtile / kElements;
    const uint64_t subtile = word / kSubtileWords, offset = word % kSubtileWords * stride + start;
    const std::byte* row = tile.values[subtile] + offset;
    const std::byte* ahead = next.values[subtile] + offset;
    const auto key = static_cast<int64_t>(word * kElements);
    vi value[kCount];
    for (int byte = 0; byte < kCount * kLanes * static_cast<int>(kWordBytes); byte += 64) expect<kNear>(ahead + byte);
#pragma GCC unroll 16
    for (int i = 0; i < kCount; ++i) {
      const std::byte* place = row + i * kLanes * kWordBytes;
      value[i] = D::value(kHalf ? load_half(place) : load_words(place), key, low, high);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
      for (int part = 0; part < D::kParts; ++part) {
        const std::byte* place = weights + (r * kWeightWords + part * D::kPartWords) * kWordBytes + word * kWordBytes;
        const vi p = broadcast_int(load_as<int32_t>(place));
#pragma GCC unroll 16
        for (int i = 0; i < kCount; ++i) sum[r][part][i] = D::add_value(sum[r][part][i], p, value[i]);
      }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
    for (int i = 0; i < kCount; ++i) {
      float* place = sums + r * kRowStride + at + i * kLanes;
      store(place, D::template finish_value<kCount>(sum[r], i, load(place) * broadcast(decay[r]), factors[r]));
    }
}

template <CacheType T, int R>
void dot_value_rows(const std::byte* weights, const KeyTile& tile, const KeyTile& next, int64_t low, int64_t high,
                    int64_t depth, const float* decay, const float* factors, float* sums) {
  constexpr int kRows = dot_rows<Dots<T>>(R), kWide = dot_vectors<Dots<T>>(kRows, 8);
#pragma GCC unroll 16
  for (int r = 0; r < R; r += kRows) {
    const KeyTile& ahead = r == 0 ? next : tile;
    const auto some = [&]<int kCount, bool kHalf>(int64_t at) {
      dot_values<T, kRows, kCount, kHalf, kIsNear<T, R>>(weights + r * kWeightWords * kWordBytes, tile, ahead, low, high, depth, at,
                                          decay + r, factors + r, sums + r * kRowStride);
    };
    int64_t at = 0;
    for (; at + kWide * kLanes <= depth; at += kWide * kLanes) some.template operator()<kWide, false>(at);
    if constexpr (kWide > 4)
      for (; at + 4 * kLanes <= depth; at += 4 * kLanes) some.template operator()<4, false>(at);
    if constexpr (kWide > 2)
      for (; at + 2 * kLanes <= depth; at += 2 * kLanes) some.template operator()<2, false>(at);
    if constexpr (kWide > 1)
      for (; at + kLanes <= depth; at += kLanes) some.template operator()<1, false>(at);
    if constexpr (kLanes == 16)
      if (at < depth) some.template operator()<1, true>(at);
  }
}

// As weigh_rows, with the weights in words and their scales in `factors`. kWhole: as sees_whole says. Not inline: beside
// the products, constants and sums would not all fit the registers.
template <CacheType T, bool kWhole>
[[gnu::noinline]] void dot_weigh_rows(const KeyTile& tile, int count, float soft_cap, float* scores, RowState* rows,
                                      float* decay, float* factors, std::byte* words) {
  using D = Dots<T>;
  const Live live(rows, count);
  typename D::WeightScale of_all, of_row;
  bool known = false;  // of_all: of rows that see the whole tile
  raise_maxima<T == CacheType::kI8, kWhole>(tile, count, soft_cap, scores, rows, decay);
  for (int r = 0; r < count; ++r) {
    const Sight sight(rows[r]);
    const bool masked = !kWhole && sight.masked;
    if (masked) {
      of_row.set(tile, live, sight);
    } else if (!known) {
      of_all.set(tile, live, sight);
      known = true;
    }
    const vf maximum = broadcast(rows[r].maximum);
    const vf scaled = min(broadcast(-kNothing), maximum * -kLog2e);  // finite for a row that has seen nothing
    vf sum = load(rows[r].weight_sum) * broadcast(decay[r]);
    vf weights[kTileVectors];
#pragma GCC unroll 16
    for (int i = 0; i < kTileVectors; ++i) {
      weights[i] = zero();
      if (!kWhole && !live.has(i)) continue;
      weights[i] = D::weight(load(scores + r * kKeyTile + i * kLanes), maximum, scaled);
      sum += weights[i];
    }
    store(rows[r].weight_sum, sum);
    const auto& scale = masked ? of_row : of_all;
    D::store_weights(weights, scale, words + r * kWeightWords * kWordBytes);
    factors[r] = scale.factor;
  }
}

}  // namespace quire::QUIRE_ISA
