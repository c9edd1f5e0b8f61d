// What an attention run is told of a step, and how a block of the KV cache looks.
//
// A block holds block_size tokens of one layer. Its key/value heads follow each other, each with all that is its own,
// so that one head's share of a block is one piece of memory:
//   [i8 only] scale of each token's key     [block_size] float32
//   [i8 only] scale of each token's value   [block_size] float32
//   keys     [block_size / w][head_dim / p][w][p]  w = min(16, block_size): w keys side by side fill a vector, so that
//                                                  scores need no sums across lanes
//   values   [block_size / q][head_dim][q]         q = min(p, block_size)
// p elements make a word of 32 bits (f32: 1, bf16: 2, i8 and e4m3: 4): of one key, what dot products of pairs and quadruples
// multiply in one lane; of p successive tokens' values, likewise. Elsewhere a shift makes a float of each.
// Nothing is padded: a token takes block_bytes / block_size bytes exactly. i8 elements stand for value * scale; e4m3 ones
// (small_floats.h) for themselves times one scale of the layer, which is in no block. A token whose key or value is not
// finite has an e4m3 key of NaNs, of which the first is looked at; its other elements, and those of values, are read as if
// they were numbers.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels.h"

namespace quire {

#define QUIRE_HEADER_INLINE inline __attribute__((always_inline))  // no copy for the linker to choose among

inline constexpr int64_t kSubtile = 16;       // keys side by side in a block
inline constexpr int64_t kKeyTile = 64;       // keys between two looks at the running maximum
inline constexpr int64_t kSplitKeys = 256;    // keys that are summed up before they are merged with what came before
inline constexpr int64_t kItemRows = 96;      // most rows (token x query head of the group) of a work item
inline constexpr int64_t kWordBytes = 4;
inline constexpr int64_t kMaxHeadDim = 256;   // of 8, 16, 24 ...
inline constexpr int64_t kMaxBlockSize = 1024;
inline constexpr int64_t kMaxPartialRows = 8192;
// What a running maximum is before any key: finite, so that differences of maxima are never NaN.
inline constexpr float kNothing = -3.402823466e38f;

// The logarithm of a sum of weights, each divided by e^maximum.
QUIRE_HEADER_INLINE float log_sum(float maximum, float weight) {
  if (weight == 0) return kNothing;  // no key is seen
  return static_cast<float>(static_cast<double>(maximum) + __builtin_log(static_cast<double>(weight)));
}

QUIRE_HEADER_INLINE constexpr int64_t element_bytes(CacheType type) {
  return type == CacheType::kF32 ? 4 : type == CacheType::kBF16 ? 2 : 1;
}
// Elements of a word.
QUIRE_HEADER_INLINE constexpr int64_t word_elements(CacheType type) { return kWordBytes / element_bytes(type); }
// Bytes of the scales of one head's keys (and of its values) in a block.
QUIRE_HEADER_INLINE constexpr int64_t scale_bytes(int64_t block_size, CacheType type) {
  return type == CacheType::kI8 ? block_size * 4 : 0;
}
// Bytes of one head's share of a block, and where its keys and values begin there.
QUIRE_HEADER_INLINE constexpr int64_t keys_offset(int64_t block_size, CacheType type) {
  return 2 * scale_bytes(block_size, type);
}
QUIRE_HEADER_INLINE constexpr int64_t values_offset(int64_t block_size, int64_t head_dim, CacheType type) {
  return keys_offset(block_size, type) + block_size * head_dim * element_bytes(type);
}
QUIRE_HEADER_INLINE constexpr int64_t head_bytes(int64_t block_size, int64_t head_dim, CacheType type) {
  return values_offset(block_size, head_dim, type) + block_size * head_dim * element_bytes(type);
}

// The first position that a row at `position` sees: of the last `window` ones, its own included, or of its chunk of
// `window`. A window of 0: all.
QUIRE_HEADER_INLINE constexpr int64_t first_seen(int64_t position, int64_t window, bool chunked) {
  if (window == 0) return 0;
  if (chunked) return position / window * window;
  return position < window ? 0 : position - window + 1;
}

// The dealing of a sequence's tokens to `ranks` ranks, runs of `run` tokens in turns; this rank keeps the others of number
// `rank`. Its own tokens are numbered without gaps.
struct Deal {
  int64_t ranks = 1;
  int64_t rank = 0;
  int64_t run = 1;

  // How many of the first `count` tokens are this rank's.
  QUIRE_HEADER_INLINE int64_t kept(int64_t count) const {
    if (ranks == 1) return count;
    const int64_t round = ranks * run, rest = count % round - rank * run;
    return count / round * run + (rest < 0 ? 0 : rest < run ? rest : run);
  }
  // The number of the last own token that a token at `position` sees; -1: it sees none.
  QUIRE_HEADER_INLINE int64_t last_seen(int64_t position) const { return kept(position + 1) - 1; }
  QUIRE_HEADER_INLINE bool keeps(int64_t position) const { return ranks == 1 || position / run % ranks == rank; }
};

// Rows first_row .. first_row + rows - 1 of a sequence (row = token * heads per group + head) against the keys of some
// splits, for each key head. What `partial` counts are rows of the shared scratch: a place for each split and row;
// -1: the item has all of its rows' keys and writes their output.
struct AttentionItem {
  int32_t sequence = 0;
  int32_t rows = 0;
  int64_t first_row = 0;
  int64_t first_split = 0;
  int64_t last_split = 0;  // one past
  int64_t partial = -1;
  int64_t cost = 0;
};

// One KV group's view of a step: `num_sequences` sequences that own the rows between successive query starts.
// Arrays belong to the caller and outlive the step.
struct AttentionPlan {
  // Constant for a group of layers. deal: of each sequence's tokens to ranks; then `block_table` and `slots` are this rank's
  // (a slot of -1: another rank keeps the row's key and value), and blocks are filled with its tokens alone. window, chunked: as AttentionArgs has them. latent: the kernels of latent.cpp run over it, with their items.
  // top: keys that a token reads, chosen for it alone: items have rows of one token (0: all that it sees).
  AttentionPlan(int64_t block_size, int64_t num_blocks, int64_t num_heads, int64_t num_kv_heads, int64_t window,
                int threads, bool latent = false, bool chunked = false,
                int64_t top = 0, Deal deal = {});

  // Cut a step into items. Throws std::invalid_argument for starts that fall, slots or blocks that do not exist and
  // tables that are too narrow: whatever a kernel will read or write lies in the pool afterwards. Allocates only when
  // a step has more items than any before.
  void set(int64_t num_sequences, const int64_t* query_start, const int64_t* start_positions,
           const int32_t* block_table, int64_t table_width, int64_t table_stride, const int64_t* slots);
  // Cut the step that `set` has cut anew: its rows see up to the position `last_seen` [rows], of the step at most and never
  // falling in a sequence. Throws std::invalid_argument for other positions.
  void see_ahead(const int64_t* last_seen);

  // The last position that a row sees. position: its own.
  QUIRE_HEADER_INLINE int64_t last_position(int64_t row, int64_t position) const {
    return last_seen == nullptr ? position : last_seen[row];
  }

  bool fits(const AttentionArgs& args) const noexcept {
    return args.block_size == block_size && args.num_blocks == num_blocks && args.num_heads == num_heads &&
           args.num_kv_heads == num_kv_heads && args.window == window && args.chunked == chunked && !latent;
  }
  bool fits(const LatentArgs& args) const noexcept {
    return args.block_size == block_size && args.num_blocks == num_blocks && args.num_heads == num_heads && latent &&
           args.top == top;
  }
  bool fits(const IndexArgs& args) const noexcept {
    return args.block_size == block_size && args.num_blocks == num_blocks && latent && args.top == top;
  }

  int64_t block_size, num_blocks, num_heads, num_kv_heads, window;
  int threads;
  bool latent, chunked;
  int64_t top;
  int64_t item_rows, row_padding, most_partial_rows;

  int64_t rows = 0;
  int64_t num_sequences = 0;
  const int64_t* query_start = nullptr;      // [num_sequences + 1]
  const int64_t* start_positions = nullptr;  // [num_sequences]: position of each sequence's first row
  const int32_t* block_table = nullptr;      // [num_sequences, table_width], table_stride apart
  int64_t table_stride = 0;
  const int64_t* slots = nullptr;            // [rows]: block * block_size + offset of each row's key and value

  // Kernels read these by address: a vector's own functions may be compiled for a later instruction set.
  const AttentionItem* items = nullptr;  // [num_items], the most expensive first
  int64_t num_items = 0;
  const AttentionItem* merges = nullptr;  // [num_merges]: put together, from all splits, when the items are done
  int64_t num_merges = 0;
  int64_t partial_rows = 0;  // of each key head
  Deal deal;
  const int64_t* last_seen = nullptr;  // [rows]: last position that each row sees; null: its own

 private:
  void check(int64_t table_width) const;
  void clear();
  void cut_items();
  void cut();
  void split();
  std::vector<AttentionItem> whole_, items_, merges_;
};

}  // namespace quire
