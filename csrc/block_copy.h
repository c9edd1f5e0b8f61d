// Copies of whole blocks, many at a time.
#pragma once

#include <cstdint>
#include <vector>

#include "pool.h"

namespace quire {

// Copies that mean: all sources are read, then all destinations are written. Brought into an order in which one
// after the other does the same.
class BlockCopies {
 public:
  // pairs: [num_pairs][2], source and destination. Throws std::invalid_argument for a block that does not exist or a
  // destination that occurs twice.
  BlockCopies(const int64_t* pairs, int64_t num_pairs, int64_t num_blocks);

  // In each of `pages`, blocks of block_bytes.
  void run(Pool& pool, const std::vector<uintptr_t>& pages, int64_t block_bytes) const;

 private:
  static constexpr int64_t kAside = -1;  // a place of the thread's own, for what a cycle would overwrite
  struct Copy {
    int64_t source, destination;
  };
  std::vector<Copy> copies_;
};

}  // namespace quire
