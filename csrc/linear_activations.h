// The first phase of a linear layer: rows of x are laid out as the tiles want them. A tile is up to kTileRows rows:
//   float   [k][rows] float32, k counted with the padding of groups (zeros)
//   int8    [k / 4][rows] words of four values, k .. k+3 (kWordsPerQuad words where the instruction set wants them wider)
// with `rows` rounded up by row_pitch. Sums over groups go to [group][rows], scales of rounded rows to [rows].
#pragma once

#include "bf16_dot.h"
#include "packed.h"
#include "vector_math.h"

namespace quire::QUIRE_ISA {

// An x86-64 processor without AVX2 is rare: there tiles have one height or two, so that the compiler ends in half the time.
#if defined(__AVX512F__)
inline constexpr int kTileRows = 12;
#elif defined(__AVX2__) || !defined(__x86_64__)
inline constexpr int kTileRows = 6;
#else
inline constexpr int kTileRows = 2;
#endif

// How four int8 values of x are kept for the integer tiles. Bytes: as vpdpbusd reads them. Pairs of 16 bits (x0, x2),
// (x1, x3): for vpmaddwd. Plain: for compilers without either.
#if defined(__AVX512VNNI__)
inline constexpr int kWordsPerQuad = 1;
#define QUIRE_DOT_BYTES 1
#elif defined(__AVX2__)
inline constexpr int kWordsPerQuad = 2;
#define QUIRE_DOT_PAIRS 1
#else
inline constexpr int kWordsPerQuad = 1;
#define QUIRE_DOT_PLAIN 1
#endif

// Integer weights meet float activations without being shifted into place where unsigned conversion exists: the tile
// masks value j of a word and x is scaled by 2^-(place of its lowest bit) here, which is exact.
#if defined(__AVX512F__)
inline constexpr bool kScaledPlaces = true;
#else
inline constexpr bool kScaledPlaces = false;
#endif

namespace {

typedef float v4 __attribute__((vector_size(16)));

inline constexpr int64_t kChunk = 256;
inline constexpr int64_t kPackChunk = 128;

QUIRE_INLINE int64_t row_pitch(int64_t rows) { return rows == 1 ? 1 : (rows + 3) / 4 * 4; }

// Memory of one tile.
struct TileLayout {
  int64_t data_bytes = 0;
  int64_t sums_offset = 0;
  int64_t scales_offset = 0;
  int64_t bytes = 0;
};

QUIRE_INLINE TileLayout tile_layout(const PackedWeight& weight) {
  const int64_t pitch = row_pitch(kTileRows), depth = rounded_up(padded_depth(weight), 4);
  TileLayout layout;
  layout.data_bytes = weight.integer_activations ? depth * kWordsPerQuad * pitch : depth * 4 * pitch;
  layout.sums_offset = rounded_up(layout.data_bytes, 64);
  const int64_t sums = has_offsets(weight) ? num_groups(weight) * pitch * 4 : 0;
  layout.scales_offset = layout.sums_offset + rounded_up(sums, 64);
  layout.bytes = layout.scales_offset + rounded_up(pitch * 4, 64);
  return layout;
}

// The four factors of x at padded index k of a group (k a multiple of 4).
QUIRE_INLINE v4 place_factors(WeightType type, int64_t k) {
  if (!kScaledPlaces || !is_integer(type)) return v4{1, 1, 1, 1};
  if (type == WeightType::kI8) return v4{0x1p-24f, 0x1p-24f, 0x1p-24f, 0x1p-24f};
  return k / 4 % 2 == 0 ? v4{1, 0x1p-8f, 0x1p-16f, 0x1p-24f} : v4{0x1p-4f, 0x1p-12f, 0x1p-20f, 0x1p-28f};
}

// x[k .. k+count) of a row, through the column order where there is one.
QUIRE_INLINE float value_at(const float* row, const int32_t* order, int64_t k) { return row[order ? order[k] : k]; }

QUIRE_INLINE v4 quad_at(const float* row, const int32_t* order, int64_t k, int64_t count) {
  if (count >= 4 && order == nullptr) return load_as<v4>(row + k);
  v4 value = {};
  for (int i = 0; i < 4; ++i)
    if (i < count) value[i] = value_at(row, order, k + i);
  return value;
}

QUIRE_INLINE void transpose(v4& a, v4& b, v4& c, v4& d) {
  v4 ab_low = __builtin_shufflevector(a, b, 0, 4, 1, 5), ab_high = __builtin_shufflevector(a, b, 2, 6, 3, 7);
  v4 cd_low = __builtin_shufflevector(c, d, 0, 4, 1, 5), cd_high = __builtin_shufflevector(c, d, 2, 6, 3, 7);
  a = __builtin_shufflevector(ab_low, cd_low, 0, 1, 4, 5);
  b = __builtin_shufflevector(ab_low, cd_low, 2, 3, 6, 7);
  c = __builtin_shufflevector(ab_high, cd_high, 0, 1, 4, 5);
  d = __builtin_shufflevector(ab_high, cd_high, 2, 3, 6, 7);
}

// Sum of `count` values in an order that `count` alone decides.
inline float sum_of(const float* values, int64_t count) {
  vf sum = zero();
  const int64_t whole = count / kLanes * kLanes;
  for (int64_t k = 0; k < whole; k += kLanes) sum += load(values + k);
  if (whole < count) sum += load_some(values + whole, count - whole);
  return sum_lanes(sum);
}

// Values k .. k+count of a row, where they lie or gathered into `buffer` (kChunk values).
QUIRE_INLINE const float* contiguous(const float* row, const int32_t* order, int64_t k, int64_t count, float* buffer) {
  if (order == nullptr) return row + k;
  for (int64_t i = 0; i < count; ++i) buffer[i] = row[order[k + i]];
  return buffer;
}

inline float group_sum(const float* row, const int32_t* order, int64_t first, int64_t count) {
  alignas(64) float buffer[kChunk];
  float sum = 0;
  for (int64_t k = 0; k < count; k += kChunk) {
    const int64_t length = count - k < kChunk ? count - k : kChunk;
    sum += sum_of(contiguous(row, order, first + k, length, buffer), length);
  }
  return sum;
}

// Rows x .. x + rows * stride into one float tile.
inline void pack_float_tile(const PackedWeight& weight, const float* x, int64_t stride, int64_t rows, std::byte* tile) {
  const TileLayout layout = tile_layout(weight);
  float* out = reinterpret_cast<float*>(tile);
  float* sums = reinterpret_cast<float*>(tile + layout.sums_offset);
  const int64_t groups = num_groups(weight), pitch = row_pitch(rows), align = group_alignment(weight.type);
  const int32_t* order = weight.column_order;
  for (int64_t group = 0; group < groups; ++group) {
    const int64_t first = group * weight.group_size, length = group_length(weight, group);
    const int64_t padded = rounded_up(rounded_up(length, align), 4);
    if (rows == 1) {
      for (int64_t k = 0; k < padded; k += 4, out += 4) {
        const v4 value = quad_at(x, order, first + k, length - k) * place_factors(weight.type, k);
        std::memcpy(out, &value, sizeof(value));
      }
    } else {
      // Four rows at a time: rows may lie a power of two apart, where the cache holds few lines of all of them.
      for (int64_t start = 0; start < padded; start += kPackChunk) {
        const int64_t end = padded - start < kPackChunk ? padded : start + kPackChunk;
        for (int64_t base = 0; base < rows; base += 4) {
          const float* row[4];  // what pads the tile is not looked at
          for (int i = 0; i < 4; ++i) row[i] = x + (base + i < rows ? base + i : rows - 1) * stride;
          for (int64_t k = start; k < end; k += 4) {
            const v4 factors = place_factors(weight.type, k);
            v4 part[4];
            for (int i = 0; i < 4; ++i) part[i] = quad_at(row[i], order, first + k, length - k) * factors;
            transpose(part[0], part[1], part[2], part[3]);
            for (int i = 0; i < 4; ++i) std::memcpy(out + (k + i) * pitch + base, &part[i], sizeof(v4));
          }
        }
      }
      out += padded * pitch;
    }
    if (has_offsets(weight))
      for (int64_t row = 0; row < rows; ++row)
        sums[group * pitch + row] = group_sum(x + row * stride, order, first, length);
  }
}

struct RowScale {
  float scale;    // of the rounded values; NaN for a row with NaN or infinity in it
  float inverse;  // 0: all values are rounded to 0
};

// Largest magnitude / 127, by the bit patterns: they are ordered as the magnitudes are, infinity and NaN above all. Asks
// for the row that comes next, `stride` further: rows of a prompt come from far caches, faster than one after the other.
inline RowScale row_scale(const float* x, int64_t count, int64_t stride) {
  vi largest = {};
  const int64_t whole = count / kLanes * kLanes;
  for (int64_t k = 0; k < whole; k += kLanes) {
    __builtin_prefetch(x + stride + k);
    const vi bits = load_as<vi>(x + k) & 0x7fffffff;
    largest = bits > largest ? bits : largest;
  }
  if (whole < count) {
    vi bits = bit_cast<vi>(load_some(x + whole, count - whole)) & 0x7fffffff;
    largest = bits > largest ? bits : largest;
  }
#if defined(__AVX512F__)
  const int32_t top = _mm512_reduce_max_epi32((__m512i)largest);
#else
  int32_t top = 0;
  for (int lane = 0; lane < kLanes; ++lane) top = largest[lane] > top ? largest[lane] : top;
#endif
  if (top >= 0x7f800000) return {__builtin_nanf(""), 0.0f};
  const float magnitude = bit_cast<float>(top);
  if (magnitude < 0x1p-119f) return {0.0f, 0.0f};  // 127 / magnitude would overflow
  return {magnitude / 127.0f, 127.0f / magnitude};
}

// `count` values (at most kChunk) times `inverse`, to the nearest whole number, ties to even. Returns their sum; what
// follows them in `out`, up to a multiple of 4, becomes 0.
inline int32_t round_values(const float* x, int64_t count, float inverse, int8_t* out) {
  const vf factor = broadcast(inverse), magic = broadcast(12582912.0f);
  const vi magic_bits = bit_cast<vi>(magic);
  vi sum = {};
  for (int64_t k = 0; k < count; k += kLanes) {
    // No load_some where a whole vector is there: it is slow.
    vf value = count - k >= kLanes ? load(x + k) : load_some(x + k, count - k);
    if (inverse == 0.0f) value = zero();
    vi whole = bit_cast<vi>(value * factor + magic) - magic_bits;
    sum += whole;
    vs8 narrow = __builtin_convertvector(whole, vs8);
    std::memcpy(out + k, &narrow, sizeof(narrow));
  }
  int32_t total = 0;
  for (int lane = 0; lane < kLanes; ++lane) total += sum[lane];
  return total;
}

#if defined(QUIRE_BF16_DOT)
// `count` values to the nearest bfloat16. What follows them up to whole vectors becomes 0.
inline void round_row(const float* x, int64_t count, uint16_t* out) {
  int64_t k = 0;
  for (; k + kLanes <= count; k += kLanes) round_bf16(out + k, load(x + k));
  if (k < count) round_bf16(out + k, load_some(x + k, count - k));
}
#endif

// Whether activations are rounded to bfloat16 for this weight.
inline bool multiplies_bf16(const PackedWeight& weight, MatmulPrecision precision) {
  return precision == MatmulPrecision::kBFloat16 && weight.type == WeightType::kBF16;
}

// Whether activations may be rounded to 16 bits for this weight.
inline bool keeps_16_bits(const PackedWeight& weight, MatmulPrecision precision) {
  return weight.activation_bits == 16 || (weight.activation_bits == 0 && precision == MatmulPrecision::kBFloat16);
}

#if defined(QUIRE_DOT_BYTES)

// vpdpbusd takes one side unsigned: with int8 weights that is x, moved up by 128 (the tile takes it off again).
QUIRE_INLINE __m512i as_multiplied(__m512i values, WeightType type) {
  return type == WeightType::kI8 ? values ^ _mm512_set1_epi32(static_cast<int32_t>(0x80808080u)) : values;
}

QUIRE_INLINE vi rounded_lanes(const float* x, int64_t left, float inverse) {
  const vf values = left >= kLanes ? load(x) : (vf)_mm512_maskz_loadu_ps(static_cast<__mmask16>((1 << left) - 1), x);
  return (vi)_mm512_maskz_cvtps_epi32(0xffff, (__m512)(values * broadcast(inverse)));
}

// `count` values of up to four rows into the places of as many rows of a tile, `padded` of each, and adds up each row's.
// With a pitch of 1 there is one row.
inline void round_rows(const float* const (&rows)[4], const RowScale (&scale)[4], int64_t count, int64_t padded,
                       WeightType type, int64_t pitch, uint32_t* out, int32_t (&sums)[4]) {
  __m512i sum = _mm512_setzero_si512();  // of four rows in each quarter; of one row in every lane
  const __m512i ones = _mm512_set1_epi32(0x01010101);
  for (int64_t k = 0; k < padded; k += kLanes, out += kLanes / 4 * pitch) {
    const int64_t left = count - k < 0 ? 0 : count - k, quads = (padded - k) / 4;
    const auto first = (__m512i)rounded_lanes(rows[0] + k, left, scale[0].inverse);
    __m512i bytes;  // a quarter has four values of each row, or all has four values of a row
    if (pitch == 1) {
      bytes = _mm512_castsi128_si512(_mm512_maskz_cvtepi32_epi8(0xffff, first));
      sum = _mm512_dpbusd_epi32(sum, ones, _mm512_zextsi128_si512(_mm512_castsi512_si128(bytes)));
      const __m128i given = _mm512_castsi512_si128(as_multiplied(bytes, type));
      std::memcpy(out, &given, static_cast<std::size_t>(quads < 4 ? quads : 4) * 4);
      continue;
    }
    const auto second = (__m512i)rounded_lanes(rows[1] + k, left, scale[1].inverse);
    const auto third = (__m512i)rounded_lanes(rows[2] + k, left, scale[2].inverse);
    const auto fourth = (__m512i)rounded_lanes(rows[3] + k, left, scale[3].inverse);
    bytes = _mm512_packs_epi16(_mm512_packs_epi32(first, second), _mm512_packs_epi32(third, fourth));
    sum = _mm512_dpbusd_epi32(sum, ones, bytes);
    bytes = as_multiplied(bytes, type);
    const __m128i quarters[4] = {_mm512_castsi512_si128(bytes), _mm512_extracti32x4_epi32(bytes, 1),
                                 _mm512_extracti32x4_epi32(bytes, 2), _mm512_extracti32x4_epi32(bytes, 3)};
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i)
      if (i < quads) std::memcpy(out + i * pitch, &quarters[i], sizeof(__m128i));
  }
  const auto lanes = (vi)sum;
  if (pitch == 1)
    sums[0] += _mm512_reduce_add_epi32(sum);
  else
    for (int row = 0; row < 4; ++row) sums[row] += lanes[row] + lanes[row + 4] + lanes[row + 8] + lanes[row + 12];
}

#else

// Four rounded values as the tiles read them.
QUIRE_INLINE void store_quad(uint32_t* out, const int8_t* values) {
#if defined(QUIRE_DOT_PAIRS)
  out[0] = static_cast<uint16_t>(values[0]) | static_cast<uint32_t>(static_cast<uint16_t>(values[2])) << 16;
  out[1] = static_cast<uint16_t>(values[1]) | static_cast<uint32_t>(static_cast<uint16_t>(values[3])) << 16;
#else
  std::memcpy(out, values, 4);
#endif
}

inline void round_rows(const float* const (&rows)[4], const RowScale (&scale)[4], int64_t count, int64_t padded,
                       WeightType, int64_t pitch, uint32_t* out, int32_t (&sums)[4]) {
  alignas(64) int8_t rounded[kChunk + kLanes] = {};
  const int64_t height = pitch == 1 ? 1 : 4;
  for (int64_t row = 0; row < height; ++row) {
    for (int64_t pad = rounded_up(count, kLanes); pad < padded; ++pad) rounded[pad] = 0;
    sums[row] += round_values(rows[row], count, scale[row].inverse, rounded);
    for (int64_t k = 0; k < padded; k += 4)
      store_quad(out + (k / 4 * pitch + row) * kWordsPerQuad, rounded + k);
  }
}

#endif

inline void round_tile(const PackedWeight& weight, const float* x, int64_t stride, int64_t rows, std::byte* tile) {
  const TileLayout layout = tile_layout(weight);
  float* sums = reinterpret_cast<float*>(tile + layout.sums_offset);
  float* scales = reinterpret_cast<float*>(tile + layout.scales_offset);
  const int64_t groups = num_groups(weight), pitch = row_pitch(rows), align = group_alignment(weight.type);
  alignas(64) float buffer[4][kChunk];
  for (int64_t base = 0; base < rows; base += 4) {
    const int64_t height = rows - base < 4 ? rows - base : 4;
    RowScale scale[4];
    const float* row[4];  // the last one also stands for those that only fill the tile
    for (int64_t i = 0; i < 4; ++i) {
      row[i] = x + (base + (i < height ? i : height - 1)) * stride;
      scale[i] = i < height ? row_scale(row[i], weight.in_features, stride) : scale[height - 1];
      scales[base + i] = scale[i].scale;
    }
    uint32_t* out = reinterpret_cast<uint32_t*>(tile) + base * kWordsPerQuad;
    for (int64_t group = 0; group < groups; ++group) {
      const int64_t first = group * weight.group_size, length = group_length(weight, group);
      const int64_t padded = rounded_up(length, align);
      int32_t sum[4] = {};
      for (int64_t k = 0; k < padded; k += kChunk) {
        const int64_t count = length - k < kChunk ? length - k : kChunk;
        const int64_t end = padded - k < kChunk ? padded - k : kChunk;
        const float* values[4];
        for (int64_t i = 0; i < 4; ++i)
          values[i] = i < height ? contiguous(row[i], weight.column_order, first + k, count, buffer[i]) : values[height - 1];
        round_rows(values, scale, count, end, weight.type, pitch, out, sum);
        out += end / 4 * pitch * kWordsPerQuad;
      }
      if (has_offsets(weight))
        for (int64_t i = 0; i < height; ++i) sums[group * pitch + base + i] = static_cast<float>(sum[i]);
    }
  }
}

}  // namespace
}  // namespace quire::QUIRE_ISA
