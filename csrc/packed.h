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
  return type == WeightType::kI4 || type == WeightType::kMXFP4 || type == WeightType::kNVFP4;
}

// Whether scales are codes.
QUIRE_LAYOUT bool has_scale_codes(WeightType type) {
  return type == WeightType::kMXFP4 || type == WeightType::kNVFP4;
}

QUIRE_LAYOUT int64_t rounded_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// A group of k begins at a multiple of this many values.
QUIRE_LAYOUT int64_t group_alignment(WeightType type) {
  if (is_nibbles(type)) return 8;
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
      return values / 2;
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

// Place of the padded index k of a column: in elements from the panel's start; nibbles, the low one first.
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
      return ((k / 8 * kPanel + column) * 4 + k % 4) * 2 + k / 4 % 2;
    default:
      return k * kPanel + column;
  }
}

// The value at a place of a panel of integers or small floats, before its scale.
QUIRE_SMALL_FLOAT float stored_value(WeightType type, const uint8_t* panel, int64_t place) {
  if (type == WeightType::kI8) return static_cast<float>(static_cast<int8_t>(panel[place]));
  if (type == WeightType::kE4M3) return e4m3_value(panel[place]);
  const int code = panel[place / 2] >> place % 2 * 4 & 15;
  return type == WeightType::kI4 ? static_cast<float>(code) : e2m1_value(code);
}

// The scale of a group's column.
QUIRE_SMALL_FLOAT float stored_scale(const PackedWeight& weight, int64_t panel, int64_t group, int64_t column) {
  const int64_t at = (panel * num_groups(weight) + group) * kPanel + column;
  if (weight.type == WeightType::kMXFP4) return e8m0_value(weight.scale_codes[at]);
  if (weight.type == WeightType::kNVFP4)
    return e4m3_value(weight.scale_codes[at]) * weight.scales[panel * kPanel + column];
  return weight.scale_halves ? f16_value(weight.scale_halves[at]) : weight.scales[at];
}

// What is added to a group's column, whose scale is `scale`.
QUIRE_SMALL_FLOAT float stored_offset(const PackedWeight& weight, int64_t panel, int64_t group, int64_t column, float scale) {
  const int64_t at = (panel * num_groups(weight) + group) * kPanel + column;
  if (weight.offsets) return weight.offsets[at];
  if (weight.offset_halves) return f16_value(weight.offset_halves[at]);
  return weight.centre != 0 ? -weight.centre * scale : 0.0f;
}

}  // namespace quire
