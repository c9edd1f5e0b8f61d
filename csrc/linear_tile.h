// One tile's work: packed rows of activations times one panel of weights.
#pragma once

#include "linear_activations.h"
#include "team.h"

namespace quire::QUIRE_ISA {
namespace {

// At the end of a thread's scratch.
inline constexpr std::size_t kWidenedBytes = 256 << 10, kWidenedOffset = kThreadScratch - kWidenedBytes;

struct Tile {
  const std::byte* panel;
  const std::byte* x;         // as linear_activations.h packs it
  const float* x_sums;        // [group][pitch], where there are offsets
  const float* scales;        // of this panel: [group][32]; of nvfp4 [32]
  const float* offsets;       // or null
  const uint16_t* scale_halves;   // of this panel: [group][32], or null
  const uint16_t* offset_halves;
  const uint8_t* scale_codes; // of this panel: [group][32], or null
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

// The scales of a group's columns from `column` on, of integers and 8-bit floats.
QUIRE_INLINE vf group_scales(const Tile& tile, int64_t group, int64_t column) {
  const int64_t at = group * kPanel + column;
  return tile.scale_halves ? load_f16(tile.scale_halves + at) : load(tile.scales + at);
}

// Their offsets, where the weight has some. scales: of the same columns.
QUIRE_INLINE vf group_offsets(const Tile& tile, int64_t group, int64_t column, vf scales) {
  const int64_t at = group * kPanel + column;
  if (tile.offset_halves) return load_f16(tile.offset_halves + at);
  return tile.offsets ? load(tile.offsets + at) : scales * broadcast(-tile.weight->centre);
}

QUIRE_INLINE void prefetch_line(const Tile& tile, const std::byte* at) {
  if (tile.prefetch_far)
    __builtin_prefetch(at, 0, 2);
  else
    __builtin_prefetch(at, 0, 3);
}

using TileKernel = void (*)(const Tile&);

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
