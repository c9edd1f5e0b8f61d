// Integers and small floats as weights, activations rounded to bfloat16 when they are packed, on tiles of AMX. Values of
// a panel are widened to bfloat16, which has all of them exactly, as the right operand of tdpbf16ps, 32 values of k at a
// time. Of integers and e4m3 the float32 sums of a group are multiplied by its scale. 4-bit floats become bfloat16 with
// their group's scale in them, which is exact as well: a power of two, or a product of six digits.
//
// A row's sum is one chain over the steps of a group, then over the groups, whatever the number of rows: all of them run
// on tiles. What is widened is kept for the other tiles of a panel, as far as kWidenedBytes go.
//
// Packed rows: [step][rows][32] bfloat16 in the order of k that widening leaves, a group's last step filled up with zeros;
// `rows` rounded up to 16, but one row alone stays one: a tile register is then filled with copies of it.
#pragma once

#include "amx_tiles.h"
#include "bf16_dot.h"
#include "linear_driver.h"
#include "small_float_vectors.h"

namespace quire::QUIRE_ISA {
namespace {

// Values of k in a step, and the bytes of its two operands: [pair of k][32 columns][2].
inline constexpr int64_t kWideningStep = 32;
inline constexpr int64_t kWidenedStepBytes = kWideningStep * kPanel * 2;

// Sixteen columns of a pair of k: half 0 or 1 of the panel's.
QUIRE_INLINE void store_pairs(std::byte* out, int64_t pair, int half, __m512i values) {
  _mm512_storeu_si512(out + (pair * 2 + half) * 64, values);
}

// A table of 16 bfloat16 for vpermw, twice: bit 4 of an index has no say.
QUIRE_INLINE __m512i sixteen_words(__m256i table) { return _mm512_broadcast_i64x4(table); }

// Each type: kLine is how many values of k lie in kLineBytes (of 32 columns), widen(tile, k, panel, lines, out) widens
// `lines` of them, of which the first has value k. kFolded: with their scales. The others' sums are then multiplied with the
// group's scale and kFactor.

// Nibbles: of the words of 16 columns and 8 values each, nibble s of both halves is a pair.
template <class Format>
struct WidenedNibbles {
  static constexpr int64_t kLine = 8, kLineBytes = 128;
  static constexpr bool kPermuted = true;
  static QUIRE_INLINE void widen(const Tile& tile, int64_t k, const std::byte* panel, int64_t lines, std::byte* out) {
    for (int64_t first = 0; first < lines; first += Format::kScaledLines) {
      const auto low = Format::scales(tile, k + first * kLine, 0), high = Format::scales(tile, k + first * kLine, 16);
      const int64_t end = lines - first < Format::kScaledLines ? lines : first + Format::kScaledLines;
      for (int64_t line = first; line < end; ++line) {
        widen_words(load_as<__m512i>(panel + line * 128), low, out, line * 4, 0);
        widen_words(load_as<__m512i>(panel + line * 128 + 64), high, out, line * 4, 1);
      }
    }
  }
  template <class Scales>
  static QUIRE_INLINE void widen_words(__m512i words, const Scales& scales, std::byte* out, int64_t pair, int half) {
    store_pairs(out, pair, half, Format::value(words, scales));
    store_pairs(out, pair + 1, half, Format::value(_mm512_srli_epi16(words, 4), scales));
    store_pairs(out, pair + 2, half, Format::value(_mm512_srli_epi16(words, 8), scales));
    store_pairs(out, pair + 3, half, Format::value(_mm512_srli_epi16(words, 12), scales));
  }
};

struct WidenedI4 : WidenedNibbles<WidenedI4> {
  static constexpr bool kFolded = false;
  static constexpr int64_t kScaledLines = 4;
  struct None {};
  static QUIRE_INLINE None scales(const Tile&, int64_t, int64_t) { return {}; }
  static QUIRE_INLINE __m512i value(__m512i words, None) {
    const __m256i table = _mm256_set_epi16(0x4170, 0x4160, 0x4150, 0x4140, 0x4130, 0x4120, 0x4110, 0x4100, 0x40e0, 0x40c0,
                                           0x40a0, 0x4080, 0x4040, 0x4000, 0x3f80, 0x0000);  // 15 .. 0
    return _mm512_permutexvar_epi16(words, sixteen_words(table));
  }
  static constexpr float kFactor = 1.0f;
};

// The largest e8m0 code whose product with every e2m1 is finite in bfloat16, and how far below it all are normal. Scales
// beyond either count as the nearest of these: 2^125 and 2^-125.
inline constexpr int kLargestFolded = 252, kFoldedRange = 250;

struct WidenedMXFP4 : WidenedNibbles<WidenedMXFP4> {
  static constexpr bool kFolded = true;
  static constexpr int64_t kScaledLines = 4;  // a group of 32
  // What is taken off the bits of a bfloat16 whose scale is the largest one.
  static QUIRE_INLINE __m512i scales(const Tile& tile, int64_t k, int64_t column) {
    const uint8_t* codes = tile.scale_codes + k / 32 * kPanel + column;
    __m512i below = _mm512_maskz_cvtepu8_epi32(0xffff, _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
    below = _mm512_maskz_subs_epu16(~0u, _mm512_set1_epi32(kLargestFolded), below);
    below = _mm512_maskz_min_epu16(~0u, below, _mm512_set1_epi32(kFoldedRange));
    return _mm512_or_si512(_mm512_slli_epi32(below, 7), _mm512_slli_epi32(below, 23));
  }
  static QUIRE_INLINE __m512i value(__m512i words, __m512i below) {
    // Times the largest scale. The subtraction ends at zero, so that zero stays zero; -0 is 0 for it.
    constexpr int kOne = (127 + kLargestFolded - 127) << 7, kSign = 0x8000;
#define QUIRE_E2M1(sign)                                                                                        \
  static_cast<int16_t>(sign + kOne + 0x140), static_cast<int16_t>(sign + kOne + 0x100),                         \
      static_cast<int16_t>(sign + kOne + 0xc0), static_cast<int16_t>(sign + kOne + 0x80),                       \
      static_cast<int16_t>(sign + kOne + 0x40), static_cast<int16_t>(sign + kOne),                              \
      static_cast<int16_t>(sign + kOne - 0x80), 0
    const __m256i table = _mm256_set_epi16(QUIRE_E2M1(kSign), QUIRE_E2M1(0));
#undef QUIRE_E2M1
    return _mm512_subs_epu16(_mm512_permutexvar_epi16(words, sixteen_words(table)), below);
  }
};

struct WidenedNVFP4 : WidenedNibbles<WidenedNVFP4> {
  static constexpr bool kFolded = true;
  static constexpr int64_t kScaledLines = 2;  // a group of 16
  static QUIRE_INLINE vf scales(const Tile& tile, int64_t k, int64_t column) {
    return load_e4m3(tile.scale_codes + k / 16 * kPanel + column);
  }
  static QUIRE_INLINE __m512i value(__m512i words, vf scales) {
    const vf first = e2m1_at<0>((vi)words) * scales, second = e2m1_at<16>((vi)words) * scales;
    // Both have at most six digits: what is cut off is zero.
    return (__m512i)((bit_cast<vu>(first) >> 16) | (bit_cast<vu>(second) & 0xffff0000u));
  }
  static QUIRE_INLINE vf scale(const Tile& tile, int64_t, int64_t column) {
    return load(tile.scales + column) * kE4M3Factor;
  }
};

struct WidenedI8 {
  static constexpr int64_t kLine = 4, kLineBytes = 128;
  static constexpr bool kFolded = false, kPermuted = false;
  static constexpr float kFactor = 0x1p-24f;
  static QUIRE_INLINE void widen(const Tile&, int64_t, const std::byte* panel, int64_t lines, std::byte* out) {
    for (int64_t line = 0; line < lines; ++line)
      for (int half = 0; half < 2; ++half) put(load_as<vi>(panel + line * 128 + half * 64), out, line * 2, half);
  }
  // Words of four values: two pairs.
  static QUIRE_INLINE void put(vi words, std::byte* out, int64_t first, int half) {
    store_pairs(out, first, half, pair(i8_of_word<0>(words), i8_of_word<1>(words)));
    store_pairs(out, first + 1, half, pair(i8_of_word<2>(words), i8_of_word<3>(words)));
  }
  // Values times 2^24 have eight digits: what is cut off is zero.
  static QUIRE_INLINE __m512i pair(vf first, vf second) {
    return (__m512i)((bit_cast<vu>(first) >> 16) | (bit_cast<vu>(second) & 0xffff0000u));
  }
};

// Integers in planes, and those of a table.
template <WeightType kType>
struct WidenedQuads : WidenedI8 {
  static constexpr int64_t kLine = Quads<kType>::kQuads * 4, kLineBytes = Quads<kType>::kBytes;
  static QUIRE_INLINE void widen(const Tile& tile, int64_t, const std::byte* panel, int64_t lines, std::byte* out) {
    const int bias = stored_bias(*tile.weight);
    for (int64_t line = 0; line < lines; ++line, panel += kLineBytes, out += kLine / 2 * 128)
#pragma GCC unroll 8
      for (int quad = 0; quad < Quads<kType>::kQuads; ++quad)
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) put(Quads<kType>::get_signed(panel, quad, half * 16, bias), out, quad * 2, half);
  }
};

struct WidenedE4M3 {
  static constexpr int64_t kLine = 4, kLineBytes = 128;
  static constexpr bool kFolded = false, kPermuted = false;
  static constexpr float kFactor = 256.0f;
  static QUIRE_INLINE void widen(const Tile&, int64_t, const std::byte* panel, int64_t lines, std::byte* out) {
    for (int64_t pair = 0; pair < lines * 2; ++pair)
      for (int half = 0; half < 2; ++half)
        store_pairs(out, pair, half, value(load_as<__m256i>(panel + pair * 64 + half * 32)));
  }
  // Times 2^-8, so that the exponent moves by a multiple of 16. Subnormal codes come from a table.
  static QUIRE_INLINE __m512i value(__m256i codes) {
    const __m512i words = _mm512_maskz_cvtepi8_epi16(~0u, codes);
    const __m512i bits = (_mm512_slli_epi16(words, 4) & _mm512_set1_epi16(0x07f0)) | _mm512_set1_epi16(0x3800);
    const __m512i table = _mm512_maskz_broadcast_i32x4(
        0xffff, _mm_set_epi16(0x3860, 0x3840, 0x3820, 0x3800, 0x37c0, 0x3780, 0x3700, 0x0000));  // 7 .. 0 times 2^-17
    const __mmask32 subnormal = _mm512_testn_epi16_mask(words, _mm512_set1_epi16(0x78));
    const __m512i size = _mm512_mask_permutexvar_epi16(bits, subnormal, words, table);
    return size | (words & _mm512_set1_epi16(static_cast<int16_t>(0x8000)));
  }
};

// Calls use(type) with the type that widens this weight.
template <class Use>
QUIRE_INLINE void with_widened(WeightType type, const Use& use) {
  switch (type) {
    case WeightType::kI8:
      return use(WidenedI8{});
    case WeightType::kI4:
      return use(WidenedI4{});
    case WeightType::kE4M3:
      return use(WidenedE4M3{});
    case WeightType::kMXFP4:
      return use(WidenedMXFP4{});
    case WeightType::kI2:
      return use(WidenedQuads<WeightType::kI2>{});
    case WeightType::kI3:
      return use(WidenedQuads<WeightType::kI3>{});
    case WeightType::kI5:
      return use(WidenedQuads<WeightType::kI5>{});
    case WeightType::kI6:
      return use(WidenedQuads<WeightType::kI6>{});
    case WeightType::kNL4:
      return use(WidenedQuads<WeightType::kNL4>{});
    default:
      return use(WidenedNVFP4{});
  }
}

// Whether 4-bit floats, whose groups are not seen in the packed rows, or another type: its groups are apart.
inline bool has_spans(const PackedWeight& weight) { return !has_scale_codes(weight.type); }
inline int64_t num_spans(const PackedWeight& weight) { return has_spans(weight) ? num_groups(weight) : 1; }
inline int64_t span_length(const PackedWeight& weight, int64_t span) {
  return has_spans(weight) ? group_length(weight, span) : weight.in_features;
}
inline int64_t span_steps(const PackedWeight& weight, int64_t span) {
  return (span_length(weight, span) + kWideningStep - 1) / kWideningStep;
}

// Goes through the steps of a panel and widens them.
template <class Weight>
class PanelSteps {
 public:
  PanelSteps(const Tile& tile, std::byte* ring)
      : tile_(tile), panel_(tile.panel), soon_(tile.prefetch), ring_(ring), kept_(tile.widened ? kKeptSteps : 0) {
    left_ = padded(0);
  }

  // Where the step's values lie, widened.
  std::byte* at(int64_t step) const {
    return step < kept_ ? tile_.widened + step * kWidenedStepBytes : ring_ + step % kRing * kWidenedStepBytes;
  }

  // Widens the next step, where that was not done for the tile before.
  void widen_next() {
    const int64_t count = left_ < kWideningStep ? left_ : kWideningStep, lines = count / Weight::kLine;
    for (int64_t line = 0; line < lines * Weight::kLineBytes / 64; ++line, soon_ += tile_.prefetch_step)
      prefetch_line(tile_, soon_);
    if (!tile_.is_widened || step_ >= kept_) {
      std::byte* out = at(step_);
      if (count == kWideningStep) {
        Weight::widen(tile_, k_, panel_, kWideningStep / Weight::kLine, out);
      } else {  // what follows the group in the panel is not read: it may not be there
        std::memset(out, 0, kWidenedStepBytes);
        Weight::widen(tile_, k_, panel_, lines, out);
      }
    }
    panel_ += lines * Weight::kLineBytes;
    k_ += count;
    left_ -= count;
    ++step_;
    if (left_ == 0 && ++span_ < num_spans(*tile_.weight)) left_ = padded(span_);
  }

  static constexpr int64_t kRing = 4;

 private:
  static constexpr int64_t kKeptSteps = kWidenedBytes / kWidenedStepBytes;
  int64_t padded(int64_t span) const {
    return rounded_up(span_length(*tile_.weight, span), group_alignment(tile_.weight->type));
  }
  const Tile& tile_;
  const std::byte *panel_, *soon_;
  std::byte* ring_;
  int64_t kept_, step_ = 0, span_ = 0, k_ = 0, left_;
};

struct AmxWidened {
  static constexpr int64_t kRows = 2 * kAmxRows;
  static constexpr int64_t kRowStep = kAmxRows;
  static constexpr int64_t kBlockBytes = 1 << 20;
  static constexpr int64_t kGroupBytes = 0;  // what is widened is kept for one panel
  static constexpr bool kExpects = true;
  static constexpr int64_t kPrefetchAhead = 4096;
  static constexpr int64_t kAhead = 2;  // steps that are widened before they are multiplied: their stores have been done

  static int64_t num_steps(const PackedWeight& weight) {
    const int64_t last = num_spans(weight) - 1;
    return last * span_steps(weight, 0) + span_steps(weight, last);
  }

  static TileLayout layout(const PackedWeight& weight) {
    TileLayout layout;
    layout.data_bytes = num_steps(weight) * kRows * kAmxRowBytes;
    layout.sums_offset = layout.data_bytes;
    layout.scales_offset = layout.bytes =
        layout.sums_offset + (has_offsets(weight) ? rounded_up(num_groups(weight) * kRows * 4, 64) : 0);
    return layout;
  }

  static void pack(const PackedWeight& weight, const float* x, int64_t stride, int64_t rows, std::byte* memory) {
    float* sums = reinterpret_cast<float*>(memory + layout(weight).sums_offset);
    with_widened(weight.type, [&]<class Weight>(Weight) {
      for (int64_t row = 0; row < rows; ++row)
        pack_row<Weight>(weight, x + row * stride, memory + row * kAmxRowBytes, pitch_for(rows) * kAmxRowBytes,
                         has_offsets(weight) ? sums + row : nullptr);
    });
  }

  static void multiply(const Tile& tile, int64_t rows) {
    with_widened(tile.weight->type, [&]<class Weight>(Weight) {
      rows > kAmxRows ? sum_up<Weight, true>(tile, rows) : sum_up<Weight, false>(tile, rows);
    });
  }

 private:
  static int64_t pitch_for(int64_t rows) { return rows == 1 ? 1 : rounded_up(rows, kAmxRows); }

  // Steps lie `pitch` bytes apart. sums: of the rounded values of each group, kRows apart.
  template <class Weight>
  static void pack_row(const PackedWeight& weight, const float* x, std::byte* out, int64_t pitch, float* sums) {
    alignas(64) float buffer[kChunk];
    alignas(64) uint16_t rounded[kChunk + kWideningStep];
    for (int64_t span = 0, first = 0; span < num_spans(weight); ++span) {
      const int64_t length = span_length(weight, span);
      vf sum = zero();
      for (int64_t k = 0; k < length; k += kChunk) {
        const int64_t count = length - k < kChunk ? length - k : kChunk;
        round_row(contiguous(x, weight.column_order, first + k, count, buffer), count, rounded);
        for (int64_t i = rounded_up(count, kLanes); i < rounded_up(count, kWideningStep); ++i) rounded[i] = 0;
        for (int64_t i = 0; i < count; i += kWideningStep, out += pitch) {
          __m512i values = _mm512_load_si512(rounded + i);
          if (sums) sum += bit_cast<vf>((vu)values << 16) + bit_cast<vf>((vu)values & 0xffff0000u);
          if constexpr (Weight::kPermuted) values = _mm512_permutexvar_epi16(in_order_of_nibbles(), values);
          std::memcpy(out, &values, sizeof(values));
        }
      }
      if (sums) sums[span * kRows] = sum_lanes(sum);
      first += length;
    }
  }

  // 0 2 4 6 1 3 5 7 of every eight values: as WidenedNibbles makes pairs.
  static __m512i in_order_of_nibbles() {
    return _mm512_set_epi16(31, 29, 27, 25, 30, 28, 26, 24, 23, 21, 19, 17, 22, 20, 18, 16, 15, 13, 11, 9, 14, 12, 10, 8, 7,
                            5, 3, 1, 6, 4, 2, 0);
  }

  template <bool kBoth>
  static QUIRE_INLINE void step(const std::byte* x, int64_t row_bytes, const std::byte* widened) {
    amx_load<6>(widened, 2 * kAmxRowBytes);
    amx_load<4>(x, row_bytes);
    amx_load<7>(widened + kAmxRowBytes, 2 * kAmxRowBytes);
    amx_dot_bf16<0, 4, 6>();
    amx_dot_bf16<1, 4, 7>();
    if constexpr (kBoth) {
      amx_load<5>(x + kAmxRows * kAmxRowBytes, row_bytes);
      amx_dot_bf16<2, 5, 6>();
      amx_dot_bf16<3, 5, 7>();
    }
  }

  template <bool kBoth>
  static QUIRE_INLINE void clear() {
    amx_zero<0>(), amx_zero<1>();
    if constexpr (kBoth) amx_zero<2>(), amx_zero<3>();
  }

  // One row's copies all go to its own place: other lines would have to be brought to the L1 cache.
  template <bool kBoth>
  static QUIRE_INLINE void store_sums(float* out, int64_t rows) {
    const int64_t stride = rows == 1 ? 0 : kPanel * 4;
    amx_store<0>(out, stride);
    amx_store<1>(out + 16, stride);
    if constexpr (kBoth) {
      amx_store<2>(out + kAmxRows * kPanel, kPanel * 4);
      amx_store<3>(out + kAmxRows * kPanel + 16, kPanel * 4);
    }
  }

  template <class Weight, bool kBoth>
  static void sum_up(const Tile& tile, int64_t rows) {
    const PackedWeight& weight = *tile.weight;
    alignas(64) std::byte ring[PanelSteps<Weight>::kRing * kWidenedStepBytes];
    alignas(64) float sums[kRows * kPanel];
    PanelSteps<Weight> steps(tile, ring);
    const int64_t count = num_steps(weight), pitch = pitch_for(rows) * kAmxRowBytes;
    const int64_t row_bytes = rows == 1 ? 0 : kAmxRowBytes;
    const std::byte* x = tile.x;
    for (int64_t ahead = 0; ahead < kAhead && ahead < count; ++ahead) steps.widen_next();
    for (int64_t span = 0, at = 0; span < num_spans(weight); ++span) {
      clear<kBoth>();
      for (const int64_t end = at + span_steps(weight, span); at < end; ++at, x += pitch) {
        if (at + kAhead < count) steps.widen_next();
        step<kBoth>(x, row_bytes, steps.at(at));
      }
      if constexpr (Weight::kFolded) {
        store_sums<kBoth>(tile.out, rows);
      } else {
        store_sums<kBoth>(sums, rows);
        add_group<Weight>(tile, span, rows, sums);
      }
    }
    if constexpr (std::is_same_v<Weight, WidenedNVFP4>)
      for (int64_t column = 0; column < kPanel; column += kLanes)
        for (int64_t row = 0; row < rows; ++row) {
          float* out = tile.out + row * kPanel + column;
          store(out, load(out) * Weight::scale(tile, 0, column));
        }
  }

  template <class Weight>
  static void add_group(const Tile& tile, int64_t group, int64_t rows, const float* sums) {
    for (int64_t column = 0; column < kPanel; column += kLanes) {
      const GroupScales of = group_scales(tile, tile.weight->type, group, column);
      const vf scale = of.scale * broadcast(Weight::kFactor);
      const bool has_any = has_offsets(*tile.weight);
      for (int64_t row = 0; row < rows; ++row) {
        float* out = tile.out + row * kPanel + column;
        vf total = fma(load(sums + row * kPanel + column), scale, group ? load(out) : zero());
        if (has_any) total = fma(broadcast(tile.x_sums[group * kRows + row]), of.offset, total);
        store(out, total);
      }
    }
  }
};

// Whether a weight is multiplied so. (4-bit floats whose groups are their formats'.)
inline bool multiplies_widened(const PackedWeight& weight, MatmulPrecision precision) {
  if (!keeps_16_bits(weight, precision) || weight.integer_activations) return false;
  if (weight.type == WeightType::kMXFP4) return weight.group_size == 32;
  if (weight.type == WeightType::kNVFP4) return weight.group_size == 16;
  return is_whole(weight.type) || weight.type == WeightType::kE4M3;
}

}  // namespace
}  // namespace quire::QUIRE_ISA
