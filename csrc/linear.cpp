// Linear layers over packed weights. Compiled once for each instruction set; one that has another below it has what it
// multiplies with instructions of its own alone: bfloat16 (linear_bf16.h), or integers and 4-bit floats (linear_digits.h).
#include <algorithm>
#include <type_traits>

#include "linear_below.h"
#include "linear_driver.h"
#include "linear_experts.h"
#include "linear_heads.h"
#include "linear_tile.h"

#if defined(QUIRE_BELOW) != (defined(QUIRE_BF16_DOT) || defined(QUIRE_DOT_BYTES))
#error "these instruction sets, and no others, have one below them"
#endif
#if defined(QUIRE_BF16_DOT)
#include "linear_bf16.h"
#else
#include "linear_digits.h"
#include "linear_super.h"
#include "linear_tiles.h"
#endif
#if !defined(QUIRE_BELOW)
#include "linear_wide.h"
#endif

namespace quire::QUIRE_ISA {
namespace {

#if defined(QUIRE_BF16_DOT)

bool is_own(const PackedWeight& weight, MatmulPrecision precision) { return multiplies_bf16(weight, precision); }

template <class Use>
QUIRE_INLINE void with_method(const PackedWeight&, MatmulPrecision, const Use& use) {
  use(Bf16Pairs{});
}

#else

struct Panels {
  static constexpr int64_t kRows = kTileRows;
  static constexpr int64_t kRowStep = 1;
  static constexpr int64_t kBlockBytes = quire::QUIRE_ISA::kBlockBytes;
  static constexpr int64_t kGroupBytes = 0;
  static constexpr bool kExpects = true;
#if defined(QUIRE_DOT_BYTES)
  static constexpr int64_t kPrefetchAhead = 8192;  // integers times integers take so few instructions that memory is far away
#else
  static constexpr int64_t kPrefetchAhead = 2048;
#endif
  static TileLayout layout(const PackedWeight& weight) { return tile_layout(weight); }
  static void pack(const PackedWeight& weight, const float* x, int64_t stride, int64_t rows, std::byte* memory) {
    (weight.integer_activations ? round_tile : pack_float_tile)(weight, x, stride, rows, memory);
  }
  static void multiply(const Tile& tile, int64_t rows) { tile_kernels(*tile.weight)[rows - 1](tile); }
};

[[maybe_unused]] bool is_own([[maybe_unused]] const PackedWeight& weight, [[maybe_unused]] MatmulPrecision precision) {
#if defined(QUIRE_BELOW)
  return weight.integer_activations || num_digits(weight, precision) > 0;
#else
  return true;
#endif
}

template <class Use>
QUIRE_INLINE void with_method(const PackedWeight& weight, MatmulPrecision precision, const Use& use) {
  const int digits = num_digits(weight, precision);
  if (digits == 1) return weight.super_blocks ? use(SuperRows{}) : use(DigitRows<1>{});
#if defined(QUIRE_DOT_BYTES)
  if (digits == 2) return use(DigitRows<2>{});
  if (digits == 3) return use(DigitRows<3>{});
#endif
  return use(Panels{});
}

#endif

void heads(const HeadsArgs& args, const Step& step, Team& team) {
#if defined(QUIRE_BELOW)
  if (!are_own(*args.weights, args.precision)) return QUIRE_BELOW::kLinear.heads(args, step, team);
#endif
  run_heads(args, step, team, [&team](const LinearArgs& own, const Step& part) {
    with_method(own.weight, own.precision, [&]<class Method>(Method) { run_head<Method>(own, part, team); });
  });
}

void linear(const LinearArgs& args, const Step& step, Team& team) {
#if defined(QUIRE_BELOW)
  if (!is_own(args.weight, args.precision)) return QUIRE_BELOW::kLinear.linear(args, step, team);
#else
  if (multiplies_wide(args.weight, step.rows)) return run_wide(args, step, team);
#endif
  with_method(args.weight, args.precision, [&]<class Method>(Method) { run_linear<Method>(args, step, team); });
}

std::size_t linear_scratch(const LinearArgs& args, int64_t rows) {
  std::size_t bytes = 0;
#if defined(QUIRE_BELOW)
  if (!is_own(args.weight, args.precision)) return QUIRE_BELOW::kLinear.linear_scratch(args, rows);
#else
  bytes = wide_scratch(args, rows);
#endif
  with_method(args.weight, args.precision,
              [&]<class Method>(Method) { bytes = std::max(bytes, scratch_for<Method>(args, rows)); });
  return bytes;
}

bool hands_over(const LinearArgs& from, const LinearArgs& to) {
  bool fits = false;
#if defined(QUIRE_BELOW)
  const bool is_first = is_own(from.weight, from.precision), is_second = is_own(to.weight, to.precision);
  if (is_first != is_second) return false;
  if (!is_first) return QUIRE_BELOW::kLinear.hands_over(from, to);
#endif
  with_method(from.weight, from.precision, [&]<class Method>(Method) {
    with_method(to.weight, to.precision, [&]<class Next>(Next) { fits = std::is_same_v<Method, Next> && fits_as_tiles<Method>(from, to); });
  });
  return fits;
}

void experts_of_this(const ExpertsArgs& args, const Step& step, Team& team) {
#if defined(QUIRE_BELOW)
  if (!are_own(args)) return QUIRE_BELOW::kLinear.experts(args, step, team);
#endif
  experts(args, step, team);
}

std::size_t scratch_of_experts(const ExpertsArgs& args, int64_t rows, int threads) {
#if defined(QUIRE_BELOW)
  if (!are_own(args)) return QUIRE_BELOW::kLinear.experts_scratch(args, rows, threads);
#endif
  return experts_scratch(args, rows, threads);
}

}  // namespace

extern const LinearKernels kLinear;
const LinearKernels kLinear = {linear, linear_scratch, hands_over, heads, experts_of_this, scratch_of_experts};

}  // namespace quire::QUIRE_ISA
