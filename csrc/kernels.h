// What every kernel is called with, and the tables of kernels that each instruction set provides.
//
// Activations are float32, rows of `stride` elements (a multiple of 16, so that rows are 64-byte aligned; what lies
// between a row's width and its stride has no meaning). They are named by Ref, an offset into one of the memory areas
// that a run is given, so that a program is recorded once and run over any memory. Weights are named by address.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "team.h"

namespace quire {

inline constexpr int kMaxAreas = 9;
// The last area is the memory in which ranks of several replicas exchange rows (expert_exchange.h).
inline constexpr int kExchangeArea = kMaxAreas - 1;

// Place of a matrix of float32 rows.
struct Ref {
  int32_t area = -1;  // -1: absent
  int32_t reserved = 0;
  int64_t offset = 0;  // bytes
  int64_t stride = 0;  // elements from row to row
  bool present() const noexcept { return area >= 0; }
};

struct AttentionPlan;  // attention.h
struct LinearAdapters;  // adapters.h
struct ExpertAdapters;
struct EncoderPlan;    // encoder.h
struct StatePlan;      // linear_state.h

// Columns of a step's tokens: numbers of those that every step has, and the most of all.
constexpr int64_t kTokenIds = 0, kSlotPositions = 1, kMaxColumns = 16;

// Rows in runs, each from a multiple of `distance` on.
inline constexpr int kMaxRuns = 64;
struct RowRuns {
  int64_t count = 0;
  int64_t distance = 0;
  std::array<int64_t, kMaxRuns> rows{};
};

// What changes from run to run.
struct Step {
  int64_t rows = 0;
  const int64_t* columns[kMaxColumns] = {};  // [rows] each, by number: kTokenIds, kSlotPositions, then the model's own
  const EncoderPlan* encoder = nullptr;      // of a step without a KV pool
  const AttentionPlan* const* attention = nullptr;  // [num_attention], by KV group
  int64_t num_attention = 0;
  const StatePlan* states = nullptr;
  const int64_t* read_rows = nullptr;  // [num_read], ascending: what a gather leaves of the rows; null: all
  int64_t num_read = 0;
  const RowRuns* runs = nullptr;  // of experts alone: where the `rows` are; null: one after the other
  std::byte* areas[kMaxAreas] = {};
  std::byte* shared_scratch = nullptr;  // as many bytes as the program's kernels asked for; 64-byte aligned

  float* at(const Ref& ref) const noexcept {
    return ref.present() ? reinterpret_cast<float*>(areas[ref.area] + ref.offset) : nullptr;
  }
};

enum class Activation : int32_t { kNone = 0, kRelu, kSilu, kGelu, kGeluTanh, kQuickGelu };

// What activations are rounded to before they multiply weights, keys or values that are stored in bfloat16, and on AMX
// weights of integers and small floats. Sums are float32 either way; what is stored in another type is not concerned.
enum class MatmulPrecision : int32_t { kFloat32 = 0, kBFloat16 };

// -- linear (linear.cpp) --------------------------------------------------------------------------------------------

enum class WeightType : int32_t { kF32 = 0, kBF16, kF16, kI8, kI4, kE4M3, kMXFP4, kNVFP4, kI2, kI3, kI5, kI6, kNL4 };

inline constexpr int64_t kPanel = 32;

// A matrix [out_features, in_features], packed in panels of kPanel output columns, zero-padded:
//   f32, f16         [panel][k][32]
//   bf16             [panel][k / 2][32][2]          pairs of k, as they are multiplied in bfloat16; each value is one
//                    shift away from being float32. in_features padded to a multiple of 2
//   i8               [panel][k / 4][32][4]          in_features padded to a multiple of 4 inside each group
//   i4               [panel][k / 8][32][4] bytes: low nibbles k .. k+3, high nibbles k+4 .. k+7 (values 0 .. 15)
//                    in_features padded to a multiple of 8 inside each group
//   e4m3             [panel][k / 2][32][2]          8-bit floats; in_features padded to a multiple of 4 inside each group
//   mxfp4, nvfp4     as i4, of e2m1 codes           4-bit floats (small_floats.h says what codes stand for)
//   nl4              as i4, of places in a table of 16 whole numbers (packed.h)
//   i2, i3, i6       [panel][k / 16][plane]         planes of some bits of 16 values of k, one behind the other:
//   i5               [panel][k / 32][plane]         or of 32
// A plane of four bits is as i4. One of two is [32][4] bytes: of value k of 16, bits 2 * (k / 4) of byte k % 4. i3 and i5
// have a plane of two and four bits and one of a bit, i6 one of four and one of two. The bit of i5 is bit k / 4 of byte k % 4
// of [32][4]; that of i3 lies in [k / 4][2] words of 64 bits, of 16 columns each: bit 4 * column + k % 4. i6 are 32 too
// large, i3 4, and i5 without offsets 16.
// Weight = scale * value + offset, scales and offsets [panel][group][32] float32 (offsets: null when all are 0; integers
// alone have some). Integers may have both in float16 instead (scale_halves, offset_halves), and offsets that are all
// -centre * scale instead of stored ones: numbers that are the same in float32, in fewer bytes. The scales of mxfp4 and
// nvfp4 are codes of one byte, [panel][group][32]: e8m0, and e4m3 that `scales`, then [panel][32] float32, is multiplied
// with. Integers in super-blocks of 256 values of k have scales that are products: scale_halves, and offset_halves where
// there are offsets, are [panel][super-block][32], and what multiplies them for each group are codes of some bits,
// [panel][super-block][row of codes][32] bytes in `scale_codes` (packed.h has their rows).
// Only the last group may be shorter than group_size. packed.h computes places.
// A gated matrix holds gate and up, out_features / 2 rows each: panel p has gate rows 16p .. 16p+15 in its columns
// 0 .. 15 and up rows 16p .. 16p+15 in its columns 16 .. 31.
struct PackedWeight {
  const void* data = nullptr;
  const float* scales = nullptr;
  const float* offsets = nullptr;
  const int32_t* column_sums = nullptr;   // i8 with integer activations: [panel][group][32], sum of values
  const int32_t* column_order = nullptr;  // [in_features]: value k belongs to input column_order[k]; null: k
  const uint8_t* scale_codes = nullptr;   // of mxfp4, nvfp4 and super-blocks
  const uint16_t* scale_halves = nullptr;
  const uint16_t* offset_halves = nullptr;
  int64_t in_features = 0;
  int64_t out_features = 0;
  int64_t group_size = 0;  // in_features when there is one group
  WeightType type = WeightType::kF32;
  bool gated = false;
  bool integer_activations = false;  // activations are rounded to 8 bits, one scale for each row
  float centre = 0;  // the value that stands for zero, where there are no stored offsets
  bool super_blocks = false;
  int32_t activation_bits = 0;  // of integers and 4-bit floats, least bits that activations keep: 8, one scale for each group;
                                // 16; 32; 0: 32, or 16 where the program's precision is bfloat16
};

// A norm of each row: what it is multiplied with and moved by.
struct RowNorm {
  const float* weight = nullptr;  // null: ones
  const float* bias = nullptr;    // null: zeros
  float epsilon = 0;
  bool subtract_mean = false;
};

// Most columns of x that a linear layer normalises itself.
inline constexpr int64_t kMaxNormedFeatures = 6144;

// out = epilogue(x W^T + bias) (+ residual), of the norm of x where `norms`. Gated: out = activation(gate) * up,
// out_features / 2 wide.
struct LinearArgs {
  PackedWeight weight;
  const float* bias = nullptr;  // [panels * 32], in the order of the packed columns, zero-padded
  Ref x;
  Ref residual;  // may be the same place as out
  Ref out;
  Activation activation = Activation::kNone;
  bool norms = false;
  RowNorm norm;
  bool feeds_next = false;  // only the linear layer that comes next reads out, as its x: how it lies there is theirs
  MatmulPrecision precision = MatmulPrecision::kFloat32;  // the program's
  // As LinearKernels::hands_over allows: out, or x, lies as the tiles of the next layer, or of this, want it.
  bool packs_out = false;
  bool x_is_packed = false;
  const LinearAdapters* adapters = nullptr;  // the program's; null: none
};

// out = each head's columns of x times its own matrix, side by side: [rows, heads * in] -> [rows, heads * out].
struct HeadsArgs {
  std::shared_ptr<const std::vector<PackedWeight>> weights;  // of one shape, not gated, at most kMaxHeadFeatures inputs
  Ref x;
  Ref out;
  MatmulPrecision precision = MatmulPrecision::kFloat32;  // the program's
};

inline constexpr int64_t kMaxHeadFeatures = 2048;

// The matrices of a layer's experts, or of those that this rank holds. gate_up: gated, `intermediate` wide each; where `up`
// is not empty, the gate alone, which may be of another type. Biases as LinearArgs has them, or empty.
struct ExpertTable {
  std::vector<PackedWeight> gate_up;
  std::vector<PackedWeight> up;
  std::vector<PackedWeight> down;
  std::vector<const float*> gate_up_bias;
  std::vector<const float*> up_bias;
  std::vector<const float*> down_bias;
};

// Where an expert is: its place among the matrices, or -1 if only other ranks hold it. It is held by `copies` ranks, of
// which this one computes the rows whose number divided by `copies` leaves `turn`. May change between runs.
struct ExpertPlace {
  int32_t place;
  int32_t copies;
  int32_t turn;
};

// out = residual (or 0) + the weighted sum of what each row's experts give for x, in the order of their numbers: down
// (activation(gate) * up), each product with its bias. Of the experts that other ranks compute nothing is added.
// apart: out [rows, top_k * width] has each of a row's results by itself, before its weight, in the order of `routing`;
// -0 for those of other ranks, so that the ranks' sum has the bits of the one that computes. Of rows in runs those of other
// ranks are left as they are.
struct ExpertsArgs {
  std::shared_ptr<const ExpertTable> table;
  int64_t top_k = 0;
  Activation activation = Activation::kNone;
  float limit = 0;  // above 0: the gate is cut off at it, up at both its signs, and 1 is added to up
  bool weighs_input = false;   // weights multiply x, not the results
  bool apart = false;
  int64_t* counts = nullptr;   // [experts], of all ranks: rows that chose each are added; null: nothing is counted
  const ExpertPlace* places = nullptr;  // [num_placed] by an expert's number; null: all are here, in their order
  int64_t num_placed = 0;
  const ExpertAdapters* adapters = nullptr;  // the program's; null: none
  Ref x;
  Ref routing;   // [rows, 2 top_k]: numbers of experts, ascending, then their weights
  Ref residual;  // may be the same place as out; none with `apart`
  Ref out;
  MatmulPrecision precision = MatmulPrecision::kFloat32;  // the program's
};

// Numbers of experts are whole: what is none (of a row of NaN) becomes one.
[[gnu::always_inline]] static inline int64_t expert_number(float value, int64_t count) noexcept {
  const int64_t number = value >= 0.0f ? static_cast<int64_t>(value) : 0;
  return number < count ? number : count - 1;
}

struct LinearKernels {
  void (*linear)(const LinearArgs&, const Step&, Team&);
  // Bytes of shared scratch for at most `rows` rows.
  std::size_t (*linear_scratch)(const LinearArgs&, int64_t rows);
  // Whether a layer can pack what it gives for the next one, which alone reads it.
  bool (*hands_over)(const LinearArgs&, const LinearArgs& next);
  void (*heads)(const HeadsArgs&, const Step&, Team&);
  void (*experts)(const ExpertsArgs&, const Step&, Team&);
  std::size_t (*experts_scratch)(const ExpertsArgs&, int64_t rows, int threads);
};

// -- the rest of a layer (layers.cpp) -------------------------------------------------------------------------------

// out[t] (+)= row `ids[t] + shift` of a table. ids: the step's column of this number. A table may be one rank's share,
// the rows from `start` on of `shared_rows`: other rows of those are zeros here.
struct EmbedArgs {
  PackedWeight table;  // packed, as for a product: a vocabulary matrix may also be the projection to logits
  int64_t width = 0;
  int64_t shift = 0;
  int64_t column = kTokenIds;
  bool accumulate = false;
  Ref out;
  int64_t start = 0;
  int64_t shared_rows = 0;  // 0: the table is whole
};

// RMSNorm: x / sqrt(mean(x^2) + epsilon) * weight. LayerNorm: (x - mean) / sqrt(variance + epsilon) * weight + bias.
struct NormArgs {
  RowNorm norm;
  int64_t width = 0;
  Ref x;
  Ref out;  // may be the same place as x
};

// cos and sin of a column of positions: out[t] = cos of rotary_dim / 2 angles, then their sines, times `magnitude`.
struct RotationArgs {
  const float* inverse_frequencies = nullptr;  // [rotary_dim / 2]
  int64_t rotary_dim = 0;
  float magnitude = 1;
  int64_t column = kSlotPositions;
  Ref out;
  const int32_t* axes = nullptr;  // [rotary_dim / 2], 0 to 2: element i turns by `column`, grid[0] or grid[1]; null: all
  std::array<int64_t, 2> grid{};  // by `column`
};

// x[i] = x[step.read_rows[i]], for i < step.num_read.
struct GatherArgs {
  int64_t width = 0;
  Ref x;
};

// How experts are chosen: Routing of quire/kernels/arguments.py.
struct RouteArgs {
  int64_t num_experts = 0;
  int64_t top_k = 0;
  bool sigmoid = false;  // else softmax
  bool renormalise = true;
  float factor = 1;
  const float* bias = nullptr;  // [num_experts] or null
  int64_t num_groups = 1;
  int64_t top_groups = 1;
  int64_t group_best = 1;
  Ref logits;
  Ref out;  // [rows, 2 top_k]: numbers of experts, ascending, then their weights
};

// out = residual + the sum of what experts give apart, each times its weight, in their order: the bits of ExpertsArgs.
struct AddExpertsArgs {
  int64_t top_k = 0;
  bool weighs_input = false;  // weights have multiplied x
  int64_t width = 0;
  Ref parts;    // [rows, top_k * width]
  Ref routing;  // [rows, 2 top_k]
  Ref residual;
  Ref out;  // may be the same place as residual
  const std::vector<const float*>* holders = nullptr;  // by an expert's number, where its results are; null: all in `parts`
};

enum class Elementwise : int32_t { kAdd = 0, kMultiply, kGate, kScale, kSoftCap, kGateRows };

// out = x + y, x * y, x * sigmoid(y), factor * x, factor * tanh(x / factor), or x * sigmoid(y[0]).
struct ElementwiseArgs {
  Elementwise kind = Elementwise::kAdd;
  float factor = 1;
  int64_t width = 0;
  Ref x;
  Ref y;    // of the first three; of the last one element a row
  Ref out;  // may be the same place as x or y
};

struct LayerKernels {
  void (*embed)(const EmbedArgs&, const Step&, Team&);
  void (*norm)(const NormArgs&, const Step&, Team&);
  void (*rotation)(const RotationArgs&, const Step&, Team&);
  void (*gather)(const GatherArgs&, const Step&, Team&);
  void (*elementwise)(const ElementwiseArgs&, const Step&, Team&);
  void (*route)(const RouteArgs&, const Step&, Team&);
  void (*add_experts)(const AddExpertsArgs&, const Step&, Team&);
};

// -- attention (attention.cpp) --------------------------------------------------------------------------------------

enum class CacheType : int32_t { kF32 = 0, kBF16, kI8, kE4M3 };

// One layer's part of the KV pool, block_bytes apart; see attention.h for what a block looks like.
struct AttentionArgs {
  int32_t group = 0;  // which of Step::attention
  CacheType cache = CacheType::kF32;
  MatmulPrecision precision = MatmulPrecision::kFloat32;  // the program's
  std::byte* pages = nullptr;
  int64_t block_bytes = 0;
  int64_t num_blocks = 0;
  int64_t block_size = 0;
  int64_t num_heads = 0;
  int64_t num_kv_heads = 0;
  int64_t head_dim = 0;
  float scale = 1;        // of q.k as the key is stored
  float key_scale = 1;    // e4m3 elements stand for themselves times this: keys
  float value_scale = 1;  // and values
  float soft_cap = 0;  // 0: off
  int64_t window = 0;  // 0: all
  bool chunked = false;  // keys from the last multiple of `window` on are seen, not the last `window` ones
  int64_t length_floor = 0;   // above 0: queries are multiplied by 1 + length_strength log(1 + (position + 1) / floor),
  float length_strength = 0;  // the quotient rounded down
  const float* sinks = nullptr;  // [num_heads] or null
  const float* query_norm = nullptr;  // [head_dim]: RMS norm of each query head before the rotation; null: none
  const float* key_norm = nullptr;
  float norm_epsilon = 0;
  int64_t rotary_dim = 0;  // 0: no rotation
  bool writes = true;      // keys and values, to the rows' slots
  bool attends = true;     // over what the pages then hold
  bool parts = false;      // what the rank's tokens alone come to, of queries that are prepared: nothing is written
  int64_t query_heads = 0;  // heads of `qkv`
  Ref rotation;            // as RotationArgs::out
  Ref qkv;                 // [rows, query_heads * head_dim + 2 num_kv_heads * head_dim if it writes]: query,
                           // key and value heads, changed in place
  Ref out;                 // [rows, num_heads * head_dim], and with `parts` the logarithms of the sums of weights behind
};

struct AttentionKernels {
  // Norm and rotate query and key heads, write keys and values to their slots.
  void (*prepare)(const AttentionArgs&, const Step&, Team&);
  // Then attend. (A barrier lies between the two.)
  void (*attend)(const AttentionArgs&, const Step&, Team&);
  std::size_t (*attend_scratch)(const AttentionArgs&, int64_t rows, int threads);
};

// -- attention in both directions (encoder.cpp) ----------------------------------------------------------------------

struct EncoderArgs {
  int64_t num_heads = 0;
  int64_t head_dim = 0;  // as kMaxHeadDim says
  float scale = 1;
  int64_t window = 0;  // most positions between a row and a key, on either side; 0: any
  int64_t rotary_dim = 0;  // 0: no rotation
  Ref rotation;            // as RotationArgs::out
  Ref qkv;                 // [rows, 3 num_heads * head_dim]
  Ref out;                 // [rows, num_heads * head_dim]
  // bfloat16: queries, keys, values and weights are rounded, where the instruction set multiplies it.
  MatmulPrecision precision = MatmulPrecision::kFloat32;
};

struct EncoderKernels {
  void (*attend)(const EncoderArgs&, const Step&, Team&);
};

// -- latent attention (latent.cpp) ----------------------------------------------------------------------------------

// One layer's latents in the KV pool; see latent.h for what a page looks like.
struct LatentArgs {
  int32_t group = 0;  // which of Step::attention
  CacheType cache = CacheType::kF32;
  MatmulPrecision precision = MatmulPrecision::kFloat32;  // the program's
  std::byte* pages = nullptr;
  int64_t block_bytes = 0;
  int64_t num_blocks = 0;
  int64_t block_size = 0;
  int64_t num_heads = 0;
  int64_t rank = 0;      // elements of the compressed part, which is the value
  int64_t rope_dim = 0;  // of the rotated part, which follows it in a key
  float scale = 1;
  bool writes = true;    // the rows' vectors, to their slots
  bool attends = true;   // over what the pages then hold
  bool parts = false;    // as AttentionArgs has it
  int64_t query_heads = 0;  // heads of `turned_query` that are rotated
  Ref rotation;          // as RotationArgs::out, of rope_dim elements; absent: nothing is rotated
  Ref query;             // [rows, num_heads * rank]
  Ref turned_query;      // [rows, num_heads * rope_dim]; changed in place
  Ref latent;            // [rows, rank]
  Ref turned_key;        // [rows, rope_dim]; changed in place
  Ref out;               // [rows, num_heads * rank], and with `parts` the logarithms of the sums of weights behind
  int64_t top = 0;       // above 0: most keys that a row reads, ...
  Ref selected;          // ... [rows, top]: their positions, ascending, for rows that see more
};

struct LatentKernels {
  // Rotate, and write the rows' vectors to their slots.
  void (*prepare)(const LatentArgs&, const Step&, Team&);
  // Then attend. (A barrier lies between the two.)
  void (*attend)(const LatentArgs&, const Step&, Team&);
  std::size_t (*attend_scratch)(const LatentArgs&, int threads);
};

// -- the keys that sparse latent attention reads (latent_index.cpp) ---------------------------------------------------

// score = scale * sum over heads of weights[head] * relu(query of the head · key). Keys are kept behind a block's latents.
struct IndexArgs {
  int32_t group = 0;  // which of Step::attention
  CacheType cache = CacheType::kF32;
  std::byte* pages = nullptr;
  int64_t block_bytes = 0;
  int64_t num_blocks = 0;
  int64_t block_size = 0;
  int64_t latent_width = 0;  // elements of a latent
  int64_t num_heads = 0;     // of the indexer
  int64_t dim = 0;           // of a query and a key
  int64_t rope_dim = 0;      // of their first elements, which are rotated
  int64_t top = 0;           // keys that are chosen
  float scale = 1;
  bool writes = true;   // the rows' keys, to their slots
  bool selects = true;  // of the keys that the pages then hold
  Ref rotation;  // as RotationArgs::out, of rope_dim elements; absent: nothing is rotated
  Ref query;     // [rows, num_heads * dim]; changed in place
  Ref key;       // [rows, dim]; changed in place
  Ref weights;   // [rows, num_heads]
  Ref out;       // [rows, top]: positions, ascending; of rows that see no more than `top` keys nothing is written
};

struct IndexKernels {
  // Rotate, and write the rows' keys to their slots.
  void (*prepare)(const IndexArgs&, const Step&, Team&);
  // Then choose. (A barrier lies between the two.)
  void (*select)(const IndexArgs&, const Step&, Team&);
};

// -- layers that keep a state (linear_state.cpp) --------------------------------------------------------------------

// out[t] = activation(bias + sum over taps of kernel[tap] * x[t - width + 1 + tap]), in each sequence; zeros before it.
struct ConvolutionArgs {
  int64_t layer = 0;   // which of StatePlan::layers
  int64_t offset = 0;  // bytes of a page before the kept inputs
  int64_t channels = 0;
  int64_t width = 0;              // taps
  int64_t kept = 0;               // inputs of a page, at least width - 1: that of position p in row p % kept
  const float* kernel = nullptr;  // [width][channels]
  const float* bias = nullptr;    // [channels] or null
  Activation activation = Activation::kNone;  // or kSilu
  Ref x;
  Ref out;  // not the same place as x
};

// The gated delta rule of quire/layers/states.py.
struct DeltaArgs {
  int64_t layer = 0;   // which of StatePlan::layers
  int64_t offset = 0;  // bytes of a page before what is kept
  int64_t key_heads = 0;
  int64_t value_heads = 0;
  int64_t key_dim = 0;
  int64_t value_dim = 0;
  const float* rate = nullptr;       // [value_heads]
  const float* time_bias = nullptr;  // [value_heads]
  float epsilon = 0;                 // added to the squared length of keys and queries
  Ref qkv;                           // [rows, 2 key_heads * key_dim + value_heads * value_dim]
  Ref gates;                         // [rows, 2 value_heads]: of the updates and of the decays
  Ref out;                           // [rows, value_heads * value_dim]
};

// RMSNorm of each head, times weight, times silu(gate).
struct GatedNormArgs {
  const float* weight = nullptr;  // [width]
  float epsilon = 0;
  int64_t heads = 0;
  int64_t width = 0;  // of a head
  Ref x;
  Ref gate;
  Ref out;  // may be the same place as x or gate
};

struct StateKernels {
  void (*convolve)(const ConvolutionArgs&, const Step&, Team&);
  // Then keep what later steps need. (A barrier lies between the two.)
  void (*keep_inputs)(const ConvolutionArgs&, const Step&, Team&);
  void (*delta)(const DeltaArgs&, const Step&, Team&);
  void (*gated_norm)(const GatedNormArgs&, const Step&, Team&);
};

// -- sampling over the vocabulary (sampling.cpp) --------------------------------------------------------------------

// What the sequences ask for: columns of a table that has a row for each of them.
struct SamplingColumns {
  const float* temperature = nullptr;  // 0: the best token is taken
  const int64_t* top_k = nullptr;      // 0 or less: off
  const double* top_p = nullptr;       // 1: off; a share of what top_k leaves
  const float* min_p = nullptr;        // 0: off; relative to the largest weight
  const uint64_t* seed = nullptr;
};

// Chooses a token for each row of scores. Rows that are drawn are overwritten.
struct ChooseArgs {
  SamplingColumns columns;
  float* scores = nullptr;  // [count, vocab_size], rows `stride` apart
  int64_t stride = 0;
  int64_t count = 0;
  int64_t vocab_size = 0;
  const int64_t* rows = nullptr;     // [count]: which row of the columns
  const int64_t* numbers = nullptr;  // [count]: how many tokens the sequence has generated
  int64_t* tokens = nullptr;         // [count]; -1 for a row with NaN, with infinity, or without any finite score
  std::byte* scratch = nullptr;
};

// Log-probability and rank of one token of each row, and the best tokens, the lowest first among equals.
struct RankArgs {
  const float* logits = nullptr;  // [count, vocab_size], rows `stride` apart
  int64_t stride = 0;
  int64_t count = 0;
  int64_t vocab_size = 0;
  const int64_t* tokens = nullptr;  // [count]
  int64_t width = 0;                // best tokens of each row, at most kMostRanked and vocab_size
  float* logprobs = nullptr;        // [count]; NaN for a row with non-finite logits; nothing else of it is written
  int64_t* ranks = nullptr;         // [count]: 1 + tokens with a larger logit
  int64_t* top_tokens = nullptr;    // [count, width]
  float* top_logprobs = nullptr;    // [count, width]
};

inline constexpr int64_t kMostRanked = 64;

struct SamplingKernels {
  void (*choose)(const ChooseArgs&, Team&);
  std::size_t (*choose_scratch)(int64_t vocab_size, int threads);
  void (*rank)(const RankArgs&, Team&);
  // The lowest weight that top-k, top-p and min-p keep, of weights of at most 1 that add up to `total`.
  float (*lowest_kept)(const float* weights, int64_t count, double total, int64_t top_k, double top_p, float min_p,
                       std::byte* thread_scratch);
};

// -- quantize (quantize.cpp) ----------------------------------------------------------------------------------------

// Groups of weights, each to be rounded to 0 .. 15 steps from an offset.
struct FitArgs {
  const float* groups = nullptr;  // [groups, group_size]
  int64_t group_size = 0;         // at most 128
  const float* shares = nullptr;  // [num_shares]: of a group's range, candidates for 15 steps
  int64_t num_shares = 0;
  const float* nudges = nullptr;  // [num_nudges, 2]: factor of the best step so far, and shift in steps
  int64_t num_nudges = 0;
  uint8_t* values = nullptr;  // [groups, group_size]
  float* steps = nullptr;     // [groups], as the two that follow
  float* offsets = nullptr;
  float* means = nullptr;  // of the values
};

struct QuantizeKernels {
  // Groups begin .. end - 1; false, with some of them done, where one holds infinities or NaN.
  bool (*fit_int4)(const FitArgs&, int64_t begin, int64_t end);
};

}  // namespace quire
