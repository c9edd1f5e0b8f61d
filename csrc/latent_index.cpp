// The indexer of sparse latent attention (DeepSeek-V3.2): which keys a token reads. Compiled once for each instruction
// set.
//
// A key's score is a weighted sum over the indexer's heads of relu(query · key). Heads lie side by side in vectors and a
// key's elements are broadcast, as in latent.cpp; heads are added in one order. The best keys are chosen by score and,
// of equal scores, by position, the lower one first: what is chosen does not depend on how keys are passed over.
#include "attention.h"
#include "head_rows.h"
#include "latent.h"

namespace quire::QUIRE_ISA {
namespace {

constexpr int kPair = 2;                   // vectors of heads in a register tile
constexpr int kKeys = 4;                   // keys in a register tile
constexpr int64_t kMaxVectors = kMaxIndexHeads / kLanes;

// A thread's working memory. Candidates are ordered as their scores are, and of equal ones as positions are not.
struct Scratch {
  alignas(64) float query[kMaxIndexDim * kMaxIndexHeads];  // [vector][element][kLanes]
  float weights[kMaxIndexHeads];
  float keys[kKeys * kMaxIndexDim];
  uint64_t candidates[2 * kMaxIndexTop];  // in order of their positions
  uint64_t unordered[2 * kMaxIndexTop];
};
static_assert(sizeof(Scratch) <= kThreadScratch);

uint64_t candidate(float score, int64_t position) {
  score += 0.0f;  // of the two zeros one
  uint32_t bits = score == score ? bit_cast<uint32_t>(score) : 0xffffffffu;  // NaN comes last
  bits ^= bits >> 31 != 0 ? 0xffffffffu : 0x80000000u;
  return static_cast<uint64_t>(bits) << 32 | (0xffffffffu - static_cast<uint32_t>(position));
}

int64_t position_of(uint64_t candidate) { return 0xffffffffu - static_cast<uint32_t>(candidate); }

// The `rank`-th largest (from 0) of `count` different values, which are left in another order.
uint64_t select_largest(uint64_t* values, int64_t count, int64_t rank) {
  int64_t low = 0, high = count - 1;
  while (low < high) {
    const uint64_t a = values[low], b = values[(low + high) / 2], c = values[high];
    const uint64_t larger = a > b ? a : b, smaller = a > b ? b : a;
    const uint64_t pivot = c > larger ? larger : c < smaller ? smaller : c;
    int64_t i = low, j = high;
    while (i <= j) {
      while (values[i] > pivot) ++i;
      while (values[j] < pivot) --j;
      if (i > j) break;
      const uint64_t kept = values[i];
      values[i++] = values[j];
      values[j--] = kept;
    }
    if (rank <= j) {
      high = j;
    } else if (rank >= i) {
      low = i;
    } else {
      break;
    }
  }
  return values[rank];
}

// Leaves the best `top` candidates, in order of their positions, and returns the least of them.
uint64_t keep_best(Scratch& scratch, int64_t count, int64_t top) {
  std::memcpy(scratch.unordered, scratch.candidates, static_cast<std::size_t>(count) * sizeof(uint64_t));
  const uint64_t least = select_largest(scratch.unordered, count, top - 1);
  int64_t kept = 0;
  for (int64_t i = 0; i < count; ++i)
    if (scratch.candidates[i] >= least) scratch.candidates[kept++] = scratch.candidates[i];
  return least;
}

void load_query(const IndexArgs& args, const float* query, const float* weights, Scratch& scratch) {
  const int64_t dim = args.dim;
  std::memset(scratch.query, 0, static_cast<std::size_t>(dim * kMaxIndexHeads) * sizeof(float));
  for (int64_t h = 0; h < kMaxIndexHeads; ++h) scratch.weights[h] = h < args.num_heads ? weights[h] * args.scale : 0.0f;
  for (int64_t h = 0; h < args.num_heads; ++h) {
    float* to = scratch.query + h / kLanes * dim * kLanes + h % kLanes;
    for (int64_t d = 0; d < dim; ++d) to[d * kLanes] = query[h * dim + d];
  }
}

void load_key(const IndexArgs& args, const int32_t* table, int64_t position, float* to) {
  const int64_t inside = position % args.block_size, bytes = element_bytes(args.cache);
  const std::byte* from = args.pages + table[position / args.block_size] * args.block_bytes +
                          (args.block_size * args.latent_width + inside * args.dim) * bytes;
  if (args.cache == CacheType::kF32) {
    std::memcpy(to, from, static_cast<std::size_t>(args.dim) * sizeof(float));
    return;
  }
  const auto* narrow = reinterpret_cast<const uint16_t*>(from);
  int64_t d = 0;
  for (; d + kLanes <= args.dim; d += kLanes) store(to + d, load_bf16(narrow + d));
  for (; d < args.dim; ++d) to[d] = bit_cast<float>(static_cast<uint32_t>(narrow[d]) << 16);
}

// scores[key]: of kKeys keys that lie in scratch.
void score_keys(const IndexArgs& args, Scratch& scratch, float* scores) {
  const int64_t dim = args.dim, vectors = (args.num_heads + kLanes - 1) / kLanes;
  vf total[kKeys];
#pragma GCC unroll 4
  for (int key = 0; key < kKeys; ++key) total[key] = zero();
  for (int64_t v = 0; v < vectors; v += kPair) {
    // A pair may reach behind the last vector of heads: their queries and weights are zeros.
    const float* query = scratch.query + v * dim * kLanes;
    const float* next = v + 1 < kMaxVectors ? query + dim * kLanes : query;
    vf sum[kKeys][kPair];
#pragma GCC unroll 4
    for (int key = 0; key < kKeys; ++key) sum[key][0] = sum[key][1] = zero();
    for (int64_t d = 0; d < dim; ++d) {
      const vf first = load(query + d * kLanes), second = load(next + d * kLanes);
#pragma GCC unroll 4
      for (int key = 0; key < kKeys; ++key) {
        const vf element = broadcast(scratch.keys[key * kMaxIndexDim + d]);
        sum[key][0] = fma(first, element, sum[key][0]);
        sum[key][1] = fma(second, element, sum[key][1]);
      }
    }
    const vf weight = load(scratch.weights + v * kLanes);
    const vf next_weight = v + 1 < kMaxVectors ? load(scratch.weights + (v + 1) * kLanes) : zero();
#pragma GCC unroll 4
    for (int key = 0; key < kKeys; ++key) {
      total[key] = fma(max(sum[key][0], zero()), weight, total[key]);
      total[key] = fma(max(sum[key][1], zero()), next_weight, total[key]);
    }
  }
  for (int key = 0; key < kKeys; ++key) scores[key] = sum_lanes(total[key]);
}

// The keys that one token reads, of the `count` that it sees: their positions, ascending.
void select_row(const IndexArgs& args, const int32_t* table, int64_t count, Scratch& scratch, float* out) {
  const int64_t top = args.top;
  uint64_t least = 0;
  int64_t held = 0;
  for (int64_t first = 0; first < count; first += kKeys) {
    for (int64_t key = 0; key < kKeys; ++key)
      load_key(args, table, first + key < count ? first + key : count - 1, scratch.keys + key * kMaxIndexDim);
    float scores[kKeys];
    score_keys(args, scratch, scores);
    for (int64_t key = 0; key < kKeys && first + key < count; ++key) {
      const uint64_t found = candidate(scores[key], first + key);
      if (found < least) continue;
      scratch.candidates[held++] = found;
      if (held < 2 * top) continue;
      least = keep_best(scratch, held, top);
      held = top;
    }
  }
  if (held > top) keep_best(scratch, held, top);
  for (int64_t i = 0; i < top; ++i) out[i] = static_cast<float>(position_of(scratch.candidates[i]));
}

void select(const IndexArgs& args, const Step& step, Team& team) {
  const AttentionPlan& plan = *step.attention[args.group];
  int64_t sequence = 0;
  for (int64_t t = team.take(); t < step.rows; t = team.take()) {
    while (plan.query_start[sequence + 1] <= t) ++sequence;
    const int64_t count = plan.start_positions[sequence] + t - plan.query_start[sequence] + 1;
    if (count <= args.top) continue;  // it reads all, and its row of `out` is not looked at
    Scratch& scratch = *reinterpret_cast<Scratch*>(team.scratch());
    load_query(args, step.at(args.query) + t * args.query.stride, step.at(args.weights) + t * args.weights.stride,
               scratch);
    select_row(args, plan.block_table + sequence * plan.table_stride, count, scratch,
               step.at(args.out) + t * args.out.stride);
  }
}

void prepare(const IndexArgs& args, const Step& step, Team& team) {
  const AttentionPlan& plan = *step.attention[args.group];
  const int64_t bytes = element_bytes(args.cache);
  for (int64_t t = team.take(); t < step.rows; t = team.take()) {
    float* query = step.at(args.query) + t * args.query.stride;
    float* key = step.at(args.key) + t * args.key.stride;
    if (args.rotation.present()) {
      const float* turn = step.at(args.rotation) + t * args.rotation.stride;
      for (int64_t h = 0; h < args.num_heads; ++h) rotate_head(query + h * args.dim, turn, args.rope_dim / 2);
      rotate_head(key, turn, args.rope_dim / 2);
    }
    const int64_t slot = plan.slots[t], inside = slot % args.block_size;
    std::byte* to = args.pages + slot / args.block_size * args.block_bytes +
                    (args.block_size * args.latent_width + inside * args.dim) * bytes;
    if (args.cache == CacheType::kF32)
      std::memcpy(to, key, static_cast<std::size_t>(args.dim) * sizeof(float));
    else
      narrow_head(key, args.dim, reinterpret_cast<uint16_t*>(to));
  }
}

}  // namespace

extern const IndexKernels kIndex;
const IndexKernels kIndex = {prepare, select};

}  // namespace quire::QUIRE_ISA
