// Sampling over the vocabulary: the Python side. Arrays come as arrays, not as addresses: their types, their shapes and
// what they are used to index are checked here, for a tenth of a microsecond each.
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#include "bindings.h"
#include "isa.h"
#include "pool.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace quire {
namespace {

// Less work than this, in elements of logits, is done by the calling thread: waking the others takes longer.
constexpr int64_t kWorthSharing = int64_t{1} << 20;
// How much dearer than looking for the largest score a draw and a ranking are.
constexpr int64_t kDrawCost = 4;
constexpr int64_t kRankCost = 4;

using Memory = std::unique_ptr<std::byte, void (*)(void*)>;

Memory allocate(std::size_t bytes) {
  auto* memory = static_cast<std::byte*>(std::aligned_alloc(64, (bytes + 63) / 64 * 64));
  if (memory == nullptr) throw std::bad_alloc();
  return Memory(memory, std::free);
}

template <class T>
using Column = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using Matrix = nb::ndarray<T, nb::ndim<2>, nb::device::cpu>;

template <class T>
using Table = nb::ndarray<T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

void require(bool condition, const char* what) {
  if (!condition) throw std::invalid_argument(what);
}

// All of `values` in [0, end).
void require_below(const int64_t* values, int64_t count, int64_t end, const char* what) {
  for (int64_t i = 0; i < count; ++i) require(values[i] >= 0 && values[i] < end, what);
}

// Rows may lie apart, the elements of a row may not.
template <class T>
void require_rows(const Matrix<T>& matrix) {
  require(matrix.shape(1) > 0, "rows without elements");
  require(matrix.shape(0) == 0 || matrix.shape(1) == 1 || matrix.stride(1) == 1, "the elements of a row lie apart");
}

// Makes impossible what the masks of some rows do not allow.
struct MaskArgs {
  float* scores = nullptr;  // [., vocab_size], rows `stride` apart
  int64_t stride = 0;
  int64_t vocab_size = 0;
  int64_t count = 0;                 // of masks
  const int64_t* indices = nullptr;  // [count]: the row of each mask
  const uint32_t* words = nullptr;   // [count, words of a mask]: token t at bit t % 32 of word t / 32
};

constexpr int64_t kWordBits = 32;

// Most words of a mask are all ones, where nothing is to do, or all zeros. Memory is what limits it, not the processor:
// it needs no copy for each instruction set.
void keep_masked(const MaskArgs& args, Team& team) {
  const int64_t num_words = (args.vocab_size + kWordBits - 1) / kWordBits;
  for (int64_t i = team.take(); i < args.count; i = team.take()) {
    float* row = args.scores + args.indices[i] * args.stride;
    const uint32_t* words = args.words + i * num_words;
    for (int64_t w = 0; w < num_words; ++w) {
      const int64_t here = std::min(kWordBits, args.vocab_size - w * kWordBits);
      float* scores = row + w * kWordBits;
      if (words[w] == 0) {
        std::fill(scores, scores + here, -__builtin_inff());
        continue;
      }
      for (uint32_t banned = ~words[w]; banned; banned &= banned - 1) {
        const int at = __builtin_ctz(banned);
        if (at < here) scores[at] = -__builtin_inff();
      }
    }
  }
}

// An argument of one call after another. Where it is the object of the last call it is not looked at again: to learn an
// array's memory takes longer, in a step whose code comes from memory, than many kernels.
template <class Array>
class Seen {
 public:
  const Array& see(nb::handle object) {
    if (object.is(object_)) return array_;
    object_ = nb::object();
    if (!nb::try_cast<Array>(object, array_, false)) throw nb::type_error("an array of another type or shape is expected");
    object_ = nb::borrow(object);
    return array_;
  }

 private:
  nb::object object_;
  Array array_;
};

// One integer for each row of scores.
class SeenColumn {
 public:
  const int64_t* see(nb::handle object, int64_t count) {
    const Column<const int64_t>& column = column_.see(object);
    require(static_cast<int64_t>(column.shape(0)) == count, "one row, length and prompt for each row of scores");
    return column.data();
  }

 private:
  Seen<Column<const int64_t>> column_;
};

// Not for two calls at a time.
class VocabularyKernels {
 public:
  VocabularyKernels(const std::string& isa, std::shared_ptr<Pool> pool)
      : kernels_(kernels_for(isa).sampling), pool_(std::move(pool)), own_(allocate(kThreadScratch)) {}

  // A token for each row of scores, -1 where a row is not sound; writes it (0 for -1) behind the row's last one in the
  // table. greedy: no row is drawn.
  std::vector<int64_t> choose(nb::handle scores, nb::handle rows, nb::handle lengths, nb::handle num_prompt_tokens,
                              nb::handle table, bool greedy) {
    const Matrix<float>& logits = scores_.see(scores);
    const Table<int32_t>& tokens = table_.see(table);
    const auto count = static_cast<int64_t>(logits.shape(0)), vocab_size = static_cast<int64_t>(logits.shape(1));
    require_rows(logits);
    const int64_t *row = rows_.see(rows, count), *length = lengths_.see(lengths, count),
                  *prompt = prompts_.see(num_prompt_tokens, count);
    const auto width = static_cast<int64_t>(tokens.shape(1));
    require_below(row, count, std::min(num_rows, static_cast<int64_t>(tokens.shape(0))), "a row outside the columns");
    require_below(length, count, width, "a token outside the token table");
    if (vocab_size > prepared_for_) {
      scratch_ = allocate(kernels_.choose_scratch(vocab_size, pool_->threads()));
      prepared_for_ = vocab_size;
    }
    numbers_.resize(static_cast<std::size_t>(count));
    for (std::size_t i = 0; i < numbers_.size(); ++i) numbers_[i] = length[i] - prompt[i];
    std::vector<int64_t> chosen(static_cast<std::size_t>(count));
    const ChooseArgs args{columns,    logits.data(), logits.stride(0), count,         vocab_size,
                          row, numbers_.data(), chosen.data(), scratch_.get()};
    nb::gil_scoped_release released;
    run(kernels_.choose, args, count * vocab_size * (greedy ? 1 : kDrawCost));
    for (std::size_t i = 0; i < chosen.size(); ++i)
      tokens.data()[row[i] * width + length[i]] = static_cast<int32_t>(std::max<int64_t>(chosen[i], 0));
    return chosen;
  }

  void rank(const RankArgs& args) {
    nb::gil_scoped_release released;
    run(kernels_.rank, args, args.count * args.vocab_size * kRankCost);
  }

  void keep_masked(const MaskArgs& args) {
    nb::gil_scoped_release released;
    run(quire::keep_masked, args, args.count * args.vocab_size);
  }

  // Columns of the table that `choose` looks rows up in.
  SamplingColumns columns;
  int64_t num_rows = 0;

  float lowest_kept(const float* weights, int64_t count, double total, int64_t top_k, double top_p, float min_p) {
    return kernels_.lowest_kept(weights, count, total, top_k, top_p, min_p, own_.get());
  }

 private:
  template <class Args>
  void run(void (*kernel)(const Args&, Team&), const Args& args, int64_t work) {
    if (work < kWorthSharing) {
      TeamShared alone;
      Team team(0, 1, &alone, own_.get());
      kernel(args, team);
      return;
    }
    struct Call {
      void (*kernel)(const Args&, Team&);
      const Args& args;
    } call{kernel, args};
    pool_->run(
        [](void* argument, Team& team) {
          const Call& call = *static_cast<Call*>(argument);
          call.kernel(call.args, team);
        },
        &call);
  }

  const SamplingKernels& kernels_;
  std::shared_ptr<Pool> pool_;
  Memory own_;
  Memory scratch_{nullptr, std::free};
  int64_t prepared_for_ = 0;
  std::vector<int64_t> numbers_;
  Seen<Matrix<float>> scores_;
  Seen<Table<int32_t>> table_;
  SeenColumn rows_, lengths_, prompts_;
};

}  // namespace

void bind_sampling(nb::module_& module) {
  module.attr("MOST_RANKED") = kMostRanked;
  nb::class_<VocabularyKernels>(module, "VocabularyKernels")
      .def(nb::init<const std::string&, std::shared_ptr<Pool>>(), "isa"_a, "pool"_a)
      .def(
          "bind",
          [](VocabularyKernels& self, Column<const float> temperature, Column<const int64_t> top_k,
             Column<const double> top_p, Column<const float> min_p, Column<const uint64_t> seed) {
            const std::size_t size = temperature.shape(0);
            require(top_k.shape(0) == size && top_p.shape(0) == size && min_p.shape(0) == size && seed.shape(0) == size,
                    "columns of different lengths");
            self.num_rows = static_cast<int64_t>(size);
            self.columns = {temperature.data(), top_k.data(), top_p.data(), min_p.data(), seed.data()};
          },
          "temperature"_a.noconvert(), "top_k"_a.noconvert(), "top_p"_a.noconvert(), "min_p"_a.noconvert(),
          "seed"_a.noconvert())
      .def("choose", &VocabularyKernels::choose, "scores"_a, "rows"_a, "lengths"_a, "num_prompt_tokens"_a, "table"_a,
           "greedy"_a)
      .def(
          "rank",
          [](VocabularyKernels& self, Matrix<const float> logits, Column<const int64_t> tokens,
             Column<float> logprobs, Column<int64_t> ranks, Table<int64_t> top_tokens, Table<float> top_logprobs) {
            require_rows(logits);
            const std::size_t count = logits.shape(0), width = top_tokens.shape(1);
            require(tokens.shape(0) == count && logprobs.shape(0) == count && ranks.shape(0) == count &&
                        top_tokens.shape(0) == count && top_logprobs.shape(0) == count &&
                        top_logprobs.shape(1) == width,
                    "one token and result for each row of logits");
            require(width <= logits.shape(1) && width <= static_cast<std::size_t>(kMostRanked), "too many best tokens");
            require_below(tokens.data(), static_cast<int64_t>(count), static_cast<int64_t>(logits.shape(1)),
                          "a token outside the vocabulary");
            self.rank(RankArgs{logits.data(), logits.stride(0), static_cast<int64_t>(logits.shape(0)),
                               static_cast<int64_t>(logits.shape(1)), tokens.data(),
                               static_cast<int64_t>(top_tokens.shape(1)), logprobs.data(), ranks.data(),
                               top_tokens.data(), top_logprobs.data()});
          },
          "logits"_a.noconvert(), "tokens"_a.noconvert(), "logprobs"_a.noconvert(), "ranks"_a.noconvert(),
          "top_tokens"_a.noconvert(), "top_logprobs"_a.noconvert())
      .def(
          "keep_masked",
          [](VocabularyKernels& self, Matrix<float> scores, Column<const int64_t> indices, Table<const uint32_t> words) {
            require_rows(scores);
            const auto vocab_size = static_cast<int64_t>(scores.shape(1));
            require(indices.shape(0) == words.shape(0), "one index for each mask");
            require(static_cast<int64_t>(words.shape(1)) == (vocab_size + kWordBits - 1) / kWordBits,
                    "a mask has a bit for each token");
            require_below(indices.data(), static_cast<int64_t>(indices.shape(0)), static_cast<int64_t>(scores.shape(0)),
                          "a mask for a row that is not there");
            self.keep_masked(MaskArgs{scores.data(), scores.stride(0), vocab_size,
                                      static_cast<int64_t>(indices.shape(0)), indices.data(), words.data()});
          },
          "scores"_a.noconvert(), "indices"_a.noconvert(), "words"_a.noconvert())
      .def(
          "lowest_kept",
          [](VocabularyKernels& self, Column<const float> weights, double total, int64_t top_k, double top_p,
             float min_p) {
            const auto count = static_cast<int64_t>(weights.shape(0));
            return self.lowest_kept(weights.data(), count, total, top_k, top_p, min_p);
          },
          "weights"_a.noconvert(), "total"_a, "top_k"_a, "top_p"_a, "min_p"_a);
}

}  // namespace quire
