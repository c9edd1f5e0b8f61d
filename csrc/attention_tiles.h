// Attention inside registers: scores of some rows and 64 keys, their softmax, and the weighted sum of values. What is
// done for one row never depends on how many rows share the loads.
#pragma once

#include "attention.h"
#include "small_float_vectors.h"
#include "vector_math.h"

namespace quire::QUIRE_ISA {

// Rows of queries and sums lie this many elements apart: constant offsets, and no two rows on the same cache sets.
inline constexpr int64_t kRowStride = kMaxHeadDim + 16;
// Most rows whose sums fit the registers next to two vectors of keys. x86-64 without AVX2 is rare, and two heights take the
// compiler half the time of four.
#if defined(__x86_64__) && !defined(__AVX2__)
inline constexpr int kTileRows = 2;
#else
inline constexpr int kTileRows = kLanes == 16 ? 12 : kLanes == 8 ? 6 : 4;
#endif
inline constexpr int kTileVectors = kKeyTile / kLanes;
inline constexpr int kSubtileVectors = kSubtile / kLanes;
inline constexpr int kSubtiles = kKeyTile / kSubtile;

// Where 64 consecutive keys and values lie, 16 at a time, in words: keys [head_dim / p][16], values [16 / p][head_dim].
// scales: of i8, one for each of the 16.
struct KeyTile {
  const std::byte* keys[kSubtiles];
  const std::byte* values[kSubtiles];
  const float* key_scales[kSubtiles];
  const float* value_scales[kSubtiles];
};

QUIRE_INLINE vi load_words(const std::byte* address) { return load_as<vi>(address); }

// The first 8 of 16 words; the others are zero.
QUIRE_INLINE vi load_half(const std::byte* address) {
  std::byte wide[kLanes * kWordBytes] = {};
  std::memcpy(wide, address, kLanes > 8 ? 8 * kWordBytes : kLanes * kWordBytes);
  return load_words(wide);
}

// Element `place` of each word, of e4m3 up to element_factor.
template <CacheType T>
QUIRE_INLINE vf word_element(vi words, int place) {
  if constexpr (T == CacheType::kE4M3) return e4m3_of_word(words, place);
  if constexpr (T == CacheType::kF32) return bit_cast<vf>(words);
  if constexpr (T == CacheType::kBF16)
    return bit_cast<vf>(place == 0 ? words << 16 : words & static_cast<int32_t>(0xffff0000u));
  return to_float(words << (24 - 8 * place) >> 24);
}

// What elements of words still have to be multiplied with.
template <CacheType T>
inline constexpr float element_factor = T == CacheType::kE4M3 ? kE4M3Factor : 1.0f;

// What a key's score begins with, from its first words: 0, or NaN for an e4m3 key of NaNs.
template <CacheType T>
QUIRE_INLINE vf first_score(vi words) {
  if constexpr (T != CacheType::kE4M3) return zero();
  return bit_cast<vf>(((words & kE4M3NaN) == kE4M3NaN) & 0x7fc00000);
}

QUIRE_INLINE void prefetch(const std::byte* address) { __builtin_prefetch(address, 0, 2); }
QUIRE_INLINE void prefetch_near(const std::byte* address) { __builtin_prefetch(address, 0, 3); }

// scores[r][key] = sum over d of query[r][d] * key[d], in order of d, for kCount vectors of keys.
template <CacheType T, int R, int kCount>
QUIRE_INLINE void score_vectors(const float* query, const KeyTile& tile, const KeyTile& next, int first, int64_t depth,
                                float* scores) {
  constexpr int kElements = word_elements(T);
  const std::byte* keys[kCount];
  const std::byte* ahead[kCount];
  for (int i = 0; i < kCount; ++i) {
    const int vector = first + i;
    keys[i] = tile.keys[vector / kSubtileVectors] + vector % kSubtileVectors * kLanes * kWordBytes;
    ahead[i] = next.keys[vector / kSubtileVectors];
  }
  vf sum[R][kCount];
  for (int i = 0; i < kCount; ++i) {
    const vf start = first_score<T>(load_words(keys[i]));
    for (int r = 0; r < R; ++r) sum[r][i] = start;
  }
  for (int64_t d = 0; d < depth; d += kElements) {
    const int64_t offset = d / kElements * kSubtile * kWordBytes;
    vi words[kCount];
    for (int i = 0; i < kCount; i += kSubtileVectors) prefetch(ahead[i] + offset);
    for (int i = 0; i < kCount; ++i) words[i] = load_words(keys[i] + offset);
    for (int place = 0; place < kElements; ++place) {
      vf key[kCount];
      for (int i = 0; i < kCount; ++i) key[i] = word_element<T>(words[i], place);
      for (int r = 0; r < R; ++r) {
        vf q = broadcast(query[r * kRowStride + d + place]);
        for (int i = 0; i < kCount; ++i) sum[r][i] = fma(q, key[i], sum[r][i]);
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int i = 0; i < kCount; ++i) store(scores + r * kKeyTile + (first + i) * kLanes, sum[r][i]);
}

// Of the vectors that hold keys [low, high).
template <CacheType T, int R>
void score_rows(const float* query, const KeyTile& tile, const KeyTile& next, int64_t low, int64_t high, int64_t depth,
                float* scores) {
  constexpr int kWide = R * 4 + 5 <= (kLanes == 16 ? 32 : 16) ? 4 : 2;
  for (int first = static_cast<int>(low) / (kWide * kLanes) * kWide; first * kLanes < high; first += kWide)
    score_vectors<T, R, kWide>(query, tile, next, first, depth, scores);
}

// sums[r][at ...] = sums[r] * decay[r] + weights[r][key] * value[key], in order of the keys [low, high).
template <CacheType T, int R, int kCount, bool kHalf>
QUIRE_INLINE void value_vectors(const float* weights, const KeyTile& tile, const KeyTile& next, int64_t low,
                                int64_t high, int64_t depth, int64_t at, const float* decay, float* sums) {
  constexpr int kElements = word_elements(T);
  vf sum[R][kCount];
  for (int r = 0; r < R; ++r)
    for (int i = 0; i < kCount; ++i) sum[r][i] = load(sums + r * kRowStride + at + i * kLanes) * broadcast(decay[r]);
  for (int64_t key = low / kElements * kElements; key < high; key += kElements) {
    const int64_t offset = (key % kSubtile / kElements * depth + at) * kWordBytes;
    const std::byte* row = tile.values[key / kSubtile] + offset;
    const std::byte* ahead = next.values[key / kSubtile] + offset;
    vi words[kCount];
    for (int i = 0; i < kCount; ++i)
      words[i] = kHalf ? load_half(row + i * kLanes * kWordBytes) : load_words(row + i * kLanes * kWordBytes);
    for (int byte = 0; byte < kCount * kLanes * static_cast<int>(kWordBytes); byte += 64) prefetch(ahead + byte);
    for (int place = 0; place < kElements; ++place) {
      if (key + place < low || key + place >= high) continue;
      vf value[kCount];
      for (int i = 0; i < kCount; ++i) value[i] = word_element<T>(words[i], place);
      for (int r = 0; r < R; ++r) {
        vf p = broadcast(weights[r * kKeyTile + key + place]);
        for (int i = 0; i < kCount; ++i) sum[r][i] = fma(p, value[i], sum[r][i]);
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int i = 0; i < kCount; ++i) store(sums + r * kRowStride + at + i * kLanes, sum[r][i]);
}

template <CacheType T, int R>
void value_rows(const float* weights, const KeyTile& tile, const KeyTile& next, int64_t low, int64_t high,
                int64_t depth, const float* decay, float* sums) {
  constexpr int kRegisters = kLanes == 16 ? 32 : 16;
  constexpr int kWide = R * 8 + 9 <= kRegisters ? 8 : R * 4 + 5 <= kRegisters ? 4 : 2;
  int64_t at = 0;
  for (; at + kWide * kLanes <= depth; at += kWide * kLanes)
    value_vectors<T, R, kWide, false>(weights, tile, next, low, high, depth, at, decay, sums);
  if constexpr (kWide == 8)
    if (at + 4 * kLanes <= depth) {
      value_vectors<T, R, 4, false>(weights, tile, next, low, high, depth, at, decay, sums);
      at += 4 * kLanes;
    }
  if constexpr (kWide >= 4)
    if (at + 2 * kLanes <= depth) {
      value_vectors<T, R, 2, false>(weights, tile, next, low, high, depth, at, decay, sums);
      at += 2 * kLanes;
    }
  if (at + kLanes <= depth) {
    value_vectors<T, R, 1, false>(weights, tile, next, low, high, depth, at, decay, sums);
    at += kLanes;
  }
  if constexpr (kLanes == 16)
    if (at < depth) value_vectors<T, R, 1, true>(weights, tile, next, low, high, depth, at, decay, sums);
}

// e^x of a softmax, x <= 0: the largest is 1, so an error of 2e-7 (of 1, not of e^x) is as good as exp's and costs two
// thirds of it. 0 below -87.33, NaN for NaN.
QUIRE_INLINE vf exp_weight(vf x) {
  const vf log2e = broadcast(1.44269504088896341f), lowest = broadcast(-87.3365479f), magic = broadcast(12582912.0f);
  const vf bounded = max(lowest, x);  // NaN stays NaN
  const vf shifted = fma(bounded, log2e, magic);
  const vf n = shifted - magic;
  const vf r = fma(bounded, log2e, -n);
  vf p = broadcast(1.32647e-3f);  // 2^r on [-0.5, 0.5]
  p = fma(p, r, broadcast(9.67151e-3f));
  p = fma(p, r, broadcast(5.550734e-2f));
  p = fma(p, r, broadcast(2.4022242e-1f));
  p = fma(p, r, broadcast(6.9314698e-1f));
  p = fma(p, r, broadcast(1.0f));
#if defined(__AVX512F__)
  return (vf)_mm512_maskz_scalef_ps(_mm512_cmp_ps_mask((__m512)x, (__m512)lowest, _CMP_NLT_UQ), (__m512)p, (__m512)n);
#else
  const vi exponent = (bit_cast<vi>(shifted) - bit_cast<vi>(magic)) << 23;  // -126 at least
  return x < lowest ? vf{} : x != x ? x : bit_cast<vf>(bit_cast<vi>(p) + exponent);
#endif
}

// cap * tanh(score / cap), from e^(2 |x|): absolute error within some 1e-7 of the cap.
QUIRE_INLINE vf capped(vf score, float cap) {
  const vf x = score * (1.0f / cap);
  const vf size = x < 0.0f ? -x : x;
  const vf tanh = 1.0f - 2.0f / (exp(size + size) + 1.0f);
  return cap * (x < 0.0f ? -tanh : tanh);
}

// What a row sees of some keys: [low, high) of them. position: its own; last: the last that it sees.
struct RowKeys {
  int64_t position, last;
  int64_t low, high;
};

// What a row has seen of a split so far; its keys are those of the current tile.
struct RowState : RowKeys {
  float maximum;
  float weight_sum[kLanes];  // by lane
};

// What a row sees of a tile: some of its keys (masked) or all.
struct Sight {
  vi low, high;
  bool masked;

  QUIRE_INLINE explicit Sight(const RowState& row)
      : low(broadcast_int(static_cast<int32_t>(row.low))),
        high(broadcast_int(static_cast<int32_t>(row.high))),
        masked(row.low > 0 || row.high < kKeyTile) {}

  // `value` for the keys of vector i that the row sees, `other` for the others.
  QUIRE_INLINE vf choose(int i, vf value, vf other) const {
    if (!masked) return value;
    vi key;
    for (int lane = 0; lane < kLanes; ++lane) key[lane] = lane;
    key += i * kLanes;
    return ((key >= low) & (key < high)) ? value : other;
  }
};

// The vectors of a tile with keys that some of `count` rows see.
struct Live {
  int begin, end;

  QUIRE_INLINE Live(const RowState* rows, int count)
      : begin(static_cast<int>(rows[0].low) / kLanes),
        end((static_cast<int>(rows[count - 1].high) + kLanes - 1) / kLanes) {}
  QUIRE_INLINE bool has(int i) const { return i >= begin && i < end; }
};

// The scale of vector i's keys or values.
QUIRE_INLINE vf load_scales(const float* const* scales, int i) {
  return load(scales[i / kSubtileVectors] + i % kSubtileVectors * kLanes);
}

// Scores of live vectors as they are weighed: scaled, capped, minus infinity for keys that a row does not see. Moves
// each row's maximum; decay[r]: e^(the old one - the new one). kScaled: 8-bit keys.
template <bool kScaled>
QUIRE_INLINE void raise_maxima(const KeyTile& tile, int count, float soft_cap, float* scores, RowState* rows,
                               float* decay) {
  const vf minus_infinity = broadcast(-__builtin_inff());
  const Live live(rows, count);
  alignas(64) float difference[16] = {};
  for (int r = 0; r < count; ++r) {
    float* row = scores + r * kKeyTile;
    const Sight sight(rows[r]);
    vf top = minus_infinity;
#pragma GCC unroll 16
    for (int i = 0; i < kTileVectors; ++i) {
      if (!live.has(i)) continue;
      vf score = load(row + i * kLanes);
      if constexpr (kScaled) score *= load_scales(tile.key_scales, i);
      if (soft_cap > 0) score = capped(score, soft_cap);
      score = sight.choose(i, score, minus_infinity);
      if (kScaled || sight.masked || soft_cap > 0) store(row + i * kLanes, score);
      top = max(score, top);
    }
    const float maximum = max(max_everywhere(top), broadcast(rows[r].maximum))[0];
    difference[r] = rows[r].maximum - maximum;
    rows[r].maximum = maximum;
  }
  for (int i = 0; i < 16; i += kLanes) store(decay + i, exp(load(difference + i)));
}

// From scores to weights: scores[r][key] becomes e^(score - maximum), times the value's scale where there is one, and
// 0 for keys that row r does not see. Of live vectors; the others are not read afterwards.
template <bool kScaled>
QUIRE_INLINE void weigh_rows(const KeyTile& tile, int count, float soft_cap, float* scores, RowState* rows,
                             float* decay) {
  raise_maxima<kScaled>(tile, count, soft_cap, scores, rows, decay);
  const Live live(rows, count);
  for (int r = 0; r < count; ++r) {
    float* row = scores + r * kKeyTile;
    const Sight sight(rows[r]);
    const vf maximum = broadcast(rows[r].maximum);
    vf sum = load(rows[r].weight_sum) * broadcast(decay[r]);
    for (int i = 0; i < kTileVectors; ++i) {
      if (!live.has(i)) continue;
      vf weight = exp_weight(load(row + i * kLanes) - maximum);
      sum += weight;
      if constexpr (kScaled) weight = sight.choose(i, weight * load_scales(tile.value_scales, i), zero());
      store(row + i * kLanes, weight);
    }
    store(rows[r].weight_sum, sum);
  }
}

}  // namespace quire::QUIRE_ISA
