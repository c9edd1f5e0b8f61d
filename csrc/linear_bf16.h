// Linear layers that multiply in bfloat16 (MatmulPrecision::kBFloat16): activations are rounded once, when they are
// packed, and meet the weights pair by pair. The sum of an element is one chain over the pairs of k, as bf16_dot.h says,
// so that neither the tile's height nor what else is in it shows.
#pragma once

#include <iterator>

#include "linear_driver.h"

#if defined(QUIRE_BF16_DOT)

namespace quire::QUIRE_ISA {
namespace {

template <int kRows>
void bf16_tile(const Tile& tile) {
  constexpr int64_t kPitch = pitch_of(kRows), kAhead = 1536;
  const int64_t depth = tile.weight->in_features;
  for (int part = 0; part < kParts; ++part) {
    vf low[kRows], high[kRows];
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) low[r] = high[r] = zero();
    const std::byte* panel = tile.panel + part * kLanes * 4;
    const std::byte* soon = tile.prefetch;
    const int32_t* x = reinterpret_cast<const int32_t*>(tile.x);
    for (int64_t k = 0; k < depth; k += 2) {
      if constexpr (kRows > 8) {  // of a prompt: what the L1 cache does not hold of a panel and its rows comes in time
        __builtin_prefetch(x + kAhead / 4, 0, 3);
        __builtin_prefetch(panel + kAhead, 0, 3);
        __builtin_prefetch(panel + kAhead + 64, 0, 3);
      }
      const vu w_low = load_as<vu>(panel), w_high = load_as<vu>(panel + 64);
#pragma GCC unroll 12
      for (int r = 0; r < kRows; ++r) {
        const vu pair = bit_cast<vu>(broadcast_int(x[r]));
        low[r] = dot_bf16(low[r], pair, w_low);
        high[r] = dot_bf16(high[r], pair, w_high);
      }
      prefetch_line(tile, soon);
      prefetch_line(tile, soon + tile.prefetch_step);
      soon += 2 * tile.prefetch_step;
      panel += 128;
      x += kPitch;
    }
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
      store(tile.out + r * kPanel + part * kLanes, low[r]);
      store(tile.out + r * kPanel + part * kLanes + 16, high[r]);
    }
  }
}

const TileKernel kBf16PairTiles[] = {
    bf16_tile<1>, bf16_tile<2>, bf16_tile<3>, bf16_tile<4>,  bf16_tile<5>,  bf16_tile<6>,
#if defined(__AVX512F__)
    bf16_tile<7>, bf16_tile<8>, bf16_tile<9>, bf16_tile<10>, bf16_tile<11>, bf16_tile<12>,
#endif
};

// Packed rows: [k / 2][rows] pairs of bfloat16, `rows` rounded up by row_pitch; a zero completes the last pair.
struct Bf16Pairs {
  static constexpr int64_t kRows = static_cast<int64_t>(std::size(kBf16PairTiles));
  static constexpr int64_t kRowStep = 1;
  static constexpr int64_t kBlockBytes = quire::QUIRE_ISA::kBlockBytes;
  static constexpr int64_t kGroupBytes = 0;
  static constexpr bool kExpects = true;
  static constexpr int64_t kHandedRowBytes = kPanel * 2;  // of a row, kPanel values
  static constexpr int64_t kPrefetchAhead = 8192;  // twice the arithmetic: the reading is as much faster

  static TileLayout layout(const PackedWeight& weight) {
    TileLayout layout;
    layout.data_bytes = rounded_up(padded_depth(weight), 8) * 2 * row_pitch(kRows);
    layout.sums_offset = layout.scales_offset = layout.bytes = rounded_up(layout.data_bytes, 64);
    return layout;
  }

  static void pack(const PackedWeight& weight, const float* x, int64_t stride, int64_t rows, std::byte* memory) {
    const int64_t pitch = row_pitch(rows);
    for (int64_t base = 0; base < rows; base += 4) {
      const int64_t height = rows - base < 4 ? rows - base : 4;
      std::byte* out = memory + base * 4;
      int64_t k = 0;
#if defined(__AVX512BF16__)
      if (pitch > 1 && weight.column_order == nullptr) k = pack_whole(x, stride, base, rows, weight.in_features, pitch, out);
#endif
      pack_from(weight, x + base * stride, stride, height, k, pitch, out + k * 2 * pitch);
    }
  }

  static void multiply(const Tile& tile, int64_t rows) { kBf16PairTiles[rows - 1](tile); }

  // Four rows of kPanel / 2 values to their place in a tile, rounded as pack does.
  static QUIRE_INLINE void put_packed(const float* rows, int64_t pitch, std::byte* out) {
#if defined(__AVX512BF16__)
    static_assert(kPanel / 2 == kLanes);
    const __m512i ab = (__m512i)_mm512_cvtne2ps_pbh((__m512)load(rows + kLanes), (__m512)load(rows));
    const __m512i cd = (__m512i)_mm512_cvtne2ps_pbh((__m512)load(rows + 3 * kLanes), (__m512)load(rows + 2 * kLanes));
    const __m512i first = _mm512_setr_epi32(0, 8, 16, 24, 1, 9, 17, 25, 2, 10, 18, 26, 3, 11, 19, 27);
    store_quarters(out, pitch * 4, _mm512_permutex2var_epi32(ab, first, cd));
    store_quarters(out + 4 * pitch * 4, pitch * 4,
                   _mm512_permutex2var_epi32(ab, _mm512_add_epi32(first, _mm512_set1_epi32(4)), cd));
#else
    alignas(64) uint16_t rounded[4 * kPanel / 2];
    for (int64_t i = 0; i < 4; ++i) round_row(rows + i * kPanel / 2, kPanel / 2, rounded + i * kPanel / 2);
    store_four_rows(out, pitch, rounded, kPanel / 2, kPanel / 2);
#endif
  }

 private:
#if defined(__AVX512BF16__)
  // Four rows from `base` on, 2 * kLanes values at a time as long as there are as many: how many values it did. What
  // fills a tile up is not looked at, so that its last row stands for it.
  static int64_t pack_whole(const float* x, int64_t stride, int64_t base, int64_t rows, int64_t depth, int64_t pitch,
                            std::byte* out) {
    const float *row[4], *later[4];
    for (int64_t i = 0; i < 4; ++i) {
      row[i] = x + (base + i < rows ? base + i : rows - 1) * stride;
      later[i] = row[i] + 4 * stride;  // rows lie too far apart for the processor to guess the next ones
    }
    int64_t k = 0;
    for (; k + 2 * kLanes <= depth; k += 2 * kLanes) {
      __m512i words[4];
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        __builtin_prefetch(later[i] + k, 0, 3);
        __builtin_prefetch(later[i] + k + kLanes, 0, 3);
        words[i] = (__m512i)_mm512_cvtne2ps_pbh((__m512)load(row[i] + k + kLanes), (__m512)load(row[i] + k));
      }
      const __m512i ab_low = _mm512_unpacklo_epi32(words[0], words[1]), ab_high = _mm512_unpackhi_epi32(words[0], words[1]);
      const __m512i cd_low = _mm512_unpacklo_epi32(words[2], words[3]), cd_high = _mm512_unpackhi_epi32(words[2], words[3]);
      // Each has a pair of k in each quarter: a, a + 4, a + 8, a + 12.
      store_quarters(out, 4 * pitch * 4, _mm512_unpacklo_epi64(ab_low, cd_low));
      store_quarters(out + pitch * 4, 4 * pitch * 4, _mm512_unpackhi_epi64(ab_low, cd_low));
      store_quarters(out + 2 * pitch * 4, 4 * pitch * 4, _mm512_unpacklo_epi64(ab_high, cd_high));
      store_quarters(out + 3 * pitch * 4, 4 * pitch * 4, _mm512_unpackhi_epi64(ab_high, cd_high));
      out += kLanes * pitch * 4;
    }
    return k;
  }

  static QUIRE_INLINE void store_quarters(std::byte* out, int64_t apart, __m512i words) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm512_castsi512_si128(words));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + apart), _mm512_extracti32x4_epi32(words, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 2 * apart), _mm512_extracti32x4_epi32(words, 2));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 3 * apart), _mm512_extracti32x4_epi32(words, 3));
  }
#endif

  // At most four rows, their values from k on.
  static void pack_from(const PackedWeight& weight, const float* x, int64_t stride, int64_t height, int64_t k,
                        int64_t pitch, std::byte* out) {
    constexpr int64_t kRowValues = kChunk + kLanes;
    const int64_t depth = weight.in_features;
    if (k >= depth) return;
    alignas(64) float buffer[kChunk];
    alignas(64) uint16_t rounded[4 * kRowValues] = {};
    for (; k < depth; k += kChunk) {
      const int64_t count = depth - k < kChunk ? depth - k : kChunk, end = rounded_up(count, 8);
      for (int64_t i = 0; i < height; ++i) {
        const float* from = contiguous(x + i * stride, weight.column_order, k, count, buffer);
        round_row(from, count, rounded + i * kRowValues);
      }
      if (pitch == 1)
        std::memcpy(out, rounded, static_cast<std::size_t>(end) * 2);
      else
        store_four_rows(out, pitch, rounded, kRowValues, end);
      out += end * 2 * pitch;
    }
  }

  // `count` values (a multiple of 8) of four rows, `apart` from one another, to four places of a tile.
  static void store_four_rows(std::byte* out, int64_t pitch, const uint16_t* rows, int64_t apart, int64_t count) {
    for (int64_t pair = 0; pair < count / 2; pair += 4) {
      v4 part[4];
      for (int i = 0; i < 4; ++i) part[i] = load_as<v4>(rows + i * apart + pair * 2);
      transpose(part[0], part[1], part[2], part[3]);
      for (int i = 0; i < 4; ++i) std::memcpy(out + (pair + i) * pitch * 4, &part[i], sizeof(v4));
    }
  }
};

}  // namespace
}  // namespace quire::QUIRE_ISA

#endif
