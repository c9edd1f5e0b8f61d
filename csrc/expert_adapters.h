// Adapters of experts: what they add to the sums of both products of a pair of a row and an expert.
//
// Each pair's A x is a chain of its own, and so is what B adds to each of its sums, so that neither the pairs beside it nor
// the thread that computes it show.
#pragma once

#include "linear_adapters.h"
#include "linear_driver.h"

namespace quire::QUIRE_ISA {
namespace {

inline const AdapterPiece& piece_of(const AdapterTable& table, int64_t slot, int64_t number) {
  return table.pieces[static_cast<std::size_t>(slot * table.num_pieces + number)];
}

template <WeightType kType, class Element>
void shrink_row(const AdapterPiece& piece, int64_t size, const float* x, float factor, float* out) {
  const int64_t apart = rounded_up(size, kTurn) * kAdapterRanks;
  const auto* a = static_cast<const Element*>(piece.a);
  for (int64_t rank = 0; rank < piece.rank; rank += 2 * kAdapterRanks) {
    float sums[2 * kAdapterRanks][kDotRows];
    if (piece.rank - rank > kAdapterRanks)
      dots<kType, Element, 2, 1>(a + rank / kAdapterRanks * apart, apart, &x, size, sums);
    else
      dots<kType, Element, 1, 1>(a + rank / kAdapterRanks * apart, apart, &x, size, sums);
    for (int64_t r = 0; r < 2 * kAdapterRanks && rank + r < piece.rank; ++r) out[rank + r] = sums[r][0] * (piece.scale * factor);
  }
}

// out = factor * scale * A x of a piece, if the slot has one.
inline void shrink_pair(const AdapterTable& table, int64_t slot, int64_t number, const float* x, float factor, float* out) {
  const AdapterPiece& piece = piece_of(table, slot, number);
  if (piece.a == nullptr) return;
  const auto run = table.type == WeightType::kF32    ? shrink_row<WeightType::kF32, float>
                   : table.type == WeightType::kBF16 ? shrink_row<WeightType::kBF16, uint16_t>
                                                     : shrink_row<WeightType::kF16, uint16_t>;
  run(piece, table.in_features, x, factor, out);
}

// sums += panel `panel` of a piece's B times `inner`, if the slot has one.
inline void add_panel_of_b(const AdapterTable& table, int64_t slot, int64_t number, int64_t panel, const float* inner, float* sums) {
  const AdapterPiece& piece = piece_of(table, slot, number);
  const auto segment = static_cast<std::size_t>(number);
  if (piece.a == nullptr || panel * kTurn >= table.segments[segment].columns) return;
  const int64_t bytes = table.type == WeightType::kF32 ? 4 : 2, column = 0, row = 0;
  const auto* b = static_cast<const std::byte*>(table.b[static_cast<std::size_t>(slot) * table.segments.size() + segment]);
  const AdaptedTurn turn{b + panel * piece.rank * kTurn * bytes, inner, piece.rank};
  const auto run = table.type == WeightType::kF32    ? add_turns<WeightType::kF32, float, 1, 1>
                   : table.type == WeightType::kBF16 ? add_turns<WeightType::kBF16, uint16_t, 1, 1>
                                                     : add_turns<WeightType::kF16, uint16_t, 1, 1>;
  run(&turn, &column, piece.rank, &row, 0, 0, sums);
}

// Calls done(sums, row_scales, row, rows) for the rows of a tile, and before that add(slot, row, sums) for each row whose
// pair has an adapter, whose sums are scaled by then. Rows without one keep their bits.
template <class Add, class Done>
QUIRE_INLINE void add_to_pairs(const ExpertAdapters* adapters, const int32_t* pairs, int64_t top_k, float* sums,
                               const float* row_scales, int64_t rows, const Add& add, const Done& done) {
  if (adapters == nullptr) return done(sums, row_scales, 0, rows);
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t slot = adapters->groups->slots[static_cast<std::size_t>(pairs[r] / top_k)];
    float* own = sums + r * kPanel;
    const float* scale = row_scales ? row_scales + r : nullptr;
    if (slot != 0) {
      if (scale)
        for (int64_t c = 0; c < kPanel; c += kLanes) store(own + c, load(own + c) * broadcast(*scale));
      scale = nullptr;
      add(slot, r, own);
    }
    done(own, scale, r, int64_t{1});
  }
}

}  // namespace
}  // namespace quire::QUIRE_ISA
