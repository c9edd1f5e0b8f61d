// Loops that show what a machine can do at most: the yardsticks of `python -m benchmarks.kernels`.
#pragma once

#include <cstddef>
#include <cstdint>

#include "team.h"

namespace quire {

// Bytes that a thread reads before it takes the next piece.
inline constexpr int64_t kReadPiece = int64_t{1} << 20;

// Each thread adds the 32-bit words that it reads to its place in `sums`, so that no load can be left out.
struct ReadLimitArgs {
  const std::byte* data = nullptr;
  int64_t bytes = 0;         // a multiple of kReadPiece
  uint32_t* sums = nullptr;  // [threads * 16]: a cache line for each thread
};

// `units` rounds of a loop that stays in registers, taken one by one. Its result ends in the threads' scratch.
struct PeakLimitArgs {
  int64_t units = 0;
  float factor = 0;  // what is multiplied; the compiler must not know it
  int32_t bytes = 0;
};

struct LimitKernels {
  void (*read)(const ReadLimitArgs&, Team&);
  void (*float_peak)(const PeakLimitArgs&, Team&);
  void (*integer_peak)(const PeakLimitArgs&, Team&);
  void (*bf16_peak)(const PeakLimitArgs&, Team&);  // null: the instruction set has no bfloat16 products
  // Multiplications and additions of one unit.
  int64_t float_operations;
  int64_t integer_operations;
  int64_t bf16_operations;
};

}  // namespace quire
