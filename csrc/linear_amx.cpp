// Linear layers with int8 weights and int8 activations on AMX: tiles of 16 x 64 bytes. Everything else, and what is too
// small for tiles, is left to the AVX-512 kernels. The sums are integers and what follows them is computed as
// there: results have the same bits.
#include "amx_tiles.h"
#include "linear_driver.h"

// Machines with tiles have AVX512-BF16 as well; the emulation asks for no more than it needs.
#if defined(QUIRE_EMULATE_AMX)
#define QUIRE_BELOW avx512_vnni
#else
#define QUIRE_BELOW avx512_bf16
#endif

namespace quire {
namespace QUIRE_BELOW {
extern const LinearKernels kLinear;
}
}  // namespace quire

namespace quire::QUIRE_ISA {
namespace {

// Values of k that one tile covers.
constexpr int64_t kStep = kAmxRowBytes;
// Fewer rows than this leave most of a tile empty.
constexpr int64_t kFewestRows = 8;

// Packed rows: [group][k / 64][block of 16 rows][16][64] int8, groups padded with zeros to a multiple of 64.
struct AmxMethod {
  static constexpr int64_t kRows = 2 * kAmxRows;
  static constexpr int64_t kPrefetchAhead = 2048;

  static int64_t steps(const PackedWeight& weight, int64_t group) {
    return (group_length(weight, group) + kStep - 1) / kStep;
  }

  static TileLayout layout(const PackedWeight& weight) {
    const int64_t groups = num_groups(weight);
    TileLayout layout;
    layout.data_bytes = ((groups - 1) * steps(weight, 0) + steps(weight, groups - 1)) * kRows * kStep;
    layout.sums_offset = layout.data_bytes;
    layout.scales_offset = layout.sums_offset + (weight.offsets ? rounded_up(groups * kRows * 4, 64) : 0);
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
      const RowScale scale = row_scale(values, weight.in_features);
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
        if (weight.offsets) sums[group * kRows + row] = static_cast<float>(sum);
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
      const vf scale = load(tile.scales + group * kPanel + column);
      const vf offset = tile.offsets ? load(tile.offsets + group * kPanel + column) : zero();
      for (int64_t row = 0; row < rows; ++row) {
        float* out = tile.out + row * kPanel + column;
        const vf product = to_float(load_as<vi>(products + row * kPanel + column));
        vf total = fma(product, scale, group ? load(out) : zero());
        if (tile.offsets) total = fma(broadcast(tile.x_sums[group * kRows + row]), offset, total);
        store(out, total);
      }
    }
  }
};

bool for_tiles(const PackedWeight& weight) {
  return weight.type == WeightType::kI8 && weight.integer_activations && weight.group_size >= kStep;
}

void linear(const LinearArgs& args, const Step& step, Team& team) {
  if (!for_tiles(args.weight) || step.rows < kFewestRows) return QUIRE_BELOW::kLinear.linear(args, step, team);
  AmxConfig config;
  for (int tile = 0; tile < 8; ++tile) {
    config.rows[tile] = kAmxRows;
    config.row_bytes[tile] = kAmxRowBytes;
  }
  amx_configure(config);
  run_linear<AmxMethod>(args, step, team);
  amx_release();
}

std::size_t linear_scratch(const LinearArgs& args, int64_t rows) {
  const std::size_t without = QUIRE_BELOW::kLinear.linear_scratch(args, rows);
  const std::size_t with = for_tiles(args.weight) ? scratch_for<AmxMethod>(args, rows) : 0;
  return with > without ? with : without;
}

void heads(const HeadsArgs& args, const Step& step, Team& team) { QUIRE_BELOW::kLinear.heads(args, step, team); }

void experts(const ExpertsArgs& args, const Step& step, Team& team) { QUIRE_BELOW::kLinear.experts(args, step, team); }

std::size_t experts_scratch(const ExpertsArgs& args, int64_t rows, int threads) {
  return QUIRE_BELOW::kLinear.experts_scratch(args, rows, threads);
}

}  // namespace

extern const LinearKernels kLinear;
const LinearKernels kLinear = {linear, linear_scratch, heads, experts, experts_scratch};

}  // namespace quire::QUIRE_ISA
