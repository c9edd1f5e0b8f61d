// The search for 4-bit weights (quire/quantization/quantize.py says which candidates). Compiled once for each
// instruction set. A lane of a vector is a group: nothing is added across lanes.
#include <algorithm>
#include <limits>

#include "kernels.h"
#include "simd.h"

namespace quire::QUIRE_ISA {
namespace {

constexpr float kMostSteps = 15.0f;
constexpr int64_t kMostGroup = 128;

// x = start + step * value; explained: the part of x's sum of squares that it accounts for.
struct Line {
  vf step, start, explained;
};

struct Group {
  alignas(64) float x[kMostGroup][kLanes];
  int64_t size;
};

// Calls use(k, value) with the nearest of 0 to 15 to (x[k] - start) / step; all 0 where step is 0.
template <class Use>
QUIRE_INLINE void round_values(const Group& group, vf step, vf start, const Use& use) {
  const vf per_step = step > zero() ? broadcast(1.0f) / step : zero(), shift = -start * per_step;
  const vf magic = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to nearest, ties to even
  for (int64_t k = 0; k < group.size; ++k) {
    const vf steps = fma(load(group.x[k]), per_step, shift);
    use(k, min(max(steps, zero()), broadcast(kMostSteps)) + magic - magic);
  }
}

// Least squares of x, whose mean is 0, against its values, of which `sum` becomes the sum.
QUIRE_INLINE Line fit(const Group& group, vf step, vf start, vf& sum) {
  vf squares = zero(), products = zero();
  sum = zero();
  round_values(group, step, start, [&](int64_t k, vf value) {
    sum += value;
    squares = fma(value, value, squares);
    products = fma(value, load(group.x[k]), products);
  });
  const vf mean = sum / broadcast(static_cast<float>(group.size)), variance = squares - mean * sum;
  // Values that are all the same leave a rounding error here, not zero; two that differ leave at least 0.5.
  const vf fitted = variance > broadcast(0.25f) ? products / variance : zero();
  return {fitted, -fitted * mean, fitted * products};
}

QUIRE_INLINE void keep_better(Line& best, const Line& other) {
  const auto wins = other.explained > best.explained;
  best.step = wins ? other.step : best.step;
  best.start = wins ? other.start : best.start;
  best.explained = wins ? other.explained : best.explained;
}

// Groups first .. first + kLanes - 1, those before `end`. Whether all numbers are finite.
bool fit_groups(const FitArgs& args, int64_t first, int64_t end) {
  Group group;
  group.size = args.group_size;
  const int64_t count = std::min<int64_t>(kLanes, end - first);
  for (int lane = 0; lane < kLanes; ++lane) {
    const float* from = args.groups + (first + std::min<int64_t>(lane, count - 1)) * group.size;
    for (int64_t k = 0; k < group.size; ++k) group.x[k][lane] = from[k];
  }
  vf peak = zero(), nothing = zero();
  for (int64_t k = 0; k < group.size; ++k) {
    const vf x = load(group.x[k]);
    peak = max(max(x, -x), peak);
    nothing += x - x;  // NaN where x is not finite
  }
  for (int lane = 0; lane < kLanes; ++lane)
    if (nothing[lane] != 0.0f) return false;
  peak = peak > zero() ? peak : broadcast(1.0f);
  vf mean = zero();
  for (int64_t k = 0; k < group.size; ++k) {
    const vf x = load(group.x[k]) / peak;
    store(group.x[k], x);
    mean += x;
  }
  mean /= broadcast(static_cast<float>(group.size));
  vf low = broadcast(std::numeric_limits<float>::max()), high = -low;
  for (int64_t k = 0; k < group.size; ++k) {
    const vf x = load(group.x[k]) - mean;
    store(group.x[k], x);
    low = min(low, x);
    high = max(high, x);
  }
  vf sum;
  Line best{zero(), zero(), broadcast(-1.0f)};
  for (int64_t i = 0; i < args.num_shares; ++i) {
    const vf share = broadcast(args.shares[i]);
    keep_better(best, fit(group, (high - low) * (share / broadcast(kMostSteps)), low * share, sum));
  }
  for (int64_t i = 0; i < args.num_nudges; ++i) {
    const float factor = args.nudges[2 * i], shift = args.nudges[2 * i + 1];
    const vf moved = broadcast(shift + (1.0f - factor) * kMostSteps / 2);
    keep_better(best, fit(group, best.step * broadcast(factor), fma(best.step, moved, best.start), sum));
  }
  round_values(group, best.step, best.start, [&](int64_t k, vf value) {
    for (int64_t lane = 0; lane < count; ++lane)
      args.values[(first + lane) * group.size + k] = static_cast<uint8_t>(value[lane]);
  });
  const Line line = fit(group, best.step, best.start, sum);
  store_some(args.steps + first, line.step * peak, count);
  store_some(args.offsets + first, (line.start + mean) * peak, count);
  store_some(args.means + first, sum / broadcast(static_cast<float>(group.size)), count);
  return true;
}

bool fit_int4(const FitArgs& args, int64_t begin, int64_t end) {
  bool is_finite = true;
  for (int64_t first = begin; is_finite && first < end; first += kLanes) is_finite = fit_groups(args, first, end);
  return is_finite;
}

}  // namespace

extern const QuantizeKernels kQuantize;
const QuantizeKernels kQuantize = {fit_int4};

}  // namespace quire::QUIRE_ISA
