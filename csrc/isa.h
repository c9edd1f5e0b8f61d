// Which instruction sets the kernels are compiled for, and which one this machine gets.
#pragma once

#include <string>
#include <vector>

#include "adapters.h"
#include "kernels.h"
#include "limits.h"

namespace quire {

// The emulated ones are for tests, which ask for them by name. kAmxEmulated: the AMX kernels over tile instructions in
// plain C++. kBf16Emulated: portable kernels with bfloat16 products that have the bits of AVX512-BF16.
enum class Isa : int { kPortable = 0, kAvx2, kAvx512, kAvx512Vnni, kAvx512Bf16, kAmx, kAmxEmulated, kBf16Emulated };

struct Kernels {
  Isa isa;
  bool bf16_products;  // MatmulPrecision::kBFloat16 is possible
  LinearKernels linear;
  LayerKernels layers;
  AttentionKernels attention;
  LatentKernels latent;
  IndexKernels index;
  EncoderKernels encoder;
  StateKernels states;
  SamplingKernels sampling;
  LimitKernels limits;
  QuantizeKernels quantize;
  AdapterKernels adapters;
};

const char* isa_name(Isa isa);
// Instruction sets that are compiled in and that this machine has, lowest first.
std::vector<Isa> available_isas();
// The kernels of `name`, or of the best available one for "auto". Throws std::invalid_argument, naming those there are.
const Kernels& kernels_for(const std::string& name);

}  // namespace quire
