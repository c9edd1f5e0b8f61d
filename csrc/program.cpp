#include "program.h"

#include <algorithm>

namespace quire {

void Program::add(const LinearArgs& args) {
  ops_.emplace_back(Call<LinearArgs>{kernels_.linear.linear, args});
  scratch_bytes_ = std::max(scratch_bytes_, kernels_.linear.linear_scratch(args, max_rows_));
}

void Program::add(const EmbedArgs& args) { ops_.emplace_back(Call<EmbedArgs>{kernels_.layers.embed, args}); }

void Program::add(const NormArgs& args) { ops_.emplace_back(Call<NormArgs>{kernels_.layers.norm, args}); }

void Program::add(const RotationArgs& args) {
  ops_.emplace_back(Call<RotationArgs>{kernels_.layers.rotation, args});
}

void Program::add(const AttentionArgs& args) {
  ops_.emplace_back(Call<AttentionArgs>{kernels_.attention.prepare, args});
  ops_.emplace_back(Call<AttentionArgs>{kernels_.attention.attend, args});
  scratch_bytes_ = std::max(scratch_bytes_, kernels_.attention.attend_scratch(args, max_rows_, pool_->threads()));
}

void Program::run(const Step& step) {
  if (step.rows < 0 || step.rows > max_rows_) throw std::invalid_argument("more rows than the program was made for");
  if (step.rows == 0) return;
  struct Run {
    const std::vector<Op>& ops;
    const Step& step;
  } run{ops_, step};
  pool_->run(
      [](void* argument, Team& team) {
        const Run& run = *static_cast<Run*>(argument);
        for (const Op& op : run.ops) {
          std::visit([&](const auto& call) { call.kernel(call.args, run.step, team); }, op);
          team.barrier();
        }
      },
      &run);
}

}  // namespace quire
