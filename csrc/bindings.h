// The parts of the Python module, one function for each file that provides one.
#pragma once

#include <nanobind/nanobind.h>

namespace quire {

class Program;

void bind_adapters(nanobind::module_& module, nanobind::class_<Program>& program);  // adapters_bindings.cpp
void bind_attention(nanobind::module_& module);  // attention_plan.cpp
void bind_drafts(nanobind::module_& module);     // drafts.cpp
void bind_block_packing(nanobind::module_& module);  // packing_blocks.cpp
void bind_encoder(nanobind::module_& module);    // encoder_plan.cpp
void bind_limits(nanobind::module_& module);     // limits_bindings.cpp
void bind_packing(nanobind::module_& module);    // packing.cpp
void bind_sampling(nanobind::module_& module);   // sampling_bindings.cpp
void bind_step_inputs(nanobind::module_& module);  // step_inputs.cpp
void bind_states(nanobind::module_& module, nanobind::class_<Program>& program);  // linear_state_bindings.cpp

}  // namespace quire
