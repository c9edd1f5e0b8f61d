// Paged attention. Compiled once for each instruction set.
#include "attention.h"
#include "vector_math.h"

namespace quire::QUIRE_ISA {
namespace {

void prepare(const AttentionArgs&, const Step&, Team&) {}
void attend(const AttentionArgs&, const Step&, Team&) {}
std::size_t attend_scratch(const AttentionArgs&, int64_t, int) { return 0; }

}  // namespace

extern const AttentionKernels kAttention;
const AttentionKernels kAttention = {prepare, attend, attend_scratch};

}  // namespace quire::QUIRE_ISA
