#include "step_inputs.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "bindings.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace quire {
namespace {

void require(bool condition, const char* what) {
  if (!condition) throw std::invalid_argument(what);
}

}  // namespace

StepInputs::StepInputs(std::shared_ptr<Pool> pool, const int32_t* token_table, int64_t num_rows, int64_t capacity,
                       std::vector<GroupTables> groups, const SequenceColumns& columns, int64_t max_sequences,
                       OtherColumns others)
    : pool_(std::move(pool)),
      token_table_(token_table),
      num_rows_(num_rows),
      capacity_(capacity),
      groups_(std::move(groups)),
      sequences_(columns),
      max_sequences_(max_sequences),
      others_(std::move(others)) {}

void StepInputs::place_tokens(TokenColumns columns, int64_t max_tokens) {
  const auto has_plan = [](const GroupTables& group) { return group.plan != nullptr; };
  const auto num_planned = std::count_if(groups_.begin(), groups_.end(), has_plan);
  require(static_cast<int64_t>(columns.slots.size()) == num_planned, "slots for each group with a plan expected");
  require(columns.others.size() == others_.rules.size(), "a column of tokens for each rule expected");
  tokens_ = std::move(columns);
  max_tokens_ = max_tokens;
}

void StepInputs::set_rows(const int64_t* rows, int64_t count) {
  require(count <= max_sequences_, "more sequences than request slots");
  for (int64_t s = 0; s < count; ++s) require(rows[s] >= 0 && rows[s] < num_rows_, "a request slot that does not exist");
  rows_.assign(rows, rows + count);
}

void StepInputs::gather(const std::vector<int64_t>& starts, const std::vector<int64_t>& counts) {
  const std::size_t sequences = rows_.size();
  require(starts.size() == sequences && counts.size() == sequences, "a start and a count for each sequence expected");
  if (sequences > 0) pool_->wake();
  int64_t first = 0;
  sequences_.query_start[0] = 0;
  for (std::size_t s = 0; s < sequences; ++s) {
    const int64_t start = starts[s], count = counts[s];
    require(count > 0 && count <= max_tokens_ - first, "a sequence without tokens, or more tokens than there is place for");
    require(start >= 0 && start <= capacity_ - count, "positions outside the token table");
    const int32_t* tokens = token_table_ + rows_[s] * capacity_ + start;
    for (int64_t i = 0; i < count; ++i) {
      tokens_.token_ids[first + i] = tokens[i];
      tokens_.slot_positions[first + i] = start + i;
      tokens_.sequence_index[first + i] = static_cast<int64_t>(s);
    }
    first += count;
    sequences_.starts[s] = start;
    sequences_.counts[s] = count;
    sequences_.ends[s] = start + count;
    sequences_.query_start[s + 1] = first;
  }
  std::size_t next = 0;
  for (const GroupTables& group : groups_) gather_group(group, group.plan == nullptr ? nullptr : tokens_.slots[next++]);
  for (std::size_t column = 0; column < others_.rules.size(); ++column) gather_other(column);
}

void StepInputs::gather_other(std::size_t column) const {
  const ColumnRule rule = others_.rules[column];
  int64_t* out = tokens_.others[column];
  for (std::size_t s = 0; s < rows_.size(); ++s) {
    const int64_t value = others_.values[static_cast<std::size_t>(rows_[s]) * others_.rules.size() + column];
    for (int64_t position = sequences_.starts[s]; position < sequences_.ends[s]; ++position)
      *out++ = rule == ColumnRule::kRow       ? value
               : rule == ColumnRule::kShifted ? position + value
                                              : int64_t{value > 0 && position >= value};
  }
}

void StepInputs::gather_group(const GroupTables& group, int64_t* slots) const {
  const int64_t size = group.block_size;
  const Deal deal = group.plan == nullptr ? Deal{} : group.plan->deal;
  const int64_t own = size / deal.ranks;  // tokens of an entry that this rank keeps
  for (std::size_t s = 0; s < rows_.size(); ++s) {
    const int64_t needed = (sequences_.ends[s] - 1) / size + 1;
    if (needed > group.width)
      throw std::invalid_argument("sequence " + std::to_string(s) + " needs " + std::to_string(needed) +
                                  " blocks, its table has " + std::to_string(group.width));
    int32_t* table = group.gathered + static_cast<int64_t>(s) * group.width;
    std::copy_n(group.entries + rows_[s] * group.width, needed, table);
    if (slots == nullptr) continue;
    for (int64_t position = sequences_.starts[s]; position < sequences_.ends[s]; ++position)
      *slots++ = deal.keeps(position) ? int64_t{table[position / size]} * own + deal.kept(position) % own : -1;
  }
  if (slots == nullptr) return;
  const auto sequences = static_cast<int64_t>(rows_.size());
  group.plan->set(sequences, sequences_.query_start, sequences_.starts, group.gathered, group.width, group.width,
                  slots - sequences_.query_start[sequences]);
}

namespace {

using Column = nb::ndarray<int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Values = nb::ndarray<int64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Table = nb::ndarray<int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

void construct(StepInputs* self, std::shared_ptr<Pool> pool, const Table& token_table,
               const std::vector<Table>& tables, const std::vector<int64_t>& block_sizes,
               const std::vector<AttentionPlan*>& plans, const std::vector<Table>& gathered, const Column& starts,
               const Column& counts, const Column& ends, const Column& query_start,
               const std::vector<int32_t>& rules, const Values& values) {
  const std::size_t max_sequences = starts.size();
  require(counts.size() == max_sequences && ends.size() == max_sequences && query_start.size() == max_sequences + 1,
          "columns of one length expected, and query starts of one more");
  require(block_sizes.size() == tables.size() && plans.size() == tables.size() && gathered.size() == tables.size(),
          "a block size, a plan or none, and memory for each group's tables expected");
  require(values.shape(0) == token_table.shape(0) && values.shape(1) == rules.size(),
          "a value of each rule for each row expected");
  OtherColumns others{{}, values.data()};
  for (const int32_t rule : rules) {
    require(rule >= 0 && rule <= static_cast<int32_t>(ColumnRule::kReached), "a rule of columns that does not exist");
    others.rules.push_back(static_cast<ColumnRule>(rule));
  }
  std::vector<GroupTables> groups;
  for (std::size_t i = 0; i < tables.size(); ++i) {
    const Table& table = tables[i];
    require(table.shape(0) == token_table.shape(0), "as many tables as rows of tokens expected");
    require(gathered[i].shape(0) == max_sequences && gathered[i].shape(1) == table.shape(1),
            "tables of the most sequences expected");
    require(block_sizes[i] > 0 && (plans[i] == nullptr || plans[i]->block_size * plans[i]->deal.ranks == block_sizes[i]),
            "blocks without tokens, or of another size than the plan's");
    groups.push_back({table.data(), static_cast<int64_t>(table.shape(1)), block_sizes[i], plans[i], gathered[i].data()});
  }
  new (self) StepInputs(std::move(pool), token_table.data(), static_cast<int64_t>(token_table.shape(0)),
                        static_cast<int64_t>(token_table.shape(1)), std::move(groups),
                        {starts.data(), counts.data(), ends.data(), query_start.data()},
                        static_cast<int64_t>(max_sequences), std::move(others));
}

}  // namespace

void bind_step_inputs(nb::module_& module) {
  nb::class_<StepInputs>(module, "StepInputs")
      .def("__init__", &construct, "pool"_a, "token_table"_a, "tables"_a, "block_sizes"_a, "plans"_a, "gathered"_a,
           "starts"_a, "counts"_a, "ends"_a, "query_start"_a, "rules"_a, "values"_a)
      .def(
          "place_tokens",
          [](StepInputs& inputs, const Column& token_ids, const Column& slot_positions, const Column& sequence_index,
             const std::vector<Column>& slots, const std::vector<Column>& others) {
            TokenColumns columns{token_ids.data(), slot_positions.data(), sequence_index.data(), {}, {}};
            bool same = slot_positions.size() == token_ids.size() && sequence_index.size() == token_ids.size();
            for (const Column& each : slots) {
              same &= each.size() == token_ids.size();
              columns.slots.push_back(each.data());
            }
            for (const Column& each : others) {
              same &= each.size() == token_ids.size();
              columns.others.push_back(each.data());
            }
            require(same, "columns of one length expected");
            inputs.place_tokens(std::move(columns), static_cast<int64_t>(token_ids.size()));
          },
          "token_ids"_a, "slot_positions"_a, "sequence_index"_a, "slots"_a, "others"_a)
      .def(
          "set_rows",
          [](StepInputs& inputs, const Column& rows) { inputs.set_rows(rows.data(), static_cast<int64_t>(rows.size())); },
          "rows"_a)
      .def("gather", &StepInputs::gather, "starts"_a, "counts"_a);
}

}  // namespace quire
