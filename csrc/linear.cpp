// Linear layers over packed weights, every type. Compiled once for each instruction set.
#include <algorithm>
#include <type_traits>

#include "linear_bf16.h"
#include "linear_digits.h"
#include "linear_driver.h"
#include "linear_experts.h"
#include "linear_heads.h"
#include "linear_tiles.h"
#include "linear_wide.h"

namespace quire::QUIRE_ISA {
namespace {

struct Panels {
  static constexpr int64_t kRows = kTileRows;
  static constexpr int64_t kRowStep = 1;
  static constexpr int64_t kBlockBytes = quire::QUIRE_ISA::kBlockBytes;
  static constexpr int64_t kGroupBytes = 0;
  static constexpr bool kExpects = true;
  static constexpr int64_t kPrefetchAhead = 2048;
  static TileLayout layout(const PackedWeight& weight) { return tile_layout(weight); }
  static void pack(const PackedWeight& weight, const float* x, int64_t stride, int64_t rows, std::byte* memory) {
    (weight.integer_activations ? round_tile : pack_float_tile)(weight, x, stride, rows, memory);
  }
  static void multiply(const Tile& tile, int64_t rows) { tile_kernels(*tile.weight)[rows - 1](tile); }
};

#if defined(QUIRE_DOT_BYTES)
// Integers times integers take so few instructions that memory is far away.
struct IntegerPanels : Panels {
  static constexpr int64_t kPrefetchAhead = 8192;
};
#endif

template <class Use>
QUIRE_INLINE void with_method([[maybe_unused]] const PackedWeight& weight, [[maybe_unused]] MatmulPrecision precision,
                              const Use& use) {
#if defined(QUIRE_BF16_DOT)
  if (multiplies_bf16(weight, precision)) return use(Bf16Pairs{});
#endif
  const int digits = num_digits(weight, precision);
  if (digits == 1) return use(DigitRows<1>{});
#if defined(QUIRE_DOT_BYTES)
  if (digits == 2) return use(DigitRows<2>{});
  if (digits == 3) return use(DigitRows<3>{});
  if (weight.integer_activations) return use(IntegerPanels{});
#endif
  return use(Panels{});
}

void heads(const HeadsArgs& args, const Step& step, Team& team) {
  run_heads(args, step, team, [&team](const LinearArgs& own, const Step& part) {
    with_method(own.weight, own.precision, [&]<class Method>(Method) { run_head<Method>(own, part, team); });
  });
}

void linear(const LinearArgs& args, const Step& step, Team& team) {
  with_method(args.weight, args.precision, [&]<class Method>(Method) {
    if (std::is_same_v<Method, Panels> && multiplies_wide(args.weight, step.rows)) return run_wide(args, step, team);
    run_linear<Method>(args, step, team);
  });
}

std::size_t linear_scratch(const LinearArgs& args, int64_t rows) {
  std::size_t bytes = 0;
  with_method(args.weight, args.precision, [&]<class Method>(Method) {
    bytes = std::max(scratch_for<Method>(args, rows), std::is_same_v<Method, Panels> ? wide_scratch(args, rows) : 0);
  });
  return bytes;
}

bool hands_over(const LinearArgs& from, const LinearArgs& to) {
  bool fits = false;
  with_method(from.weight, from.precision, [&]<class Method>(Method) {
    with_method(to.weight, to.precision, [&]<class Next>(Next) { fits = std::is_same_v<Method, Next> && fits_as_tiles<Method>(from, to); });
  });
  return fits;
}

}  // namespace

extern const LinearKernels kLinear;
const LinearKernels kLinear = {linear, linear_scratch, hands_over, heads, experts, experts_scratch};

}  // namespace quire::QUIRE_ISA
