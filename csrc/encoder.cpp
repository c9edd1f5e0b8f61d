// Attention in both directions over the rows of a step. Compiled once for each instruction set.
//
// A row's sums run over the keys of its own sequence, from the first to the last that it sees, in tiles of kKeyTile
// keys with a running maximum: positions in the sequence alone decide their order.
#include "encoder.h"

#include "attention_tiles.h"
#include "head_rows.h"

namespace quire::QUIRE_ISA {
namespace {

constexpr int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
constexpr int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

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

// An item and one head.
struct Work {
  const EncoderArgs& args;
  const EncoderItem& item;
  const float* qkv;       // the sequence's first row: the head's query
  const float* rotation;  // of that row, or null
  Scratch& scratch;

  // Part 0 is the query, 1 the key, 2 the value of the token at `position`.
  const float* head(int64_t position, int64_t part) const {
    return qkv + position * args.qkv.stride + part * args.num_heads * args.head_dim;
  }
  void rotate(float* head, int64_t position) const {
    if (rotation != nullptr) rotate_head(head, rotation + position * args.rotation.stride, args.rotary_dim / 2);
  }
  void expect(int64_t position, int64_t part) const {
    const float* coming = head(position + kAhead, part);
    for (int64_t d = 0; d < args.head_dim; d += kSubtile) prefetch(reinterpret_cast<const std::byte*>(coming + d));
  }
};

// Eight elements at a time: a call of the library takes longer than a head.
QUIRE_INLINE void copy_head(const float* from, int64_t depth, float* to) {
  for (int64_t d = 0; d < depth; d += 8) std::memcpy(to + d, from + d, 8 * sizeof(float));
}

void load_queries(const Work& work) {
  const int64_t depth = work.args.head_dim;
  for (int64_t r = 0; r < work.item.rows; ++r) {
    float* to = work.scratch.query + r * kRowStride;
    work.expect(work.item.first_row + r, 0);
    copy_head(work.head(work.item.first_row + r, 0), depth, to);
    work.rotate(to, work.item.first_row + r);
    for (int64_t d = 0; d < depth; ++d) to[d] *= work.args.scale;
  }
  // Rows that only fill a register tile up.
  for (int64_t r = work.item.rows; r % kTileRows != 0 && r < kEncoderRows; ++r)
    std::memset(work.scratch.query + r * kRowStride, 0, kRowStride * sizeof(float));
  const int64_t padded = smaller(kEncoderRows, (work.item.rows + kTileRows - 1) / kTileRows * kTileRows);
  for (int64_t r = 0; r < padded; ++r) {
    work.scratch.rows[r].maximum = kNothing;
    store(work.scratch.rows[r].weight_sum, zero());
    for (int64_t d = 0; d < depth; d += kLanes) store(work.scratch.sums + r * kRowStride + d, zero());
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
KeyTile pack_tile(const Work& work, int64_t first, int64_t low, int64_t high) {
  const int64_t depth = work.args.head_dim;
  Scratch& scratch = work.scratch;
  alignas(64) float rotated[4][kMaxHeadDim];
  for (int64_t k = low / 4 * 4; k < high; k += 4) {
    const float* heads[4];
    for (int i = 0; i < 4; ++i) {
      const int64_t own = smaller(larger(k + i, low), high - 1);
      heads[i] = work.head(first + own, 1);
      if (work.rotation != nullptr) {
        copy_head(heads[i], depth, rotated[i]);
        work.rotate(rotated[i], first + own);
        heads[i] = rotated[i];
      }
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
void attend_rows(const Work& work, const KeyTile& tile, int count, int64_t first) {
  constexpr CacheType kType = CacheType::kF32;
  Scratch& scratch = work.scratch;
  RowState* rows = scratch.rows + first;
  const int64_t low = rows[0].low, high = rows[count - 1].high, depth = work.args.head_dim;
  float decay[16];
  score_rows<kType, R>(scratch.query + first * kRowStride, tile, tile, low, high, depth, scratch.scores);
  weigh_rows<false>(tile, count, 0, scratch.scores, rows, decay);
  value_rows<kType, R>(scratch.scores, tile, tile, low, high, depth, decay, scratch.sums + first * kRowStride);
}

void attend_some(const Work& work, const KeyTile& tile, int count, int64_t first) {
  switch (count) {
    case 1:
      return attend_rows<1>(work, tile, count, first);
    case 2:
      return attend_rows<2>(work, tile, count, first);
    case 3:
    case 4:
      return attend_rows<4>(work, tile, count, first);
    default:
      if constexpr (kTileRows > 4) {
        if (count <= 6) return attend_rows<6>(work, tile, count, first);
      }
      if constexpr (kTileRows > 6) {
        if (count <= 8) return attend_rows<8>(work, tile, count, first);
        return attend_rows<12>(work, tile, count, first);
      }
  }
}

void write_rows(const Work& work, float* out) {
  const int64_t depth = work.args.head_dim;
  for (int64_t r = 0; r < work.item.rows; ++r) {
    const float* sums = work.scratch.sums + r * kRowStride;
    float* row = out + (work.item.first_row + r) * work.args.out.stride;
    const vf scale = broadcast(1.0f / sum_lanes(load(work.scratch.rows[r].weight_sum)));
    int64_t d = 0;
    for (; d + kLanes <= depth; d += kLanes) store(row + d, load(sums + d) * scale);
    if (d < depth) store_some(row + d, load(sums + d) * scale, depth - d);
  }
}

void attend_item(const Work& work) {
  const EncoderItem& item = work.item;
  const int64_t window = work.args.window, last_row = item.first_row + item.rows - 1;
  const int64_t begin = window > 0 ? larger(0, item.first_row - window) : 0;
  const int64_t end = window > 0 ? smaller(item.length, last_row + window + 1) : item.length;
  load_queries(work);
  for (int64_t first = begin / kKeyTile * kKeyTile; first < end; first += kKeyTile) {
    const KeyTile tile = pack_tile(work, first, larger(begin - first, 0), smaller(end - first, kKeyTile));
    for (int64_t r = 0; r < item.rows; ++r) {
      RowState& row = work.scratch.rows[r];
      const int64_t position = item.first_row + r;
      const int64_t low = window > 0 ? position - window : 0, high = window > 0 ? position + window + 1 : item.length;
      row.low = smaller(kKeyTile, larger(0, low - first));
      row.high = larger(0, smaller(kKeyTile, smaller(high, item.length) - first));
    }
    for (int64_t r = 0; r < item.rows; r += kTileRows) {
      const int count = static_cast<int>(smaller(kTileRows, item.rows - r));
      if (work.scratch.rows[r + count - 1].high == 0 || work.scratch.rows[r].low == kKeyTile) continue;
      attend_some(work, tile, count, r);
    }
  }
}

void attend(const EncoderArgs& args, const Step& step, Team& team) {
  const EncoderPlan& plan = *step.encoder;
  Scratch& scratch = *reinterpret_cast<Scratch*>(team.scratch());
  for (int64_t i = team.take(); i < plan.num_items * args.num_heads; i = team.take()) {
    const EncoderItem& item = plan.items[i / args.num_heads];
    const int64_t offset = i % args.num_heads * args.head_dim;
    const float* qkv = step.at(args.qkv) + item.first_token * args.qkv.stride + offset;
    const float* rotation =
        args.rotary_dim > 0 ? step.at(args.rotation) + item.first_token * args.rotation.stride : nullptr;
    const Work work{args, item, qkv, rotation, scratch};
    attend_item(work);
    write_rows(work, step.at(args.out) + item.first_token * args.out.stride + offset);
  }
}

}  // namespace

extern const EncoderKernels kEncoder;
const EncoderKernels kEncoder = {attend};

}  // namespace quire::QUIRE_ISA
