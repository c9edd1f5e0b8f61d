// Many rows times float weights, multiplied in float32. Panels are widened to float32 once for a block of rows instead of
// once for each register tile, and the tiles are three vectors wide: with AVX-512 8 rows of 48 columns need 11 loads for 24
// multiply-and-adds, where a panel's tile of 12 rows needs 14 and what widens the weights besides.
//
// The sum of an element is the chain over k of float_tile in linear_tiles.h, cut in blocks of k between which it lies in
// memory: the same bits.
//
// Packed activations: [block of rows][block of k][tile][k][kWideRows].
#pragma once

#include "linear_driver.h"
#include "linear_tiles.h"

namespace quire::QUIRE_ISA {
namespace {

#if defined(__AVX512F__)
inline constexpr int64_t kWideRows = 8;
#else
inline constexpr int64_t kWideRows = 4;
#endif
inline constexpr int kWideVectors = 3;
inline constexpr int64_t kWidePanels = 3;      // a group: whole panels, and whole strips of kWideVectors
inline constexpr int64_t kWideDepth = 144;     // of a block: what is widened of a strip stays in the L1 cache
inline constexpr int64_t kWideBlockRows = 128;  // that share what is widened
inline constexpr int64_t kFewestWideRows = 256;
inline constexpr int kPanelVectors = kPanel / kLanes;

bool multiplies_wide(const PackedWeight& weight, int64_t rows) {
  const bool is_float =
      weight.type == WeightType::kF32 || weight.type == WeightType::kBF16 || weight.type == WeightType::kF16;
  return kLanes >= 8 && is_float && rows >= kFewestWideRows;
}

struct WidePlan {
  int64_t rows, weight_depth, depth, tiles, blocks, panels, groups;  // weight_depth, depth: of a panel, of packed rows

  WidePlan(const PackedWeight& weight, int64_t rows)
      : rows(rows),
        weight_depth(padded_depth(weight)),
        depth(rounded_up(weight_depth, 4)),
        tiles((rows + kWideRows - 1) / kWideRows),
        blocks((rows + kWideBlockRows - 1) / kWideBlockRows),
        panels(num_panels(weight)),
        groups((panels + kWidePanels - 1) / kWidePanels) {}

  int64_t first_tile(int64_t block) const { return block * tiles / blocks; }
  int64_t tiles_of(int64_t block) const { return first_tile(block + 1) - first_tile(block); }
  // Values of packed rows up to the tile of a block, its part from k on.
  int64_t packed_at(int64_t block, int64_t tile, int64_t k) const {
    const int64_t length = depth - k < kWideDepth ? depth - k : kWideDepth;
    return first_tile(block) * kWideRows * depth + k * tiles_of(block) * kWideRows + tile * length * kWideRows;
  }
  std::size_t packed_bytes() const { return static_cast<std::size_t>(tiles * kWideRows * depth) * sizeof(float); }
};

inline void pack_wide_tile(const LinearArgs& args, const float* x, const WidePlan& plan, int64_t block, int64_t tile,
                           float* packed) {
  const int64_t first = (plan.first_tile(block) + tile) * kWideRows, length = args.weight.in_features;
  for (int64_t base = 0; base < kWideRows; base += 4) {
    const float* row[4];  // the last row also stands for those that only fill its tile: what they give is dropped
    for (int i = 0; i < 4; ++i) {
      const int64_t at = first + base + i;
      row[i] = x + (at < plan.rows ? at : plan.rows - 1) * args.x.stride;
    }
    for (int64_t start = 0; start < plan.depth; start += kWideDepth) {
      const int64_t end = plan.depth - start < kWideDepth ? plan.depth : start + kWideDepth;
      float* out = packed + plan.packed_at(block, tile, start) + base;
      for (int64_t k = start; k < end; k += 4, out += 4 * kWideRows) {
        v4 part[4];
        for (int i = 0; i < 4; ++i) part[i] = quad_at(row[i], args.weight.column_order, k, length - k);
        transpose(part[0], part[1], part[2], part[3]);
        for (int i = 0; i < 4; ++i) std::memcpy(out + i * kWideRows, &part[i], sizeof(v4));
      }
    }
  }
}

// Vectors first .. first + kVectors of a group's columns, `count` values of k: [k][kVectors * kLanes] float32.
template <class Weight, int kVectors>
inline void widen(const std::byte* panels, int64_t panel_bytes, int64_t first, int64_t count, float* out) {
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) {
    const int64_t column = first + v;
    const std::byte* at = panels + column / kPanelVectors * panel_bytes;
    const int part = static_cast<int>(column % kPanelVectors);
    float* to = out + v * kLanes;
    for (int64_t k = 0; k < count; k += Weight::kDepth, at += Weight::kStep) {
#pragma GCC unroll 2
      for (int j = 0; j < Weight::kDepth; ++j, to += kVectors * kLanes) store(to, Weight::load_vector(at, part, j));
    }
  }
}

// Where the sums of a tile of a group lie: as one tile of a panel after the other, each [kWideRows][kPanel].
QUIRE_INLINE int64_t sums_at(int64_t column) {
  return column / kPanelVectors * kWideRows * kPanel + column % kPanelVectors * kLanes;
}

// sums (+)= packed rows times what widen made, of `count` values of k.
template <int kVectors>
inline void wide_tile(const float* x, const float* weights, int64_t count, bool is_first, int64_t first, float* sums) {
  vf sum[kWideRows][kVectors];
  float* at[kVectors];
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) {
    at[v] = sums + sums_at(first + v);
#pragma GCC unroll 8
    for (int r = 0; r < kWideRows; ++r) sum[r][v] = is_first ? zero() : load(at[v] + r * kPanel);
  }
  for (int64_t k = 0; k < count; ++k, x += kWideRows, weights += kVectors * kLanes) {
    vf w[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) w[v] = load(weights + v * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < kWideRows; ++r) {
      const vf value = broadcast(x[r]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sum[r][v] = fma(value, w[v], sum[r][v]);
    }
  }
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v)
#pragma GCC unroll 8
    for (int r = 0; r < kWideRows; ++r) store(at[v] + r * kPanel, sum[r][v]);
}

// Memory that is needed soon, asked for in even parts.
struct Ahead {
  const std::byte* at;
  int64_t part;
  void ask() {
    for (const std::byte* end = at + part; at < end; at += 64) __builtin_prefetch(at, 0, 2);
  }
};

struct WideScratch {
  alignas(64) float weights[kWideDepth * kWideVectors * kLanes];
  alignas(64) float sums[kWideBlockRows / kWideRows * kWidePanels * kWideRows * kPanel];
};
static_assert(sizeof(WideScratch) <= kThreadScratch);

template <class Weight, int kVectors>
void run_strip(const std::byte* panels, int64_t panel_bytes, const WidePlan& plan, const float* packed, int64_t block,
               int64_t num_panels, int64_t first, Ahead& ahead, WideScratch& scratch) {
  const int64_t tiles = plan.tiles_of(block);
  for (int64_t k = 0; k < plan.weight_depth; k += kWideDepth) {
    const int64_t count = plan.weight_depth - k < kWideDepth ? plan.weight_depth - k : kWideDepth;
    widen<Weight, kVectors>(panels + k / Weight::kDepth * Weight::kStep, panel_bytes, first, count, scratch.weights);
    for (int64_t tile = 0; tile < tiles; ++tile) {
      ahead.ask();
      wide_tile<kVectors>(packed + plan.packed_at(block, tile, k), scratch.weights, count, k == 0, first,
                          scratch.sums + tile * num_panels * kWideRows * kPanel);
    }
  }
}

template <class Weight>
void run_wide(const LinearArgs& args, const Step& step, Team& team) {
  const PackedWeight& weight = args.weight;
  if (weight.out_features == 0) return;
  const WidePlan plan(weight, step.rows);
  float* packed = reinterpret_cast<float*>(step.shared_scratch);
  for (int64_t tile = team.take(); tile < plan.tiles; tile = team.take()) {
    int64_t block = tile * plan.blocks / plan.tiles;
    while (plan.first_tile(block + 1) <= tile) ++block;
    pack_wide_tile(args, step.at(args.x), plan, block, tile - plan.first_tile(block), packed);
  }
  team.barrier();
  const Finish finish{args, step.at(args.residual), step.at(args.out),
                      weight.gated ? weight.out_features / 2 : weight.out_features};
  WideScratch& scratch = *reinterpret_cast<WideScratch*>(team.scratch());
  const std::byte* data = static_cast<const std::byte*>(weight.data);
  const int64_t bytes = panel_bytes(weight);
  Runs runs(team, plan.blocks * plan.groups, 1);
  for (int64_t item = runs.next(); item >= 0; item = runs.next()) {
    const int64_t block = item / plan.groups, panel = item % plan.groups * kWidePanels;
    const int64_t panels = plan.panels - panel < kWidePanels ? plan.panels - panel : kWidePanels;
    const int64_t next = (runs.ahead() < 0 ? item : runs.ahead()) % plan.groups * kWidePanels;
    const int64_t tiles = plan.tiles_of(block), vectors = panels * kPanelVectors;
    const int64_t calls = (vectors + kWideVectors - 1) / kWideVectors * ((plan.depth + kWideDepth - 1) / kWideDepth) * tiles;
    const int64_t after = (plan.panels - next < kWidePanels ? plan.panels - next : kWidePanels) * bytes;
    Ahead ahead{data + next * bytes, after / calls / 64 * 64};
    int64_t first = 0;
    for (; first + kWideVectors <= vectors; first += kWideVectors)
      run_strip<Weight, kWideVectors>(data + panel * bytes, bytes, plan, packed, block, panels, first, ahead, scratch);
    for (; first < vectors; ++first)
      run_strip<Weight, 1>(data + panel * bytes, bytes, plan, packed, block, panels, first, ahead, scratch);
    for (int64_t tile = 0; tile < tiles; ++tile) {
      const int64_t row = (plan.first_tile(block) + tile) * kWideRows;
      const int64_t rows = plan.rows - row < kWideRows ? plan.rows - row : kWideRows;
      for (int64_t i = 0; i < panels; ++i) {
        const float* sums = scratch.sums + (tile * panels + i) * kWideRows * kPanel;
        (weight.gated ? finish_tile<true> : finish_tile<false>)(finish, sums, nullptr, row, rows, panel + i);
      }
    }
  }
}

void run_wide(const LinearArgs& args, const Step& step, Team& team) {
  switch (args.weight.type) {
    case WeightType::kBF16:
      return run_wide<BF16>(args, step, team);
    case WeightType::kF16:
      return run_wide<F16>(args, step, team);
    default:
      return run_wide<F32>(args, step, team);
  }
}

std::size_t wide_scratch(const LinearArgs& args, int64_t rows) {
  return multiplies_wide(args.weight, rows) ? WidePlan(args.weight, rows).packed_bytes() : 0;
}

}  // namespace
}  // namespace quire::QUIRE_ISA
