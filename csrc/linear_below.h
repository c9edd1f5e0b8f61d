// What an instruction set has no method for is left to the kernels of the one below it, QUIRE_BELOW: code that would be the
// same is compiled once. A layer of experts, or of heads, of which any matrix is left to them is left to them as a whole.
#pragma once

#include <algorithm>

#include "kernels.h"

#if defined(QUIRE_BELOW)
namespace quire::QUIRE_BELOW {
extern const LinearKernels kLinear;
}
#endif

namespace quire::QUIRE_ISA {
namespace {

// Whether with_method has a method that multiplies this weight.
bool is_own(const PackedWeight& weight, MatmulPrecision precision);

inline bool are_own(const std::vector<PackedWeight>& weights, MatmulPrecision precision) {
  return std::ranges::all_of(weights, [&](const PackedWeight& weight) { return is_own(weight, precision); });
}

inline bool are_own(const ExpertsArgs& args) {
  const ExpertTable& table = *args.table;
  return are_own(table.gate_up, args.precision) && are_own(table.up, args.precision) &&
         are_own(table.down, args.precision);
}

}  // namespace
}  // namespace quire::QUIRE_ISA
