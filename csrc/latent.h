// What latent attention's kernels and their plan agree on. A page holds [block_size][rank + rope_dim] elements: a
// token's vector is in one piece, the compressed part first. Behind them, where an indexer chooses keys, its own keys:
// [block_size][dim].
#pragma once

#include <cstdint>

namespace quire {

inline constexpr int64_t kLatentRows = 64;      // most rows (token x query head) of a work item
inline constexpr int64_t kLatentPadding = 16;   // partial results have room for a multiple of this many rows
inline constexpr int64_t kMaxLatentRank = 512;  // of 8, 16, 24 ...
inline constexpr int64_t kMaxLatentWidth = 640;
inline constexpr int64_t kMaxLatentPartialRows = 32768;
inline constexpr int64_t kMaxIndexHeads = 64;
inline constexpr int64_t kMaxIndexDim = 256;
inline constexpr int64_t kMaxIndexTop = 8192;

}  // namespace quire
