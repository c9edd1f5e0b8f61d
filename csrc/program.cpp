#include "program.h"

#include <algorithm>

#include "attention.h"

namespace quire {
namespace {

// Throws for an id whose row is none of the table's: one comparison for each row of the run, beside the hundreds of
// values that the kernel then copies for it.
void refuse_foreign_rows(const EmbedArgs& args, const Step& step) {
  const int64_t* ids = args.by_position ? step.positions : step.token_ids;
  const auto first = static_cast<uint64_t>(args.shift), count = static_cast<uint64_t>(args.table.out_features);
  bool outside = ids == nullptr;
  for (int64_t t = 0; !outside && t < step.rows; ++t) outside = static_cast<uint64_t>(ids[t]) + first >= count;
  if (!outside) return;
  throw std::invalid_argument(args.by_position ? "a position lies outside the table of positions"
                                               : "a token id lies outside the embedding");
}

}  // namespace

Program::Program(const Kernels& kernels, std::shared_ptr<Pool> pool, int64_t max_rows, MatmulPrecision precision)
    : kernels_(kernels), pool_(std::move(pool)), max_rows_(max_rows), precision_(precision) {
  if (precision == MatmulPrecision::kBFloat16 && !kernels.bf16_products)
    throw std::invalid_argument(std::string(isa_name(kernels.isa)) + " has no bfloat16 products");
}

void Program::add(LinearArgs args) {
  args.precision = precision_;
  ops_.emplace_back(Call<LinearArgs>{kernels_.linear.linear, args});
  scratch_bytes_ = std::max(scratch_bytes_, kernels_.linear.linear_scratch(args, max_rows_));
}

void Program::add(const EmbedArgs& args) {
  embeddings_.push_back(args);
  ops_.emplace_back(Call<EmbedArgs>{kernels_.layers.embed, args});
}

void Program::add(const NormArgs& args) { ops_.emplace_back(Call<NormArgs>{kernels_.layers.norm, args}); }

void Program::add(const RotationArgs& args) {
  ops_.emplace_back(Call<RotationArgs>{kernels_.layers.rotation, args});
}

void Program::add(AttentionArgs args) {
  args.precision = precision_;
  attention_.push_back(args);
  ops_.emplace_back(Call<AttentionArgs>{kernels_.attention.prepare, args});
  ops_.emplace_back(Call<AttentionArgs>{kernels_.attention.attend, args});
  scratch_bytes_ = std::max(scratch_bytes_, kernels_.attention.attend_scratch(args, max_rows_, pool_->threads()));
}

void Program::run(const Step& step) {
  if (step.rows < 0 || step.rows > max_rows_) throw std::invalid_argument("more rows than the program was made for");
  if (step.rows == 0) return;
  for (const AttentionArgs& args : attention_) {
    if (args.group < 0 || args.group >= step.num_attention) throw std::invalid_argument("no plan for a KV group");
    const AttentionPlan* plan = step.attention[args.group];
    if (plan == nullptr || plan->rows != step.rows || !plan->fits(args))
      throw std::invalid_argument("a KV group's plan is not for these rows and this memory");
  }
  for (const EmbedArgs& args : embeddings_) refuse_foreign_rows(args, step);
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
