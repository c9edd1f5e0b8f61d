// What an attention run is told of a step, and how a block of the KV cache looks.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels.h"

namespace quire {

// One KV group's view of a step: `num_sequences` sequences that own the rows between successive query starts.
// All arrays belong to the caller and outlive the step.
struct AttentionPlan {
  int64_t num_sequences = 0;
  const int64_t* query_start = nullptr;      // [num_sequences + 1]
  const int64_t* start_positions = nullptr;  // [num_sequences]: position of each sequence's first row
  const int32_t* block_table = nullptr;      // [num_sequences, table_width]
  int64_t table_width = 0;
  const int64_t* slots = nullptr;            // [rows]: block * block_size + offset of each row's key and value
};

}  // namespace quire
