// Linear layers over packed weights, every type. Compiled once for each instruction set.
#include "linear_driver.h"
#include "linear_tiles.h"

namespace quire::QUIRE_ISA {
namespace {

struct Panels {
  static constexpr int64_t kRows = kTileRows;
  static TileLayout layout(const PackedWeight& weight) { return tile_layout(weight); }
  static void pack(const PackedWeight& weight, const float* x, int64_t stride, int64_t rows, std::byte* memory) {
    (weight.integer_activations ? round_tile : pack_float_tile)(weight, x, stride, rows, memory);
  }
  static void multiply(const Tile& tile, int64_t rows) { tile_kernels(*tile.weight)[rows - 1](tile); }
};

}  // namespace

extern const LinearKernels kLinear;
const LinearKernels kLinear = {run_linear<Panels>, scratch_for<Panels>};

}  // namespace quire::QUIRE_ISA
