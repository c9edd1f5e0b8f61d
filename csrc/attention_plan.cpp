// Planning attention, copying blocks: the parts that are not compiled for each instruction set.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "attention.h"
#include "bindings.h"
#include "block_copy.h"
#include "latent.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace quire {
namespace {

// A key that is read for one row costs about as much as the arithmetic of this many rows.
constexpr int64_t kReadCost = 6;
// Items of equal cost that a thread should have at least, so that threads end together.
constexpr int64_t kItemsPerThread = 4;
// The most of each. A step's cost is at most rows x heads x positions: less than 2^63.
constexpr int64_t kMostBlocks = int64_t{1} << 31;
constexpr int64_t kMostRows = int64_t{1} << 23;
constexpr int64_t kMostHeads = int64_t{1} << 12;
constexpr int64_t kMostPositions = int64_t{1} << 26;

void check_block_shape(int64_t block_size, int64_t num_kv_heads) {
  if (block_size < 1 || block_size > kMaxBlockSize || (block_size & (block_size - 1)) != 0)
    throw std::invalid_argument("block size " + std::to_string(block_size) + " is not a power of two from 1 to 1024");
  if (num_kv_heads < 1 || num_kv_heads > kMostHeads)
    throw std::invalid_argument("from one to " + std::to_string(kMostHeads) + " key/value heads are needed");
}

int64_t checked_block_bytes(int64_t block_size, int64_t num_kv_heads, int64_t head_dim, CacheType type) {
  check_block_shape(block_size, num_kv_heads);
  if (head_dim < 8 || head_dim > kMaxHeadDim || head_dim % 8 != 0)
    throw std::invalid_argument("head dimension " + std::to_string(head_dim) + " is not a multiple of 8 up to 256");
  return num_kv_heads * head_bytes(block_size, head_dim, type);
}

}  // namespace

AttentionPlan::AttentionPlan(int64_t block_size, int64_t num_blocks, int64_t num_heads, int64_t num_kv_heads,
                             int64_t window, int threads, bool latent, bool chunked, int64_t top, Deal deal)
    : block_size(block_size),
      num_blocks(num_blocks),
      num_heads(num_heads),
      num_kv_heads(num_kv_heads),
      window(window),
      threads(threads),
      latent(latent),
      chunked(chunked),
      top(top),
      item_rows(latent ? kLatentRows : kItemRows),
      row_padding(latent ? kLatentPadding : 1),
      most_partial_rows(latent ? kMaxLatentPartialRows : kMaxPartialRows),
      deal(deal) {
  check_block_shape(block_size, num_kv_heads);
  if (num_blocks < 1 || num_heads < 1 || num_heads % num_kv_heads != 0 || window < 0 || threads < 1 || top < 0)
    throw std::invalid_argument("attention over no blocks, uneven groups of heads, a negative window or no threads");
  if (deal.ranks < 1 || deal.rank < 0 || deal.rank >= deal.ranks || deal.run < 1 || block_size % deal.run != 0 ||
      (deal.ranks > 1 && (window > 0 || top > 0)))
    throw std::invalid_argument("tokens that are dealt by runs which do not divide a block, of windows or chosen keys");
  if (num_blocks > kMostBlocks || num_heads > kMostHeads || threads > kMostHeads)
    throw std::invalid_argument("attention over more blocks, heads or threads than can be counted");
}

void AttentionPlan::set(int64_t sequences, const int64_t* starts, const int64_t* positions, const int32_t* table,
                        int64_t table_width, int64_t stride, const int64_t* row_slots) {
  num_sequences = sequences;
  query_start = starts;
  start_positions = positions;
  block_table = table;
  table_stride = stride;
  slots = row_slots;
  last_seen = nullptr;
  clear();
  try {
    check(table_width);
  } catch (...) {
    num_sequences = 0;  // a plan that was refused does nothing
    throw;
  }
  cut_items();
}

void AttentionPlan::see_ahead(const int64_t* last_positions) {
  clear();
  for (int64_t s = 0; s < num_sequences; ++s) {
    const int64_t first = query_start[s], end = query_start[s + 1], start = start_positions[s];
    for (int64_t t = first, before = 0; t < end; before = last_positions[t++]) {
      const int64_t position = start + t - first;
      if (!latent && last_positions[t] >= std::max(position, before) && last_positions[t] < start + end - first) continue;
      num_sequences = 0;
      throw std::invalid_argument("row " + std::to_string(t) + " cannot see up to " + std::to_string(last_positions[t]));
    }
  }
  last_seen = last_positions;
  cut_items();
}

void AttentionPlan::clear() {
  items_.clear();
  merges_.clear();
  rows = partial_rows = num_items = num_merges = 0;
}

void AttentionPlan::cut_items() {
  rows = query_start[num_sequences];
  cut();
  split();
  items = items_.data();
  num_items = static_cast<int64_t>(items_.size());
  merges = merges_.data();
  num_merges = static_cast<int64_t>(merges_.size());
}

void AttentionPlan::check(int64_t table_width) const {
  if (num_sequences < 0 || query_start[0] != 0) throw std::invalid_argument("query starts do not begin at 0");
  for (int64_t s = 0; s < num_sequences; ++s) {
    const int64_t start = start_positions[s];
    if (query_start[s + 1] < query_start[s] || query_start[s + 1] > kMostRows)
      throw std::invalid_argument("query starts fall or leap");
    const int64_t count = query_start[s + 1] - query_start[s];
    if (count == 0) continue;
    if (start < 0 || start > kMostPositions) throw std::invalid_argument("a start position is out of range");
    const int64_t first = first_seen(start, window, chunked) / block_size;
    const int64_t last = (deal.kept(start + count) + block_size - 1) / block_size - 1;
    if (last >= table_width)
      throw std::invalid_argument("sequence " + std::to_string(s) + " needs " + std::to_string(last + 1) +
                                  " blocks, its table has " + std::to_string(table_width));
    const int32_t* table = block_table + s * table_stride;
    for (int64_t i = first; i <= last; ++i)
      if (table[i] < 0 || table[i] >= num_blocks)
        throw std::invalid_argument("sequence " + std::to_string(s) + ": block " + std::to_string(table[i]) +
                                    " is not one of " + std::to_string(num_blocks));
  }
  const int64_t num_slots = num_blocks * block_size;
  for (int64_t t = 0; t < query_start[num_sequences]; ++t)
    if (slots[t] < (deal.ranks > 1 ? -1 : 0) || slots[t] >= num_slots)
      throw std::invalid_argument("row " + std::to_string(t) + ": slot " + std::to_string(slots[t]) +
                                  " is not one of " + std::to_string(num_slots));
}

// Items of all keys of at most item_rows rows.
void AttentionPlan::cut() {
  const int64_t group = num_heads / num_kv_heads;
  whole_.clear();
  for (int64_t s = 0; s < num_sequences; ++s) {
    const int64_t total = (query_start[s + 1] - query_start[s]) * group, start = start_positions[s];
    for (int64_t first = 0, last = 0; first < total; first = last) {
      // Rows of one token alone where each token reads keys of its own.
      last = std::min(first + item_rows, top > 0 ? (first / group + 1) * group : total);
      last = std::min(last, total);
      AttentionItem item;
      item.sequence = static_cast<int32_t>(s);
      item.first_row = first;
      item.rows = static_cast<int32_t>(last - first);
      const int64_t low = first_seen(start + first / group, window, chunked);
      const int64_t token = (last - 1) / group;
      int64_t high = std::max<int64_t>(0, deal.last_seen(last_position(query_start[s] + token, start + token)));
      if (top > 0) high = std::min(high, top - 1);
      item.first_split = low / kSplitKeys;
      item.last_split = high / kSplitKeys + 1;
      item.cost = (high + 1 - low) * (item.rows + kReadCost);
      whole_.push_back(item);
    }
  }
}

// Cuts what would keep one thread busy while the others have nothing left, at the borders of its splits.
void AttentionPlan::split() {
  int64_t total = 0;
  for (const AttentionItem& item : whole_) total += item.cost * num_kv_heads;
  const int64_t most = std::max<int64_t>(1, total / (threads * kItemsPerThread));
  for (AttentionItem& item : whole_) {
    const int64_t splits = item.last_split - item.first_split;
    const int64_t pieces = threads == 1 ? 1 : std::min(splits, (item.cost + most - 1) / most);
    const int64_t rows = (item.rows + row_padding - 1) / row_padding * row_padding;
    if (pieces < 2 || (partial_rows + splits * rows) * num_kv_heads > most_partial_rows) {
      items_.push_back(item);
      continue;
    }
    item.partial = partial_rows;
    partial_rows += splits * rows;
    merges_.push_back(item);
    for (int64_t i = 0; i < pieces; ++i) {
      AttentionItem piece = item;
      piece.first_split = item.first_split + splits * i / pieces;
      piece.last_split = item.first_split + splits * (i + 1) / pieces;
      piece.partial += (piece.first_split - item.first_split) * rows;
      piece.cost = item.cost / pieces;
      items_.push_back(piece);
    }
  }
  std::sort(items_.begin(), items_.end(),
            [](const AttentionItem& a, const AttentionItem& b) { return a.cost > b.cost; });
}

void bind_attention(nb::module_& module) {
  nb::class_<AttentionPlan>(module, "AttentionPlan")
      .def(
          "__init__",
          [](AttentionPlan* self, int64_t block_size, int64_t num_blocks, int64_t num_heads, int64_t num_kv_heads,
             int64_t window, int threads, bool latent, bool chunked, int64_t top, int64_t ranks, int64_t rank,
             int64_t run) {
            new (self) AttentionPlan(block_size, num_blocks, num_heads, num_kv_heads, window, threads, latent, chunked, top,
                                     {ranks, rank, run});
          },
          "block_size"_a, "num_blocks"_a, "num_heads"_a, "num_kv_heads"_a, "window"_a, "threads"_a, "latent"_a = false,
          "chunked"_a = false, "top"_a = 0, "ranks"_a = 1, "rank"_a = 0, "run"_a = 1)
      .def(
          "set",
          [](AttentionPlan& plan, int64_t num_sequences, uintptr_t query_start, uintptr_t start_positions,
             uintptr_t block_table, int64_t table_width, int64_t table_stride, uintptr_t slots) {
            plan.set(num_sequences, reinterpret_cast<const int64_t*>(query_start),
                     reinterpret_cast<const int64_t*>(start_positions), reinterpret_cast<const int32_t*>(block_table),
                     table_width, table_stride, reinterpret_cast<const int64_t*>(slots));
          },
          "num_sequences"_a, "query_start"_a, "start_positions"_a, "block_table"_a, "table_width"_a, "table_stride"_a,
          "slots"_a)
      .def(
          "see_ahead",
          [](AttentionPlan& plan, uintptr_t last_seen) {
            plan.see_ahead(reinterpret_cast<const int64_t*>(last_seen));
          },
          "last_seen"_a)
      .def_prop_ro("num_items", [](const AttentionPlan& plan) { return plan.num_items; })
      .def_prop_ro("num_merges", [](const AttentionPlan& plan) { return plan.num_merges; });
  module.def("block_bytes", &checked_block_bytes, "block_size"_a, "num_kv_heads"_a, "head_dim"_a, "cache"_a);
  module.def(
      "copy_blocks",
      [](Pool& pool, const std::vector<uintptr_t>& pages, int64_t block_bytes, int64_t num_blocks, uintptr_t pairs,
         int64_t num_pairs) {
        const BlockCopies copies(reinterpret_cast<const int64_t*>(pairs), num_pairs, num_blocks);
        nb::gil_scoped_release released;
        copies.run(pool, pages, block_bytes);
      },
      "pool"_a, "pages"_a, "block_bytes"_a, "num_blocks"_a, "pairs"_a, "num_pairs"_a);
  module.def(
      "move_blocks",
      [](const std::vector<uintptr_t>& sources, const std::vector<uintptr_t>& destinations, int64_t block_bytes,
         int64_t num_source_blocks, int64_t num_destination_blocks, uintptr_t pairs, int64_t num_pairs) {
        nb::gil_scoped_release released;
        move_blocks(sources, destinations, block_bytes, num_source_blocks, num_destination_blocks,
                    reinterpret_cast<const int64_t*>(pairs), num_pairs);
      },
      "sources"_a, "destinations"_a, "block_bytes"_a, "num_source_blocks"_a, "num_destination_blocks"_a, "pairs"_a,
      "num_pairs"_a);
}

}  // namespace quire
