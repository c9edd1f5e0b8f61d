// Packing blocks of GGUF files as the files have them, at load: the bits of values and scales change places, no number
// changes. Sizes are checked in Python (quire/kernels/cpu/packing.py).
#include "packed.h"

#include <cstring>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <vector>

#include "bindings.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace quire {
namespace {

constexpr int64_t kMostCodeRows = 16;

// A block, taken apart: values as the panels store them, in a byte each, and of super-blocks a
// column of code rows.
struct Block {
  alignas(64) uint8_t values[kSuperBlock];
  uint8_t codes[kMostCodeRows];
};

// A block of a file: values, bytes, where its scale lies (and its offset, where there is one), what takes it apart.
struct BlockFormat {
  int64_t values, bytes, scale_at, offset_at;
  void (*unpack)(const uint8_t* block, Block& out);
};

// 16 bytes: values 0 .. 15 in their low halves, 16 .. 31 in their high halves.
void split_halves(const uint8_t* bytes, uint8_t* out) {
  for (int i = 0; i < 16; ++i) out[i] = bytes[i] & 15, out[i + 16] = bytes[i] >> 4;
}

// Likewise with a fifth bit of each in `fifth`.
void split_fives(const uint8_t* fifth, const uint8_t* bytes, uint8_t* out) {
  uint32_t bits;
  std::memcpy(&bits, fifth, 4);
  split_halves(bytes, out);
  for (int i = 0; i < 32; ++i) out[i] = static_cast<uint8_t>(out[i] | (bits >> i & 1) << 4);
}

void unpack_q4_0(const uint8_t* block, Block& out) { split_halves(block + 2, out.values); }
void unpack_q4_1(const uint8_t* block, Block& out) { split_halves(block + 4, out.values); }
void unpack_q5_0(const uint8_t* block, Block& out) { split_fives(block + 2, block + 6, out.values); }
void unpack_q5_1(const uint8_t* block, Block& out) { split_fives(block + 4, block + 8, out.values); }
void unpack_q8_0(const uint8_t* block, Block& out) { std::memcpy(out.values, block + 2, 32); }

// Rows of codes of eight groups with a scale and an offset's factor in six bits each. In 12 bytes: four have scales of
// groups 0 to 3 and four their factors; the last four have the lower four bits of both of groups 4 to 7, whose upper two
// are on top of the first eight bytes.
void unpack_pairs(const uint8_t* bytes, uint8_t* rows) {
  for (int g = 0; g < 4; ++g) {
    rows[g] = static_cast<uint8_t>((bytes[g] & 15) | (bytes[g + 4] & 15) << 4);
    rows[g + 4] = bytes[g + 8];
  }
  const auto upper = [&](int g) {
    return g < 4 ? (bytes[g] >> 4 & 3) | (bytes[g + 4] >> 4 & 3) << 2 : bytes[g - 4] >> 6 | bytes[g] >> 6 << 2;
  };
  for (int i = 0; i < 4; ++i) rows[8 + i] = static_cast<uint8_t>(upper(2 * i) | upper(2 * i + 1) << 4);
}

// In each run of 32 bytes, one group in the low halves and the next in the high halves.
void unpack_q4_k(const uint8_t* block, Block& out) {
  unpack_pairs(block + 4, out.codes);
  for (int run = 0; run < 4; ++run)
    for (int i = 0; i < 32; ++i) {
      const uint8_t pair = block[16 + 32 * run + i];
      out.values[64 * run + i] = pair & 15, out.values[64 * run + 32 + i] = pair >> 4;
    }
}

// As Q4_K, with 32 bytes between: bit g of byte i is the fifth bit of value i of group g.
void unpack_q5_k(const uint8_t* block, Block& out) {
  unpack_pairs(block + 4, out.codes);
  for (int run = 0; run < 4; ++run)
    for (int i = 0; i < 32; ++i) {
      const uint8_t pair = block[48 + 32 * run + i], fifth = block[16 + i] >> (2 * run);
      out.values[64 * run + i] = static_cast<uint8_t>((pair & 15) | (fifth & 1) << 4);
      out.values[64 * run + 32 + i] = static_cast<uint8_t>(pair >> 4 | (fifth & 2) << 3);
    }
}

// Each half of the values has 64 bytes of lower four bits, its values 0 .. 63 in their low halves, and 32 of upper two, of
// which its quarters take two bits after another.
void unpack_q6_k(const uint8_t* block, Block& out) {
  std::memcpy(out.codes, block + 192, 16);
  for (int half = 0; half < 2; ++half)
    for (int i = 0; i < 32; ++i) {
      const uint8_t *lower = block + 64 * half, upper = block[128 + 32 * half + i];
      uint8_t* to = out.values + 128 * half + i;
      to[0] = static_cast<uint8_t>((lower[i] & 15) | (upper & 3) << 4);
      to[32] = static_cast<uint8_t>((lower[i + 32] & 15) | (upper >> 2 & 3) << 4);
      to[64] = static_cast<uint8_t>(lower[i] >> 4 | (upper >> 4 & 3) << 4);
      to[96] = static_cast<uint8_t>(lower[i + 32] >> 4 | upper >> 6 << 4);
    }
}

// 64 bytes: of each 32 the lowest two bits, then the next two, and so on.
void split_quarters(const uint8_t* bytes, uint8_t* out) {
  for (int half = 0; half < 2; ++half)
    for (int quarter = 0; quarter < 4; ++quarter)
      for (int i = 0; i < 32; ++i) out[128 * half + 32 * quarter + i] = bytes[32 * half + i] >> (2 * quarter) & 3;
}

void unpack_q2_k(const uint8_t* block, Block& out) {
  std::memcpy(out.codes, block, 16);
  split_quarters(block + 16, out.values);
}

// 32 bytes of third bits: bit r of byte i is that of value i of run r of 32. Scales in 12 bytes: the lower four bits are
// the low and then the high halves of eight bytes, the upper two of groups g, g + 4, g + 8 and g + 12 in a byte.
void unpack_q3_k(const uint8_t* block, Block& out) {
  split_quarters(block + 32, out.values);
  for (int run = 0; run < 8; ++run)
    for (int i = 0; i < 32; ++i)
      out.values[32 * run + i] = static_cast<uint8_t>(out.values[32 * run + i] | (block[i] >> run & 1) << 2);
  const uint8_t* scales = block + 96;
  const auto lower = [&](int g) { return g < 8 ? scales[g] & 15 : scales[g - 8] >> 4; };
  const auto upper = [&](int g) { return scales[8 + g % 4] >> g / 4 * 2 & 3; };
  for (int i = 0; i < 8; ++i) out.codes[i] = static_cast<uint8_t>(lower(2 * i) | lower(2 * i + 1) << 4);
  for (int i = 0; i < 4; ++i)
    out.codes[8 + i] = static_cast<uint8_t>(upper(4 * i) | upper(4 * i + 1) << 2 | upper(4 * i + 2) << 4 | upper(4 * i + 3) << 6);
}

// Two bytes with the upper two bits of eight scales, four with the lower four of two each, and groups as in Q4_0.
void unpack_iq4_xs(const uint8_t* block, Block& out) {
  std::memcpy(out.codes, block + 4, 4);
  std::memcpy(out.codes + 4, block + 2, 2);
  for (int group = 0; group < 8; ++group) split_halves(block + 8 + 16 * group, out.values + 32 * group);
}

// The format whose blocks a matrix holds. (MXFP4 has a code for a scale: it lies where the halves of others do.)
BlockFormat block_format(const PackedWeight& weight) {
  const bool offsets = weight.offset_halves != nullptr;
  switch (weight.type) {
    case WeightType::kI8:
      return {32, 34, 0, -1, unpack_q8_0};
    case WeightType::kMXFP4:
      return {32, 17, 0, -1, [](const uint8_t* block, Block& out) { split_halves(block + 1, out.values); }};
    case WeightType::kI4:
      if (weight.super_blocks) return {kSuperBlock, 144, 0, 2, unpack_q4_k};
      return offsets ? BlockFormat{32, 20, 0, 2, unpack_q4_1} : BlockFormat{32, 18, 0, -1, unpack_q4_0};
    case WeightType::kI5:
      if (weight.super_blocks) return {kSuperBlock, 176, 0, 2, unpack_q5_k};
      return offsets ? BlockFormat{32, 24, 0, 2, unpack_q5_1} : BlockFormat{32, 22, 0, -1, unpack_q5_0};
    case WeightType::kNL4:
      return weight.super_blocks ? BlockFormat{kSuperBlock, 136, 0, -1, unpack_iq4_xs} : BlockFormat{32, 18, 0, -1, unpack_q4_0};
    case WeightType::kI6:
      return {kSuperBlock, 210, 208, -1, unpack_q6_k};
    case WeightType::kI3:
      return {kSuperBlock, 110, 108, -1, unpack_q3_k};
    case WeightType::kI2:
      return {kSuperBlock, 84, 80, 82, unpack_q2_k};
    default:
      throw std::invalid_argument("the matrix does not hold blocks as they are");
  }
}

uint32_t word_at(const uint8_t* bytes) {
  uint32_t word;
  std::memcpy(&word, bytes, 4);
  return word;
}

// Nibbles of `count` values, a multiple of 8, into a column whose first word is at `out`.
void place_nibbles(const uint8_t* values, int64_t count, uint8_t* out) {
  for (int64_t k = 0; k < count; k += 8, out += kPanel * 4) {
    const uint32_t word = (word_at(values + k) & 0x0f0f0f0fu) | (word_at(values + k + 4) & 0x0f0f0f0fu) << 4;
    std::memcpy(out, &word, 4);
  }
}

// Two bits of 16 values, from bit `first` on.
void place_quarters(const uint8_t* values, int first, uint8_t* out) {
  uint32_t word = 0;
  for (int quad = 0; quad < 4; ++quad) word |= (word_at(values + quad * 4) >> first & 0x03030303u) << 2 * quad;
  std::memcpy(out, &word, 4);
}

// The fifth bits of 32 values.
void place_fifths(const uint8_t* values, uint8_t* out) {
  uint32_t word = 0;
  for (int quad = 0; quad < 8; ++quad) word |= (word_at(values + quad * 4) >> 4 & 0x01010101u) << quad;
  std::memcpy(out, &word, 4);
}

// Bit `bit` of `count` values.
void place_bits(const uint8_t* values, int64_t count, int bit, int64_t column, uint8_t* plane) {
  uint8_t* out = plane + column / 16 * 8 + column % 16 / 2;
  const int shift = static_cast<int>(column % 2 * 4);
  for (int64_t k = 0; k < count; k += 4, out += 16) {
    const uint32_t four = (word_at(values + k) >> bit & 0x01010101u) * 0x10204080u >> 28;
    *out = static_cast<uint8_t>((*out & ~(15u << shift)) | four << shift);
  }
}

// `count` values of a column, whole groups, whose first padded index is k.
void place_values(const PackedWeight& weight, const uint8_t* values, int64_t count, uint8_t* panel, int64_t k, int64_t column) {
  const WeightType type = weight.type;
  if (type == WeightType::kI8) {
    for (int64_t i = 0; i < count; i += 4) std::memcpy(panel + ((k + i) * kPanel + column * 4), values + i, 4);
    return;
  }
  if (!has_planes(type)) return place_nibbles(values, count, panel + (k / 2 * kPanel + column * 4));
  const int64_t span = plane_values(type), low_bits = low_plane_bits(type), high_bits = high_plane_bits(type);
  for (int64_t i = 0; i < count; i += span) {
    uint8_t* low = panel + (k + i) * kPanel * (low_bits + high_bits) / 8;
    uint8_t* high = low + span * kPanel * low_bits / 8;
    if (low_bits == 4)
      place_nibbles(values + i, span, low + column * 4);
    else
      place_quarters(values + i, 0, low + column * 4);
    if (high_bits == 2) place_quarters(values + i, static_cast<int>(low_bits), high + column * 4);
    if (type == WeightType::kI5)
      place_fifths(values + i, high + column * 4);
    else if (high_bits == 1)
      place_bits(values + i, span, static_cast<int>(low_bits), column, high);
  }
}

// Rows from .. count of blocks, to rows first + from .. of the matrix.
void pack_some(const PackedWeight& weight, const BlockFormat& format, const uint8_t* source, int64_t stride, int64_t first,
               int64_t from, int64_t count) {
  const bool is_mxfp4 = weight.type == WeightType::kMXFP4;
  const int64_t blocks = weight.in_features / format.values, bytes = panel_bytes(weight), rows = code_rows(weight.type);
  auto* panels = static_cast<uint8_t*>(const_cast<void*>(weight.data));
  auto* codes = const_cast<uint8_t*>(weight.scale_codes);
  Block block;
  while (from < count) {
    // Rows that lie in one panel go together, block by block: it is written from end to end.
    const int64_t panel = panel_column(weight, first + from).panel;
    int64_t to = from + 1;
    while (to < count && panel_column(weight, first + to).panel == panel) ++to;
    for (int64_t index = 0; index < blocks; ++index) {
      const uint8_t* at = source + from * stride + index * format.bytes;
      for (int64_t row = from; row < to; ++row, at += stride) {
        __builtin_prefetch(at + 512);
        const int64_t column = panel_column(weight, first + row).column, place = (panel * blocks + index) * kPanel + column;
        format.unpack(at, block);
        place_values(weight, block.values, format.values, panels + panel * bytes, index * format.values, column);
        if (is_mxfp4) {
          codes[place] = at[0];
          continue;
        }
        std::memcpy(const_cast<uint16_t*>(weight.scale_halves) + place, at + format.scale_at, 2);
        if (format.offset_at >= 0) std::memcpy(const_cast<uint16_t*>(weight.offset_halves) + place, at + format.offset_at, 2);
        if (weight.super_blocks)
          for (int64_t i = 0; i < rows; ++i) codes[((panel * blocks + index) * rows + i) * kPanel + column] = block.codes[i];
      }
    }
    from = to;
  }
}

// Rows of blocks as a GGUF file has them, by that many threads. A panel's rows are one thread's.
void pack_blocks(const PackedWeight& weight, const uint8_t* source, int64_t stride, int64_t first, int64_t count,
                 int threads) {
  const BlockFormat format = block_format(weight);
  const bool is_mxfp4 = weight.type == WeightType::kMXFP4;
  if (weight.in_features % format.values != 0 || weight.offsets || (weight.scale_halves == nullptr) != is_mxfp4 ||
      (weight.offset_halves == nullptr) != (format.offset_at < 0) ||
      (weight.scale_codes == nullptr) != !(weight.super_blocks || is_mxfp4) || weight.column_order)
    throw std::invalid_argument("the matrix does not hold blocks as they are");
  int64_t from = 0;
  std::vector<std::jthread> others;
  for (int part = 1; part < threads; ++part) {
    int64_t to = count * part / threads;
    while (to > from && to < count &&
           panel_column(weight, first + to).panel == panel_column(weight, first + to - 1).panel)
      ++to;
    try {
      others.emplace_back([&weight, format, source, stride, first, from, to] {
        pack_some(weight, format, source, stride, first, from, to);
      });
    } catch (const std::system_error&) {  // no more threads: what is left is this one's
      break;
    }
    from = to;
  }
  pack_some(weight, format, source, stride, first, from, count);
}

}  // namespace

void bind_block_packing(nb::module_& module) {
  module.def(
      "pack_blocks",
      [](const PackedWeight& weight, uintptr_t blocks, int64_t row_stride, int64_t first_row, int64_t num_rows,
         int threads) {
        nb::gil_scoped_release released;
        pack_blocks(weight, reinterpret_cast<const uint8_t*>(blocks), row_stride, first_row, num_rows, threads);
      },
      "weight"_a, "blocks"_a, "row_stride"_a, "first_row"_a, "num_rows"_a, "threads"_a);
}

}  // namespace quire
