// Sampling over the vocabulary: the Python side.
#include "bindings.h"

namespace quire {
void bind_sampling(nanobind::module_&) {}
}  // namespace quire
