// Paged attention over a bfloat16 cache with products in bfloat16, on AMX tiles. Other caches and precisions are left to
// the AVX-512 kernels.
//
// An item's rows are taken in blocks of 32 (two tiles), and a split of kSplitKeys keys at a time: the block's scores
// with all of the split's keys, their softmax, and the weighted sum of values, which stays in tile registers from the
// split's first key to its last. Nothing is rescaled within a split; splits are merged as attention.cpp merges them.
// Keys lie in the cache as the right operand of a tile product. Values are copied, so that 32 of them fill a tile
// instead of 16, and so that what lies beside an item's first and last key (which may be anything, and 0 times that is
// not always 0) is zero.
//
// A row's products do not depend on the other rows of its tile, a key of weight zero adds zero, and the borders between
// tiles are at absolute positions: a row has the same bits alone, in a batch and in any chunk.
#include "amx_tiles.h"
#include "attention_dots.h"

namespace quire::QUIRE_ISA {
namespace {

// A tile of values has kStepKeys keys, pairs in 16 rows.
constexpr int64_t kBlockRows = 2 * kAmxRows;
constexpr int64_t kWords = kAmxRowBytes / kWordBytes;  // of a tile's row
// Rows of matrices lie an odd number of cache lines apart, so that a tile's rows are not on the same cache sets.
constexpr int64_t kQueryStride = kMaxHeadDim + 32, kWeightStride = kSplitKeys + 32;
static_assert(kStepKeys == 2 * kAmxRows);

// A thread's working memory.
struct Scratch {
  alignas(64) uint16_t query[kItemRows * kQueryStride];
  float scores[kBlockRows * kScoreStride];
  uint16_t weights[kBlockRows * kWeightStride];
  float sums[kItemRows * kRowStride];    // of the current split
  float totals[kItemRows * kRowStride];  // of the splits before
  uint16_t values[kSplitKeys * kMaxHeadDim];  // tiles, see PackedValues
  uint16_t tile_keys[kSplitKeys * kMaxHeadDim];  // of blocks that are smaller than a subtile
  uint16_t tile_values[kSplitKeys * kMaxHeadDim];
  SplitResults results;
  RowKeys rows[kItemRows];
};
using Work = HeadWork<Scratch>;

// How a head's elements are cut into tiles: `words` pairs of a key's elements (a divisor of their number), `columns` of
// a value's.
struct HeadTiles {
  int64_t words, steps;
  int64_t columns, num_columns;
  AmxConfig for_scores, for_values;
  bool differ;  // the two

  // rows: of an item.
  HeadTiles(int64_t depth, int64_t rows) : words(smaller(kWords, depth / 2)) {
    while (depth / 2 % words != 0) --words;
    steps = depth / 2 / words;
    columns = depth % kWords == 0 ? kWords : kWords / 2;
    num_columns = depth / columns;
    for_scores = shapes(smaller(rows, kAmxRows), words, kSubtile);
    for_values = shapes(smaller(rows, kAmxRows), kWords, columns);
    differ = words != kWords || columns != kSubtile;
  }

  // Registers 0 .. 3: sums, 4 and 5: rows, 6 and 7: keys or values. An item of fewer rows than a tile has the tiles for them;
  // else the rows behind the last one are computed and not used.
  static AmxConfig shapes(int64_t rows, int64_t words, int64_t columns) {
    AmxConfig config;
    for (int tile = 0; tile < 8; ++tile) {
      config.rows[tile] = static_cast<uint8_t>(tile < 6 ? rows : words);
      config.row_bytes[tile] = static_cast<uint16_t>((tile == 4 || tile == 5 ? words : columns) * kWordBytes);
    }
    return config;
  }
};

// Right operands of scores: column: 16 keys, step: `words` of their words.
struct Keys {
  static constexpr int64_t kRowBytes = kSubtile * kWordBytes;
  const std::byte* const* subtiles;
  int64_t step_bytes;

  template <int kCount>
  void prepare(int64_t, int64_t) const {}
  const std::byte* at(int64_t step, int64_t column) const { return subtiles[column] + step * step_bytes; }
};

// Right operands of values: column: kColumns elements, step: 32 keys, of which there are two times 16 in the cache. Keys that
// nothing of the item sees are zeros.
template <int64_t kColumns>
QUIRE_INLINE void pack_values(const Split& split, int64_t depth, int64_t step, int64_t column, std::byte* to) {
  constexpr int64_t kBytes = kColumns * kWordBytes, kSubtileWords = kSubtile / 2;
  const int64_t first = step * kStepKeys;
  const bool whole = first >= split.low && first + kStepKeys <= split.high;
  for (int64_t half = 0; half < 2; ++half) {
    const std::byte* from = split.values[2 * step + half] + column * kBytes;
    for (int64_t word = 0; word < kSubtileWords; ++word, from += depth * kWordBytes, to += kBytes) {
      int32_t mask = -1;
      if (!whole) {
        const int64_t key = first + half * kSubtile + word * 2;
        const bool has_low = key >= split.low && key < split.high, has_high = key + 1 >= split.low && key + 1 < split.high;
        mask = (has_low ? 0xffff : 0) | (has_high ? static_cast<int32_t>(0xffff0000u) : 0);
      }
      const vi words = mask == 0 ? vi{} : (kColumns == kLanes ? load_words(from) : load_half(from)) & mask;
      std::memcpy(to, &words, kBytes);
    }
  }
}

// Those of a split for an item of one block of rows, which are packed a step before they are needed (a tile's load waits for
// stores that are on their way) ...
template <int64_t kColumns>
struct PassingValues {
  static constexpr int64_t kRowBytes = kColumns * kWordBytes;
  const Split& split;
  int64_t depth, first_step;
  std::byte* buffers;  // of two steps

  template <int kCount>
  QUIRE_INLINE void prepare(int64_t step, int64_t column) const {
    for (int64_t i = column; i < column + kCount; ++i)
      pack_values<kColumns>(split, depth, first_step + step, i, buffer(step, i));
  }
  const std::byte* at(int64_t step, int64_t column) const { return buffer(step, column); }
  std::byte* buffer(int64_t step, int64_t column) const {
    return buffers + (step % 2 * 4 + column % 4) * kAmxRows * kRowBytes;
  }
};

// ... and for more, which are packed once.
template <int64_t kColumns>
struct PackedValues {
  static constexpr int64_t kRowBytes = kColumns * kWordBytes;
  const std::byte* values;
  int64_t num_columns;

  template <int kCount>
  void prepare(int64_t, int64_t) const {}
  const std::byte* at(int64_t step, int64_t column) const {
    return values + (step * num_columns + column) * kAmxRows * kRowBytes;
  }
};

// A left operand, and where the sums go: bytes or floats from row to row, from step to step and from column to column.
struct Rows {
  const uint16_t* left;
  int64_t stride, step;
  float* sums;
  int64_t sum_stride, sum_columns;
};

// sums [kBlocks * 16][kColumns tiles] = left [kBlocks * 16][steps] x right from `column` on. The sums of a row and a column are
// made in the order of the steps, whatever else is in the registers.
template <int kBlocks, int kColumns, class Right>
void multiply(const Rows& rows, const Right& right, int64_t column, int64_t steps) {
  static_assert(kBlocks * kColumns <= 4);
  const int64_t stride = rows.stride * static_cast<int64_t>(sizeof(uint16_t));
  const uint16_t* left = rows.left;
  amx_zero<0>();
  if constexpr (kBlocks * kColumns > 1) amx_zero<1>();
  if constexpr (kBlocks * kColumns > 2) amx_zero<2>(), amx_zero<3>();
  right.template prepare<kColumns>(0, column);
  for (int64_t step = 0; step < steps; ++step, left += rows.step) {
    if (step + 1 < steps) right.template prepare<kColumns>(step + 1, column);
    amx_load<4>(left, stride);
    if constexpr (kBlocks == 2) amx_load<5>(left + kAmxRows * rows.stride, stride);
    amx_load<6>(right.at(step, column), Right::kRowBytes);
    amx_dot_bf16<0, 4, 6>();
    if constexpr (kBlocks == 2) amx_dot_bf16<kColumns, 5, 6>();
    if constexpr (kColumns > 1) {
      amx_load<7>(right.at(step, column + 1), Right::kRowBytes);
      amx_dot_bf16<1, 4, 7>();
      if constexpr (kBlocks == 2) amx_dot_bf16<3, 5, 7>();
    }
    if constexpr (kColumns > 2) {
      amx_load<6>(right.at(step, column + 2), Right::kRowBytes);
      amx_dot_bf16<2, 4, 6>();
      amx_load<7>(right.at(step, column + 3), Right::kRowBytes);
      amx_dot_bf16<3, 4, 7>();
    }
  }
  float* sums = rows.sums + column * rows.sum_columns;
  const int64_t bytes = rows.sum_stride * static_cast<int64_t>(sizeof(float));
  amx_store<0>(sums, bytes);
  if constexpr (kColumns > 1) amx_store<1>(sums + rows.sum_columns, bytes);
  if constexpr (kColumns > 2) {
    amx_store<2>(sums + 2 * rows.sum_columns, bytes);
    amx_store<3>(sums + 3 * rows.sum_columns, bytes);
  }
  if constexpr (kBlocks == 2) {
    float* below = sums + kAmxRows * rows.sum_stride;
    amx_store<kColumns>(below, bytes);
    if constexpr (kColumns > 1) amx_store<3>(below + rows.sum_columns, bytes);
  }
}

// `count` columns with one tile of rows or two.
template <class Right>
void multiply_columns(bool both, const Rows& rows, const Right& right, int64_t count, int64_t steps) {
  int64_t column = 0;
  const auto some = [&]<int kBlocks, int kColumns>() {
    multiply<kBlocks, kColumns>(rows, right, column, steps);
    column += kColumns;
  };
  if (both) {
    while (count - column >= 2) some.template operator()<2, 2>();
    if (count > column) some.template operator()<2, 1>();
  } else {
    while (count - column >= 4) some.template operator()<1, 4>();
    if (count - column >= 2) some.template operator()<1, 2>();
    if (count > column) some.template operator()<1, 1>();
  }
}

// Rows first .. first + count - 1 against a split.
void attend_block(const Work& work, const HeadTiles& tiles, const Split& split, int64_t first, int64_t count) {
  const AttentionArgs& args = work.args;
  Scratch& scratch = work.scratch;
  const RowKeys* rows = scratch.rows + first;
  float* sums = scratch.sums + first * kRowStride;
  const int64_t low = rows[0].low, high = rows[count - 1].high;
  if (low >= high) return split.skip_rows(work, first, count);
  const bool both = count > kAmxRows;
  const int64_t first_subtile = low / kSubtile, last_subtile = (high + kSubtile - 1) / kSubtile;
  if (tiles.differ) amx_configure(tiles.for_scores);
  multiply_columns(both,
                   {scratch.query + first * kQueryStride, kQueryStride, 2 * tiles.words,
                    scratch.scores + first_subtile * kSubtile, kScoreStride, kSubtile},
                   Keys{split.keys + first_subtile, tiles.words * Keys::kRowBytes}, last_subtile - first_subtile,
                   tiles.steps);
  const int64_t begin = first_step(rows[0]), end = last_step(rows[count - 1]);
  for (int64_t r = 0; r < count; ++r)
    weigh_row<Pairs>(rows[r], args.soft_cap, begin, end, Pairs::WeightScale{}, scratch.scores + r * kScoreStride,
                     reinterpret_cast<std::byte*>(scratch.weights + r * kWeightStride), scratch.results.maximum[first + r],
                     scratch.results.weight[first + r]);
  if (tiles.differ) amx_configure(tiles.for_values);
  const Rows weights{scratch.weights + begin, kWeightStride, kStepKeys, sums, kRowStride, tiles.columns};
  const int64_t first_step = begin / kStepKeys, steps = (end - begin) / kStepKeys;
  const auto weigh_values = [&]<int64_t kColumns>() {
    auto* memory = reinterpret_cast<std::byte*>(scratch.values);
    if (work.item.rows <= kBlockRows)
      return multiply_columns(both, weights, PassingValues<kColumns>{split, args.head_dim, first_step, memory},
                              tiles.num_columns, steps);
    const PackedValues<kColumns> values{memory + first_step * kStepKeys * args.head_dim * 2, tiles.num_columns};
    multiply_columns(both, weights, values, tiles.num_columns, steps);
  };
  if (tiles.columns == kWords) return weigh_values.template operator()<kWords>();
  weigh_values.template operator()<kWords / 2>();
}

// All values of a split for PackedValues.
template <int64_t kColumns>
void pack_split(const Split& split, int64_t depth, int64_t num_columns, uint16_t* to) {
  constexpr int64_t kTileBytes = kAmxRows * kColumns * kWordBytes;
  for (int64_t step = split.low / kStepKeys; step * kStepKeys < split.high; ++step)
    for (int64_t column = 0; column < num_columns; ++column)
      pack_values<kColumns>(split, depth, step, column,
                            reinterpret_cast<std::byte*>(to) + (step * num_columns + column) * kTileBytes);
}

void attend_split(const Work& work, const HeadTiles& tiles, int64_t number) {
  Scratch& scratch = work.scratch;
  const int64_t num_rows = work.item.rows, depth = work.args.head_dim;
  Split split(work, number);
  split.find<CacheType::kBF16>(work, {reinterpret_cast<std::byte*>(scratch.tile_keys),
                                      reinterpret_cast<std::byte*>(scratch.tile_values), nullptr, nullptr});
  if (num_rows > kBlockRows && split.low < split.high) {
    if (tiles.columns == kWords)
      pack_split<kWords>(split, depth, tiles.num_columns, scratch.values);
    else
      pack_split<kWords / 2>(split, depth, tiles.num_columns, scratch.values);
  }
  split.note_rows(work, scratch.rows);
  for (int64_t first = 0; first < num_rows; first += kBlockRows)
    attend_block(work, tiles, split, first, smaller(kBlockRows, num_rows - first));
}

void run_item(const Work& work, const Step& step) {
  const AttentionArgs& args = work.args;
  Scratch& scratch = work.scratch;
  const HeadTiles tiles(args.head_dim, work.item.rows);
  amx_configure(tiles.for_scores);
  visit_queries(work, step, [&](int64_t r, const float* from) {
    round_scaled_bf16(from, args.scale, args.head_dim, scratch.query + r * kQueryStride);
  });
  run_splits(work, step, [&](int64_t split) { attend_split(work, tiles, split); });
}

void attend(const AttentionArgs& args, const Step& step, Team& team) {
  if (!is_own(args)) return QUIRE_BELOW::kAttention.attend(args, step, team);
  run_items<Scratch>(args, step, team, [&](const Work& work) { run_item(work, step); });
  amx_release();
}

}  // namespace

extern const AttentionKernels kAttention;
const AttentionKernels kAttention = {prepare, attend, attend_scratch};

}  // namespace quire::QUIRE_ISA
