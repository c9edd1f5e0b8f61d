// Paged attention. Compiled once for each instruction set; one that has another below it has what it multiplies as stored alone.
//
// Sums over keys are made in an order that absolute positions alone decide: tiles of kKeyTile keys with a running
// maximum, started afresh every kSplitKeys keys, the splits' results merged from the first to the last. Where elements are
// multiplied as they are stored (attention_dots.h), a split has one maximum. A tile or split in which a row sees nothing
// changes nothing of that row's bits, so that it does not matter which others come along.
#include "attention_dots.h"
#include "attention_items.h"
#if !defined(QUIRE_BELOW)
#include "attention_write.h"
#endif

namespace quire::QUIRE_ISA {
namespace {

// Bytes of a split or tile of keys (or of values) in a thread's memory: a tile, widened or put together from small blocks, or a
// split of elements of two bytes, put together.
constexpr int64_t kKeysBytes = kMaxHeadDim * larger(kKeyTile * 4, kSplitKeys * 2);

// A thread's working memory.
struct Scratch {
  alignas(64) float query[kItemRows * kRowStride];
  float sums[kItemRows * kRowStride];       // of the current split
  float totals[kItemRows * kRowStride];     // of the splits before
  float scores[kTileRows * kScoreStride];   // of a split, or (kKeyTile a row) of a tile
  float weight_factors[16];
  std::byte weights[kTileRows * kWeightWords * kWordBytes];  // in words
  alignas(64) std::byte keys[kKeysBytes];
  std::byte values[kKeysBytes];
  float key_scales[kSplitKeys];
  float value_scales[kSplitKeys];
  SplitResults results;
  alignas(64) RowKeys rows[kItemRows];      // of the current split, where it has one maximum
  RowState states[kItemRows];               // of the current tile, where each has one
};

// Memory of it for keys and values; scaled: with scales.
TileMemory tile_memory(Scratch& scratch, bool scaled) {
  return {scratch.keys, scratch.values, scaled ? scratch.key_scales : nullptr, scaled ? scratch.value_scales : nullptr};
}

using Work = HeadWork<Scratch>;

// Keys of some subtiles, as floats: [head_dim][16]; values: [16][head_dim].
template <CacheType T>
KeyTile widen_tile(const KeyTile& tile, int64_t depth, int64_t low, int64_t high, Scratch& scratch) {
  constexpr int kElements = word_elements(T);
  for (int64_t s = low / kSubtile; s * kSubtile < high; ++s) {
    float* keys = reinterpret_cast<float*>(scratch.keys) + s * kSubtile * depth;
    for (int64_t d = 0; d < depth; d += kElements)
      for (int64_t lane = 0; lane < kSubtile; lane += kLanes) {
        const vi words = load_words(tile.keys[s] + (d / kElements * kSubtile + lane) * kWordBytes);
        for (int place = 0; place < kElements; ++place) {
          vf element = word_element<T>(words, place);
          if (d + place == 0) element += first_score<T>(words);
          store(keys + (d + place) * kSubtile + lane, element);
        }
      }
    float* values = reinterpret_cast<float*>(scratch.values) + s * kSubtile * depth;
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
  KeyTile wide = tile_in(tile_memory(scratch, false), depth, CacheType::kF32);
  for (int64_t s = 0; s < kSubtiles; ++s) {
    wide.key_scales[s] = tile.key_scales[s];
    wide.value_scales[s] = tile.value_scales[s];
  }
  return wide;
}

// `count` rows (of which R are computed) against a tile. kScaled: keys and values have scales.
template <CacheType T, bool kScaled, int R>
void attend_rows(const AttentionArgs& args, const KeyTile& tile, const KeyTile& next, int count, int first,
                 Scratch& scratch) {
  RowState* rows = scratch.states + first;
  const int64_t low = rows[0].low, high = rows[count - 1].high;
  const float* query = scratch.query + first * kRowStride;
  float* sums = scratch.sums + first * kRowStride;
  float decay[16];
  score_rows<T, R>(query, tile, next, low, high, args.head_dim, scratch.scores);
  weigh_rows<kScaled>(tile, count, args.soft_cap, scratch.scores, rows, decay);
  value_rows<T, R>(scratch.scores, tile, next, low, high, args.head_dim, decay, sums);
}

template <CacheType T>
void load_query(const AttentionArgs& args, const float* from, float* to) {
#if defined(QUIRE_BELOW)
  Dots<T>::load_query(from, args.scale, args.head_dim, to);
#else
  const float scale = args.scale * element_factor<T>;
  int64_t d = 0;
  for (; d + kLanes <= args.head_dim; d += kLanes) store(to + d, load(from + d) * scale);
  for (; d < args.head_dim; ++d) to[d] = from[d] * scale;
#endif
}

template <CacheType T>
void load_queries(const Work& work, const Step& step) {
  const AttentionArgs& args = work.args;
  visit_queries(work, step, [&](int64_t r, const float* from) {
    load_query<T>(args, from, work.scratch.query + r * kRowStride);
  });
  // Rows that only fill a register tile up: what is computed of them is not used.
  for (int64_t r = work.item.rows; r < with_filling(work.item.rows); ++r)
    std::memset(work.scratch.query + r * kRowStride, 0, kRowStride * sizeof(float));
}

#if !defined(QUIRE_BELOW)

void start_split(const Work& work) {
  Scratch& scratch = work.scratch;
  for (int64_t r = 0; r < with_filling(work.item.rows); ++r) {
    scratch.states[r].maximum = kNothing;
    store(scratch.states[r].weight_sum, zero());
    for (int64_t d = 0; d < work.args.head_dim; d += kLanes) store(scratch.sums + r * kRowStride + d, zero());
  }
}

KeyTile first_tile(const Work& work) {
  const ItemKeys keys(work);
  const int64_t low = larger(work.item.first_split * kSplitKeys, keys.low), first = low / kKeyTile * kKeyTile;
  return find_tile(work.blocks, first, low - first, smaller(keys.high - first, kKeyTile));
}

// A split, tile by tile.
template <CacheType T>
void attend_tiles(const Work& work, int64_t split) {
  constexpr bool kScaled = T == CacheType::kI8;
  const AttentionArgs& args = work.args;
  Scratch& scratch = work.scratch;
  const int64_t num_rows = work.item.rows, window = args.window;
  const ItemKeys keys(work);
  const int64_t low = larger(split * kSplitKeys, keys.low), high = smaller((split + 1) * kSplitKeys, keys.high);
  const bool small_blocks = args.block_size < kSubtile;
  const bool widened = T != CacheType::kF32 && num_rows > kTileRows && !small_blocks;
  start_split(work);
  KeyTile found = {}, next = {};
  bool saw_all = false;  // every row all keys of the tile before
  const auto find = [&](int64_t first) {
    return find_tile(work.blocks, first, larger(keys.low - first, 0), smaller(keys.high - first, kKeyTile));
  };
  const int64_t begin = low / kKeyTile * kKeyTile;
  if (!small_blocks && low < high) next = find(begin);
  for (int64_t first = begin; first < high; first += kKeyTile) {
    const int64_t tile_low = larger(low - first, 0), tile_high = smaller(high - first, kKeyTile);
    if (small_blocks) {
      found = next = gather_tile<T>(work.blocks, first, tile_low, tile_high, tile_memory(scratch, kScaled));
    } else {
      found = next;
      if (first + kKeyTile < keys.high)
        next = find(first + kKeyTile);  // of the next split, too: to be prefetched
      else if (work.following != nullptr)
        next = first_tile(*work.following);
      if (widened) found = widen_tile<T>(found, args.head_dim, tile_low, tile_high, scratch);
    }
    const bool sees_all = window == 0 && first + kKeyTile <= work.position(0) + 1;
    for (int64_t r = 0; r < num_rows && !(sees_all && saw_all); ++r) {
      const int64_t position = scratch.rows[r].position;
      scratch.states[r].high = larger(0, smaller(kKeyTile, scratch.rows[r].last + 1 - first));
      scratch.states[r].low =
          window > 0 ? smaller(kKeyTile, larger(0, first_seen(position, window, args.chunked) - first)) : 0;
    }
    saw_all = sees_all;
    for (int64_t r = 0; r < num_rows; r += kTileRows) {
      const int count = static_cast<int>(smaller(kTileRows, num_rows - r));
      if (scratch.states[r + count - 1].high == 0 || scratch.states[r].low == kKeyTile) continue;
      with_height(count, [&]<int R>() {
        if (widened)
          attend_rows<CacheType::kF32, kScaled, R>(args, found, found, count, static_cast<int>(r), scratch);
        else
          attend_rows<T, kScaled, R>(args, found, r == 0 ? next : found, count, static_cast<int>(r), scratch);
      });
    }
  }
  for (int64_t r = 0; r < num_rows; ++r) {
    scratch.results.maximum[r] = scratch.states[r].maximum;
    scratch.results.weight[r] = sum_lanes(load(scratch.states[r].weight_sum));
  }
}

#else

// The memory that is read behind a split: the first blocks of the item's next one, or of the item that comes next.
void find_following(const Work& work, int64_t number, const Split& split, const std::byte** blocks) {
  const bool within = number + 1 < work.item.last_split;
  if (work.args.block_size < kSubtile || (!within && work.following == nullptr)) {
    for (int64_t i = 0; i < kBlocksAhead; ++i) blocks[i] = split.keys[split.low / kSubtile];  // nothing
    return;
  }
  const Work& next_work = within ? work : *work.following;
  const Split next(next_work, within ? number + 1 : next_work.item.first_split);
  const int64_t first = next.low / kSubtile, count = (next.high - 1) / kSubtile + 1 - first;
  for (int64_t i = 0; i < kBlocksAhead; ++i) {
    const int64_t subtile = first + smaller(i, 2 * count - 1) % count;
    blocks[i] = next_work.blocks.subtile(next.start + subtile * kSubtile, i >= count);
  }
}

// A split at a time, in dot products.
template <CacheType T>
void attend_dots(const Work& work, int64_t number) {
  const AttentionArgs& args = work.args;
  Scratch& scratch = work.scratch;
  const int64_t num_rows = work.item.rows, depth = args.head_dim;
  Split split(work, number);
  if (split.low >= split.high) return split.skip_rows(work, 0, num_rows);
  split.find<T>(work, tile_memory(scratch, T == CacheType::kI8));
  split.note_rows(work, scratch.rows);
  const std::byte *again[kBlocksAhead], *following[kBlocksAhead];
  for (int64_t i = 0; i < kBlocksAhead; ++i)
    again[i] = split.keys[smaller(split.low / kSubtile + i, (split.high - 1) / kSubtile)];
  find_following(work, number, split, following);
  for (int64_t r = 0; r < num_rows; r += kTileRows) {
    const int count = static_cast<int>(smaller(kTileRows, num_rows - r));
    const RowKeys* rows = scratch.rows + r;
    const int64_t low = rows[0].low, high = rows[count - 1].high;
    if (low >= high) {
      split.skip_rows(work, r, count);
      continue;
    }
    const Ahead ahead(split, low, high, r + kTileRows < num_rows ? again : following);
    const float* query = scratch.query + r * kRowStride;
    with_height(count, [&]<int R>() {
      dot_score_rows<T, R>(query, split, ahead, low, high, depth, scratch.scores);
      dot_weigh_rows<T>(split, rows, count, args.soft_cap, scratch.scores, scratch.weights, scratch.weight_factors,
                        scratch.results, r);
      dot_value_rows<T, R>(scratch.weights, split, ahead, low, high, depth, scratch.weight_factors,
                           scratch.sums + r * kRowStride);
    });
  }
}

#endif

template <CacheType T>
void run_item(const Work& work, const Step& step) {
  load_queries<T>(work, step);
  run_splits(work, step, [&](int64_t split) {
#if defined(QUIRE_BELOW)
    attend_dots<T>(work, split);
#else
    attend_tiles<T>(work, split);
#endif
  });
}

#if defined(QUIRE_BELOW)

void attend(const AttentionArgs& args, const Step& step, Team& team) {
  if (!is_own(args)) return QUIRE_BELOW::kAttention.attend(args, step, team);
  run_items<Scratch>(args, step, team, [&](const Work& work) { run_item<kOwnCache>(work, step); });
}

#else

void attend(const AttentionArgs& args, const Step& step, Team& team) {
  run_items<Scratch>(args, step, team, [&](const Work& work) {
    switch (args.cache) {
      case CacheType::kF32:
        return run_item<CacheType::kF32>(work, step);
      case CacheType::kBF16:
        return run_item<CacheType::kBF16>(work, step);
      case CacheType::kI8:
        return run_item<CacheType::kI8>(work, step);
      case CacheType::kE4M3:
        return run_item<CacheType::kE4M3>(work, step);
    }
  });
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
      if (args.query_heads > 0 && args.length_floor > 0) scale_queries(args, row, step.columns[kSlotPositions][t]);
    }
  }
}

std::size_t attend_scratch(const AttentionArgs& args, int64_t, int threads) {
  return threads == 1 ? 0 : static_cast<std::size_t>(kMaxPartialRows * partial_stride(args.head_dim)) * sizeof(float);
}

#endif

}  // namespace

extern const AttentionKernels kAttention;
const AttentionKernels kAttention = {prepare, attend, attend_scratch};

}  // namespace quire::QUIRE_ISA
