// The tile instructions of AMX that the kernels use. With QUIRE_EMULATE_AMX they are plain C++ that does what the
// instruction set's manual says, so that the kernels are tested on machines without them.
#pragma once

#include <cstdint>
#include <cstring>

#include "bf16_dot.h"

namespace quire::QUIRE_ISA {
namespace {

inline constexpr int kAmxRows = 16;        // of a tile register
inline constexpr int kAmxRowBytes = 64;

// What ldtilecfg reads.
struct alignas(64) AmxConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};
static_assert(sizeof(AmxConfig) == 64);

#if defined(QUIRE_EMULATE_AMX)

struct AmxRegisters {
  AmxConfig config;
  unsigned char bytes[8][kAmxRows][kAmxRowBytes];
};
thread_local AmxRegisters amx_registers;

inline void amx_configure(const AmxConfig& config) {
  amx_registers.config = config;
  std::memset(amx_registers.bytes, 0, sizeof(amx_registers.bytes));
}
inline void amx_release() { amx_registers.config.palette = 0; }

template <int kTile>
void amx_zero() {
  std::memset(amx_registers.bytes[kTile], 0, sizeof(amx_registers.bytes[kTile]));
}

template <int kTile>
void amx_load(const void* base, int64_t stride) {
  const AmxRegisters& registers = amx_registers;
  amx_zero<kTile>();
  for (int row = 0; row < registers.config.rows[kTile]; ++row)
    std::memcpy(amx_registers.bytes[kTile][row], static_cast<const char*>(base) + row * stride,
                registers.config.row_bytes[kTile]);
}

template <int kTile>
void amx_store(void* base, int64_t stride) {
  const AmxRegisters& registers = amx_registers;
  for (int row = 0; row < registers.config.rows[kTile]; ++row)
    std::memcpy(static_cast<char*>(base) + row * stride, registers.bytes[kTile][row],
                registers.config.row_bytes[kTile]);
}

// kSum [rows][columns] int32 += kLeft [rows][4 k] int8 x kRight [k][columns][4] int8.
template <int kSum, int kLeft, int kRight>
void amx_dot() {
  AmxRegisters& registers = amx_registers;
  for (int row = 0; row < registers.config.rows[kSum]; ++row)
    for (int k = 0; k < registers.config.row_bytes[kLeft] / 4; ++k)
      for (int column = 0; column < registers.config.row_bytes[kSum] / 4; ++column) {
        int32_t sum;
        std::memcpy(&sum, &registers.bytes[kSum][row][column * 4], 4);
        for (int j = 0; j < 4; ++j)
          sum += static_cast<int8_t>(registers.bytes[kLeft][row][k * 4 + j]) *
                 static_cast<int8_t>(registers.bytes[kRight][k][column * 4 + j]);
        std::memcpy(&registers.bytes[kSum][row][column * 4], &sum, 4);
      }
}

// kSum [rows][columns] float32 += kLeft [rows][2 k] bfloat16 x kRight [k][columns][2] bfloat16: the first values of all
// pairs in one chain over k, the second ones in another, both from 0; their sum is added to kSum.
template <int kSum, int kLeft, int kRight>
void amx_dot_bf16() {
  constexpr auto upper = static_cast<int32_t>(0xffff0000u);
  AmxRegisters& registers = amx_registers;
  for (int row = 0; row < registers.config.rows[kSum]; ++row)
    for (int at = 0; at < registers.config.row_bytes[kSum]; at += QUIRE_VECTOR_BYTES) {
      vf chains[2] = {};
      for (int k = 0; k < registers.config.row_bytes[kLeft] / 4; ++k) {
        const vi x = broadcast_int(load_as<int32_t>(&registers.bytes[kLeft][row][k * 4]));
        const vi w = load_as<vi>(&registers.bytes[kRight][k][at]);
        chains[0] = bf16::add_product(chains[0], bit_cast<vf>(x << 16), bit_cast<vf>(w << 16));
        chains[1] = bf16::add_product(chains[1], bit_cast<vf>(x & upper), bit_cast<vf>(w & upper));
      }
      unsigned char* place = &registers.bytes[kSum][row][at];
      const vf sum = bf16::flush(bf16::flush(load_as<vf>(place)) + bf16::flush(chains[0] + chains[1]));
      std::memcpy(place, &sum, sizeof(sum));
    }
}

#else

// Assembly instead of the compiler's intrinsics: those of g++ 12 do not say that they read and write memory.
inline void amx_configure(const AmxConfig& config) { asm volatile("ldtilecfg %0" : : "m"(config)); }
inline void amx_release() { asm volatile("tilerelease"); }

template <int kTile>
inline __attribute__((always_inline)) void amx_zero() {
  asm volatile("tilezero %%tmm%c0" : : "i"(kTile));
}
template <int kTile>
inline __attribute__((always_inline)) void amx_load(const void* base, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(base), "r"(stride), "i"(kTile) : "memory");
}
template <int kTile>
inline __attribute__((always_inline)) void amx_store(void* base, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(base), "r"(stride), "i"(kTile) : "memory");
}
template <int kSum, int kLeft, int kRight>
inline __attribute__((always_inline)) void amx_dot() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSum), "i"(kLeft), "i"(kRight));
}
template <int kSum, int kLeft, int kRight>
inline __attribute__((always_inline)) void amx_dot_bf16() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSum), "i"(kLeft), "i"(kRight));
}

#endif

}  // namespace
}  // namespace quire::QUIRE_ISA
