// Paged attention. Compiled once for each instruction set.
//
// Sums over keys are made in an order that absolute positions alone decide: tiles of kKeyTile keys with a running
// maximum, started afresh every kSplitKeys keys, the splits' results merged from the first to the last. A tile or split
// in which a row sees nothing changes nothing of that row's bits, so that it does not matter which others come along.
#include "attention_tiles.h"
#include "attention_write.h"

namespace quire::QUIRE_ISA {
namespace {

constexpr int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
constexpr int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

// A thread's working memory.
struct Scratch {
  alignas(64) float query[kItemRows * kRowStride];
  float sums[kItemRows * kRowStride];       // of the current split
  float totals[kItemRows * kRowStride];     // of the splits before
  float scores[kTileRows * kKeyTile];
  float keys[kKeyTile * kMaxHeadDim];       // a tile, widened
  float values[kKeyTile * kMaxHeadDim];
  float key_scales[2][kKeyTile];            // of the current tile and the next
  float value_scales[2][kKeyTile];
  float total_maximum[kItemRows];
  float total_weight[kItemRows];
  alignas(64) RowState rows[kItemRows];
};
static_assert(sizeof(Scratch) <= kThreadScratch);

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
};

// Where a tile's keys [low, high) (of 0 .. 63) lie. Blocks of at least a subtile only. Subtiles without such a key
// get the address of one with: what is read there is not used, and nothing else may be read.
KeyTile find_tile(const HeadBlocks& blocks, int64_t first, int64_t low, int64_t high, float* key_scales,
                  float* value_scales) {
  KeyTile tile;
  const int64_t bytes = element_bytes(blocks.type);
  const int64_t first_live = low / kSubtile, last_live = (high - 1) / kSubtile;
  for (int64_t s = first_live; s <= last_live; ++s) {
    const int64_t position = first + s * kSubtile, inside = blocks.inside(position);
    const std::byte* block = blocks.block(position);
    tile.keys[s] = blocks.keys(block) + inside * blocks.depth * bytes;
    tile.values[s] = blocks.values(block) + inside * blocks.depth * bytes;
    if (blocks.type == CacheType::kI8) {
      std::memcpy(key_scales + s * kSubtile, block + inside * 4, kSubtile * 4);
      std::memcpy(value_scales + s * kSubtile, block + (blocks.block_size + inside) * 4, kSubtile * 4);
    }
  }
  for (int64_t s = 0; s < kSubtiles; ++s)
    if (s < first_live || s > last_live) {
      tile.keys[s] = tile.keys[first_live];
      tile.values[s] = tile.values[first_live];
    }
  tile.key_scales = blocks.type == CacheType::kI8 ? key_scales : nullptr;
  tile.value_scales = blocks.type == CacheType::kI8 ? value_scales : nullptr;
  return tile;
}

template <CacheType T>
float element(const std::byte* address, int64_t index) {
  if constexpr (T == CacheType::kF32) return reinterpret_cast<const float*>(address)[index];
  if constexpr (T == CacheType::kBF16)
    return bit_cast<float>(static_cast<uint32_t>(reinterpret_cast<const uint16_t*>(address)[index]) << 16);
  return static_cast<float>(reinterpret_cast<const int8_t*>(address)[index]);
}

// Copies `count` elements (a multiple of 8).
template <CacheType T>
void widen(const std::byte* from, int64_t count, float* to) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(to + i, load_element<T>(from + i * element_bytes(T)));
  for (; i < count; ++i) to[i] = element<T>(from, i);
}

// A tile whose blocks are smaller than a subtile, put together in scratch.
template <CacheType T>
void gather_tile(const HeadBlocks& blocks, int64_t first, int64_t low, int64_t high, Scratch& scratch) {
  const int64_t depth = blocks.depth, size = blocks.block_size;
  for (int64_t key = low; key < high; ++key) {
    const std::byte* block = blocks.block(first + key);
    const int64_t inside = blocks.inside(first + key);
    float* keys = scratch.keys + key / kSubtile * kSubtile * depth + key % kSubtile;
    for (int64_t d = 0; d < depth; ++d) keys[d * kSubtile] = element<T>(blocks.keys(block), d * size + inside);
    widen<T>(blocks.values(block) + inside * depth * element_bytes(T), depth, scratch.values + key * depth);
    if constexpr (T == CacheType::kI8) {
      scratch.key_scales[0][key] = reinterpret_cast<const float*>(block)[inside];
      scratch.value_scales[0][key] = reinterpret_cast<const float*>(block)[size + inside];
    }
  }
}

template <CacheType T>
void widen_tile(const KeyTile& tile, int64_t depth, int64_t low, int64_t high, Scratch& scratch) {
  for (int64_t s = low / kSubtile; s * kSubtile < high; ++s) {
    widen<T>(tile.keys[s], depth * kSubtile, scratch.keys + s * kSubtile * depth);
    widen<T>(tile.values[s], depth * kSubtile, scratch.values + s * kSubtile * depth);
  }
}

KeyTile scratch_tile(Scratch& scratch, int64_t depth, const float* key_scales, const float* value_scales) {
  KeyTile tile;
  for (int s = 0; s < kSubtiles; ++s) {
    tile.keys[s] = reinterpret_cast<const std::byte*>(scratch.keys + s * kSubtile * depth);
    tile.values[s] = reinterpret_cast<const std::byte*>(scratch.values + s * kSubtile * depth);
  }
  tile.key_scales = key_scales;
  tile.value_scales = value_scales;
  return tile;
}

// `count` rows (of which R are computed) against a tile.
template <CacheType T, int R>
void attend_rows(const AttentionArgs& args, const KeyTile& tile, const KeyTile& next, int count, int first,
                 Scratch& scratch) {
  RowState* rows = scratch.rows + first;
  const int64_t low = rows[0].low, high = rows[count - 1].high;
  float decay[16];
  score_rows<T, R>(scratch.query + first * kRowStride, tile, next, low, high, args.head_dim, scratch.scores);
  if (tile.key_scales != nullptr)
    weigh_rows<true>(tile, count, args.soft_cap, scratch.scores, rows, decay);
  else
    weigh_rows<false>(tile, count, args.soft_cap, scratch.scores, rows, decay);
  value_rows<T, R>(scratch.scores, tile, next, low, high, args.head_dim, decay, scratch.sums + first * kRowStride);
}

template <CacheType T>
void attend_some(const AttentionArgs& args, const KeyTile& tile, const KeyTile& next, int count, int first,
                 Scratch& scratch) {
  switch (count) {
    case 1:
      return attend_rows<T, 1>(args, tile, next, count, first, scratch);
    case 2:
      return attend_rows<T, 2>(args, tile, next, count, first, scratch);
    case 3:
      return attend_rows<T, 3>(args, tile, next, count, first, scratch);
    case 4:
      return attend_rows<T, 4>(args, tile, next, count, first, scratch);
    default:
      if constexpr (kTileRows > 4) {
        if (count <= 6) return attend_rows<T, 6>(args, tile, next, count, first, scratch);
      }
      if constexpr (kTileRows > 6) {
        if (count <= 8) return attend_rows<T, 8>(args, tile, next, count, first, scratch);
        return attend_rows<T, 12>(args, tile, next, count, first, scratch);
      }
  }
}

// An item and one key head.
struct Work {
  const AttentionArgs& args;
  const AttentionPlan& plan;
  const AttentionItem& item;
  HeadBlocks blocks;
  int64_t head, group, start, end;  // end: positions that are written
  Scratch& scratch;

  int64_t position(int64_t row) const { return start + (item.first_row + row) / group; }
  int64_t token(int64_t row) const { return plan.query_start[item.sequence] + (item.first_row + row) / group; }
  int64_t query_head(int64_t row) const { return head * group + (item.first_row + row) % group; }
};

void load_queries(const Work& work, const Step& step) {
  const AttentionArgs& args = work.args;
  const float* token = step.at(args.qkv) + work.token(0) * args.qkv.stride + work.head * work.group * args.head_dim;
  const vf scale = broadcast(args.scale);
  int64_t position = work.position(0);
  int64_t inside = work.item.first_row % work.group;
  for (int64_t r = 0; r < work.item.rows; ++r) {
    const float* from = token + inside * args.head_dim;
    float* to = work.scratch.query + r * kRowStride;
    int64_t d = 0;
    for (; d + kLanes <= args.head_dim; d += kLanes) store(to + d, load(from + d) * scale);
    for (; d < args.head_dim; ++d) to[d] = from[d] * args.scale;
    work.scratch.rows[r].position = position;
    if (++inside == work.group) {
      inside = 0;
      ++position;
      token += args.qkv.stride;
    }
  }
  // Rows that only fill a register tile up.
  for (int64_t r = work.item.rows; r % kTileRows != 0 && r < kItemRows; ++r)
    for (int64_t d = 0; d < args.head_dim; ++d) work.scratch.query[r * kRowStride + d] = 0;
}

void start_split(const Work& work) {
  Scratch& scratch = work.scratch;
  const int64_t padded = (work.item.rows + kTileRows - 1) / kTileRows * kTileRows;
  for (int64_t r = 0; r < padded; ++r) {
    scratch.rows[r].maximum = kNothing;
    store(scratch.rows[r].weight_sum, zero());
    for (int64_t d = 0; d < work.args.head_dim; d += kLanes) store(scratch.sums + r * kRowStride + d, zero());
  }
}

template <CacheType T>
void attend_split(const Work& work, int64_t split) {
  const AttentionArgs& args = work.args;
  Scratch& scratch = work.scratch;
  const int64_t num_rows = work.item.rows, window = args.window;
  const int64_t item_low = window > 0 ? larger(0, work.position(0) - window + 1) : 0;
  const int64_t item_high = smaller(work.item.last_split * kSplitKeys, work.position(num_rows - 1) + 1);
  const int64_t low = larger(split * kSplitKeys, item_low);
  const int64_t high = smaller((split + 1) * kSplitKeys, item_high);
  const bool small_blocks = args.block_size < kSubtile;
  const bool widened = small_blocks || (T != CacheType::kF32 && num_rows > kTileRows);
  start_split(work);
  KeyTile found = {}, next = {};
  int turn = 0;
  auto find = [&](int64_t first) {
    turn ^= 1;
    return find_tile(work.blocks, first, larger(item_low - first, 0), smaller(item_high - first, kKeyTile),
                     scratch.key_scales[turn], scratch.value_scales[turn]);
  };
  const int64_t begin = low / kKeyTile * kKeyTile;
  if (!small_blocks && low < high) next = find(begin);
  for (int64_t first = begin; first < high; first += kKeyTile) {
    const int64_t tile_low = larger(low - first, 0), tile_high = smaller(high - first, kKeyTile);
    if (small_blocks) {
      gather_tile<T>(work.blocks, first, tile_low, tile_high, scratch);
      const bool scaled = T == CacheType::kI8;
      found = next = scratch_tile(scratch, args.head_dim, scaled ? scratch.key_scales[0] : nullptr,
                                  scaled ? scratch.value_scales[0] : nullptr);
    } else {
      found = next;
      if (first + kKeyTile < item_high) next = find(first + kKeyTile);  // of the next split, too: to be prefetched
      if (widened) {
        widen_tile<T>(found, args.head_dim, tile_low, tile_high, scratch);
        found = scratch_tile(scratch, args.head_dim, found.key_scales, found.value_scales);
      }
    }
    for (int64_t r = 0; r < num_rows; ++r) {
      const int64_t position = scratch.rows[r].position;
      scratch.rows[r].high = larger(0, smaller(kKeyTile, position + 1 - first));
      scratch.rows[r].low = window > 0 ? smaller(kKeyTile, larger(0, position - window + 1 - first)) : 0;
    }
    for (int64_t r = 0; r < num_rows; r += kTileRows) {
      const int count = static_cast<int>(smaller(kTileRows, num_rows - r));
      if (scratch.rows[r + count - 1].high == 0 || scratch.rows[r].low == kKeyTile) continue;
      if (widened)
        attend_some<CacheType::kF32>(args, found, found, count, static_cast<int>(r), scratch);
      else
        attend_some<T>(args, found, next, count, static_cast<int>(r), scratch);
    }
  }
}

// total = total and a split's result, each weighed by its maximum.
QUIRE_INLINE void merge_row(float* total, float& total_maximum, float& total_weight, const float* sums, float maximum,
                            float weight, int64_t depth) {
  const float top = total_maximum > maximum ? total_maximum : maximum;
  const vf old_factor = exp(broadcast(total_maximum - top)), new_factor = exp(broadcast(maximum - top));
  total_maximum = top;
  total_weight = fma(weight, new_factor[0], total_weight * old_factor[0]);
  for (int64_t d = 0; d < depth; d += kLanes)
    store(total + d, fma(load(sums + d), new_factor, load(total + d) * old_factor));
}

// A row's output: a sink takes part in the weights' sum but has no value.
QUIRE_INLINE void write_row(const AttentionArgs& args, int64_t head, const float* total, float maximum, float weight,
                            float* out) {
  float factor = 1;
  if (args.sinks != nullptr) {
    const float sink = args.sinks[head], top = maximum > sink ? maximum : sink;
    factor = exp(broadcast(maximum - top))[0];
    weight = fma(weight, factor, exp(broadcast(sink - top))[0]);
  }
  const vf scale = broadcast(factor / weight);
  int64_t d = 0;
  // Adding zero makes the one zero of the other: a row's zeros may differ in sign by what was skipped.
  for (; d + kLanes <= args.head_dim; d += kLanes) store(out + d, fma(load(total + d), scale, zero()));
  if (d < args.head_dim) store_some(out + d, fma(load(total + d), scale, zero()), args.head_dim - d);
}

int64_t partial_stride(int64_t depth) { return (depth + 15) / 16 * 16 + 16; }

float* partial_row(const AttentionArgs& args, const Step& step, const AttentionPlan& plan, int64_t head, int64_t row) {
  return reinterpret_cast<float*>(step.shared_scratch) +
         (head * plan.partial_rows + row) * partial_stride(args.head_dim);
}

template <CacheType T>
void run_item(const Work& work, const Step& step) {
  const AttentionArgs& args = work.args;
  Scratch& scratch = work.scratch;
  load_queries(work, step);
  const bool partial = work.item.partial >= 0;
  int64_t row = work.item.partial;
  for (int64_t split = work.item.first_split; split < work.item.last_split; ++split) {
    attend_split<T>(work, split);
    for (int64_t r = 0; r < work.item.rows; ++r) {
      const float* sums = scratch.sums + r * kRowStride;
      const float maximum = scratch.rows[r].maximum, weight = sum_lanes(load(scratch.rows[r].weight_sum));
      if (partial) {
        float* place = partial_row(args, step, work.plan, work.head, row++);
        for (int64_t d = 0; d < args.head_dim; d += kLanes) store(place + d, load(sums + d));
        place[partial_stride(args.head_dim) - 2] = maximum;
        place[partial_stride(args.head_dim) - 1] = weight;
      } else if (split == work.item.first_split) {
        // As merged into nothing: a factor of one, and zero times zero added.
        std::memcpy(scratch.totals + r * kRowStride, sums, static_cast<std::size_t>(args.head_dim) * sizeof(float));
        scratch.total_maximum[r] = maximum;
        scratch.total_weight[r] = weight;
      } else {
        merge_row(scratch.totals + r * kRowStride, scratch.total_maximum[r], scratch.total_weight[r], sums, maximum,
                  weight, args.head_dim);
      }
    }
  }
  if (partial) return;
  float* out = step.at(args.out);
  for (int64_t r = 0; r < work.item.rows; ++r) {
    const int64_t head = work.query_head(r);
    write_row(args, head, scratch.totals + r * kRowStride, scratch.total_maximum[r], scratch.total_weight[r],
              out + work.token(r) * args.out.stride + head * args.head_dim);
  }
}

void merge_item(const Work& work, const Step& step) {
  const AttentionArgs& args = work.args;
  const AttentionItem& item = work.item;
  const int64_t stride = partial_stride(args.head_dim);
  float* out = step.at(args.out);
  float* total = work.scratch.totals;
  for (int64_t r = 0; r < item.rows; ++r) {
    float maximum = kNothing, weight = 0;
    for (int64_t d = 0; d < args.head_dim; d += kLanes) store(total + d, zero());
    for (int64_t split = 0; split < item.last_split - item.first_split; ++split) {
      const float* sums = partial_row(args, step, work.plan, work.head, item.partial + split * item.rows + r);
      merge_row(total, maximum, weight, sums, sums[stride - 2], sums[stride - 1], args.head_dim);
    }
    const int64_t head = work.query_head(r);
    write_row(args, head, total, maximum, weight, out + work.token(r) * args.out.stride + head * args.head_dim);
  }
}

Work make_work(const AttentionArgs& args, const AttentionPlan& plan, const AttentionItem& item, int64_t head,
               Team& team) {
  const int64_t share = head_bytes(args.block_size, args.head_dim, args.cache);
  const int64_t start = plan.start_positions[item.sequence];
  const int64_t count = plan.query_start[item.sequence + 1] - plan.query_start[item.sequence];
  const HeadBlocks blocks{args.pages + head * share, plan.block_table + item.sequence * plan.table_stride,
                          args.block_bytes,          args.block_size,
                          args.head_dim,             __builtin_ctzll(static_cast<uint64_t>(args.block_size)),
                          args.cache};
  return Work{args, plan,  item, blocks, head, args.num_heads / args.num_kv_heads, start, start + count,
              *reinterpret_cast<Scratch*>(team.scratch())};
}

void attend(const AttentionArgs& args, const Step& step, Team& team) {
  const AttentionPlan& plan = *step.attention[args.group];
  const int64_t heads = args.num_kv_heads;
  for (int64_t i = team.take(); i < plan.num_items * heads; i = team.take()) {
    const Work work = make_work(args, plan, plan.items[i / heads], i % heads, team);
    switch (args.cache) {
      case CacheType::kF32:
        run_item<CacheType::kF32>(work, step);
        break;
      case CacheType::kBF16:
        run_item<CacheType::kBF16>(work, step);
        break;
      case CacheType::kI8:
        run_item<CacheType::kI8>(work, step);
        break;
    }
  }
  if (plan.num_merges == 0) return;
  team.barrier();
  for (int64_t i = team.take(); i < plan.num_merges * heads; i = team.take())
    merge_item(make_work(args, plan, plan.merges[i / heads], i % heads, team), step);
}

void prepare(const AttentionArgs& args, const Step& step, Team& team) {
  const AttentionPlan& plan = *step.attention[args.group];
  float* qkv = step.at(args.qkv);
  const float* rotation = args.rotary_dim > 0 ? step.at(args.rotation) : nullptr;
  for (int64_t t = team.take(); t < step.rows; t = team.take())
    prepare_row(args, qkv + t * args.qkv.stride, rotation ? rotation + t * args.rotation.stride : nullptr,
                plan.slots[t]);
}

std::size_t attend_scratch(const AttentionArgs& args, int64_t, int threads) {
  return threads == 1 ? 0 : static_cast<std::size_t>(kMaxPartialRows * partial_stride(args.head_dim)) * sizeof(float);
}

}  // namespace

extern const AttentionKernels kAttention;
const AttentionKernels kAttention = {prepare, attend, attend_scratch};

}  // namespace quire::QUIRE_ISA
