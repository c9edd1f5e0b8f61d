// Embedding, norms and rotary tables. Compiled once for each instruction set.
#include <cmath>

#include "packed.h"
#include "vector_math.h"

namespace quire::QUIRE_ISA {
namespace {

QUIRE_INLINE float f16_to_float(uint16_t half) {
  uint32_t sign = (half & 0x8000u) << 16, rest = half & 0x7fffu;
  float number = rest >= 0x7c00u ? bit_cast<float>(0x7f800000u | (rest & 0x3ffu) << 13)
                                 : bit_cast<float>(rest << 13) * bit_cast<float>((254u - 15u) << 23);
  return bit_cast<float>(bit_cast<uint32_t>(number) | sign);
}

float plain_element(const void* row, WeightType type, int64_t k) {
  switch (type) {
    case WeightType::kF32:
      return static_cast<const float*>(row)[k];
    case WeightType::kBF16:
      return bit_cast<float>(static_cast<uint32_t>(static_cast<const uint16_t*>(row)[k]) << 16);
    default:
      return f16_to_float(static_cast<const uint16_t*>(row)[k]);
  }
}

float packed_element(const PackedWeight& table, int64_t row, int64_t k) {
  const auto [panel, column] = panel_column(table, row);
  const auto* data = static_cast<const std::byte*>(table.data) + panel * panel_bytes(table);
  const int64_t at = index_in_panel(table.type, padded_index(table, k), column);
  if (!is_integer(table.type)) return plain_element(data, table.type, at);
  const int64_t scale = (panel * num_groups(table) + k / table.group_size) * kPanel + column;
  const float value = table.type == WeightType::kI8
                          ? static_cast<float>(reinterpret_cast<const int8_t*>(data)[at])
                          : static_cast<float>(reinterpret_cast<const uint8_t*>(data)[at / 2] >> at % 2 * 4 & 15);
  return fma(table.scales[scale], value, table.offsets ? table.offsets[scale] : 0.0f);
}

void embed(const EmbedArgs& args, const Step& step, Team& team) {
  const int64_t* ids = args.by_position ? step.positions : step.token_ids;
  float* out = step.at(args.out);
  for (int64_t t = team.take(); t < step.rows; t = team.take()) {
    float* row = out + t * args.out.stride;
    const int64_t id = ids[t] + args.shift;
    const int64_t bytes = args.table.type == WeightType::kF32 ? 4 : 2;
    const auto* plain = args.plain ? static_cast<const std::byte*>(args.plain) + id * args.width * bytes : nullptr;
    for (int64_t k = 0; k < args.width; ++k) {
      float value = plain ? plain_element(plain, args.table.type, k) : packed_element(args.table, id, k);
      row[k] = args.accumulate ? row[k] + value : value;
    }
  }
}

// Sums over a row run lane by lane, then over the lanes: the width alone decides the order.
void norm(const NormArgs& args, const Step& step, Team& team) {
  const float* in = step.at(args.x);
  float* out = step.at(args.out);
  const int64_t width = args.width, whole = width / kLanes * kLanes, rest = width - whole;
  const float size = static_cast<float>(width);
  for (int64_t t = team.take(); t < step.rows; t = team.take()) {
    const float* x = in + t * args.x.stride;
    float* y = out + t * args.out.stride;
    float mean = 0;
    if (args.subtract_mean) {
      vf sum = zero();
      for (int64_t k = 0; k < whole; k += kLanes) sum += load(x + k);
      if (rest) sum += load_some(x + whole, rest);
      mean = sum_lanes(sum) / size;
    }
    vf squares = zero();
    for (int64_t k = 0; k < whole; k += kLanes) {
      vf d = load(x + k) - mean;
      squares = fma(d, d, squares);
    }
    if (rest) {
      vf d = load_some(x + whole, rest, mean) - mean;
      squares = fma(d, d, squares);
    }
    const float scale = 1.0f / __builtin_sqrtf(sum_lanes(squares) / size + args.epsilon);
    for (int64_t k = 0; k < width; k += kLanes) {
      const int64_t count = width - k;
      const bool full = count >= kLanes;
      vf value = ((full ? load(x + k) : load_some(x + k, count)) - mean) * scale;
      if (args.weight) value *= full ? load(args.weight + k) : load_some(args.weight + k, count);
      if (args.bias) value += full ? load(args.bias + k) : load_some(args.bias + k, count);
      if (full)
        store(y + k, value);
      else
        store_some(y + k, value, count);
    }
  }
}

void rotation(const RotationArgs& args, const Step& step, Team& team) {
  float* out = step.at(args.out);
  const int64_t half = args.rotary_dim / 2;
  for (int64_t t = team.take(4); t < step.rows; t = team.take(4)) {
    for (int64_t row = t; row < step.rows && row < t + 4; ++row) {
      float* y = out + row * args.out.stride;
      const float position = static_cast<float>(step.positions[row]);
      for (int64_t i = 0; i < half; ++i) {
        const float angle = position * args.inverse_frequencies[i];
        y[i] = std::cos(angle) * args.magnitude;
        y[half + i] = std::sin(angle) * args.magnitude;
      }
    }
  }
}

}  // namespace

extern const LayerKernels kLayers;
const LayerKernels kLayers = {embed, norm, rotation};

}  // namespace quire::QUIRE_ISA
