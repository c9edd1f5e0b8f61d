// The inputs of a step, gathered from the request state in one call: the columns of its sequences and tokens, block
// tables, slots and attention's plans.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "attention.h"
#include "pool.h"

namespace quire {

// One KV group: the block tables of all request slots, and where a step's go.
struct GroupTables {
  const int32_t* entries = nullptr;  // [num_rows, width]
  int64_t width = 0;
  int64_t block_size = 1;            // tokens of an entry, those of other ranks included
  AttentionPlan* plan = nullptr;     // null: of states, which have no slots
  int32_t* gathered = nullptr;       // [max_sequences, width]
};

// Where the columns of a step's sequences go: [max_sequences] each, query_start one more.
struct SequenceColumns {
  int64_t *starts = nullptr, *counts = nullptr, *ends = nullptr, *query_start = nullptr;
};

// Where the columns of a step's tokens go: [max_tokens] each, and slots for each group that has a plan.
struct TokenColumns {
  int64_t *token_ids = nullptr, *slot_positions = nullptr, *sequence_index = nullptr;
  std::vector<int64_t*> slots;
  std::vector<int64_t*> others;  // by number of a rule of OtherColumns
};

// How a token's value follows from its row's and from its position: quire/worker/columns.py.
enum class ColumnRule : int32_t { kRow = 0, kShifted, kReached };

// Columns of tokens that a model asks for, by the rule of each. values: [num_rows, number of columns].
struct OtherColumns {
  std::vector<ColumnRule> rules;
  const int64_t* values = nullptr;
};

// All memory belongs to the caller and outlives this.
class StepInputs {
 public:
  // token_table: [num_rows, capacity]. pool: whose helpers a step wakes before it needs them.
  StepInputs(std::shared_ptr<Pool> pool, const int32_t* token_table, int64_t num_rows, int64_t capacity,
             std::vector<GroupTables> groups, const SequenceColumns& columns, int64_t max_sequences,
             OtherColumns others);

  // Throws std::invalid_argument for slots of another number of groups, and for another number of other columns.
  void place_tokens(TokenColumns columns, int64_t max_tokens);

  // The request slots of the steps that follow. Throws std::invalid_argument for more than max_sequences and for one
  // that does not exist.
  void set_rows(const int64_t* rows, int64_t count);

  // Gather a step in which each of these sequences owns counts[s] successive tokens, from position starts[s] on, and plan
  // its attention. Throws std::invalid_argument for more tokens than there is place for, and for whatever would be read
  // outside the tables or, by a kernel, read or written outside the pool.
  void gather(const std::vector<int64_t>& starts, const std::vector<int64_t>& counts);

 private:
  void gather_group(const GroupTables& group, int64_t* slots) const;
  void gather_other(std::size_t column) const;

  std::shared_ptr<Pool> pool_;
  const int32_t* token_table_;
  int64_t num_rows_, capacity_;
  std::vector<GroupTables> groups_;
  SequenceColumns sequences_;
  int64_t max_sequences_;
  OtherColumns others_;
  TokenColumns tokens_;
  int64_t max_tokens_ = 0;
  std::vector<int64_t> rows_;
};

}  // namespace quire
