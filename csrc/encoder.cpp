// Attention in both directions over the rows of a step. Compiled once for each instruction set.
//
// A row's sums run over the keys of its own sequence, from the first to the last that it sees, in tiles of kKeyTile
// keys with a running maximum: positions in the sequence alone decide their order. In products of bfloat16 pairs
// (attention_dots.h) splits of kSplitKeys keys have one maximum each and are merged in their order.
#include "encoder.h"

#include "attention_dots.h"
#include "head_rows.h"

namespace quire::QUIRE_ISA {
namespace {

typedef float v4 __attribute__((vector_size(16)));
// Tokens ahead of the one that is brought to scratch: rows of a step lie far apart, and in no cache.
constexpr int64_t kAhead = 16;

// A thread's working memory.
struct Scratch {
  alignas(64) float query[kEncoderRows * kRowStride];
  float sums[kEncoderRows * kRowStride];
  float scores[kTileRows * kKeyTile];
  float keys[kKeyTile * kMaxHeadDim];    // of a tile: [4][head_dim][16]
  float values[kKeyTile * kMaxHeadDim];  // [64][head_dim]
  alignas(64) RowState rows[kEncoderRows];
};
static_assert(sizeof(Scratch) <= kThreadScratch);

// Some rows of an item and one head.
struct Work {
  const EncoderArgs& args;
  EncoderItem item;
  const float* qkv;       // the sequence's first row: the head's query
  const float* rotation;  // of that row, or null
  float* out;             // of that row: the head's

  // Part 0 is the query, 1 the key, 2 the value of the token at `position`.
  const float* head(int64_t position, int64_t part) const {
    return qkv + position * args.qkv.stride + part * args.num_heads * args.head_dim;
  }
  void rotate(float* head, int64_t position) const {
    if (rotation != nullptr) rotate_head(head, rotation + position * args.rotation.stride, args.rotary_dim / 2);
  }
  // A head that is rotated, in `memory`, or where it is when nothing is.
  const float* rotated(int64_t position, int64_t part, float* memory) const;
  void expect(int64_t position, int64_t part) const {
    const float* coming = head(position + kAhead, part);
    for (int64_t d = 0; d < args.head_dim; d += kSubtile) prefetch(reinterpret_cast<const std::byte*>(coming + d));
  }
  // The keys that row r sees, [low, high), and those that some row sees.
  int64_t low(int64_t r) const { return args.window > 0 ? larger(0, item.first_row + r - args.window) : 0; }
  int64_t high(int64_t r) const {
    return args.window > 0 ? smaller(item.length, item.first_row + r + args.window + 1) : item.length;
  }
  int64_t begin() const { return low(0); }
  int64_t end() const { return high(item.rows - 1); }
};

// Eight elements at a time: a call of the library takes longer than a head.
QUIRE_INLINE void copy_head(const float* from, int64_t depth, float* to) {
  for (int64_t d = 0; d < depth; d += 8) std::memcpy(to + d, from + d, 8 * sizeof(float));
}

QUIRE_INLINE const float* Work::rotated(int64_t position, int64_t part, float* memory) const {
  const float* from = head(position, part);
  if (rotation == nullptr) return from;
  copy_head(from, args.head_dim, memory);
  rotate(memory, position);
  return memory;
}

// A row's result: its sums over the weights' sum.
QUIRE_INLINE void write_row(const Work& work, int64_t r, const float* sums, float weight) {
  const int64_t depth = work.args.head_dim;
  float* row = work.out + (work.item.first_row + r) * work.args.out.stride;
  const vf scale = broadcast(1.0f / weight);
  int64_t d = 0;
  for (; d + kLanes <= depth; d += kLanes) store(row + d, load(sums + d) * scale);
  if (d < depth) store_some(row + d, load(sums + d) * scale, depth - d);
}

void load_queries(const Work& work, Scratch& scratch) {
  const int64_t depth = work.args.head_dim, padded = with_filling(work.item.rows);
  for (int64_t r = 0; r < work.item.rows; ++r) {
    float* to = scratch.query + r * kRowStride;
    work.expect(work.item.first_row + r, 0);
    copy_head(work.head(work.item.first_row + r, 0), depth, to);
    work.rotate(to, work.item.first_row + r);
    for (int64_t d = 0; d < depth; ++d) to[d] *= work.args.scale;
  }
  // Rows that only fill a register tile up.
  for (int64_t r = work.item.rows; r < padded; ++r)
    std::memset(scratch.query + r * kRowStride, 0, kRowStride * sizeof(float));
  for (int64_t r = 0; r < padded; ++r) {
    scratch.rows[r].maximum = kNothing;
    store(scratch.rows[r].weight_sum, zero());
    for (int64_t d = 0; d < depth; d += kLanes) store(scratch.sums + r * kRowStride + d, zero());
  }
}

// Columns k .. k + 3 of a tile's keys: four heads of `depth` elements, side by side.
QUIRE_INLINE void put_columns(const float* const* heads, int64_t depth, int64_t k, float* keys) {
  float* column = keys + k / kSubtile * kSubtile * depth + k % kSubtile;
  for (int64_t d = 0; d < depth; d += 4) {
    v4 row[4], pair[4];
    for (int i = 0; i < 4; ++i) std::memcpy(&row[i], heads[i] + d, sizeof(v4));
    for (int i = 0; i < 2; ++i) {
      pair[i] = __builtin_shufflevector(row[2 * i], row[2 * i + 1], 0, 4, 1, 5);
      pair[i + 2] = __builtin_shufflevector(row[2 * i], row[2 * i + 1], 2, 6, 3, 7);
    }
    for (int i = 0; i < 4; i += 2) {
      const v4 first = __builtin_shufflevector(pair[i], pair[i + 1], 0, 1, 4, 5);
      const v4 second = __builtin_shufflevector(pair[i], pair[i + 1], 2, 3, 6, 7);
      std::memcpy(column + (d + i) * kSubtile, &first, sizeof(v4));
      std::memcpy(column + (d + i + 1) * kSubtile, &second, sizeof(v4));
    }
  }
}

// Bring keys and values of the positions first + low .. first + high - 1 to scratch. Columns of keys beside them, which
// no row sees, repeat the last one.
KeyTile pack_tile(const Work& work, Scratch& scratch, int64_t first, int64_t low, int64_t high) {
  const int64_t depth = work.args.head_dim;
  alignas(64) float rotated[4][kMaxHeadDim];
  for (int64_t k = low / 4 * 4; k < high; k += 4) {
    const float* heads[4];
    for (int i = 0; i < 4; ++i) {
      const int64_t own = smaller(larger(k + i, low), high - 1);
      heads[i] = work.rotated(first + own, 1, rotated[i]);
      work.expect(first + own, 1);
      work.expect(first + own, 2);
      copy_head(work.head(first + own, 2), depth, scratch.values + own * depth);
    }
    put_columns(heads, depth, k, scratch.keys);
  }
  KeyTile tile = {};
  for (int64_t s = 0; s < kSubtiles; ++s) {
    tile.keys[s] = reinterpret_cast<const std::byte*>(scratch.keys + s * kSubtile * depth);
    tile.values[s] = reinterpret_cast<const std::byte*>(scratch.values + s * kSubtile * depth);
  }
  return tile;
}

// `count` rows from `first` on (R are computed) against a tile.
template <int R>
void attend_rows(const Work& work, Scratch& scratch, const KeyTile& tile, int count, int64_t first) {
  constexpr CacheType kType = CacheType::kF32;
  RowState* rows = scratch.rows + first;
  const int64_t low = rows[0].low, high = rows[count - 1].high, depth = work.args.head_dim;
  float decay[16];
  score_rows<kType, R>(scratch.query + first * kRowStride, tile, tile, low, high, depth, scratch.scores);
  weigh_rows<false>(tile, count, 0, scratch.scores, rows, decay);
  value_rows<kType, R>(scratch.scores, tile, tile, low, high, depth, decay, scratch.sums + first * kRowStride);
}

void attend_item(const Work& work, Scratch& scratch) {
  const EncoderItem& item = work.item;
  const int64_t begin = work.begin(), end = work.end();
  load_queries(work, scratch);
  for (int64_t first = begin / kKeyTile * kKeyTile; first < end; first += kKeyTile) {
    const KeyTile tile = pack_tile(work, scratch, first, larger(begin - first, 0), smaller(end - first, kKeyTile));
    for (int64_t r = 0; r < item.rows; ++r) {
      scratch.rows[r].low = smaller(kKeyTile, larger(0, work.low(r) - first));
      scratch.rows[r].high = larger(0, smaller(kKeyTile, work.high(r) - first));
    }
    for (int64_t r = 0; r < item.rows; r += kTileRows) {
      const int count = static_cast<int>(smaller(kTileRows, item.rows - r));
      if (scratch.rows[r + count - 1].high == 0 || scratch.rows[r].low == kKeyTile) continue;
      with_height(count, [&]<int R>() { attend_rows<R>(work, scratch, tile, count, r); });
    }
  }
  for (int64_t r = 0; r < item.rows; ++r)
    write_row(work, r, scratch.sums + r * kRowStride, sum_lanes(load(scratch.rows[r].weight_sum)));
}

#if defined(QUIRE_BF16_DOT)

// A thread's working memory for products of pairs: words are two of a head's elements, or one of two keys' values.
struct PairScratch {
  alignas(64) float query[kEncoderRows * kRowStride];  // words
  float sums[kEncoderRows * kRowStride];               // of the current split
  float totals[kEncoderRows * kRowStride];             // of the splits before
  float scores[kTileRows * kScoreStride];
  std::byte weights[kTileRows * kWeightWords * kWordBytes];
  uint32_t keys[kSplitKeys * kMaxHeadDim / 2];    // of a split: [16][head_dim / 2][16]
  uint32_t values[kSplitKeys * kMaxHeadDim / 2];  // [128][head_dim]
  float factors[16];
  alignas(64) RowKeys rows[kEncoderRows];
  SplitResults results[kEncoderRows / kItemRows];
};
static_assert(sizeof(PairScratch) <= kThreadScratch && kEncoderRows % kItemRows == 0 && kItemRows % kTileRows == 0);

// As pack_tile, of a split.
void pack_split(const Work& work, PairScratch& scratch, Split& split) {
  const int64_t depth = work.args.head_dim;
  alignas(64) float rotated[kMaxHeadDim];
  alignas(64) uint16_t rounded[4][kMaxHeadDim];
  for (int64_t k = split.low / 4 * 4; k < split.high; k += 4) {
    const float* columns[4];
    int64_t positions[4];
    for (int i = 0; i < 4; ++i) {
      positions[i] = split.start + smaller(larger(k + i, split.low), split.high - 1);
      work.expect(positions[i], 1);
      work.expect(positions[i], 2);
      round_scaled_bf16(work.rotated(positions[i], 1, rotated), 1.0f, depth, rounded[i]);
      columns[i] = reinterpret_cast<const float*>(rounded[i]);
    }
    put_columns(columns, depth / 2, k, reinterpret_cast<float*>(scratch.keys));
    for (int i = 0; i < 4; ++i) round_scaled_bf16(work.head(positions[i], 2), 1.0f, depth, rounded[i]);
    for (int i = 0; i < 4; i += 2) {
      uint32_t* words = scratch.values + (k + i) / 2 * depth;
      for (int64_t d = 0; d < depth; ++d)
        words[d] = static_cast<uint32_t>(rounded[i][d]) | static_cast<uint32_t>(rounded[i + 1][d]) << 16;
    }
  }
  for (int64_t s = 0; s < kSplitSubtiles; ++s) {
    split.keys[s] = reinterpret_cast<const std::byte*>(scratch.keys + s * kSubtile * depth / 2);
    split.values[s] = reinterpret_cast<const std::byte*>(scratch.values + s * kSubtile * depth / 2);
  }
}

void attend_split(const Work& work, PairScratch& scratch, const Split& split) {
  constexpr CacheType kType = CacheType::kBF16;
  const int64_t num_rows = work.item.rows, depth = work.args.head_dim;
  for (int64_t r = 0; r < num_rows; ++r) {
    scratch.rows[r].high = larger(0, smaller(kSplitKeys, work.high(r) - split.start));
    scratch.rows[r].low = smaller(scratch.rows[r].high, larger(0, work.low(r) - split.start));
  }
  for (int64_t r = 0; r < num_rows; r += kTileRows) {
    const int count = static_cast<int>(smaller(kTileRows, num_rows - r));
    const RowKeys* rows = scratch.rows + r;
    const int64_t low = rows[0].low, high = rows[count - 1].high, place = r % kItemRows;
    SplitResults& results = scratch.results[r / kItemRows];
    float* sums = scratch.sums + r * kRowStride;
    if (low >= high) {
      for (int i = 0; i < count; ++i) {
        std::memset(sums + i * kRowStride, 0, static_cast<std::size_t>(depth) * sizeof(float));
        results.maximum[place + i] = kNothing;
        results.weight[place + i] = 0;
      }
      continue;
    }
    const Ahead ahead(split, low, high, split.keys);
    with_height(count, [&]<int R>() {
      dot_score_rows<kType, R>(scratch.query + r * kRowStride, split, ahead, low, high, depth, scratch.scores);
      dot_weigh_rows<kType>(split, rows, count, 0, scratch.scores, scratch.weights, scratch.factors, results, place);
      dot_value_rows<kType, R>(scratch.weights, split, ahead, low, high, depth, scratch.factors, sums);
    });
  }
}

void attend_item(const Work& work, PairScratch& scratch) {
  const int64_t num_rows = work.item.rows, depth = work.args.head_dim, begin = work.begin(), end = work.end();
  alignas(64) float rotated[kMaxHeadDim];
  for (int64_t r = 0; r < num_rows; ++r) {
    work.expect(work.item.first_row + r, 0);
    const float* query = work.rotated(work.item.first_row + r, 0, rotated);
    Pairs::load_query(query, work.args.scale, depth, scratch.query + r * kRowStride);
  }
  for (int64_t r = num_rows; r < with_filling(num_rows); ++r)
    std::memset(scratch.query + r * kRowStride, 0, kRowStride * sizeof(float));
  const int64_t first_split = begin / kSplitKeys;
  for (int64_t number = first_split; number * kSplitKeys < end; ++number) {
    const int64_t start = number * kSplitKeys;
    Split split(start, larger(begin - start, 0), smaller(end - start, kSplitKeys));
    pack_split(work, scratch, split);
    attend_split(work, scratch, split);
    for (int64_t r = 0; r < num_rows; r += kItemRows)
      add_split(scratch.results[r / kItemRows], number == first_split, scratch.sums + r * kRowStride,
                scratch.totals + r * kRowStride, smaller(kItemRows, num_rows - r), depth);
  }
  for (int64_t r = 0; r < num_rows; ++r)
    write_row(work, r, scratch.totals + r * kRowStride, scratch.results[r / kItemRows].total_weight[r % kItemRows]);
}

#endif

template <class Memory>
void attend_items(const EncoderArgs& args, const Step& step, Team& team) {
  const EncoderPlan& plan = *step.encoder;
  // Items are cut for the threads: no bit depends on it.
  int64_t cuts = 1;
  while (cuts * kEncoderRowMultiple < kEncoderRows && plan.num_items * args.num_heads * cuts < 4 * team.count()) cuts *= 2;
  const int64_t most = kEncoderRows / cuts, works = plan.num_items * args.num_heads * cuts;
  for (int64_t i = team.take(); i < works; i = team.take()) {
    EncoderItem item = plan.items[i / (args.num_heads * cuts)];
    const int64_t offset = i / cuts % args.num_heads * args.head_dim, skipped = i % cuts * most;
    if (skipped >= item.rows) continue;
    item.first_row += skipped;
    item.rows = smaller(most, item.rows - skipped);
    const float* qkv = step.at(args.qkv) + item.first_token * args.qkv.stride + offset;
    const float* rotation =
        args.rotary_dim > 0 ? step.at(args.rotation) + item.first_token * args.rotation.stride : nullptr;
    float* out = step.at(args.out) + item.first_token * args.out.stride + offset;
    attend_item(Work{args, item, qkv, rotation, out}, *reinterpret_cast<Memory*>(team.scratch()));
  }
}

void attend(const EncoderArgs& args, const Step& step, Team& team) {
#if defined(QUIRE_BF16_DOT)
  if (args.precision == MatmulPrecision::kBFloat16) return attend_items<PairScratch>(args, step, team);
#endif
  attend_items<Scratch>(args, step, team);
}

}  // namespace

extern const EncoderKernels kEncoder;
const EncoderKernels kEncoder = {attend};

}  // namespace quire::QUIRE_ISA
