// One tile's work: packed rows of activations times one panel of weights.
#pragma once

#include "linear_activations.h"
#include "linear_planes.h"
#include "team.h"

namespace quire::QUIRE_ISA {
namespace {

// Columns that one pass covers: kLanes from column part * kLanes on, and as many from 16 columns further.
inline constexpr int kParts = 16 / kLanes;

constexpr int64_t pitch_of(int rows) { return rows == 1 ? 1 : (rows + 3) / 4 * 4; }

// At the end of a thread's scratch.
inline constexpr std::size_t kWidenedBytes = 256 << 10, kWidenedOffset = kThreadScratch - kWidenedBytes;

}  // namespace

struct Tile {
  const std::byte* panel;
  const std::byte* x;         // as linear_activations.h packs it
  const float* x_sums;        // [group][pitch], where there are offsets
  const float* scales;        // of this panel: [group][32]; of nvfp4 [32]
  const float* offsets;       // or null
  const uint16_t* scale_halves;   // of this panel: [group or super-block][32], or null
  const uint16_t* offset_halves;
  const uint8_t* scale_codes; // of this panel: [group][32], of super-blocks [super-block][row of codes][32], or null
  const int32_t* column_sums;
  const PackedWeight* weight;
  float* out;                 // [rows][32]
  const std::byte* prefetch;  // memory that is needed soon: prefetch_step of it for every 64 bytes of panel
  int64_t prefetch_step;
  const std::byte* prefetch_end;   // where the prefetching goes on at prefetch_next: behind a cold panel, else null
  const std::byte* prefetch_next;
  bool prefetch_far;          // it is a panel away: into the L2 cache, where it does not push out what is being used
  std::byte* widened;         // kWidenedBytes, for what a method computes of the panel: null for a single tile
  bool is_widened;            // the tile before was multiplied by the same panel, with the same `widened`
};

using TileKernel = void (*)(const Tile&);

// Kernels for 1, 2, ... kTileRows rows (linear_tiles.cpp).
const TileKernel* tile_kernels(const PackedWeight& weight);

namespace {

// kLanes bytes.
QUIRE_INLINE vi load_bytes(const uint8_t* at) {
#if defined(__AVX512F__)
  return (vi)_mm512_maskz_cvtepu8_epi32(0xffff, _mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
#elif defined(__AVX2__)
  return (vi)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at)));
#else
  return __builtin_convertvector(load_as<vu8>(at), vi);
#endif
}

// Of kLanes columns of a group in super-blocks.
struct GroupCodes {
  vi scale, offset;
};

// As super_codes, vector by vector.
QUIRE_INLINE GroupCodes group_codes(const Tile& tile, WeightType type, int64_t group, int64_t column) {
  const int64_t per = super_groups(type), own = group % per;
  const uint8_t* rows = tile.scale_codes + group / per * code_rows(type) * kPanel + column;
  switch (type) {
    case WeightType::kI4:
    case WeightType::kI5: {
      const vi low = load_bytes(rows + own * kPanel);
      const vi high = load_bytes(rows + (8 + own / 2) * kPanel) >> static_cast<int>(own % 2 * 4);
      return {(low & 15) | ((high & 3) << 4), (low >> 4) | ((high & 12) << 2)};
    }
    case WeightType::kI6: {
      return {(load_bytes(rows + own * kPanel) ^ 128) - 128, vi{}};
    }
    case WeightType::kI2: {
      const vi pair = load_bytes(rows + own * kPanel);
      return {pair & 15, pair >> 4};
    }
    default: {
      const vi low = load_bytes(rows + own / 2 * kPanel) >> static_cast<int>(own % 2 * 4);
      const vi high = load_bytes(rows + (per / 2 + own / 4) * kPanel) >> static_cast<int>(own % 4 * 2);
      return {((low & 15) | ((high & 3) << 4)) - 32, vi{}};
    }
  }
}

// What the sums of kLanes columns of a group, of integers and 8-bit floats, are multiplied with, and what the sum of x is.
// The latter only where the weight has offsets.
struct GroupScales {
  vf scale, offset;
};

QUIRE_INLINE GroupScales group_scales(const Tile& tile, WeightType type, int64_t group, int64_t column) {
  GroupScales found{};
  if (is_whole(type) && tile.weight->super_blocks) {
    const GroupCodes codes = group_codes(tile, type, group, column);
    const int64_t at = group / super_groups(type) * kPanel + column;
    found.scale = load_f16(tile.scale_halves + at) * to_float(codes.scale);
    if (tile.offset_halves) found.offset = -load_f16(tile.offset_halves + at) * to_float(codes.offset);
    return found;
  }
  const int64_t at = group * kPanel + column;
  found.scale = tile.scale_halves ? load_f16(tile.scale_halves + at) : load(tile.scales + at);
  if (tile.offset_halves)
    found.offset = load_f16(tile.offset_halves + at);
  else
    found.offset = tile.offsets ? load(tile.offsets + at) : found.scale * broadcast(-tile.weight->centre);
  return found;
}

// The same of columns `column` on and of those 16 further.
struct PairOfScales {
  GroupScales low, high;
};

#if defined(__AVX512F__)
// The codes of all 32 columns of a group, in bytes; offsets where there are some.
struct PanelCodes {
  __m256i scale, offset;
};

QUIRE_INLINE PanelCodes panel_codes(const Tile& tile, WeightType type, int64_t group) {
  const int64_t per = super_groups(type), own = group % per;
  const uint8_t* rows = tile.scale_codes + group / per * code_rows(type) * kPanel;
  const auto row = [&](int64_t index) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows + index * kPanel)); };
  const auto count = [](int64_t bits) { return _mm_cvtsi32_si128(static_cast<int>(bits)); };
  const __m256i four = _mm256_set1_epi8(15), upper = _mm256_set1_epi8(0x30);
  switch (type) {
    case WeightType::kI4:
    case WeightType::kI5: {
      const __m256i low = row(own), high = _mm256_srl_epi16(row(8 + own / 2), count(own % 2 * 4));
      return {(low & four) | (_mm256_slli_epi16(high, 4) & upper),
              (_mm256_srli_epi16(low, 4) & four) | (_mm256_slli_epi16(high, 2) & upper)};
    }
    case WeightType::kI6:
      return {row(own), __m256i{}};
    case WeightType::kI2:
      return {row(own) & four, _mm256_srli_epi16(row(own), 4) & four};
    default: {
      const __m256i low = _mm256_srl_epi16(row(own / 2), count(own % 2 * 4));
      const __m256i high = _mm256_srl_epi16(row(per / 2 + own / 4), count(own % 4 * 2));
      const __m256i both = (low & four) | (_mm256_slli_epi16(high, 4) & upper);
      return {_mm256_sub_epi8(both, _mm256_set1_epi8(32)), __m256i{}};
    }
  }
}

template <int kHalf>
QUIRE_INLINE vi widened_codes(__m256i codes) {
  return (vi)_mm512_maskz_cvtepi8_epi32(0xffff, _mm256_extracti128_si256(codes, kHalf));
}
#endif

// Codes of columns `column` on and of those 16 further.
struct PairOfCodes {
  GroupCodes low, high;
};

QUIRE_INLINE PairOfCodes pair_of_codes(const Tile& tile, WeightType type, int64_t group, [[maybe_unused]] int64_t column) {
#if defined(__AVX512F__)
  const PanelCodes codes = panel_codes(tile, type, group);
  return {{widened_codes<0>(codes.scale), widened_codes<0>(codes.offset)},
          {widened_codes<1>(codes.scale), widened_codes<1>(codes.offset)}};
#else
  return {group_codes(tile, type, group, column), group_codes(tile, type, group, column + 16)};
#endif
}

QUIRE_INLINE PairOfScales pair_of_scales(const Tile& tile, WeightType type, int64_t group, int64_t column) {
#if defined(__AVX512F__)
  if (is_whole(type) && tile.weight->super_blocks) {
    const PairOfCodes codes = pair_of_codes(tile, type, group, column);
    const int64_t at = group / super_groups(type) * kPanel;
    PairOfScales found{};
    found.low.scale = load_f16(tile.scale_halves + at) * to_float(codes.low.scale);
    found.high.scale = load_f16(tile.scale_halves + at + 16) * to_float(codes.high.scale);
    if (tile.offset_halves) {
      found.low.offset = -load_f16(tile.offset_halves + at) * to_float(codes.low.offset);
      found.high.offset = -load_f16(tile.offset_halves + at + 16) * to_float(codes.high.offset);
    }
    return found;
  }
#endif
  return {group_scales(tile, type, group, column), group_scales(tile, type, group, column + 16)};
}

QUIRE_INLINE void prefetch_line(const Tile& tile, const std::byte* at) {
  if (tile.prefetch_far)
    __builtin_prefetch(at, 0, 2);
  else
    __builtin_prefetch(at, 0, 3);
}

// Value j of words of four int8, as float32: times 2^24 where kScaledPlaces.
template <int j>
QUIRE_INLINE vf i8_of_word(vi words) {
#if defined(__AVX512F__)
  // The byte goes to the top of its word, so that its sign is the word's.
  const __m512i to_top = _mm512_set_epi32(
#define QUIRE_TOP(lane) static_cast<int32_t>((lane * 4u + j) << 24 | 0x808080u)
      QUIRE_TOP(3), QUIRE_TOP(2), QUIRE_TOP(1), QUIRE_TOP(0), QUIRE_TOP(3), QUIRE_TOP(2), QUIRE_TOP(1), QUIRE_TOP(0),
      QUIRE_TOP(3), QUIRE_TOP(2), QUIRE_TOP(1), QUIRE_TOP(0), QUIRE_TOP(3), QUIRE_TOP(2), QUIRE_TOP(1), QUIRE_TOP(0));
#undef QUIRE_TOP
  if constexpr (j == 3) return to_float(words & static_cast<int32_t>(0xff000000u));
  return to_float((vi)_mm512_shuffle_epi8((__m512i)words, to_top));
#else
  return to_float((words << (24 - 8 * j)) >> 24);
#endif
}

}  // namespace
}  // namespace quire::QUIRE_ISA
