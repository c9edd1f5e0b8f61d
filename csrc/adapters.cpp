// Adapters of low rank, and activations apart from their products. Compiled once for each instruction set.
//
// A thread takes tiles of a slot's rows and of its matrices. Every sum is a chain over the inputs (shrink: one for each
// lane, then the lanes by halves) or over the ranks (expand), from the first to the last, so that no tile's size shows.
#include "adapters.h"

#include "activate.h"
#include "adapter_rows.h"

namespace quire::QUIRE_ISA {
namespace {

constexpr int64_t kRows = 16;      // of a slot, in one item
constexpr int64_t kRanks = 8;      // of a piece, in one item of shrink
constexpr int64_t kPanels = 4;     // of a segment, in one item of expand
constexpr int64_t kWidth = kAdapterAlignment;
constexpr int kVectors = kTurnVectors;

constexpr int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// Calls item(slot, rows, number of rows, place) for every item of a step: each slot's rows by kRows, each with `places`.
template <class Item>
QUIRE_INLINE void share(const AdapterGroups& groups, int64_t places, Team& team, Item item) {
  int64_t next = team.take(), before = 0;
  for (const AdapterGroups::Group& group : groups.groups) {
    const int64_t chunks = (group.count + kRows - 1) / kRows;
    for (; next < before + chunks * places; next = team.take()) {
      const int64_t chunk = (next - before) / places, first = chunk * kRows;
      item(group.slot, groups.order.data() + group.first + first, smaller(kRows, group.count - first),
           (next - before) % places);
    }
    before += chunks * places;
  }
}

template <WeightType kType, class Element>
void shrink_tile(const ShrinkArgs& args, const AdapterPiece& piece, int64_t column, int64_t first_rank,
                 const int32_t* rows, int64_t count, const Step& step) {
  const int64_t size = args.table->in_features, apart = (size + kWidth - 1) / kWidth * kWidth * kAdapterRanks;
  const auto* matrix = static_cast<const Element*>(piece.a);
  const float* in = step.at(args.x);
  float* out = step.at(args.out) + column;
  const int64_t end = smaller(first_rank + kRanks, piece.rank);
  for (int64_t rank = first_rank; rank < end;) {
    const Element* a = matrix + rank / kAdapterRanks * apart;
    const int64_t ranks = count == 1 && end - rank > kAdapterRanks ? 2 * kAdapterRanks : kAdapterRanks;
    for (int64_t t = 0; t < count;) {
      const float* x[kDotRows];
      const int64_t taken = smaller(kDotRows, count - t);
      for (int64_t i = 0; i < taken; ++i) x[i] = in + rows[t + i] * args.x.stride;
      float sums[2 * kAdapterRanks][kDotRows];
      if (ranks > kAdapterRanks)
        dots<kType, Element, 2, 1>(a, apart, x, size, sums);
      else if (taken == 1)
        dots<kType, Element, 1, 1>(a, apart, x, size, sums);
      else if (taken == 2)
        dots<kType, Element, 1, 2>(a, apart, x, size, sums);
      else
        dots<kType, Element, 1, kDotRows>(a, apart, x, size, sums);
      for (int64_t i = 0; i < taken; ++i)
        for (int64_t r = 0; r < ranks && rank + r < end; ++r)
          out[rows[t + i] * args.out.stride + rank + r] = sums[r][i] * piece.scale;
      t += taken;
    }
    rank += ranks;
  }
}

void shrink(const ShrinkArgs& args, const Step& step, Team& team) {
  const AdapterTable& table = *args.table;
  const int64_t blocks = (table.max_rank + kRanks - 1) / kRanks;
  share(*args.groups, table.num_pieces * blocks, team,
        [&](int64_t slot, const int32_t* rows, int64_t count, int64_t place) {
          const int64_t number = place / blocks, first_rank = place % blocks * kRanks;
          const AdapterPiece& piece = table.pieces[static_cast<std::size_t>(slot * table.num_pieces + number)];
          if (piece.a == nullptr || first_rank >= piece.rank) return;
          const int64_t column = number * table.max_rank;
          if (table.type == WeightType::kF32)
            shrink_tile<WeightType::kF32, float>(args, piece, column, first_rank, rows, count, step);
          else if (table.type == WeightType::kBF16)
            shrink_tile<WeightType::kBF16, uint16_t>(args, piece, column, first_rank, rows, count, step);
          else
            shrink_tile<WeightType::kF16, uint16_t>(args, piece, column, first_rank, rows, count, step);
        });
}

// kCount rows of inner values times kPanelCount panels that follow one another.
template <WeightType kType, class Element, int kCount, int kPanelCount>
QUIRE_INLINE void products(const Element* b, int64_t rank, const float* const* inner, vf (*total)[kPanelCount * kVectors]) {
  for (int t = 0; t < kCount; ++t)
    for (int v = 0; v < kPanelCount * kVectors; ++v) total[t][v] = zero();
  for (int64_t r = 0; r < rank; ++r) {
    vf values[kCount];
    for (int t = 0; t < kCount; ++t) values[t] = broadcast(inner[t][r]);
    for (int p = 0; p < kPanelCount; ++p)
      for (int v = 0; v < kVectors; ++v) {
        const vf weight = load_adapter(b + (p * rank + r) * kWidth + v * kLanes, kType);
        for (int t = 0; t < kCount; ++t)
          total[t][p * kVectors + v] = fma(values[t], weight, total[t][p * kVectors + v]);
      }
  }
}

QUIRE_INLINE void add_panel(float* out, const vf* values, int64_t left) {
  for (int v = 0; v < kVectors; ++v, left -= kLanes) {
    if (left <= 0) return;
    float* to = out + v * kLanes;
    if (left >= kLanes)
      store(to, load(to) + values[v]);
    else
      store_some(to, load_some(to, left) + values[v], left);
  }
}

template <WeightType kType, class Element, int kCount, int kPanelCount>
void expand_rows(const Element* b, int64_t rank, const float* const* inner, const AdapterSegment& segment, int64_t panel,
                 float* const* out) {
  vf total[kCount][kPanelCount * kVectors];
  products<kType, Element, kCount, kPanelCount>(b + panel * rank * kWidth, rank, inner, total);
  for (int t = 0; t < kCount; ++t)
    for (int p = 0; p < kPanelCount; ++p)
      add_panel(out[t] + segment.column + (panel + p) * segment.step, total[t] + p * kVectors,
                segment.columns - (panel + p) * kWidth);
}

template <WeightType kType, class Element>
void expand_tile(const ExpandArgs& args, const AdapterPiece& piece, const AdapterSegment& segment, const void* matrix,
                 int64_t first_panel, const int32_t* rows, int64_t count, const Step& step) {
  const auto* b = static_cast<const Element*>(matrix);
  const int64_t panels = (segment.columns + kWidth - 1) / kWidth, end = smaller(first_panel + kPanels, panels);
  for (int64_t t = 0; t < count;) {
    const int64_t taken = count - t >= 4 ? 4 : 1;
    const float* inner[4];
    float* out[4];
    for (int64_t i = 0; i < taken; ++i) {
      inner[i] = step.at(args.inner) + rows[t + i] * args.inner.stride + segment.piece * args.table->max_rank;
      out[i] = step.at(args.out) + rows[t + i] * args.out.stride;
    }
    for (int64_t panel = first_panel; panel < end;) {
      const bool is_pair = end - panel >= 2, is_whole = end - panel >= 4;
      if (taken == 4 && is_pair)
        expand_rows<kType, Element, 4, 2>(b, piece.rank, inner, segment, panel, out), panel += 2;
      else if (taken == 4)
        expand_rows<kType, Element, 4, 1>(b, piece.rank, inner, segment, panel, out), panel += 1;
      else if (is_whole)
        expand_rows<kType, Element, 1, 4>(b, piece.rank, inner, segment, panel, out), panel += 4;
      else
        expand_rows<kType, Element, 1, 1>(b, piece.rank, inner, segment, panel, out), panel += 1;
    }
    t += taken;
  }
}

void expand(const ExpandArgs& args, const Step& step, Team& team) {
  const AdapterTable& table = *args.table;
  const AdapterSegment* segments = table.segments.data() + args.first_segment;
  const auto blocks_of = [](const AdapterSegment& segment) {
    return (segment.columns + kPanels * kWidth - 1) / (kPanels * kWidth);
  };
  int64_t places = 0;
  for (int64_t i = 0; i < args.num_segments; ++i) places += blocks_of(segments[i]);
  share(*args.groups, places, team, [&](int64_t slot, const int32_t* rows, int64_t count, int64_t place) {
    int64_t number = 0;
    while (place >= blocks_of(segments[number])) place -= blocks_of(segments[number++]);
    const AdapterSegment& segment = segments[number];
    const AdapterPiece& piece = table.pieces[static_cast<std::size_t>(slot * table.num_pieces + segment.piece)];
    if (piece.a == nullptr) return;
    const auto at = static_cast<std::size_t>(slot) * table.segments.size() +
                    static_cast<std::size_t>(args.first_segment + number);
    const void* b = table.b[at];
    if (table.type == WeightType::kF32)
      expand_tile<WeightType::kF32, float>(args, piece, segment, b, place * kPanels, rows, count, step);
    else if (table.type == WeightType::kBF16)
      expand_tile<WeightType::kBF16, uint16_t>(args, piece, segment, b, place * kPanels, rows, count, step);
    else
      expand_tile<WeightType::kF16, uint16_t>(args, piece, segment, b, place * kPanels, rows, count, step);
  });
}

void activate_rows(const ActivateArgs& args, const Step& step, Team& team) {
  const float* in = step.at(args.x);
  float* out = step.at(args.out);
  for (int64_t t = team.take(); t < step.rows; t = team.take()) {
    const float* row = in + t * args.x.stride;
    float* to = out + t * args.out.stride;
    for (int64_t c = 0; c < args.width; c += kLanes) {
      const float *gate = row + c / kWidth * args.step + c % kWidth, *up = gate + args.up;
      const int64_t count = smaller(kLanes, args.width - c);
      if (count == kLanes) {
        const vf value = activate(load(gate), args.activation);
        store(to + c, args.up == 0 ? value : value * load(up));
      } else {
        const vf value = activate(load_some(gate, count), args.activation);
        store_some(to + c, args.up == 0 ? value : value * load_some(up, count), count);
      }
    }
  }
}

}  // namespace

extern const AdapterKernels kAdapters;
const AdapterKernels kAdapters = {shrink, expand, activate_rows};

}  // namespace quire::QUIRE_ISA
