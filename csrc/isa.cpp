#include "isa.h"

#include <stdexcept>

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace quire {

#define QUIRE_DECLARE(isa)                  \
  namespace isa {                           \
  extern const LinearKernels kLinear;       \
  extern const AttentionKernels kAttention; \
  extern const EncoderKernels kEncoder;     \
  extern const LatentKernels kLatent;       \
  extern const LimitKernels kLimits;        \
  }
#define QUIRE_DECLARE_ALL(isa)              \
  namespace isa {                           \
  extern const LinearKernels kLinear;       \
  extern const LayerKernels kLayers;        \
  extern const AttentionKernels kAttention; \
  extern const EncoderKernels kEncoder;     \
  extern const LatentKernels kLatent;       \
  extern const IndexKernels kIndex;         \
  extern const LimitKernels kLimits;        \
  extern const SamplingKernels kSampling;   \
  extern const StateKernels kStates;        \
  extern const QuantizeKernels kQuantize;   \
  extern const AdapterKernels kAdapters;    \
  }

QUIRE_DECLARE_ALL(portable)
#if defined(QUIRE_HAVE_AVX2)
QUIRE_DECLARE_ALL(avx2)
#endif
#if defined(QUIRE_HAVE_AVX512)
QUIRE_DECLARE_ALL(avx512)
#endif
#if defined(QUIRE_HAVE_AVX512_VNNI)
QUIRE_DECLARE(avx512_vnni)
#endif
#if defined(QUIRE_HAVE_AVX512_BF16)
QUIRE_DECLARE(avx512_bf16)
#endif
#if defined(QUIRE_HAVE_AMX)
QUIRE_DECLARE(amx)
#endif
#if defined(QUIRE_HAVE_AMX_EMULATED)
QUIRE_DECLARE(amx_emulated)
#endif
#if defined(QUIRE_HAVE_BF16_EMULATED)
QUIRE_DECLARE(bf16_emulated)
#endif

namespace {

const Kernels kTables[] = {
    {Isa::kPortable, false, portable::kLinear, portable::kLayers, portable::kAttention,
     portable::kLatent, portable::kIndex, portable::kEncoder, portable::kStates, portable::kSampling,
     portable::kLimits, portable::kQuantize, portable::kAdapters},
#if defined(QUIRE_HAVE_AVX2)
    {Isa::kAvx2, false, avx2::kLinear, avx2::kLayers, avx2::kAttention,
     avx2::kLatent, avx2::kIndex, avx2::kEncoder, avx2::kStates, avx2::kSampling, avx2::kLimits, avx2::kQuantize, avx2::kAdapters},
#endif
#if defined(QUIRE_HAVE_AVX512)
    {Isa::kAvx512, false, avx512::kLinear, avx512::kLayers, avx512::kAttention,
     avx512::kLatent, avx512::kIndex, avx512::kEncoder, avx512::kStates, avx512::kSampling, avx512::kLimits, avx512::kQuantize, avx512::kAdapters},
#endif
#if defined(QUIRE_HAVE_AVX512_VNNI)
    {Isa::kAvx512Vnni, false, avx512_vnni::kLinear, avx512::kLayers, avx512_vnni::kAttention,
     avx512::kLatent, avx512::kIndex, avx512::kEncoder, avx512::kStates, avx512::kSampling,
     avx512_vnni::kLimits, avx512::kQuantize, avx512::kAdapters},
#endif
#if defined(QUIRE_HAVE_AVX512_BF16)
    {Isa::kAvx512Bf16, true, avx512_bf16::kLinear, avx512::kLayers, avx512_bf16::kAttention,
     avx512_bf16::kLatent, avx512::kIndex, avx512_bf16::kEncoder, avx512::kStates, avx512::kSampling,
     avx512_bf16::kLimits, avx512::kQuantize, avx512::kAdapters},
#endif
#if defined(QUIRE_HAVE_AMX)
    {Isa::kAmx, true, amx::kLinear, avx512::kLayers, amx::kAttention,
     avx512_bf16::kLatent, avx512::kIndex, avx512_bf16::kEncoder, avx512::kStates, avx512::kSampling,
     amx::kLimits, avx512::kQuantize, avx512::kAdapters},
#endif
#if defined(QUIRE_HAVE_BF16_EMULATED)
    {Isa::kBf16Emulated, true, bf16_emulated::kLinear, portable::kLayers, bf16_emulated::kAttention,
     bf16_emulated::kLatent, portable::kIndex, bf16_emulated::kEncoder, portable::kStates, portable::kSampling, bf16_emulated::kLimits, portable::kQuantize, portable::kAdapters},
#endif
#if defined(QUIRE_HAVE_AMX_EMULATED)
    {Isa::kAmxEmulated, true, amx_emulated::kLinear, avx512::kLayers, amx_emulated::kAttention,
     bf16_emulated::kLatent, avx512::kIndex, bf16_emulated::kEncoder, avx512::kStates, avx512::kSampling,
     bf16_emulated::kLimits, avx512::kQuantize, avx512::kAdapters},
#endif
};

bool is_emulated(Isa isa) { return isa == Isa::kAmxEmulated || isa == Isa::kBf16Emulated; }

// Whether the processor has tiles of int8 and bfloat16, the system saves them, and lets this process use them.
bool tiles_are_usable() {
#if defined(__x86_64__) && defined(__linux__)
  constexpr unsigned kAmx = 1u << 22 | 1u << 24 | 1u << 25;  // leaf 7, edx: bfloat16, tiles, int8
  constexpr unsigned kSavesStates = 1u << 27;                   // leaf 1, ecx: the system uses XSAVE
  constexpr unsigned kTileStates = 3u << 17;                    // XCR0: tile configuration and data
  constexpr long kRequestPermission = 0x1023, kTileData = 18;   // arch_prctl
  unsigned eax, ebx, ecx, edx;
  if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || (ecx & kSavesStates) == 0) return false;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
  if ((edx & kAmx) != kAmx) return false;
  unsigned low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  if ((low & kTileStates) != kTileStates) return false;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

bool machine_has(Isa isa) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  switch (isa) {
    case Isa::kPortable:
      return true;
    case Isa::kAvx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    case Isa::kAvx512:
      return machine_has(Isa::kAvx2) && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    case Isa::kAvx512Vnni:
      return machine_has(Isa::kAvx512) && __builtin_cpu_supports("avx512vnni");
    case Isa::kAvx512Bf16:
      return machine_has(Isa::kAvx512Vnni) && __builtin_cpu_supports("avx512bf16");
    case Isa::kAmx: {
      static const bool usable = tiles_are_usable();
      return usable && machine_has(Isa::kAvx512Bf16);
    }
    case Isa::kAmxEmulated:
      return machine_has(Isa::kAvx512Vnni);
    case Isa::kBf16Emulated:
      return true;
  }
#endif
  return isa == Isa::kPortable || isa == Isa::kBf16Emulated;
}

}  // namespace

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::kPortable:
      return "portable";
    case Isa::kAvx2:
      return "avx2";
    case Isa::kAvx512:
      return "avx512";
    case Isa::kAvx512Vnni:
      return "avx512_vnni";
    case Isa::kAvx512Bf16:
      return "avx512_bf16";
    case Isa::kAmx:
      return "amx";
    case Isa::kAmxEmulated:
      return "amx_emulated";
    case Isa::kBf16Emulated:
      return "bf16_emulated";
  }
  return "unknown";
}

std::vector<Isa> available_isas() {
  std::vector<Isa> found;
  for (const Kernels& table : kTables)
    if (!is_emulated(table.isa) && machine_has(table.isa)) found.push_back(table.isa);
  return found;
}

const Kernels& kernels_for(const std::string& name) {
  const Kernels* best = nullptr;
  std::string names;
  for (const Kernels& table : kTables) {
    if (!machine_has(table.isa)) continue;
    if (name == isa_name(table.isa)) return table;
    if (is_emulated(table.isa)) continue;
    best = &table;
    names += std::string(names.empty() ? "" : ", ") + isa_name(table.isa);
  }
  if (name == "auto") return *best;
  throw std::invalid_argument("'" + name + "' is not among the instruction sets of this machine: " + names);
}

}  // namespace quire
