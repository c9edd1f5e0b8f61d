// Attention inside registers: scores of some rows and 64 keys, their softmax, and the weighted sum of values. What is
// done for one row never depends on how many rows share the loads.
#pragma once

#include "attention.h"
#include "vector_math.h"

namespace quire::QUIRE_ISA {

// Rows of queries and sums lie this many elements apart: constant offsets, and no two rows on the same cache sets.
inline constexpr int64_t kRowStride = kMaxHeadDim + 16;
// Most rows whose sums fit the registers next to two vectors of keys.
inline constexpr int kTileRows = kLanes == 16 ? 12 : kLanes == 8 ? 6 : 4;
inline constexpr int kTileVectors = kKeyTile / kLanes;
inline constexpr int kSubtileVectors = kSubtile / kLanes;
inline constexpr int kSubtiles = kKeyTile / kSubtile;
// What a running maximum is before any key: finite, so that differences of maxima are never NaN.
inline constexpr float kNothing = -3.402823466e38f;

// Where 64 consecutive keys and values lie, 16 at a time: keys [head_dim][16], values [16][head_dim]. scales: of i8.
struct KeyTile {
  const std::byte* keys[kSubtiles];
  const std::byte* values[kSubtiles];
  const float* key_scales;    // [64]
  const float* value_scales;  // [64]
};

template <CacheType T>
QUIRE_INLINE vf load_element(const std::byte* address) {
  if constexpr (T == CacheType::kF32) return load(reinterpret_cast<const float*>(address));
  if constexpr (T == CacheType::kBF16) return load_bf16(reinterpret_cast<const uint16_t*>(address));
  return load_i8(reinterpret_cast<const int8_t*>(address));
}

// The first 8 of 16 lanes; the others are zero.
template <CacheType T>
QUIRE_INLINE vf load_half(const std::byte* address) {
  std::byte wide[kLanes * element_bytes(T)] = {};
  std::memcpy(wide, address, 8 * element_bytes(T));
  return load_element<T>(wide);
}

QUIRE_INLINE void prefetch(const std::byte* address) { __builtin_prefetch(address, 0, 2); }

// scores[r][key] = sum over d of query[r][d] * key[d], in order of d, for kCount vectors of keys.
template <CacheType T, int R, int kCount>
QUIRE_INLINE void score_vectors(const float* query, const KeyTile& tile, const KeyTile& next, int first, int64_t depth,
                                float* scores) {
  constexpr int64_t kBytes = element_bytes(T);
  constexpr int64_t kLine = 64 / (kSubtile * kBytes);  // elements of the head for each cache line
  const std::byte* keys[kCount];
  const std::byte* ahead[kCount];
  for (int i = 0; i < kCount; ++i) {
    const int vector = first + i;
    keys[i] = tile.keys[vector / kSubtileVectors] + vector % kSubtileVectors * kLanes * kBytes;
    ahead[i] = next.keys[vector / kSubtileVectors];
  }
  vf sum[R][kCount];
  for (int r = 0; r < R; ++r)
    for (int i = 0; i < kCount; ++i) sum[r][i] = zero();
  for (int64_t d = 0; d < depth; d += kLine) {
    for (int i = 0; i < kCount; i += kSubtileVectors) prefetch(ahead[i] + d * kSubtile * kBytes);
    for (int64_t e = d; e < d + kLine; ++e) {
      vf key[kCount];
      for (int i = 0; i < kCount; ++i) key[i] = load_element<T>(keys[i] + e * kSubtile * kBytes);
      for (int r = 0; r < R; ++r) {
        vf q = broadcast(query[r * kRowStride + e]);
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
  constexpr int64_t kBytes = element_bytes(T);
  vf sum[R][kCount];
  for (int r = 0; r < R; ++r)
    for (int i = 0; i < kCount; ++i) sum[r][i] = load(sums + r * kRowStride + at + i * kLanes) * broadcast(decay[r]);
  for (int64_t key = low; key < high;) {
    const int64_t subtile = key / kSubtile, end = (subtile + 1) * kSubtile < high ? (subtile + 1) * kSubtile : high;
    const int64_t offset = (key % kSubtile * depth + at) * kBytes;
    const std::byte* row = tile.values[subtile] + offset;
    const std::byte* ahead = next.values[subtile] + offset;
    for (; key < end; ++key, row += depth * kBytes, ahead += depth * kBytes) {
      vf value[kCount];
      for (int i = 0; i < kCount; ++i)
        value[i] = kHalf ? load_half<T>(row + i * kLanes * kBytes) : load_element<T>(row + i * kLanes * kBytes);
      for (int64_t byte = 0; byte < kCount * kLanes * kBytes; byte += 64) prefetch(ahead + byte);
      for (int r = 0; r < R; ++r) {
        vf p = broadcast(weights[r * kKeyTile + key]);
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

// cap * tanh(score / cap), from e^(2 |x|): absolute error within some 1e-7 of the cap.
QUIRE_INLINE vf capped(vf score, float cap) {
  const vf x = score * (1.0f / cap);
  const vf size = x < 0.0f ? -x : x;
  const vf tanh = 1.0f - 2.0f / (exp(size + size) + 1.0f);
  return cap * (x < 0.0f ? -tanh : tanh);
}

// What a row has seen of a split so far.
struct RowState {
  float maximum;
  int64_t position;
  int64_t low, high;              // keys of the current tile that the row sees, 0 .. 64
  float weight_sum[kLanes];       // by lane
};

// From scores to weights: scores[r][key] becomes e^(score - maximum), 0 for keys that row r does not see. Of the keys
// that some row sees; the others are not read afterwards. kScaled: 8-bit keys and values.
template <bool kScaled>
QUIRE_INLINE void weigh_rows(const KeyTile& tile, int count, float soft_cap, float* scores, RowState* rows,
                             float* decay) {
  const float minus_infinity = -__builtin_inff();
  const int64_t begin = rows[0].low / kLanes * kLanes, end = rows[count - 1].high;
  vi lane;
  for (int i = 0; i < kLanes; ++i) lane[i] = i;
  alignas(64) float difference[16];
  for (int r = 0; r < count; ++r) {
    float* row = scores + r * kKeyTile;
    RowState& state = rows[r];
    const bool masked = state.low > 0 || state.high < kKeyTile;
    const vi low = broadcast_int(static_cast<int32_t>(state.low)), high = broadcast_int(static_cast<int32_t>(state.high));
    vf top = broadcast(minus_infinity);
    for (int64_t i = begin; i < end; i += kLanes) {
      vf score = load(row + i);
      if constexpr (kScaled) score *= load(tile.key_scales + i);
      if (soft_cap > 0) score = capped(score, soft_cap);
      if (masked) {
        const vi key = lane + static_cast<int32_t>(i);
        score = ((key >= low) & (key < high)) ? score : broadcast(minus_infinity);
      }
      if (kScaled || masked || soft_cap > 0) store(row + i, score);
      top = max(score, top);
    }
    const float maximum = max(max_everywhere(top), broadcast(state.maximum))[0];
    difference[r] = state.maximum - maximum;
    state.maximum = maximum;
  }
  for (int r = count; r < 16; ++r) difference[r] = 0;
  for (int i = 0; i < 16; i += kLanes) store(decay + i, exp(load(difference + i)));
  for (int r = 0; r < count; ++r) {
    float* row = scores + r * kKeyTile;
    const vf maximum = broadcast(rows[r].maximum);
    vf sum = load(rows[r].weight_sum) * broadcast(decay[r]);
    for (int64_t i = begin; i < end; i += kLanes) {
      vf weight = exp(load(row + i) - maximum);
      sum += weight;
      if constexpr (kScaled) weight *= load(tile.value_scales + i);
      store(row + i, weight);
    }
    store(rows[r].weight_sum, sum);
  }
}

}  // namespace quire::QUIRE_ISA
