// One tile's work: packed rows of activations times one panel of weights.
#pragma once

#include "linear_activations.h"

namespace quire::QUIRE_ISA {
namespace {

struct Tile {
  const std::byte* panel;
  const std::byte* x;         // as linear_activations.h packs it
  const float* x_sums;        // [group][pitch], where there are offsets
  const float* scales;        // of this panel: [group][32]; of nvfp4 [32]
  const float* offsets;       // or null
  const uint8_t* scale_codes; // of this panel: [group][32], or null
  const int32_t* column_sums;
  const PackedWeight* weight;
  float* out;                 // [rows][32]
  const std::byte* prefetch;  // memory that is needed soon: prefetch_step of it for every 64 bytes of panel
  int64_t prefetch_step;
  bool prefetch_far;          // it is a panel away: into the L2 cache, where it does not push out what is being used
};

QUIRE_INLINE void prefetch_line(const Tile& tile, const std::byte* at) {
  if (tile.prefetch_far)
    __builtin_prefetch(at, 0, 2);
  else
    __builtin_prefetch(at, 0, 3);
}

using TileKernel = void (*)(const Tile&);

}  // namespace
}  // namespace quire::QUIRE_ISA
