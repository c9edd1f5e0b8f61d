// Adapters of low rank on linear layers: out[t] += scale * B (A x[t]) with the matrices of the slot that row t names.
//
// A slot's matrices are found through a table for each layer, whose entries change between runs; programs keep the table.
// Rows are taken together by slot, and a row's sums are made in the same order whatever rows are beside it.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels.h"

namespace quire {

// A of one piece in one slot: [blocks of kAdapterRanks ranks][blocks of kAdapterAlignment inputs][kAdapterRanks]
// [kAdapterAlignment], zero-padded: a block of ranks is one stream.
struct AdapterPiece {
  const void* a = nullptr;  // null: the slot has nothing for this piece
  float scale = 0;
  int32_t rank = 0;
};

// Columns of a layer's product that one matrix B gives: panel p of 16 goes to columns column + p * step onwards.
struct AdapterSegment {
  int64_t piece = 0;  // whose inner values it multiplies
  int64_t column = 0;
  int64_t step = 0;
  int64_t columns = 0;
};

inline constexpr int64_t kAdapterAlignment = 16;  // elements: of A's rows, and columns of a panel of B
inline constexpr int64_t kAdapterRanks = 4;        // rows of A that lie together
inline constexpr int64_t kMostAdapterRank = 512;

// What one layer finds of the slots. Slot 0 is no adapter's.
struct AdapterTable {
  WeightType type = WeightType::kF32;  // of A and B: f32, bf16 or f16
  int64_t num_slots = 0;
  int64_t in_features = 0;
  int64_t max_rank = 0;
  int64_t num_pieces = 0;
  std::vector<AdapterSegment> segments;
  std::vector<AdapterPiece> pieces;   // [num_slots + 1][num_pieces]
  std::vector<const void*> b;         // [num_slots + 1][segments]: [panels of 16 columns][rank][16], zero-padded

  // What stands at every 16 columns of the product: number of a segment (-1: none) and of its panel.
  struct Turn {
    int32_t segment = -1, panel = 0;
  };
  // Turns up to the last segment's; empty if some segment begins within one, or two meet in one.
  std::vector<Turn> turns() const;
};

// The rows of a step by slot, those of slot 0 left out.
struct AdapterGroups {
  struct Group {
    int64_t slot, first, count;  // of `order`
  };
  std::vector<Group> groups;
  std::vector<int32_t> order;  // numbers of rows
  std::vector<int32_t> slots;  // by row

  // slots: [rows]; read_rows: [count], or null for all rows. Throws std::invalid_argument for a slot that is none.
  void set(const int64_t* slots, const int64_t* read_rows, int64_t count, int64_t num_slots);
};

// inner[t] = scale * A x[t], piece by piece, `max_rank` columns each; rows without an adapter are left as they are.
struct ShrinkArgs {
  std::shared_ptr<const AdapterTable> table;
  const AdapterGroups* groups = nullptr;  // the program's
  Ref x;
  Ref out;  // [rows, num_pieces * max_rank]
};

// What a linear layer adds to its sums before bias, activation and residual: B inner[t].
struct LinearAdapters {
  std::shared_ptr<const AdapterTable> table;
  const AdapterGroups* groups = nullptr;  // the program's
  std::vector<AdapterTable::Turn> turns;  // of all columns of the packed matrix
  Ref inner;
};

// Adapters of experts, each a piece and a segment of a table, whose panels are of B itself: of an expert's gate and up in
// `wide` (numbers 2 i and 2 i + 1 of the i-th expert here), and of `down`.
struct ExpertAdapters {
  std::shared_ptr<const AdapterTable> wide;
  std::shared_ptr<const AdapterTable> down;
  const AdapterGroups* groups = nullptr;  // the program's
};

// out[t] += B inner[t], for the segments [first_segment, first_segment + num_segments).
struct ExpandArgs {
  std::shared_ptr<const AdapterTable> table;
  const AdapterGroups* groups = nullptr;  // the program's
  int64_t first_segment = 0;
  int64_t num_segments = 0;
  Ref inner;
  Ref out;
};

// out = activation(gate) (* up), both columns of x: of out's columns in turns of 16, turn p is at p * step and, where there
// is an up, at p * step + up. The panels of a gated matrix have them so, with a step of 32.
struct ActivateArgs {
  Activation activation = Activation::kNone;
  int64_t width = 0;  // of out
  int64_t step = 0;
  int64_t up = 0;  // 0: there is none
  Ref x;
  Ref out;  // not the same place as x
};

struct AdapterKernels {
  void (*shrink)(const ShrinkArgs&, const Step&, Team&);
  void (*expand)(const ExpandArgs&, const Step&, Team&);
  void (*activate)(const ActivateArgs&, const Step&, Team&);
};

}  // namespace quire
