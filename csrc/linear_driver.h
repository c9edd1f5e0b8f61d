// What all linear kernels share: the phases, how work is dealt to the threads, and what follows the sums.
//
// Phase 1 lays rows of x out in tiles: small batches by every thread for itself, others shared and followed by a
// barrier. In phase 2 threads take panels of the weight and run every tile over them. Which thread computes an element
// and in which tile it lies never changes how it is computed.
//
// A Method says what a tile is:
//   kRows                                    most rows of a tile
//   kRowStep                                 tiles begin at multiples of this many rows
//   kPrefetchAhead                           how many bytes ahead of the reading a stream of weights is asked for
//   kBlockBytes                              of activations that are meant to stay in the L2 cache while panels stream
//                                            through it: the faster the products, the more rows must share a panel
//   kGroupBytes                              of panels that a tile passes before the next tile does, so that what it
//                                            writes to a row lies together; 0: one panel
//   kFewestWideTiles                         tiles that share a panel from which on what is made of its values is kept for
//                                            all (Tile::widened); 2 where a Method does not say
//   kExpects                                 whether the output's lines are asked for before a tile is multiplied
//   layout(weight)                           its memory (TileLayout)
//   pack(weight, x, stride, rows, memory)    phase 1 for one tile
//   kHandedRowBytes, put_packed              where a gated layer can lay its results out as the next one's tiles (HandsOver):
//                                            bytes of kPanel values of a row there, and what writes half as many of four rows
//   multiply(tile, rows)                     phase 2: the sums of one tile and one panel into tile.out
#pragma once

#include "activate.h"
#include "linear_adapters.h"
#include "linear_tile.h"
#include "norm_row.h"

namespace quire::QUIRE_ISA {
namespace {

// Activations that every thread packs for itself: less work than waiting for the others.
constexpr int64_t kPrivateBytes = 128 << 10;
// Activations in the L2 cache, of methods on vectors.
constexpr int64_t kBlockBytes = 256 << 10;
// Results that no cache near the core has kept since they were last written, as those of a head.
constexpr int64_t kStreamedBytes = 1 << 20;
// A run of panels that one thread streams through.
constexpr int64_t kRunBytes = 256 << 10;

template <class Method>
constexpr int64_t fewest_wide_tiles() {
  if constexpr (requires { Method::kFewestWideTiles; }) return Method::kFewestWideTiles;
  return 2;
}

struct Plan {
  int64_t tiles;       // that the rows are dealt to, as evenly as can be
  int64_t row_step;    // they begin at multiples of it
  int64_t tile_bytes;
  int64_t panels;
  int64_t panel_bytes;
  bool shared;         // packed activations lie in shared scratch
};

template <class Method>
Plan make_plan(const PackedWeight& weight, int64_t rows) {
  Plan plan;
  plan.tiles = (rows + Method::kRows - 1) / Method::kRows;
  plan.row_step = Method::kRowStep;
  plan.tile_bytes = Method::layout(weight).bytes;
  plan.panels = num_panels(weight);
  plan.panel_bytes = panel_bytes(weight);
  plan.shared = plan.tiles * plan.tile_bytes > kPrivateBytes;
  return plan;
}

struct Finish {
  const LinearArgs& args;
  const float* residual;
  float* out;
  int64_t width;  // of a row of out
};

// What follows the sums of a tile where it is little: whole panels without a bias, of which a gated one is SiLU's and adds
// no residual, and one that is not has no activation. The same operations as finish_tile, without a look at each row.
template <bool kGated, bool kScaled, bool kResidual>
void finish_plain(const Finish& finish, const float* sums, const float* row_scales, int64_t first_row, int64_t rows,
                  int64_t panel) {
  constexpr int64_t kWidth = kGated ? kPanel / 2 : kPanel;
  const int64_t stride = finish.args.out.stride, beside = finish.args.residual.stride;
  float* out = finish.out + first_row * stride + panel * kWidth;
  const float* residual = kResidual ? finish.residual + first_row * beside + panel * kWidth : nullptr;
  for (int64_t r = 0; r < rows; ++r, sums += kPanel, out += stride) {
    const vf scale = broadcast(kScaled ? row_scales[r] : 1.0f);
#pragma GCC unroll 8
    for (int64_t c = 0; c < kWidth; c += kLanes) {
      vf value = load(sums + c);
      if constexpr (kScaled) value *= scale;
      if constexpr (kGated) {
        vf up = load(sums + kPanel / 2 + c);
        if constexpr (kScaled) up *= scale;
        value = value * sigmoid(value) * up;
      }
      if constexpr (kResidual) value += load(residual + r * beside + c);
      store(out + c, value);
    }
  }
}

// As finish_plain says, if it may. False: it may not.
template <bool kGated>
QUIRE_INLINE bool finishes_plainly(const Finish& finish, const float* sums, const float* row_scales, int64_t first_row,
                                   int64_t rows, int64_t panel) {
  constexpr int64_t kWidth = kGated ? kPanel / 2 : kPanel;
  if (finish.args.bias || (panel + 1) * kWidth > finish.width || (kGated && finish.residual) ||
      finish.args.activation != (kGated ? Activation::kSilu : Activation::kNone))
    return false;
  const auto run = row_scales ? finish.residual ? finish_plain<kGated, true, !kGated> : finish_plain<kGated, true, false>
                   : finish.residual ? finish_plain<kGated, false, !kGated> : finish_plain<kGated, false, false>;
  run(finish, sums, row_scales, first_row, rows, panel);
  return true;
}

// What follows the sums of a tile: kLanes columns at once, of `kPanel` sums a row.
template <bool kGated>
inline void finish_tile(const Finish& finish, const float* sums, const float* row_scales, int64_t first_row,
                        int64_t rows, int64_t panel) {
  if (finishes_plainly<kGated>(finish, sums, row_scales, first_row, rows, panel)) return;
  constexpr int64_t kWidth = kGated ? kPanel / 2 : kPanel;
  const LinearArgs& args = finish.args;
  const float* bias = args.bias ? args.bias + panel * kPanel : nullptr;
  for (int64_t r = 0; r < rows; ++r) {
    const vf scale = broadcast(row_scales ? row_scales[r] : 1.0f);
    for (int64_t c = 0; c < kWidth && panel * kWidth + c < finish.width; c += kLanes) {
      const int64_t at = (first_row + r) * args.out.stride + panel * kWidth + c;
      const int64_t count = finish.width - panel * kWidth - c;
      vf value = load(sums + r * kPanel + c) * scale;
      if (bias) value += load(bias + c);
      value = activate(value, args.activation);
      if constexpr (kGated) {
        vf up = load(sums + r * kPanel + kPanel / 2 + c) * scale;
        if (bias) up += load(bias + kPanel / 2 + c);
        value *= up;
      }
      const int64_t beside = (first_row + r) * args.residual.stride + panel * kWidth + c;
      if (count >= kLanes) {
        if (finish.residual) value += load(finish.residual + beside);
        store(finish.out + at, value);
      } else {
        if (finish.residual) value += load_some(finish.residual + beside, count);
        store_some(finish.out + at, value, count);
      }
    }
  }
}

// What a tile's finish reads and writes lies in as many places as it has rows, where no prefetcher finds it. (Of a small
// batch it lies in a near cache, but for the results of a head.)
template <bool kGated>
inline void expect_tile(const Finish& finish, int64_t first_row, int64_t rows, int64_t panel) {
  constexpr int64_t kWidth = kGated ? kPanel / 2 : kPanel;
  const int64_t column = panel * kWidth;
  for (int64_t r = first_row; r < first_row + rows; ++r) {
    const float* residual = finish.residual ? finish.residual + r * finish.args.residual.stride + column : nullptr;
    const float* out = finish.out + r * finish.args.out.stride + column;
    for (int64_t c = 0; c < kWidth && column + c < finish.width; c += 16) {
      if (residual && residual != out) __builtin_prefetch(residual + c, 0, 3);
      __builtin_prefetch(out + c, 1, 3);
    }
  }
}

// Deals runs of items to the threads: long ones first, so that memory is read in long streams, and single ones at the
// end, so that all threads finish together.
class Runs {
 public:
  Runs(Team& team, int64_t items, int64_t longest) : team_(team), items_(items), longest_(longest) { next_run(); }
  // The next item, or -1.
  int64_t next() {
    if (at_ >= items_) return -1;
    const int64_t item = at_++;
    if (at_ == end_) next_run();
    return item;
  }
  // The next run as a whole, [first, end). False: nothing is left.
  bool next_range(int64_t* first, int64_t* end) {
    if (at_ >= items_) return false;
    *first = at_;
    *end = at_ = end_;
    next_run();
    return true;
  }
  // The one after it, or -1: what it needs is asked for meanwhile.
  int64_t ahead() const { return at_ < items_ ? at_ : -1; }

 private:
  void next_run() {
    int64_t length = (items_ - end_) / (2 * team_.count());
    length = length > longest_ ? longest_ : length < 1 ? 1 : length;
    at_ = team_.take(length);
    end_ = at_ + length;
    if (end_ > items_) end_ = items_;
    if (at_ > items_) at_ = items_;
  }
  Team& team_;
  int64_t items_;
  int64_t longest_;
  int64_t at_ = 0;
  int64_t end_ = 0;
};

int64_t first_row_of(const Plan& plan, int64_t rows, int64_t tile) {
  const int64_t steps = (rows + plan.row_step - 1) / plan.row_step, row = tile * steps / plan.tiles * plan.row_step;
  return row < rows ? row : rows;
}

// What a layer multiplies: rows of x as they lie, or their norms in a thread's scratch, behind what it may have packed
// for itself.
struct InputRows {
  const float* at;
  int64_t stride;
};

template <int64_t kMostRows>
InputRows input_rows(const LinearArgs& args, const Step& step, int64_t first, int64_t rows, Team& team) {
  static_assert(kPrivateBytes + kMostRows * kMaxNormedFeatures * 4 <= static_cast<int64_t>(kThreadScratch));
  const float* x = step.at(args.x) + first * args.x.stride;
  if (!args.norms) return {x, args.x.stride};
  const int64_t width = args.weight.in_features, stride = rounded_up(width, 16);
  float* normed = reinterpret_cast<float*>(team.scratch() + kPrivateBytes);
  for (int64_t r = 0; r < rows; ++r) norm_row(args.norm, x + r * args.x.stride, width, normed + r * stride);
  return {normed, stride};
}

template <class Method>
void pack_tile(const LinearArgs& args, const Step& step, const Plan& plan, int64_t tile, std::byte* packed, Team& team) {
  const int64_t first = first_row_of(plan, step.rows, tile), rows = first_row_of(plan, step.rows, tile + 1) - first;
  const InputRows x = input_rows<Method::kRows>(args, step, first, rows, team);
  Method::pack(args.weight, x.at, x.stride, rows, packed + tile * plan.tile_bytes);
}

// Memory that a pass over a panel asks for meanwhile: `step` bytes for every 64 of the panel.
struct Stream {
  const std::byte* at;
  int64_t step;
  bool far;
  const std::byte* end;  // behind it `next` follows: null for never
  const std::byte* next;
};

// What pass `pass` of `passes` over `own` bytes asks for: its part of `bytes` from `after` on, which the passes that follow read. A cold
// panel was not asked for: its first pass asks for what lies just ahead of its reading, and at its end for `after`.
template <class Method>
Stream stream_of(const std::byte* panel, int64_t own, const std::byte* after, int64_t bytes, int64_t panels, int64_t pass,
                 int64_t passes, bool is_cold) {
  if (!is_cold) return {after + bytes * pass / passes, 64 * panels / passes, true, nullptr, nullptr};
  if (own > Method::kPrefetchAhead) return {panel + Method::kPrefetchAhead, 64, false, panel + own, after};
  return {after + Method::kPrefetchAhead - own, 64, false, nullptr, nullptr};
}

// A tile over one panel. x: its packed rows. expect(row, rows) is called before they are multiplied, finish(sums,
// row_scales, row, rows) behind it; rows are counted from the plan's first. widened: memory of kWidenedBytes for what is
// made of the panel's values, or null; is_widened: a tile before this one filled it.
template <class Method, class Expect, class Done>
void multiply_tile(const PackedWeight& weight, const Plan& plan, int64_t num_rows, const std::byte* x, int64_t panel,
                   int64_t tile, const Stream& stream, std::byte* widened, bool is_widened,
                   const Expect& expect, const Done& done) {
  const TileLayout layout = Method::layout(weight);
  const int64_t groups = num_groups(weight), scales = weight.type == WeightType::kNVFP4 ? 1 : groups;
  const int64_t row = first_row_of(plan, num_rows, tile), rows = first_row_of(plan, num_rows, tile + 1) - row;
  alignas(64) float sums[Method::kRows * kPanel];
  Tile call;
  call.panel = static_cast<const std::byte*>(weight.data) + panel * plan.panel_bytes;
  call.x = x;
  call.x_sums = reinterpret_cast<const float*>(x + layout.sums_offset);
  call.scales = weight.scales ? weight.scales + panel * scales * kPanel : nullptr;
  call.offsets = weight.offsets ? weight.offsets + panel * groups * kPanel : nullptr;
  const int64_t halves = weight.super_blocks ? groups / super_groups(weight.type) : groups;
  const int64_t codes = weight.super_blocks ? halves * code_rows(weight.type) : groups;
  call.scale_halves = weight.scale_halves ? weight.scale_halves + panel * halves * kPanel : nullptr;
  call.offset_halves = weight.offset_halves ? weight.offset_halves + panel * halves * kPanel : nullptr;
  call.column_sums = weight.column_sums ? weight.column_sums + panel * groups * kPanel : nullptr;
  call.scale_codes = weight.scale_codes ? weight.scale_codes + panel * codes * kPanel : nullptr;
  call.weight = &weight;
  call.out = sums;
  call.prefetch = stream.at;
  call.prefetch_step = stream.step;
  call.prefetch_far = stream.far;
  call.prefetch_end = stream.end;
  call.prefetch_next = stream.next;
  call.widened = widened;
  call.is_widened = is_widened;
  expect(row, rows);
  Method::multiply(call, rows);
  done(sums, weight.integer_activations ? reinterpret_cast<const float*>(x + layout.scales_offset) : nullptr, row, rows);
}

// Tiles first .. end over one panel. x: the packed rows of tile `first`. after: the panel that this thread needs next (or
// this one), which the passes ask for. is_cold: this one was not prefetched. scratch: this thread's, whose last
// kWidenedBytes are free.
template <class Method, class Expect, class Done>
void multiply_panel(const PackedWeight& weight, const Plan& plan, int64_t num_rows, const std::byte* x, int64_t panel,
                    const std::byte* after, bool is_cold, int64_t first, int64_t end, std::byte* scratch,
                    const Expect& expect, const Done& done) {
  std::byte* widened = end - first >= fewest_wide_tiles<Method>() ? scratch + kWidenedOffset : nullptr;
  const std::byte* data = static_cast<const std::byte*>(weight.data) + panel * plan.panel_bytes;
  for (int64_t tile = first; tile < end; ++tile, x += plan.tile_bytes) {
    const Stream stream = stream_of<Method>(data, plan.panel_bytes, after, plan.panel_bytes, 1, tile - first - is_cold,
                                            end - first - is_cold, is_cold && tile == first);
    multiply_tile<Method>(weight, plan, num_rows, x, panel, tile, stream, widened, tile > first, expect, done);
  }
}

// Panels that a tile is multiplied with before the next tile is.
struct PanelGroup {
  int64_t first, count;
};

// From this many rows on, the results of a layer that packs_out are tiles of the next one, in the place of its rows: half
// as many bytes, written side by side and not read once more to be packed. Fewer rows lie as always.
constexpr int64_t kFewestHandedRows = 64;

template <class Method>
concept HandsOver = requires { Method::kHandedRowBytes; };

template <class Method>
bool hands_rows_over(bool is_allowed, int64_t rows) {
  return HandsOver<Method> && is_allowed && rows >= kFewestHandedRows;
}

// Whether gated results of `from` can be tiles of `to`: they take the place of its rows, panel by panel.
template <class Method>
bool fits_as_tiles(const LinearArgs& from, const LinearArgs& to) {
  if constexpr (HandsOver<Method>)  // with a last tile of one row too, the tiles fit in the place of the float rows
    static_assert(Method::kHandedRowBytes / kPanel * ((Method::kRows + 3) / 4 * 4) * (kFewestHandedRows / Method::kRows + 1) <=
                  kFewestHandedRows * static_cast<int64_t>(sizeof(float)));
  const int64_t width = to.weight.in_features;
  return HandsOver<Method> && from.weight.gated && from.weight.out_features == 2 * width && width % (kPanel / 2) == 0 &&
         from.bias == nullptr && !from.residual.present() && !to.norms && to.weight.column_order == nullptr &&
         from.out.area == to.x.area && from.out.offset == to.x.offset && from.out.stride == width && to.x.stride == width &&
         (to.out.area != to.x.area || to.out.offset != to.x.offset);
}

// Where the results of a panel and a tile of `rows` rows lie then.
template <class Method>
std::byte* handed_place(const Finish& finish, int64_t tile, int64_t rows, int64_t panel) {
  const int64_t tile_bytes = rounded_up(finish.width * Method::kHandedRowBytes / kPanel * row_pitch(Method::kRows), 64);
  return reinterpret_cast<std::byte*>(finish.out) + tile * tile_bytes + panel * Method::kHandedRowBytes / 2 * row_pitch(rows);
}

template <class Method>
void hand_over(const Finish& finish, const float* sums, int64_t rows, int64_t pitch, std::byte* place) {
  constexpr int64_t kWidth = kPanel / 2;
  const Activation activation = finish.args.activation;
  for (int64_t base = 0; base < rows; base += 4) {
    alignas(64) float results[4 * kWidth];
    for (int64_t i = 0; i < 4; ++i) {  // the last row also stands for those that fill the tile up
      const float* from = sums + (base + i < rows ? base + i : rows - 1) * kPanel;
      for (int64_t c = 0; c < kWidth; c += kLanes) {
        const vf gate = load(from + c);
        const vf active = activation == Activation::kSilu ? gate * sigmoid(gate) : activate(gate, activation);
        store(results + i * kWidth + c, active * load(from + kWidth + c));
      }
    }
    Method::put_packed(results, pitch, place + base * 4);
  }
}

// Tiles first .. end over a group of panels; next: the group that follows.
template <class Method>
void run_panels(const LinearArgs& args, const Step& step, const Plan& plan, const std::byte* packed, PanelGroup group,
                PanelGroup next, bool is_cold, int64_t first, int64_t end, std::byte* scratch) {
  const PackedWeight& weight = args.weight;
  const Finish finish{args, step.at(args.residual), step.at(args.out),
                      weight.gated ? weight.out_features / 2 : weight.out_features};
  [[maybe_unused]] const bool hands_over = hands_rows_over<Method>(args.packs_out, step.rows);
  const std::byte* data = static_cast<const std::byte*>(weight.data);
  const bool is_wide = group.count == 1 && end - first >= fewest_wide_tiles<Method>();
  std::byte* widened = is_wide ? scratch + kWidenedOffset : nullptr;  // it holds one panel
  const bool expects = Method::kExpects && (plan.shared || step.rows * args.out.stride * 4 > kStreamedBytes);
  const int64_t passes = (end - first - is_cold) * group.count;
  for (int64_t tile = first; tile < end; ++tile)
    for (int64_t i = 0; i < group.count; ++i) {
      const int64_t panel = group.first + i;
      const Stream stream = stream_of<Method>(
          data + panel * plan.panel_bytes, plan.panel_bytes, data + next.first * plan.panel_bytes, next.count * plan.panel_bytes,
          next.count, (tile - first - is_cold) * group.count + i, passes, is_cold && tile == first);
      multiply_tile<Method>(
          weight, plan, step.rows, packed + tile * plan.tile_bytes, panel, tile, stream, widened, tile > first,
          [&](int64_t row, int64_t rows) {
            if (args.adapters != nullptr) expect_adapters<Method::kRows>(*args.adapters, row, rows, panel);
            if (!expects) return;
            if constexpr (HandsOver<Method>)
              if (hands_over) {
                const std::byte* place = handed_place<Method>(finish, tile, rows, panel);
                for (int64_t i = 0; i < Method::kHandedRowBytes / 2 * row_pitch(rows); i += 64) __builtin_prefetch(place + i, 1, 3);
                return;
              }
            (weight.gated ? expect_tile<true> : expect_tile<false>)(finish, row, rows, panel);
          },
          [&](float* sums, const float* row_scales, int64_t row, int64_t rows) {
            if (args.adapters != nullptr)
              add_adapters<Method::kRows>(*args.adapters, step, sums, row_scales, row, rows, panel);
            if constexpr (HandsOver<Method>)
              if (hands_over)
                return hand_over<Method>(finish, sums, rows, row_pitch(rows), handed_place<Method>(finish, tile, rows, panel));
            (weight.gated ? finish_tile<true> : finish_tile<false>)(finish, sums, row_scales, row, rows, panel);
          });
    }
}

template <class Method>
void run_linear(const LinearArgs& args, const Step& step, Team& team) {
  const PackedWeight& weight = args.weight;
  if (step.rows == 0 || weight.out_features == 0) return;
  const Plan plan = make_plan<Method>(weight, step.rows);
  std::byte* packed = plan.shared ? step.shared_scratch : team.scratch();
  if (hands_rows_over<Method>(args.x_is_packed, step.rows)) {
    packed = reinterpret_cast<std::byte*>(step.at(args.x));
  } else if (plan.shared) {
    for (int64_t tile = team.take(); tile < plan.tiles; tile = team.take()) pack_tile<Method>(args, step, plan, tile, packed, team);
    team.barrier();
  } else {
    for (int64_t tile = 0; tile < plan.tiles; ++tile) pack_tile<Method>(args, step, plan, tile, packed, team);
  }
  int64_t block = Method::kBlockBytes / plan.tile_bytes;
  if (block < 4) block = 4;
  if (block > plan.tiles) block = plan.tiles;
  const int64_t blocks = (plan.tiles + block - 1) / block;
  // A group is cut into no fewer items than keep the threads busy to the end.
  int64_t width = plan.tiles == 1 ? 1 : Method::kGroupBytes / plan.panel_bytes;
  if (width > blocks * plan.panels / (4 * team.count())) width = blocks * plan.panels / (4 * team.count());
  if (width < 1) width = 1;
  const int64_t groups = (plan.panels + width - 1) / width;
  const auto group_of = [&](int64_t item) {
    const int64_t index = item % groups, from = index * plan.panels / groups;
    return PanelGroup{from, (index + 1) * plan.panels / groups - from};
  };
  const int64_t longest = blocks > 1 ? 1 : kRunBytes / (width * plan.panel_bytes) + 1;
  Runs runs(team, blocks * groups, longest);
  bool is_cold = true;
  for (int64_t item = runs.next(); item >= 0; item = runs.next()) {
    const int64_t index = item / groups, first = index * plan.tiles / blocks;
    const int64_t end = (index + 1) * plan.tiles / blocks, next = runs.ahead() < 0 ? item : runs.ahead();
    is_cold |= end - first == 1;  // a single pass asks for its own panel
    run_panels<Method>(args, step, plan, packed, group_of(item), group_of(next), is_cold, first, end,
                       team.scratch());
    is_cold = false;
  }
}

// Bytes of shared scratch for at most `rows` rows.
template <class Method>
std::size_t scratch_for(const LinearArgs& args, int64_t rows) {
  const Plan plan = make_plan<Method>(args.weight, rows);
  return plan.shared ? static_cast<std::size_t>(plan.tiles * plan.tile_bytes) : 0;
}

}  // namespace
}  // namespace quire::QUIRE_ISA
