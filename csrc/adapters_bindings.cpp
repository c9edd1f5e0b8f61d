// Adapters: the rows of a step by slot, and the Python side. Addresses are integers, as in bindings.cpp.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <tuple>

#include "adapters.h"
#include "bindings.h"
#include "program.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace quire {

std::vector<AdapterTable::Turn> AdapterTable::turns() const {
  std::vector<Turn> found;
  for (std::size_t number = 0; number < segments.size(); ++number) {
    const AdapterSegment& segment = segments[number];
    if (segment.column % kAdapterAlignment != 0 || segment.step % kAdapterAlignment != 0) return {};
    for (int64_t panel = 0; panel * kAdapterAlignment < segment.columns; ++panel) {
      const auto at = static_cast<std::size_t>((segment.column + panel * segment.step) / kAdapterAlignment);
      if (at >= found.size()) found.resize(at + 1);
      if (found[at].segment >= 0) return {};
      found[at] = {static_cast<int32_t>(number), static_cast<int32_t>(panel)};
    }
  }
  return found;
}

void AdapterGroups::set(const int64_t* slots, const int64_t* read_rows, int64_t count, int64_t num_slots) {
  groups.clear();
  order.clear();
  this->slots.clear();
  if (slots == nullptr) throw std::invalid_argument("a step of adapters names none");
  const auto slot_of = [&](int32_t row) { return slots[read_rows == nullptr ? row : read_rows[row]]; };
  for (int32_t row = 0; row < count; ++row) {
    const int64_t slot = slot_of(row);
    if (slot < 0 || slot > num_slots) throw std::invalid_argument("a row names an adapter's slot that there is none of");
    if (slot > 0) order.push_back(row);
    this->slots.push_back(static_cast<int32_t>(slot));
  }
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return slot_of(a) < slot_of(b); });
  for (std::size_t i = 0; i < order.size(); ++i) {
    const int64_t slot = slot_of(order[i]);
    if (groups.empty() || groups.back().slot != slot) groups.push_back({slot, static_cast<int64_t>(i), 0});
    ++groups.back().count;
  }
}

void bind_adapters(nb::module_& module, nb::class_<Program>& program) {
  nb::class_<AdapterTable>(module, "AdapterTable")
      .def(
          "__init__",
          [](AdapterTable* self, WeightType type, int64_t num_slots, int64_t in_features, int64_t max_rank,
             int64_t num_pieces, const std::vector<std::tuple<int64_t, int64_t, int64_t, int64_t>>& segments) {
            if (num_slots < 1 || in_features < 1 || max_rank < 1 || max_rank > kMostAdapterRank || num_pieces < 1 ||
                (type != WeightType::kF32 && type != WeightType::kBF16 && type != WeightType::kF16))
              throw std::invalid_argument("adapters of a size or type that the kernels do not have");
            new (self) AdapterTable{type, num_slots, in_features, max_rank, num_pieces, {}, {}, {}};
            for (const auto& [piece, column, step, columns] : segments) {
              if (piece < 0 || piece >= num_pieces || column < 0 || step < kAdapterAlignment || columns < 1)
                throw std::invalid_argument("columns of an adapter that the kernels do not have");
              self->segments.push_back({piece, column, step, columns});
            }
            const auto slots = static_cast<std::size_t>(num_slots + 1);
            self->pieces.resize(slots * static_cast<std::size_t>(num_pieces));
            self->b.resize(slots * self->segments.size());
          },
          "type"_a, "num_slots"_a, "in_features"_a, "max_rank"_a, "num_pieces"_a, "segments"_a)
      .def_ro("max_rank", &AdapterTable::max_rank)
      .def_prop_ro("fits_panels", [](const AdapterTable& table) { return !table.turns().empty(); })
      .def(
          "set",
          [](AdapterTable& table, int64_t slot, int64_t piece, uintptr_t a, int64_t rank, float scale,
             const std::vector<uintptr_t>& b) {
            if (slot < 1 || slot > table.num_slots || piece < 0 || piece >= table.num_pieces || rank < 1 ||
                rank > table.max_rank)
              throw std::invalid_argument("no such slot or piece, or a rank above the largest");
            std::size_t given = 0;
            for (std::size_t i = 0; i < table.segments.size(); ++i) {
              if (table.segments[i].piece != piece) continue;
              if (given == b.size()) throw std::invalid_argument("a matrix for each segment of the piece expected");
              table.b[static_cast<std::size_t>(slot) * table.segments.size() + i] = reinterpret_cast<const void*>(b[given++]);
            }
            if (given != b.size()) throw std::invalid_argument("a matrix for each segment of the piece expected");
            table.pieces[static_cast<std::size_t>(slot * table.num_pieces + piece)] = {
                reinterpret_cast<const void*>(a), scale, static_cast<int32_t>(rank)};
          },
          "slot"_a, "piece"_a, "a"_a, "rank"_a, "scale"_a, "b"_a)
      .def(
          "clear",
          [](AdapterTable& table, int64_t slot) {
            if (slot < 1 || slot > table.num_slots) throw std::invalid_argument("no such slot");
            for (int64_t piece = 0; piece < table.num_pieces; ++piece)
              table.pieces[static_cast<std::size_t>(slot * table.num_pieces + piece)] = {};
          },
          "slot"_a);
  module.attr("ADAPTER_ALIGNMENT") = kAdapterAlignment;
  module.attr("ADAPTER_RANKS") = kAdapterRanks;
  module.attr("MOST_ADAPTER_RANK") = kMostAdapterRank;
  program
      .def(
          "adapter_shrink",
          [](Program& program, std::shared_ptr<AdapterTable> table, int64_t column, const Ref& x, const Ref& out) {
            program.add(ShrinkArgs{std::move(table), nullptr, x, out}, column);
          },
          "table"_a, "column"_a, "x"_a, "out"_a)
      .def(
          "adapted_linear",
          [](Program& program, const PackedWeight& weight, uintptr_t bias, const Ref& x, const Ref& residual, const Ref& out,
             Activation activation, bool gated, std::shared_ptr<AdapterTable> table, int64_t column, const Ref& inner) {
            LinearArgs args{weight, reinterpret_cast<const float*>(bias), x, residual, out, activation};
            args.weight.gated = gated;
            program.add(args, std::move(table), column, inner);
          },
          "weight"_a, "bias"_a, "x"_a, "residual"_a, "out"_a, "activation"_a, "gated"_a, "table"_a, "column"_a, "inner"_a)
      .def(
          "adapter_expand",
          [](Program& program, std::shared_ptr<AdapterTable> table, int64_t column, int64_t first_segment,
             int64_t num_segments, const Ref& inner, const Ref& out) {
            program.add(ExpandArgs{std::move(table), nullptr, first_segment, num_segments, inner, out}, column);
          },
          "table"_a, "column"_a, "first_segment"_a, "num_segments"_a, "inner"_a, "out"_a)
      .def(
          "activate",
          [](Program& program, Activation activation, int64_t width, int64_t step, int64_t up, const Ref& x,
             const Ref& out) { program.add(ActivateArgs{activation, width, step, up, x, out}); },
          "activation"_a, "width"_a, "step"_a, "up"_a, "x"_a, "out"_a);
}

}  // namespace quire
