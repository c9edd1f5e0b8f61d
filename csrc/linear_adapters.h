// Adapters of low rank inside a linear layer: what they add to the sums of a tile, before anything else is done with them.
#pragma once

#include "adapter_rows.h"
#include "linear_tile.h"

namespace quire::QUIRE_ISA {
namespace {

inline constexpr int64_t kTurns = kPanel / kTurn;    // in a panel of the layer's matrix
inline constexpr int64_t kAdaptedRows = kLanes == 16 ? 4 : 2;  // of one slot, at once

// One turn of columns in one slot. inner: of row 0.
struct AdaptedTurn {
  const void* b;  // [rank][16]
  const float* inner;
  int64_t rank;
};

// Turns of a panel that have something to add in this slot; at most kTurns.
inline int64_t turns_of(const LinearAdapters& adapters, int64_t slot, int64_t panel, const float* inner, AdaptedTurn* found,
                        int64_t* columns) {
  const AdapterTable& table = *adapters.table;
  const int64_t bytes = table.type == WeightType::kF32 ? 4 : 2;
  int64_t count = 0;
  for (int64_t turn = 0; turn < kTurns; ++turn) {
    const AdapterTable::Turn& at = adapters.turns[static_cast<std::size_t>(panel * kTurns + turn)];
    if (at.segment < 0) continue;
    const auto segment = static_cast<std::size_t>(at.segment);
    const int64_t number = table.segments[segment].piece;
    const AdapterPiece& piece = table.pieces[static_cast<std::size_t>(slot * table.num_pieces + number)];
    if (piece.a == nullptr) continue;
    const auto* b = static_cast<const std::byte*>(table.b[static_cast<std::size_t>(slot) * table.segments.size() + segment]);
    columns[count] = turn * kTurn;
    found[count++] = {b + at.panel * piece.rank * kTurn * bytes, inner + number * table.max_rank, piece.rank};
  }
  return count;
}

// sums[row] += B inner[row] of kCount rows and kCols turns, rank by rank.
template <WeightType kType, class Element, int kCount, int kCols>
QUIRE_INLINE void add_turns(const AdaptedTurn* turns, const int64_t* columns, int64_t ranks, const int64_t* rows,
                            int64_t first_row, int64_t stride, float* sums) {
  vf total[kCount][kCols * kTurnVectors] = {};
  for (int64_t r = 0; r < ranks; ++r)
    for (int c = 0; c < kCols; ++c) {
      vf values[kCount];
      for (int t = 0; t < kCount; ++t) values[t] = broadcast(turns[c].inner[(first_row + rows[t]) * stride + r]);
      for (int v = 0; v < kTurnVectors; ++v) {
        const vf weight = load_adapter(static_cast<const Element*>(turns[c].b) + r * kTurn + v * kLanes, kType);
        for (int t = 0; t < kCount; ++t) total[t][c * kTurnVectors + v] = fma(values[t], weight, total[t][c * kTurnVectors + v]);
      }
    }
  for (int t = 0; t < kCount; ++t)
    for (int c = 0; c < kCols; ++c)
      for (int v = 0; v < kTurnVectors; ++v) {
        float* to = sums + rows[t] * kPanel + columns[c] + v * kLanes;
        store(to, load(to) + total[t][c * kTurnVectors + v]);
      }
}

template <WeightType kType, class Element, int kCount>
QUIRE_INLINE void add_rows(const AdaptedTurn* turns, const int64_t* columns, int64_t count, const int64_t* rows,
                           int64_t first_row, int64_t stride, float* sums) {
  if (count == kTurns && turns[0].rank == turns[1].rank)
    return add_turns<kType, Element, kCount, static_cast<int>(kTurns)>(turns, columns, turns[0].rank, rows, first_row, stride, sums);
  for (int64_t c = 0; c < count; ++c)
    add_turns<kType, Element, kCount, 1>(turns + c, columns + c, turns[c].rank, rows, first_row, stride, sums);
}

template <WeightType kType, class Element>
void add_slot(const AdaptedTurn* turns, const int64_t* columns, int64_t count, const int64_t* rows, int64_t num_rows,
              int64_t first_row, int64_t stride, float* sums) {
  int64_t row = 0;
  for (; row + kAdaptedRows <= num_rows; row += kAdaptedRows)
    add_rows<kType, Element, static_cast<int>(kAdaptedRows)>(turns, columns, count, rows + row, first_row, stride, sums);
  for (; row < num_rows; ++row) add_rows<kType, Element, 1>(turns, columns, count, rows + row, first_row, stride, sums);
}

// Calls use(slot, numbers of its rows in the tile, their number) for every slot but 0 of a tile's rows.
template <int64_t kMostRows, class Use>
QUIRE_INLINE void by_slot(const LinearAdapters& adapters, int64_t first_row, int64_t rows, const Use& use) {
  const int32_t* slots = adapters.groups->slots.data() + first_row;
  bool is_done[kMostRows] = {};
  for (int64_t r = 0; r < rows; ++r) {
    if (slots[r] == 0 || is_done[r]) continue;
    int64_t own[kMostRows], count = 0;
    for (int64_t other = r; other < rows; ++other)
      if (slots[other] == slots[r]) own[count++] = other, is_done[other] = true;
    use(slots[r], own, count);
  }
}

// Asks for what add_adapters reads of the slots' matrices.
template <int64_t kMostRows>
void expect_adapters(const LinearAdapters& adapters, int64_t first_row, int64_t rows, int64_t panel) {
  by_slot<kMostRows>(adapters, first_row, rows, [&](int64_t slot, const int64_t*, int64_t) {
    AdaptedTurn turns[kTurns];
    int64_t columns[kTurns];
    const int64_t count = turns_of(adapters, slot, panel, nullptr, turns, columns);
    for (int64_t c = 0; c < count; ++c) {
      const auto* at = static_cast<const std::byte*>(turns[c].b);
      const int64_t bytes = turns[c].rank * kTurn * (adapters.table->type == WeightType::kF32 ? 4 : 2);
      for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(at + line, 0, 2);
    }
  });
}

// Adds what the adapters of a tile's rows give to its sums, [rows][kPanel]. row_scales: of the sums, or null; applied here,
// and then null. Rows without an adapter keep their bits.
template <int64_t kMostRows>
void add_adapters(const LinearAdapters& adapters, const Step& step, float* sums, const float*& row_scales, int64_t first_row,
                  int64_t rows, int64_t panel) {
  const int32_t* slots = adapters.groups->slots.data() + first_row;
  bool is_adapted = false;
  for (int64_t r = 0; r < rows; ++r) is_adapted |= slots[r] != 0;
  if (!is_adapted) return;
  if (row_scales != nullptr)
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t c = 0; c < kPanel; c += kLanes) store(sums + r * kPanel + c, load(sums + r * kPanel + c) * broadcast(row_scales[r]));
  row_scales = nullptr;
  const float* inner = step.at(adapters.inner);
  by_slot<kMostRows>(adapters, first_row, rows, [&](int64_t slot, const int64_t* own, int64_t count) {
    AdaptedTurn turns[kTurns];
    int64_t columns[kTurns];
    const int64_t found = turns_of(adapters, slot, panel, inner, turns, columns);
    if (found == 0) return;
    const auto run = adapters.table->type == WeightType::kF32    ? add_slot<WeightType::kF32, float>
                     : adapters.table->type == WeightType::kBF16 ? add_slot<WeightType::kBF16, uint16_t>
                                                                 : add_slot<WeightType::kF16, uint16_t>;
    run(turns, columns, found, own, count, first_row, adapters.inner.stride, sums);
  });
}

}  // namespace
}  // namespace quire::QUIRE_ISA
