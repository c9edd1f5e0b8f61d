// Layers that keep a state: the short convolution, the gated delta rule and the gated norm behind it. Compiled once for
// each instruction set. Formulas: quire/layers/states.py; pages: linear_state.h.
//
// Every element of a result is one chain of sums, over key elements ascending or over the tokens behind the border
// ascending, whatever tile computes it: a token has the same bits alone, in a chunk and in a batch.
#include "linear_state.h"
#include "linear_state_tiles.h"

namespace quire::QUIRE_ISA {
namespace {

QUIRE_INLINE float* page_of(const StatePlan& plan, int64_t layer, int64_t sequence, int64_t block, int64_t offset) {
  const StateLayer& own = plan.layers[layer];
  const int64_t page = own.table[sequence * own.table_stride + block];
  return reinterpret_cast<float*>(own.pages + page * own.page_bytes + offset);
}

// -- short convolution ----------------------------------------------------------------------------------------------

constexpr int64_t kConvolutionRows = 16;  // that a thread takes at a time: each input is read `width` times from its cache

// Input number `place` (from the sequence's first row of the step on; negative: before it), or null before the sequence.
QUIRE_INLINE const float* input_row(const ConvolutionArgs& args, const StatePlan& plan, const float* x, int64_t sequence,
                                    int64_t place) {
  if (place >= 0) return x + (plan.query_start[sequence] + place) * args.x.stride;
  const int64_t start = plan.starts[sequence];
  if (start + place < 0) return nullptr;
  const float* kept = page_of(plan, args.layer, sequence, (start - 1) / plan.interval, args.offset);
  return kept + (start + place) % args.kept * line_elements(args.channels);
}

QUIRE_INLINE vf activated(Activation activation, vf x) { return activation == Activation::kSilu ? x * sigmoid(x) : x; }

void convolve_row(const ConvolutionArgs& args, const float* const* inputs, float* out) {
  const int64_t channels = args.channels, width = args.width;
  for (int64_t c = 0; c < channels; c += kLanes) {
    const int64_t left = channels - c;
    const auto part = [=](const float* row) { return left >= kLanes ? load(row + c) : load_some(row + c, left); };
    vf sum = zero();
    for (int64_t tap = 0; tap < width; ++tap)
      if (inputs[tap] != nullptr) sum = fma(part(args.kernel + tap * channels), part(inputs[tap]), sum);
    if (args.bias != nullptr) sum += part(args.bias);
    sum = activated(args.activation, sum);
    if (left >= kLanes)
      store(out + c, sum);
    else
      store_some(out + c, sum, left);
  }
}

void convolve(const ConvolutionArgs& args, const Step& step, Team& team) {
  const StatePlan& plan = *step.states;
  const float* x = step.at(args.x);
  float* out = step.at(args.out);
  for (int64_t first = team.take(kConvolutionRows); first < step.rows; first = team.take(kConvolutionRows)) {
    const int64_t last = first + kConvolutionRows < step.rows ? first + kConvolutionRows : step.rows;
    int64_t sequence = 0;
    for (int64_t row = first; row < last; ++row) {
      while (plan.query_start[sequence + 1] <= row) ++sequence;
      const int64_t place = row - plan.query_start[sequence] - (args.width - 1);
      const float* inputs[kMaxTaps];
      for (int64_t tap = 0; tap < args.width; ++tap) inputs[tap] = input_row(args, plan, x, sequence, place + tap);
      convolve_row(args, inputs, out + row * args.out.stride);
    }
  }
}

// Writes the inputs that later steps need to the pages of all blocks that the step writes. (A barrier after `convolve`,
// which reads what they held.)
void keep_inputs(const ConvolutionArgs& args, const Step& step, Team& team) {
  const StatePlan& plan = *step.states;
  const float* x = step.at(args.x);
  const int64_t kept = args.kept, row_elements = line_elements(args.channels);
  for (int64_t s = team.take(); s < plan.num_sequences; s = team.take()) {
    const int64_t count = plan.query_start[s + 1] - plan.query_start[s], start = plan.starts[s], end = start + count;
    if (count == 0) continue;
    // The block of the step's first token last: the page that is read may be its own.
    for (int64_t block = (end - 1) / plan.interval; block >= start / plan.interval; --block) {
      const int64_t block_end = (block + 1) * plan.interval < end ? (block + 1) * plan.interval : end;
      float* page = page_of(plan, args.layer, s, block, args.offset);
      for (int64_t position = block_end < kept ? 0 : block_end - kept; position < block_end; ++position) {
        float* to = page + position % kept * row_elements;
        const float* from = input_row(args, plan, x, s, position - start);
        if (from != to)
          std::memcpy(to, from, static_cast<std::size_t>(args.channels) * sizeof(float));
      }
    }
  }
}

// -- gated delta rule -----------------------------------------------------------------------------------------------

// One key head of one sequence, with the value heads that it serves, border by border.
class DeltaHead {
 public:
  DeltaHead(const DeltaArgs& args, const Step& step, int64_t sequence, int64_t head, std::byte* scratch)
      : args_(args),
        plan_(*step.states),
        places_(args),
        sequence_(sequence),
        head_(head),
        group_(args.value_heads / args.key_heads),
        first_row_(plan_.query_start[sequence]),
        start_(plan_.starts[sequence]),
        end_(start_ + plan_.query_start[sequence + 1] - first_row_),
        qkv_(step.at(args.qkv)),
        gates_(step.at(args.gates)),
        out_(step.at(args.out)),
        frame_(scratch, places_.key, places_.value) {}

  void run() {
    if (start_ == end_) return;
    source_ = start_ == 0 ? nullptr : page(start_ - 1);
    for (int64_t border = start_ / kBorder * kBorder; border < end_; border += kBorder) {
      const int64_t begin = border < start_ ? start_ - border : 0;
      const int64_t end = end_ - border < kBorder ? end_ - border : kBorder;
      bring_keys(border, begin, end);
      frame_.multiply_keys(begin, end);
      float* kept = page(border + end - 1);
      for (int64_t h = head_ * group_; h < (head_ + 1) * group_; ++h) run_value_head(h, border, begin, end, kept);
      if (end < kBorder) keep_keys(kept, begin, end);
      source_ = kept;
    }
  }

 private:
  // What the layer keeps of the sequence's token number `token`, and its row of the step.
  float* page(int64_t token) const { return page_of(plan_, args_.layer, sequence_, token / plan_.interval, args_.offset); }
  int64_t row(int64_t token) const { return first_row_ + token - start_; }

  float* state_of(float* page, int64_t h) const { return page + h * args_.key_dim * places_.value; }

  void bring_keys(int64_t border, int64_t begin, int64_t end) {
    const int64_t width = args_.key_dim;
    if (begin > 0) {
      const float* kept = source_ + places_.keys + head_ * kKeptRows * places_.key;
      for (int64_t n = 0; n < begin; ++n)
        std::memcpy(frame_.key(n), kept + n * places_.key, static_cast<std::size_t>(places_.key) * sizeof(float));
    }
    const float query_scale = 1.0f / __builtin_sqrtf(static_cast<float>(width));
    for (int64_t n = begin; n < end; ++n) {
      const float* query = qkv_ + row(border + n) * args_.qkv.stride + head_ * width;
      bring_unit(query + args_.key_heads * width, width, args_.epsilon, 1.0f, frame_.key(n), places_.key);
      bring_unit(query, width, args_.epsilon, query_scale, frame_.query(n), places_.key);
    }
  }

  void keep_keys(float* kept, int64_t begin, int64_t end) {
    float* to = kept + places_.keys + head_ * kKeptRows * places_.key;
    for (int64_t n = begin; n < end; ++n)
      std::memcpy(to + n * places_.key, frame_.key(n), static_cast<std::size_t>(places_.key) * sizeof(float));
  }

  void run_value_head(int64_t h, int64_t border, int64_t begin, int64_t end, float* kept) {
    const int64_t width = args_.value_dim, value_place = 2 * args_.key_heads * args_.key_dim + h * width;
    bring_gates(h, border, begin, end);
    for (int64_t n = begin; n < end; ++n)
      copy_row(qkv_ + row(border + n) * args_.qkv.stride + value_place, width, frame_.update(n), places_.value);
    if (begin > 0)
      std::memcpy(frame_.update(0), source_ + places_.updates + h * kKeptRows * places_.value,
                  static_cast<std::size_t>(begin * places_.value) * sizeof(float));
    frame_.weigh(begin, end);
    const float* state = source_ == nullptr ? nullptr : state_of(source_, h);
    frame_.multiply_state(state, args_.key_dim, begin, end);
    frame_.update_rows(begin, end);
    for (int64_t n = begin; n < end; ++n)
      std::memcpy(out_ + row(border + n) * args_.out.stride + h * width, frame_.result(n),
                  static_cast<std::size_t>(width) * sizeof(float));
    if (end == kBorder)
      frame_.pass_border(state, args_.key_dim, state_of(kept, h));
    else
      keep_rows(h, begin, end, state, kept);
  }

  // Sigmoids of the updates' gates, and the log decays: of the tokens before from the page.
  void bring_gates(int64_t h, int64_t border, int64_t begin, int64_t end) {
    if (begin > 0)
      std::memcpy(frame_.decays(), source_ + places_.decays + h * kBorder, static_cast<std::size_t>(begin) * sizeof(float));
    for (int64_t n = begin; n < end; ++n) {
      const float* gates = gates_ + row(border + n) * args_.gates.stride;
      frame_.betas()[n] = gates[h];
      frame_.decays()[n] = gates[args_.value_heads + h] + args_.time_bias[h];
    }
    frame_.open_gates(begin, end, -args_.rate[h]);
  }

  void keep_rows(int64_t h, int64_t begin, int64_t end, const float* state, float* kept) {
    std::memcpy(kept + places_.updates + (h * kKeptRows + begin) * places_.value, frame_.update(begin),
                static_cast<std::size_t>((end - begin) * places_.value) * sizeof(float));
    std::memcpy(kept + places_.decays + h * kBorder + begin, frame_.decays() + begin,
                static_cast<std::size_t>(end - begin) * sizeof(float));
    if (source_ == kept) return;
    const std::size_t bytes = static_cast<std::size_t>(args_.key_dim * places_.value) * sizeof(float);
    if (state == nullptr)
      std::memset(state_of(kept, h), 0, bytes);
    else
      std::memcpy(state_of(kept, h), state, bytes);
  }

  const DeltaArgs& args_;
  const StatePlan& plan_;
  const DeltaPlaces places_;
  const int64_t sequence_, head_, group_, first_row_, start_, end_;
  const float *qkv_, *gates_;
  float* out_;
  DeltaFrame frame_;
  float* source_ = nullptr;  // the page whose state is that of the last border; null: it is zero
};

void delta(const DeltaArgs& args, const Step& step, Team& team) {
  const StatePlan& plan = *step.states;
  const int64_t items = plan.num_sequences * args.key_heads;
  for (int64_t item = team.take(); item < items; item = team.take())
    DeltaHead(args, step, plan.order[item / args.key_heads], item % args.key_heads, team.scratch()).run();
}

// -- gated norm -----------------------------------------------------------------------------------------------------

void gated_norm_head(const GatedNormArgs& args, const float* x, const float* gate, float* out) {
  const int64_t width = args.width;
  vf squares = zero();
  for (int64_t k = 0; k < width; k += kLanes) {
    const vf value = load_up_to(x + k, width - k);
    squares = fma(value, value, squares);
  }
  const float scale = 1.0f / __builtin_sqrtf(sum_lanes(squares) / static_cast<float>(width) + args.epsilon);
  for (int64_t k = 0; k < width; k += kLanes) {
    const int64_t left = width - k;
    const vf z = load_up_to(gate + k, left);
    const vf value = load_up_to(x + k, left) * scale * load_up_to(args.weight + k, left) * (z * sigmoid(z));
    if (left >= kLanes)
      store(out + k, value);
    else
      store_some(out + k, value, left);
  }
}

void gated_norm(const GatedNormArgs& args, const Step& step, Team& team) {
  const float *x = step.at(args.x), *gate = step.at(args.gate);
  float* out = step.at(args.out);
  for (int64_t t = team.take(); t < step.rows; t = team.take())
    for (int64_t h = 0; h < args.heads; ++h)
      gated_norm_head(args, x + t * args.x.stride + h * args.width, gate + t * args.gate.stride + h * args.width,
                      out + t * args.out.stride + h * args.width);
}

}  // namespace

extern const StateKernels kStates;
const StateKernels kStates = {convolve, keep_inputs, delta, gated_norm};

}  // namespace quire::QUIRE_ISA
