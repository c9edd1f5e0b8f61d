#include "encoder.h"

#include <nanobind/nanobind.h>

#include <algorithm>
#include <stdexcept>

#include "bindings.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace quire {

void EncoderPlan::set(int64_t num_sequences, const int64_t* query_start) {
  if (num_sequences < 1 || query_start[0] != 0) throw std::invalid_argument("query starts begin with 0");
  items_.clear();
  for (int64_t s = 0; s < num_sequences; ++s) {
    const int64_t first = query_start[s], length = query_start[s + 1] - first;
    if (length < 0) throw std::invalid_argument("query starts fall");
    const int64_t parts = std::max<int64_t>(1, (length + kEncoderRows - 1) / kEncoderRows);  // of about one size
    const int64_t multiples = (length + parts * kEncoderRowMultiple - 1) / (parts * kEncoderRowMultiple);
    const int64_t rows_each = multiples * kEncoderRowMultiple;
    for (int64_t row = 0; row < length; row += rows_each)
      items_.push_back({first, length, row, std::min(rows_each, length - row)});
  }
  std::stable_sort(items_.begin(), items_.end(), [](const EncoderItem& a, const EncoderItem& b) {
    return a.rows * a.length > b.rows * b.length;
  });
  rows = query_start[num_sequences];
  items = items_.data();
  num_items = static_cast<int64_t>(items_.size());
}

void bind_encoder(nb::module_& module) {
  nb::class_<EncoderPlan>(module, "EncoderPlan")
      .def(nb::init<>())
      .def(
          "set",
          [](EncoderPlan& plan, int64_t num_sequences, uintptr_t query_start) {
            plan.set(num_sequences, reinterpret_cast<const int64_t*>(query_start));
          },
          "num_sequences"_a, "query_start"_a)
      .def_prop_ro("num_items", [](const EncoderPlan& plan) { return plan.num_items; });
}

}  // namespace quire
