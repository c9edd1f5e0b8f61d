// Where a value of a packed matrix lies (PackedWeight in kernels.h says how the panels look). Everything here is
// inlined by force: this file is compiled for several instruction sets, and no copy may serve another one.
#pragma once

#include "kernels.h"
#include "small_floats.h"

#define QUIRE_LAYOUT inline __attribute__((always_inline)) constexpr

namespace quire {

QUIRE_LAYOUT bool is_integer(WeightType type) { return type == WeightType::kI8 || type == WeightType::kI4; }

// Whether weights are more than scale * value.
QUIRE_LAYOUT bool has_offsets(const PackedWeight& weight) {
  return weight.offsets || weight.offset_halves || weight.centre != 0;
}

// Whether two values share a byte.
QUIRE_LAYOUT bool is_nibbles(WeightType type) {
  return type == WeightType::kI4 || type == WeightType::kMXFP4 || type == WeightType::kNVFP4 ||
         type == WeightType::kNL4;
}

// Whether scales are codes.
QUIRE_LAYOUT bool has_scale_codes(WeightType type) {
  return type == WeightType::kMXFP4 || type == WeightType::kNVFP4;
}

// Whether the bits of a value lie in planes, those of `plane_values` values of k side by side.
QUIRE_LAYOUT bool has_planes(WeightType type) {
  return type == WeightType::kI2 || type == WeightType::kI3 || type == WeightType::kI5 || type == WeightType::kI6;
}
QUIRE_LAYOUT int64_t plane_values(WeightType type) { return type == WeightType::kI5 ? 32 : 16; }
QUIRE_LAYOUT int low_plane_bits(WeightType type) { return type == WeightType::kI2 || type == WeightType::kI3 ? 2 : 4; }
QUIRE_LAYOUT int high_plane_bits(WeightType type) {
  return type == WeightType::kI2 ? 0 : type == WeightType::kI6 ? 2 : 1;
}

// Whether integers are stored in any of these ways.
QUIRE_LAYOUT bool is_whole(WeightType type) { return is_integer(type) || has_planes(type) || type == WeightType::kNL4; }

// The numbers of nl4, and what makes all of them positive.
inline constexpr int8_t kNonlinear[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
inline constexpr int kNonlinearBias = 127;

// How much larger than the integers the stored ones of planes are; of nl4 those of the table that the kernels have.
QUIRE_LAYOUT int stored_bias(const PackedWeight& weight) {
  switch (weight.type) {
    case WeightType::kI3:
      return 4;
    case WeightType::kI5:
      return weight.offsets || weight.offset_halves ? 0 : 16;
    case WeightType::kI6:
      return 32;
    case WeightType::kNL4:
      return kNonlinearBias;
    default:
      return 0;
  }
}

// Super-blocks: values of k, and rows of codes.
//   i4, i5    8 rows, a group's scale in the low half, its offset's factor in the high half, four bits of each; 4 rows with
//             two more bits: scale and factor of a group, then those of the next one
//   i6        16 rows, signed bytes
//   i2        16 rows, scale in the low half, factor in the high half
//   i3, nl4   a row for two groups, four bits each; then a row for four groups with two more bits each; 32 too large
inline constexpr int64_t kSuperBlock = 256;
QUIRE_LAYOUT int64_t super_groups(WeightType type) {
  return type == WeightType::kI2 || type == WeightType::kI3 || type == WeightType::kI6 ? 16 : 8;
}
QUIRE_LAYOUT int64_t code_rows(WeightType type) {
  return type == WeightType::kI2 || type == WeightType::kI6 ? 16 : type == WeightType::kNL4 ? 6 : 12;
}

// Codes of a group: of [rows], `pitch` bytes apart.
struct SuperCodes {
  int scale;
  int offset;
};
QUIRE_LAYOUT SuperCodes super_codes(WeightType type, const uint8_t* rows, int64_t pitch, int64_t group) {
  switch (type) {
    case WeightType::kI4:
    case WeightType::kI5: {
      const int low = rows[group * pitch], high = rows[(8 + group / 2) * pitch] >> group % 2 * 4;
      return {(low & 15) | (high & 3) << 4, low >> 4 | (high >> 2 & 3) << 4};
    }
    case WeightType::kI6:
      return {static_cast<int8_t>(rows[group * pitch]), 0};
    case WeightType::kI2:
      return {rows[group * pitch] & 15, rows[group * pitch] >> 4};
    default: {
      const int low = rows[group / 2 * pitch] >> group % 2 * 4 & 15;
      const int high = rows[(super_groups(type) / 2 + group / 4) * pitch] >> group % 4 * 2 & 3;
      return {(low | high << 4) - 32, 0};
    }
  }
}

QUIRE_LAYOUT int64_t rounded_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// A group of k begins at a multiple of this many values.
QUIRE_LAYOUT int64_t group_alignment(WeightType type) {
  if (is_nibbles(type)) return 8;
  if (has_planes(type)) return plane_values(type);
  if (type == WeightType::kI8 || type == WeightType::kE4M3) return 4;
  return type == WeightType::kBF16 ? 2 : 1;
}

QUIRE_LAYOUT int64_t num_groups(const PackedWeight& weight) {
  return (weight.in_features + weight.group_size - 1) / weight.group_size;
}

// Values in group `group`: the last group may be shorter than the others.
QUIRE_LAYOUT int64_t group_length(const PackedWeight& weight, int64_t group) {
  const int64_t rest = weight.in_features - group * weight.group_size;
  return rest < weight.group_size ? rest : weight.group_size;
}

// Values of one column with what pads its groups.
QUIRE_LAYOUT int64_t padded_depth(const PackedWeight& weight) {
  const int64_t align = group_alignment(weight.type), last = num_groups(weight) - 1;
  return last * rounded_up(weight.group_size, align) + rounded_up(group_length(weight, last), align);
}

// Place of value k in a padded column.
QUIRE_LAYOUT int64_t padded_index(const PackedWeight& weight, int64_t k) {
  const int64_t group = k / weight.group_size;
  return group * rounded_up(weight.group_size, group_alignment(weight.type)) + (k - group * weight.group_size);
}

QUIRE_LAYOUT int64_t num_panels(const PackedWeight& weight) {
  return weight.gated ? (weight.out_features / 2 + kPanel / 2 - 1) / (kPanel / 2)
                      : (weight.out_features + kPanel - 1) / kPanel;
}

QUIRE_LAYOUT int64_t panel_bytes(const PackedWeight& weight) {
  const int64_t values = padded_depth(weight) * kPanel;
  switch (weight.type) {
    case WeightType::kF32:
      return values * 4;
    case WeightType::kBF16:
    case WeightType::kF16:
      return values * 2;
    case WeightType::kI8:
    case WeightType::kE4M3:
      return values;
    default:
      return has_planes(weight.type) ? values * (low_plane_bits(weight.type) + high_plane_bits(weight.type)) / 8 : values / 2;
  }
}

struct PanelColumn {
  int64_t panel;
  int64_t column;
};

// Where output `row` of the matrix lies.
QUIRE_LAYOUT PanelColumn panel_column(const PackedWeight& weight, int64_t row) {
  if (!weight.gated) return {row / kPanel, row % kPanel};
  const int64_t half = weight.out_features / 2, side = row >= half ? 1 : 0, inside = row - side * half;
  return {inside / (kPanel / 2), inside % (kPanel / 2) + side * (kPanel / 2)};
}

// Place of the padded index k of a column: in elements from the panel's start; nibbles, the low one first. (Not of planes.)
QUIRE_LAYOUT int64_t index_in_panel(WeightType type, int64_t k, int64_t column) {
  switch (type) {
    case WeightType::kBF16:
    case WeightType::kE4M3:
      return (k / 2 * kPanel + column) * 2 + k % 2;
    case WeightType::kI8:
      return (k / 4 * kPanel + column) * 4 + k % 4;
    case WeightType::kI4:
    case WeightType::kMXFP4:
    case WeightType::kNVFP4:
    case WeightType::kNL4:
      return ((k / 8 * kPanel + column) * 4 + k % 4) * 2 + k / 4 % 2;
    default:
      return k * kPanel + column;
  }
}

// The bits of a value of planes, whose padded index is k.
QUIRE_LAYOUT int plane_code(WeightType type, const uint8_t* panel, int64_t k, int64_t column) {
  const int64_t span = plane_values(type), low_bits = low_plane_bits(type), high_bits = high_plane_bits(type);
  const uint8_t* low = panel + k / span * span * kPanel * (low_bits + high_bits) / 8;
  const uint8_t* high = low + span * kPanel * low_bits / 8;
  const int64_t own = k % span, quad = own / 4, byte = column * 4 + own % 4, bit = column % 16 * 4 + own % 4;
  const int value = low_bits == 4 ? low[quad / 2 * kPanel * 4 + byte] >> quad % 2 * 4 & 15 : low[byte] >> quad * 2 & 3;
  if (high_bits == 2) return value | (high[byte] >> quad * 2 & 3) << low_bits;
  if (type == WeightType::kI5) return value | (high[byte] >> quad & 1) << low_bits;
  return high_bits == 0 ? value : value | (high[quad * 16 + column / 16 * 8 + bit / 8] >> bit % 8 & 1) << low_bits;
}

// The value at padded index k of a column of integers or small floats, before its scale.
QUIRE_SMALL_FLOAT float stored_value(const PackedWeight& weight, const uint8_t* panel, int64_t k, int64_t column) {
  const WeightType type = weight.type;
  if (has_planes(type)) return static_cast<float>(plane_code(type, panel, k, column) - stored_bias(weight));
  const int64_t place = index_in_panel(type, k, column);
  if (type == WeightType::kI8) return static_cast<float>(static_cast<int8_t>(panel[place]));
  if (type == WeightType::kE4M3) return e4m3_value(panel[place]);
  const int code = panel[place / 2] >> place % 2 * 4 & 15;
  if (type == WeightType::kNL4) return static_cast<float>(kNonlinear[code]);
  return type == WeightType::kI4 ? static_cast<float>(code) : e2m1_value(code);
}

// Of a group's column in super-blocks: where its halves lie, and its codes.
struct SuperPlace {
  int64_t half;
  SuperCodes codes;
};
QUIRE_LAYOUT SuperPlace super_place(const PackedWeight& weight, int64_t panel, int64_t group, int64_t column) {
  const int64_t per = super_groups(weight.type), at = panel * (num_groups(weight) / per) + group / per;
  const uint8_t* codes = weight.scale_codes + at * code_rows(weight.type) * kPanel + column;
  return {at * kPanel + column, super_codes(weight.type, codes, kPanel, group % per)};
}

// The scale of a group's column.
QUIRE_SMALL_FLOAT float stored_scale(const PackedWeight& weight, int64_t panel, int64_t group, int64_t column) {
  if (weight.super_blocks) {
    const SuperPlace place = super_place(weight, panel, group, column);
    return f16_value(weight.scale_halves[place.half]) * static_cast<float>(place.codes.scale);
  }
  const int64_t at = (panel * num_groups(weight) + group) * kPanel + column;
  if (weight.type == WeightType::kMXFP4) return e8m0_value(weight.scale_codes[at]);
  if (weight.type == WeightType::kNVFP4)
    return e4m3_value(weight.scale_codes[at]) * weight.scales[panel * kPanel + column];
  return weight.scale_halves ? f16_value(weight.scale_halves[at]) : weight.scales[at];
}

// What is added to a group's column, whose scale is `scale`.
QUIRE_SMALL_FLOAT float stored_offset(const PackedWeight& weight, int64_t panel, int64_t group, int64_t column, float scale) {
  if (weight.super_blocks) {
    if (!weight.offset_halves) return 0.0f;
    const SuperPlace place = super_place(weight, panel, group, column);
    return -f16_value(weight.offset_halves[place.half]) * static_cast<float>(place.codes.offset);
  }
  const int64_t at = (panel * num_groups(weight) + group) * kPanel + column;
  if (weight.offsets) return weight.offsets[at];
  if (weight.offset_halves) return f16_value(weight.offset_halves[at]);
  return weight.centre != 0 ? -weight.centre * scale : 0.0f;
}

}  // namespace quire
