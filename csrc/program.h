// A recorded sequence of kernels: one call runs them all.
#pragma once

#include <functional>
#include <memory>
#include <stdexcept>
#include <variant>
#include <vector>

#include "adapters.h"
#include "collectives.h"
#include "expert_exchange.h"
#include "isa.h"
#include "pool.h"

namespace quire {

class Program {
 public:
  // max_rows: most rows of a run. Throws std::invalid_argument for a precision that the kernels do not have.
  Program(const Kernels& kernels, std::shared_ptr<Pool> pool, int64_t max_rows, MatmulPrecision precision);

  void add(LinearArgs args);
  // Throws std::invalid_argument for a column that no step can have; so do rotations.
  void add(const EmbedArgs& args);
  void add(const NormArgs& args);
  void add(const RotationArgs& args);
  void add(AttentionArgs args);
  // Throws std::invalid_argument for a rank or width that the kernels have no room for.
  void add(LatentArgs args);
  // Throws std::invalid_argument for an indexer that the kernels have no room for.
  void add(const IndexArgs& args);
  // Throws std::invalid_argument for matrices of different shapes or of too many inputs.
  void add(HeadsArgs args);
  // What follows runs over the rows that are read. Throws std::logic_error for what needs all of them.
  void add(const GatherArgs& args);
  void add(const ElementwiseArgs& args);
  // Of a program in bfloat16 those run in it that ask for it. Throws std::invalid_argument for heads that the kernels do
  // not compute.
  void add(EncoderArgs args);
  void add(const RouteArgs& args);
  void add(const AddExpertsArgs& args);
  // Throws std::invalid_argument for experts whose matrices, or places, do not fit together.
  void add(ExpertsArgs args);
  // ranks: of each expert, by its number. Throws also for experts that do not fit the exchange. A program of such layers
  // alone also runs over no rows: this rank then computes for the others.
  void add(ExchangeArgs args, const std::vector<int64_t>& ranks);
  // Throws std::invalid_argument for shapes that the kernels do not have.
  void add(const ConvolutionArgs& args);
  void add(const DeltaArgs& args);
  void add(const GatedNormArgs& args);
  // column: of the step, the slots of its rows. Throws std::invalid_argument for another column than other adapters have.
  // A linear layer with adapters, whose A x is `inner`: throws also for columns that do not fit its panels.
  void add(LinearArgs args, std::shared_ptr<const AdapterTable> table, int64_t column, const Ref& inner);
  // Throws also for tables that are not of these experts.
  void add(ExpertsArgs args, std::shared_ptr<const AdapterTable> wide, std::shared_ptr<const AdapterTable> down, int64_t column);
  void add(ShrinkArgs args, int64_t column);
  void add(ExpandArgs args, int64_t column);
  void add(const ActivateArgs& args);
  void add(AllReduceArgs args);
  void add(AllGatherArgs args);
  void add(MergePartsArgs args);
  // What is no kernel, between those before and behind it: on the thread that runs the program, while no other of its
  // threads computes, so that it may run other programs. It is given the step with the rows that there are at its place;
  // what it throws ends the run.
  using Outside = std::function<void(const Step&)>;
  void add(Outside call);

  // Bytes of shared scratch that a run needs.
  std::size_t scratch_bytes() const noexcept { return scratch_bytes_; }
  std::size_t size() const noexcept { return ops_.size(); }

  // Runs all kernels over step.rows rows. Throws std::invalid_argument for more than max_rows, or when a plan is
  // missing, for other rows or for other memory, when a token id or position has no row in an embedding, or when the
  // rows that are read do not ascend inside the step.
  void run(const Step& step);

 private:
  template <class Args>
  struct Call {
    void (*kernel)(const Args&, const Step&, Team&);
    Args args;
  };
  using Op = std::variant<Call<LinearArgs>, Call<EmbedArgs>, Call<NormArgs>, Call<RotationArgs>, Call<AttentionArgs>,
                          Call<LatentArgs>, Call<IndexArgs>, Call<HeadsArgs>, Call<GatherArgs>, Call<ElementwiseArgs>, Call<RouteArgs>,
                          Call<ExpertsArgs>, Call<AddExpertsArgs>, Call<ConvolutionArgs>, Call<DeltaArgs>, Call<GatedNormArgs>,
                          Call<EncoderArgs>, Call<ExchangeArgs>, Call<AllReduceArgs>, Call<AllGatherArgs>, Call<MergePartsArgs>, Call<ShrinkArgs>,
                          Call<ExpandArgs>, Call<ActivateArgs>>;

  void require_all_rows() const;
  void require_fitting(const ExpertsArgs& args) const;
  // The rows by slot that a call of adapters at this place has; notes the column.
  const AdapterGroups* adapted_rows(const AdapterTable& table, int64_t column);
  // Runs the kernels [first, last) of ops_. reading: the step behind a gather.
  void run_kernels(std::size_t first, std::size_t last, const Step& step, const Step& reading);

  static constexpr std::size_t kNone = static_cast<std::size_t>(-1);

  const Kernels& kernels_;
  std::shared_ptr<Pool> pool_;
  int64_t max_rows_;
  MatmulPrecision precision_;
  std::size_t scratch_bytes_ = 0;
  std::vector<Op> ops_;
  std::vector<std::pair<std::size_t, Outside>> outside_;  // each with the number of kernels before it
  std::size_t first_gather_ = kNone;  // which of ops_
  std::vector<AttentionArgs> attention_;
  bool attends_rows_ = false;
  std::vector<LatentArgs> latent_;
  std::vector<IndexArgs> index_;
  std::vector<EmbedArgs> embeddings_;
  std::vector<int64_t> rotated_;  // columns of positions
  int64_t adapter_column_ = -1;  // -1: no adapters
  int64_t adapter_slots_ = 0;    // fewest of all tables
  std::vector<std::unique_ptr<LinearAdapters>> linear_adapters_;
  std::vector<std::unique_ptr<ExpertAdapters>> expert_adapters_;
  std::unique_ptr<AdapterGroups> adapted_ = std::make_unique<AdapterGroups>();       // of all rows
  std::unique_ptr<AdapterGroups> adapted_read_ = std::make_unique<AdapterGroups>();  // of those that are read
  std::shared_ptr<SharedRanks> ranks_;  // of the collectives, if any
  std::shared_ptr<ExpertExchange> exchange_;  // of experts, if any
  // Layer and bytes of a page that a kernel of a state needs.
  std::vector<std::pair<int64_t, int64_t>> states_;
};

// A program with all that a run of it takes, for as many runs. The caller keeps the memory and the plans of the step.
class BoundProgram {
 public:
  BoundProgram(Program& program, const Step& step, std::vector<const AttentionPlan*> attention)
      : program_(program), step_(step), attention_(std::move(attention)) {
    step_.attention = attention_.data();
    step_.num_attention = static_cast<int64_t>(attention_.size());
  }
  BoundProgram(BoundProgram&&) = default;  // plans stay where they are

  // As Program::run.
  void run() { program_.run(step_); }

 private:
  Program& program_;
  Step step_;
  std::vector<const AttentionPlan*> attention_;
};

}  // namespace quire
