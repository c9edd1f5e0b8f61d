// Attention in dot products of words: elements are multiplied as the cache stores them, two or four to a lane.
//
// 8-bit elements (VNNI): queries and weights are whole numbers of 24 bits, with a scale for each row (weights: for each
// row and split), in three digits of 8 bits; sums of whole numbers are exact in any order. That rounds about as float32
// does, takes three instructions for four products of 16 lanes where floats take four, and nothing has to be widened.
// bfloat16 elements (AVX512-BF16): queries and weights are rounded to bfloat16, sums are float32.
//
// A row takes a split of kSplitKeys keys at a time: all scores, then their maximum and the weights, then the weighted sum of
// values, which stays in registers from the split's first key to its last.
#pragma once

#include <type_traits>

#include "attention_items.h"
#include "bf16_dot.h"

#if defined(QUIRE_BELOW)
namespace quire::QUIRE_BELOW {
extern const AttentionKernels kAttention;
}
#endif

namespace quire::QUIRE_ISA {
namespace {

inline constexpr float kLog2e = 1.44269504088896341f;
// Words of a row's weights in one digit, and of all: rows lie apart by no power of two, as those of scores do.
inline constexpr int kDigitWords = kSplitKeys / 4;
inline constexpr int kWeightWords = 3 * kDigitWords + 16;
inline constexpr int kScoreStride = kSplitKeys + 16;
inline constexpr int kQueryDigitWords = kMaxHeadDim / 4;
// Keys that weights are made of at a time, from a multiple on.
inline constexpr int64_t kStepKeys = 2 * kLanes;

// The steps of keys of which a row sees some.
QUIRE_INLINE int64_t first_step(const RowKeys& row) { return row.low / kStepKeys * kStepKeys; }
QUIRE_INLINE int64_t last_step(const RowKeys& row) { return (row.high + kStepKeys - 1) / kStepKeys * kStepKeys; }

// Which of kLanes keys from `key` on a row sees.
QUIRE_INLINE vi seen_lanes(const RowKeys& row, int64_t key) {
  vi place;
  for (int lane = 0; lane < kLanes; ++lane) place[lane] = lane;
  place += static_cast<int32_t>(key);
  return (place >= static_cast<int32_t>(row.low)) & (place < static_cast<int32_t>(row.high));
}

#if defined(__AVX512VNNI__)
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
    vf scales[kSplitKeys / kLanes];
    float factor;

    void set(const Split& split, const RowKeys& row) {
      const int64_t first = first_step(row), last = last_step(row);
      vu size{};
      for (int64_t key = first; key < last; key += kLanes) {
        const float* place = split.value_scales[key / kSubtile] + key % kSubtile;
        const vf scale = seen_lanes(row, key) ? load(place) : zero();
        scales[key / kLanes] = scale;
        size = (vu)_mm512_maskz_max_epu32(0xffff, (__m512i)size, (__m512i)bit_cast<vu>(scale));
      }
      float inverse;
      factor = scale_of(size, inverse, kLargestWeight);
      for (int64_t key = first; key < last; key += kLanes) scales[key / kLanes] *= broadcast(inverse);
    }
  };

  static QUIRE_INLINE vf weight(vf score, vf maximum, vf) { return exp_weight(score - maximum); }
  // Weights of the keys from `key` on, in words of four keys for each digit.
  static QUIRE_INLINE void store_weights(vf first, vf second, const WeightScale& scale, int64_t key, std::byte* words) {
    const vf weights[2] = {first * scale.scales[key / kLanes], second * scale.scales[key / kLanes + 1]};
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      const vi number = (vi)_mm512_maskz_cvtps_epi32(0xffff, (__m512)weights[i]);
      for (int part = 0; part < kParts; ++part)
        store_bytes(words + part * kPartWords * kWordBytes + key + i * kLanes, number >> (8 * part));
    }
  }
  static QUIRE_INLINE void clear_weights(int64_t key, std::byte* words) {
    for (int part = 0; part < kParts; ++part) std::memset(words + part * kPartWords * kWordBytes + key, 0, kStepKeys);
  }

  static QUIRE_INLINE vi value(vi words, int64_t, int64_t, int64_t) { return words; }  // unseen keys: digits of 0
  static QUIRE_INLINE vi add_value(vi sum, vi weights, vi value) {
    return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, (__m512i)value);
  }
  template <int kCount>
  static QUIRE_INLINE vf finish_value(const vi (&sum)[kParts][kCount], int i, float factor) {
    return whole(sum[0][i], sum[1][i], sum[2][i]) * broadcast(factor);
  }

  // The lowest byte of each lane.
  static QUIRE_INLINE void store_bytes(std::byte* to, vi value) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_maskz_cvtepi32_epi8(0xffff, (__m512i)value));
  }
};
static_assert(Digits::kParts * kQueryDigitWords + sizeof(Digits::QueryScale) / 4 <= kRowStride);
static_assert(Digits::kParts * kDigitWords <= kWeightWords);
#else
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
    QUIRE_INLINE void set(const Split&, const RowKeys&) {}
  };
  // e^(score - maximum) for weights that are rounded to bfloat16: the error of 2^r, 3e-6 of the weight, is a thousandth of
  // that rounding's. scaled: -maximum * kLog2e. 0 for minus infinity, NaN for NaN.
  static QUIRE_INLINE vf weight(vf score, [[maybe_unused]] vf maximum, [[maybe_unused]] vf scaled) {
#if defined(__AVX512DQ__)
    const vf x = fma(score, broadcast(kLog2e), scaled);
    const vf r = (vf)_mm512_maskz_reduce_ps(0xffff, (__m512)x, 1);  // x - floor(x), 0 of infinity
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
  static QUIRE_INLINE void store_weights(vf first, vf second, const WeightScale&, int64_t key, std::byte* words) {
    round_bf16_pair(reinterpret_cast<uint16_t*>(words) + key, first, second);
  }
  static QUIRE_INLINE void clear_weights(int64_t key, std::byte* words) { std::memset(words + key * 2, 0, kStepKeys * 2); }

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
  static QUIRE_INLINE vf finish_value(const vf (&sum)[kParts][kCount], int i, float) {
    return sum[0][i];
  }
};
#else
inline constexpr bool kPairProducts = false;
struct Pairs;
#endif

// How elements of a type are multiplied as they are stored.
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

// Memory that is read soon, of each 16 keys: what to ask for while their keys and their values are read. Blocks of a split are
// read one after the other, keys and then values, and are equally long: it is the one some places further.
struct Ahead {
  int64_t first, last;  // of 16 keys
  const std::byte* keys[kSplitSubtiles];
  const std::byte* values[kSplitSubtiles];

  // [low, high): the keys that are read. following: what comes behind them, kBlocksAhead.
  Ahead(const Split& split, int64_t low, int64_t high, const std::byte* const* following)
      : first(low / kSubtile), last((high - 1) / kSubtile) {
    const int64_t count = last - first + 1, ahead = smaller(kBlocksAhead, 2 * count);
    const auto block = [&](int64_t place) {
      if (place < count) return split.keys[first + place];
      return place < 2 * count ? split.values[first + place - count] : following[place - 2 * count];
    };
    for (int64_t i = 0; i < count; ++i) {
      keys[first + i] = block(i + ahead);
      values[first + i] = block(count + i + ahead);
    }
  }
};

// As score_vectors: exact, or in order of d.
template <CacheType T, int R, int kCount>
QUIRE_INLINE void dot_scores(const float* query, const Split& split, const Ahead& next, int64_t first, int64_t depth,
                             float* scores) {
  using D = Dots<T>;
  const std::byte* keys[kCount];
  const std::byte* ahead[kCount];
#pragma GCC unroll 16
  for (int i = 0; i < kCount; ++i) {
    const int64_t subtile = (first + i) / kSubtileVectors;
    keys[i] = split.keys[subtile] + (first + i) % kSubtileVectors * kLanes * kWordBytes;
    ahead[i] = next.keys[larger(next.first, smaller(subtile, next.last))];
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
    for (int i = 0; i < kCount; i += kSubtileVectors) prefetch_near(ahead[i] + offset);
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
  for (int i = 0; i < kCount; ++i) {
    vf scale = broadcast(1.0f);
    if constexpr (T == CacheType::kI8) {
      const int64_t key = (first + i) * kLanes;
      scale = load(split.key_scales[key / kSubtile] + key % kSubtile);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      vf score = D::template finish_score<kCount>(query + r * kRowStride, sum[r], i);
      if constexpr (T == CacheType::kI8) score *= scale;
      store(scores + r * kScoreStride + (first + i) * kLanes, score);
    }
  }
}

// Of at least all keys [low, high) of a split.
template <CacheType T, int R>
void dot_score_rows(const float* query, const Split& split, const Ahead& next, int64_t low, int64_t high, int64_t depth,
                    float* scores) {
  constexpr int kRows = dot_rows<Dots<T>>(R), kWide = dot_vectors<Dots<T>>(kRows, 4);
  static_assert(kWide * kLanes % kStepKeys == 0);
  for (int64_t first = low / (kWide * kLanes) * kWide; first * kLanes < high; first += kWide)
#pragma GCC unroll 16
    for (int r = 0; r < R; r += kRows)
      dot_scores<T, kRows, kWide>(query + r * kRowStride, split, next, first, depth, scores + r * kScoreStride);
}

// sums[r][at ...] = the values of keys [low, high) times their weights.
template <CacheType T, int R, int kCount, bool kHalf>
QUIRE_INLINE void dot_values(const std::byte* weights, const Split& split, const Ahead& next, int64_t low, int64_t high,
                             int64_t depth, int64_t at, const float* factors, float* sums) {
  using D = Dots<T>;
  constexpr int kElements = word_elements(T);
  typename D::Sum sum[R][D::kParts][kCount];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
    for (int part = 0; part < D::kParts; ++part)
#pragma GCC unroll 16
      for (int i = 0; i < kCount; ++i) sum[r][part][i] = typename D::Sum{};
  if (low >= high) __builtin_unreachable();
  const auto first = static_cast<uint64_t>(low) / kElements, last = static_cast<uint64_t>(high - 1) / kElements;
  const uint64_t stride = static_cast<uint64_t>(depth) * kWordBytes, start = static_cast<uint64_t>(at) * kWordBytes;
  for (uint64_t word = first; word <= last; ++word) {
    constexpr uint64_t kSubtileWords = kSubtile / kElements;
    const uint64_t subtile = word / kSubtileWords, offset = word % kSubtileWords * stride + start;
    const std::byte* row = split.values[subtile] + offset;
    const std::byte* ahead = next.values[subtile] + offset;
    const auto key = static_cast<int64_t>(word * kElements);
    vi value[kCount];
    for (int byte = 0; byte < kCount * kLanes * static_cast<int>(kWordBytes); byte += 64) prefetch_near(ahead + byte);
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
    for (int i = 0; i < kCount; ++i)
      store(sums + r * kRowStride + at + i * kLanes, D::template finish_value<kCount>(sum[r], i, factors[r]));
}

template <CacheType T, int R>
void dot_value_rows(const std::byte* weights, const Split& split, const Ahead& next, int64_t low, int64_t high,
                    int64_t depth, const float* factors, float* sums) {
  constexpr int kRows = dot_rows<Dots<T>>(R), kWide = dot_vectors<Dots<T>>(kRows, 8);
#pragma GCC unroll 16
  for (int r = 0; r < R; r += kRows) {
    const auto some = [&]<int kCount, bool kHalf>(int64_t at) {
      dot_values<T, kRows, kCount, kHalf>(weights + r * kWeightWords * kWordBytes, split, next, low, high, depth, at,
                                          factors + r, sums + r * kRowStride);
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

// The softmax of a row's scores: the weights of keys [begin, end), multiples of kStepKeys, in words. Scores that the row does
// not see beside those that it sees are overwritten.
template <class D>
QUIRE_INLINE void weigh_row(const RowKeys& row, float soft_cap, int64_t begin, int64_t end, const typename D::WeightScale& scale,
                            float* scores, std::byte* words, float& maximum, float& weight) {
  const vf minus_infinity = broadcast(-__builtin_inff());
  const int64_t first = first_step(row), last = last_step(row);
  const auto mask = [&](int64_t from) {
    for (int64_t at = from; at < from + kStepKeys; at += kLanes)
      store(scores + at, seen_lanes(row, at) ? load(scores + at) : minus_infinity);
  };
  if (soft_cap > 0)
    for (int64_t at = first; at < last; at += kLanes) store(scores + at, capped(load(scores + at), soft_cap));
  if (row.low % kStepKeys != 0) mask(first);
  if (row.high % kStepKeys != 0) mask(last - kStepKeys);
  vf top = minus_infinity, other_top = minus_infinity;
  for (int64_t at = first; at < last; at += kStepKeys) {
    top = max(load(scores + at), top);
    other_top = max(load(scores + at + kLanes), other_top);
  }
  const vf largest = max(max_everywhere(max(top, other_top)), broadcast(kNothing));
  const vf scaled = min(broadcast(-kNothing), largest * -kLog2e);  // finite for a row that has seen nothing
  vf sum = zero(), other_sum = zero();
  for (int64_t at = begin; at < first; at += kStepKeys) D::clear_weights(at, words);
  for (int64_t at = first; at < last; at += kStepKeys) {
    const vf part = D::weight(load(scores + at), largest, scaled);
    const vf other_part = D::weight(load(scores + at + kLanes), largest, scaled);
    sum += part;
    other_sum += other_part;
    D::store_weights(part, other_part, scale, at, words);
  }
  for (int64_t at = larger(begin, last); at < end; at += kStepKeys) D::clear_weights(at, words);
  maximum = largest[0];
  weight = sum_lanes(sum + other_sum);
}

// `count` rows, of which some see keys [low, high). Not inline: beside the products, constants and sums would not all fit the
// registers.
template <CacheType T>
[[gnu::noinline]] void dot_weigh_rows(const Split& split, const RowKeys* rows, int count, float soft_cap, float* scores,
                                      std::byte* words, float* factors, SplitResults& results, int64_t first) {
  using D = Dots<T>;
  const int64_t begin = first_step(rows[0]), end = last_step(rows[count - 1]);
  typename D::WeightScale scale;
  for (int r = 0; r < count; ++r) {
    if (r == 0 || rows[r].low != rows[r - 1].low || rows[r].high != rows[r - 1].high) scale.set(split, rows[r]);
    weigh_row<D>(rows[r], soft_cap, begin, end, scale, scores + r * kScoreStride, words + r * kWeightWords * kWordBytes,
                 results.maximum[first + r], results.weight[first + r]);
    factors[r] = scale.factor;
  }
}

#if defined(QUIRE_BELOW)

// What an instruction set does with instructions of its own; the one below it does the rest, of which the code would be the
// same.
constexpr CacheType kOwnCache = kPairProducts ? CacheType::kBF16 : CacheType::kI8;
inline bool is_own(const AttentionArgs& args) {
  return args.cache == kOwnCache && (!kPairProducts || args.precision == MatmulPrecision::kBFloat16);
}

inline void prepare(const AttentionArgs& args, const Step& step, Team& team) {
  QUIRE_BELOW::kAttention.prepare(args, step, team);
}

inline std::size_t attend_scratch(const AttentionArgs& args, int64_t rows, int threads) {
  return QUIRE_BELOW::kAttention.attend_scratch(args, rows, threads);
}

#endif

}  // namespace
}  // namespace quire::QUIRE_ISA
