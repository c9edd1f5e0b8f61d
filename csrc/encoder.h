// What attention in both directions is told of a step: which rows are a sequence. Nothing is read but the step's rows.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels.h"

namespace quire {

// Most rows of a work item, and rows that items have a multiple of, but for a sequence's last: a thread brings the keys
// of a sequence to its memory once for each item.
inline constexpr int64_t kEncoderRows = 384;
inline constexpr int64_t kEncoderRowMultiple = 96;

// Rows first_row .. first_row + rows - 1 of the sequence that owns the step's rows first_token .. first_token + length
// - 1, for each head.
struct EncoderItem {
  int64_t first_token = 0;
  int64_t length = 0;
  int64_t first_row = 0;
  int64_t rows = 0;
};

struct EncoderPlan {
  // Cut a step into items, the most expensive first. query_start: [num_sequences + 1]. Throws std::invalid_argument for
  // starts that do not begin with 0 or that fall.
  void set(int64_t num_sequences, const int64_t* query_start);

  int64_t rows = 0;
  // Kernels read these by address: a vector's own functions may be compiled for a later instruction set.
  const EncoderItem* items = nullptr;
  int64_t num_items = 0;

 private:
  std::vector<EncoderItem> items_;
};

}  // namespace quire
