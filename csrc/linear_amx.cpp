// Linear layers on AMX: int8 weights with int8 activations, bfloat16 weights with activations in bfloat16
// (linear_amx_bf16.h), and so integers and small floats (linear_amx_widened.h). Everything else is left to the AVX-512
// kernels, and so is what is too small for tiles of int8: the sums are integers and what follows them is computed as there,
// so that results have the same bits.
#include <algorithm>
#include <type_traits>

#include "linear_amx_bf16.h"
#include "linear_amx_widened.h"
#include "linear_below.h"
#include "linear_experts.h"
#include "linear_heads.h"

namespace quire::QUIRE_ISA {
namespace {

// Values of k that one tile covers.
constexpr int64_t kStep = kAmxRowBytes;
// Fewer rows than this leave most of a tile empty.
constexpr int64_t kFewestRows = 8;

// Packed rows: [group][k / 64][block of 16 rows][16][64] int8, groups padded with zeros to a multiple of 64.
struct AmxMethod {
  static constexpr int64_t kRows = 2 * kAmxRows;
  static constexpr int64_t kRowStep = kAmxRows;
  static constexpr int64_t kBlockBytes = 1 << 20;
  static constexpr int64_t kGroupBytes = 256 << 10;
  static constexpr bool kExpects = false;  // tiles are loaded in its place: asking took longer than waiting
  static constexpr int64_t kPrefetchAhead = 2048;

  static int64_t steps(const PackedWeight& weight, int64_t group) {
    return (group_length(weight, group) + kStep - 1) / kStep;
  }

  static TileLayout layout(const PackedWeight& weight) {
    const int64_t groups = num_groups(weight);
    TileLayout layout;
    layout.data_bytes = ((groups - 1) * steps(weight, 0) + steps(weight, groups - 1)) * kRows * kStep;
    layout.sums_offset = layout.data_bytes;
    layout.scales_offset = layout.sums_offset + (has_offsets(weight) ? rounded_up(groups * kRows * 4, 64) : 0);
    layout.bytes = layout.scales_offset + kRows * 4;
    return layout;
  }

  static void pack(const PackedWeight& weight, const float* x, int64_t stride, int64_t rows, std::byte* memory) {
    const TileLayout place = layout(weight);
    float* sums = reinterpret_cast<float*>(memory + place.sums_offset);
    float* scales = reinterpret_cast<float*>(memory + place.scales_offset);
    alignas(64) float buffer[kChunk];
    alignas(64) int8_t rounded[kChunk + kLanes];
    for (int64_t row = 0; row < rows; ++row) {
      const float* values = x + row * stride;
      const RowScale scale = row_scale(values, weight.in_features, stride);
      scales[row] = scale.scale;
      std::byte* out = memory + row * kStep;
      for (int64_t group = 0; group < num_groups(weight); ++group) {
        const int64_t first = group * weight.group_size, length = group_length(weight, group);
        int32_t sum = 0;
        for (int64_t k = 0; k < length; k += kChunk) {
          const int64_t count = length - k < kChunk ? length - k : kChunk, end = rounded_up(count, kStep);
          for (int64_t i = rounded_up(count, kLanes); i < end; ++i) rounded[i] = 0;
          sum += round_values(contiguous(values, weight.column_order, first + k, count, buffer), count, scale.inverse,
                              rounded);
          for (int64_t i = 0; i < end; i += kStep, out += kRows * kStep) std::memcpy(out, rounded + i, kStep);
        }
        if (has_offsets(weight)) sums[group * kRows + row] = static_cast<float>(sum);
      }
    }
  }

  // 64 values of k: four products of 16 x 16, or two where the second block of rows is empty.
  static void step(const std::byte* x, const std::byte* panel, bool both) {
    amx_load<6>(panel, 2 * kAmxRowBytes);
    amx_load<7>(panel + kAmxRowBytes, 2 * kAmxRowBytes);
    amx_load<4>(x, kStep);
    amx_dot<0, 4, 6>();
    amx_dot<1, 4, 7>();
    if (!both) return;
    amx_load<5>(x + kAmxRows * kStep, kStep);
    amx_dot<2, 5, 6>();
    amx_dot<3, 5, 7>();
  }

  static void multiply(const Tile& tile, int64_t rows) {
    const PackedWeight& weight = *tile.weight;
    const int64_t groups = num_groups(weight);
    const bool both = rows > kAmxRows;
    alignas(64) int32_t products[kRows * kPanel];
    alignas(64) std::byte padded[kStep * kPanel];
    const std::byte *x = tile.x, *panel = tile.panel, *soon = tile.prefetch;
    for (int64_t group = 0; group < groups; ++group) {
      const int64_t length = rounded_up(group_length(weight, group), 4);
      amx_zero<0>(), amx_zero<1>(), amx_zero<2>(), amx_zero<3>();
      int64_t k = 0;
      for (; k + kStep <= length; k += kStep, x += kRows * kStep, panel += kStep * kPanel) {
        for (int line = 0; line < kStep * kPanel / 64; ++line, soon += tile.prefetch_step) __builtin_prefetch(soon);
        step(x, panel, both);
      }
      if (k < length) {  // what follows the group in the panel is not read: it may not be there
        const int64_t bytes = (length - k) * kPanel;
        std::memcpy(padded, panel, static_cast<std::size_t>(bytes));
        std::memset(padded + bytes, 0, static_cast<std::size_t>(kStep * kPanel - bytes));
        step(x, padded, both);
        x += kRows * kStep;
        panel += bytes;
      }
      amx_store<0>(products, kPanel * 4);
      amx_store<1>(products + 16, kPanel * 4);
      if (both) {
        amx_store<2>(products + kAmxRows * kPanel, kPanel * 4);
        amx_store<3>(products + kAmxRows * kPanel + 16, kPanel * 4);
      }
      add_group(tile, group, rows, products);
    }
  }

  static void add_group(const Tile& tile, int64_t group, int64_t rows, const int32_t* products) {
    for (int64_t column = 0; column < kPanel; column += kLanes) {
      const bool has_any = has_offsets(*tile.weight);
      const GroupScales of = group_scales(tile, tile.weight->type, group, column);
      for (int64_t row = 0; row < rows; ++row) {
        float* out = tile.out + row * kPanel + column;
        const vf product = to_float(load_as<vi>(products + row * kPanel + column));
        vf total = fma(product, of.scale, group ? load(out) : zero());
        if (has_any) total = fma(broadcast(tile.x_sums[group * kRows + row]), of.offset, total);
        store(out, total);
      }
    }
  }
};

bool for_tiles(const PackedWeight& weight) {
  return weight.type == WeightType::kI8 && weight.integer_activations && weight.group_size >= kStep;
}

// Weights whose products on tiles are made in bfloat16, for any number of rows.
bool is_own(const PackedWeight& weight, MatmulPrecision precision) {
  return multiplies_bf16(weight, precision) || multiplies_widened(weight, precision);
}

// Calls use(method) for one of them.
template <class Use>
QUIRE_INLINE void with_method(const PackedWeight& weight, MatmulPrecision precision, const Use& use) {
  if (multiplies_bf16(weight, precision)) return use(AmxBf16{});
  use(AmxWidened{});
}

// Calls use(method) with the method that multiplies this weight on tiles. False: the kernels below multiply it.
template <class Use>
bool with_tiles(const PackedWeight& weight, MatmulPrecision precision, const Use& use) {
  if (is_own(weight, precision)) return with_method(weight, precision, use), true;
  if (for_tiles(weight)) return use(AmxMethod{}), true;
  return false;
}

// Calls use() with registers for a batch of `rows`.
template <class Use>
void on_tiles(int64_t rows, const Use& use) {
  if (rows == 0) return;
  amx_configure(tiles_of(rows));
  use();
  amx_release();
}

void linear(const LinearArgs& args, const Step& step, Team& team) {
  const bool is_done = with_tiles(args.weight, args.precision, [&]<class Method>(Method) {
    if (std::is_same_v<Method, AmxMethod> && step.rows < kFewestRows) return QUIRE_BELOW::kLinear.linear(args, step, team);
    on_tiles(step.rows, [&] { run_linear<Method>(args, step, team); });
  });
  if (!is_done) QUIRE_BELOW::kLinear.linear(args, step, team);
}

std::size_t linear_scratch(const LinearArgs& args, int64_t rows) {
  std::size_t bytes = QUIRE_BELOW::kLinear.linear_scratch(args, rows);
  with_tiles(args.weight, args.precision,
             [&]<class Method>(Method) { bytes = std::max(bytes, scratch_for<Method>(args, rows)); });
  return bytes;
}

void heads(const HeadsArgs& args, const Step& step, Team& team) {
  if (!are_own(*args.weights, args.precision)) return QUIRE_BELOW::kLinear.heads(args, step, team);
  on_tiles(step.rows, [&] {
    run_heads(args, step, team, [&team](const LinearArgs& own, const Step& part) {
      with_method(own.weight, own.precision, [&]<class Method>(Method) { run_head<Method>(own, part, team); });
    });
  });
}

void experts_on_tiles(const ExpertsArgs& args, const Step& step, Team& team) {
  if (!are_own(args)) return QUIRE_BELOW::kLinear.experts(args, step, team);
  on_tiles(step.rows, [&] { experts(args, step, team); });
}

std::size_t scratch_of_experts(const ExpertsArgs& args, int64_t rows, int threads) {
  return (are_own(args) ? experts_scratch : QUIRE_BELOW::kLinear.experts_scratch)(args, rows, threads);
}

// Neither do the tiles, nor do the kernels below where the other layer is on tiles.
bool hands_over(const LinearArgs&, const LinearArgs&) { return false; }

}  // namespace

extern const LinearKernels kLinear;
const LinearKernels kLinear = {linear, linear_scratch, hands_over, heads, experts_on_tiles, scratch_of_experts};

}  // namespace quire::QUIRE_ISA
