// Packing weights into panels, at load.
#include "bindings.h"

namespace quire {
void bind_packing(nanobind::module_&) {}
}  // namespace quire
