// Sampling over the vocabulary. Compiled once for each instruction set.
//
// A row is seen as tiles of 16 vectors. Sums run lane by lane inside a tile, over its lanes, then over the tiles one
// after the other, in float64: the vocabulary's size alone decides the order, not the batch and not the threads.
#include "kernels.h"
#include "vector_math.h"

namespace quire::QUIRE_ISA {
namespace {

constexpr int64_t kTileVectors = 16;
constexpr int64_t kTile = kTileVectors * kLanes;
constexpr float kInfinity = __builtin_inff();
// Lower temperatures act as this one: the largest score alone is possible, ties are equally likely.
constexpr float kMinTemperature = 1e-30f;

int64_t tiles_of(int64_t size) { return (size + kTile - 1) / kTile; }

// Vector `v` of a tile of which `left` elements exist (more than a tile's: all).
template <bool kWhole>
QUIRE_INLINE vf tile_vector(const float* tile, int64_t v, int64_t left, float fill) {
  const int64_t here = left - v * kLanes;
  return kWhole || here >= kLanes ? load(tile + v * kLanes) : load_some(tile + v * kLanes, here, fill);
}

QUIRE_INLINE bool is_greedy(const SamplingColumns& columns, int64_t row) { return columns.temperature[row] == 0.0f; }

// Bit i is set where lane i of a is larger than that of b.
QUIRE_INLINE uint32_t larger(vf a, vf b) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GT_OQ);
#elif defined(__AVX2__)
  return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps((__m256)a, (__m256)b, _CMP_GT_OQ)));
#else
  uint32_t bits = 0;
  for (int lane = 0; lane < kLanes; ++lane) bits |= static_cast<uint32_t>(a[lane] > b[lane]) << lane;
  return bits;
#endif
}

// -- the largest score ------------------------------------------------------------------------------------------------

// The largest score and the first place that has it; NaN when there is a NaN.
struct Best {
  float value;
  int32_t reserved;
  int64_t index;
  bool usable() const { return value > -kInfinity && value < kInfinity; }
};

struct Scan {
  vf best;   // by lane, with the first tile that has it
  vi tile;
  vi nan;
};

template <bool kWhole>
QUIRE_INLINE void scan_tile(const float* tile, int32_t number, int64_t left, Scan& scan) {
  vf most[2] = {broadcast(-kInfinity), broadcast(-kInfinity)};
  vi nan = scan.nan;
  for (int64_t v = 0; v < kTileVectors; v += 2) {
    vf first = tile_vector<kWhole>(tile, v, left, -kInfinity);
    vf second = tile_vector<kWhole>(tile, v + 1, left, -kInfinity);
    nan |= (first != first) | (second != second);
    most[0] = max(most[0], first);
    most[1] = max(most[1], second);
  }
  vf value = max(most[0], most[1]);
  scan.nan = nan;
  scan.tile = value > scan.best ? broadcast_int(number) : scan.tile;
  scan.best = max(scan.best, value);
}

// Over tiles [first, last) of a row.
Best scan_tiles(const float* row, int64_t size, int64_t first, int64_t last) {
  Scan scan = {broadcast(-kInfinity), broadcast_int(static_cast<int32_t>(first)), vi{}};
  for (int64_t t = first; t < last; ++t) {
    const int64_t left = size - t * kTile;
    if (left >= kTile)
      scan_tile<true>(row + t * kTile, static_cast<int32_t>(t), left, scan);
    else
      scan_tile<false>(row + t * kTile, static_cast<int32_t>(t), left, scan);
  }
  bool nonfinite = false;
  for (int lane = 0; lane < kLanes; ++lane) nonfinite |= scan.nan[lane] != 0;
  if (nonfinite) return {__builtin_nanf(""), 0, 0};
  const float value = max_lanes(scan.best);
  int64_t tile = last;
  for (int lane = 0; lane < kLanes; ++lane)
    if (scan.best[lane] == value && scan.tile[lane] < tile) tile = scan.tile[lane];
  int64_t index = tile * kTile;
  while (index + 1 < size && row[index] != value) ++index;
  return {value, 0, index};
}

QUIRE_INLINE Best better(const Best& first, const Best& second) {  // first: of lower tokens
  if (first.value != first.value) return first;
  return second.value > first.value || second.value != second.value ? second : first;
}

// -- weights ----------------------------------------------------------------------------------------------------------

// What is known of a row's tiles beside its weights: sums [tiles], and the largest of each lane [tiles * kLanes].
struct Tiles {
  float* sums;
  float* most;
};

template <bool kWhole>
QUIRE_INLINE void weigh_tile(float* tile, int64_t left, vf largest, vf inverse, float* tile_sum, float* most) {
  vf sum = zero(), top = zero();
  for (int64_t v = 0; v < kTileVectors; ++v) {
    const int64_t here = left - v * kLanes;
    vf weight = exp((tile_vector<kWhole>(tile, v, left, -kInfinity) - largest) * inverse);
    if (kWhole || here >= kLanes)
      store(tile + v * kLanes, weight);
    else if (here > 0)
      store_some(tile + v * kLanes, weight, here);
    sum += weight;
    top = max(top, weight);
  }
  *tile_sum = sum_lanes(sum);
  store(most, top);
}

// Scores of tiles [first, last) become weights: exp((score - largest) / temperature), so that the largest is 1.
void weigh_tiles(float* row, int64_t size, int64_t first, int64_t last, float largest, float temperature, Tiles tiles) {
  const vf inverse = broadcast(1.0f / (temperature > kMinTemperature ? temperature : kMinTemperature));
  const vf most = broadcast(largest);
  for (int64_t t = first; t < last; ++t) {
    const int64_t left = size - t * kTile;
    if (left >= kTile)
      weigh_tile<true>(row + t * kTile, left, most, inverse, tiles.sums + t, tiles.most + t * kLanes);
    else
      weigh_tile<false>(row + t * kTile, left, most, inverse, tiles.sums + t, tiles.most + t * kLanes);
  }
}

// Sums of the weights of at least `lowest`, by tile.
void sum_kept(const float* row, int64_t size, float lowest, float* sums) {
  const vf bound = broadcast(lowest);
  for (int64_t t = 0; t * kTile < size; ++t) {
    const int64_t left = size - t * kTile;
    vf sum[2] = {zero(), zero()};
    for (int64_t v = 0; v < kTileVectors; ++v) {
      vf weight = left >= kTile ? tile_vector<true>(row + t * kTile, v, left, 0)
                                : tile_vector<false>(row + t * kTile, v, left, 0);
      sum[v % 2] += weight < bound ? vf{} : weight;
    }
    sums[t] = sum_lanes(sum[0] + sum[1]);
  }
}

double add_up(const float* sums, int64_t count) {
  double total = 0;
  for (int64_t i = 0; i < count; ++i) total += sums[i];
  return total;
}

// -- filters ----------------------------------------------------------------------------------------------------------

constexpr int kBinBits = 11;
constexpr int64_t kBins = int64_t{1} << kBinBits;

// A thread's scratch: counts and masses of values by their leading bits, and a list of values.
struct Workspace {
  double* mass;
  uint32_t* count;
  float* list;
};
constexpr int64_t kListOffset = kBins * 12;
constexpr int64_t kListSize = (static_cast<int64_t>(kThreadScratch) - kListOffset) / 4;

QUIRE_INLINE Workspace workspace_at(std::byte* scratch) {
  auto* mass = reinterpret_cast<double*>(scratch);
  auto* count = reinterpret_cast<uint32_t*>(scratch + kBins * 8);
  return {mass, count, reinterpret_cast<float*>(scratch + kListOffset)};
}

// Where a walk from the largest value downwards has reached one of its limits.
struct Reached {
  bool found;
  float value;
  int64_t above;  // values larger than `value`, and what they add up to
  double mass;
};

// Walks through values in [cut, 1] from the largest to the value at which `limit` values or a sum of `share` are
// reached, equal values counting one by one. Values are told apart by their bits, which for numbers that are not
// negative are ordered as the numbers are: 11 bits at a time, three times at most. Nothing is sorted.
Reached walk_down(const float* values, int64_t size, float cut, int64_t limit, double share, const Workspace& work) {
  uint32_t low = bit_cast<uint32_t>(cut), high = 0x3f800000u;  // bits of 1
  Reached reached = {false, 0, 0, 0};
  for (;;) {
    const uint32_t range = high - low;
    const int length = range == 0 ? 0 : 32 - __builtin_clz(range);
    const int shift = length > kBinBits ? length - kBinBits : 0;
    const int64_t bins = static_cast<int64_t>(range >> shift) + 1;
    std::memset(work.mass, 0, static_cast<std::size_t>(bins) * 8);
    std::memset(work.count, 0, static_cast<std::size_t>(bins) * 4);
    for (int64_t i = 0; i < size; ++i) {
      const uint32_t place = bit_cast<uint32_t>(values[i]) - low;
      if (place > range) continue;
      work.mass[place >> shift] += values[i];
      work.count[place >> shift] += 1;
    }
    int64_t bin = bins - 1, lowest_used = -1;
    for (; bin >= 0; --bin) {
      const int64_t above = reached.above + work.count[bin];
      const double mass = reached.mass + work.mass[bin];
      if (above >= limit || mass >= share) break;
      if (work.count[bin]) lowest_used = bin;
      reached.above = above;
      reached.mass = mass;
    }
    if (bin < 0) {
      if (!reached.found) return reached;
      // The wider bin did reach the share, its parts, added up in another order, just fail to: it is the last of them.
      bin = lowest_used;
      reached.above -= work.count[bin];
      reached.mass -= work.mass[bin];
    }
    reached.found = true;
    low += static_cast<uint32_t>(bin) << shift;
    if (shift == 0) {
      reached.value = bit_cast<float>(low);
      return reached;
    }
    const uint32_t end = low + ((uint32_t{1} << shift) - 1);
    high = end < high ? end : high;
  }
}

// Lists the weights of at least `cut`. Returns how many, or -1 when there is no room for them.
int64_t list_kept(const float* weights, int64_t size, float cut, float* list) {
  int64_t listed = 0;
  const vf bound = broadcast(cut);
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    if (listed + kLanes > kListSize) return -1;
    vf weight = load(weights + i);
#if defined(__AVX512F__)
    const __mmask16 kept = _mm512_cmp_ps_mask((__m512)weight, (__m512)bound, _CMP_GE_OQ);
    if (!kept) continue;
    store(list + listed, (vf)_mm512_maskz_compress_ps(kept, (__m512)weight));
    listed += __builtin_popcount(kept);
#else
    constexpr uint32_t kAll = (uint32_t{1} << kLanes) - 1;
    if (larger(bound, weight) == kAll) continue;
    for (int lane = 0; lane < kLanes; ++lane) {
      list[listed] = weights[i + lane];
      listed += weights[i + lane] >= cut;
    }
#endif
  }
  for (; i < size; ++i) {
    if (listed == kListSize) return -1;
    list[listed] = weights[i];
    listed += weights[i] >= cut;
  }
  return listed;
}

struct Filters {
  int64_t top_k;
  double top_p;
  float min_p;
  bool ranked(int64_t size) const { return (top_k > 0 && top_k < size) || top_p < 1; }
  bool any(int64_t size) const { return ranked(size) || min_p > 0; }
};

// The smallest weight that top-k and then top-p keep: 0 for all. most: weights of which each stands for a part of the
// row that has no larger one (or null).
float lowest_ranked(const float* weights, int64_t size, double total, const Filters& filters, const float* most,
                    int64_t num_most, const Workspace& work) {
  constexpr int64_t kNoLimit = INT64_MAX;
  const bool has_top_k = filters.top_k > 0 && filters.top_k < size;
  // Most of a row lies below a bound that is cheaply found: the k-th largest of `most` is not above the k-th largest
  // weight; and weights below (1 - p) * total / size together are less than what top-p may leave out (the half of it,
  // since the total is rounded).
  float cut = 0;
  if (has_top_k) {
    if (most && filters.top_k <= num_most)
      cut = walk_down(most, num_most, 0, filters.top_k, kInfinity, work).value;
  } else {
    cut = static_cast<float>(0.5 * (1 - filters.top_p) * total / static_cast<double>(size));
  }
  const int64_t listed = list_kept(weights, size, cut, work.list);
  const float* list = listed < 0 ? weights : work.list;
  const int64_t length = listed < 0 ? size : listed;
  if (!has_top_k) {
    Reached reached = walk_down(list, length, cut, kNoLimit, filters.top_p * total, work);
    // A share so near to 1 that rounding has put it out of the list's reach.
    if (!reached.found) reached = walk_down(weights, size, 0, kNoLimit, filters.top_p * total, work);
    return reached.found ? reached.value : 0;
  }
  const Reached kth = walk_down(list, length, cut, filters.top_k, kInfinity, work);
  if (!(filters.top_p < 1)) return kth.value;
  const double mass = kth.mass + static_cast<double>(filters.top_k - kth.above) * kth.value;
  const Reached reached = walk_down(list, length, cut, kNoLimit, filters.top_p * mass, work);
  return reached.found && reached.value > kth.value ? reached.value : kth.value;
}

float lowest_kept(const float* weights, int64_t count, double total, int64_t top_k, double top_p, float min_p,
                  std::byte* thread_scratch) {
  const Filters filters = {top_k, top_p, min_p};
  if (!filters.ranked(count)) return min_p;
  const float ranked = lowest_ranked(weights, count, total, filters, nullptr, 0, workspace_at(thread_scratch));
  return ranked > min_p ? ranked : min_p;
}

// -- drawing ----------------------------------------------------------------------------------------------------------

QUIRE_INLINE uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

// Number `index` of the stream of a seed, strictly between 0 and 1: bit for bit that of quire/sampling/draw.py.
QUIRE_INLINE double uniform(uint64_t seed, int64_t index) {
  constexpr uint64_t kGolden = 0x9E3779B97F4A7C15u;
  const uint64_t bits = mix(mix(seed + kGolden) + (static_cast<uint64_t>(index) + 1) * kGolden) >> 12;
  return (static_cast<double>(bits) + 0.5) * 0x1p-52;
}

// The token at which the weights of at least `lowest`, added up in order, exceed a share of `uniform` of their sum.
// Of weights that rounding makes the target miss, the one that completes the sum is taken: never one of 0.
int64_t draw(const float* weights, int64_t size, const float* sums, float lowest, double uniform) {
  const int64_t tiles = tiles_of(size);
  const double total = add_up(sums, tiles), target = uniform * total;
  double before = 0;
  int64_t tile = 0;
  for (; tile + 1 < tiles; ++tile) {
    const double next = before + sums[tile];
    if (next > target || next == total) break;
    before = next;
  }
  const int64_t first = tile * kTile, last = first + kTile < size ? first + kTile : size;
  double inner_total = 0;
  for (int64_t i = first; i < last; ++i) inner_total += weights[i] < lowest ? 0.0f : weights[i];
  double inner = 0;
  for (int64_t i = first; i < last; ++i) {
    inner += weights[i] < lowest ? 0.0f : weights[i];
    if (inner > target - before || inner == inner_total) return i;
  }
  return last - 1;
}

// Chooses for a row whose scores have become weights.
int64_t draw_row(const ChooseArgs& args, int64_t i, Tiles tiles, const Workspace& work) {
  const float* weights = args.scores + i * args.stride;
  const int64_t row = args.rows[i], size = args.vocab_size, num_tiles = tiles_of(size);
  const Filters filters = {args.columns.top_k[row], args.columns.top_p[row], args.columns.min_p[row]};
  float lowest = 0;
  if (filters.any(size)) {
    if (filters.ranked(size))
      lowest = lowest_ranked(weights, size, add_up(tiles.sums, num_tiles), filters, tiles.most, num_tiles * kLanes,
                             work);
    if (filters.min_p > lowest) lowest = filters.min_p;
    sum_kept(weights, size, lowest, tiles.sums);
  }
  return draw(weights, size, tiles.sums, lowest, uniform(args.columns.seed[row], args.numbers[i]));
}

// -- the kernel -------------------------------------------------------------------------------------------------------

constexpr int64_t kPieces = 32;  // most pieces that a row is cut into for several threads

int64_t slot_bytes(int64_t vocab_size) {
  const int64_t floats = tiles_of(vocab_size) * (1 + kLanes);
  return (floats * 4 + kPieces * static_cast<int64_t>(sizeof(Best)) + 127) / 64 * 64;
}

// What is kept of a row while it is worked on: by one thread, or by all of them.
struct Slot {
  Tiles tiles;
  Best* pieces;
};

Slot slot_at(const ChooseArgs& args, int64_t number) {
  std::byte* base = args.scratch + number * slot_bytes(args.vocab_size);
  auto* sums = reinterpret_cast<float*>(base + kPieces * sizeof(Best));
  return {{sums, sums + tiles_of(args.vocab_size)}, reinterpret_cast<Best*>(base)};
}

std::size_t choose_scratch(int64_t vocab_size, int threads) {
  return static_cast<std::size_t>(slot_bytes(vocab_size) * threads);
}

void choose_row(const ChooseArgs& args, int64_t i, const Slot& slot, const Workspace& work) {
  float* scores = args.scores + i * args.stride;
  const int64_t size = args.vocab_size, tiles = tiles_of(size);
  const Best best = scan_tiles(scores, size, 0, tiles);
  if (!best.usable()) {
    args.tokens[i] = -1;
  } else if (is_greedy(args.columns, args.rows[i])) {
    args.tokens[i] = best.index;
  } else {
    weigh_tiles(scores, size, 0, tiles, best.value, args.columns.temperature[args.rows[i]], slot.tiles);
    args.tokens[i] = draw_row(args, i, slot.tiles, work);
  }
}

// Fewer rows than threads: all threads work on each row, piece by piece, in three phases.
void choose_together(const ChooseArgs& args, Team& team) {
  const Workspace work = workspace_at(team.scratch());
  const int64_t size = args.vocab_size, tiles = tiles_of(size);
  const int64_t wanted = 2 * static_cast<int64_t>(team.count()) < kPieces ? 2 * team.count() : kPieces;
  const int64_t depth = (tiles + wanted - 1) / wanted, pieces = (tiles + depth - 1) / depth;
  auto piece_end = [=](int64_t piece) { return (piece + 1) * depth < tiles ? (piece + 1) * depth : tiles; };
  auto best_of = [&](int64_t i) {
    const Best* found = slot_at(args, i).pieces;
    Best best = found[0];
    for (int64_t piece = 1; piece < pieces; ++piece) best = better(best, found[piece]);
    return best;
  };
  for (int64_t task = team.take(); task < args.count * pieces; task = team.take()) {
    const int64_t i = task / pieces, piece = task % pieces;
    slot_at(args, i).pieces[piece] =
        scan_tiles(args.scores + i * args.stride, size, piece * depth, piece_end(piece));
  }
  team.barrier();
  for (int64_t task = team.take(); task < args.count * pieces; task = team.take()) {
    const int64_t i = task / pieces, piece = task % pieces;
    const Best best = best_of(i);
    if (!best.usable() || is_greedy(args.columns, args.rows[i])) continue;
    weigh_tiles(args.scores + i * args.stride, size, piece * depth, piece_end(piece), best.value,
                args.columns.temperature[args.rows[i]], slot_at(args, i).tiles);
  }
  team.barrier();
  for (int64_t i = team.take(); i < args.count; i = team.take()) {
    const Best best = best_of(i);
    if (!best.usable())
      args.tokens[i] = -1;
    else if (is_greedy(args.columns, args.rows[i]))
      args.tokens[i] = best.index;
    else
      args.tokens[i] = draw_row(args, i, slot_at(args, i).tiles, work);
  }
}

void choose(const ChooseArgs& args, Team& team) {
  if (args.count < team.count()) {
    choose_together(args, team);
    return;
  }
  const Slot slot = slot_at(args, team.index());
  const Workspace work = workspace_at(team.scratch());
  for (int64_t i = team.take(); i < args.count; i = team.take()) choose_row(args, i, slot, work);
}

// -- log-probabilities ------------------------------------------------------------------------------------------------

// The largest values met so far, largest first, the earlier ones first among equals.
struct Ranking {
  int64_t width;
  int64_t used = 0;
  float values[kMostRanked] = {};
  int64_t tokens[kMostRanked] = {};

  // What a value must exceed to get in.
  float bound() const { return width == 0 ? kInfinity : used < width ? -kInfinity : values[width - 1]; }

  void insert(float value, int64_t token) {  // width > 0
    used += used < width;
    uint64_t at = static_cast<uint64_t>(used - 1) % kMostRanked;
    for (; at > 0 && values[at - 1] < value; --at) {
      values[at] = values[at - 1];
      tokens[at] = tokens[at - 1];
    }
    values[at] = value;
    tokens[at] = token;
  }
};

// One vector: adds to `sum` and `above`, and ranks what is larger than the ranking's last.
QUIRE_INLINE void rank_vector(vf logit, int64_t token, vf largest, vf chosen, vf& sum, vi& above, vf& bound,
                              Ranking& ranking) {
  sum += exp(logit - largest);
  above -= logit > chosen;
  uint32_t news = larger(logit, bound);
  if (!news) return;
  float lane[kLanes];
  store(lane, logit);
  for (; news; news &= news - 1) {
    const int at = __builtin_ctz(news);
    if (lane[at] > ranking.bound()) ranking.insert(lane[at], token + at);
  }
  bound = broadcast(ranking.bound());
}

void rank_row(const RankArgs& args, int64_t i) {
  const float* row = args.logits + i * args.stride;
  const int64_t size = args.vocab_size;
  const Best best = scan_tiles(row, size, 0, tiles_of(size));
  const float chosen = row[args.tokens[i]];
  if (!best.usable() || !(chosen > -kInfinity)) {
    args.logprobs[i] = __builtin_nanf("");
    return;
  }
  Ranking ranking;
  ranking.width = args.width;
  const vf largest = broadcast(best.value), threshold = broadcast(chosen);
  vf bound = broadcast(ranking.bound());
  vi above{};
  double total = 0;
  for (int64_t t = 0; t * kTile < size; ++t) {
    const int64_t left = size - t * kTile;
    vf sum = zero();
    for (int64_t v = 0; v < kTileVectors; ++v) {
      vf logit = left >= kTile ? tile_vector<true>(row + t * kTile, v, left, -kInfinity)
                               : tile_vector<false>(row + t * kTile, v, left, -kInfinity);
      rank_vector(logit, t * kTile + v * kLanes, largest, threshold, sum, above, bound, ranking);
    }
    total += sum_lanes(sum);
  }
  // Impossible tokens are above no bound: the lowest of them fill up what is left.
  for (int64_t token = 0; ranking.used < args.width; ++token)
    if (row[token] == -kInfinity) ranking.insert(-kInfinity, token);
  const double log_total = static_cast<double>(best.value) + __builtin_log(total);
  int64_t rank = 1;
  for (int lane = 0; lane < kLanes; ++lane) rank += above[lane];
  args.logprobs[i] = static_cast<float>(chosen - log_total);
  args.ranks[i] = rank;
  for (int64_t n = 0; n < args.width; ++n) {
    args.top_tokens[i * args.width + n] = ranking.tokens[n];
    args.top_logprobs[i * args.width + n] = static_cast<float>(ranking.values[n] - log_total);
  }
}

void rank(const RankArgs& args, Team& team) {
  for (int64_t i = team.take(); i < args.count; i = team.take()) rank_row(args, i);
}

}  // namespace

extern const SamplingKernels kSampling;
const SamplingKernels kSampling = {choose, choose_scratch, rank, lowest_kept};

}  // namespace quire::QUIRE_ISA
