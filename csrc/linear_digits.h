// Integers and 4-bit floats as weights, activations as whole numbers: vpdpbusd multiplies the weights as they are stored.
//
// A block of k (a group, or kLongestBlock values of a longer one) of a row of x becomes whole numbers with one scale, a
// power of two, written in kDigits signed digits of eight bits. Three digits (23 bits) are float32's own precision, and
// two (15 bits) are what MatmulPrecision::kBFloat16 allows; both need fewer instructions than widening the weights. Sums
// over a block are exact, whatever their order; blocks are added up by one chain over k: neither a tile's height nor what
// else is in it shows.
//
// Packed rows, block after block: [row] RowBlock, then [step][row][digit][4 or 8 values of k], as many as 128 bytes of a
// panel have of a column; zeros behind a block's end.
#pragma once

#include "linear_driver.h"
#include "linear_tiles.h"

#if defined(QUIRE_DOT_BYTES)

namespace quire::QUIRE_ISA {
namespace {

inline constexpr int64_t kLongestBlock = 128;

template <int kDigits>
struct RowBlock {
  int32_t starts[kDigits];  // of the sums: what takes off again that weights are multiplied as value + kBias
  float factor;             // of the sums: the numbers' scale times kUnit; NaN for a block with NaN or infinity in it
  float sum;                // of the numbers, times their scale
};

// Each type: unpack(words, of) gives `kQuads` vectors of four values of k, unsigned, of 16 columns: value / kUnit + kBias.

struct DigitI8 : FloatScales {
  static constexpr int kQuads = 1, kBias = 128;
  static constexpr float kUnit = 1.0f;
  static QUIRE_INLINE void unpack(vi words, vi (&quads)[1]) { quads[0] = words ^ static_cast<int32_t>(0x80808080u); }
};

struct DigitI4 : FloatScales {
  static constexpr int kQuads = 2, kBias = 0;
  static constexpr float kUnit = 1.0f;
  static QUIRE_INLINE void unpack(vi words, vi (&quads)[2]) {
    quads[0] = words & 0x0f0f0f0f;
    quads[1] = (words >> 4) & 0x0f0f0f0f;
  }
};

template <class Scales>
struct DigitE2M1 {
  static constexpr int kQuads = 2, kBias = 12;
  static constexpr float kUnit = 0.5f;
  static QUIRE_INLINE void unpack(vi words, vi (&quads)[2]) {
    const __m512i table =
        _mm512_broadcast_i32x4(_mm_set_epi8(0, 4, 6, 8, 9, 10, 11, 12, 24, 20, 18, 16, 15, 14, 13, 12));
    quads[0] = (vi)_mm512_shuffle_epi8(table, (__m512i)(words & 0x0f0f0f0f));
    quads[1] = (vi)_mm512_shuffle_epi8(table, (__m512i)((words >> 4) & 0x0f0f0f0f));
  }
  static QUIRE_INLINE vf scale(const Tile& tile, int64_t group, int64_t column) {
    return Scales::scale(tile, group, column);
  }
};

template <int kDigits>
QUIRE_INLINE vf whole_number(const vi (&sums)[kDigits]) {
  const vf low = to_float(sums[0] + (sums[1] << 8));  // at most 2^29 + 2^21
  if constexpr (kDigits == 2)
    return low;
  else
    return fma(to_float(sums[2]), broadcast(65536.0f), low);
}

// total += scale * sum (+ offset * sum of x), for the sums of one block.
template <class Weight, int kDigits, int kRows, bool kHasOffsets>
QUIRE_INLINE void add_block(const Tile& tile, int64_t group, const RowBlock<kDigits>* rows, const vi (&low)[kRows][kDigits],
                            const vi (&high)[kRows][kDigits]) {
  const vf scale_low = Weight::scale(tile, group, 0), scale_high = Weight::scale(tile, group, 16);
  vf offset_low{}, offset_high{};
  if constexpr (kHasOffsets) {
    offset_low = group_offsets(tile, group, 0, scale_low);
    offset_high = group_offsets(tile, group, 16, scale_high);
  }
  float* out = tile.out;
#pragma GCC unroll 6
  for (int r = 0; r < kRows; ++r, out += kPanel) {
    const vf factor = broadcast(rows[r].factor);
    vf total_low = fma(whole_number(low[r]) * factor, scale_low, load(out));
    vf total_high = fma(whole_number(high[r]) * factor, scale_high, load(out + 16));
    if constexpr (kHasOffsets) {
      const vf sum = broadcast(rows[r].sum);
      total_low = fma(sum, offset_low, total_low);
      total_high = fma(sum, offset_high, total_high);
    }
    store(out, total_low);
    store(out + 16, total_high);
  }
}

template <class Weight, int kDigits, int kRows>
void digit_tile(const Tile& tile) {
  constexpr int kQuads = Weight::kQuads, kStep = kRows * kDigits * kQuads * 4;
  constexpr int kChains = kRows == 1 ? kQuads : 1;  // sums of one row: more, to keep the processor busy
  const int64_t groups = num_groups(*tile.weight);
  const std::byte *panel = tile.panel, *soon = tile.prefetch, *x = tile.x;
#pragma GCC unroll 6
  for (int r = 0; r < kRows; ++r) store(tile.out + r * kPanel, zero()), store(tile.out + r * kPanel + 16, zero());
  for (int64_t group = 0; group < groups; ++group) {
    const int64_t length = group_length(*tile.weight, group);
    for (int64_t begin = 0; begin < length; begin += kLongestBlock) {
      const int64_t count = length - begin < kLongestBlock ? length - begin : kLongestBlock;
      const auto* rows = reinterpret_cast<const RowBlock<kDigits>*>(x);
      x += kRows * sizeof(RowBlock<kDigits>);
      vi low[kChains][kRows][kDigits], high[kChains][kRows][kDigits];
#pragma GCC unroll 2
      for (int chain = 0; chain < kChains; ++chain)
#pragma GCC unroll 6
        for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 3
          for (int digit = 0; digit < kDigits; ++digit)
            low[chain][r][digit] = high[chain][r][digit] =
                Weight::kBias && chain == 0 ? broadcast_int(rows[r].starts[digit]) : vi{};
      for (int64_t k = 0; k < count; k += kQuads * 4, panel += 128, x += kStep, soon += 2 * tile.prefetch_step) {
        vi low_quads[kQuads], high_quads[kQuads];
        Weight::unpack(load_as<vi>(panel), low_quads);
        Weight::unpack(load_as<vi>(panel + 64), high_quads);
#pragma GCC unroll 2
        for (int quad = 0; quad < kQuads; ++quad)
#pragma GCC unroll 6
          for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 3
            for (int digit = 0; digit < kDigits; ++digit) {
              const auto four = (__m512i)broadcast_int(load_as<int32_t>(x + ((r * kDigits + digit) * kQuads + quad) * 4));
              vi& low_sum = low[quad % kChains][r][digit];
              vi& high_sum = high[quad % kChains][r][digit];
              low_sum = (vi)_mm512_dpbusd_epi32((__m512i)low_sum, (__m512i)low_quads[quad], four);
              high_sum = (vi)_mm512_dpbusd_epi32((__m512i)high_sum, (__m512i)high_quads[quad], four);
            }
        if (soon == tile.prefetch_end) soon = tile.prefetch_next;
        prefetch_line(tile, soon);
        prefetch_line(tile, soon + tile.prefetch_step);
      }
#pragma GCC unroll 2
      for (int chain = 1; chain < kChains; ++chain)
#pragma GCC unroll 3
        for (int digit = 0; digit < kDigits; ++digit)
          low[0][0][digit] += low[chain][0][digit], high[0][0][digit] += high[chain][0][digit];
      if (has_offsets(*tile.weight))
        add_block<Weight, kDigits, kRows, true>(tile, group, rows, low[0], high[0]);
      else
        add_block<Weight, kDigits, kRows, false>(tile, group, rows, low[0], high[0]);
    }
  }
}

template <class Weight, int kDigits>
void multiply_digits(const Tile& tile, int64_t rows) {
  switch (rows) {
    case 1:
      return digit_tile<Weight, kDigits, 1>(tile);
    case 2:
      return digit_tile<Weight, kDigits, 2>(tile);
    case 3:
      return digit_tile<Weight, kDigits, 3>(tile);
    case 4:
      return digit_tile<Weight, kDigits, 4>(tile);
  }
  if constexpr (kDigits == 2) {
    if (rows == 5) return digit_tile<Weight, kDigits, 5>(tile);
    return digit_tile<Weight, kDigits, 6>(tile);
  }
  __builtin_unreachable();
}

// Whether products with this weight are made in digits: in three, or in two where activations may be rounded.
inline bool multiplies_digits(const PackedWeight& weight) {
  return !weight.integer_activations && (is_integer(weight.type) || is_nibbles(weight.type));
}

template <int kDigits>
struct DigitRows {
  static constexpr int64_t kRows = kDigits == 3 ? 4 : 6;  // with two vectors of columns 24 sums
  static constexpr int64_t kRowStep = 1;
  static constexpr int64_t kBlockBytes = quire::QUIRE_ISA::kBlockBytes;
  static constexpr int64_t kGroupBytes = 0;
  static constexpr bool kExpects = true;
  static constexpr int64_t kPrefetchAhead = 8192;
  // The largest numbers that the digits hold, and how many bits a number below a power of two may have.
  static constexpr float kLargest = kDigits == 3 ? 8355711.0f : 32639.0f;
  static constexpr int kBits = kDigits * 8 - 1;

  static TileLayout layout(const PackedWeight& weight) {
    const auto block_bytes = [&](int64_t count) {
      return kRows * (static_cast<int64_t>(sizeof(RowBlock<kDigits>)) + rounded_up(count, group_alignment(weight.type)) * kDigits);
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
    const int64_t groups = num_groups(weight);
    alignas(64) float buffer[kLongestBlock];
    for (int64_t group = 0; group < groups; ++group) {
      const int64_t first = group * weight.group_size, length = group_length(weight, group);
      for (int64_t begin = 0; begin < length; begin += kLongestBlock) {
        const int64_t count = length - begin < kLongestBlock ? length - begin : kLongestBlock;
        auto* of_rows = reinterpret_cast<RowBlock<kDigits>*>(memory);
        memory += rows * static_cast<int64_t>(sizeof(RowBlock<kDigits>));
        for (int64_t row = 0; row < rows; ++row)
          pack_block(contiguous(x + row * stride, weight.column_order, first + begin, count, buffer), count,
                     weight.type, of_rows[row], memory + row * kDigits * group_alignment(weight.type), rows);
        memory += rounded_up(count, group_alignment(weight.type)) * rows * kDigits;
      }
    }
  }

  static void multiply(const Tile& tile, int64_t rows) {
    switch (tile.weight->type) {
      case WeightType::kI8:
        return multiply_digits<DigitI8, kDigits>(tile, rows);
      case WeightType::kI4:
        return multiply_digits<DigitI4, kDigits>(tile, rows);
      case WeightType::kMXFP4:
        return multiply_digits<DigitE2M1<MXFP4>, kDigits>(tile, rows);
      default:
        return multiply_digits<DigitE2M1<NVFP4>, kDigits>(tile, rows);
    }
  }

 private:
  // The scale of a block whose largest magnitude has these bits: the smallest power of two for which the digits hold it.
  // Below 2^-100 all is rounded to numbers of 2^-100.
  static float scale_of(uint32_t largest_bits) {
    if (largest_bits >= 0x7f800000u) return __builtin_nanf("");
    const float largest = bit_cast<float>(largest_bits < 0x0d800000u ? 0x0d800000u : largest_bits);
    const float highest = largest * (static_cast<float>(1 << kBits) / kLargest);  // below a power of two: fits below it
    return bit_cast<float>(((bit_cast<uint32_t>(highest) >> 23) + 1 - kBits) << 23);
  }

  // `count` values of a row; out: its first step, of `rows`.
  static QUIRE_INLINE void pack_block(const float* x, int64_t count, WeightType type, RowBlock<kDigits>& block,
                                      std::byte* out, int64_t rows) {
    constexpr int32_t kTops = kDigits == 3 ? 0x808080 : 0x8080;
    vu largest{};
    for (int64_t k = 0; k < count; k += kLanes)
      largest = (vu)_mm512_maskz_max_epu32(0xffff, (__m512i)largest, (__m512i)(bit_cast<vu>(some(x, k, count)) & 0x7fffffffu));
    const float scale = scale_of(_mm512_reduce_max_epu32((__m512i)largest));
    const vf inverse = broadcast(1.0f / scale);
    vi sums[kDigits] = {};
    const int64_t step = group_alignment(type), pitch = rows * kDigits * step;
    for (int64_t k = 0; k < count; k += kLanes) {
      const vi number = (vi)_mm512_maskz_cvtps_epi32(0xffff, (__m512)(some(x, k, count) * inverse));
      const vi digits = (number + kTops) ^ kTops;  // each in a byte
      alignas(16) std::byte bytes[kDigits][kLanes];
#pragma GCC unroll 3
      for (int digit = 0; digit < kDigits; ++digit) {
        const __m512i one = (__m512i)broadcast_int(1 << (8 * digit));
        sums[digit] = (vi)_mm512_dpbusd_epi32((__m512i)sums[digit], one, (__m512i)digits);
        _mm_store_si128(reinterpret_cast<__m128i*>(bytes[digit]),
                        _mm512_maskz_cvtepi32_epi8(0xffff, (__m512i)(digits >> (8 * digit))));
      }
      for (int64_t i = 0; i < kLanes && k + i < count; i += step, out += pitch)
        for (int digit = 0; digit < kDigits; ++digit)
          step == 8 ? std::memcpy(out + digit * 8, bytes[digit] + i, 8) : std::memcpy(out + digit * 4, bytes[digit] + i, 4);
    }
    const int32_t bias = type == WeightType::kI8 ? DigitI8::kBias : type == WeightType::kI4 ? 0 : DigitE2M1<MXFP4>::kBias;
    int32_t total[kDigits];
    for (int digit = 0; digit < kDigits; ++digit) {
      total[digit] = _mm512_reduce_add_epi32((__m512i)sums[digit]);
      block.starts[digit] = -bias * total[digit];
    }
    float sum = static_cast<float>(total[0] + total[1] * 256);
    if constexpr (kDigits == 3) sum = fma(static_cast<float>(total[2]), 65536.0f, sum);
    block.factor = is_nibbles(type) && type != WeightType::kI4 ? scale * DigitE2M1<MXFP4>::kUnit : scale;
    block.sum = sum * scale;
  }

  static QUIRE_INLINE vf some(const float* x, int64_t k, int64_t count) {
    const int64_t left = count - k;
    return left >= kLanes ? load(x + k) : (vf)_mm512_maskz_loadu_ps(static_cast<__mmask16>((1 << left) - 1), x + k);
  }
};

}  // namespace
}  // namespace quire::QUIRE_ISA

#endif
