// Register tiles: up to kTileRows rows of packed activations times one panel. The sums of an element are made by one
// chain over k (inside a group, then over groups), so that neither the tile's height nor what else is in it shows.
#pragma once

#include <type_traits>

#include "linear_tile.h"
#include "small_float_vectors.h"

namespace quire::QUIRE_ISA {
namespace {

// -- float weights --------------------------------------------------------------------------------------------------

// Each type: load_vector is value j of kLanes columns, part * kLanes on.

struct F32 {
  static constexpr int64_t kDepth = 1;   // values of k that lie together
  static constexpr int64_t kStep = 128;  // their bytes of a panel
  static QUIRE_INLINE vf load_vector(const std::byte* at, int part, int) {
    return load(reinterpret_cast<const float*>(at) + part * kLanes);
  }
};

struct BF16 {
  static constexpr int64_t kDepth = 2;
  static constexpr int64_t kStep = 128;
  static QUIRE_INLINE vf load_vector(const std::byte* at, int part, int j) {
    const vu pairs = load_as<vu>(at + part * kLanes * 4);
    return bit_cast<vf>(j == 0 ? pairs << 16 : pairs & 0xffff0000u);
  }
};

struct F16 {
  static constexpr int64_t kDepth = 1;
  static constexpr int64_t kStep = 64;
  static QUIRE_INLINE vf load_vector(const std::byte* at, int part, int) {
    return load_f16(reinterpret_cast<const uint16_t*>(at) + part * kLanes);
  }
};

template <class Weight, int kRows>
void float_tile(const Tile& tile) {
  constexpr int64_t kPitch = pitch_of(kRows);
  const int64_t depth = tile.weight->in_features;
  for (int part = 0; part < kParts; ++part) {
    vf low[kRows], high[kRows];
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) low[r] = high[r] = zero();
    const std::byte* panel = tile.panel;
    const std::byte* soon = tile.prefetch;
    const float* x = reinterpret_cast<const float*>(tile.x);
    for (int64_t k = 0; k < depth; k += Weight::kDepth) {
#pragma GCC unroll 2
      for (int j = 0; j < Weight::kDepth; ++j) {
        const PairOfVectors w = {Weight::load_vector(panel, part, j), Weight::load_vector(panel, part + kParts, j)};
#pragma GCC unroll 12
        for (int r = 0; r < kRows; ++r) {
          const vf value = broadcast(x[j * kPitch + r]);
          low[r] = fma(value, w.low, low[r]);
          high[r] = fma(value, w.high, high[r]);
        }
      }
      for (int64_t line = 0; line < Weight::kStep; line += 64) {
        prefetch_line(tile, soon);
        soon += tile.prefetch_step;
      }
      panel += Weight::kStep;
      x += Weight::kDepth * kPitch;
    }
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
      store(tile.out + r * kPanel + part * kLanes, low[r]);
      store(tile.out + r * kPanel + part * kLanes + 16, high[r]);
    }
  }
}

// -- integers and small floats, float activations -------------------------------------------------------------------

// Each type: kBytes of a panel have kLoads times kValues of k; load(panel, part, i, bias) reads those of load i, and takes
// off the bias of stored values where there is one; pair<j>(words) is value j of them; scales(tile, group, column) is what their sum is then multiplied with.

// 32-bit words of several values of a column.
struct Words {
  static constexpr int kLoads = 1;
  static constexpr int64_t kBytes = 128;
  vi low, high;
  static QUIRE_INLINE Words load(const std::byte* panel, int part, int, int) {
    const std::byte* at = panel + part * kLanes * 4;
    return {load_as<vi>(at), load_as<vi>(at + 64)};
  }
};

template <WeightType kType>
struct StoredScales {
  static QUIRE_INLINE PairOfScales scales(const Tile& tile, int64_t group, int64_t column) {
    return pair_of_scales(tile, kType, group, column);
  }
};

// Scales that are made column by column, without offsets.
template <class Make>
QUIRE_INLINE PairOfScales scales_of(int64_t column, const Make& make) {
  return {{make(column), vf{}}, {make(column + 16), vf{}}};
}

// Values as float32 times 2^(their place) where kScaledPlaces.
template <class Integer, WeightType kType>
struct IntegerWords : Words, StoredScales<kType> {
  template <int j>
  static QUIRE_INLINE PairOfVectors pair(const Words& words) {
    return {Integer::template value<j>(words.low), Integer::template value<j>(words.high)};
  }
};

struct I8 : IntegerWords<I8, WeightType::kI8> {
  static constexpr int kValues = 4;  // of k in a word
  template <int j>
  static QUIRE_INLINE vf value(vi words) {
    return i8_of_word<j>(words);
  }
};

// Where nibble j of 8 lies in a word.
constexpr int nibble_place(int j) { return j < 4 ? 8 * j : 8 * (j - 4) + 4; }

struct I4 : IntegerWords<I4, WeightType::kI4> {
  static constexpr int kValues = 8;
  template <int j>
  static QUIRE_INLINE vf value(vi words) {
    constexpr int kPlace = nibble_place(j);
#if defined(__AVX512F__)
    return __builtin_convertvector(bit_cast<vu>(words) & (15u << kPlace), vf);
#else
    return to_float((words >> kPlace) & 15);
#endif
  }
};

// Integers in planes, and those of a table.
template <WeightType kType>
struct Planes : StoredScales<kType> {
  static constexpr int kLoads = Quads<kType>::kQuads, kValues = 4;
  static constexpr int64_t kBytes = Quads<kType>::kBytes;
  struct Pair {
    vi low, high;
  };
  static QUIRE_INLINE Pair load(const std::byte* panel, int part, int quad, int bias) {
    const int64_t column = part * kLanes;
    return {Quads<kType>::get_signed(panel, quad, column, bias), Quads<kType>::get_signed(panel, quad, column + 16, bias)};
  }
  template <int j>
  static QUIRE_INLINE PairOfVectors pair(const Pair& words) {
    return {to_float((words.low << (24 - j * 8)) >> 24), to_float((words.high << (24 - j * 8)) >> 24)};
  }
};

// 8-bit floats: two lines of pairs.
struct E4M3 {
  static constexpr int kLoads = 1, kValues = 4;
  static constexpr int64_t kBytes = 128;
  struct Lines {
    const std::byte* at;
    int part;
  };
  static QUIRE_INLINE Lines load(const std::byte* panel, int part, int, int) { return {panel, part}; }
  template <int j>
  static QUIRE_INLINE PairOfVectors pair(const Lines& lines) {
    return load_e4m3_pair<j % 2>(lines.at + j / 2 * 64, lines.part);
  }
  static QUIRE_INLINE PairOfScales scales(const Tile& tile, int64_t group, int64_t column) {
    return scales_of(column, [&](int64_t at) { return group_scales(tile, WeightType::kE4M3, group, at).scale * kE4M3Factor; });
  }
};

// 4-bit floats.
struct E2M1 : Words {
  static constexpr int kValues = 8;
  template <int j>
  static QUIRE_INLINE PairOfVectors pair(const Words& words) {
    return {e2m1_at<nibble_place(j)>(words.low), e2m1_at<nibble_place(j)>(words.high)};
  }
};

struct MXFP4 : E2M1 {
  static QUIRE_INLINE PairOfScales scales(const Tile& tile, int64_t group, int64_t column) {
    return scales_of(column, [&](int64_t at) { return load_e8m0(tile.scale_codes + group * kPanel + at) * kE2M1Factor; });
  }
};

struct NVFP4 : E2M1 {
  static QUIRE_INLINE PairOfScales scales(const Tile& tile, int64_t group, int64_t column) {
    return scales_of(column, [&](int64_t at) {
      const vf of_column = quire::QUIRE_ISA::load(tile.scales + at) * (kE4M3Factor * kE2M1Factor);
      return load_e4m3(tile.scale_codes + group * kPanel + at) * of_column;
    });
  }
};

// What a tile has of a group: sums of kRows rows, columns low and high.
template <int kRows>
struct GroupSums {
  vf low[kRows], high[kRows];
};

// x_apart: from one group's rows to the next one's.
template <class Weight, int kRows, int j, int kGroups, class Stored>
QUIRE_INLINE void accumulate_values(const Stored (&words)[kGroups], const float* x, int64_t x_apart,
                                    GroupSums<kRows> (&sums)[kGroups]) {
#pragma GCC unroll 2
  for (int g = 0; g < kGroups; ++g) {
    const PairOfVectors w = Weight::template pair<j>(words[g]);
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
      const vf value = broadcast(x[g * x_apart + j * pitch_of(kRows) + r]);
      sums[g].low[r] = fma(value, w.low, sums[g].low[r]);
      sums[g].high[r] = fma(value, w.high, sums[g].high[r]);
    }
  }
  if constexpr (j + 1 < Weight::kValues) accumulate_values<Weight, kRows, j + 1>(words, x, x_apart, sums);
}

// Adds one group's sums to the totals: total += scale * sum (+ offset * sum of x).
template <class Scales, int kRows, bool kHasOffsets>
QUIRE_INLINE void add_sums(const Tile& tile, int64_t group, int part, const vf* low, const vf* high) {
  constexpr int64_t kPitch = pitch_of(kRows);
  const int64_t column = part * kLanes;
  const auto [of_low, of_high] = Scales::scales(tile, group, column);
  float* out = tile.out + column;
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r, out += kPanel) {
    vf total_low = fma(low[r], of_low.scale, group ? load(out) : zero());
    vf total_high = fma(high[r], of_high.scale, group ? load(out + 16) : zero());
    if constexpr (kHasOffsets) {
      const vf sum = broadcast(tile.x_sums[group * kPitch + r]);
      total_low = fma(sum, of_low.offset, total_low);
      total_high = fma(sum, of_high.offset, total_high);
    }
    store(out, total_low);
    store(out + 16, total_high);
  }
}

template <class Scales, int kRows>
QUIRE_INLINE void add_group(const Tile& tile, int64_t group, int part, const vf* low, const vf* high) {
  if (has_offsets(*tile.weight))
    add_sums<Scales, kRows, true>(tile, group, part, low, high);
  else
    add_sums<Scales, kRows, false>(tile, group, part, low, high);
}

// How far a tile's pass over its groups has come.
struct WideningPlace {
  const std::byte* panel;
  const float* x;
  const std::byte* soon;
};

// Groups group .. group + kGroups - 1, all of one length, side by side.
template <class Weight, int kRows, int kGroups>
QUIRE_INLINE void widen_groups(const Tile& tile, int64_t group, int part, WideningPlace& at) {
  constexpr int kStep = Weight::kLoads * Weight::kValues, kPitch = Weight::kValues * pitch_of(kRows);
  const int64_t steps = (group_length(*tile.weight, group) + kStep - 1) / kStep;
  const int64_t bytes = steps * Weight::kBytes, values = steps * Weight::kLoads * kPitch;
  const int bias = stored_bias(*tile.weight);
  GroupSums<kRows> sums[kGroups];
#pragma GCC unroll 2
  for (int g = 0; g < kGroups; ++g)
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) sums[g].low[r] = sums[g].high[r] = zero();
  for (int64_t step = 0; step < steps; ++step) {
    for (int i = 0; i < Weight::kLoads; ++i, at.x += kPitch) {
      decltype(Weight::load(at.panel, part, i, bias)) words[kGroups];
#pragma GCC unroll 2
      for (int g = 0; g < kGroups; ++g) words[g] = Weight::load(at.panel + g * bytes, part, i, bias);
      accumulate_values<Weight, kRows, 0>(words, at.x, values, sums);
    }
#pragma GCC unroll 4
    for (int line = 0; line < Weight::kBytes / 64 * kGroups; ++line, at.soon += tile.prefetch_step) prefetch_line(tile, at.soon);
    at.panel += Weight::kBytes;
  }
  at.panel += (kGroups - 1) * bytes;
  at.x += (kGroups - 1) * values;
#pragma GCC unroll 2
  for (int g = 0; g < kGroups; ++g) add_group<Weight, kRows>(tile, group + g, part, sums[g].low, sums[g].high);
}

template <class Weight, int kRows>
void widening_tile(const Tile& tile) {
  // One row of long groups has two chains of additions, too few to keep a processor busy: two groups have four.
  constexpr bool kTwoGroups = kRows == 1 && std::is_same_v<Weight, I4>;
  const int64_t groups = num_groups(*tile.weight);
  for (int part = 0; part < kParts; ++part) {
    WideningPlace at{tile.panel, reinterpret_cast<const float*>(tile.x), tile.prefetch};
    int64_t group = 0;
    if constexpr (kTwoGroups) {
      // Read at two places, a group apart: what lies just ahead of the reading is asked for earlier by as much.
      if (!tile.prefetch_far) at.soon += tile.weight->group_size / Weight::kValues * Weight::kBytes;
      for (; group + 2 < groups; group += 2) widen_groups<Weight, kRows, 2>(tile, group, part, at);
    }
    for (; group < groups; ++group) widen_groups<Weight, kRows, 1>(tile, group, part, at);
  }
}

// -- integer weights, integer activations ---------------------------------------------------------------------------

// sum += four products of x and w. Exact: none of the intermediate sums can overflow.
struct RoundedI8 {
  static constexpr WeightType kType = WeightType::kI8;
  static constexpr int kValues = 4;
#if defined(QUIRE_DOT_PAIRS)
  struct Words {
    vi even, odd;  // pairs of 16 bits: values 0 and 2, 1 and 3
  };
  static QUIRE_INLINE Words unpack(vi words, int) {
#if defined(__AVX512F__)
    return {(vi)_mm512_srai_epi16(_mm512_slli_epi16((__m512i)words, 8), 8), (vi)_mm512_srai_epi16((__m512i)words, 8)};
#else
    return {(vi)_mm256_srai_epi16(_mm256_slli_epi16((__m256i)words, 8), 8), (vi)_mm256_srai_epi16((__m256i)words, 8)};
#endif
  }
#else
  using Words = vi;
  static QUIRE_INLINE Words unpack(vi words, int) { return words; }
#endif
};

struct RoundedI4 {
  static constexpr WeightType kType = WeightType::kI4;
  static constexpr int kValues = 8;
#if defined(QUIRE_DOT_PAIRS)
  using Words = RoundedI8::Words;
  static QUIRE_INLINE Words unpack(vi words, int half) {
    const vi values = half ? words >> 4 : words;
    return {values & 0x000f000f, (values >> 8) & 0x000f000f};
  }
#else
  using Words = vi;
  static QUIRE_INLINE Words unpack(vi words, int half) { return (half ? words >> 4 : words) & 0x0f0f0f0f; }
#endif
};

#if defined(QUIRE_DOT_BYTES)
QUIRE_INLINE vi dot(vi sum, const uint32_t* x, vi words, RoundedI8) {
  return (vi)_mm512_dpbusd_epi32((__m512i)sum, _mm512_set1_epi32(static_cast<int32_t>(*x)), (__m512i)words);
}
QUIRE_INLINE vi dot(vi sum, const uint32_t* x, vi words, RoundedI4) {
  return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)words, _mm512_set1_epi32(static_cast<int32_t>(*x)));
}
#elif defined(QUIRE_DOT_PAIRS)
template <class Weight>
QUIRE_INLINE vi dot(vi sum, const uint32_t* x, const RoundedI8::Words& words, Weight) {
  const vi even = broadcast_int(static_cast<int32_t>(x[0])), odd = broadcast_int(static_cast<int32_t>(x[1]));
#if defined(__AVX512F__)
  sum += (vi)_mm512_madd_epi16((__m512i)words.even, (__m512i)even);
  return sum + (vi)_mm512_madd_epi16((__m512i)words.odd, (__m512i)odd);
#else
  sum += (vi)_mm256_madd_epi16((__m256i)words.even, (__m256i)even);
  return sum + (vi)_mm256_madd_epi16((__m256i)words.odd, (__m256i)odd);
#endif
}
#else
template <class Weight>
QUIRE_INLINE vi dot(vi sum, const uint32_t* x, vi words, Weight) {
  const int32_t four = static_cast<int32_t>(*x);
  for (int j = 0; j < 4; ++j) sum += ((words << (24 - 8 * j)) >> 24) * ((four << (24 - 8 * j)) >> 24);
  return sum;
}
#endif

template <class Weight, int kRows>
void rounded_tile(const Tile& tile) {
  constexpr int64_t kPitch = pitch_of(kRows) * kWordsPerQuad;
  const int64_t groups = num_groups(*tile.weight);
  for (int part = 0; part < kParts; ++part) {
    const std::byte* panel = tile.panel + part * kLanes * 4;
    const std::byte* soon = tile.prefetch;
    const uint32_t* x = reinterpret_cast<const uint32_t*>(tile.x);
    for (int64_t group = 0; group < groups; ++group) {
      const int64_t length = group_length(*tile.weight, group);
      vi low[kRows], high[kRows], start_low = {}, start_high = {};
#if defined(QUIRE_DOT_BYTES)
      if constexpr (Weight::kValues == 4) {  // x is 128 too large
        const int32_t* column_sums = tile.column_sums + group * kPanel + part * kLanes;
        start_low = -(load_as<vi>(column_sums) << 7);
        start_high = -(load_as<vi>(column_sums + 16) << 7);
      }
#endif
#pragma GCC unroll 12
      for (int r = 0; r < kRows; ++r) low[r] = start_low, high[r] = start_high;
      for (int64_t k = 0; k < length; k += Weight::kValues) {
        const vi low_words = load_as<vi>(panel), high_words = load_as<vi>(panel + 64);
#pragma GCC unroll 2
        for (int half = 0; half < Weight::kValues / 4; ++half) {
          const auto w_low = Weight::unpack(low_words, half), w_high = Weight::unpack(high_words, half);
#pragma GCC unroll 12
          for (int r = 0; r < kRows; ++r) {
            low[r] = dot(low[r], x + r * kWordsPerQuad, w_low, Weight{});
            high[r] = dot(high[r], x + r * kWordsPerQuad, w_high, Weight{});
          }
          x += kPitch;
        }
        if (soon == tile.prefetch_end) soon = tile.prefetch_next;
        prefetch_line(tile, soon);
        prefetch_line(tile, soon + tile.prefetch_step);
        soon += 2 * tile.prefetch_step;
        panel += 128;
      }
      vf float_low[kRows], float_high[kRows];
#pragma GCC unroll 12
      for (int r = 0; r < kRows; ++r) float_low[r] = to_float(low[r]), float_high[r] = to_float(high[r]);
      add_group<StoredScales<Weight::kType>, kRows>(tile, group, part, float_low, float_high);
    }
  }
}

}  // namespace
}  // namespace quire::QUIRE_ISA
