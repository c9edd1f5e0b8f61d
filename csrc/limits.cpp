// The yardsticks of `python -m benchmarks.kernels`. Compiled once for each instruction set.
#include "limits.h"

#include "bf16_dot.h"

#if defined(__AMX_BF16__)
#include "amx_tiles.h"
#endif

namespace quire::QUIRE_ISA {
namespace {

// Enough independent sums to cover latency times ports, few enough to stay in registers with their operands.
#if defined(__AVX512F__)
constexpr int kChains = 24;
#else
constexpr int kChains = 12;
#endif
constexpr int64_t kReadAhead = 4096;
constexpr int kTurns = 1024;  // of one unit: some 10 microseconds

// From here on the compiler takes `value` for changed, so that it neither moves nor merges what is made of it.
template <class V>
QUIRE_INLINE void hide(V& value) {
#if defined(__AVX512F__)
  asm volatile("" : "+v"(value));
#elif defined(__x86_64__)
  asm volatile("" : "+x"(value));
#else
  asm volatile("" : "+m"(value));
#endif
}

void read(const ReadLimitArgs& args, Team& team) {
  constexpr int kSums = 8;
  vu sums[kSums] = {};
  const int64_t pieces = args.bytes / kReadPiece;
  for (int64_t piece = team.take(); piece < pieces; piece = team.take()) {
    const std::byte* data = args.data + piece * kReadPiece;
    for (int64_t at = 0; at < kReadPiece; at += kSums * sizeof(vu)) {
#pragma GCC unroll 8
      for (int i = 0; i < kSums; ++i) {
        const std::byte* place = data + at + i * static_cast<int>(sizeof(vu));
        // Across the pages' borders, where the hardware's own stops. Some per cent.
        __builtin_prefetch(place + kReadAhead, 0, 2);
        sums[i] += load_as<vu>(place);
      }
    }
  }
  vu total = {};
  for (int i = 0; i < kSums; ++i) total += sums[i];
  uint32_t words[kLanes];
  std::memcpy(words, &total, sizeof(words));
  uint32_t* place = args.sums + team.index() * 16;
  *place = 0;
  for (int lane = 0; lane < kLanes; ++lane) *place += words[lane];
}

void float_peak(const PeakLimitArgs& args, Team& team) {
  const vf a = broadcast(args.factor), b = broadcast(1.0f - args.factor);  // every chain goes to 1
  vf chain[kChains];
  for (int i = 0; i < kChains; ++i) chain[i] = broadcast(static_cast<float>(i));
  while (team.take() < args.units)
    for (int turn = 0; turn < kTurns; ++turn) {
#pragma GCC unroll 32  // else the sums live in memory
      for (int i = 0; i < kChains; ++i) chain[i] = fma(chain[i], a, b);
    }
  for (int i = 1; i < kChains; ++i) chain[0] += chain[i];
  store(reinterpret_cast<float*>(team.scratch()), chain[0]);
}

// The instruction set's best way to add products of unsigned and signed bytes, four to a 32-bit sum.
#if defined(__AVX512VNNI__)
QUIRE_INLINE vi dot_bytes(vi sum, vi u, vi s) { return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)u, (__m512i)s); }
constexpr int kProductsPerLane = 4;
#elif defined(__AVX512BW__)
QUIRE_INLINE vi dot_bytes(vi sum, vi u, vi s) {
  __m512i pairs = _mm512_maddubs_epi16((__m512i)u, (__m512i)s);
  return sum + (vi)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
}
constexpr int kProductsPerLane = 4;
#elif defined(__AVX2__)
QUIRE_INLINE vi dot_bytes(vi sum, vi u, vi s) {
  __m256i pairs = _mm256_maddubs_epi16((__m256i)u, (__m256i)s);
  return sum + (vi)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}
constexpr int kProductsPerLane = 4;
#elif defined(__SSE2__)
// Bytes that were widened to 16 bits before.
QUIRE_INLINE vi dot_bytes(vi sum, vi u, vi s) { return sum + (vi)_mm_madd_epi16((__m128i)u, (__m128i)s); }
constexpr int kProductsPerLane = 2;
#else
QUIRE_INLINE vi dot_bytes(vi sum, vi u, vi s) { return sum + u * s; }
constexpr int kProductsPerLane = 1;
#endif

[[maybe_unused]] void integer_products(const PeakLimitArgs& args, Team& team) {
  vi u = broadcast_int(args.bytes), s = broadcast_int(args.bytes);
  vi chain[kChains] = {};
  while (team.take() < args.units)
    for (int turn = 0; turn < kTurns; ++turn) {
#pragma GCC unroll 32  // else the sums live in memory
      for (int i = 0; i < kChains; ++i) {
        hide(u);
        chain[i] = dot_bytes(chain[i], u, s);
      }
    }
  for (int i = 1; i < kChains; ++i) chain[0] += chain[i];
  std::memcpy(team.scratch(), &chain[0], sizeof(vi));
}

#if defined(__AMX_BF16__)
// product(): six sums of two operands, all registers that there are.
template <class Product>
void tile_peak(const PeakLimitArgs& args, Team& team, const Product& product) {
  AmxConfig config;
  for (int tile = 0; tile < 8; ++tile) config.rows[tile] = kAmxRows, config.row_bytes[tile] = kAmxRowBytes;
  amx_configure(config);  // all registers are 0 then
  while (team.take() < args.units)
    for (int turn = 0; turn < kTurns; ++turn) product();
  amx_release();
}
void integer_tiles(const PeakLimitArgs& args, Team& team) {
  tile_peak(args, team, [] {
    amx_dot<0, 6, 7>(), amx_dot<1, 6, 7>(), amx_dot<2, 6, 7>();
    amx_dot<3, 6, 7>(), amx_dot<4, 6, 7>(), amx_dot<5, 6, 7>();
  });
}
void bf16_tiles(const PeakLimitArgs& args, Team& team) {
  tile_peak(args, team, [] {
    amx_dot_bf16<0, 6, 7>(), amx_dot_bf16<1, 6, 7>(), amx_dot_bf16<2, 6, 7>();
    amx_dot_bf16<3, 6, 7>(), amx_dot_bf16<4, 6, 7>(), amx_dot_bf16<5, 6, 7>();
  });
}
constexpr int64_t kTileProducts = int64_t{6} * kAmxRows * kAmxRows * kAmxRowBytes;  // of bytes
constexpr auto integer_peak = integer_tiles;
constexpr auto bf16_peak = bf16_tiles;
constexpr int64_t kIntegerOperations = 2 * kTurns * kTileProducts, kBf16Operations = kTurns * kTileProducts;
#else
constexpr auto integer_peak = integer_products;
constexpr int64_t kIntegerOperations = int64_t{2} * kTurns * kChains * kLanes * kProductsPerLane;
#if defined(QUIRE_BF16_DOT)
void bf16_products(const PeakLimitArgs& args, Team& team) {
  // Two products that cancel each other, so that sums stay where they are.
  uint16_t pair[2] = {to_bf16(args.factor), to_bf16(-args.factor)};
  const vu x = bit_cast<vu>(broadcast(bit_cast<float>(pair))), w = bit_cast<vu>(broadcast_int(0x3f803f80));
  vf chain[kChains];
  for (int i = 0; i < kChains; ++i) chain[i] = broadcast(static_cast<float>(i));
  while (team.take() < args.units)
    for (int turn = 0; turn < kTurns; ++turn) {
#pragma GCC unroll 32  // else the sums live in memory
      for (int i = 0; i < kChains; ++i) chain[i] = dot_bf16(chain[i], x, w);
    }
  for (int i = 1; i < kChains; ++i) chain[0] += chain[i];
  store(reinterpret_cast<float*>(team.scratch()), chain[0]);
}
constexpr auto bf16_peak = bf16_products;
constexpr int64_t kBf16Operations = int64_t{2} * kTurns * kChains * kLanes * 2;
#else
constexpr void (*bf16_peak)(const PeakLimitArgs&, Team&) = nullptr;
constexpr int64_t kBf16Operations = 0;
#endif
#endif

}  // namespace

extern const LimitKernels kLimits;
const LimitKernels kLimits = {read,
                              float_peak,
                              integer_peak,
                              bf16_peak,
                              int64_t{2} * kTurns* kChains* kLanes,
                              kIntegerOperations,
                              kBf16Operations};

}  // namespace quire::QUIRE_ISA
