// Paged attention. Compiled once for each instruction set.
//
// Sums over keys are made in an order that absolute positions alone decide: tiles of kKeyTile keys with a running
// maximum, started afresh every kSplitKeys keys, the splits' results merged from the first to the last. A tile or split
// in which a row sees nothing changes nothing of that row's bits, so that it does not matter which others come along.
#include "attention_dots.h"
#include "attention_write.h"

namespace quire::QUIRE_ISA {
namespace {

constexpr int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
constexpr int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

// Rows of the projections lie too far apart for the processor to guess the next one.
constexpr int64_t kRowsAhead = 4;

void prefetch_floats(const float* from, int64_t count) {
  for (int64_t i = 0; i < count; i += 16) prefetch(reinterpret_cast<const std::byte*>(from + i));
}

// A thread's working memory.
struct Scratch {
  alignas(64) float query[kItemRows * kRowStride];
  float sums[kItemRows * kRowStride];       // of the current split
  float totals[kItemRows * kRowStride];     // of the splits before
  float scores[kTileRows * kKeyTile];
  float weight_factors[16];
  std::byte weights[kTileRows * kWeightWords * kWordBytes];  // in words
  float keys[kKeyTile * kMaxHeadDim];       // a tile, widened or put together from small blocks
  float values[kKeyTile * kMaxHeadDim];
  float key_scales[kKeyTile];
  float value_scales[kKeyTile];
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
KeyTile find_tile(const HeadBlocks& blocks, int64_t first, int64_t low, int64_t high) {
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

// A tile in scratch. Scales: where there are some.
KeyTile scratch_tile(Scratch& scratch, int64_t depth, CacheType type, bool scaled) {
  KeyTile tile = {};
  for (int64_t s = 0; s < kSubtiles; ++s) {
    const int64_t offset = s * kSubtile * depth * element_bytes(type);
    tile.keys[s] = reinterpret_cast<const std::byte*>(scratch.keys) + offset;
    tile.values[s] = reinterpret_cast<const std::byte*>(scratch.values) + offset;
    if (!scaled) continue;
    tile.key_scales[s] = scratch.key_scales + s * kSubtile;
    tile.value_scales[s] = scratch.value_scales + s * kSubtile;
  }
  return tile;
}

// A tile whose blocks are smaller than a subtile, put together in scratch.
template <CacheType T>
KeyTile gather_tile(const HeadBlocks& blocks, int64_t first, int64_t low, int64_t high, Scratch& scratch) {
  constexpr int64_t kElements = word_elements(T), kBytes = element_bytes(T);
  const int64_t depth = blocks.depth, size = blocks.block_size, packed = smaller(kElements, size);
  auto* all_keys = reinterpret_cast<std::byte*>(scratch.keys);
  auto* all_values = reinterpret_cast<std::byte*>(scratch.values);
  for (int64_t key = low; key < high; ++key) {
    const std::byte* block = blocks.block(first + key);
    const int64_t inside = blocks.inside(first + key);
    const std::byte* from = blocks.keys(block) + inside * kWordBytes;
    std::byte* to = all_keys + key / kSubtile * kSubtile * depth * kBytes + key % kSubtile * kWordBytes;
    for (int64_t word = 0; word < depth / kElements; ++word)
      std::memcpy(to + word * kSubtile * kWordBytes, from + word * size * kWordBytes, kWordBytes);
    from = blocks.values(block) + (inside / packed * packed * depth + inside % packed) * kBytes;
    to = all_values + (key / kElements * kElements * depth + key % kElements) * kBytes;
    for (int64_t d = 0; d < depth; ++d) std::memcpy(to + d * kWordBytes, from + d * packed * kBytes, kBytes);
    if constexpr (T == CacheType::kI8) {
      scratch.key_scales[key] = reinterpret_cast<const float*>(block)[inside];
      scratch.value_scales[key] = reinterpret_cast<const float*>(block)[size + inside];
    }
  }
  return scratch_tile(scratch, depth, T, T == CacheType::kI8);
}

// Keys of some subtiles, as floats: [head_dim][16]; values: [16][head_dim].
template <CacheType T>
KeyTile widen_tile(const KeyTile& tile, int64_t depth, int64_t low, int64_t high, Scratch& scratch) {
  constexpr int kElements = word_elements(T);
  for (int64_t s = low / kSubtile; s * kSubtile < high; ++s) {
    float* keys = scratch.keys + s * kSubtile * depth;
    for (int64_t d = 0; d < depth; d += kElements)
      for (int64_t lane = 0; lane < kSubtile; lane += kLanes) {
        const vi words = load_words(tile.keys[s] + (d / kElements * kSubtile + lane) * kWordBytes);
        for (int place = 0; place < kElements; ++place) {
          vf element = word_element<T>(words, place);
          if (d + place == 0) element += first_score<T>(words);
          store(keys + (d + place) * kSubtile + lane, element);
        }
      }
    float* values = scratch.values + s * kSubtile * depth;
    for (int64_t key = 0; key < kSubtile; key += kElements) {
      const std::byte* row = tile.values[s] + key / kElements * depth * kWordBytes;
      int64_t d = 0;
      for (; d + kLanes <= depth; d += kLanes)
        for (int place = 0; place < kElements; ++place)
          store(values + (key + place) * depth + d, word_element<T>(load_words(row + d * kWordBytes), place));
      if constexpr (kLanes > 8)
        for (int place = 0; d < depth && place < kElements; ++place) {  // half a vector
          const vf value = word_element<T>(load_half(row + d * kWordBytes), place);
          std::memcpy(values + (key + place) * depth + d, &value, 8 * sizeof(float));
        }
    }
  }
  KeyTile wide = scratch_tile(scratch, depth, CacheType::kF32, false);
  for (int64_t s = 0; s < kSubtiles; ++s) {
    wide.key_scales[s] = tile.key_scales[s];
    wide.value_scales[s] = tile.value_scales[s];
  }
  return wide;
}

// `count` rows (of which R are computed) against a tile. kScaled: keys and values have scales. kDots: elements are
// multiplied as they are stored.
template <CacheType T, bool kScaled, bool kDots, int R>
void attend_rows(const AttentionArgs& args, const KeyTile& tile, const KeyTile& next, int count, int first,
                 Scratch& scratch) {
  RowState* rows = scratch.rows + first;
  const int64_t low = rows[0].low, high = rows[count - 1].high;
  const float* query = scratch.query + first * kRowStride;
  float* sums = scratch.sums + first * kRowStride;
  float decay[16];
  if constexpr (kDots) {
    dot_score_rows<T, R>(query, tile, next, low, high, args.head_dim, scratch.scores);
    dot_weigh_rows<T>(tile, count, args.soft_cap, scratch.scores, rows, decay, scratch.weight_factors,
                      scratch.weights);
    dot_value_rows<T, R>(scratch.weights, tile, next, low, high, args.head_dim, decay, scratch.weight_factors, sums);
  } else {
    score_rows<T, R>(query, tile, next, low, high, args.head_dim, scratch.scores);
    weigh_rows<kScaled>(tile, count, args.soft_cap, scratch.scores, rows, decay);
    value_rows<T, R>(scratch.scores, tile, next, low, high, args.head_dim, decay, sums);
  }
}

template <CacheType T, bool kScaled, bool kDots>
void attend_some(const AttentionArgs& args, const KeyTile& tile, const KeyTile& next, int count, int first,
                 Scratch& scratch) {
  const auto attend = [&]<int R>() { attend_rows<T, kScaled, kDots, R>(args, tile, next, count, first, scratch); };
  switch (count) {
    case 1:
      return attend.template operator()<1>();
    case 2:
      return attend.template operator()<2>();
    case 3:
      return attend.template operator()<3>();
    case 4:
      return attend.template operator()<4>();
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

template <CacheType T, bool kDots>
void load_query(const AttentionArgs& args, const float* from, float* to) {
  if constexpr (kDots) return Dots<T>::load_query(from, args.scale, args.head_dim, to);
  const float scale = args.scale * element_factor<T>;
  int64_t d = 0;
  for (; d + kLanes <= args.head_dim; d += kLanes) store(to + d, load(from + d) * scale);
  for (; d < args.head_dim; ++d) to[d] = from[d] * scale;
}

template <CacheType T, bool kDots>
void load_queries(const Work& work, const Step& step) {
  const AttentionArgs& args = work.args;
  const float* token = step.at(args.qkv) + work.token(0) * args.qkv.stride + work.head * work.group * args.head_dim;
  int64_t position = work.position(0);
  int64_t inside = work.item.first_row % work.group;
  for (int64_t r = 0; r < work.item.rows; ++r) {
    const float* from = token + inside * args.head_dim;
    if (r + kRowsAhead * work.group < work.item.rows)
      prefetch_floats(from + kRowsAhead * args.qkv.stride, args.head_dim);
    load_query<T, kDots>(args, from, work.scratch.query + r * kRowStride);
    work.scratch.rows[r].position = position;
    if (++inside == work.group) {
      inside = 0;
      ++position;
      token += args.qkv.stride;
    }
  }
  // Rows that only fill a register tile up.
  for (int64_t r = work.item.rows; r % kTileRows != 0 && r < kItemRows; ++r)
    std::memset(work.scratch.query + r * kRowStride, 0, kRowStride * sizeof(float));
  std::memset(work.scratch.weights, 0, sizeof(work.scratch.weights));
  std::memset(work.scratch.weight_factors, 0, sizeof(work.scratch.weight_factors));
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

template <CacheType T, bool kDots>
void attend_split(const Work& work, int64_t split) {
  constexpr bool kScaled = T == CacheType::kI8;
  const AttentionArgs& args = work.args;
  Scratch& scratch = work.scratch;
  const int64_t num_rows = work.item.rows, window = args.window;
  const int64_t item_low = first_seen(work.position(0), window, args.chunked);
  const int64_t item_high = smaller(work.item.last_split * kSplitKeys, work.position(num_rows - 1) + 1);
  const int64_t low = larger(split * kSplitKeys, item_low);
  const int64_t high = smaller((split + 1) * kSplitKeys, item_high);
  const bool small_blocks = args.block_size < kSubtile;
  const bool widened = !kDots && T != CacheType::kF32 && num_rows > kTileRows && !small_blocks;
  start_split(work);
  KeyTile found = {}, next = {};
  bool saw_all = false;  // every row all keys of the tile before
  const auto find = [&](int64_t first) {
    return find_tile(work.blocks, first, larger(item_low - first, 0), smaller(item_high - first, kKeyTile));
  };
  const int64_t begin = low / kKeyTile * kKeyTile;
  if (!small_blocks && low < high) next = find(begin);
  for (int64_t first = begin; first < high; first += kKeyTile) {
    const int64_t tile_low = larger(low - first, 0), tile_high = smaller(high - first, kKeyTile);
    if (small_blocks) {
      found = next = gather_tile<T>(work.blocks, first, tile_low, tile_high, scratch);
    } else {
      found = next;
      if (first + kKeyTile < item_high) next = find(first + kKeyTile);  // of the next split, too: to be prefetched
      if (widened) found = widen_tile<T>(found, args.head_dim, tile_low, tile_high, scratch);
    }
    const bool sees_all = window == 0 && first + kKeyTile <= work.position(0) + 1;
    for (int64_t r = 0; r < num_rows && !(sees_all && saw_all); ++r) {
      const int64_t position = scratch.rows[r].position;
      scratch.rows[r].high = larger(0, smaller(kKeyTile, position + 1 - first));
      scratch.rows[r].low =
          window > 0 ? smaller(kKeyTile, larger(0, first_seen(position, window, args.chunked) - first)) : 0;
    }
    saw_all = sees_all;
    for (int64_t r = 0; r < num_rows; r += kTileRows) {
      const int count = static_cast<int>(smaller(kTileRows, num_rows - r));
      if (scratch.rows[r + count - 1].high == 0 || scratch.rows[r].low == kKeyTile) continue;
      if (widened)
        attend_some<CacheType::kF32, kScaled, false>(args, found, found, count, static_cast<int>(r), scratch);
      else
        attend_some<T, kScaled, kDots>(args, found, r == 0 ? next : found, count, static_cast<int>(r), scratch);
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
  if (args.cache == CacheType::kE4M3) factor *= element_factor<CacheType::kE4M3>;
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

template <CacheType T, bool kDots>
void run_item(const Work& work, const Step& step) {
  const AttentionArgs& args = work.args;
  Scratch& scratch = work.scratch;
  load_queries<T, kDots>(work, step);
  const bool partial = work.item.partial >= 0;
  int64_t row = work.item.partial;
  for (int64_t split = work.item.first_split; split < work.item.last_split; ++split) {
    attend_split<T, kDots>(work, split);
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
        run_item<CacheType::kF32, false>(work, step);
        break;
      case CacheType::kBF16:
        if (args.precision == MatmulPrecision::kBFloat16)
          run_item<CacheType::kBF16, kHasDots<CacheType::kBF16>>(work, step);
        else
          run_item<CacheType::kBF16, false>(work, step);
        break;
      case CacheType::kI8:
        run_item<CacheType::kI8, kHasDots<CacheType::kI8>>(work, step);
        break;
      case CacheType::kE4M3:
        run_item<CacheType::kE4M3, false>(work, step);
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
  const int64_t kv_width = args.writes ? 2 * args.num_kv_heads * args.head_dim : 0;
  // Tokens of a prompt share the cache's lines: threads that take them in turns would pull those out of one another's caches.
  const int64_t grain = step.rows >= kSubtile * 4 * team.count() ? kSubtile : 1;
  for (int64_t first = team.take(grain); first < step.rows; first = team.take(grain)) {
    for (int64_t t = first; t < smaller(first + grain, step.rows); ++t) {
      float* row = qkv + t * args.qkv.stride;
      if (t + kRowsAhead < step.rows) prefetch_floats(row + kRowsAhead * args.qkv.stride + query_width(args), kv_width);
      prepare_row(args, row, rotation ? rotation + t * args.rotation.stride : nullptr, plan.slots[t]);
      if (args.attends && args.length_floor > 0) scale_queries(args, row, step.positions[t]);
    }
  }
}

std::size_t attend_scratch(const AttentionArgs& args, int64_t, int threads) {
  return threads == 1 ? 0 : static_cast<std::size_t>(kMaxPartialRows * partial_stride(args.head_dim)) * sizeof(float);
}

}  // namespace

extern const AttentionKernels kAttention;
const AttentionKernels kAttention = {prepare, attend, attend_scratch};

}  // namespace quire::QUIRE_ISA
