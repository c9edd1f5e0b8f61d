// Attention over latents: all heads of a token read one vector of each key. Compiled once for each instruction set.
//
// For one token this is a product of matrices, [heads, width] times [keys, width], and one back: arithmetic bounds it,
// not memory (128 heads: 242 operations for each byte of bfloat16). So rows (token x head) lie side by side in vectors,
// and a register tile is some keys (or some elements of the values) times two vectors of rows: one load of a vector
// serves all keys of the tile, one broadcast of a key's element both vectors. Nothing is added across lanes.
//
// Sums are made in an order that absolute positions alone decide: kSplitKeys keys from the first to the last, started
// afresh at each multiple of kSplitKeys, and the splits' results merged in their order. A key that a row does not see
// has weight zero and changes no bit of it.
#include "latent.h"

#include "attention.h"
#include "bf16_dot.h"
#include "head_rows.h"

namespace quire::QUIRE_ISA {
namespace {

constexpr int kPair = 2;                                    // vectors of rows in a register tile
constexpr int kGroupRows = kPair * kLanes;                  // rows whose queries lie together
constexpr int kTile = kLanes == 16 ? 12 : 6;                // keys, or elements of values, in a register tile
constexpr int64_t kChunk = 48;                              // elements of values that are laid out at once
static_assert(kLatentRows % kGroupRows == 0 && kChunk % kTile == 0);

constexpr int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
constexpr int64_t padded(int64_t rows) { return (rows + kLatentPadding - 1) / kLatentPadding * kLatentPadding; }

// A thread's working memory. Words are what is multiplied at once: a float, or two bfloat16.
struct Scratch {
  alignas(64) float query[kMaxLatentWidth * kLatentRows];  // [group][word][kGroupRows]
  float totals[kMaxLatentRank * kLatentRows];              // [element][kLatentRows], of the splits before
  float scores[kSplitKeys * kLatentRows];                  // [key][kLatentRows]; then weights
  uint32_t weight_pairs[kSplitKeys / 2 * kLatentRows];
  uint32_t keys[kTile * kMaxLatentWidth];                  // [key][kMaxLatentWidth] words
  uint32_t values[kSplitKeys * kChunk];                    // [key or pair of keys][kChunk] words
  float row[kMaxLatentWidth + 16];
  uint16_t narrow_row[kMaxLatentWidth + 16];
  int32_t positions[kLatentRows];                          // of each row; -1: there is none
  float maximum[kLatentRows], weight[kLatentRows];         // of the current split
  float total_maximum[kLatentRows], total_weight[kLatentRows];
  float old_factor[kLatentRows], new_factor[kLatentRows];  // of the totals, of the current split
};
static_assert(sizeof(Scratch) <= kThreadScratch);

struct Work {
  const LatentArgs& args;
  const AttentionPlan& plan;
  const AttentionItem& item;
  const int32_t* table;
  int64_t start;  // position of the sequence's first row
  Scratch& scratch;
  const float* selected = nullptr;  // positions of the keys; null: key i is at position i

  int64_t width() const { return args.rank + args.rope_dim; }
  int64_t position(int64_t row) const { return start + (item.first_row + row) / args.num_heads; }
  int64_t token(int64_t row) const {
    return plan.query_start[item.sequence] + (item.first_row + row) / args.num_heads;
  }
  int64_t head(int64_t row) const { return (item.first_row + row) % args.num_heads; }
  // Vectors that hold rows.
  int vectors() const { return static_cast<int>((item.rows + kLanes - 1) / kLanes); }
  // The last of this rank's tokens that a row sees; -1: it sees none.
  int64_t last(int64_t row) const { return plan.deal.last_seen(position(row)); }
  // Keys that the item's rows read: all up to their position, or those that were chosen for their token.
  int64_t num_keys() const {
    const int64_t seen = last(item.rows - 1) + 1;
    return args.top > 0 ? smaller(seen, args.top) : seen;
  }
  const std::byte* latent(int64_t key) const {
    const int64_t position = selected == nullptr ? key : static_cast<int64_t>(selected[key]);
    const int64_t block = table[position / args.block_size], inside = position % args.block_size;
    return args.pages + block * args.block_bytes + inside * width() * element_bytes(args.cache);
  }
};

// Elements are multiplied as float32 (kPairs: in pairs of bfloat16, as a bfloat16 cache stores them).
template <bool kPairs>
QUIRE_INLINE vf multiply_add(vf sum, vf rows, uint32_t word) {
#if defined(QUIRE_BF16_DOT)
  if constexpr (kPairs)
    return dot_bf16(sum, bit_cast<vu>(rows), bit_cast<vu>(broadcast_int(static_cast<int32_t>(word))));
#endif
  return fma(rows, broadcast(bit_cast<float>(word)), sum);
}

// -- queries --------------------------------------------------------------------------------------------------------

template <bool kPairs>
void load_queries(const Work& work, const Step& step) {
  const LatentArgs& args = work.args;
  Scratch& scratch = work.scratch;
  const int64_t rank = args.rank, rope = args.rope_dim, words = kPairs ? work.width() / 2 : work.width();
  std::memset(scratch.query, 0, static_cast<std::size_t>(words * kLatentRows) * sizeof(float));
  auto* packed = reinterpret_cast<uint32_t*>(scratch.query);
  for (int64_t r = 0; r < kLatentRows; ++r) {
    // All rows of a token see all keys that were chosen for it.
    const int64_t last = args.top > 0 ? work.num_keys() - 1 : work.last(r);
    scratch.positions[r] = r < work.item.rows ? static_cast<int32_t>(last) : -1;
    scratch.total_maximum[r] = kNothing;
    scratch.total_weight[r] = 0;
  }
  for (int64_t r = 0; r < work.item.rows; ++r) {
    const int64_t token = work.token(r), head = work.head(r);
    const float* query = step.at(args.query) + token * args.query.stride + head * rank;
    const float* turned = step.at(args.turned_query) + token * args.turned_query.stride + head * rope;
    for (int64_t d = 0; d < rank; ++d) scratch.row[d] = query[d] * args.scale;
    for (int64_t d = 0; d < rope; ++d) scratch.row[rank + d] = turned[d] * args.scale;
    const void* from = scratch.row;
#if defined(QUIRE_BF16_DOT)
    if constexpr (kPairs) {
      for (int64_t d = 0; d < work.width(); d += kLanes) round_bf16(scratch.narrow_row + d, load(scratch.row + d));
      from = scratch.narrow_row;
    }
#endif
    uint32_t* to = packed + r / kGroupRows * words * kGroupRows + r % kGroupRows;
    for (int64_t word = 0; word < words; ++word)
      std::memcpy(to + word * kGroupRows, static_cast<const std::byte*>(from) + word * kWordBytes, kWordBytes);
  }
  std::memset(scratch.totals, 0, static_cast<std::size_t>(rank * kLatentRows) * sizeof(float));
}

// -- scores ---------------------------------------------------------------------------------------------------------

// Words of `count` keys from position `first` on, key by key.
template <CacheType T, bool kPairs>
void load_keys(const Work& work, int64_t first, int64_t count) {
  const int64_t width = work.width();
  for (int64_t key = 0; key < count; ++key) {
    const std::byte* from = work.latent(first + key);
    uint32_t* to = work.scratch.keys + key * kMaxLatentWidth;
    if constexpr (T == CacheType::kF32 || kPairs) {
      std::memcpy(to, from, static_cast<std::size_t>(width * element_bytes(T)));
    } else {
      const auto* narrow = reinterpret_cast<const uint16_t*>(from);
      int64_t d = 0;
      for (; d + kLanes <= width; d += kLanes) store(reinterpret_cast<float*>(to) + d, load_bf16(narrow + d));
      for (; d < width; ++d) to[d] = static_cast<uint32_t>(narrow[d]) << 16;
    }
  }
}

// scores[key][rows of the group] for kKeys keys and kVectors vectors of rows, in order of the words.
template <bool kPairs, int kKeys, int kVectors>
void score_tile(const float* query, const uint32_t* keys, int64_t words, float* scores) {
  vf sum[kKeys][kVectors];
#pragma GCC unroll 12
  for (int key = 0; key < kKeys; ++key)
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) sum[key][v] = zero();
  for (int64_t word = 0; word < words; ++word) {
    vf rows[kVectors];
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) rows[v] = load(query + word * kGroupRows + v * kLanes);
#pragma GCC unroll 12
    for (int key = 0; key < kKeys; ++key)
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v)
        sum[key][v] = multiply_add<kPairs>(sum[key][v], rows[v], keys[key * kMaxLatentWidth + word]);
  }
#pragma GCC unroll 12
  for (int key = 0; key < kKeys; ++key)
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) store(scores + key * kLatentRows + v * kLanes, sum[key][v]);
}

template <bool kPairs, int kVectors>
void score_keys(const float* query, const uint32_t* keys, int64_t count, int64_t words, float* scores) {
  if (count <= kTile / 3) return score_tile<kPairs, kTile / 3, kVectors>(query, keys, words, scores);
  if (count <= 2 * kTile / 3) return score_tile<kPairs, 2 * kTile / 3, kVectors>(query, keys, words, scores);
  score_tile<kPairs, kTile, kVectors>(query, keys, words, scores);
}

// -- weights --------------------------------------------------------------------------------------------------------

// From scores to weights, e^(score - maximum), 0 for keys that a row does not see; maximum and sum of each row.
template <bool kPairs>
void weigh(Scratch& scratch, int vectors, int64_t first, int64_t count) {
  for (int v = 0; v < vectors; ++v) {
    const vi positions = load_as<vi>(scratch.positions + v * kLanes);
    float* scores = scratch.scores + v * kLanes;
    vf maximum = broadcast(kNothing);
    for (int64_t key = 0; key < count; ++key) {
      const vi seen = broadcast_int(static_cast<int32_t>(first + key)) <= positions;
      const vf score = seen ? load(scores + key * kLatentRows) : broadcast(-__builtin_inff());
      store(scores + key * kLatentRows, score);
      maximum = max(score, maximum);
    }
    vf sum = zero();
    for (int64_t key = 0; key < count; ++key) {
      const vf weight = exp(load(scores + key * kLatentRows) - maximum);
      sum += weight;
      store(scores + key * kLatentRows, weight);
    }
    store(scratch.maximum + v * kLanes, maximum);
    store(scratch.weight + v * kLanes, sum);
#if defined(QUIRE_BF16_DOT)
    if constexpr (kPairs) {
      for (int64_t key = 0; key < count; key += 2) {
        uint16_t low[kLanes], high[kLanes] = {};
        round_bf16(low, load(scores + key * kLatentRows));
        if (key + 1 < count) round_bf16(high, load(scores + (key + 1) * kLatentRows));
        const vu words = __builtin_convertvector(load_as<vu16>(low), vu) |
                         __builtin_convertvector(load_as<vu16>(high), vu) << 16;
        std::memcpy(scratch.weight_pairs + key / 2 * kLatentRows + v * kLanes, &words, sizeof(words));
      }
    }
#endif
  }
}

// -- values ---------------------------------------------------------------------------------------------------------

// kLanes elements of a key as floats, or of two neighbouring keys (null: zeros) as pairs.
template <CacheType T, bool kPairs>
QUIRE_INLINE vu value_words(const std::byte* key, const std::byte* next, int64_t d) {
  if constexpr (T == CacheType::kF32) return load_as<vu>(key + d * 4);
  const vu low = bit_cast<vu>(load_bf16(reinterpret_cast<const uint16_t*>(key) + d));
  if constexpr (!kPairs) return low;
  const vu high = next == nullptr ? vu{} : bit_cast<vu>(load_bf16(reinterpret_cast<const uint16_t*>(next) + d));
  return low >> 16 | high;
}

// Words of elements d .. of all keys of the split. (A vector may reach beyond the compressed part: the rotated part
// follows it, or kMaxLatentWidth's room does.)
template <CacheType T, bool kPairs>
void load_values(const Work& work, int64_t first, int64_t count, int64_t d, int64_t dims) {
  constexpr int64_t kStep = kPairs ? 2 : 1;
  for (int64_t key = 0; key < count; key += kStep) {
    const std::byte* from = work.latent(first + key);
    const std::byte* next = kPairs && key + 1 < count ? work.latent(first + key + 1) : nullptr;
    uint32_t* to = work.scratch.values + key / kStep * kChunk;
    for (int64_t i = 0; i < dims; i += kLanes) {
      vu words;
      if (d + i + kLanes <= work.width()) {
        words = value_words<T, kPairs>(from, next, d + i);
      } else {  // the end of the page may be the end of memory
        std::byte both[2][kLanes * 4] = {};
        const auto left = static_cast<std::size_t>((work.width() - d - i) * element_bytes(T));
        std::memcpy(both[0], from + (d + i) * element_bytes(T), left);
        if (next != nullptr) std::memcpy(both[1], next + (d + i) * element_bytes(T), left);
        words = value_words<T, kPairs>(both[0], both[1], 0);
      }
      std::memcpy(to + i, &words, sizeof(words));
    }
  }
}

// Where a split's weighted values go: into totals, with those of the splits before, or to a place of their own.
struct Target {
  float* sums;        // [element][stride]
  int64_t stride;
  const float* old_factor;  // null: a place of their own
  const float* new_factor;
};

template <bool kPairs, int kDims, int kVectors>
void value_tile(const uint32_t* values, const float* weights, int64_t steps, const Target& target) {
  vf sum[kDims][kVectors];
#pragma GCC unroll 12
  for (int d = 0; d < kDims; ++d)
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) sum[d][v] = zero();
  for (int64_t step = 0; step < steps; ++step) {
    vf rows[kVectors];
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) rows[v] = load(weights + step * kLatentRows + v * kLanes);
#pragma GCC unroll 12
    for (int d = 0; d < kDims; ++d)
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v)
        sum[d][v] = multiply_add<kPairs>(sum[d][v], rows[v], values[step * kChunk + d]);
  }
#pragma GCC unroll 12
  for (int d = 0; d < kDims; ++d)
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      float* to = target.sums + d * target.stride + v * kLanes;
      if (target.old_factor == nullptr) {
        store(to, sum[d][v]);
      } else {
        const vf before = load(to) * load(target.old_factor + v * kLanes);
        store(to, fma(sum[d][v], load(target.new_factor + v * kLanes), before));
      }
    }
}

template <bool kPairs, int kVectors>
void value_dims(const uint32_t* values, const float* weights, int64_t steps, int64_t dims, Target target) {
  int64_t d = 0;
  const auto some = [&]<int kDims>() {
    value_tile<kPairs, kDims, kVectors>(values + d, weights, steps, target);
    d += kDims;
    target.sums += kDims * target.stride;
  };
  while (d + kTile <= dims) some.template operator()<kTile>();
  if (dims - d == 2 * kTile / 3) some.template operator()<2 * kTile / 3>();
  if (dims - d == kTile / 3) some.template operator()<kTile / 3>();
}

// -- items ----------------------------------------------------------------------------------------------------------

// Calls use(first vector, constant number of vectors) for the vectors of rows, two at a time.
template <class Use>
QUIRE_INLINE void by_groups(int vectors, const Use& use) {
  int v = 0;
  for (; v + kPair <= vectors; v += kPair) use.template operator()<kPair>(v);
  if (v < vectors) use.template operator()<1>(v);
}

// total = total and a part, each weighed by its maximum: the factors of both.
void merge_factors(Scratch& scratch, int vectors, const float* part_maximum, const float* part_weight) {
  for (int row = 0; row < vectors * kLanes; row += kLanes) {
    const vf before = load(scratch.total_maximum + row), maximum = load(part_maximum + row);
    const vf top = max(before, maximum), old_factor = exp(before - top), new_factor = exp(maximum - top);
    store(scratch.total_maximum + row, top);
    store(scratch.total_weight + row,
          fma(load(part_weight + row), new_factor, load(scratch.total_weight + row) * old_factor));
    store(scratch.old_factor + row, old_factor);
    store(scratch.new_factor + row, new_factor);
  }
}

// The keys of one split. partial: where its result goes, [rank][padded rows], maxima, weights; null: into the totals.
template <CacheType T, bool kPairs>
void attend_split(const Work& work, int64_t split, float* partial) {
  Scratch& scratch = work.scratch;
  const int64_t first = split * kSplitKeys, end = work.num_keys();
  const int64_t count = smaller(kSplitKeys, end - first);
  const int64_t words = kPairs ? work.width() / 2 : work.width();
  const int vectors = work.vectors();
  for (int64_t key = 0; key < count; key += kTile) {
    const int64_t some = smaller(kTile, count - key);
    load_keys<T, kPairs>(work, first + key, some);
    by_groups(vectors, [&]<int kVectors>(int v) {
      const float* query = scratch.query + v / kPair * words * kGroupRows;
      // The last tile may write scores of keys that there are not, behind the others.
      score_keys<kPairs, kVectors>(query, scratch.keys, some, words, scratch.scores + key * kLatentRows + v * kLanes);
    });
  }
  weigh<kPairs>(scratch, vectors, first, count);
  const int64_t room = padded(work.item.rows);
  if (partial == nullptr) {
    merge_factors(scratch, vectors, scratch.maximum, scratch.weight);
  } else {
    std::memcpy(partial + work.args.rank * room, scratch.maximum, static_cast<std::size_t>(room) * sizeof(float));
    std::memcpy(partial + (work.args.rank + 1) * room, scratch.weight, static_cast<std::size_t>(room) * sizeof(float));
  }
  const auto* weights = kPairs ? reinterpret_cast<const float*>(scratch.weight_pairs) : scratch.scores;
  const int64_t steps = kPairs ? (count + 1) / 2 : count;
  for (int64_t d = 0; d < work.args.rank; d += kChunk) {
    const int64_t dims = smaller(kChunk, work.args.rank - d);
    load_values<T, kPairs>(work, first, count, d, dims);
    by_groups(vectors, [&]<int kVectors>(int v) {
      const int64_t row = v * kLanes;
      const Target own{partial + d * room + row, room, nullptr, nullptr};
      const Target whole{scratch.totals + d * kLatentRows + row, kLatentRows, scratch.old_factor + row,
                         scratch.new_factor + row};
      value_dims<kPairs, kVectors>(scratch.values, weights + row, steps, dims, partial == nullptr ? whole : own);
    });
  }
}

int64_t partial_stride(const LatentArgs& args) { return args.rank + kLatentPadding; }

float* partial_result(const Work& work, const Step& step, int64_t split) {
  const int64_t row = work.item.partial + (split - work.item.first_split) * padded(work.item.rows);
  return reinterpret_cast<float*>(step.shared_scratch) + row * partial_stride(work.args);
}

void write_rows(const Work& work, const Step& step) {
  constexpr int64_t kBlock = 16;
  const Scratch& scratch = work.scratch;
  float* out = step.at(work.args.out);
  for (int64_t d = 0; d < work.args.rank; d += kBlock) {
    const int64_t end = smaller(d + kBlock, work.args.rank);
    for (int64_t r = 0; r < work.item.rows; ++r) {
      const bool is_empty = scratch.total_weight[r] == 0;  // no key is seen here
      const float scale = is_empty ? 0.0f : 1.0f / scratch.total_weight[r];
      float* row = out + work.token(r) * work.args.out.stride;
      float* to = row + work.head(r) * work.args.rank;
      // Adding zero makes the one zero of the other: a row's zeros may differ in sign by what was skipped.
      for (int64_t i = d; i < end; ++i) to[i] = scratch.totals[i * kLatentRows + r] * scale + 0.0f;
      if (d == 0 && work.args.parts)
        row[work.args.num_heads * work.args.rank + work.head(r)] =
            log_sum(scratch.total_maximum[r], scratch.total_weight[r]);
    }
  }
}

template <CacheType T, bool kPairs>
void run_item(const Work& work, const Step& step) {
  load_queries<kPairs>(work, step);
  const bool is_partial = work.item.partial >= 0;
  for (int64_t split = work.item.first_split; split < work.item.last_split; ++split)
    attend_split<T, kPairs>(work, split, is_partial ? partial_result(work, step, split) : nullptr);
  if (!is_partial) write_rows(work, step);
}

void merge_item(const Work& work, const Step& step) {
  Scratch& scratch = work.scratch;
  const int64_t rank = work.args.rank, room = padded(work.item.rows);
  const int vectors = work.vectors();
  for (int64_t r = 0; r < kLatentRows; ++r) scratch.total_maximum[r] = kNothing, scratch.total_weight[r] = 0;
  std::memset(scratch.totals, 0, static_cast<std::size_t>(rank * kLatentRows) * sizeof(float));
  for (int64_t split = work.item.first_split; split < work.item.last_split; ++split) {
    const float* part = partial_result(work, step, split);
    merge_factors(scratch, vectors, part + rank * room, part + (rank + 1) * room);
    for (int64_t d = 0; d < rank; ++d)
      for (int row = 0; row < vectors * kLanes; row += kLanes) {
        float* to = scratch.totals + d * kLatentRows + row;
        const vf before = load(to) * load(scratch.old_factor + row);
        store(to, fma(load(part + d * room + row), load(scratch.new_factor + row), before));
      }
  }
  write_rows(work, step);
}

Work make_work(const LatentArgs& args, const AttentionPlan& plan, const AttentionItem& item, const Step& step,
               Team& team) {
  Work work{args, plan, item, plan.block_table + item.sequence * plan.table_stride,
            plan.start_positions[item.sequence], *reinterpret_cast<Scratch*>(team.scratch())};
  if (args.top > 0 && work.position(0) >= args.top)
    work.selected = step.at(args.selected) + work.token(0) * args.selected.stride;
  return work;
}

void attend(const LatentArgs& args, const Step& step, Team& team) {
  const AttentionPlan& plan = *step.attention[args.group];
  for (int64_t i = team.take(); i < plan.num_items; i = team.take()) {
    const Work work = make_work(args, plan, plan.items[i], step, team);
    if (args.cache == CacheType::kF32) {
      run_item<CacheType::kF32, false>(work, step);
      continue;
    }
#if defined(QUIRE_BF16_DOT)
    if (args.precision == MatmulPrecision::kBFloat16) {
      run_item<CacheType::kBF16, true>(work, step);
      continue;
    }
#endif
    run_item<CacheType::kBF16, false>(work, step);
  }
  if (plan.num_merges == 0) return;
  team.barrier();
  for (int64_t i = team.take(); i < plan.num_merges; i = team.take())
    merge_item(make_work(args, plan, plan.merges[i], step, team), step);
}

void prepare(const LatentArgs& args, const Step& step, Team& team) {
  const AttentionPlan& plan = *step.attention[args.group];
  const int64_t rank = args.rank, rope = args.rope_dim;
  for (int64_t t = team.take(); t < step.rows; t = team.take()) {
    float* turned = step.at(args.turned_query) + t * args.turned_query.stride;
    float* key = step.at(args.turned_key) + t * args.turned_key.stride;
    if (args.rotation.present()) {
      const float* turn = step.at(args.rotation) + t * args.rotation.stride;
      for (int64_t head = 0; head < args.query_heads; ++head) rotate_head(turned + head * rope, turn, rope / 2);
      rotate_head(key, turn, rope / 2);
    }
    const float* latent = step.at(args.latent) + t * args.latent.stride;
    const int64_t slot = plan.slots[t], at = slot % args.block_size * (rank + rope) * element_bytes(args.cache);
    if (slot < 0) continue;  // another rank keeps it
    std::byte* to = args.pages + slot / args.block_size * args.block_bytes + at;
    if (args.cache == CacheType::kF32) {
      std::memcpy(to, latent, static_cast<std::size_t>(rank) * sizeof(float));
      std::memcpy(to + rank * 4, key, static_cast<std::size_t>(rope) * sizeof(float));
    } else {
      narrow_head(latent, rank, reinterpret_cast<uint16_t*>(to));
      narrow_head(key, rope, reinterpret_cast<uint16_t*>(to) + rank);
    }
  }
}

std::size_t attend_scratch(const LatentArgs& args, int threads) {
  const int64_t rows = threads == 1 ? 0 : kMaxLatentPartialRows;
  return static_cast<std::size_t>(rows * partial_stride(args)) * sizeof(float);
}

}  // namespace

extern const LatentKernels kLatent;
const LatentKernels kLatent = {prepare, attend, attend_scratch};

}  // namespace quire::QUIRE_ISA
