// Linear layers over packed weights. Compiled once for each instruction set.
#include "kernels.h"
#include "vector_math.h"

namespace quire::QUIRE_ISA {
namespace {

void linear(const LinearArgs&, const Step&, Team&) {}
std::size_t linear_scratch(const LinearArgs&, int64_t) { return 0; }

}  // namespace

extern const LinearKernels kLinear;
const LinearKernels kLinear = {linear, linear_scratch};

}  // namespace quire::QUIRE_ISA
