// Packing weights into panels, at load, and unpacking them. Plain code: it is bound by memory, not by arithmetic.
// Sizes are checked in Python (quire/kernels/cpu/packing.py).
#include "packed.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <stdexcept>
#include <thread>
#include <vector>

#include "bindings.h"
#include "isa.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace quire {
namespace {

// Values of one row that are handled at a time: what they fill of a panel stays in the first-level cache.
constexpr int64_t kChunk = 128;

// Asks for what will be read of the next row. Rows lie far apart and little is read of each at a time, so that the
// processor does not see by itself what comes next.
void prefetch(const void* address, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(static_cast<const char*>(address) + at);
}

uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

float widen(float value, WeightType) { return value; }

float widen(uint16_t bits, WeightType type) {
  return type == WeightType::kBF16 ? float_of(static_cast<uint32_t>(bits) << 16) : f16_value(bits);
}

uint16_t to_bf16(float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? bits >> 16 | 0x40u : rounded);
}

uint16_t to_f16(float value) {
  const uint32_t bits = bits_of(value), sign = bits >> 16 & 0x8000u, rest = bits & 0x7fffffffu;
  if (rest > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
  if (rest >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // rounds to 65536 or more
  if (rest < 0x38800000u)  // subnormal: adding 0.5 leaves the rounded value in the low bits
    return static_cast<uint16_t>(sign | (bits_of(float_of(rest) + 0.5f) - bits_of(0.5f)));
  return static_cast<uint16_t>(sign | (rest - 0x38000000u + 0xfffu + (rest >> 13 & 1u)) >> 13);
}

template <class Source, WeightType kFrom, WeightType kTo>
void pack_float_rows(const PackedWeight& weight, const Source* source, int64_t stride, int64_t first, int64_t count) {
  using Target = std::conditional_t<kTo == WeightType::kF32, float, uint16_t>;
  auto* data = static_cast<Target*>(const_cast<void*>(weight.data));
  const int64_t depth = weight.in_features, panel_values = panel_bytes(weight) / static_cast<int64_t>(sizeof(Target));
  for (int64_t from = 0; from < count;) {
    // Rows that lie in one panel go together.
    const int64_t panel = panel_column(weight, first + from).panel;
    int64_t to = from + 1;
    while (to < count && panel_column(weight, first + to).panel == panel) ++to;
    Target* out = data + panel * panel_values;
    for (int64_t k = 0; k < depth; k += kChunk) {
      const int64_t end = k + kChunk < depth ? k + kChunk : depth;
      for (int64_t row = from; row < to; ++row) {
        const Source* in = source + row * stride;
        if (row + 2 < to) prefetch(in + 2 * stride + k, (end - k) * static_cast<int64_t>(sizeof(Source)));
        const int64_t column = panel_column(weight, first + row).column;
        for (int64_t i = k; i < end; ++i) {
          Target& place = out[index_in_panel(kTo, i, column)];
          if constexpr (kFrom == kTo)
            place = in[i];
          else if constexpr (kTo == WeightType::kF32)
            place = widen(in[i], kFrom);
          else if constexpr (kTo == WeightType::kBF16)
            place = to_bf16(widen(in[i], kFrom));
          else
            place = to_f16(widen(in[i], kFrom));
        }
      }
    }
    from = to;
  }
}

template <class Source, WeightType kFrom>
void pack_rows_from(const PackedWeight& weight, const void* source, int64_t stride, int64_t first, int64_t count) {
  const auto* from = static_cast<const Source*>(source);
  switch (weight.type) {
    case WeightType::kF32:
      return pack_float_rows<Source, kFrom, WeightType::kF32>(weight, from, stride, first, count);
    case WeightType::kBF16:
      return pack_float_rows<Source, kFrom, WeightType::kBF16>(weight, from, stride, first, count);
    case WeightType::kF16:
      return pack_float_rows<Source, kFrom, WeightType::kF16>(weight, from, stride, first, count);
    default:
      throw std::invalid_argument("integer weights are packed from values and scales");
  }
}

void pack_rows(const PackedWeight& weight, const void* source, WeightType source_type, int64_t stride, int64_t first,
               int64_t count) {
  switch (source_type) {
    case WeightType::kF32:
      return pack_rows_from<float, WeightType::kF32>(weight, source, stride, first, count);
    case WeightType::kBF16:
      return pack_rows_from<uint16_t, WeightType::kBF16>(weight, source, stride, first, count);
    case WeightType::kF16:
      return pack_rows_from<uint16_t, WeightType::kF16>(weight, source, stride, first, count);
    default:
      throw std::invalid_argument("rows of floats are expected");
  }
}

// One row's values of one group (bytes, or 0 .. 15 in bytes) into its column.
void pack_group(WeightType type, std::byte* panel, int64_t base, int64_t column, const uint8_t* values, int64_t count) {
  if (type == WeightType::kE4M3) {
    auto* out = reinterpret_cast<uint8_t*>(panel) + index_in_panel(type, base, column);
    int64_t k = 0;
    for (; k + 2 <= count; k += 2) std::memcpy(out + k * kPanel, values + k, 2);
    if (k < count) out[k * kPanel] = values[k];
    return;
  }
  if (type == WeightType::kI8) {
    auto* out = reinterpret_cast<uint8_t*>(panel) + index_in_panel(type, base, column);
    int64_t k = 0;
    for (; k + 4 <= count; k += 4) std::memcpy(out + k * kPanel, values + k, 4);
    for (; k < count; ++k) out[k / 4 * 4 * kPanel + k % 4] = values[k];
    return;
  }
  auto* out = reinterpret_cast<uint8_t*>(panel) + index_in_panel(type, base, column) / 2;
  int64_t k = 0;
  for (; k + 8 <= count; k += 8) {
    uint32_t low, high;
    std::memcpy(&low, values + k, 4);
    std::memcpy(&high, values + k + 4, 4);
    const uint32_t word = (low & 0x0f0f0f0fu) | (high & 0x0f0f0f0fu) << 4;
    std::memcpy(out + k / 2 * kPanel, &word, 4);
  }
  for (int64_t j = 0; k + j < count; ++j) {
    uint8_t& pair = out[k / 2 * kPanel + j % 4];
    pair = static_cast<uint8_t>(j < 4 ? (pair & 0xf0u) | (values[k + j] & 15u)
                                      : (pair & 0x0fu) | (values[k + j] & 15u) << 4);
  }
}

int32_t sum_of(const uint8_t* values, int64_t count) {
  int32_t sum = 0;
  for (int64_t k = 0; k < count; ++k) sum += static_cast<int8_t>(values[k]);
  return sum;
}

void pack_integers(const PackedWeight& weight, const void* source, int64_t stride, const float* scales,
                   const float* offsets, int64_t scale_stride, int64_t first, int64_t count) {
  if (!is_integer(weight.type) && weight.type != WeightType::kE4M3)
    throw std::invalid_argument("the matrix does not hold values of a byte or less with scales of float32 or float16");
  const int64_t groups = num_groups(weight), bytes = panel_bytes(weight);
  auto* panels = static_cast<std::byte*>(const_cast<void*>(weight.data));
  PanelColumn places[kPanel];
  // Rows of one panel go together, group by group.
  for (int64_t block = 0; block < count; block += kPanel) {
    const int64_t rows = block + kPanel < count ? kPanel : count - block;
    for (int64_t row = 0; row < rows; ++row) places[row] = panel_column(weight, first + block + row);
    for (int64_t group = 0; group < groups; ++group) {
      const int64_t begin = group * weight.group_size, length = group_length(weight, group);
      const int64_t base = padded_index(weight, begin);
      const auto* values = static_cast<const uint8_t*>(source) + block * stride + begin;
      for (int64_t row = 0; row < rows; ++row, values += stride) {
        if (row + 4 < rows) prefetch(values + 4 * stride, length < 1024 ? length : 1024);
        const auto [panel, column] = places[row];
        pack_group(weight.type, panels + panel * bytes, base, column, values, length);
        const int64_t at = (panel * groups + group) * kPanel + column, from = (block + row) * scale_stride + group;
        if (weight.scale_halves)
          const_cast<uint16_t*>(weight.scale_halves)[at] = to_f16(scales[from]);
        else
          const_cast<float*>(weight.scales)[at] = scales[from];
        const float offset = offsets ? offsets[from] : 0.0f;
        if (weight.offsets) const_cast<float*>(weight.offsets)[at] = offset;
        if (weight.offset_halves) const_cast<uint16_t*>(weight.offset_halves)[at] = to_f16(offset);
        if (weight.column_sums) const_cast<int32_t*>(weight.column_sums)[at] = sum_of(values, length);
      }
    }
  }
}

// Rows of e2m1 codes, two to a byte (the first in the low half), and of scale codes, `scale_stride` apart.
void pack_fp4(const PackedWeight& weight, const void* source, int64_t stride, const uint8_t* scale_codes,
              int64_t scale_stride, const float* row_scales, int64_t first, int64_t count) {
  if (!has_scale_codes(weight.type)) throw std::invalid_argument("the matrix does not hold 4-bit floats");
  constexpr int64_t kLongest = 64;
  const int64_t groups = num_groups(weight), bytes = panel_bytes(weight);
  if (weight.group_size > kLongest || weight.group_size % 2 != 0)
    throw std::invalid_argument("groups of 4-bit floats are even and at most 64");
  uint8_t codes[kLongest];
  for (int64_t block = 0; block < count; block += kPanel) {
    const int64_t end = block + kPanel < count ? block + kPanel : count;
    for (int64_t group = 0; group < groups; ++group) {
      const int64_t begin = group * weight.group_size, length = group_length(weight, group);
      const int64_t base = padded_index(weight, begin);
      for (int64_t row = block; row < end; ++row) {
        const PanelColumn place = panel_column(weight, first + row);
        const auto* pairs = static_cast<const uint8_t*>(source) + row * stride + begin / 2;
        if (row + 4 < end) prefetch(pairs + 4 * stride, (length + 1) / 2);
        for (int64_t k = 0; k < length; ++k) codes[k] = pairs[k / 2] >> k % 2 * 4 & 15;
        auto* panel = static_cast<std::byte*>(const_cast<void*>(weight.data)) + place.panel * bytes;
        pack_group(weight.type, panel, base, place.column, codes, length);
        const_cast<uint8_t*>(weight.scale_codes)[(place.panel * groups + group) * kPanel + place.column] =
            scale_codes[row * scale_stride + group];
        if (weight.scales) const_cast<float*>(weight.scales)[place.panel * kPanel + place.column] = row_scales[row];
      }
    }
  }
}

float unpacked(const PackedWeight& weight, const PanelColumn& place, int64_t k) {
  const auto* panel = static_cast<const std::byte*>(weight.data) + place.panel * panel_bytes(weight);
  const int64_t padded = padded_index(weight, k);
  switch (weight.type) {
    case WeightType::kF32:
      return reinterpret_cast<const float*>(panel)[index_in_panel(weight.type, padded, place.column)];
    case WeightType::kBF16:
    case WeightType::kF16:
      return widen(reinterpret_cast<const uint16_t*>(panel)[index_in_panel(weight.type, padded, place.column)], weight.type);
    default:
      break;
  }
  const int64_t group = k / weight.group_size;
  const float scale = stored_scale(weight, place.panel, group, place.column);
  const float value = stored_value(weight, reinterpret_cast<const uint8_t*>(panel), padded, place.column);
  return scale * value + stored_offset(weight, place.panel, group, place.column, scale);
}

void unpack_rows(const PackedWeight& weight, float* out, int64_t stride, int64_t first, int64_t count) {
  for (int64_t row = 0; row < count; ++row) {
    const PanelColumn place = panel_column(weight, first + row);
    for (int64_t k = 0; k < weight.in_features; ++k)
      out[row * stride + (weight.column_order ? weight.column_order[k] : k)] = unpacked(weight, place, k);
  }
}

// Runs fit_int4 over all groups, on `threads` threads. False: some numbers are not finite.
bool fit_int4(const QuantizeKernels& kernels, const FitArgs& args, int64_t count, int threads) {
  constexpr int64_t kPiece = 1024;  // a fifth of a millisecond, and a multiple of every vector's lanes
  std::atomic<int64_t> next = 0;
  std::atomic<bool> is_finite = true;
  const auto work = [&] {
    for (int64_t begin = next.fetch_add(kPiece); begin < count && is_finite; begin = next.fetch_add(kPiece))
      if (!kernels.fit_int4(args, begin, std::min(begin + kPiece, count))) is_finite = false;
  };
  std::vector<std::thread> others;
  for (int i = 1; i < threads; ++i) others.emplace_back(work);
  work();
  for (std::thread& other : others) other.join();
  return is_finite;
}

template <class T>
T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

}  // namespace

void bind_packing(nb::module_& module) {
  module.def("packed_sizes",
             [](const PackedWeight& weight) {
               return nb::make_tuple(num_panels(weight), panel_bytes(weight), num_groups(weight));
             },
             "weight"_a, "(panels, bytes of one panel, groups) of a matrix; its addresses are not looked at.");
  module.def("code_rows", &code_rows, "type"_a, "Bytes of a column's codes in a super-block.");
  module.def(
      "pack_rows",
      [](const PackedWeight& weight, uintptr_t source, WeightType source_type, int64_t row_stride, int64_t first_row,
         int64_t num_rows) {
        nb::gil_scoped_release released;
        pack_rows(weight, at<void>(source), source_type, row_stride, first_row, num_rows);
      },
      "weight"_a, "source"_a, "source_type"_a, "row_stride"_a, "first_row"_a, "num_rows"_a);
  module.def(
      "pack_integers",
      [](const PackedWeight& weight, uintptr_t values, int64_t row_stride, uintptr_t scales, uintptr_t offsets,
         int64_t scale_stride, int64_t first_row, int64_t num_rows) {
        nb::gil_scoped_release released;
        pack_integers(weight, at<void>(values), row_stride, at<float>(scales), at<float>(offsets), scale_stride,
                      first_row, num_rows);
      },
      "weight"_a, "values"_a, "row_stride"_a, "scales"_a, "offsets"_a, "scale_stride"_a, "first_row"_a, "num_rows"_a);
  module.def(
      "pack_fp4",
      [](const PackedWeight& weight, uintptr_t codes, int64_t row_stride, uintptr_t scale_codes, int64_t scale_stride,
         uintptr_t row_scales, int64_t first_row, int64_t num_rows) {
        nb::gil_scoped_release released;
        pack_fp4(weight, at<void>(codes), row_stride, at<uint8_t>(scale_codes), scale_stride, at<float>(row_scales),
                 first_row, num_rows);
      },
      "weight"_a, "codes"_a, "row_stride"_a, "scale_codes"_a, "scale_stride"_a, "row_scales"_a, "first_row"_a,
      "num_rows"_a);
  module.def(
      "fit_int4",
      [](const std::string& isa, uintptr_t groups, int64_t count, int64_t group_size, const std::vector<float>& shares,
         const std::vector<float>& nudges, uintptr_t values, uintptr_t steps, uintptr_t offsets, uintptr_t means,
         int threads) {
        if (group_size < 1 || group_size > 128) throw std::invalid_argument("groups of 1 to 128 weights are fitted");
        const FitArgs args{at<float>(groups), group_size, shares.data(), static_cast<int64_t>(shares.size()),
                           nudges.data(), static_cast<int64_t>(nudges.size()) / 2, at<uint8_t>(values),
                           at<float>(steps), at<float>(offsets), at<float>(means)};
        nb::gil_scoped_release released;
        return fit_int4(kernels_for(isa).quantize, args, count, threads);
      },
      "isa"_a, "groups"_a, "count"_a, "group_size"_a, "shares"_a, "nudges"_a, "values"_a, "steps"_a, "offsets"_a,
      "means"_a, "threads"_a);
  module.def(
      "unpack_rows",
      [](const PackedWeight& weight, uintptr_t out, int64_t row_stride, int64_t first_row, int64_t num_rows) {
        nb::gil_scoped_release released;
        unpack_rows(weight, at<float>(out), row_stride, first_row, num_rows);
      },
      "weight"_a, "out"_a, "row_stride"_a, "first_row"_a, "num_rows"_a);
}

}  // namespace quire
