// Products of heads: each head's columns times a matrix of its own. Threads take a head and some rows at a time.
#pragma once

#include "linear_driver.h"

namespace quire::QUIRE_ISA {
namespace {

// Rows that a thread packs for a head at once.
constexpr int64_t kHeadRows = 96;

// One head's part of the columns, and rows first .. of them.
inline LinearArgs head_args(const HeadsArgs& args, int64_t head, int64_t first) {
  const PackedWeight& weight = (*args.weights)[static_cast<std::size_t>(head)];
  LinearArgs own;
  own.weight = weight;
  own.precision = args.precision;
  own.x = args.x;
  own.x.offset += (first * args.x.stride + head * weight.in_features) * static_cast<int64_t>(sizeof(float));
  own.out = args.out;
  own.out.offset += (first * args.out.stride + head * weight.out_features) * static_cast<int64_t>(sizeof(float));
  return own;
}

template <class Method>
void run_head(const LinearArgs& args, const Step& step, Team& team) {
  std::byte* packed = team.scratch();
  Plan plan = make_plan<Method>(args.weight, step.rows);
  plan.shared = false;
  for (int64_t tile = 0; tile < plan.tiles; ++tile) pack_tile<Method>(args, step, plan, tile, packed, team);
  for (int64_t panel = 0; panel < plan.panels; ++panel) {
    const int64_t next = panel + 1 < plan.panels ? panel + 1 : panel;
    run_panels<Method>(args, step, plan, packed, {panel, 1}, {next, 1}, panel == 0 || plan.tiles == 1, 0, plan.tiles,
                       packed);
  }
}

// run(args, step): run_head of the method that multiplies the weight.
template <class Run>
void run_heads(const HeadsArgs& args, const Step& step, Team& team, const Run& run) {
  const int64_t heads = static_cast<int64_t>(args.weights->size());
  const int64_t pieces = (step.rows + kHeadRows - 1) / kHeadRows;
  for (int64_t item = team.take(); item < heads * pieces; item = team.take()) {
    const int64_t first = item % pieces * kHeadRows, left = step.rows - first;
    Step part = step;
    part.rows = left < kHeadRows ? left : kHeadRows;
    run(head_args(args, item / pieces, first), part);
  }
}

}  // namespace
}  // namespace quire::QUIRE_ISA
