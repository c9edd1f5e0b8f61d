// Paged attention. Compiled once for each instruction set.
//
// Sums over keys are made in an order that absolute positions alone decide: tiles of kKeyTile keys with a running
// maximum, started afresh every kSplitKeys keys, the splits' results merged from the first to the last. A tile or split
// in which a row sees nothing changes nothing of that row's bits, so that it does not matter which others come along.
#include "attention_dots.h"
#include "attention_items.h"
#include "attention_write.h"

namespace quire::QUIRE_ISA {
namespace {

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
  SplitResults results;
  alignas(64) RowState rows[kItemRows];
};

// A tile of it; scaled: with scales.
TileMemory tile_memory(Scratch& scratch, bool scaled) {
  return {reinterpret_cast<std::byte*>(scratch.keys), reinterpret_cast<std::byte*>(scratch.values),
          scaled ? scratch.key_scales : nullptr, scaled ? scratch.value_scales : nullptr};
}

using Work = HeadWork<Scratch>;

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
  KeyTile wide = tile_in(tile_memory(scratch, false), depth, CacheType::kF32);
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
    (sees_whole(rows, count, args.soft_cap) ? dot_weigh_rows<T, true> : dot_weigh_rows<T, false>)(
        tile, count, args.soft_cap, scratch.scores, rows, decay, scratch.weight_factors, scratch.weights);
    dot_value_rows<T, R>(scratch.weights, tile, next, low, high, args.head_dim, decay, scratch.weight_factors, sums);
  } else {
    score_rows<T, R>(query, tile, next, low, high, args.head_dim, scratch.scores);
    weigh_rows<kScaled>(tile, count, args.soft_cap, scratch.scores, rows, decay);
    value_rows<T, R>(scratch.scores, tile, next, low, high, args.head_dim, decay, sums);
  }
}

// Rows that are computed for `count` rows: heights of register tiles.
int64_t computed_rows(int64_t count) {
  if (count <= 4) return count;
  if (kTileRows > 4 && count <= 6) return 6;
  return kTileRows > 6 && count <= 8 ? 8 : kTileRows;
}

// The rows of an item and those that fill its last register tile up.
int64_t with_filling(int64_t rows) {
  const int64_t whole = rows / kTileRows * kTileRows;
  return whole + computed_rows(rows - whole);
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
  visit_queries(work, step, [&](int64_t r, const float* from) {
    load_query<T, kDots>(args, from, work.scratch.query + r * kRowStride);
  });
  // Rows that only fill a register tile up.
  Scratch& scratch = work.scratch;
  for (int64_t r = work.item.rows; r < with_filling(work.item.rows); ++r) {
    std::memset(scratch.query + r * kRowStride, 0, kRowStride * sizeof(float));
    std::memset(scratch.weights + r % kTileRows * kWeightWords * kWordBytes, 0, kWeightWords * kWordBytes);
    scratch.weight_factors[r % kTileRows] = 0;
  }
}

void start_split(const Work& work) {
  Scratch& scratch = work.scratch;
  for (int64_t r = 0; r < with_filling(work.item.rows); ++r) {
    scratch.rows[r].maximum = kNothing;
    store(scratch.rows[r].weight_sum, zero());
    for (int64_t d = 0; d < work.args.head_dim; d += kLanes) store(scratch.sums + r * kRowStride + d, zero());
  }
}

KeyTile first_tile(const Work& work) {
  const ItemKeys keys(work);
  const int64_t low = larger(work.item.first_split * kSplitKeys, keys.low), first = low / kKeyTile * kKeyTile;
  return find_tile(work.blocks, first, low - first, smaller(keys.high - first, kKeyTile));
}

// What a tile of fewer keys did not ask for, while it was multiplied, of the values that come next.
template <CacheType T>
void prefetch_values(const KeyTile& next, int64_t from, int64_t depth) {
  constexpr int64_t kElements = word_elements(T);
  for (int64_t key = from / kElements * kElements; key < kKeyTile; key += kElements)
    for (int64_t byte = 0; byte < depth * kWordBytes; byte += 64)
      prefetch_near(next.values[key / kSubtile] + key % kSubtile / kElements * depth * kWordBytes + byte);
}

template <CacheType T, bool kDots>
void attend_split(const Work& work, int64_t split) {
  constexpr bool kScaled = T == CacheType::kI8;
  const AttentionArgs& args = work.args;
  Scratch& scratch = work.scratch;
  const int64_t num_rows = work.item.rows, window = args.window;
  const ItemKeys keys(work);
  const int64_t low = larger(split * kSplitKeys, keys.low), high = smaller((split + 1) * kSplitKeys, keys.high);
  const bool small_blocks = args.block_size < kSubtile;
  const bool widened = !kDots && T != CacheType::kF32 && num_rows > kTileRows && !small_blocks;
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
    if (kDots && work.following != nullptr && !small_blocks && tile_high < kKeyTile)
      prefetch_values<T>(next, tile_high, args.head_dim);
  }
}

template <CacheType T, bool kDots>
void run_item(const Work& work, const Step& step) {
  load_queries<T, kDots>(work, step);
  run_splits(work, step, [&](int64_t split) {
    attend_split<T, kDots>(work, split);
    for (int64_t r = 0; r < work.item.rows; ++r) {
      work.scratch.results.maximum[r] = work.scratch.rows[r].maximum;
      work.scratch.results.weight[r] = sum_lanes(load(work.scratch.rows[r].weight_sum));
    }
  });
}

void attend(const AttentionArgs& args, const Step& step, Team& team) {
  run_items<Scratch>(args, step, team, [&](const Work& work) {
    switch (args.cache) {
      case CacheType::kF32:
        return run_item<CacheType::kF32, false>(work, step);
      case CacheType::kBF16:
        if (args.precision == MatmulPrecision::kBFloat16)
          return run_item<CacheType::kBF16, kHasDots<CacheType::kBF16>>(work, step);
        return run_item<CacheType::kBF16, false>(work, step);
      case CacheType::kI8:
        return run_item<CacheType::kI8, kHasDots<CacheType::kI8>>(work, step);
      case CacheType::kE4M3:
        return run_item<CacheType::kE4M3, false>(work, step);
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
