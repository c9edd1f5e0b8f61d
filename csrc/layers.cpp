// Embedding, norms and rotary tables. Compiled once for each instruction set.
#include "norm_row.h"
#include "packed.h"
#include "vector_math.h"

namespace quire::QUIRE_ISA {
namespace {

// Rows that a thread takes at a time: few enough to share the work evenly, enough for the counter not to show.
QUIRE_INLINE int64_t row_grain(int64_t rows, const Team& team) {
  const int64_t grain = rows / (8 * static_cast<int64_t>(team.count()));
  return grain < 1 ? 1 : grain > 16 ? 16 : grain;
}

// A table's row is brought over by pieces of at most this many elements.
constexpr int64_t kPiece = 64;

QUIRE_INLINE void widen(const float* from, WeightType, float* piece) { std::memcpy(piece, from, kPiece * 4); }
QUIRE_INLINE void widen(const uint16_t* from, WeightType type, float* piece) {
  for (int64_t i = 0; i < kPiece; i += kLanes)
    store(piece + i, type == WeightType::kF16 ? load_f16(from + i) : load_bf16(from + i));
}

// `count` elements of a piece, vector by vector, to their places from `first` on.
QUIRE_INLINE void put(const EmbedArgs& args, const float* piece, int64_t first, int64_t count, float* row) {
  if (args.table.column_order) {
    for (int64_t i = 0; i < count; ++i) {
      float* to = row + args.table.column_order[first + i];
      *to = args.accumulate ? *to + piece[i] : piece[i];
    }
    return;
  }
  float* to = row + first;
  for (int64_t i = 0; i < count; i += kLanes) {
    const int64_t left = count - i;
    vf value = load(piece + i);
    if (left >= kLanes)
      store(to + i, args.accumulate ? load(to + i) + value : value);
    else
      store_some(to + i, args.accumulate ? load_some(to + i, left) + value : value, left);
  }
}

// Calls fill(first, count, piece) for every piece of a row; no piece crosses from one group to the next.
template <class Fill>
QUIRE_INLINE void by_pieces(const EmbedArgs& args, int64_t group_size, float* row, Fill fill) {
  alignas(64) float piece[kPiece] = {};
  for (int64_t start = 0; start < args.width; start += group_size) {
    const int64_t end = start + group_size < args.width ? start + group_size : args.width;
    for (int64_t first = start; first < end; first += kPiece) {
      const int64_t count = end - first < kPiece ? end - first : kPiece;
      fill(first, count, piece);
      put(args, piece, first, count, row);
    }
  }
}

template <class Element, WeightType kType>
void embed_floats(const EmbedArgs& args, int64_t id, float* row) {
  const auto [panel, column] = panel_column(args.table, id);
  const auto* data = static_cast<const std::byte*>(args.table.data) + panel * panel_bytes(args.table);
  const auto* from = reinterpret_cast<const Element*>(data);
  Element narrow[kPiece] = {};
  by_pieces(args, args.width, row, [=, column = column, &narrow](int64_t first, int64_t count, float* piece) {
    for (int64_t i = 0; i < count; ++i) narrow[i] = from[index_in_panel(kType, first + i, column)];
    widen(narrow, kType, piece);
  });
}

void embed_small(const EmbedArgs& args, int64_t id, float* row) {
  const PackedWeight& table = args.table;
  const auto [panel, column] = panel_column(table, id);
  const auto* data = static_cast<const uint8_t*>(table.data) + panel * panel_bytes(table);
  const int64_t size = table.group_size, padded = rounded_up(size, group_alignment(table.type));
  by_pieces(args, size, row, [=, &table, panel = panel, column = column](int64_t first, int64_t count, float* piece) {
    const int64_t group = first / size, start = group * padded + first % size;
    const float scale = stored_scale(table, panel, group, column);
    const float offset = stored_offset(table, panel, group, column, scale);
    for (int64_t i = 0; i < count; ++i)
      piece[i] = fma(scale, stored_value(table, data, start + i, column), offset);
  });
}

void embed(const EmbedArgs& args, const Step& step, Team& team) {
  const int64_t* ids = step.columns[args.column];
  float* out = step.at(args.out);
  const int64_t grain = row_grain(step.rows, team);
  for (int64_t first = team.take(grain); first < step.rows; first = team.take(grain)) {
    for (int64_t t = first; t < step.rows && t < first + grain; ++t) {
      float* row = out + t * args.out.stride;
      const int64_t id = ids[t] + args.shift - args.start;
      if (args.shared_rows > 0 && (id < 0 || id >= args.table.out_features)) {
        if (!args.accumulate) std::memset(row, 0, static_cast<std::size_t>(args.width) * sizeof(float));
        continue;
      }
      switch (args.table.type) {
        case WeightType::kF32:
          embed_floats<float, WeightType::kF32>(args, id, row);
          break;
        case WeightType::kBF16:
          embed_floats<uint16_t, WeightType::kBF16>(args, id, row);
          break;
        case WeightType::kF16:
          embed_floats<uint16_t, WeightType::kF16>(args, id, row);
          break;
        default:
          embed_small(args, id, row);
          break;
      }
    }
  }
}

void norm(const NormArgs& args, const Step& step, Team& team) {
  const float* in = step.at(args.x);
  float* out = step.at(args.out);
  const int64_t grain = row_grain(step.rows, team);
  for (int64_t first = team.take(grain); first < step.rows; first = team.take(grain))
    for (int64_t t = first; t < step.rows && t < first + grain; ++t)
      norm_row(args.norm, in + t * args.x.stride, args.width, out + t * args.out.stride);
}

void rotation(const RotationArgs& args, const Step& step, Team& team) {
  float* out = step.at(args.out);
  const int64_t half = args.rotary_dim / 2;
  const int64_t* positions = step.columns[args.column];
  const int64_t grain = row_grain(step.rows, team);
  for (int64_t t = team.take(grain); t < step.rows; t = team.take(grain)) {
    for (int64_t row = t; row < step.rows && row < t + grain; ++row) {
      float* y = out + row * args.out.stride;
      std::array<float, 3> turns{static_cast<float>(positions[row])};
      for (std::size_t axis = 1; args.axes != nullptr && axis < 3; ++axis)
        turns[axis] = static_cast<float>(step.columns[args.grid[axis - 1]][row]);
      for (int64_t i = 0; i < half; ++i) {
        const float angle = turns[args.axes == nullptr ? 0 : args.axes[i]] * args.inverse_frequencies[i];
        y[i] = __builtin_cosf(angle) * args.magnitude;
        y[half + i] = __builtin_sinf(angle) * args.magnitude;
      }
    }
  }
}

// Threads share out the columns: rows ascend, so a row is read before another one is written over it.
void gather(const GatherArgs& args, const Step& step, Team& team) {
  float* x = step.at(args.x);
  for (int64_t first = team.take(kPiece); first < args.width; first = team.take(kPiece)) {
    const int64_t count = args.width - first < kPiece ? args.width - first : kPiece;
    for (int64_t i = 0; i < step.num_read; ++i)
      if (step.read_rows[i] != i)
        std::memcpy(x + i * args.x.stride + first, x + step.read_rows[i] * args.x.stride + first,
                    static_cast<std::size_t>(count) * sizeof(float));
  }
}

QUIRE_INLINE vf combine(Elementwise kind, vf x, vf y, float factor) {
  switch (kind) {
    case Elementwise::kAdd:
      return x + y;
    case Elementwise::kMultiply:
      return x * y;
    case Elementwise::kGate:
      return x * sigmoid(y);
    case Elementwise::kScale:
      return x * factor;
    case Elementwise::kSoftCap:
      return tanh(x / factor) * factor;
    case Elementwise::kGateRows:
      return x * factor;
  }
  return x;
}

void elementwise(const ElementwiseArgs& args, const Step& step, Team& team) {
  const float* left = step.at(args.x);
  const float* right = args.y.present() ? step.at(args.y) : left;
  const int64_t right_stride = args.y.present() ? args.y.stride : args.x.stride;
  float* out = step.at(args.out);
  const int64_t grain = row_grain(step.rows, team);
  for (int64_t start = team.take(grain); start < step.rows; start = team.take(grain)) {
    for (int64_t t = start; t < step.rows && t < start + grain; ++t) {
      const float *x = left + t * args.x.stride, *y = right + t * right_stride;
      float* to = out + t * args.out.stride;
      float factor = args.factor;
      if (args.kind == Elementwise::kGateRows) factor = sigmoid(broadcast(y[0]))[0], y = x;
      int64_t k = 0;
      for (; k + kLanes <= args.width; k += kLanes)
        store(to + k, combine(args.kind, load(x + k), load(y + k), factor));
      if (k < args.width) {
        const int64_t count = args.width - k;
        store_some(to + k, combine(args.kind, load_some(x + k, count), load_some(y + k, count), factor), count);
      }
    }
  }
}

void add_experts(const AddExpertsArgs& args, const Step& step, Team& team) {
  const int64_t grain = row_grain(step.rows, team);
  for (int64_t start = team.take(grain); start < step.rows; start = team.take(grain)) {
    for (int64_t t = start; t < step.rows && t < start + grain; ++t) {
      const float* numbers = step.at(args.routing) + t * args.routing.stride;
      const float* shares = numbers + args.top_k;
      const auto part = [&](int64_t place) {
        const float* parts = step.at(args.parts);
        if (args.holders != nullptr) {
          const auto number = expert_number(numbers[place], static_cast<int64_t>(args.holders->size()));
          parts = (*args.holders)[static_cast<std::size_t>(number)];
        }
        return parts + t * args.parts.stride + place * args.width;
      };
      const float* residual = step.at(args.residual) + t * args.residual.stride;
      float* out = step.at(args.out) + t * args.out.stride;
      for (int64_t c = 0; c < args.width; c += kLanes) {
        const int64_t left = args.width - c;
        const auto read = [&](const float* from) { return left >= kLanes ? load(from) : load_some(from, left); };
        vf sum = read(residual + c);
        for (int64_t place = 0; place < args.top_k; ++place)
          sum = fma(read(part(place) + c), broadcast(args.weighs_input ? 1.0f : shares[place]), sum);
        if (left >= kLanes)
          store(out + c, sum);
        else
          store_some(out + c, sum, left);
      }
    }
  }
}

// The larger of two preferences is chosen, and of equal ones the first. NaN is never chosen while anything else is left.
QUIRE_INLINE int64_t best_of(const float* values, int64_t count) {
  int64_t best = 0;
  for (int64_t i = 1; i < count; ++i)
    if (values[i] > values[best] || (values[best] != values[best] && values[i] == values[i])) best = i;
  return best;
}

// Leaves -infinity for the experts of all groups but the best. worth: scratch for num_groups values.
QUIRE_INLINE void close_groups(const RouteArgs& args, float* preference, float* worth) {
  const int64_t members = args.num_experts / args.num_groups;
  for (int64_t group = 0; group < args.num_groups; ++group) {
    const float* own = preference + group * members;
    const int64_t first = best_of(own, members);
    worth[group] = own[first];
    if (args.group_best < 2) continue;
    float second = -__builtin_inff();
    for (int64_t i = 0; i < members; ++i)
      if (i != first && own[i] > second) second = own[i];
    worth[group] += second;
  }
  for (int64_t place = 0; place < args.top_groups; ++place) {
    const int64_t group = best_of(worth, args.num_groups);
    worth[group] = __builtin_nanf("");  // open
  }
  for (int64_t group = 0; group < args.num_groups; ++group)
    if (worth[group] == worth[group])
      for (int64_t i = 0; i < members; ++i) preference[group * members + i] = -__builtin_inff();
}

// scratch: 2 num_experts + num_groups floats.
QUIRE_INLINE void route_row(const RouteArgs& args, const float* logits, float* out, float* scratch) {
  const int64_t count = args.num_experts, top_k = args.top_k;
  float *scores = scratch, *preference = scratch + count, total = 0;
  const float highest = logits[best_of(logits, count)];
  for (int64_t i = 0; i < count; i += kLanes) {
    const int64_t left = count - i < kLanes ? count - i : kLanes;
    const vf value = load_some(logits + i, left);
    store_some(scores + i, args.sigmoid ? sigmoid(value) : exp(value - highest), left);
  }
  if (!args.sigmoid) {
    for (int64_t i = 0; i < count; ++i) total += scores[i];
    for (int64_t i = 0; i < count; ++i) scores[i] /= total;
  }
  // Scores round to equal numbers where logits still differ: only what scores decide is left to them.
  const bool by_scores = args.bias != nullptr || args.num_groups > 1;
  for (int64_t i = 0; i < count; ++i)
    preference[i] = by_scores ? scores[i] + (args.bias ? args.bias[i] : 0.0f) : logits[i];
  if (args.num_groups > 1) close_groups(args, preference, preference + count);
  bool* is_chosen = reinterpret_cast<bool*>(preference + count);
  for (int64_t i = 0; i < count; ++i) is_chosen[i] = false;
  for (int64_t place = 0; place < top_k; ++place) {
    int64_t best = -1;
    for (int64_t i = 0; i < count; ++i) {
      if (is_chosen[i]) continue;
      if (best < 0 || preference[i] > preference[best] ||
          (preference[best] != preference[best] && preference[i] == preference[i]))
        best = i;
    }
    is_chosen[best] = true;
  }
  float sum = 0;
  for (int64_t i = 0, place = 0; i < count; ++i) {
    if (!is_chosen[i]) continue;
    out[place] = static_cast<float>(i);
    out[top_k + place] = scores[i];
    sum = place++ == 0 ? scores[i] : sum + scores[i];
  }
  for (int64_t place = 0; place < top_k; ++place) {
    float& weight = out[top_k + place];
    weight = (args.renormalise ? weight / sum : weight) * args.factor;
  }
}

void route(const RouteArgs& args, const Step& step, Team& team) {
  const float* logits = step.at(args.logits);
  float* out = step.at(args.out);
  const int64_t grain = row_grain(step.rows, team);
  for (int64_t first = team.take(grain); first < step.rows; first = team.take(grain))
    for (int64_t t = first; t < step.rows && t < first + grain; ++t)
      route_row(args, logits + t * args.logits.stride, out + t * args.out.stride,
                reinterpret_cast<float*>(team.scratch()));
}

}  // namespace

extern const LayerKernels kLayers;
const LayerKernels kLayers = {embed, norm, rotation, gather, elementwise, route, add_experts};

}  // namespace quire::QUIRE_ISA
