// The Python module. Programs take addresses as integers: shapes and dtypes are checked in Python, once, when a program
// is recorded (quire/kernels/cpu). Every call that computes releases the interpreter lock.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>

#include "attention.h"
#include "bindings.h"
#include "encoder.h"
#include "linear_state.h"
#include "program.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace quire {
namespace {

template <class T>
const T* at(uintptr_t address) {
  return reinterpret_cast<const T*>(address);
}

void bind_weight(nb::module_& module) {
  nb::enum_<WeightType>(module, "WeightType")
      .value("F32", WeightType::kF32)
      .value("BF16", WeightType::kBF16)
      .value("F16", WeightType::kF16)
      .value("I8", WeightType::kI8)
      .value("I4", WeightType::kI4)
      .value("E4M3", WeightType::kE4M3)
      .value("MXFP4", WeightType::kMXFP4)
      .value("NVFP4", WeightType::kNVFP4)
      .value("I2", WeightType::kI2)
      .value("I3", WeightType::kI3)
      .value("I5", WeightType::kI5)
      .value("I6", WeightType::kI6)
      .value("NL4", WeightType::kNL4);
  nb::enum_<Activation>(module, "Activation")
      .value("NONE", Activation::kNone)
      .value("RELU", Activation::kRelu)
      .value("SILU", Activation::kSilu)
      .value("GELU", Activation::kGelu)
      .value("GELU_TANH", Activation::kGeluTanh)
      .value("QUICK_GELU", Activation::kQuickGelu);
  nb::enum_<CacheType>(module, "CacheType")
      .value("F32", CacheType::kF32)
      .value("BF16", CacheType::kBF16)
      .value("I8", CacheType::kI8)
      .value("E4M3", CacheType::kE4M3);
  nb::enum_<Elementwise>(module, "Elementwise")
      .value("ADD", Elementwise::kAdd)
      .value("MULTIPLY", Elementwise::kMultiply)
      .value("GATE", Elementwise::kGate)
      .value("SCALE", Elementwise::kScale)
      .value("SOFT_CAP", Elementwise::kSoftCap)
      .value("GATE_ROWS", Elementwise::kGateRows);
  nb::enum_<MatmulPrecision>(module, "MatmulPrecision")
      .value("FLOAT32", MatmulPrecision::kFloat32)
      .value("BFLOAT16", MatmulPrecision::kBFloat16);
  nb::class_<PackedWeight>(module, "PackedWeight")
      .def(
          "__init__",
          [](PackedWeight* self, WeightType type, int64_t in_features, int64_t out_features, int64_t group_size,
             bool gated, bool integer_activations, uintptr_t data, uintptr_t scales, uintptr_t offsets,
             uintptr_t column_sums, uintptr_t column_order, uintptr_t scale_codes, uintptr_t scale_halves,
             uintptr_t offset_halves, float centre, bool super_blocks,
             int32_t activation_bits) {
            new (self) PackedWeight{at<void>(data),           at<float>(scales),         at<float>(offsets),
                                    at<int32_t>(column_sums), at<int32_t>(column_order), at<uint8_t>(scale_codes),
                                    at<uint16_t>(scale_halves), at<uint16_t>(offset_halves), in_features,
                                    out_features,             group_size,                type,
                                    gated,                    integer_activations,       centre,
                                    super_blocks,             activation_bits};
          },
          "type"_a, "in_features"_a, "out_features"_a, "group_size"_a, "gated"_a, "integer_activations"_a, "data"_a,
          "scales"_a = 0, "offsets"_a = 0, "column_sums"_a = 0, "column_order"_a = 0, "scale_codes"_a = 0,
          "scale_halves"_a = 0, "offset_halves"_a = 0, "centre"_a = 0.0f, "super_blocks"_a = false,
          "activation_bits"_a = 0);
  nb::class_<Ref>(module, "Ref").def(
      "__init__",
      [](Ref* self, int32_t area, int64_t offset, int64_t stride) { new (self) Ref{area, 0, offset, stride}; },
      "area"_a = -1, "offset"_a = 0, "stride"_a = 0);
  nb::class_<RowNorm>(module, "RowNorm")
      .def(
          "__init__",
          [](RowNorm* self, uintptr_t weight, uintptr_t bias, float epsilon, bool subtract_mean) {
            new (self) RowNorm{at<float>(weight), at<float>(bias), epsilon, subtract_mean};
          },
          "weight"_a, "bias"_a, "epsilon"_a, "subtract_mean"_a);
  module.attr("MAX_NORMED_FEATURES") = kMaxNormedFeatures;
  module.attr("TOKEN_IDS") = kTokenIds;
  module.attr("SLOT_POSITIONS") = kSlotPositions;
  module.attr("MAX_COLUMNS") = kMaxColumns;
}

void bind_collectives(nb::module_& module) {
  nb::class_<SharedRanks>(module, "SharedRanks")
      .def_static("num_bytes", &SharedRanks::bytes, "ranks"_a)
      .def(
          "__init__",
          [](SharedRanks* self, uintptr_t memory, int rank, int ranks, int spins, double seconds) {
            new (self) SharedRanks(reinterpret_cast<std::byte*>(memory), rank, ranks, spins, seconds);
          },
          "memory"_a, "rank"_a, "ranks"_a, "spins"_a, "seconds"_a)
      .def(
          "all_reduce",
          [](SharedRanks& ranks, uintptr_t x, uintptr_t out, int64_t rows, int64_t width) {
            TeamShared alone;
            Team team(0, 1, &alone, nullptr);
            ranks.all_reduce(at<float>(x), width, reinterpret_cast<float*>(out), width, rows, width, team);
            ranks.check();
          },
          "x"_a, "out"_a, "rows"_a, "width"_a, nb::call_guard<nb::gil_scoped_release>())
      .def(
          "gather_others",
          [](SharedRanks& ranks, Pool& pool, uintptr_t x, int64_t x_stride, uintptr_t out, int64_t out_stride,
             const std::vector<int64_t>& counts, int64_t width) {
            if (static_cast<int>(counts.size()) != ranks.ranks() || width < 1 || width > SharedRanks::kSlot ||
                std::any_of(counts.begin(), counts.end(), [](int64_t count) { return count < 0; }))
              throw std::invalid_argument("a count of rows for each rank expected, and rows that fit into a slot");
            struct Gather {
              SharedRanks& ranks;
              const float* x;
              int64_t x_stride;
              float* out;
              int64_t out_stride;
              const int64_t* counts;
              int64_t width;
            } gather{ranks, at<float>(x), x_stride, reinterpret_cast<float*>(out), out_stride, counts.data(), width};
            nb::gil_scoped_release released;
            pool.run(
                [](void* argument, Team& team) {
                  const Gather& each = *static_cast<Gather*>(argument);
                  each.ranks.gather_others(each.x, each.x_stride, each.out, each.out_stride, each.counts, each.width, team);
                },
                &gather, Pool::Crew::kWhole);
            ranks.check();
          },
          "pool"_a, "x"_a, "x_stride"_a, "out"_a, "out_stride"_a, "counts"_a, "width"_a);
}

void bind_exchange(nb::module_& module) {
  nb::class_<ExpertExchange>(module, "ExpertExchange")
      .def_static(
          "num_bytes",
          [](int64_t replicas, int64_t tp, int64_t rows, int64_t width, int64_t top_k) {
            return ExpertExchange::bytes({replicas, tp, rows, width, top_k});
          },
          "replicas"_a, "tp"_a, "rows"_a, "width"_a, "top_k"_a)
      .def(
          "__init__",
          [](ExpertExchange* self, uintptr_t memory, int64_t replicas, int64_t tp, int64_t rows, int64_t width,
             int64_t top_k, int rank, int spins, double seconds) {
            new (self) ExpertExchange(reinterpret_cast<std::byte*>(memory), {replicas, tp, rows, width, top_k}, rank, spins,
                                      seconds);
          },
          "memory"_a, "replicas"_a, "tp"_a, "rows"_a, "width"_a, "top_k"_a, "rank"_a, "spins"_a, "seconds"_a)
      .def("open", &ExpertExchange::open);
}

void bind_program(nb::module_& module) {
  nb::class_<Pool>(module, "Pool")
      .def(nb::init<int, bool, bool>(), "threads"_a, "pin"_a, "whole"_a = false)
      .def_prop_ro("threads", &Pool::threads)
      .def("wake", &Pool::wake);
  nb::class_<Program> program(module, "Program");
  bind_states(module, program);
  bind_adapters(module, program);
  program
      .def(
          "__init__",
          [](Program* self, const std::string& isa, std::shared_ptr<Pool> pool, int64_t max_rows,
             MatmulPrecision precision) {
            new (self) Program(kernels_for(isa), std::move(pool), max_rows, precision);
          },
          "isa"_a, "pool"_a, "max_rows"_a, "precision"_a = MatmulPrecision::kFloat32)
      .def_prop_ro("scratch_bytes", &Program::scratch_bytes)
      .def("__len__", &Program::size)
      .def(
          "linear",
          [](Program& program, const PackedWeight& weight, uintptr_t bias, const Ref& x, const Ref& residual,
             const Ref& out, Activation activation, std::optional<RowNorm> norm, bool feeds_next) {
            program.add(LinearArgs{weight, at<float>(bias), x, residual, out, activation, norm.has_value(),
                                   norm.value_or(RowNorm{}), feeds_next});
          },
          "weight"_a, "bias"_a, "x"_a, "residual"_a, "out"_a, "activation"_a, "norm"_a = nb::none(),
          "feeds_next"_a = false)
      .def(
          "embed",
          [](Program& program, const PackedWeight& table, int64_t width, int64_t shift, int64_t column,
             bool accumulate, const Ref& out, int64_t start, int64_t shared_rows) {
            program.add(EmbedArgs{table, width, shift, column, accumulate, out, start, shared_rows});
          },
          "table"_a, "width"_a, "shift"_a, "column"_a, "accumulate"_a, "out"_a, "start"_a = 0, "shared_rows"_a = 0)
      .def(
          "norm",
          [](Program& program, uintptr_t weight, uintptr_t bias, float epsilon, bool subtract_mean, int64_t width,
             const Ref& x, const Ref& out) {
            program.add(NormArgs{{at<float>(weight), at<float>(bias), epsilon, subtract_mean}, width, x, out});
          },
          "weight"_a, "bias"_a, "epsilon"_a, "subtract_mean"_a, "width"_a, "x"_a, "out"_a)
      .def(
          "rotation",
          [](Program& program, uintptr_t inverse_frequencies, int64_t rotary_dim, float magnitude, int64_t column,
             const Ref& out, uintptr_t axes, const std::array<int64_t, 2>& grid) {
            program.add(RotationArgs{at<float>(inverse_frequencies), rotary_dim, magnitude, column, out,
                                     at<int32_t>(axes), grid});
          },
          "inverse_frequencies"_a, "rotary_dim"_a, "magnitude"_a, "column"_a, "out"_a, "axes"_a = 0,
          "grid"_a = std::array<int64_t, 2>{})
      .def(
          "gather", [](Program& program, int64_t width, const Ref& x) { program.add(GatherArgs{width, x}); },
          "width"_a, "x"_a)
      .def(
          "elementwise",
          [](Program& program, Elementwise kind, float factor, int64_t width, const Ref& x, const Ref& y,
             const Ref& out) { program.add(ElementwiseArgs{kind, factor, width, x, y, out}); },
          "kind"_a, "factor"_a, "width"_a, "x"_a, "y"_a, "out"_a)
      .def(
          "route",
          [](Program& program, int64_t num_experts, int64_t top_k, bool sigmoid, bool renormalise, float factor,
             uintptr_t bias, int64_t num_groups, int64_t top_groups, int64_t group_best, const Ref& logits,
             const Ref& out) {
            program.add(RouteArgs{num_experts, top_k, sigmoid, renormalise, factor, at<float>(bias), num_groups,
                                  top_groups, group_best, logits, out});
          },
          "num_experts"_a, "top_k"_a, "sigmoid"_a, "renormalise"_a, "factor"_a, "bias"_a, "num_groups"_a,
          "top_groups"_a, "group_best"_a, "logits"_a, "out"_a)
      .def(
          "experts",
          [](Program& program, std::vector<PackedWeight> gate_up, std::vector<PackedWeight> up,
             std::vector<PackedWeight> down, const std::vector<uintptr_t>& gate_up_bias,
             const std::vector<uintptr_t>& up_bias, const std::vector<uintptr_t>& down_bias,
             uintptr_t places, int64_t num_placed, int64_t top_k, Activation activation, float limit,
             bool weighs_input, bool apart, uintptr_t counts, const Ref& x, const Ref& routing, const Ref& residual, const Ref& out,
             std::shared_ptr<AdapterTable> wide_adapters, std::shared_ptr<AdapterTable> down_adapters, int64_t column,
             std::shared_ptr<ExpertExchange> exchange, const std::vector<int64_t>& ranks) {
            auto table = std::make_shared<ExpertTable>();
            table->gate_up = std::move(gate_up);
            table->up = std::move(up);
            table->down = std::move(down);
            for (uintptr_t bias : gate_up_bias) table->gate_up_bias.push_back(at<float>(bias));
            for (uintptr_t bias : up_bias) table->up_bias.push_back(at<float>(bias));
            for (uintptr_t bias : down_bias) table->down_bias.push_back(at<float>(bias));
            ExpertsArgs args;
            args.table = std::move(table);
            args.top_k = top_k;
            args.activation = activation;
            args.limit = limit;
            args.weighs_input = weighs_input;
            args.apart = apart;
            args.places = reinterpret_cast<const ExpertPlace*>(places);
            args.num_placed = num_placed;
            auto* counters = reinterpret_cast<int64_t*>(counts);
            if (exchange != nullptr) {
              ExchangeArgs exchanged;
              exchanged.exchange = std::move(exchange);
              exchanged.experts = std::move(args);
              exchanged.counts = counters;
              exchanged.x = x;
              exchanged.routing = routing;
              exchanged.residual = residual;
              exchanged.out = out;
              return program.add(std::move(exchanged), ranks);
            }
            args.counts = counters;
            args.x = x;
            args.routing = routing;
            args.residual = residual;
            args.out = out;
            if (wide_adapters != nullptr && down_adapters != nullptr)
              program.add(std::move(args), std::move(wide_adapters), std::move(down_adapters), column);
            else
              program.add(std::move(args));
          },
          "gate_up"_a, "up"_a, "down"_a, "gate_up_bias"_a, "up_bias"_a, "down_bias"_a, "places"_a,
          "num_placed"_a, "top_k"_a, "activation"_a, "limit"_a, "weighs_input"_a, "apart"_a, "counts"_a, "x"_a,
          "routing"_a, "residual"_a, "out"_a, "wide_adapters"_a.none() = nb::none(),
          "down_adapters"_a.none() = nb::none(), "column"_a = -1, "exchange"_a.none() = nb::none(),
          "ranks"_a = std::vector<int64_t>{})
      .def(
          "add_experts",
          [](Program& program, int64_t top_k, bool weighs_input, int64_t width, const Ref& parts, const Ref& routing,
             const Ref& residual, const Ref& out) {
            program.add(AddExpertsArgs{top_k, weighs_input, width, parts, routing, residual, out});
          },
          "top_k"_a, "weighs_input"_a, "width"_a, "parts"_a, "routing"_a, "residual"_a, "out"_a)
      .def(
          "attention",
          [](Program& program, int32_t group, CacheType cache, uintptr_t pages, int64_t block_bytes,
             int64_t num_blocks, int64_t block_size, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
             float scale, float soft_cap, int64_t window, uintptr_t sinks, uintptr_t query_norm, uintptr_t key_norm,
             float norm_epsilon, int64_t rotary_dim, const Ref& rotation, const Ref& qkv, const Ref& out, bool writes,
             bool chunked, int64_t length_floor, float length_strength, float key_scale, float value_scale, bool parts,
             int64_t query_heads) {
            AttentionArgs args;
            args.group = group;
            args.cache = cache;
            args.pages = reinterpret_cast<std::byte*>(pages);
            args.block_bytes = block_bytes;
            args.num_blocks = num_blocks;
            args.block_size = block_size;
            args.num_heads = num_heads;
            args.num_kv_heads = num_kv_heads;
            args.head_dim = head_dim;
            args.scale = scale;
            args.soft_cap = soft_cap;
            args.window = window;
            args.chunked = chunked;
            args.length_floor = length_floor;
            args.length_strength = length_strength;
            args.key_scale = key_scale;
            args.value_scale = value_scale;
            args.sinks = at<float>(sinks);
            args.query_norm = at<float>(query_norm);
            args.key_norm = at<float>(key_norm);
            args.norm_epsilon = norm_epsilon;
            args.rotary_dim = rotary_dim;
            args.rotation = rotation;
            args.qkv = qkv;
            args.out = out;
            args.writes = writes;
            args.attends = out.present();
            args.parts = parts;
            args.query_heads = args.attends ? num_heads : query_heads;
            program.add(args);
          },
          "group"_a, "cache"_a, "pages"_a, "block_bytes"_a, "num_blocks"_a, "block_size"_a, "num_heads"_a,
          "num_kv_heads"_a, "head_dim"_a, "scale"_a, "soft_cap"_a, "window"_a, "sinks"_a, "query_norm"_a,
          "key_norm"_a, "norm_epsilon"_a, "rotary_dim"_a, "rotation"_a, "qkv"_a, "out"_a, "writes"_a = true, "chunked"_a = false,
          "length_floor"_a = 0, "length_strength"_a = 0.0f,
          "key_scale"_a = 1.0f, "value_scale"_a = 1.0f, "parts"_a = false, "query_heads"_a = 0)
      .def(
          "latent",
          [](Program& program, int32_t group, CacheType cache, uintptr_t pages, int64_t block_bytes,
             int64_t num_blocks, int64_t block_size, int64_t num_heads, int64_t rank, int64_t rope_dim, float scale,
             const Ref& rotation, const Ref& query, const Ref& turned_query, const Ref& latent, const Ref& turned_key,
             const Ref& out, int64_t top, const Ref& selected, bool writes, bool parts, int64_t query_heads) {
            LatentArgs args;
            args.group = group;
            args.cache = cache;
            args.pages = reinterpret_cast<std::byte*>(pages);
            args.block_bytes = block_bytes;
            args.num_blocks = num_blocks;
            args.block_size = block_size;
            args.num_heads = num_heads;
            args.rank = rank;
            args.rope_dim = rope_dim;
            args.scale = scale;
            args.rotation = rotation;
            args.query = query;
            args.turned_query = turned_query;
            args.latent = latent;
            args.turned_key = turned_key;
            args.out = out;
            args.top = top;
            args.selected = selected;
            args.writes = writes;
            args.attends = out.present();
            args.parts = parts;
            args.query_heads = query_heads > 0 ? query_heads : num_heads;
            program.add(args);
          },
          "group"_a, "cache"_a, "pages"_a, "block_bytes"_a, "num_blocks"_a, "block_size"_a, "num_heads"_a, "rank"_a,
          "rope_dim"_a, "scale"_a, "rotation"_a, "query"_a, "turned_query"_a, "latent"_a, "turned_key"_a, "out"_a,
          "top"_a, "selected"_a, "writes"_a = true, "parts"_a = false, "query_heads"_a = 0)
      .def(
          "select_keys",
          [](Program& program, int32_t group, CacheType cache, uintptr_t pages, int64_t block_bytes,
             int64_t num_blocks, int64_t block_size, int64_t latent_width, int64_t num_heads, int64_t dim,
             int64_t rope_dim, int64_t top, float scale, const Ref& rotation, const Ref& query, const Ref& key,
             const Ref& weights, const Ref& out, bool writes) {
            program.add(IndexArgs{group, cache, reinterpret_cast<std::byte*>(pages), block_bytes, num_blocks,
                                  block_size, latent_width, num_heads, dim, rope_dim, top, scale, writes, out.present(),
                                  rotation, query, key, weights, out});
          },
          "group"_a, "cache"_a, "pages"_a, "block_bytes"_a, "num_blocks"_a, "block_size"_a, "latent_width"_a,
          "num_heads"_a, "dim"_a, "rope_dim"_a, "top"_a, "scale"_a, "rotation"_a, "query"_a, "key"_a, "weights"_a,
          "out"_a, "writes"_a = true)
      .def(
          "heads",
          [](Program& program, std::vector<PackedWeight> weights, const Ref& x, const Ref& out) {
            program.add(HeadsArgs{std::make_shared<const std::vector<PackedWeight>>(std::move(weights)), x, out});
          },
          "weights"_a, "x"_a, "out"_a)
      .def(
          "attend_encoder",
          [](Program& program, int64_t num_heads, int64_t head_dim, float scale, int64_t window, int64_t rotary_dim,
             MatmulPrecision precision, const Ref& rotation, const Ref& qkv, const Ref& out) {
            program.add(EncoderArgs{num_heads, head_dim, scale, window, rotary_dim, rotation, qkv, out, precision});
          },
          "num_heads"_a, "head_dim"_a, "scale"_a, "window"_a, "rotary_dim"_a, "precision"_a, "rotation"_a, "qkv"_a,
          "out"_a)
      .def(
          "all_reduce",
          [](Program& program, std::shared_ptr<SharedRanks> ranks, int64_t width, const Ref& x, const Ref& out) {
            program.add(AllReduceArgs{std::move(ranks), width, x, out});
          },
          "ranks"_a, "width"_a, "x"_a, "out"_a)
      .def(
          "all_gather",
          [](Program& program, std::shared_ptr<SharedRanks> ranks, int64_t width, const Ref& x, const Ref& out, int count) {
            const Peers peers = ranks->peers(count);
            program.add(AllGatherArgs{std::move(ranks), peers, width, x, out});
          },
          "ranks"_a, "width"_a, "x"_a, "out"_a, "count"_a = 0)
      .def(
          "merge_parts",
          [](Program& program, std::shared_ptr<SharedRanks> ranks, int count, int64_t num_heads, int64_t head_dim,
             const Ref& x, const Ref& out) {
            const Peers peers = ranks->peers(count);
            program.add(MergePartsArgs{std::move(ranks), peers, num_heads, head_dim, x, out});
          },
          "ranks"_a, "count"_a, "num_heads"_a, "head_dim"_a, "x"_a, "out"_a)
      .def(
          "outside",
          [](Program& program, nb::callable function, std::vector<Ref> rows) {
            program.add([function = std::move(function), rows = std::move(rows)](const Step& step) {
              nb::gil_scoped_acquire held;
              nb::list addresses;
              for (const Ref& ref : rows) addresses.append(reinterpret_cast<uintptr_t>(step.at(ref)));
              function(step.rows, addresses);
            });
          },
          "function"_a, "rows"_a)
      .def(
          "bind",
          [](Program& program, int64_t rows, const std::vector<uintptr_t>& columns,
             std::vector<const AttentionPlan*> attention, const std::vector<uintptr_t>& areas, uintptr_t scratch,
             uintptr_t read_rows, int64_t num_read, const StatePlan* states,
             const EncoderPlan* encoder) {
            if (areas.size() > kExchangeArea) throw std::invalid_argument("too many memory areas");
            if (columns.size() > kMaxColumns) throw std::invalid_argument("too many columns");
            Step step;
            step.rows = rows;
            for (std::size_t i = 0; i < columns.size(); ++i) step.columns[i] = at<int64_t>(columns[i]);
            for (std::size_t i = 0; i < areas.size(); ++i) step.areas[i] = reinterpret_cast<std::byte*>(areas[i]);
            step.shared_scratch = reinterpret_cast<std::byte*>(scratch);
            step.read_rows = at<int64_t>(read_rows);
            step.num_read = num_read;
            step.encoder = encoder;
            step.states = states;
            return BoundProgram(program, step, std::move(attention));
          },
          nb::keep_alive<0, 1>(), "rows"_a, "columns"_a, "attention"_a, "areas"_a, "scratch"_a,
          "read_rows"_a = 0, "num_read"_a = 0, "states"_a.none() = nb::none(), "encoder"_a.none() = nb::none());
  nb::class_<BoundProgram>(module, "BoundProgram").def("__call__", &BoundProgram::run, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace
}  // namespace quire

NB_MODULE(_native, module) {
  module.doc() = "Native CPU kernels of Quire.";
  module.def("available_isas", [] {
    std::vector<std::string> names;
    for (quire::Isa isa : quire::available_isas()) names.emplace_back(quire::isa_name(isa));
    return names;
  });
  module.def("resolve_isa", [](const std::string& name) {
    return std::string(quire::isa_name(quire::kernels_for(name).isa));
  });
  module.def("has_bf16_products", [](const std::string& name) { return quire::kernels_for(name).bf16_products; });
  quire::bind_weight(module);
  quire::bind_attention(module);
  quire::bind_drafts(module);
  quire::bind_encoder(module);
  quire::bind_collectives(module);
  quire::bind_exchange(module);
  quire::bind_program(module);
  quire::bind_step_inputs(module);
  quire::bind_limits(module);
  quire::bind_packing(module);
  quire::bind_block_packing(module);
  quire::bind_sampling(module);
}
