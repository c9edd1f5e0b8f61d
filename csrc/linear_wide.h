// Many rows times 16-bit weights, multiplied in float32. Panels are widened to float32 once for a block of rows instead of
// once for each register tile, and the tiles are three vectors wide: with AVX-512 8 rows of 48 columns need 11 loads for 24
// multiply-and-adds, where a panel's tile of 12 rows needs 14 and what widens the weights besides.
//
// The sum of an element is the chain over k of float_tile in linear_tiles.h, cut in blocks of k between which it lies in
// memory: the same bits.
//
// Packed activations: [block of rows][block of k][tile][k][kWideRows].
#pragma once

#include <algorithm>
#include <utility>

#include "linear_driver.h"
#include "linear_tiles.h"

namespace quire::QUIRE_ISA {
namespace {

// Of a tile, and from how many rows on widening pays: where vectors are short, it was a sixth of the work.
#if defined(__AVX512F__)
inline constexpr int64_t kWideRows = 8;
inline constexpr int64_t kFewestWideRows = 128;
#else
inline constexpr int64_t kWideRows = 4;
inline constexpr int64_t kFewestWideRows = 32;
#endif
inline constexpr int kWideVectors = 3;
inline constexpr int64_t kWidePanels = 3;      // a group: whole panels, and whole strips of kWideVectors
inline constexpr int64_t kWideDepth = 144;     // of a block: what is widened of a strip stays in the L1 cache
inline constexpr int64_t kMostWideRows = 256;  // that share what is widened
inline constexpr int64_t kItemsPerThread = 8;
inline constexpr int kPanelVectors = kPanel / kLanes;

bool multiplies_wide(const PackedWeight& weight, int64_t rows) {
  const bool is_narrow = weight.type == WeightType::kBF16 || weight.type == WeightType::kF16;
  return kLanes >= 8 && is_narrow && rows >= kFewestWideRows;
}

struct WidePlan {
  int64_t rows, tiles, blocks;
  int64_t weight_depth, depth, depth_blocks;  // of a panel, and of packed rows
  int64_t panels, panel_bytes, groups;

  WidePlan(const PackedWeight& weight, int64_t rows)
      : rows(rows),
        tiles((rows + kWideRows - 1) / kWideRows),
        blocks((rows + kMostWideRows - 1) / kMostWideRows),
        weight_depth(padded_depth(weight)),
        depth(rounded_up(weight_depth, 4)),
        depth_blocks((depth + kWideDepth - 1) / kWideDepth),
        panels(num_panels(weight)),
        panel_bytes(quire::panel_bytes(weight)),
        groups((panels + kWidePanels - 1) / kWidePanels) {}

  // Blocks small enough that every thread finds some items, but not smaller than what widening pays for.
  void deal_to(int threads) {
    const int64_t wanted = (kItemsPerThread * threads + groups - 1) / groups, most = rows / kFewestWideRows;
    blocks = std::max(blocks, std::min(wanted, most));
  }

  // Of item `index`: a block's groups follow one another.
  int64_t first_panel(int64_t index) const { return index % groups * kWidePanels; }
  int64_t panels_from(int64_t panel) const { return panels - panel < kWidePanels ? panels - panel : kWidePanels; }
  int64_t first_tile(int64_t block) const { return block * tiles / blocks; }
  int64_t tiles_of(int64_t block) const { return first_tile(block + 1) - first_tile(block); }
  // Values of packed rows up to the tile of a block, its part from k on.
  int64_t packed_at(int64_t block, int64_t tile, int64_t k) const {
    const int64_t length = depth - k < kWideDepth ? depth - k : kWideDepth;
    return first_tile(block) * kWideRows * depth + k * tiles_of(block) * kWideRows + tile * length * kWideRows;
  }
  std::size_t packed_bytes() const { return static_cast<std::size_t>(tiles * kWideRows * depth) * sizeof(float); }
};

inline void pack_wide_tile(const LinearArgs& args, const Step& step, const WidePlan& plan, int64_t block, int64_t tile,
                           float* packed, Team& team) {
  const int64_t first = (plan.first_tile(block) + tile) * kWideRows, length = args.weight.in_features;
  const int64_t rows = std::min(kWideRows, plan.rows - first);
  const InputRows x = input_rows<kWideRows>(args, step, first, rows, team);
  for (int64_t base = 0; base < kWideRows; base += 4) {
    const float* row[8];  // the last row also stands for those that only fill its tile: what they give is dropped
    for (int i = 0; i < 8; ++i) row[i] = x.at + std::min(base + i, args.norms ? rows - 1 : plan.rows - first - 1) * x.stride;
    for (int64_t start = 0; start < plan.depth; start += kWideDepth) {
      const int64_t end = plan.depth - start < kWideDepth ? plan.depth : start + kWideDepth;
      float* out = packed + plan.packed_at(block, tile, start) + base;
      for (int64_t k = start; k < end; k += 4, out += 4 * kWideRows) {
        if (k % 16 == 0)
          for (int i = 4; i < 8; ++i) __builtin_prefetch(row[i] + k, 0, 3);  // the four rows that follow
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
  alignas(64) float sums[kMostWideRows / kWideRows * kWidePanels * kWideRows * kPanel];
};
static_assert(sizeof(WideScratch) <= kThreadScratch);

// A group of panels times a block of rows.
struct WideItem {
  const WidePlan& plan;
  const std::byte* panels;
  const float* packed;
  int64_t block, num_panels;
  Ahead ahead;
  WideScratch& scratch;
};

// before and after: called around what is last added to the sums of a tile.
template <class Weight, int kVectors, class Before, class After>
void run_strip(WideItem& item, int64_t first, const Before& before, const After& after) {
  const WidePlan& plan = item.plan;
  const int64_t tiles = plan.tiles_of(item.block);
  for (int64_t k = 0; k < plan.weight_depth; k += kWideDepth) {
    const int64_t count = plan.weight_depth - k < kWideDepth ? plan.weight_depth - k : kWideDepth;
    const bool is_last = k + count == plan.weight_depth && first + kVectors == item.num_panels * kPanelVectors;
    widen<Weight, kVectors>(item.panels + k / Weight::kDepth * Weight::kStep, plan.panel_bytes, first, count,
                            item.scratch.weights);
    for (int64_t tile = 0; tile < tiles; ++tile) {
      float* sums = item.scratch.sums + tile * item.num_panels * kWideRows * kPanel;
      item.ahead.ask();
      if (is_last) before(tile);
      wide_tile<kVectors>(item.packed + plan.packed_at(item.block, tile, k), item.scratch.weights, count, k == 0, first,
                          sums);
      if (is_last) after(tile, sums);
    }
  }
}

template <class Weight>
void run_wide(const LinearArgs& args, const Step& step, Team& team) {
  const PackedWeight& weight = args.weight;
  if (weight.out_features == 0) return;
  WidePlan plan(weight, step.rows);
  plan.deal_to(team.count());
  float* packed = reinterpret_cast<float*>(step.shared_scratch);
  for (int64_t tile = team.take(); tile < plan.tiles; tile = team.take()) {
    int64_t block = tile * plan.blocks / plan.tiles;
    while (plan.first_tile(block + 1) <= tile) ++block;
    pack_wide_tile(args, step, plan, block, tile - plan.first_tile(block), packed, team);
  }
  team.barrier();
  const Finish finish{args, step.at(args.residual), step.at(args.out),
                      weight.gated ? weight.out_features / 2 : weight.out_features};
  const std::byte* data = static_cast<const std::byte*>(weight.data);
  Runs runs(team, plan.blocks * plan.groups, 1);
  for (int64_t index = runs.next(); index >= 0; index = runs.next()) {
    const int64_t panel = plan.first_panel(index), panels = plan.panels_from(panel), vectors = panels * kPanelVectors;
    const int64_t next = plan.first_panel(runs.ahead() < 0 ? index : runs.ahead());
    WideItem item{plan, data + panel * plan.panel_bytes, packed, index / plan.groups, panels,
                  {data + next * plan.panel_bytes, 0}, *reinterpret_cast<WideScratch*>(team.scratch())};
    const int64_t calls = (vectors + kWideVectors - 1) / kWideVectors * plan.depth_blocks * plan.tiles_of(item.block);
    item.ahead.part = plan.panels_from(next) * plan.panel_bytes / calls / 64 * 64;
    const auto rows_of = [&](int64_t tile) {
      const int64_t row = (plan.first_tile(item.block) + tile) * kWideRows;
      return std::pair{row, plan.rows - row < kWideRows ? plan.rows - row : kWideRows};
    };
    const auto before = [&](int64_t tile) {
      const auto [row, rows] = rows_of(tile);
      for (int64_t i = 0; i < panels; ++i)
        (weight.gated ? expect_tile<true> : expect_tile<false>)(finish, row, rows, panel + i);
    };
    const auto after = [&](int64_t tile, float* sums) {
      const auto [row, rows] = rows_of(tile);
      for (int64_t i = 0; i < panels; ++i, sums += kWideRows * kPanel) {
        const float* no_scales = nullptr;
        if (args.adapters != nullptr) add_adapters<kWideRows>(*args.adapters, step, sums, no_scales, row, rows, panel + i);
        (weight.gated ? finish_tile<true> : finish_tile<false>)(finish, sums, nullptr, row, rows, panel + i);
      }
    };
    int64_t first = 0;
    for (; first + kWideVectors <= vectors; first += kWideVectors)
      run_strip<Weight, kWideVectors>(item, first, before, after);
    for (; first < vectors; ++first) run_strip<Weight, 1>(item, first, before, after);
  }
}

void run_wide(const LinearArgs& args, const Step& step, Team& team) {
  (args.weight.type == WeightType::kBF16 ? run_wide<BF16> : run_wide<F16>)(args, step, team);
}

std::size_t wide_scratch(const LinearArgs& args, int64_t rows) {
  return multiplies_wide(args.weight, rows) ? WidePlan(args.weight, rows).packed_bytes() : 0;
}

}  // namespace
}  // namespace quire::QUIRE_ISA
