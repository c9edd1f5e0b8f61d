// Super-blocks of integers as weights, activations as whole numbers of eight bits (activation_bits of 8).
//
// kBlockValues values of a row of x become whole numbers with one scale: the block's largest magnitude is 127. A group's
// products are whole numbers, multiplied by the group's code, a whole number too; those of a block are added up by one chain,
// and what the offsets give by another, of whole numbers. Only then do the halves of the super-block and the scale of x
// come in: a multiplication for a group, and a few for a block. Blocks are added up by one chain over k, so that neither a
// tile's height nor what else is in it shows.
//
// Packed rows, block after block: [row] scales, then for each group [row] what its sums start from, or for each pair of
// groups [row] sums of their numbers in 16 bits, as the type has a bias or offsets; then [four values of k][row].
#pragma once

#include "linear_digits.h"

namespace quire::QUIRE_ISA {
namespace {

inline constexpr int64_t kBlockValues = kLongestBlock;
static_assert(kSuperBlock % kBlockValues == 0);

QUIRE_LAYOUT bool has_code_offsets(WeightType type) {
  return type == WeightType::kI4 || type == WeightType::kI5 || type == WeightType::kI2;
}

template <WeightType kType>
struct BlockShape {
  static constexpr bool kHasOffsets = has_code_offsets(kType);
  static constexpr int kGroups = static_cast<int>(super_groups(kType) * kBlockValues / kSuperBlock);
  static constexpr int kQuads = static_cast<int>(kBlockValues) / 4 / kGroups;  // fours of k of a group
  static constexpr int64_t kStoredBytes = kQuads / Quads<kType>::kQuads * Quads<kType>::kBytes;  // of a group
  static constexpr int kHeads = kHasOffsets ? kGroups / 2 : kGroups;
  // A panel's values as words of four bytes, [quad][column]; then codes of scales as floats, [group][column], and those of
  // offsets by pairs, [pair][column].
  static constexpr int64_t kWideValues = kBlockValues * kPanel, kWideCodes = kGroups * kPanel * 4;
  static constexpr int64_t kWideBytes = kWideValues + kWideCodes + (kHasOffsets ? kWideCodes / 2 : 0);  // of a block
};

// sum += products of pairs of 16 bits. Exact.
QUIRE_INLINE vi add_pair_products(vi sum, vi codes, int32_t pair) {
  const vi of_x = broadcast_int(pair);
#if defined(QUIRE_DOT_BYTES)
  return (vi)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)codes, (__m512i)of_x);
#elif defined(__AVX512F__)
  return sum + (vi)_mm512_madd_epi16((__m512i)codes, (__m512i)of_x);
#elif defined(__AVX2__)
  return sum + (vi)_mm256_madd_epi16((__m256i)codes, (__m256i)of_x);
#else
  return sum + ((codes << 16) >> 16) * ((of_x << 16) >> 16) + (codes >> 16) * (of_x >> 16);
#endif
}

struct PairOfWords {
  vi low, high;
};

// Codes of the offsets of two groups, from `group` on.
QUIRE_INLINE PairOfWords offset_pairs(const Tile& tile, WeightType type, int64_t group, int64_t column) {
  const auto [low, high] = pair_of_codes(tile, type, group, column);
  const auto [low_next, high_next] = pair_of_codes(tile, type, group + 1, column);
  return {low.offset | low_next.offset << 16, high.offset | high_next.offset << 16};
}

// What a tile reads of a panel: as it is stored, or as widen_panel laid it out.
template <WeightType kType, bool kIsWide>
struct PanelReader {
  using Shape = BlockShape<kType>;
  const Tile& tile;
  const std::byte* at;
  int64_t column;

  QUIRE_INLINE PairOfWords quad(int group, int index) const {
    if constexpr (kIsWide) {
      const std::byte* words = at + (group * Shape::kQuads + index) * kPanel * 4 + column * 4;
      return {load_as<vi>(words), load_as<vi>(words + 64)};
    }
    using Stored = Quads<kType>;
    const std::byte* step = at + group * Shape::kStoredBytes + index / Stored::kQuads * Stored::kBytes;
    return {Stored::get(step, index % Stored::kQuads, column), Stored::get(step, index % Stored::kQuads, column + 16)};
  }
  QUIRE_INLINE PairOfVectors scales(int64_t block, int group) const {
    if constexpr (kIsWide) {
      const auto* codes = reinterpret_cast<const float*>(at + Shape::kWideValues) + group * kPanel + column;
      return {load(codes), load(codes + 16)};
    }
    const auto [low, high] = pair_of_codes(tile, kType, block * Shape::kGroups + group, column);
    return {to_float(low.scale), to_float(high.scale)};
  }
  QUIRE_INLINE PairOfWords offsets(int64_t block, int pair) const {
    if constexpr (kIsWide) {
      const std::byte* codes = at + Shape::kWideValues + Shape::kWideCodes + (pair * kPanel + column) * 4;
      return {load_as<vi>(codes), load_as<vi>(codes + 64)};
    }
    return offset_pairs(tile, kType, block * Shape::kGroups + 2 * pair, column);
  }
  QUIRE_INLINE void next_block() {
    at += kIsWide ? Shape::kWideBytes : Shape::kGroups * Shape::kStoredBytes;
  }
};

// A panel for many tiles: taken apart once.
template <WeightType kType>
void widen_panel(const Tile& tile) {
  using Shape = BlockShape<kType>;
  const int64_t blocks = tile.weight->in_features / kBlockValues;
  for (int part = 0; part < kParts; ++part) {
    const int64_t column = part * kLanes;
    PanelReader<kType, false> from{tile, tile.panel, column};
    std::byte* out = tile.widened + column * 4;
    const auto put = [&out](vi low, vi high) {
      std::memcpy(out, &low, sizeof(vi)), std::memcpy(out + 64, &high, sizeof(vi));
      out += kPanel * 4;
    };
    for (int64_t block = 0; block < blocks; ++block, from.next_block()) {
      for (int group = 0; group < Shape::kGroups; ++group)
#pragma GCC unroll 8
        for (int index = 0; index < Shape::kQuads; ++index) {
          const auto [low, high] = from.quad(group, index);
          put(low, high);
        }
      for (int group = 0; group < Shape::kGroups; ++group) {
        const auto [low, high] = from.scales(block, group);
        put(bit_cast<vi>(low), bit_cast<vi>(high));
      }
      if constexpr (Shape::kHasOffsets)
        for (int pair = 0; pair < Shape::kGroups / 2; ++pair) {
          const auto [low, high] = from.offsets(block, pair);
          put(low, high);
        }
    }
  }
}

// Adds a block's sums to the totals: total += factor * (half * sum - half of offsets * sum of offsets).
template <WeightType kType, int kRows, bool kIsWide>
QUIRE_INLINE void finish_block(const PanelReader<kType, kIsWide>& from, int64_t block, const float* factors, const int32_t* heads,
                               const GroupSums<kRows>& sums) {
  using Shape = BlockShape<kType>;
  constexpr int kPairs = Shape::kHasOffsets ? Shape::kGroups / 2 : 0;
  const int64_t at = block * kBlockValues / kSuperBlock * kPanel + from.column;
  const vf low_scale = load_f16(from.tile.scale_halves + at), high_scale = load_f16(from.tile.scale_halves + at + 16);
  PairOfVectors offset{};
  PairOfWords codes[kPairs + 1];
  if constexpr (Shape::kHasOffsets) {
    offset = {-load_f16(from.tile.offset_halves + at), -load_f16(from.tile.offset_halves + at + 16)};
#pragma GCC unroll 4
    for (int pair = 0; pair < kPairs; ++pair) codes[pair] = from.offsets(block, pair);
  }
  float* out = from.tile.out + from.column;
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r, out += kPanel) {
    vf low = sums.low[r] * low_scale, high = sums.high[r] * high_scale;
    if constexpr (Shape::kHasOffsets) {
      PairOfWords of_x{};
#pragma GCC unroll 4
      for (int pair = 0; pair < kPairs; ++pair) {
        const int32_t head = heads[pair * pitch_of(kRows) + r];
        of_x = {add_pair_products(of_x.low, codes[pair].low, head), add_pair_products(of_x.high, codes[pair].high, head)};
      }
      low = fma(to_float(of_x.low), offset.low, low);
      high = fma(to_float(of_x.high), offset.high, high);
    }
    const vf factor = broadcast(factors[r]);
    store(out, fma(low, factor, block ? load(out) : zero()));
    store(out + 16, fma(high, factor, block ? load(out + 16) : zero()));
  }
}

template <WeightType kType, int kRows, bool kIsWide>
void super_tile(const Tile& tile) {
  using Shape = BlockShape<kType>;
  constexpr int kPitch = pitch_of(kRows), kChains = kRows == 1 ? 2 : 1;  // sums of one row: more, to keep the processor busy
  constexpr int kLines = static_cast<int>(Shape::kStoredBytes) / 64;
  const int64_t blocks = tile.weight->in_features / kBlockValues;
  for (int part = 0; part < kParts; ++part) {
    PanelReader<kType, kIsWide> from{tile, kIsWide ? tile.widened : tile.panel, part * kLanes};
    const std::byte *x = tile.x, *soon = tile.prefetch, *soon_end = tile.prefetch_end;
    for (int64_t block = 0; block < blocks; ++block, from.next_block()) {
      const auto* factors = reinterpret_cast<const float*>(x);
      const auto* heads = reinterpret_cast<const int32_t*>(factors + kPitch);
      x += (1 + Shape::kHeads) * kPitch * 4;
      if (soon_end && soon >= soon_end) soon = tile.prefetch_next + (soon - soon_end), soon_end = nullptr;  // as digit_tile
      GroupSums<kRows> sums;
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) sums.low[r] = sums.high[r] = zero();
      for (int group = 0; group < Shape::kGroups; ++group) {
        vi low[kChains][kRows], high[kChains][kRows];
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          low[0][r] = high[0][r] = Shape::kHasOffsets ? vi{} : broadcast_int(heads[group * kPitch + r]);
          if constexpr (kChains > 1) low[1][r] = high[1][r] = vi{};
        }
#pragma GCC unroll 8
        for (int index = 0; index < Shape::kQuads; ++index, x += kPitch * kQuadBytes) {
          const auto [low_quad, high_quad] = from.quad(group, index);
#pragma GCC unroll 8
          for (int r = 0; r < kRows; ++r) {
            vi &low_sum = low[index % kChains][r], &high_sum = high[index % kChains][r];
            low_sum = add_products(low_sum, low_quad, x + r * kQuadBytes);
            high_sum = add_products(high_sum, high_quad, x + r * kQuadBytes);
          }
#pragma GCC unroll 2
          for (int line = kLines * index / Shape::kQuads; line < kLines * (index + 1) / Shape::kQuads; ++line, soon += tile.prefetch_step)
            prefetch_line(tile, soon);
        }
        if constexpr (kChains > 1) low[0][0] += low[1][0], high[0][0] += high[1][0];
        const auto [low_scale, high_scale] = from.scales(block, group);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          sums.low[r] = fma(to_float(low[0][r]), low_scale, sums.low[r]);
          sums.high[r] = fma(to_float(high[0][r]), high_scale, sums.high[r]);
        }
      }
      finish_block(from, block, factors, heads, sums);
    }
  }
}

template <WeightType kType>
void multiply_super(const Tile& tile, int64_t rows) {
  static constexpr auto kTiles = []<int... kBelow>(std::integer_sequence<int, kBelow...>) {
    return std::array<std::array<TileKernel, sizeof...(kBelow)>, 2>{{{super_tile<kType, kBelow + 1, false>...},
                                                                     {super_tile<kType, kBelow + 1, true>...}}};
  }(std::make_integer_sequence<int, kDigitRows<1>>{});
  const bool is_wide = tile.widened && tile.weight->in_features / kBlockValues * BlockShape<kType>::kWideBytes <=
                                           static_cast<int64_t>(kWidenedBytes);
  if (is_wide && !tile.is_widened) widen_panel<kType>(tile);
  kTiles[is_wide][static_cast<std::size_t>(rows - 1)](tile);
}

struct SuperRows {
  static constexpr int64_t kRows = kDigitRows<1>;
  static constexpr int64_t kRowStep = 1;
  static constexpr int64_t kBlockBytes = quire::QUIRE_ISA::kBlockBytes;
  static constexpr int64_t kGroupBytes = 0;
  static constexpr int64_t kFewestWideTiles = 3;
  static constexpr bool kExpects = true;
  static constexpr int64_t kPrefetchAhead = 8192;

  static TileLayout layout(const PackedWeight& weight) {
    TileLayout layout;
    layout.data_bytes = weight.in_features / kBlockValues * block_bytes(weight.type, row_pitch(kRows));
    layout.sums_offset = layout.scales_offset = layout.bytes = rounded_up(layout.data_bytes, 64);
    return layout;
  }

  static void pack(const PackedWeight& weight, const float* x, int64_t stride, int64_t rows, std::byte* memory) {
    const int64_t pitch = row_pitch(rows), bytes = block_bytes(weight.type, pitch);
    alignas(64) float buffer[4][kBlockValues];
    for (int64_t base = 0; base < rows; base += 4) {
      const float* row[4];  // the last one also stands for those that fill the tile up
      for (int64_t i = 0; i < 4; ++i) row[i] = x + (base + i < rows ? base + i : rows - 1) * stride;
      std::byte* out = memory;
      for (int64_t first = 0; first < weight.in_features; first += kBlockValues, out += bytes) {
        const float* values[4];
        for (int i = 0; i < 4; ++i) values[i] = contiguous(row[i], weight.column_order, first, kBlockValues, buffer[i]);
        pack_rows(values, weight, pitch, base, out);
      }
    }
  }

  static void multiply(const Tile& tile, int64_t rows) {
    switch (tile.weight->type) {
      case WeightType::kI4:
        return multiply_super<WeightType::kI4>(tile, rows);
      case WeightType::kI2:
        return multiply_super<WeightType::kI2>(tile, rows);
      case WeightType::kI3:
        return multiply_super<WeightType::kI3>(tile, rows);
      case WeightType::kI5:
        return multiply_super<WeightType::kI5>(tile, rows);
      case WeightType::kI6:
        return multiply_super<WeightType::kI6>(tile, rows);
      default:
        return multiply_super<WeightType::kNL4>(tile, rows);
    }
  }

 private:
  static int64_t groups(WeightType type) { return super_groups(type) * kBlockValues / kSuperBlock; }
  static int64_t block_bytes(WeightType type, int64_t pitch) {
    const int64_t heads = has_code_offsets(type) ? groups(type) / 2 : groups(type);
    return pitch * (4 + heads * 4 + kBlockValues * kWordsPerQuad);
  }

  // A block of four rows, or of one where the pitch is 1, at their place among a tile's rows.
  static void pack_rows(const float* const (&rows)[4], const PackedWeight& weight, int64_t pitch, int64_t base, std::byte* out) {
    const int64_t count = groups(weight.type), height = pitch == 1 ? 1 : 4, quads = kBlockValues / 4 / count;
    const bool has_offsets = has_code_offsets(weight.type);
    const int32_t bias = stored_bias(weight);
    auto* factors = reinterpret_cast<float*>(out) + base;
    std::byte* heads = out + (pitch + base) * 4;
    std::byte* words = out + pitch * (1 + (has_offsets ? count / 2 : count)) * 4 + base * kQuadBytes;
    RowScale scale[4];
    for (int64_t i = 0; i < height; ++i) {
      const float factor = digit_scale(largest_bits(rows[i], kBlockValues));
      factors[i] = factor;
      scale[i] = {factor, factor == factor ? 1.0f / factor : 0.0f};
    }
    for (int64_t group = 0; group < count; ++group, words += quads * pitch * kQuadBytes) {
      int32_t sums[4] = {};
      const float* values[4];
      for (int64_t i = 0; i < 4; ++i) values[i] = rows[i] + group * quads * 4;
      round_rows(values, scale, quads * 4, quads * 4, weight.type, pitch, reinterpret_cast<uint32_t*>(words), sums);
      for (int64_t i = 0; i < height; ++i) {
        if (has_offsets) {
          const auto sum = static_cast<int16_t>(sums[i]);
          std::memcpy(heads + (group / 2 * pitch + i) * 4 + group % 2 * 2, &sum, 2);
        } else {
          const int32_t start = -bias * sums[i];
          std::memcpy(heads + (group * pitch + i) * 4, &start, 4);
        }
      }
    }
  }
};

}  // namespace
}  // namespace quire::QUIRE_ISA
