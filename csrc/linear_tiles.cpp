// Tables of register tiles (linear_tiles.h). They take the compiler as long as all else in linear.cpp: two cores share both.
#include "linear_tiles.h"

#include <iterator>

namespace quire::QUIRE_ISA {
namespace {

#define QUIRE_SIX(function, weight)                                                                                \
  function<weight, 1>, function<weight, 2>, function<weight, 3>, function<weight, 4>, function<weight, 5>, function<weight, 6>
#if defined(__AVX512F__)
#define QUIRE_EVERY_HEIGHT(function, weight)                                                                     \
  QUIRE_SIX(function, weight), function<weight, 7>, function<weight, 8>, function<weight, 9>, function<weight, 10>, \
      function<weight, 11>, function<weight, 12>
#elif defined(__AVX2__) || !defined(__x86_64__)
#define QUIRE_EVERY_HEIGHT(function, weight) QUIRE_SIX(function, weight)
#else
#define QUIRE_EVERY_HEIGHT(function, weight) function<weight, 1>, function<weight, 2>
#endif

#if !defined(QUIRE_DOT_BYTES)  // else linear_digits.h multiplies integers and 4-bit floats, and another instruction set the rest
const TileKernel kF32Tiles[] = {QUIRE_EVERY_HEIGHT(float_tile, F32)};
static_assert(std::size(kF32Tiles) == kTileRows);
const TileKernel kBF16Tiles[] = {QUIRE_EVERY_HEIGHT(float_tile, BF16)};
const TileKernel kF16Tiles[] = {QUIRE_EVERY_HEIGHT(float_tile, F16)};
const TileKernel kE4M3Tiles[] = {QUIRE_EVERY_HEIGHT(widening_tile, E4M3)};
const TileKernel kI8Tiles[] = {QUIRE_EVERY_HEIGHT(widening_tile, I8)};
const TileKernel kI4Tiles[] = {QUIRE_EVERY_HEIGHT(widening_tile, I4)};
const TileKernel kMXFP4Tiles[] = {QUIRE_EVERY_HEIGHT(widening_tile, MXFP4)};
const TileKernel kNVFP4Tiles[] = {QUIRE_EVERY_HEIGHT(widening_tile, NVFP4)};
const TileKernel kI2Tiles[] = {QUIRE_EVERY_HEIGHT(widening_tile, Planes<WeightType::kI2>)};
const TileKernel kI3Tiles[] = {QUIRE_EVERY_HEIGHT(widening_tile, Planes<WeightType::kI3>)};
const TileKernel kI5Tiles[] = {QUIRE_EVERY_HEIGHT(widening_tile, Planes<WeightType::kI5>)};
const TileKernel kI6Tiles[] = {QUIRE_EVERY_HEIGHT(widening_tile, Planes<WeightType::kI6>)};
const TileKernel kNL4Tiles[] = {QUIRE_EVERY_HEIGHT(widening_tile, Planes<WeightType::kNL4>)};
#endif
const TileKernel kRoundedI8Tiles[] = {QUIRE_EVERY_HEIGHT(rounded_tile, RoundedI8)};
const TileKernel kRoundedI4Tiles[] = {QUIRE_EVERY_HEIGHT(rounded_tile, RoundedI4)};

}  // namespace

const TileKernel* tile_kernels(const PackedWeight& weight) {
#if defined(QUIRE_DOT_BYTES)
  return weight.type == WeightType::kI8 ? kRoundedI8Tiles : kRoundedI4Tiles;
#else
  switch (weight.type) {
    case WeightType::kF32:
      return kF32Tiles;
    case WeightType::kBF16:
      return kBF16Tiles;
    case WeightType::kF16:
      return kF16Tiles;
    case WeightType::kE4M3:
      return kE4M3Tiles;
    case WeightType::kI8:
      return weight.integer_activations ? kRoundedI8Tiles : kI8Tiles;
    case WeightType::kI4:
      return weight.integer_activations ? kRoundedI4Tiles : kI4Tiles;
    case WeightType::kMXFP4:
      return kMXFP4Tiles;
    case WeightType::kNVFP4:
      return kNVFP4Tiles;
    case WeightType::kI2:
      return kI2Tiles;
    case WeightType::kI3:
      return kI3Tiles;
    case WeightType::kI5:
      return kI5Tiles;
    case WeightType::kI6:
      return kI6Tiles;
    case WeightType::kNL4:
      return kNL4Tiles;
  }
  __builtin_unreachable();
#endif
}

}  // namespace quire::QUIRE_ISA
