#include "program.h"

#include <algorithm>

#include "attention.h"
#include "encoder.h"
#include "latent.h"
#include "linear_state.h"
#include "packed.h"

namespace quire {
namespace {

// Throws for an id whose row is none of the table's: one comparison for each row of the run, beside the hundreds of
// values that the kernel then copies for it.
void refuse_foreign_rows(const EmbedArgs& args, const Step& step) {
  const int64_t* ids = step.columns[args.column];
  const int64_t rows = args.shared_rows > 0 ? args.shared_rows : args.table.out_features;
  const auto first = static_cast<uint64_t>(args.shift), count = static_cast<uint64_t>(rows);
  bool outside = ids == nullptr;
  for (int64_t t = 0; !outside && t < step.rows; ++t) outside = static_cast<uint64_t>(ids[t]) + first >= count;
  if (!outside) return;
  throw std::invalid_argument(args.column == kTokenIds        ? "a token id lies outside the embedding"
                              : args.column == kSlotPositions ? "a position lies outside the table of positions"
                                                              : "an index of a column lies outside the column's table");
}

// Throws unless the step has a plan for a layer's group, of these rows and this memory.
template <class Args>
void refuse_foreign_plan(const Args& args, const Step& step) {
  if (args.group < 0 || args.group >= step.num_attention) throw std::invalid_argument("no plan for a KV group");
  const AttentionPlan* plan = step.attention[args.group];
  if (plan == nullptr || plan->rows != step.rows || !plan->fits(args))
    throw std::invalid_argument("a KV group's plan is not for these rows and this memory");
}

void require_column(int64_t column) {
  if (column < 0 || column >= kMaxColumns) throw std::invalid_argument("a column of a number that no step has");
}

// Throws unless the rows that are read ascend inside the step: a gather moves them where they lie.
void refuse_unordered_rows(const Step& step) {
  if (step.num_read < 0) throw std::invalid_argument("a negative number of rows to read");
  int64_t last = -1;
  for (int64_t i = 0; i < step.num_read; ++i) {
    if (step.read_rows[i] <= last || step.read_rows[i] >= step.rows)
      throw std::invalid_argument("the rows to read do not ascend inside the step");
    last = step.read_rows[i];
  }
}

}  // namespace

Program::Program(const Kernels& kernels, std::shared_ptr<Pool> pool, int64_t max_rows, MatmulPrecision precision)
    : kernels_(kernels), pool_(std::move(pool)), max_rows_(max_rows), precision_(precision) {
  if (precision == MatmulPrecision::kBFloat16 && !kernels.bf16_products)
    throw std::invalid_argument(std::string(isa_name(kernels.isa)) + " has no bfloat16 products");
}

void Program::add(LinearArgs args) {
  args.precision = precision_;
  if (auto* last = ops_.empty() ? nullptr : std::get_if<Call<LinearArgs>>(&ops_.back());
      last != nullptr && last->args.feeds_next && kernels_.linear.hands_over(last->args, args))
    last->args.packs_out = args.x_is_packed = true;
  ops_.emplace_back(Call<LinearArgs>{kernels_.linear.linear, args});
  scratch_bytes_ = std::max(scratch_bytes_, kernels_.linear.linear_scratch(args, max_rows_));
}

void Program::require_all_rows() const {
  if (first_gather_ != kNone) throw std::logic_error("a kernel that needs all rows follows a gather");
}

void Program::add(const EmbedArgs& args) {
  require_all_rows();
  require_column(args.column);
  embeddings_.push_back(args);
  ops_.emplace_back(Call<EmbedArgs>{kernels_.layers.embed, args});
}

void Program::add(const NormArgs& args) { ops_.emplace_back(Call<NormArgs>{kernels_.layers.norm, args}); }

void Program::add(const RotationArgs& args) {
  require_all_rows();
  std::vector<int64_t> columns{args.column};
  if (args.axes != nullptr) columns.insert(columns.end(), args.grid.begin(), args.grid.end());
  for (const int64_t column : columns) require_column(column);
  rotated_.insert(rotated_.end(), columns.begin(), columns.end());
  ops_.emplace_back(Call<RotationArgs>{kernels_.layers.rotation, args});
}

void Program::add(const GatherArgs& args) {
  if (first_gather_ == kNone) first_gather_ = ops_.size();
  ops_.emplace_back(Call<GatherArgs>{kernels_.layers.gather, args});
}

void Program::add(const ElementwiseArgs& args) {
  ops_.emplace_back(Call<ElementwiseArgs>{kernels_.layers.elementwise, args});
}

void Program::add(const RouteArgs& args) { ops_.emplace_back(Call<RouteArgs>{kernels_.layers.route, args}); }

void Program::add(const AddExpertsArgs& args) {
  ops_.emplace_back(Call<AddExpertsArgs>{kernels_.layers.add_experts, args});
}

void Program::require_fitting(const ExpertsArgs& args) const {
  const ExpertTable& table = *args.table;
  const std::size_t count = table.gate_up.size();
  const bool apart = !table.up.empty();
  bool fits = count > 0 && table.down.size() == count && (!apart || table.up.size() == count);
  const auto is = [](const PackedWeight& weight, bool gated, int64_t inputs, int64_t outputs) {
    return weight.gated == gated && weight.in_features == inputs && weight.out_features == outputs;
  };
  for (std::size_t i = 0; fits && i < count; ++i) {
    const int64_t size = table.down[0].out_features, inner = table.down[0].in_features;
    fits = is(table.gate_up[i], !apart, size, apart ? inner : 2 * inner) && is(table.down[i], false, inner, size) &&
           (!apart || is(table.up[i], false, size, inner));
  }
  for (const auto* biases : {&table.gate_up_bias, &table.up_bias, &table.down_bias})
    fits &= biases->empty() || biases->size() == count;
  std::vector<bool> held(count);
  int32_t last = -1;
  for (int64_t i = 0; fits && i < args.num_placed; ++i) {
    const auto [place, copies, turn] = args.places[i];
    if (place < 0) continue;
    // Where results are added at once, the order of the places is that of the numbers.
    fits = static_cast<std::size_t>(place) < count && !held[place] && 0 <= turn && turn < copies &&
           (args.apart || place > last);
    if (fits) held[last = place] = true;
  }
  fits &= args.places == nullptr || args.apart || last + 1 == static_cast<int64_t>(count);
  fits &= !args.apart || !args.residual.present();
  if (!fits) throw std::invalid_argument("the matrices of the experts do not fit together");
}

void Program::add(ExpertsArgs args) {
  require_fitting(args);
  args.precision = precision_;
  ops_.emplace_back(Call<ExpertsArgs>{kernels_.linear.experts, args});
  scratch_bytes_ = std::max(scratch_bytes_, kernels_.linear.experts_scratch(args, max_rows_, pool_->threads()));
}

void Program::add(ExchangeArgs args, const std::vector<int64_t>& ranks) {
  place_exchange(args, ranks);
  require_fitting(args.experts);
  args.experts.precision = precision_;
  args.compute = kernels_.linear.experts;
  args.add = kernels_.layers.add_experts;
  exchange_ = args.exchange;
  const ExchangeShape& shape = exchange_->shape();
  const int64_t rows = shape.replicas * shape.rows;
  scratch_bytes_ = std::max(scratch_bytes_, kernels_.linear.experts_scratch(args.experts, rows, pool_->threads()));
  ops_.emplace_back(Call<ExchangeArgs>{exchange_experts, std::move(args)});
}

void Program::add(const ConvolutionArgs& args) {
  require_all_rows();
  if (args.width < 1 || args.width > kMaxTaps || args.kept < args.width - 1 || (args.activation != Activation::kNone && args.activation != Activation::kSilu))
    throw std::invalid_argument("a convolution of too many taps, or with another activation than SiLU");
  const int64_t kept = args.kept * line_elements(args.channels) * static_cast<int64_t>(sizeof(float));
  states_.emplace_back(args.layer, args.offset + kept);
  ops_.emplace_back(Call<ConvolutionArgs>{kernels_.states.convolve, args});
  ops_.emplace_back(Call<ConvolutionArgs>{kernels_.states.keep_inputs, args});
}

void Program::add(const DeltaArgs& args) {
  require_all_rows();
  if (args.key_dim < 1 || args.key_dim > kMaxStateDim || args.value_dim < 1 || args.value_dim > kMaxStateDim ||
      args.key_heads < 1 || args.value_heads < 1 || args.value_heads % args.key_heads != 0)
    throw std::invalid_argument("heads of a delta rule that the kernels do not have");
  const int64_t kept = DeltaPlaces(args).end * static_cast<int64_t>(sizeof(float));
  states_.emplace_back(args.layer, args.offset + kept);
  ops_.emplace_back(Call<DeltaArgs>{kernels_.states.delta, args});
}

void Program::add(const GatedNormArgs& args) {
  ops_.emplace_back(Call<GatedNormArgs>{kernels_.states.gated_norm, args});
}

const AdapterGroups* Program::adapted_rows(const AdapterTable& table, int64_t column) {
  require_column(column);
  if (adapter_column_ >= 0 && adapter_column_ != column) throw std::invalid_argument("adapters of two columns");
  adapter_slots_ = adapter_column_ < 0 ? table.num_slots : std::min(adapter_slots_, table.num_slots);
  adapter_column_ = column;
  return first_gather_ == kNone ? adapted_.get() : adapted_read_.get();
}

void Program::add(ShrinkArgs args, int64_t column) {
  args.groups = adapted_rows(*args.table, column);
  ops_.emplace_back(Call<ShrinkArgs>{kernels_.adapters.shrink, std::move(args)});
}

void Program::add(LinearArgs args, std::shared_ptr<const AdapterTable> table, int64_t column, const Ref& inner) {
  auto own = std::make_unique<LinearAdapters>();
  own->groups = adapted_rows(*table, column);
  own->turns = table->turns();
  own->inner = inner;
  const auto count = static_cast<std::size_t>(num_panels(args.weight) * kPanel / kAdapterAlignment);
  if (own->turns.empty() || own->turns.size() > count)
    throw std::invalid_argument("columns of adapters that do not fit a packed matrix");
  own->turns.resize(count);
  own->table = std::move(table);
  args.adapters = own.get();
  linear_adapters_.push_back(std::move(own));
  add(args);
}

void Program::add(ExpertsArgs args, std::shared_ptr<const AdapterTable> wide, std::shared_ptr<const AdapterTable> down,
                  int64_t column) {
  const auto count = static_cast<int64_t>(args.table->down.size());
  const auto fits = [](const AdapterTable& table, int64_t pieces, int64_t inputs, int64_t outputs) {
    bool is_whole = table.in_features == inputs && table.num_pieces == pieces &&
                    static_cast<int64_t>(table.segments.size()) == pieces;
    for (int64_t i = 0; is_whole && i < pieces; ++i) {
      const AdapterSegment& segment = table.segments[static_cast<std::size_t>(i)];
      is_whole = segment.piece == i && segment.column == 0 && segment.step == kAdapterAlignment && segment.columns == outputs;
    }
    return is_whole;
  };
  if (count == 0) throw std::invalid_argument("adapters of no experts");
  const int64_t size = args.table->down[0].out_features, inner = args.table->down[0].in_features;
  if (!fits(*wide, 2 * count, size, inner) || !fits(*down, count, inner, size))
    throw std::invalid_argument("adapters of other experts");
  auto own = std::make_unique<ExpertAdapters>();
  own->groups = adapted_rows(*wide, column);
  adapted_rows(*down, column);
  own->wide = std::move(wide);
  own->down = std::move(down);
  args.adapters = own.get();
  expert_adapters_.push_back(std::move(own));
  add(std::move(args));
}

void Program::add(ExpandArgs args, int64_t column) {
  const auto count = static_cast<int64_t>(args.table->segments.size());
  if (args.first_segment < 0 || args.num_segments < 1 || args.first_segment + args.num_segments > count)
    throw std::invalid_argument("segments that the adapters' table does not have");
  args.groups = adapted_rows(*args.table, column);
  ops_.emplace_back(Call<ExpandArgs>{kernels_.adapters.expand, std::move(args)});
}

void Program::add(const ActivateArgs& args) { ops_.emplace_back(Call<ActivateArgs>{kernels_.adapters.activate, args}); }

void Program::add(AllReduceArgs args) {
  ranks_ = args.ranks;
  ops_.emplace_back(Call<AllReduceArgs>{all_reduce, std::move(args)});
}

void Program::add(AllGatherArgs args) {
  ranks_ = args.ranks;
  ops_.emplace_back(Call<AllGatherArgs>{all_gather, std::move(args)});
}

void Program::add(MergePartsArgs args) {
  if (args.num_heads < 1 || args.peers.count * args.num_heads * (args.head_dim + 1) > SharedRanks::kSlot)
    throw std::invalid_argument("parts of no heads, or of more than fit into a slot");
  ranks_ = args.ranks;
  ops_.emplace_back(Call<MergePartsArgs>{merge_parts, std::move(args)});
}

void Program::add(Outside call) { outside_.emplace_back(ops_.size(), std::move(call)); }

void Program::add(AttentionArgs args) {
  require_all_rows();
  args.precision = precision_;
  attention_.push_back(args);
  if (!args.parts) ops_.emplace_back(Call<AttentionArgs>{kernels_.attention.prepare, args});
  if (!args.attends) return;
  ops_.emplace_back(Call<AttentionArgs>{kernels_.attention.attend, args});
  scratch_bytes_ = std::max(scratch_bytes_, kernels_.attention.attend_scratch(args, max_rows_, pool_->threads()));
}

void Program::add(EncoderArgs args) {
  require_all_rows();
  if (args.head_dim < 8 || args.head_dim > kMaxHeadDim || args.head_dim % 8 != 0)
    throw std::invalid_argument("heads of 8, 16, 24 ... 256 elements are attended to");
  if (precision_ == MatmulPrecision::kFloat32) args.precision = precision_;
  attends_rows_ = true;
  ops_.emplace_back(Call<EncoderArgs>{kernels_.encoder.attend, args});
}

void Program::add(LatentArgs args) {
  require_all_rows();
  const int64_t width = args.rank + args.rope_dim;
  if (args.rank < 8 || args.rank % 8 != 0 || args.rank > kMaxLatentRank || args.rope_dim < 0 ||
      args.rope_dim % 2 != 0 || width > kMaxLatentWidth || args.cache == CacheType::kI8)
    throw std::invalid_argument("latents of a width or type that the kernels do not compute");
  args.precision = precision_;
  latent_.push_back(args);
  if (args.writes) ops_.emplace_back(Call<LatentArgs>{kernels_.latent.prepare, args});
  if (!args.attends) return;
  ops_.emplace_back(Call<LatentArgs>{kernels_.latent.attend, args});
  scratch_bytes_ = std::max(scratch_bytes_, kernels_.latent.attend_scratch(args, pool_->threads()));
}

void Program::add(const IndexArgs& args) {
  require_all_rows();
  if (args.num_heads < 1 || args.num_heads > kMaxIndexHeads || args.dim < 8 || args.dim % 8 != 0 ||
      args.dim > kMaxIndexDim || args.rope_dim < 0 || args.rope_dim % 2 != 0 || args.rope_dim > args.dim ||
      args.top < 1 || args.top > kMaxIndexTop || (args.cache != CacheType::kF32 && args.cache != CacheType::kBF16))
    throw std::invalid_argument("an indexer of a width or type that the kernels do not compute");
  index_.push_back(args);
  if (args.writes) ops_.emplace_back(Call<IndexArgs>{kernels_.index.prepare, args});
  if (args.selects) ops_.emplace_back(Call<IndexArgs>{kernels_.index.select, args});
}

void Program::add(HeadsArgs args) {
  if (args.weights->empty()) throw std::invalid_argument("no heads");
  const PackedWeight& first = args.weights->front();
  for (const PackedWeight& weight : *args.weights)
    if (weight.in_features != first.in_features || weight.out_features != first.out_features || weight.gated ||
        weight.in_features > kMaxHeadFeatures)
      throw std::invalid_argument("matrices of heads that differ in shape, are gated or take too many inputs");
  args.precision = precision_;
  ops_.emplace_back(Call<HeadsArgs>{kernels_.linear.heads, std::move(args)});
}

void Program::run(const Step& step) {
  if (step.rows < 0 || step.rows > max_rows_) throw std::invalid_argument("more rows than the program was made for");
  if (step.rows == 0) {
    const auto exchanges = [](const Op& op) { return std::holds_alternative<Call<ExchangeArgs>>(op); };
    if (exchange_ == nullptr || !std::all_of(ops_.begin(), ops_.end(), exchanges)) return;
    run_kernels(0, ops_.size(), step, step);
    return exchange_->check();
  }
  for (const AttentionArgs& args : attention_) refuse_foreign_plan(args, step);
  for (const AttentionArgs& args : attention_)
    if (args.length_floor > 0 && step.columns[kSlotPositions] == nullptr)
      throw std::invalid_argument("queries are scaled by positions, and there are none");
  for (const int64_t column : rotated_)
    if (step.columns[column] == nullptr) throw std::invalid_argument("rotations are of positions, and there are none");
  for (const LatentArgs& args : latent_) refuse_foreign_plan(args, step);
  for (const IndexArgs& args : index_) refuse_foreign_plan(args, step);
  if (attends_rows_ && (step.encoder == nullptr || step.encoder->rows != step.rows))
    throw std::invalid_argument("the plan of the sequences is not for these rows");
  for (const auto& [layer, bytes] : states_)
    if (step.states == nullptr || step.states->rows != step.rows || !step.states->has(layer, bytes))
      throw std::invalid_argument("the plan of states is not for these rows and this memory");
  for (const EmbedArgs& args : embeddings_) refuse_foreign_rows(args, step);
  Step reading = step;
  if (step.read_rows != nullptr && first_gather_ != kNone) {
    refuse_unordered_rows(step);
    reading.rows = step.num_read;
  }
  if (adapter_column_ >= 0) {
    const int64_t* slots = step.columns[adapter_column_];
    adapted_->set(slots, nullptr, step.rows, adapter_slots_);
    if (first_gather_ != kNone) adapted_read_->set(slots, step.read_rows, reading.rows, adapter_slots_);
  }
  std::size_t first = 0;
  for (const auto& [place, call] : outside_) {
    run_kernels(first, place, step, reading);
    call(place > first_gather_ ? reading : step);
    first = place;
  }
  run_kernels(first, ops_.size(), step, reading);
  if (ranks_ != nullptr) ranks_->check();
  if (exchange_ != nullptr) exchange_->check();
}

void Program::run_kernels(std::size_t first, std::size_t last, const Step& step, const Step& reading) {
  if (first == last) return;
  struct Run {
    const Program& program;
    const Step& step;
    const Step& reading;
    std::size_t first, last;
  } run{*this, step, reading, first, last};
  pool_->run(
      [](void* argument, Team& team) {
        const auto& [program, step, reading, first, last] = *static_cast<Run*>(argument);
        for (std::size_t i = std::max(first, static_cast<std::size_t>(team.place())); i < last; ++i) {
          const Op& op = program.ops_[i];
          // All rows are read: a gather leaves every row where it is.
          if (step.read_rows == nullptr && std::holds_alternative<Call<GatherArgs>>(op)) continue;
          const Step& rows = i >= program.first_gather_ ? reading : step;
          std::visit([&](const auto& call) { call.kernel(call.args, rows, team); }, op);
          team.next(static_cast<int64_t>(i) + 1);
        }
      },
      &run, ranks_ == nullptr && exchange_ == nullptr ? Pool::Crew::kAnyHelpers : Pool::Crew::kWhole);
}

}  // namespace quire
