// Layers that keep a state: the Python side. Addresses are integers, as in bindings.cpp.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

#include "bindings.h"
#include "linear_state.h"
#include "program.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace quire {
namespace {

template <class T>
const T* at(uintptr_t address) {
  return reinterpret_cast<const T*>(address);
}

}  // namespace

void bind_states(nb::module_& module, nb::class_<Program>& program) {
  nb::class_<StatePlan>(module, "StatePlan")
      .def(nb::init<>())
      .def(
          "set",
          [](StatePlan& plan, int64_t num_sequences, uintptr_t query_start, uintptr_t starts, int64_t interval,
             const std::vector<uintptr_t>& pages, const std::vector<int64_t>& page_bytes,
             const std::vector<int64_t>& num_blocks, const std::vector<uintptr_t>& tables,
             const std::vector<int64_t>& table_strides, int64_t table_width) {
            std::vector<StateLayer> layers(pages.size());
            if (page_bytes.size() != layers.size() || tables.size() != layers.size() ||
                table_strides.size() != layers.size())
              throw std::invalid_argument("a table and a size for each layer's pages expected");
            for (std::size_t i = 0; i < layers.size(); ++i)
              layers[i] = {reinterpret_cast<std::byte*>(pages[i]), page_bytes[i], at<int32_t>(tables[i]),
                           table_strides[i]};
            plan.set(num_sequences, at<int64_t>(query_start), at<int64_t>(starts), interval, layers, num_blocks,
                     table_width);
          },
          "num_sequences"_a, "query_start"_a, "starts"_a, "interval"_a, "pages"_a, "page_bytes"_a, "num_blocks"_a,
          "tables"_a, "table_strides"_a, "table_width"_a);
  program
      .def(
          "convolution",
          [](Program& program, int64_t layer, int64_t offset, int64_t channels, int64_t width, int64_t kept,
             uintptr_t kernel, uintptr_t bias, Activation activation, const Ref& x, const Ref& out) {
            program.add(ConvolutionArgs{layer, offset, channels, width, kept, at<float>(kernel), at<float>(bias),
                                        activation, x, out});
          },
          "layer"_a, "offset"_a, "channels"_a, "width"_a, "kept"_a, "kernel"_a, "bias"_a, "activation"_a, "x"_a, "out"_a)
      .def(
          "delta_rule",
          [](Program& program, int64_t layer, int64_t offset, int64_t key_heads, int64_t value_heads, int64_t key_dim,
             int64_t value_dim, uintptr_t rate, uintptr_t time_bias, float epsilon, const Ref& qkv, const Ref& gates,
             const Ref& out) {
            program.add(DeltaArgs{layer, offset, key_heads, value_heads, key_dim, value_dim, at<float>(rate),
                                  at<float>(time_bias), epsilon, qkv, gates, out});
          },
          "layer"_a, "offset"_a, "key_heads"_a, "value_heads"_a, "key_dim"_a, "value_dim"_a, "rate"_a, "time_bias"_a,
          "epsilon"_a, "qkv"_a, "gates"_a, "out"_a)
      .def(
          "gated_norm",
          [](Program& program, uintptr_t weight, float epsilon, int64_t heads, int64_t width, const Ref& x,
             const Ref& gate, const Ref& out) {
            program.add(GatedNormArgs{at<float>(weight), epsilon, heads, width, x, gate, out});
          },
          "weight"_a, "epsilon"_a, "heads"_a, "width"_a, "x"_a, "gate"_a, "out"_a);
}

}  // namespace quire
