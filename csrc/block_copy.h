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

// Copies blocks of block_bytes from each of `sources` to the page at the same place of `destinations`, which is other
// memory: one after the other, on the calling thread, so that the pool's threads stay with the model meanwhile.
// pairs: [num_pairs][2], source and destination. Throws std::invalid_argument, before it copies, for a block that does
// not exist and for lists of different length.
void move_blocks(const std::vector<uintptr_t>& sources, const std::vector<uintptr_t>& destinations, int64_t block_bytes,
                 int64_t num_source_blocks, int64_t num_destination_blocks, const int64_t* pairs, int64_t num_pairs);

}  // namespace quire
