// What is done to a row before attention: norm and rotation of its query and key heads, keys and values to the cache.
#pragma once

#include <cmath>

#include "attention.h"
#include "head_rows.h"

namespace quire::QUIRE_ISA {
namespace {

// head / rms(head) * weight, in place.
void norm_head(float* head, const float* weight, float epsilon, int64_t depth) {
  const int64_t whole = depth / kLanes * kLanes, rest = depth - whole;
  vf squares = zero();
  for (int64_t d = 0; d < whole; d += kLanes) squares = fma(load(head + d), load(head + d), squares);
  if (rest > 0) {
    const vf last = load_some(head + whole, rest);
    squares = fma(last, last, squares);
  }
  const float scale = 1.0f / __builtin_sqrtf(sum_lanes(squares) / static_cast<float>(depth) + epsilon);
  for (int64_t d = 0; d < whole; d += kLanes) store(head + d, load(head + d) * scale * load(weight + d));
  for (int64_t d = whole; d < depth; ++d) head[d] = head[d] * scale * weight[d];
}

// Rounds a head to 8 bits and returns its scale: the largest size / 127. A head with an element that is not finite
// gets a scale that is not a number, so that it is not read as if it were one.
float round_head(const float* head, int64_t depth, int8_t* to) {
  alignas(64) float padded[kMaxHeadDim + 16] = {};
  std::memcpy(padded, head, static_cast<std::size_t>(depth) * sizeof(float));
  vf largest = zero(), poison = zero();
  for (int64_t d = 0; d < depth; d += kLanes) {
    const vf x = load(padded + d);
    largest = max(largest, max(x, -x));
    poison = fma(x, zero(), poison);
  }
  const float scale = max_lanes(largest) / 127.0f + sum_lanes(poison);
  const vf magic = broadcast(12582912.0f), limit = broadcast(127.0f);
  const vf divisor = broadcast(scale > 0 ? scale : 1.0f);
  for (int64_t d = 0; d < depth; d += kLanes) {
    // Adding and taking away 1.5 * 2^23 rounds to the nearest whole number, ties to even.
    const vf x = max(min(load(padded + d) / divisor, limit), -limit);
    const vi whole = bit_cast<vi>(x + magic) - bit_cast<vi>(magic);
    for (int i = 0; i < kLanes; ++i)
      if (d + i < depth) to[d + i] = static_cast<int8_t>(whole[i]);
  }
  return scale;
}

// Rounds a head, divided by its scale, to e4m3; what is larger than its largest number becomes that. False for a head
// with an element that is not finite.
bool round_head_e4m3(const float* head, int64_t depth, float scale, uint8_t* to) {
  alignas(64) float padded[kMaxHeadDim + 16] = {};
  std::memcpy(padded, head, static_cast<std::size_t>(depth) * sizeof(float));
  const vf divisor = broadcast(scale);
  vf poison = zero();
  for (int64_t d = 0; d < depth; d += kLanes) {
    const vf x = load(padded + d);
    poison = fma(x, zero(), poison);
    const vi codes = e4m3_codes(x / divisor);
    for (int i = 0; i < kLanes; ++i)
      if (d + i < depth) to[d + i] = static_cast<uint8_t>(codes[i]);
  }
  return sum_lanes(poison) == 0.0f;
}

// A head's elements in words of p: its d-th word `stride` words after the one before.
template <class Element>
void scatter_words(const Element* from, int64_t depth, int64_t stride, Element* to) {
  constexpr int64_t kElements = kWordBytes / static_cast<int64_t>(sizeof(Element));
  for (int64_t d = 0; d < depth; d += kElements) std::memcpy(to + d * stride, from + d, kWordBytes);
}

// Elements of tokens that share words belong to different threads: they are written one by one.
template <class Element>
void scatter_elements(const Element* from, int64_t depth, int64_t stride, Element* to) {
  for (int64_t d = 0; d < depth; ++d) to[d * stride] = from[d];
}

// share: of the head, in the block; inside: the token's place there.
template <class Element>
void write_elements(const AttentionArgs& args, const Element* key, const Element* value, std::byte* share,
                    int64_t inside) {
  constexpr int64_t kElements = kWordBytes / static_cast<int64_t>(sizeof(Element));
  const int64_t size = args.block_size, depth = args.head_dim;
  const int64_t width = size < kSubtile ? size : kSubtile, packed = size < kElements ? size : kElements;
  auto* keys = reinterpret_cast<Element*>(share + keys_offset(size, args.cache));
  auto* values = reinterpret_cast<Element*>(share + values_offset(size, depth, args.cache));
  scatter_words(key, depth, width, keys + inside / width * width * depth + inside % width * kElements);
  scatter_elements(value, depth, packed, values + inside / packed * packed * depth + inside % packed);
}

void write_head(const AttentionArgs& args, const float* key, const float* value, std::byte* share, int64_t inside) {
  switch (args.cache) {
    case CacheType::kF32:
      return write_elements(args, key, value, share, inside);
    case CacheType::kBF16: {
      uint16_t narrow_key[kMaxHeadDim], narrow_value[kMaxHeadDim];
      narrow_head(key, args.head_dim, narrow_key);
      narrow_head(value, args.head_dim, narrow_value);
      return write_elements(args, narrow_key, narrow_value, share, inside);
    }
    case CacheType::kI8: {
      int8_t rounded_key[kMaxHeadDim], rounded_value[kMaxHeadDim];
      auto* scales = reinterpret_cast<float*>(share);
      scales[inside] = round_head(key, args.head_dim, rounded_key);
      scales[args.block_size + inside] = round_head(value, args.head_dim, rounded_value);
      return write_elements(args, rounded_key, rounded_value, share, inside);
    }
    case CacheType::kE4M3: {
      uint8_t rounded_key[kMaxHeadDim], rounded_value[kMaxHeadDim];
      const bool key_is_finite = round_head_e4m3(key, args.head_dim, args.key_scale, rounded_key);
      if (!round_head_e4m3(value, args.head_dim, args.value_scale, rounded_value) || !key_is_finite)
        std::memset(rounded_key, kE4M3NaN, sizeof(rounded_key));
      return write_elements(args, rounded_key, rounded_value, share, inside);
    }
  }
}

// Elements of the query heads of a row, where there are some.
constexpr int64_t query_width(const AttentionArgs& args) { return args.query_heads * args.head_dim; }

// One row of the projections' output: query heads are changed in place, key and value heads go to `slot` (-1: nowhere).
void prepare_row(const AttentionArgs& args, float* row, const float* turn, int64_t slot) {
  const int64_t depth = args.head_dim, half = args.rotary_dim / 2;
  const int64_t share = head_bytes(args.block_size, depth, args.cache);
  std::byte* block = args.pages + slot / args.block_size * args.block_bytes;
  float* keys = row + query_width(args);
  float* values = keys + args.num_kv_heads * depth;
  for (int64_t h = 0; h < args.query_heads; ++h) {
    if (args.query_norm != nullptr) norm_head(row + h * depth, args.query_norm, args.norm_epsilon, depth);
    if (turn != nullptr) rotate_head(row + h * depth, turn, half);
  }
  for (int64_t h = 0; args.writes && slot >= 0 && h < args.num_kv_heads; ++h) {
    if (args.key_norm != nullptr) norm_head(keys + h * depth, args.key_norm, args.norm_epsilon, depth);
    if (turn != nullptr) rotate_head(keys + h * depth, turn, half);
    write_head(args, keys + h * depth, values + h * depth, block + h * share, slot % args.block_size);
  }
}

// Query heads of a row, scaled by the logarithm of its position.
void scale_queries(const AttentionArgs& args, float* row, int64_t position) {
  const auto steps = static_cast<double>((position + 1) / args.length_floor);
  const auto factor = static_cast<float>(1.0 + args.length_strength * std::log1p(steps));
  for (int64_t d = 0; d < query_width(args); ++d) row[d] *= factor;
}

}  // namespace
}  // namespace quire::QUIRE_ISA
