// What every attention over the KV cache shares: where the keys of an item lie, which rows it has, and how the results of
// splits become its output.
#pragma once

#include "attention_tiles.h"
#include "team.h"

namespace quire::QUIRE_ISA {
namespace {

constexpr int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
constexpr int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

// Rows of the projections lie too far apart for the processor to guess the next one.
constexpr int64_t kRowsAhead = 4;

void prefetch_floats(const float* from, int64_t count) {
  for (int64_t i = 0; i < count; i += 16) prefetch(reinterpret_cast<const std::byte*>(from + i));
}

// Rows that are computed for `count` rows: heights of register tiles.
[[maybe_unused]] int64_t computed_rows(int64_t count) {
  if (count <= 4) return count;
  if (kTileRows > 4 && count <= 6) return 6;
  return kTileRows > 6 && count <= 8 ? 8 : kTileRows;
}

// The rows of an item and those that fill its last register tile up.
[[maybe_unused]] int64_t with_filling(int64_t rows) {
  const int64_t whole = rows / kTileRows * kTileRows;
  return whole + computed_rows(rows - whole);
}

// attend<R>() of the height that computes `count` rows.
template <class Attend>
void with_height(int64_t count, const Attend& attend) {
  switch (count) {
    case 1:
      return attend.template operator()<1>();
    case 2:
      return attend.template operator()<2>();
    case 3:
      if constexpr (kTileRows > 2) return attend.template operator()<3>();
      break;
    case 4:
      if constexpr (kTileRows > 2) return attend.template operator()<4>();
      break;
    default:
      if constexpr (kTileRows > 4) {
        if (count <= 6) return attend.template operator()<6>();
      }
      if constexpr (kTileRows > 6) {
        if (count <= 8) return attend.template operator()<8>();
        return attend.template operator()<12>();
      }
  }
}

// One key head's share of the blocks of one sequence.
struct HeadBlocks {
  const std::byte* base;
  const int32_t* table;
  int64_t block_bytes, block_size, depth;
  int shift;  // block_size = 1 << shift
  CacheType type;

  const std::byte* block(int64_t position) const { return base + table[position >> shift] * block_bytes; }
  int64_t inside(int64_t position) const { return position & (block_size - 1); }
  const std::byte* keys(const std::byte* block) const { return block + keys_offset(block_size, type); }
  const std::byte* values(const std::byte* block) const { return block + values_offset(block_size, depth, type); }
  // Keys or values from a multiple of 16 on, of blocks of at least as many.
  const std::byte* subtile(int64_t position, bool is_values) const {
    const std::byte* at = block(position);
    return (is_values ? values(at) : keys(at)) + inside(position) * depth * element_bytes(type);
  }
};

// Where a tile's keys [low, high) (of 0 .. 63) lie. Blocks of at least a subtile only. Subtiles without such a key
// get the address of one with: what is read there is not used, and nothing else may be read.
[[maybe_unused]] KeyTile find_tile(const HeadBlocks& blocks, int64_t first, int64_t low, int64_t high) {
  KeyTile tile = {};
  const int64_t bytes = element_bytes(blocks.type);
  const int64_t first_live = low / kSubtile, last_live = (high - 1) / kSubtile;
  const auto set = [&](int64_t s, int64_t from) {
    const int64_t position = first + from * kSubtile, inside = blocks.inside(position);
    const std::byte* block = blocks.block(position);
    tile.keys[s] = blocks.keys(block) + inside * blocks.depth * bytes;
    tile.values[s] = blocks.values(block) + inside * blocks.depth * bytes;
    if (blocks.type == CacheType::kI8) {
      tile.key_scales[s] = reinterpret_cast<const float*>(block) + inside;
      tile.value_scales[s] = tile.key_scales[s] + blocks.block_size;
      prefetch(block + inside * 4);
      prefetch(block + (blocks.block_size + inside) * 4);
    }
  };
  for (int64_t s = 0; s < kSubtiles; ++s) set(s, larger(first_live, smaller(s, last_live)));
  return tile;
}

// Where a tile is put together or widened.
struct TileMemory {
  std::byte *keys, *values;
  float *key_scales, *value_scales;  // null: elements have none
};

KeyTile tile_in(const TileMemory& memory, int64_t depth, CacheType type) {
  KeyTile tile = {};
  for (int64_t s = 0; s < kSubtiles; ++s) {
    const int64_t offset = s * kSubtile * depth * element_bytes(type);
    tile.keys[s] = memory.keys + offset;
    tile.values[s] = memory.values + offset;
    if (memory.key_scales == nullptr) continue;
    tile.key_scales[s] = memory.key_scales + s * kSubtile;
    tile.value_scales[s] = memory.value_scales + s * kSubtile;
  }
  return tile;
}

// A tile whose blocks are smaller than a subtile, put together in `memory`.
template <CacheType T>
KeyTile gather_tile(const HeadBlocks& blocks, int64_t first, int64_t low, int64_t high,
                    const TileMemory& memory) {
  constexpr int64_t kElements = word_elements(T), kBytes = element_bytes(T);
  const int64_t depth = blocks.depth, size = blocks.block_size, packed = smaller(kElements, size);
  for (int64_t key = low; key < high; ++key) {
    const std::byte* block = blocks.block(first + key);
    const int64_t inside = blocks.inside(first + key);
    const std::byte* from = blocks.keys(block) + inside * kWordBytes;
    std::byte* to = memory.keys + key / kSubtile * kSubtile * depth * kBytes + key % kSubtile * kWordBytes;
    for (int64_t word = 0; word < depth / kElements; ++word)
      std::memcpy(to + word * kSubtile * kWordBytes, from + word * size * kWordBytes, kWordBytes);
    from = blocks.values(block) + (inside / packed * packed * depth + inside % packed) * kBytes;
    to = memory.values + (key / kElements * kElements * depth + key % kElements) * kBytes;
    for (int64_t d = 0; d < depth; ++d) std::memcpy(to + d * kWordBytes, from + d * packed * kBytes, kBytes);
    if constexpr (T == CacheType::kI8) {
      memory.key_scales[key] = reinterpret_cast<const float*>(block)[inside];
      memory.value_scales[key] = reinterpret_cast<const float*>(block)[size + inside];
    }
  }
  return tile_in(memory, depth, T);
}

// An item and one key head, with the memory of the thread that computes it.
template <class Scratch>
struct HeadWork {
  const AttentionArgs& args;
  const AttentionPlan& plan;
  const AttentionItem& item;
  HeadBlocks blocks;
  int64_t head, group, start, end;  // end: positions that are written
  Scratch& scratch;
  const HeadWork* following = nullptr;  // what this thread computes next, as far as it knows

  // A row's position, and the last that it sees, among this rank's tokens.
  int64_t position(int64_t row) const { return plan.deal.last_seen(start + (item.first_row + row) / group); }
  int64_t last(int64_t row) const {
    return plan.deal.last_seen(plan.last_position(token(row), start + (item.first_row + row) / group));
  }
  int64_t token(int64_t row) const { return plan.query_start[item.sequence] + (item.first_row + row) / group; }
  int64_t query_head(int64_t row) const { return head * group + (item.first_row + row) % group; }
};

template <class Scratch>
HeadWork<Scratch> make_work(const AttentionArgs& args, const AttentionPlan& plan, const AttentionItem& item, int64_t head,
                            Team& team) {
  static_assert(sizeof(Scratch) <= kThreadScratch);
  const int64_t share = head_bytes(args.block_size, args.head_dim, args.cache);
  const int64_t start = plan.start_positions[item.sequence];
  const int64_t count = plan.query_start[item.sequence + 1] - plan.query_start[item.sequence];
  const HeadBlocks blocks{args.pages + head * share, plan.block_table + item.sequence * plan.table_stride,
                          args.block_bytes,          args.block_size,
                          args.head_dim,             __builtin_ctzll(static_cast<uint64_t>(args.block_size)),
                          args.cache};
  return {args,  plan,          item, blocks, head, args.num_heads / args.num_kv_heads,
          start, start + count, *reinterpret_cast<Scratch*>(team.scratch())};
}

// Positions [low, high) that some row of an item sees, in the item's splits and, at the lower end, before them.
struct ItemKeys {
  int64_t low, high;

  template <class Scratch>
  explicit ItemKeys(const HeadWork<Scratch>& work)
      : low(first_seen(work.position(0), work.args.window, work.args.chunked)),
        high(smaller(work.item.last_split * kSplitKeys, work.last(work.item.rows - 1) + 1)) {}
};

// Blocks of 16 keys of a split, and how many places further on lies the block that is asked for while one is read.
inline constexpr int64_t kSplitSubtiles = kSplitKeys / kSubtile, kBlocksAhead = 4;

// Where a split's keys and values lie, 16 at a time, and which of its keys some row of the item sees: [low, high). What lies
// beside these may be anything; of a tile that has some, the 16 that have none get the address of others.
struct Split {
  int64_t start;  // its first position
  int64_t low, high;
  const std::byte* keys[kSplitSubtiles];
  const std::byte* values[kSplitSubtiles];
  const float* key_scales[kSplitSubtiles];
  const float* value_scales[kSplitSubtiles];

  Split(int64_t start, int64_t low, int64_t high) : start(start), low(low), high(high) {}
  // Where [low, high) are of split `number` of an item.
  template <class Scratch>
  Split(const HeadWork<Scratch>& work, int64_t number) : start(number * kSplitKeys) {
    const ItemKeys seen(work);
    low = larger(start, seen.low) - start;
    high = smaller(start + kSplitKeys, seen.high) - start;
  }

  // `memory`: for a whole split, where blocks are smaller than a subtile.
  template <CacheType T, class Scratch>
  void find(const HeadWork<Scratch>& work, const TileMemory& memory) {
    const int64_t row_bytes = work.args.head_dim * element_bytes(T);
    for (int64_t first = low / kKeyTile * kKeyTile; first < high; first += kKeyTile) {
      const int64_t tile_low = larger(low - first, 0), tile_high = smaller(high - first, kKeyTile);
      KeyTile tile;
      if (work.args.block_size < kSubtile) {
        TileMemory part{memory.keys + first * row_bytes, memory.values + first * row_bytes, nullptr, nullptr};
        if (memory.key_scales) part.key_scales = memory.key_scales + first, part.value_scales = memory.value_scales + first;
        tile = gather_tile<T>(work.blocks, start + first, tile_low, tile_high, part);
      } else {
        tile = find_tile(work.blocks, start + first, tile_low, tile_high);
      }
      const int64_t subtile = first / kSubtile;
      std::memcpy(keys + subtile, tile.keys, sizeof(tile.keys));
      std::memcpy(values + subtile, tile.values, sizeof(tile.values));
      if (T != CacheType::kI8) continue;
      std::memcpy(key_scales + subtile, tile.key_scales, sizeof(tile.key_scales));
      std::memcpy(value_scales + subtile, tile.value_scales, sizeof(tile.value_scales));
    }
  }

  // What each row of an item sees of it.
  template <class Scratch>
  void note_rows(const HeadWork<Scratch>& work, RowKeys* rows) const {
    for (int64_t r = 0; r < work.item.rows; ++r) {
      const int64_t seen = first_seen(rows[r].position, work.args.window, work.args.chunked);
      rows[r].high = larger(0, smaller(kSplitKeys, rows[r].last + 1 - start));
      rows[r].low = smaller(rows[r].high, larger(0, seen - start));
    }
  }

  // The results of `count` rows from `first` on that see nothing of it.
  template <class Scratch>
  void skip_rows(const HeadWork<Scratch>& work, int64_t first, int64_t count) const {
    for (int64_t r = first; r < first + count; ++r) {
      std::memset(work.scratch.sums + r * kRowStride, 0, static_cast<std::size_t>(work.args.head_dim) * sizeof(float));
      work.scratch.results.maximum[r] = kNothing;
      work.scratch.results.weight[r] = 0;
    }
  }
};

// load(row, query) for each row, whose position is noted.
template <class Scratch, class Load>
void visit_queries(const HeadWork<Scratch>& work, const Step& step, Load&& load) {
  const AttentionArgs& args = work.args;
  const float* token = step.at(args.qkv) + work.token(0) * args.qkv.stride + work.head * work.group * args.head_dim;
  int64_t position = work.start + work.item.first_row / work.group;
  int64_t inside = work.item.first_row % work.group;
  for (int64_t r = 0; r < work.item.rows; ++r) {
    const float* from = token + inside * args.head_dim;
    if (r + kRowsAhead * work.group < work.item.rows)
      prefetch_floats(from + kRowsAhead * args.qkv.stride, args.head_dim);
    load(r, from);
    RowKeys& row = work.scratch.rows[r];
    row.position = row.last = work.plan.deal.last_seen(position);
    if (work.plan.last_seen != nullptr) row.last = work.last(r);
    if (++inside == work.group) {
      inside = 0;
      ++position;
      token += args.qkv.stride;
    }
  }
}

// By row: the maximum of its scores and the sum of its weights, of the current split and of those before.
struct SplitResults {
  alignas(64) float maximum[kItemRows], weight[kItemRows];
  float total_maximum[kItemRows], total_weight[kItemRows];
};
static_assert(kItemRows % kLanes == 0);

// What the splits before and a split are multiplied with to be added, for rows side by side.
struct MergeFactors {
  vf before, added;

  QUIRE_INLINE MergeFactors(vf& total_maximum, vf& total_weight, vf maximum, vf weight) {
    const vf top = max(total_maximum, maximum);
    before = exp(total_maximum - top);
    added = exp(maximum - top);
    total_maximum = top;
    total_weight = fma(weight, added, total_weight * before);
  }
};

QUIRE_INLINE void add_row(float* total, const float* sums, vf before, vf added, int64_t depth) {
  for (int64_t d = 0; d < depth; d += kLanes) store(total + d, fma(load(sums + d), added, load(total + d) * before));
}

// The sums of a split's rows, added to the splits before; is_first: taken over, as merged into nothing, a factor of one and
// zero times zero added.
QUIRE_INLINE void add_split(SplitResults& results, bool is_first, const float* sums, float* totals, int64_t rows,
                            int64_t depth) {
  if (is_first) {
    for (int64_t r = 0; r < rows; ++r)
      std::memcpy(totals + r * kRowStride, sums + r * kRowStride, static_cast<std::size_t>(depth) * sizeof(float));
    std::memcpy(results.total_maximum, results.maximum, sizeof(results.maximum));
    std::memcpy(results.total_weight, results.weight, sizeof(results.weight));
    return;
  }
  for (int64_t first = 0; first < rows; first += kLanes) {
    vf maximum = load(results.total_maximum + first), weight = load(results.total_weight + first);
    const MergeFactors factors(maximum, weight, load(results.maximum + first), load(results.weight + first));
    store(results.total_maximum + first, maximum);
    store(results.total_weight + first, weight);
    for (int64_t r = first; r < smaller(first + kLanes, rows); ++r)
      add_row(totals + r * kRowStride, sums + r * kRowStride, broadcast(factors.before[r - first]),
              broadcast(factors.added[r - first]), depth);
  }
}

// A row's output: a sink takes part in the weights' sum but has no value. row: what the step has of the row's token.
QUIRE_INLINE void write_row(const AttentionArgs& args, int64_t head, const float* total, float maximum, float weight,
                            float* row) {
  float factor = 1;
  float* out = row + head * args.head_dim;
  if (args.sinks != nullptr) {
    const float sink = args.sinks[head], top = maximum > sink ? maximum : sink;
    factor = exp(broadcast(maximum - top))[0];
    weight = fma(weight, factor, exp(broadcast(sink - top))[0]);
    maximum = top;
  }
  if (args.parts) {
    row[args.num_heads * args.head_dim + head] = log_sum(maximum, weight);
    if (weight == 0) weight = 1;
  }
  if (args.cache == CacheType::kE4M3) factor *= element_factor<CacheType::kE4M3> * args.value_scale;
  const vf scale = broadcast(factor / weight);
  int64_t d = 0;
  // Adding zero makes the one zero of the other: a row's zeros may differ in sign by what was skipped.
  for (; d + kLanes <= args.head_dim; d += kLanes) store(out + d, fma(load(total + d), scale, zero()));
  if (d < args.head_dim) store_some(out + d, fma(load(total + d), scale, zero()), args.head_dim - d);
}

int64_t partial_stride(int64_t depth) { return (depth + 15) / 16 * 16 + 16; }

[[maybe_unused]] float* partial_row(const AttentionArgs& args, const Step& step, const AttentionPlan& plan, int64_t head,
                                    int64_t row) {
  return reinterpret_cast<float*>(step.shared_scratch) +
         (head * plan.partial_rows + row) * partial_stride(args.head_dim);
}

// Computes an item's splits one after the other, `attend(split)` each, which leaves its sums and results in the scratch;
// writes what they come to, or the results of each where they are merged later.
template <class Scratch, class Attend>
void run_splits(const HeadWork<Scratch>& work, const Step& step, Attend&& attend) {
  const AttentionArgs& args = work.args;
  const AttentionItem& item = work.item;
  Scratch& scratch = work.scratch;
  SplitResults& results = scratch.results;
  const int64_t stride = partial_stride(args.head_dim);
  for (int64_t split = item.first_split; split < item.last_split; ++split) {
    attend(split);
    if (item.partial >= 0) {
      float* place = partial_row(args, step, work.plan, work.head, item.partial + (split - item.first_split) * item.rows);
      for (int64_t r = 0; r < item.rows; ++r, place += stride) {
        const float* sums = scratch.sums + r * kRowStride;
        for (int64_t d = 0; d < args.head_dim; d += kLanes) store(place + d, load(sums + d));
        place[stride - 2] = results.maximum[r];
        place[stride - 1] = results.weight[r];
      }
    } else {
      add_split(results, split == item.first_split, scratch.sums, scratch.totals, item.rows, args.head_dim);
    }
  }
  if (item.partial >= 0) return;
  float* out = step.at(args.out) + work.token(0) * args.out.stride;
  int64_t inside = item.first_row % work.group;
  for (int64_t r = 0; r < item.rows; ++r) {
    const int64_t head = work.head * work.group + inside;
    write_row(args, head, scratch.totals + r * kRowStride, results.total_maximum[r], results.total_weight[r], out);
    if (++inside == work.group) {
      inside = 0;
      out += args.out.stride;
    }
  }
}

template <class Scratch>
void merge_item(const HeadWork<Scratch>& work, const Step& step) {
  const AttentionArgs& args = work.args;
  const AttentionItem& item = work.item;
  const int64_t stride = partial_stride(args.head_dim);
  float* out = step.at(args.out);
  float* total = work.scratch.totals;
  for (int64_t r = 0; r < item.rows; ++r) {
    vf maximum = broadcast(kNothing), weight = zero();
    for (int64_t d = 0; d < args.head_dim; d += kLanes) store(total + d, zero());
    for (int64_t split = 0; split < item.last_split - item.first_split; ++split) {
      const float* sums = partial_row(args, step, work.plan, work.head, item.partial + split * item.rows + r);
      const MergeFactors factors(maximum, weight, broadcast(sums[stride - 2]), broadcast(sums[stride - 1]));
      add_row(total, sums, factors.before, factors.added, args.head_dim);
    }
    const int64_t head = work.query_head(r);
    write_row(args, head, total, maximum[0], weight[0], out + work.token(r) * args.out.stride);
  }
}

// The items of a step, `run(work)` each, and then what is put together from several.
template <class Scratch, class Run>
void run_items(const AttentionArgs& args, const Step& step, Team& team, Run&& run) {
  const AttentionPlan& plan = *step.attention[args.group];
  const int64_t heads = args.num_kv_heads, count = plan.num_items * heads;
  const auto work_of = [&](int64_t i) {
    return make_work<Scratch>(args, plan, plan.items[i / heads], i % heads, team);
  };
  int64_t i = team.take();
  while (i < count) {
    HeadWork<Scratch> work = work_of(i);
    if (i + 2 * team.count() >= count) {  // so near the end a thread keeps nothing from the others
      run(work);
      i = team.take();
      continue;
    }
    i = team.take();
    const HeadWork<Scratch> following = work_of(i < count ? i : 0);
    work.following = i < count ? &following : nullptr;
    run(work);
  }
  if (plan.num_merges == 0) return;
  team.barrier();
  for (int64_t i = team.take(); i < plan.num_merges * heads; i = team.take())
    merge_item(make_work<Scratch>(args, plan, plan.merges[i / heads], i % heads, team), step);
}

}  // namespace
}  // namespace quire::QUIRE_ISA
