// Mixtures of experts: the products of all experts that rows chose, each over its own rows.
//
// Pairs of a row and an expert are sorted by expert. In the first product threads take panels of all these experts, one
// after the other, and pack an expert's rows for themselves; its results lie pair by pair. Where gate and up are matrices
// of two types, it is done twice, and up's sums meet the gate's. In the second product a
// thread takes columns of the output, for which it adds up the experts in the order of their numbers: no two threads
// write to one place, and the order of a row's sum depends on its own experts alone. Where experts change their ranks,
// results stay apart until those of all ranks are there.
//
// A x of adapters is computed for all pairs before each product, which adds B to its sums (expert_adapters.h).
#pragma once

#include "expert_adapters.h"
#include "linear_driver.h"

namespace quire::QUIRE_ISA {
namespace {

// Calls use(method) with the method that multiplies this weight.
template <class Use>
QUIRE_INLINE void with_method(const PackedWeight& weight, MatmulPrecision precision, const Use& use);

// What the first product multiplies by: gate and up in turns, or the gate, or up.
enum Wide { kGate, kUp };

// The pairs of one expert.
struct ExpertRows {
  int64_t expert;
  int64_t first;          // of the sorted pairs
  int64_t count;
  int64_t first_tile;     // of the second product's packed tiles
  int64_t block[2];       // tiles that the first product packs at once
  int64_t first_item[2];  // of the first product: blocks x panels
};

// What the threads share of a step: in shared scratch.
struct ExpertPlan {
  int64_t num_active = 0;
  int64_t num_tiles = 0;
  int64_t num_items[2] = {0, 0};
  int64_t longest[2] = {1, 1};
};

inline const std::vector<PackedWeight>& wide_weights(const ExpertTable& table, Wide wide) {
  return wide == kGate ? table.gate_up : table.up;
}

struct ExpertMemory {
  ExpertPlan* plan;
  ExpertRows* active;
  int32_t* pairs;      // sorted by expert: row * top_k + place
  float* inner;        // [pairs, inner_stride]: the first product's results
  float* wide_ranks;   // [pairs, 2, most ranks]: A x of the adapters of gate and up
  float* down_ranks;   // [pairs, most ranks]
  std::byte* packed;   // of them, tile by tile
  std::byte* own;      // of each thread: packed rows of the first product, and rows to pack
  int64_t inner_stride;
  int64_t tile_bytes;  // of the second product
  int64_t own_bytes;
  int64_t gathered;    // where the rows to pack begin in a thread's part
  std::size_t bytes;
};

template <class Method>
int64_t expert_block(int64_t tile_bytes) {
  const int64_t block = Method::kBlockBytes / tile_bytes;
  return block < 2 ? 2 : block;
}

// Where everything lies in shared scratch that begins at `base`, for at most `rows` rows.
inline ExpertMemory expert_memory(const ExpertsArgs& args, int64_t rows, int threads, std::byte* base) {
  const ExpertTable& table = *args.table;
  const int64_t count = static_cast<int64_t>(table.down.size()), pairs = rows * args.top_k;
  int64_t fewest_rows = pairs + 1, most_rows = 1, own = 0, tile_bytes = 0;
  for (const Wide wide : {kGate, kUp})
    for (const PackedWeight& weight : wide_weights(table, wide))
      with_method(weight, args.precision, [&]<class Method>(Method) {
        const int64_t bytes = Method::layout(weight).bytes, packed = expert_block<Method>(bytes) * bytes;
        own = packed > own ? packed : own;
        most_rows = Method::kRows > most_rows ? Method::kRows : most_rows;
      });
  for (int64_t i = 0; i < count; ++i) {
    with_method(table.down[i], args.precision, [&]<class Method>(Method) {
      const int64_t bytes = Method::layout(table.down[i]).bytes;
      tile_bytes = bytes > tile_bytes ? bytes : tile_bytes;
      fewest_rows = Method::kRows < fewest_rows ? Method::kRows : fewest_rows;
    });
  }
  const int64_t tiles = pairs / fewest_rows + (count < pairs ? count : pairs);
  const int64_t size = rounded_up(table.down[0].out_features, 16);
  ExpertMemory memory;
  memory.inner_stride = rounded_up(table.down[0].in_features, 16);
  memory.tile_bytes = tile_bytes;
  memory.gathered = rounded_up(own, 64);
  memory.own_bytes = memory.gathered + most_rows * size * 4;
  std::byte* at = base;
  const auto take = [&at](int64_t bytes) {
    std::byte* begin = at;
    at += rounded_up(bytes, 64);
    return begin;
  };
  memory.plan = reinterpret_cast<ExpertPlan*>(take(sizeof(ExpertPlan)));
  memory.active = reinterpret_cast<ExpertRows*>(take(count * static_cast<int64_t>(sizeof(ExpertRows))));
  memory.pairs = reinterpret_cast<int32_t*>(take(pairs * 4));
  memory.inner = reinterpret_cast<float*>(take(pairs * memory.inner_stride * 4));
  memory.packed = take(tiles * tile_bytes);
  if (args.adapters != nullptr) {
    memory.wide_ranks = reinterpret_cast<float*>(take(pairs * 2 * args.adapters->wide->max_rank * 4));
    memory.down_ranks = reinterpret_cast<float*>(take(pairs * args.adapters->down->max_rank * 4));
  }
  memory.own = take(threads * memory.own_bytes);
  memory.bytes = static_cast<std::size_t>(at - base);
  return memory;
}

template <class Method>
Plan expert_tiles(const PackedWeight& weight, int64_t rows) {
  Plan plan = make_plan<Method>(weight, rows);
  plan.shared = false;
  return plan;
}

// By one thread: sorts the pairs, rows ascending for each expert, and lays out the work.
inline void plan_experts(const ExpertsArgs& args, const Step& step, const ExpertMemory& memory) {
  const ExpertTable& table = *args.table;
  const int64_t count = static_cast<int64_t>(table.down.size()), top_k = args.top_k;
  const float* routing = step.at(args.routing);
  ExpertPlan& plan = *memory.plan = ExpertPlan{};
  for (int64_t i = 0; i < count; ++i) memory.active[i].count = 0;
  const bool are_all = args.places == nullptr;
  const int64_t of_all_ranks = are_all ? count : args.num_placed;
  const auto own_place = [&](int64_t number, int64_t row) -> int64_t {
    if (are_all) return number;
    const ExpertPlace& at = args.places[number];
    return at.copies == 1 || row % at.copies == at.turn ? at.place : -1;
  };
  const auto each_row = [&](const auto& use) {
    if (step.runs == nullptr) {
      for (int64_t row = 0; row < step.rows; ++row) use(row);
    } else {
      for (int64_t run = 0; run < step.runs->count; ++run)
        for (int64_t row = 0; row < step.runs->rows[static_cast<std::size_t>(run)]; ++row) use(run * step.runs->distance + row);
    }
  };
  const auto each_pair = [&](const auto& use) {
    each_row([&](int64_t row) {
      for (int64_t place = 0; place < top_k; ++place) {
        const int64_t number = expert_number(routing[row * args.routing.stride + place], of_all_ranks);
        use(number, own_place(number, row), static_cast<int32_t>(row * top_k + place));
      }
    });
  };
  each_pair([&](int64_t number, int64_t own, int32_t) {
    if (args.counts) ++args.counts[number];
    if (own >= 0) ++memory.active[own].count;
  });
  int64_t first = 0;
  for (int64_t i = 0; i < count; ++i) {
    memory.active[i].first = first;
    first += memory.active[i].count;
  }
  each_pair([&](int64_t, int64_t own, int32_t pair) {
    if (own >= 0) memory.pairs[memory.active[own].first++] = pair;
  });
  for (int64_t i = 0; i < count; ++i) {
    const int64_t own = memory.active[i].count;
    if (own == 0) continue;
    ExpertRows& rows = memory.active[plan.num_active++];  // no later than i
    rows = {i, memory.active[i].first - own, own, plan.num_tiles, {}, {plan.num_items[kGate], plan.num_items[kUp]}};
    for (const Wide wide : {kGate, kUp}) {
      if (wide_weights(table, wide).empty()) continue;
      const PackedWeight& weight = wide_weights(table, wide)[i];
      with_method(weight, args.precision, [&]<class Method>(Method) {
        const Plan tiles = expert_tiles<Method>(weight, own);
        const int64_t longest = expert_block<Method>(tiles.tile_bytes), blocks = (tiles.tiles + longest - 1) / longest;
        rows.block[wide] = (tiles.tiles + blocks - 1) / blocks;
        plan.num_items[wide] += blocks * tiles.panels;
        plan.longest[wide] = tiles.panels > plan.longest[wide] ? tiles.panels : plan.longest[wide];
      });
    }
    with_method(table.down[i], args.precision, [&]<class Method>(Method) {
      plan.num_tiles += expert_tiles<Method>(table.down[i], own).tiles;
    });
  }
}

// Packs tiles first .. end of an expert's rows for the first product.
template <class Method>
void pack_expert(const ExpertsArgs& args, const Step& step, const ExpertMemory& memory, const PackedWeight& weight,
                 const ExpertRows& own, const Plan& plan, int64_t first, int64_t end, std::byte* mine) {
  const float *x = step.at(args.x), *routing = step.at(args.routing);
  const int64_t size = weight.in_features, stride = rounded_up(size, 16);
  float* gathered = reinterpret_cast<float*>(mine + memory.gathered);
  for (int64_t tile = first; tile < end; ++tile, mine += plan.tile_bytes) {
    const int64_t row = first_row_of(plan, own.count, tile), rows = first_row_of(plan, own.count, tile + 1) - row;
    const int32_t* pairs = memory.pairs + own.first + row;
    if (rows == 1 && !args.weighs_input) {
      Method::pack(weight, x + pairs[0] / args.top_k * args.x.stride, args.x.stride, 1, mine);
      continue;
    }
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t token = pairs[r] / args.top_k;
      const float* from = x + token * args.x.stride;
      float* to = gathered + r * stride;
      std::memcpy(to, from, static_cast<std::size_t>(size) * sizeof(float));
      if (args.weighs_input) {
        const float share = routing[token * args.routing.stride + args.top_k + pairs[r] % args.top_k];
        for (int64_t k = 0; k < size; ++k) to[k] *= share;
      }
    }
    Method::pack(weight, gathered, stride, rows, mine);
  }
}

// activation(gate) * up, as the layer's gating has it.
QUIRE_INLINE vf gated_value(const ExpertsArgs& args, vf gate, vf up) {
  if (args.limit > 0) {
    const vf limit = broadcast(args.limit);
    gate = gate > limit ? limit : gate;
    up = up > limit ? limit : up < -limit ? -limit : up;
    up += 1.0f;
  }
  return activate(gate, args.activation) * up;
}

// What follows the sums of gate and up: up to 16 columns of each row.
inline void finish_gate(const ExpertsArgs& args, const float* bias, const float* sums, const float* row_scales,
                        int64_t rows, float* out, int64_t stride, int64_t width) {
  for (int64_t r = 0; r < rows; ++r, out += stride) {
    const vf scale = broadcast(row_scales ? row_scales[r] : 1.0f);
    for (int64_t c = 0; c < kPanel / 2 && c < width; c += kLanes) {
      vf gate = load(sums + r * kPanel + c) * scale, up = load(sums + r * kPanel + kPanel / 2 + c) * scale;
      if (bias) gate += load(bias + c), up += load(bias + kPanel / 2 + c);
      const vf value = gated_value(args, gate, up);
      if (width - c >= kLanes)
        store(out + c, value);
      else
        store_some(out + c, value, width - c);
    }
  }
}

// What follows the sums of the gate alone, which stay in `out`, and of up, which meets them: up to 32 columns of each row.
inline void finish_apart(const ExpertsArgs& args, Wide wide, const float* bias, const float* sums,
                         const float* row_scales, int64_t rows, float* out, int64_t stride, int64_t width) {
  for (int64_t r = 0; r < rows; ++r, out += stride) {
    const vf scale = broadcast(row_scales ? row_scales[r] : 1.0f);
    for (int64_t c = 0; c < kPanel && c < width; c += kLanes) {
      vf value = load(sums + r * kPanel + c) * scale;
      if (bias) value += load(bias + c);
      const bool is_whole = width - c >= kLanes;
      if (wide == kUp) value = gated_value(args, is_whole ? load(out + c) : load_some(out + c, width - c), value);
      if (is_whole)
        store(out + c, value);
      else
        store_some(out + c, value, width - c);
    }
  }
}

inline const std::byte* panel_of(const PackedWeight& weight, int64_t panel) {
  return static_cast<const std::byte*>(weight.data) + panel * panel_bytes(weight);
}

// Calls use(place among the sorted pairs, its expert, which of `parts`, slot of its row) for pairs with an adapter.
template <class Use>
QUIRE_INLINE void each_adapted_pair(const ExpertsArgs& args, Team& team, const ExpertMemory& memory, int64_t parts, const Use& use) {
  int64_t next = team.take();
  for (int64_t at = 0; at < memory.plan->num_active; ++at) {
    const ExpertRows& own = memory.active[at];
    for (; next < (own.first + own.count) * parts; next = team.take()) {
      const int64_t place = next / parts, row = memory.pairs[place] / args.top_k;
      const int64_t slot = args.adapters->groups->slots[static_cast<std::size_t>(row)];
      if (slot != 0) use(place, own.expert, next % parts, slot);
    }
  }
}

// A x of the adapters of gate and up.
inline void shrink_wide(const ExpertsArgs& args, const Step& step, Team& team, const ExpertMemory& memory) {
  const AdapterTable& table = *args.adapters->wide;
  each_adapted_pair(args, team, memory, 2, [&](int64_t place, int64_t expert, int64_t part, int64_t slot) {
    const int64_t row = memory.pairs[place] / args.top_k, at = memory.pairs[place] % args.top_k;
    const float share = args.weighs_input ? step.at(args.routing)[row * args.routing.stride + args.top_k + at] : 1.0f;
    float* out = memory.wide_ranks + (2 * place + part) * table.max_rank;
    shrink_pair(table, slot, 2 * expert + part, step.at(args.x) + row * args.x.stride, share, out);
  });
}

// The same of the second product's adapters, over the results of the first.
inline void shrink_down(const ExpertsArgs& args, Team& team, const ExpertMemory& memory) {
  const AdapterTable& table = *args.adapters->down;
  each_adapted_pair(args, team, memory, 1, [&](int64_t place, int64_t expert, int64_t, int64_t slot) {
    shrink_pair(table, slot, expert, memory.inner + place * memory.inner_stride, 1.0f, memory.down_ranks + place * table.max_rank);
  });
}

// inner[pair] = activation(gate) * up of the pair's row and expert; of a gate alone its sums.
inline void first_product(const ExpertsArgs& args, const Step& step, Team& team, const ExpertMemory& memory,
                          Wide wide) {
  const ExpertTable& table = *args.table;
  const std::vector<PackedWeight>& weights = wide_weights(table, wide);
  const std::vector<const float*>& all_biases = wide == kGate ? table.gate_up_bias : table.up_bias;
  const bool are_apart = !table.up.empty();
  const ExpertPlan& plan = *memory.plan;
  std::byte* mine = memory.own + team.index() * memory.own_bytes;
  const int64_t width = table.down[0].in_features;
  Runs runs(team, plan.num_items[wide], plan.longest[wide]);
  int64_t at = 0, packed_at = -1, packed_tile = -1;
  bool is_cold = true;
  for (int64_t item = runs.next(); item >= 0; item = runs.next()) {
    while (at + 1 < plan.num_active && memory.active[at + 1].first_item[wide] <= item) ++at;
    const ExpertRows& own = memory.active[at];
    const PackedWeight& weight = weights[own.expert];
    const float* biases = all_biases.empty() ? nullptr : all_biases[own.expert];
    with_method(weight, args.precision, [&]<class Method>(Method) {
      const Plan tiles = expert_tiles<Method>(weight, own.count);
      const int64_t panel = (item - own.first_item[wide]) % tiles.panels;
      const int64_t first = (item - own.first_item[wide]) / tiles.panels * own.block[wide];
      const int64_t end = first + own.block[wide] < tiles.tiles ? first + own.block[wide] : tiles.tiles;
      if (packed_at != at || packed_tile != first) {
        pack_expert<Method>(args, step, memory, weight, own, tiles, first, end, mine);
        packed_at = at, packed_tile = first;
      }
      const int64_t ahead = runs.ahead();
      int64_t next = at;
      while (next + 1 < plan.num_active && memory.active[next + 1].first_item[wide] <= ahead) ++next;
      const PackedWeight& after = weights[memory.active[next].expert];
      const int64_t there = ahead < 0 ? panel : (ahead - memory.active[next].first_item[wide]) % num_panels(after);
      is_cold |= end - first == 1;
      multiply_panel<Method>(
          weight, tiles, own.count, mine, panel, panel_of(after, there), is_cold, first, end, team.scratch(),
          [](int64_t, int64_t) {},
          [&](float* all_sums, const float* all_scales, int64_t first_row, int64_t num_rows) {
            const float* bias = biases ? biases + panel * kPanel : nullptr;
            const int64_t column = panel * (are_apart ? kPanel : kPanel / 2);
            const auto finish = [&](const float* sums, const float* row_scales, int64_t row, int64_t rows) {
              float* out = memory.inner + (own.first + first_row + row) * memory.inner_stride + column;
              if (are_apart)
                finish_apart(args, wide, bias, sums, row_scales, rows, out, memory.inner_stride, width - column);
              else
                finish_gate(args, bias, sums, row_scales, rows, out, memory.inner_stride, width - column);
            };
            const auto add = [&](int64_t slot, int64_t row, float* sums) {
              const AdapterTable& adapters = *args.adapters->wide;
              for (int64_t turn = 0; turn < kTurns; ++turn) {
                const int64_t part = are_apart ? int64_t{wide} : turn, of_b = are_apart ? panel * kTurns + turn : panel;
                const float* ranks = memory.wide_ranks + (2 * (own.first + first_row + row) + part) * adapters.max_rank;
                add_panel_of_b(adapters, slot, 2 * own.expert + part, of_b, ranks, sums + turn * kTurn);
              }
            };
            const int32_t* pairs = memory.pairs + own.first + first_row;
            add_to_pairs(args.adapters, pairs, args.top_k, all_sums, all_scales, num_rows, add, finish);
          });
      is_cold = false;
    });
  }
}

inline void pack_inner(const ExpertsArgs& args, Team& team, const ExpertMemory& memory) {
  const ExpertPlan& plan = *memory.plan;
  int64_t at = 0;
  for (int64_t tile = team.take(); tile < plan.num_tiles; tile = team.take()) {
    while (at + 1 < plan.num_active && memory.active[at + 1].first_tile <= tile) ++at;
    const ExpertRows& own = memory.active[at];
    const PackedWeight& weight = args.table->down[own.expert];
    with_method(weight, args.precision, [&]<class Method>(Method) {
      const Plan tiles = expert_tiles<Method>(weight, own.count);
      const int64_t row = first_row_of(tiles, own.count, tile - own.first_tile);
      const int64_t rows = first_row_of(tiles, own.count, tile - own.first_tile + 1) - row;
      Method::pack(weight, memory.inner + (own.first + row) * memory.inner_stride, memory.inner_stride, rows,
                   memory.packed + tile * memory.tile_bytes);
    });
  }
}

// Adds one tile's results to the rows of the output that they belong to, or leaves them there apart.
inline void add_results(const ExpertsArgs& args, const Step& step, const int32_t* pairs, const float* bias,
                        const float* sums, const float* row_scales, int64_t rows, int64_t column, int64_t width) {
  const float* routing = step.at(args.routing);
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t token = pairs[r] / args.top_k;
    const float given = routing[token * args.routing.stride + args.top_k + pairs[r] % args.top_k];
    const vf share = broadcast(args.weighs_input ? 1.0f : given);
    const vf scale = broadcast(row_scales ? row_scales[r] : 1.0f);
    float* out = step.at(args.out) + token * args.out.stride + column;
    if (args.apart) out += pairs[r] % args.top_k * args.table->down[0].out_features;
    for (int64_t c = 0; c < kPanel && c < width; c += kLanes) {
      vf value = load(sums + r * kPanel + c) * scale;
      if (bias) value += load(bias + c);
      if (args.apart)
        width - c >= kLanes ? store(out + c, value) : store_some(out + c, value, width - c);
      else if (width - c >= kLanes)
        store(out + c, fma(value, share, load(out + c)));
      else
        store_some(out + c, fma(value, share, load_some(out + c, width - c)), width - c);
    }
  }
}

// Columns first .. end of the output before any expert is added.
inline void begin_columns(const ExpertsArgs& args, const Step& step, int64_t first, int64_t end) {
  float* out = step.at(args.out);
  if (step.runs != nullptr) return;
  if (args.apart) {
    const int64_t size = args.table->down[0].out_features;
    for (int64_t row = 0; row < step.rows; ++row)
      for (int64_t place = 0; place < args.top_k; ++place) {
        float* to = out + row * args.out.stride + place * size;
        for (int64_t c = first; c < end; ++c) to[c] = -0.0f;
      }
    return;
  }
  const float* residual = step.at(args.residual);
  if (residual == out) return;
  const auto bytes = static_cast<std::size_t>(end - first) * sizeof(float);
  for (int64_t row = 0; row < step.rows; ++row) {
    float* to = out + row * args.out.stride + first;
    if (residual)
      std::memcpy(to, residual + row * args.residual.stride + first, bytes);
    else
      std::memset(to, 0, bytes);
  }
}

// out += what the experts give, by columns.
inline void second_product(const ExpertsArgs& args, const Step& step, Team& team, const ExpertMemory& memory) {
  const ExpertTable& table = *args.table;
  const ExpertPlan& plan = *memory.plan;
  const int64_t size = table.down[0].out_features, panels = num_panels(table.down[0]);
  // Of a prompt, so few that their part of the output stays in the L2 cache while the experts are added.
  const int64_t widest = kBlockBytes * 4 / (step.rows * kPanel * 4);
  Runs runs(team, panels, widest < 1 ? 1 : widest > 16 ? 16 : widest);
  bool is_cold = true;
  int64_t from, to;
  while (runs.next_range(&from, &to)) {
    begin_columns(args, step, from * kPanel, to * kPanel < size ? to * kPanel : size);
    for (int64_t at = 0; at < plan.num_active; ++at) {
      const ExpertRows& own = memory.active[at];
      const PackedWeight& weight = table.down[own.expert];
      const float* biases = table.down_bias.empty() ? nullptr : table.down_bias[own.expert];
      with_method(weight, args.precision, [&]<class Method>(Method) {
        Plan tiles = expert_tiles<Method>(weight, own.count);
        const int64_t block = expert_block<Method>(tiles.tile_bytes);
        tiles.tile_bytes = memory.tile_bytes;
        for (int64_t first = 0; first < tiles.tiles; first += block) {
          const int64_t end = first + block < tiles.tiles ? first + block : tiles.tiles;
          for (int64_t panel = from; panel < to; ++panel) {
            const bool is_last = panel + 1 == to, stays = !is_last || end < tiles.tiles;
            const int64_t next = stays || at + 1 == plan.num_active ? at : at + 1;
            const PackedWeight& after = table.down[memory.active[next].expert];
            is_cold |= end - first == 1;
            multiply_panel<Method>(
                weight, tiles, own.count, memory.packed + (own.first_tile + first) * memory.tile_bytes, panel,
                panel_of(after, is_last ? from : panel + 1), is_cold, first, end, team.scratch(),
                [](int64_t, int64_t) {},
                [&](float* all_sums, const float* all_scales, int64_t first_row, int64_t num_rows) {
                  const int32_t* pairs = memory.pairs + own.first + first_row;
                  const auto finish = [&](const float* sums, const float* row_scales, int64_t row, int64_t rows) {
                    add_results(args, step, pairs + row, biases ? biases + panel * kPanel : nullptr, sums, row_scales,
                                rows, panel * kPanel, size - panel * kPanel);
                  };
                  const auto add = [&](int64_t slot, int64_t row, float* sums) {
                    const AdapterTable& adapters = *args.adapters->down;
                    const float* ranks = memory.down_ranks + (own.first + first_row + row) * adapters.max_rank;
                    for (int64_t turn = 0; turn < kTurns; ++turn)
                      add_panel_of_b(adapters, slot, own.expert, panel * kTurns + turn, ranks, sums + turn * kTurn);
                  };
                  add_to_pairs(args.adapters, pairs, args.top_k, all_sums, all_scales, num_rows, add, finish);
                });
            is_cold = false;
          }
        }
      });
    }
  }
}

inline void experts(const ExpertsArgs& args, const Step& step, Team& team) {
  if (step.rows == 0) return;
  const ExpertMemory memory = expert_memory(args, step.rows, team.count(), step.shared_scratch);
  if (team.index() == 0) plan_experts(args, step, memory);
  team.barrier();
  if (args.adapters != nullptr) {
    shrink_wide(args, step, team, memory);
    team.barrier();
  }
  first_product(args, step, team, memory, kGate);
  team.barrier();
  if (!args.table->up.empty()) {
    first_product(args, step, team, memory, kUp);
    team.barrier();
  }
  if (args.adapters != nullptr) {
    shrink_down(args, team, memory);
    team.barrier();
  }
  pack_inner(args, team, memory);
  team.barrier();
  second_product(args, step, team, memory);
}

inline std::size_t experts_scratch(const ExpertsArgs& args, int64_t rows, int threads) {
  return expert_memory(args, rows, threads, nullptr).bytes;
}

}  // namespace
}  // namespace quire::QUIRE_ISA
