// The plan of a step's states: checks of everything that the kernels will follow.
#include <algorithm>
#include <stdexcept>

#include "linear_state.h"

namespace quire {

void StatePlan::set(int64_t sequences, const int64_t* first_rows, const int64_t* computed, int64_t tokens,
                    const std::vector<StateLayer>& new_layers, const std::vector<int64_t>& num_blocks,
                    int64_t table_width) {
  rows = num_sequences = 0;  // no step, until this one is found to be right
  if (sequences < 0 || tokens < kBorder || tokens % kBorder != 0 || new_layers.size() != num_blocks.size())
    throw std::invalid_argument("states: no sequences, or an interval that is no multiple of a border's");
  if (first_rows[0] != 0) throw std::invalid_argument("states: the first row belongs to no sequence");
  for (int64_t s = 0; s < sequences; ++s) {
    const int64_t count = first_rows[s + 1] - first_rows[s], start = computed[s];
    if (count < 0 || start < 0) throw std::invalid_argument("states: query starts fall, or a position is negative");
    if (count == 0) continue;
    const int64_t first = start == 0 ? 0 : (start - 1) / tokens, last = (start + count - 1) / tokens;
    if (last >= table_width) throw std::invalid_argument("states: a table has no entry for a sequence's last token");
    for (std::size_t i = 0; i < new_layers.size(); ++i) {
      const int32_t* table = new_layers[i].table + s * new_layers[i].table_stride;
      for (int64_t block = first; block <= last; ++block)
        if (table[block] < 0 || table[block] >= num_blocks[i])
          throw std::invalid_argument("states: a table names a block outside the pool");
    }
  }
  layers_ = new_layers;
  layers = layers_.data();
  order_.resize(static_cast<std::size_t>(sequences));
  for (int64_t s = 0; s < sequences; ++s) order_[static_cast<std::size_t>(s)] = s;
  std::stable_sort(order_.begin(), order_.end(), [first_rows](int64_t a, int64_t b) {
    return first_rows[a + 1] - first_rows[a] > first_rows[b + 1] - first_rows[b];
  });
  order = order_.data();
  query_start = first_rows;
  starts = computed;
  interval = tokens;
  num_sequences = sequences;
  rows = first_rows[sequences];
}

}  // namespace quire
