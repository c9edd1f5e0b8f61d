// A few rows of bfloat16 products in vectors, with the bits of tiles: tdpbf16ps adds the first values of 16 pairs in one
// chain, the second ones in another, and both to the sum, and so does this. Reading the weights is what takes the time, and
// of what vectors read the prefetchers bring more in time than of what tiles do (docs/performance/cpu.md).
#pragma once

#include <xmmintrin.h>

#include "amx_tiles.h"
#include "linear_tile.h"

namespace quire::QUIRE_ISA {
namespace {

// Bytes that 32 values of k take of a panel, and of 32 packed rows.
inline constexpr int64_t kAmxStepBytes = 2 * kAmxRows * kAmxRowBytes;

// While it lives, what is subnormal counts as zero, as in tiles.
class FlushSubnormals {
 public:
  FlushSubnormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040); }
  ~FlushSubnormals() { _mm_setcsr(before_); }
  FlushSubnormals(const FlushSubnormals&) = delete;
  FlushSubnormals& operator=(const FlushSubnormals&) = delete;

 private:
  unsigned before_;
};

// The products of up to 16 pairs of k: sums[row][32] += x[row] times panel.
template <int kRows>
QUIRE_INLINE void few_step(const Tile& tile, const std::byte* x, const std::byte* panel, int64_t pairs,
                           const std::byte*& soon, vf (&sums)[kRows][2]) {
  alignas(64) float first[kRows][kLanes], second[kRows][kLanes];
  vf chains[kRows][4];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
    const vu words = load_as<vu>(x + r * kAmxRowBytes);
    store(first[r], bit_cast<vf>(words << 16));
    store(second[r], bit_cast<vf>(words & 0xffff0000u));
    chains[r][0] = chains[r][1] = chains[r][2] = chains[r][3] = zero();
  }
  for (int64_t pair = 0; pair < pairs; ++pair, panel += 2 * kAmxRowBytes) {
    const vu low = load_as<vu>(panel), high = load_as<vu>(panel + kAmxRowBytes);
    const vf weights[4] = {bit_cast<vf>(low << 16), bit_cast<vf>(high << 16), bit_cast<vf>(low & 0xffff0000u),
                           bit_cast<vf>(high & 0xffff0000u)};
    for (int line = 0; line < 2; ++line, soon += tile.prefetch_step) prefetch_line(tile, soon);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const vf a = broadcast(first[r][pair]), b = broadcast(second[r][pair]);
      chains[r][0] = fma(a, weights[0], chains[r][0]);
      chains[r][1] = fma(a, weights[1], chains[r][1]);
      chains[r][2] = fma(b, weights[2], chains[r][2]);
      chains[r][3] = fma(b, weights[3], chains[r][3]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
    sums[r][0] += chains[r][0] + chains[r][2];
    sums[r][1] += chains[r][1] + chains[r][3];
  }
}

template <int kRows>
void few_rows(const Tile& tile) {
  const FlushSubnormals flush;
  const int64_t pairs = padded_depth(*tile.weight) / 2;
  vf sums[kRows][2];
  for (auto& sum : sums) sum[0] = sum[1] = zero();
  const std::byte *x = tile.x, *panel = tile.panel, *soon = tile.prefetch;
  for (int64_t pair = 0; pair < pairs; pair += kAmxRows, x += kAmxStepBytes, panel += kAmxStepBytes)
    few_step<kRows>(tile, x, panel, pairs - pair < kAmxRows ? pairs - pair : kAmxRows, soon, sums);
  for (int r = 0; r < kRows; ++r) {
    store(tile.out + r * kPanel, sums[r][0]);
    store(tile.out + r * kPanel + kLanes, sums[r][1]);
  }
}

const TileKernel kFewRows[] = {few_rows<1>, few_rows<2>, few_rows<3>, few_rows<4>};
constexpr int64_t kMostFewRows = sizeof(kFewRows) / sizeof(kFewRows[0]);

}  // namespace
}  // namespace quire::QUIRE_ISA
