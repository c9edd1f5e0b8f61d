// Floats of 8 and 4 bits, one by one, as the OCP standards define them (OFP8 and Microscaling Formats, 2023); and float16.
//
//   e4m3   sign, 4 bits of exponent (bias 7), 3 of fraction: up to 448; no infinities, 0x7f and 0xff are not numbers
//   e2m1   sign, 2 bits of exponent (bias 1), 1 of fraction: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives
//   e8m0   an exponent: 2^(code - 127), 0xff is not a number
//
// Everything here is inlined by force, as in packed.h.
#pragma once

#include <cstdint>
#include <cstring>

#define QUIRE_SMALL_FLOAT inline __attribute__((always_inline))

namespace quire {

QUIRE_SMALL_FLOAT float float_from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// float16. The exponent is moved by multiplication, which also makes subnormals right.
QUIRE_SMALL_FLOAT float f16_value(uint16_t bits) {
  const uint32_t sign = (bits & 0x8000u) << 16, rest = bits & 0x7fffu;
  if (rest >= 0x7c00u) return float_from_bits(0x7f800000u | (rest & 0x3ffu) << 13 | sign);
  const float size = float_from_bits(rest << 13) * 0x1p112f;
  return sign ? -size : size;
}

inline constexpr int kE4M3NaN = 0x7f;
inline constexpr float kE4M3Largest = 448.0f;

QUIRE_SMALL_FLOAT float e4m3_value(int code) {
  const int size = code & 0x7f;
  float value;
  if (size == kE4M3NaN)
    value = __builtin_nanf("");
  else if (size < 8)  // subnormal
    value = static_cast<float>(size) * 0x1p-9f;
  else
    value = float_from_bits(static_cast<uint32_t>(size + (120 << 3)) << 20);
  return code & 0x80 ? -value : value;
}

QUIRE_SMALL_FLOAT float e2m1_value(int code) {
  const int size = code & 7;
  const float value =
      size < 2 ? static_cast<float>(size) * 0.5f : float_from_bits(static_cast<uint32_t>(size + (126 << 1)) << 22);
  return code & 8 ? -value : value;
}

QUIRE_SMALL_FLOAT float e8m0_value(int code) {
  if (code == 0xff) return __builtin_nanf("");
  return float_from_bits(code == 0 ? 0x00400000u : static_cast<uint32_t>(code) << 23);
}

}  // namespace quire
