// The yardsticks of `python -m benchmarks.kernels`: the Python side. The caller times the calls.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <memory>
#include <stdexcept>
#include <vector>

#include "bindings.h"
#include "isa.h"
#include "limits.h"
#include "pool.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace quire {
namespace {

template <class Args>
void run(Pool& pool, void (*kernel)(const Args&, Team&), const Args& args) {
  struct Call {
    void (*kernel)(const Args&, Team&);
    const Args& args;
  } call{kernel, args};
  nb::gil_scoped_release released;
  pool.run(
      [](void* argument, Team& team) {
        const Call& call = *static_cast<Call*>(argument);
        call.kernel(call.args, team);
      },
      &call);
}

uint32_t read_limit(const std::string& isa, Pool& pool, uintptr_t address, int64_t bytes) {
  if (bytes < 0 || bytes % kReadPiece != 0) throw std::invalid_argument("bytes must be a multiple of READ_PIECE");
  std::vector<uint32_t> sums(static_cast<std::size_t>(pool.threads()) * 16);
  run(pool, kernels_for(isa).limits.read,
      ReadLimitArgs{reinterpret_cast<const std::byte*>(address), bytes, sums.data()});
  uint32_t total = 0;
  for (uint32_t sum : sums) total += sum;
  return total;
}

}  // namespace

void bind_limits(nb::module_& module) {
  module.attr("READ_PIECE") = kReadPiece;
  module.def("read_limit", read_limit, "isa"_a, "pool"_a, "address"_a, "bytes"_a);
  module.def(
      "float_limit",
      [](const std::string& isa, Pool& pool, int64_t units) {
        const LimitKernels& limits = kernels_for(isa).limits;
        run(pool, limits.float_peak, PeakLimitArgs{units, 0.75f, 0});
        return units * limits.float_operations;
      },
      "isa"_a, "pool"_a, "units"_a);
  module.def(
      "integer_limit",
      [](const std::string& isa, Pool& pool, int64_t units) {
        const LimitKernels& limits = kernels_for(isa).limits;
        run(pool, limits.integer_peak, PeakLimitArgs{units, 0, 0x01010101});
        return units * limits.integer_operations;
      },
      "isa"_a, "pool"_a, "units"_a);
  module.def(
      "bf16_limit",
      [](const std::string& isa, Pool& pool, int64_t units) {
        const Kernels& kernels = kernels_for(isa);
        if (!kernels.bf16_products)
          throw std::invalid_argument(std::string(isa_name(kernels.isa)) + " has no bfloat16 products");
        run(pool, kernels.limits.bf16_peak, PeakLimitArgs{units, 0.75f, 0});
        return units * kernels.limits.bf16_operations;
      },
      "isa"_a, "pool"_a, "units"_a);
}

}  // namespace quire
