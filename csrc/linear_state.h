// What a run is told of the states of its sequences, and how a page of a layer that keeps a state looks.
//
// A page holds float32 (quire/layers/states.py), rows filled up to kStateLine elements. Of the delta rule, from
// DeltaArgs::offset on:
//   state    [value_heads][key_dim][value]    after the last border: an absolute multiple of kBorder tokens
//   updates  [value_heads][kKeptRows][value]  of the tokens behind the border
//   keys     [key_heads][kKeptRows][key]      of unit length
//   decays   [value_heads][kBorder]           logarithms; the last has no meaning
// Of a convolution, from ConvolutionArgs::offset on: inputs [kept][channels], the last ones, by their positions modulo kept.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels.h"

namespace quire {

inline constexpr int64_t kBorder = 64;
inline constexpr int64_t kKeptRows = kBorder - 1;
inline constexpr int64_t kStateLine = 16;     // elements of a cache line
inline constexpr int64_t kMaxStateDim = 256;  // of a key, and of a value
inline constexpr int64_t kMaxTaps = 8;        // of a convolution

inline __attribute__((always_inline)) constexpr int64_t line_elements(int64_t count) {
  return (count + kStateLine - 1) / kStateLine * kStateLine;
}

// Places in a page, in elements from DeltaArgs::offset.
struct DeltaPlaces {
  int64_t key, value;  // elements of a row
  int64_t updates, keys, decays, end;
  inline __attribute__((always_inline)) explicit DeltaPlaces(const DeltaArgs& args)
      : key(line_elements(args.key_dim)),
        value(line_elements(args.value_dim)),
        updates(args.value_heads * args.key_dim * value),
        keys(updates + args.value_heads * kKeptRows * value),
        decays(keys + args.key_heads * kKeptRows * key),
        end(decays + args.value_heads * kBorder) {}
};

// Where one layer's states lie.
struct StateLayer {
  std::byte* pages = nullptr;
  int64_t page_bytes = 0;  // from page to page
  const int32_t* table = nullptr;  // [num_sequences, blocks], table_stride apart
  int64_t table_stride = 0;
};

// The states of a step: `num_sequences` sequences that own the rows between successive query starts, which continue
// behind starts[s] computed tokens. Block i of a sequence is a page of each layer: its state after (i + 1) * interval
// tokens, or fewer: after all. Arrays belong to the caller and outlive the step.
struct StatePlan {
  // Throws std::invalid_argument for starts that fall, an interval that is no multiple of kBorder, tables that are too
  // narrow and blocks that do not exist: whatever a kernel will read or write lies in the pool afterwards.
  // num_blocks: of each layer. Allocates only for more sequences, or layers, than any step before had.
  void set(int64_t num_sequences, const int64_t* query_start, const int64_t* starts, int64_t interval,
           const std::vector<StateLayer>& layers, const std::vector<int64_t>& num_blocks, int64_t table_width);

  bool has(int64_t layer, int64_t bytes) const noexcept {
    return layer >= 0 && layer < static_cast<int64_t>(layers_.size()) && layers[layer].page_bytes >= bytes;
  }

  int64_t rows = 0;
  int64_t num_sequences = 0;
  int64_t interval = kBorder;
  const int64_t* query_start = nullptr;  // [num_sequences + 1]
  const int64_t* starts = nullptr;       // [num_sequences]
  // Kernels read these by address: a vector's own functions may be compiled for a later instruction set.
  const StateLayer* layers = nullptr;
  const int64_t* order = nullptr;  // [num_sequences]: those with the most rows first

 private:
  std::vector<StateLayer> layers_;
  std::vector<int64_t> order_;
};

}  // namespace quire
