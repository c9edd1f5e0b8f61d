// bfloat16 weights times activations that are rounded to bfloat16 when they are packed, on tiles of AMX: the panels are
// the right operand as they lie. Every number of rows runs on tiles, because tdpbf16ps adds the products of an element in
// another order than vdpbf16ps. That order depends on the depth of the matrix alone, so that a row has the same bits in
// any batch.
//
// Packed rows: [k / 32][32 rows][32] bfloat16, with zeros behind the last value of a row. Rows that a tile does not have
// hold what was in the memory before: nothing of it comes into the sums of another row.
#pragma once

#include "bf16_dot.h"
#include "linear_amx_few.h"
#include "linear_driver.h"

namespace quire::QUIRE_ISA {
namespace {

// Registers 0 to 3 for sums, 4 and 5 for rows of x, of which there are `rows`, and 6 and 7 for weights: fewer rows than
// 16 are loaded, multiplied and stored in less time. What is done between amx_configure and amx_release is done by one
// thread.
inline AmxConfig tiles_of(int64_t rows) {
  AmxConfig config;
  for (int tile = 0; tile < 8; ++tile) {
    config.rows[tile] = static_cast<uint8_t>(tile < 6 && rows < kAmxRows ? rows : kAmxRows);
    config.row_bytes[tile] = kAmxRowBytes;
  }
  return config;
}

// Rows that are multiplied at once, in pairs of registers: 32, or no more than 16.
enum class AmxHeight { kOne, kTwo };

struct AmxBf16 {
  static constexpr int64_t kPairRows = 2 * kAmxRows;
  static constexpr int64_t kRows = 2 * kPairRows;
  static constexpr int64_t kRowStep = kAmxRows;
  static constexpr int64_t kPackedRows = 4;  // at once
  static constexpr int64_t kPrefetchAhead = 16384;
  static constexpr int64_t kBlockBytes = 1 << 20;
  static constexpr int64_t kGroupBytes = 256 << 10;
  static constexpr bool kExpects = false;  // tiles are loaded in its place: asking took longer than waiting
  static constexpr int64_t kStep = 32;                  // values of k that a register covers
  static constexpr int64_t kStepBytes = kAmxStepBytes;  // of the rows of a pair, and of a panel
  // Steps between which two pairs of registers take turns, so that both find the same part of the panel in the L1 cache.
  static constexpr int64_t kMostSteps = 9;

  static int64_t steps(const PackedWeight& weight) { return (weight.in_features + kStep - 1) / kStep; }

  static TileLayout layout(const PackedWeight& weight) {
    TileLayout layout;
    layout.data_bytes = kRows / kPairRows * steps(weight) * kStepBytes;
    layout.sums_offset = layout.scales_offset = layout.bytes = layout.data_bytes;
    return layout;
  }

  static void pack(const PackedWeight& weight, const float* x, int64_t stride, int64_t rows, std::byte* memory) {
    const int64_t pair_bytes = steps(weight) * kStepBytes;
    for (int64_t row = 0; row < rows; row += kPackedRows) {
      std::byte* out = memory + row / kPairRows * pair_bytes + row % kPairRows * kAmxRowBytes;
      pack_rows(weight, x + row * stride, stride, rows - row < kPackedRows ? rows - row : kPackedRows, out);
    }
  }

  // 32 values of k: four products of 16 x 16, or two.
  template <AmxHeight kHeight>
  static QUIRE_INLINE void step(const std::byte* x, const std::byte* panel) {
    amx_load<6>(panel, 2 * kAmxRowBytes);
    amx_load<4>(x, kAmxRowBytes);
    amx_load<7>(panel + kAmxRowBytes, 2 * kAmxRowBytes);
    amx_dot_bf16<0, 4, 6>();
    amx_dot_bf16<1, 4, 7>();
    if constexpr (kHeight == AmxHeight::kTwo) {
      amx_load<5>(x + kAmxRows * kAmxRowBytes, kAmxRowBytes);
      amx_dot_bf16<2, 5, 6>();
      amx_dot_bf16<3, 5, 7>();
    }
  }

  // Asks for a part of what is needed soon with every step over the panel.
  struct Ahead {
    const std::byte* at;
    int64_t part;  // bytes
    bool far;
    QUIRE_INLINE void ask() {
      for (int64_t line = 0; line < part; line += 64) {
        if (far)
          __builtin_prefetch(at + line, 0, 2);
        else
          __builtin_prefetch(at + line, 0, 3);
      }
      at += part;
    }
  };

  // A few rows side by side: what is read lies in few streams, and what is written in more than a line.
  static void pack_rows(const PackedWeight& weight, const float* x, int64_t stride, int64_t rows, std::byte* out) {
    const int64_t depth = weight.in_features;
    alignas(64) float buffer[kStep];
    alignas(64) uint16_t rounded[kStep];
    for (int64_t k = 0; k < depth; k += kStep, out += kStepBytes)
      for (int64_t row = 0; row < rows; ++row) {
        std::byte* to = out + row * kAmxRowBytes;
        const int64_t count = depth - k < kStep ? depth - k : kStep;
        const float* from = contiguous(x + row * stride, weight.column_order, k, count, buffer);
        // The rows that follow, and where they go: no prefetcher finds them all.
        const float* soon = x + (row + kPackedRows) * stride + k;
        __builtin_prefetch(soon, 0, 3);
        __builtin_prefetch(soon + 16, 0, 3);
        __builtin_prefetch(to + kPackedRows * kAmxRowBytes, 1, 3);
        if (count == kStep) {
          for (int64_t i = 0; i < kStep; i += kLanes) round_bf16(reinterpret_cast<uint16_t*>(to) + i, load(from + i));
        } else {
          std::memset(rounded, 0, sizeof(rounded));
          round_row(from, count, rounded);
          std::memcpy(to, rounded, sizeof(rounded));
        }
      }
  }

  // Steps first .. end of one pair's rows, added to what `sums` holds.
  template <AmxHeight kHeight>
  static void add_steps(const Tile& tile, const std::byte* x, int64_t first, int64_t end, Ahead& ahead, float* sums) {
    const int64_t whole = padded_depth(*tile.weight) / kStep;
    float* lower = sums + kAmxRows * kPanel;
    if (first == 0) {
      amx_zero<0>(), amx_zero<1>();
      if constexpr (kHeight == AmxHeight::kTwo) amx_zero<2>(), amx_zero<3>();
    } else {
      amx_load<0>(sums, kPanel * 4), amx_load<1>(sums + 16, kPanel * 4);
      if constexpr (kHeight == AmxHeight::kTwo) amx_load<2>(lower, kPanel * 4), amx_load<3>(lower + 16, kPanel * 4);
    }
    int64_t at = first;
    for (; at < end && at < whole; ++at) {
      ahead.ask();
      step<kHeight>(x + at * kStepBytes, tile.panel + at * kStepBytes);
    }
    if (at < end) {  // what follows the panel is not read: it may not be there
      alignas(64) std::byte padded[kStepBytes] = {};
      const int64_t values = padded_depth(*tile.weight) - at * kStep;
      std::memcpy(padded, tile.panel + at * kStepBytes, static_cast<std::size_t>(values) * kPanel * 2);
      step<kHeight>(x + at * kStepBytes, padded);
    }
    amx_store<0>(sums, kPanel * 4), amx_store<1>(sums + 16, kPanel * 4);
    if constexpr (kHeight == AmxHeight::kTwo) amx_store<2>(lower, kPanel * 4), amx_store<3>(lower + 16, kPanel * 4);
  }

  static void multiply(const Tile& tile, int64_t rows) {
    if (rows <= kMostFewRows) return kFewRows[rows - 1](tile);
    const int64_t count = steps(*tile.weight), pair_bytes = count * kStepBytes;
    const int64_t chunks = rows > kPairRows ? (count + kMostSteps - 1) / kMostSteps : 1;
    const int64_t lines = kStepBytes / 64 * tile.prefetch_step;  // bytes of a step
    Ahead ahead{tile.prefetch, lines / (rows > kPairRows ? 2 : 1), tile.prefetch_far};
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      const int64_t first = chunk * count / chunks, end = (chunk + 1) * count / chunks;
      for (int64_t row = 0; row < rows; row += kPairRows)
        (rows - row > kAmxRows ? add_steps<AmxHeight::kTwo> : add_steps<AmxHeight::kOne>)(
            tile, tile.x + row / kPairRows * pair_bytes, first, end, ahead, tile.out + row * kPanel);
    }
  }
};

}  // namespace
}  // namespace quire::QUIRE_ISA
