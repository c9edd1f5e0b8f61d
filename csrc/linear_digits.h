// Integers and 4-bit floats as weights, activations as whole numbers: vpdpbusd multiplies the weights as they are stored.
//
// A block of k (a group, or kLongestBlock values of a longer one) of a row of x becomes whole numbers with one scale, a
// power of two, written in kDigits signed digits of eight bits. Three digits (23 bits) are float32's own precision, and
// two (15 bits) are what MatmulPrecision::kBFloat16 allows; both need fewer instructions than widening the weights. One
// digit (activation_bits of 8) has a scale of its own kind: the block's largest magnitude is 127. Sums over a block are
// exact, whatever their order; blocks are added up by one chain over k: neither a tile's height nor what else is in it shows.
//
// Packed rows, block after block: [row] RowBlock, then [step][row][digit][values of k], as many values as a type takes at a
// step; zeros behind a block's end.
#pragma once

#include <algorithm>
#include <array>
#include <utility>

#include "linear_driver.h"
#include "linear_tiles.h"

namespace quire::QUIRE_ISA {
namespace {

inline constexpr int64_t kLongestBlock = 128;

template <int kDigits>
struct RowBlock {
  int32_t starts[kDigits];  // of the sums: what takes off again that weights are multiplied as value + kBias
  float factor;             // of the sums: the numbers' scale times kUnit; NaN for a block with NaN or infinity in it
  float sum;                // of the numbers, times their scale
};

// Each type: kBytes of a panel have kQuads times four values of k of each column; quad(panel, q, column) is one of these
// fours of 16 columns, unsigned, in the bytes of words: value / kUnit + unsigned_bias.

struct DigitI8 : StoredScales<WeightType::kI8> {
  static constexpr int kQuads = 1;
  static constexpr int64_t kBytes = 128;
  static constexpr bool kBiased = true;
  static QUIRE_INLINE vi quad(const std::byte* panel, int, int64_t column) {
    return load_as<vi>(panel + column * 4) ^ static_cast<int32_t>(0x80808080u);
  }
};

template <WeightType kType>
struct DigitQuads : StoredScales<kType> {
  static constexpr int kQuads = Quads<kType>::kQuads;
  static constexpr int64_t kBytes = Quads<kType>::kBytes;
  static constexpr bool kBiased = kType != WeightType::kI4 && kType != WeightType::kI2;
  static QUIRE_INLINE vi quad(const std::byte* panel, int q, int64_t column) { return Quads<kType>::get(panel, q, column); }
};

template <class Scales>
struct DigitE2M1 {
  static constexpr int kQuads = 2;
  static constexpr int64_t kBytes = 128;
  static constexpr bool kBiased = true;
  static QUIRE_INLINE vi quad(const std::byte* panel, int q, int64_t column) {
    alignas(16) static constexpr uint8_t kTable[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
    return looked_up(kTable, Quads<WeightType::kI4>::get(panel, q, column));
  }
  static QUIRE_INLINE PairOfScales scales(const Tile& tile, int64_t group, int64_t column) {
    PairOfScales found = Scales::scales(tile, group, column);
    found.low.scale *= 1.0f / kE2M1Factor, found.high.scale *= 1.0f / kE2M1Factor;
    return found;
  }
};

// What the kernels' numbers are larger by than the weights, and what they are multiplied with.
inline int32_t unsigned_bias(const PackedWeight& weight) {
  return weight.type == WeightType::kI8 ? 128 : has_scale_codes(weight.type) ? 12 : stored_bias(weight);
}
inline float unsigned_unit(const PackedWeight& weight) { return has_scale_codes(weight.type) ? 0.5f : 1.0f; }

// Bytes of four values of x.
inline constexpr int kQuadBytes = 4 * kWordsPerQuad;

// sum += four products of x and unsigned weights. Exact.
QUIRE_INLINE vi add_products(vi sum, vi weights, const std::byte* x) {
#if defined(QUIRE_DOT_BYTES)
  const auto four = (__m512i)broadcast_int(load_as<int32_t>(x));
  return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, four);
#elif defined(QUIRE_DOT_PAIRS)
  const vi even = broadcast_int(load_as<int32_t>(x)), odd = broadcast_int(load_as<int32_t>(x + 4));
  const vi of_even = weights & 0x00ff00ff, of_odd = (vi)((vu)weights >> 8) & 0x00ff00ff;
#if defined(__AVX512F__)
  sum += (vi)_mm512_madd_epi16((__m512i)of_even, (__m512i)even);
  return sum + (vi)_mm512_madd_epi16((__m512i)of_odd, (__m512i)odd);
#else
  sum += (vi)_mm256_madd_epi16((__m256i)of_even, (__m256i)even);
  return sum + (vi)_mm256_madd_epi16((__m256i)of_odd, (__m256i)odd);
#endif
#else
  for (int j = 0; j < 4; ++j) sum += ((weights >> (8 * j)) & 255) * static_cast<int32_t>(load_as<int8_t>(x + j));
  return sum;
#endif
}

template <int kDigits>
QUIRE_INLINE vf whole_number(const vi (&sums)[kDigits]) {
  if constexpr (kDigits == 1) return to_float(sums[0]);
  const vf low = to_float(sums[0] + (sums[1] << 8));  // at most 2^29 + 2^21
  if constexpr (kDigits == 3) return fma(to_float(sums[2]), broadcast(65536.0f), low);
  return low;
}

// total += scale * sum (+ offset * sum of x), for the sums of one block: of columns part * kLanes on, and 16 further.
template <class Weight, int kDigits, int kRows, bool kHasOffsets>
QUIRE_INLINE void add_block(const Tile& tile, int64_t group, int part, const RowBlock<kDigits>* rows,
                            const vi (&low)[kRows][kDigits], const vi (&high)[kRows][kDigits]) {
  const int64_t column = part * kLanes;
  const auto [of_low, of_high] = Weight::scales(tile, group, column);
  float* out = tile.out + column;
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r, out += kPanel) {
    const vf factor = broadcast(rows[r].factor);
    vf total_low = fma(whole_number(low[r]) * factor, of_low.scale, load(out));
    vf total_high = fma(whole_number(high[r]) * factor, of_high.scale, load(out + 16));
    if constexpr (kHasOffsets) {
      const vf sum = broadcast(rows[r].sum);
      total_low = fma(sum, of_low.offset, total_low);
      total_high = fma(sum, of_high.offset, total_high);
    }
    store(out, total_low);
    store(out + 16, total_high);
  }
}

template <class Weight, int kDigits, int kRows>
void digit_tile(const Tile& tile) {
  constexpr int kQuads = Weight::kQuads, kLines = Weight::kBytes / 64, kStep = kRows * kDigits * kQuads * kQuadBytes;
  constexpr int kChains = kRows == 1 && kQuads > 1 ? 2 : 1;  // sums of one row: more, to keep the processor busy
  const int64_t groups = num_groups(*tile.weight);
  for (int r = 0; r < kRows * kPanel; r += kLanes) store(tile.out + r, zero());
  for (int part = 0; part < kParts; ++part) {
    const std::byte *panel = tile.panel, *soon = tile.prefetch, *x = tile.x, *soon_end = tile.prefetch_end;
    const int64_t column = part * kLanes;
    for (int64_t group = 0; group < groups; ++group) {
      const int64_t length = group_length(*tile.weight, group);
      for (int64_t begin = 0; begin < length; begin += kLongestBlock) {
        const int64_t count = length - begin < kLongestBlock ? length - begin : kLongestBlock;
        const auto* rows = reinterpret_cast<const RowBlock<kDigits>*>(x);
        x += kRows * sizeof(RowBlock<kDigits>);
        vi low[kChains][kRows][kDigits], high[kChains][kRows][kDigits];
#pragma GCC unroll 2
        for (int chain = 0; chain < kChains; ++chain)
#pragma GCC unroll 8
          for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 3
            for (int digit = 0; digit < kDigits; ++digit)
              low[chain][r][digit] = high[chain][r][digit] =
                  Weight::kBiased && chain == 0 ? broadcast_int(rows[r].starts[digit]) : vi{};
        // What is asked for may lie a block beyond the panel's end: no more is lost than asking. The next panel is asked for
        // from as far on, so that the pass over it, which begins to ask at kPrefetchAhead, finds no gap.
        if (soon_end && soon >= soon_end) soon = tile.prefetch_next + (soon - soon_end), soon_end = nullptr;
        for (int64_t k = 0; k < count; k += kQuads * 4, panel += Weight::kBytes, x += kStep) {
#pragma GCC unroll 8
          for (int quad = 0; quad < kQuads; ++quad) {
            const vi low_quad = Weight::quad(panel, quad, column), high_quad = Weight::quad(panel, quad, column + 16);
#pragma GCC unroll 8
            for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 3
              for (int digit = 0; digit < kDigits; ++digit) {
                const std::byte* four = x + ((r * kDigits + digit) * kQuads + quad) * kQuadBytes;
                vi& low_sum = low[quad % kChains][r][digit];
                vi& high_sum = high[quad % kChains][r][digit];
                low_sum = add_products(low_sum, low_quad, four);
                high_sum = add_products(high_sum, high_quad, four);
              }
            // Asked for one by one: a burst of them waits for room among the lines under way.
#pragma GCC unroll 2
            for (int64_t line = kLines * quad / kQuads; line < kLines * (quad + 1) / kQuads; ++line, soon += tile.prefetch_step)
              prefetch_line(tile, soon);
          }
        }
#pragma GCC unroll 2
        for (int chain = 1; chain < kChains; ++chain)
#pragma GCC unroll 3
          for (int digit = 0; digit < kDigits; ++digit)
            low[0][0][digit] += low[chain][0][digit], high[0][0][digit] += high[chain][0][digit];
        if (has_offsets(*tile.weight))
          add_block<Weight, kDigits, kRows, true>(tile, group, part, rows, low[0], high[0]);
        else
          add_block<Weight, kDigits, kRows, false>(tile, group, part, rows, low[0], high[0]);
      }
    }
  }
}

// Most rows of a tile: with two vectors of columns 24 sums, or 16; half as many where there are half as many registers.
template <int kDigits>
inline constexpr int kDigitRows = kDigits == 3 ? 4 : kDigits == 2 ? 6 : kLanes == 16 ? 8 : std::min(kTileRows, 4);

template <class Weight, int kDigits>
void multiply_digits(const Tile& tile, int64_t rows) {
  static constexpr auto kTiles = []<int... kBelow>(std::integer_sequence<int, kBelow...>) {
    return std::array<TileKernel, sizeof...(kBelow)>{digit_tile<Weight, kDigits, kBelow + 1>...};
  }(std::make_integer_sequence<int, kDigitRows<kDigits>>{});
  kTiles[static_cast<std::size_t>(rows - 1)](tile);
}

// How many digits of activations meet this weight; 0: none.
inline int num_digits(const PackedWeight& weight, [[maybe_unused]] MatmulPrecision precision) {
  if (weight.integer_activations || !(is_whole(weight.type) || has_scale_codes(weight.type))) return 0;
  if (weight.activation_bits == 8) return 1;
#if defined(QUIRE_DOT_BYTES)
  return keeps_16_bits(weight, precision) ? 2 : 3;
#else
  return 0;
#endif
}

// Values from x + k on, of `count` of x; zeros behind them.
QUIRE_INLINE vf some(const float* x, int64_t k, int64_t count) {
  const int64_t left = count - k;
#if defined(__AVX512F__)
  return left >= kLanes ? load(x + k) : (vf)_mm512_maskz_loadu_ps(static_cast<__mmask16>((1 << left) - 1), x + k);
#else
  return left >= kLanes ? load(x + k) : load_some(x + k, left);
#endif
}

// The bits of the largest magnitude: they are ordered as the magnitudes are.
QUIRE_INLINE uint32_t largest_bits(const float* x, int64_t count) {
  vi largest{};
  for (int64_t k = 0; k < count; k += kLanes) {
    const vi bits = bit_cast<vi>(some(x, k, count)) & 0x7fffffff;
    largest = bits > largest ? bits : largest;
  }
#if defined(__AVX512F__)
  return static_cast<uint32_t>(_mm512_reduce_max_epi32((__m512i)largest));
#else
  int32_t top = 0;
  for (int lane = 0; lane < kLanes; ++lane) top = largest[lane] > top ? largest[lane] : top;
  return static_cast<uint32_t>(top);
#endif
}

// Below 2^-100 all is rounded to numbers of 2^-100. NaN for NaN and infinity.
inline float bounded_magnitude(uint32_t bits) {
  if (bits >= 0x7f800000u) return __builtin_nanf("");
  return bit_cast<float>(bits < 0x0d800000u ? 0x0d800000u : bits);
}

// The scale of numbers of eight bits whose largest magnitude has these bits.
inline float digit_scale(uint32_t bits) { return bounded_magnitude(bits) / 127.0f; }

template <int kDigits>
struct DigitRows {
  static constexpr int64_t kRows = kDigitRows<kDigits>;
  static constexpr int64_t kRowStep = 1;
  static constexpr int64_t kBlockBytes = quire::QUIRE_ISA::kBlockBytes;
  static constexpr int64_t kGroupBytes = 0;
  static constexpr bool kExpects = true;
  static constexpr int64_t kPrefetchAhead = 8192;
  // The largest numbers that the digits hold, and how many bits a number below a power of two may have.
  static constexpr float kLargest = kDigits == 3 ? 8355711.0f : kDigits == 2 ? 32639.0f : 127.0f;
  static constexpr int kBits = kDigits * 8 - 1;

  static TileLayout layout(const PackedWeight& weight) {
    const auto block_bytes = [&](int64_t count) {
      return kRows * (static_cast<int64_t>(sizeof(RowBlock<kDigits>)) +
                      rounded_up(count, group_alignment(weight.type)) * kDigits * kWordsPerQuad);
    };
    const auto group_bytes = [&](int64_t length) {
      const int64_t rest = length % kLongestBlock;
      return length / kLongestBlock * block_bytes(kLongestBlock) + (rest ? block_bytes(rest) : 0);
    };
    const int64_t groups = num_groups(weight);
    TileLayout layout;
    layout.data_bytes = (groups - 1) * group_bytes(weight.group_size) + group_bytes(group_length(weight, groups - 1));
    layout.sums_offset = layout.scales_offset = layout.bytes = rounded_up(layout.data_bytes, 64);
    return layout;
  }

  static void pack(const PackedWeight& weight, const float* x, int64_t stride, int64_t rows, std::byte* memory) {
    const int64_t groups = num_groups(weight), step = group_alignment(weight.type);
    const int32_t bias = unsigned_bias(weight);
    const float unit = unsigned_unit(weight);
    alignas(64) float buffer[kLongestBlock];
    for (int64_t group = 0; group < groups; ++group) {
      const int64_t first = group * weight.group_size, length = group_length(weight, group);
      for (int64_t begin = 0; begin < length; begin += kLongestBlock) {
        const int64_t count = length - begin < kLongestBlock ? length - begin : kLongestBlock;
        auto* of_rows = reinterpret_cast<RowBlock<kDigits>*>(memory);
        memory += rows * static_cast<int64_t>(sizeof(RowBlock<kDigits>));
        for (int64_t row = 0; row < rows; ++row)
          pack_block(contiguous(x + row * stride, weight.column_order, first + begin, count, buffer), count, step, bias,
                     unit, of_rows[row], memory + row * kDigits * step * kWordsPerQuad, rows);
        memory += rounded_up(count, step) * rows * kDigits * kWordsPerQuad;
      }
    }
  }

  static void multiply(const Tile& tile, int64_t rows) {
    switch (tile.weight->type) {
      case WeightType::kI8:
        return multiply_digits<DigitI8, kDigits>(tile, rows);
      case WeightType::kI4:
        return multiply_digits<DigitQuads<WeightType::kI4>, kDigits>(tile, rows);
      case WeightType::kI5:
        return multiply_digits<DigitQuads<WeightType::kI5>, kDigits>(tile, rows);
      case WeightType::kI2:
      case WeightType::kI3:
      case WeightType::kI6:
        return multiply_in_super_blocks(tile, rows);
      case WeightType::kNL4:
        return multiply_digits<DigitQuads<WeightType::kNL4>, kDigits>(tile, rows);
      case WeightType::kMXFP4:
        return multiply_digits<DigitE2M1<MXFP4>, kDigits>(tile, rows);
      default:
        return multiply_digits<DigitE2M1<NVFP4>, kDigits>(tile, rows);
    }
  }

 private:
  // Types that super-blocks alone have: one digit of x meets them in linear_super.h.
  static void multiply_in_super_blocks([[maybe_unused]] const Tile& tile, [[maybe_unused]] int64_t rows) {
    if constexpr (kDigits > 1) {
      if (tile.weight->type == WeightType::kI2) return multiply_digits<DigitQuads<WeightType::kI2>, kDigits>(tile, rows);
      if (tile.weight->type == WeightType::kI3) return multiply_digits<DigitQuads<WeightType::kI3>, kDigits>(tile, rows);
      return multiply_digits<DigitQuads<WeightType::kI6>, kDigits>(tile, rows);
    }
    __builtin_unreachable();
  }

  // The scale of a block whose largest magnitude has these bits: the smallest power of two for which the digits hold it;
  // of one digit the smallest number.
  static float scale_of(uint32_t bits) {
    if constexpr (kDigits == 1) return digit_scale(bits);
    const float highest = bounded_magnitude(bits) * (static_cast<float>(1 << kBits) / kLargest);  // below a power of two: fits below it
    if (highest != highest) return highest;
    return bit_cast<float>(((bit_cast<uint32_t>(highest) >> 23) + 1 - kBits) << 23);
  }

  // `count` values of a row; out: its first step of `step` values, of `rows`. bias, unit: those of the weight.
  static QUIRE_INLINE void pack_block(const float* x, int64_t count, int64_t step, int32_t bias, float unit,
                                      RowBlock<kDigits>& block, std::byte* out, int64_t rows) {
    const float scale = scale_of(largest_bits(x, count));
    int32_t total[kDigits];
    pack_digits(x, count, step, 1.0f / scale, out, rows * kDigits * step * kWordsPerQuad, total);
    for (int digit = 0; digit < kDigits; ++digit) block.starts[digit] = -bias * total[digit];
    float sum = static_cast<float>(total[0]);
    if constexpr (kDigits > 1) sum = static_cast<float>(total[0] + total[1] * 256);
    if constexpr (kDigits == 3) sum = fma(static_cast<float>(total[2]), 65536.0f, sum);
    block.factor = scale * unit;
    block.sum = sum * scale;
  }

  // Steps lie `pitch` bytes apart. total: sums of the digits.
#if defined(QUIRE_DOT_BYTES)
  static QUIRE_INLINE void pack_digits(const float* x, int64_t count, int64_t step, float inverse, std::byte* out, int64_t pitch,
                                       int32_t (&total)[kDigits]) {
    constexpr int32_t kTops = kDigits == 3 ? 0x808080 : kDigits == 2 ? 0x8080 : 0x80;
    vi sums[kDigits] = {};
    const int64_t whole = step < kLanes ? step : kLanes;
    for (int64_t k = 0; k < count; k += kLanes) {
      const vi number = (vi)_mm512_maskz_cvtps_epi32(0xffff, (__m512)(some(x, k, count) * broadcast(inverse)));
      const vi digits = (number + kTops) ^ kTops;  // each in a byte
      alignas(16) std::byte bytes[kDigits][kLanes];
#pragma GCC unroll 3
      for (int digit = 0; digit < kDigits; ++digit) {
        const __m512i one = (__m512i)broadcast_int(1 << (8 * digit));
        sums[digit] = (vi)_mm512_dpbusd_epi32((__m512i)sums[digit], one, (__m512i)digits);
        _mm_store_si128(reinterpret_cast<__m128i*>(bytes[digit]),
                        _mm512_maskz_cvtepi32_epi8(0xffff, (__m512i)(digits >> (8 * digit))));
      }
      for (int64_t i = 0; i < kLanes && k + i < count; i += whole) {
        std::byte* to = out + (k + i) / step * pitch + (k + i) % step;
        for (int digit = 0; digit < kDigits; ++digit, to += step) copy_values(to, bytes[digit] + i, whole);
      }
    }
    for (int digit = 0; digit < kDigits; ++digit) total[digit] = _mm512_reduce_add_epi32((__m512i)sums[digit]);
  }
#else
  static QUIRE_INLINE void pack_digits(const float* x, int64_t count, int64_t step, float inverse, std::byte* out, int64_t pitch,
                                       int32_t (&total)[kDigits]) {
    static_assert(kDigits == 1);
    alignas(64) int8_t rounded[kLongestBlock + kLanes] = {};
    total[0] = round_values(x, count, inverse == inverse ? inverse : 0.0f, rounded);
    for (int64_t i = 0; i < count; i += 4) {
      uint32_t words[kWordsPerQuad];
      store_quad(words, rounded + i);
      std::memcpy(out + i / step * pitch + i % step * kWordsPerQuad, words, sizeof(words));
    }
  }
#endif

  static QUIRE_INLINE void copy_values(std::byte* to, const std::byte* from, int64_t count) {
    if (count == 16)
      std::memcpy(to, from, 16);
    else if (count == 8)
      std::memcpy(to, from, 8);
    else
      std::memcpy(to, from, 4);
  }
};

}  // namespace
}  // namespace quire::QUIRE_ISA
