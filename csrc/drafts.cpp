// Drafts by looking up a sequence's last tokens in texts: quire/worker/finders.py has the rules, plain_texts.py says what is found.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <vector>

#include "bindings.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace quire {
namespace {

using Integers = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Counts = nb::ndarray<int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Text = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Tokens = nb::ndarray<int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

constexpr int64_t kMostPlaces = 4;       // of a row's text, and of its corpus, that are looked at, as finders.py has it
constexpr int64_t kMostLooks = 512;      // places of one hash: a text that repeats a few tokens for ever has many
constexpr int64_t kPredictedMatch = 64;  // tokens that a place in a prediction is compared by, at most
const std::vector<int64_t> kRuns{2, 4};  // lengths of the runs by which places in texts of others are found

// The tokens that `a` and `b` (one behind the last of each) have in common at their ends, at most `most`.
int64_t common_end(const int32_t* a, const int32_t* b, int64_t most) {
  int64_t count = 0;
  while (count < most && a[-1 - count] == b[-1 - count]) ++count;
  return count;
}

// Where runs of tokens end in a text that grows: for each of a few lengths the latest place of a run with some hash, and
// before each place the one before it. 8 bytes for a token and a length; a token is entered once.
class Index {
 public:
  explicit Index(const std::vector<int64_t>& lengths) : chains_(lengths.size()) {
    for (std::size_t i = 0; i < lengths.size(); ++i) chains_[i].length = lengths[i];
  }

  int64_t size() const { return size_; }
  int64_t num_bytes() const { return capacity_ * 8 * static_cast<int64_t>(chains_.size()); }

  void forget() {
    size_ = capacity_ = 0;
    for (Chain& each : chains_) each = Chain{each.length, {}, {}};
  }

  // Enter the tokens up to `size`; those before are what they were.
  void extend(const int32_t* tokens, int64_t size) {
    if (size > capacity_) {
      capacity_ = 256;
      while (capacity_ < size) capacity_ *= 2;
      size_ = 0;
      for (Chain& each : chains_) {
        each.latest.assign(capacity_, 0);
        each.before.resize(capacity_);
      }
    }
    for (int64_t end = size_ + 1; end <= size; ++end) {
      uint64_t hash = 0;
      int64_t length = 0;
      for (Chain& each : chains_) {
        if (each.length > end) break;
        hash = hash_of(hash, tokens + end, length, each.length);
        int32_t& latest = each.latest[slot(hash)];
        each.before[end - 1] = latest;
        latest = static_cast<int32_t>(end);
      }
    }
    if (size > size_) size_ = size;
  }

  std::size_t num_chains() const { return chains_.size(); }
  int64_t length_of(std::size_t chain) const { return chains_[chain].length; }

  // The latest place where a run with the hash of that before `end` ends; 0: there is none.
  int64_t latest(std::size_t chain, const int32_t* end) const {
    if (!capacity_) return 0;
    return chains_[chain].latest[slot(hash_of(0, end, 0, chains_[chain].length))];
  }
  int64_t before(std::size_t chain, int64_t place) const { return chains_[chain].before[place - 1]; }

  // Begin to load what `latest` reads; then what follows from that.
  void prefetch_latest(const int32_t* end, int64_t length) const {
    for (const Chain& each : chains_)
      if (capacity_ && each.length <= length) __builtin_prefetch(&each.latest[slot(hash_of(0, end, 0, each.length))]);
  }
  void prefetch_places(const int32_t* text, const int32_t* end, int64_t length) const {
    for (std::size_t chain = 0; chain < chains_.size(); ++chain) {
      const int64_t place = chains_[chain].length <= length ? latest(chain, end) : 0;
      if (!place) continue;
      __builtin_prefetch(text + place - 1);
      __builtin_prefetch(&chains_[chain].before[place - 1]);
    }
  }

 private:
  struct Chain {
    int64_t length = 0;
    std::vector<int32_t> latest{}, before{};
  };

  static uint64_t hash_of(uint64_t hash, const int32_t* end, int64_t& length, int64_t most) {
    for (; length < most; ++length) hash = (hash + static_cast<uint32_t>(end[-1 - length]) + 1) * 0x9E3779B97F4A7C15u;
    return hash;
  }
  static uint64_t hash_of(uint64_t hash, const int32_t* end, int64_t&& length, int64_t most) {
    return hash_of(hash, end, length, most);
  }
  std::size_t slot(uint64_t hash) const { return (hash ^ hash >> 29) & static_cast<uint64_t>(capacity_ - 1); }

  std::vector<Chain> chains_;
  int64_t size_ = 0, capacity_ = 0;
};

struct Place {
  int64_t end = 0, count = 0;  // tokens before it; of them, those that the sequence has at its end, too
};

// The place with the longest run of a sequence's last tokens (one behind the last: `tail`), `most` at most, in a text; of
// several the latest. count 0: no run of the index's shortest length is there.
Place longest_run(const Index& index, const int32_t* text, const int32_t* tail, int64_t most) {
  Place found;
  for (std::size_t chain = index.num_chains(), above = chain; chain-- > 0; above = chain) {
    const int64_t length = index.length_of(chain);
    if (length > most) continue;
    // No run of the next length that was looked for is there.
    const bool has_longer = above < index.num_chains() && index.length_of(above) <= most;
    const int64_t longest = has_longer ? index.length_of(above) - 1 : most;
    int64_t looks = kMostLooks;
    for (int64_t end = index.latest(chain, tail); end > 0 && looks-- > 0; end = index.before(chain, end)) {
      const int64_t count = common_end(text + end, tail, std::min(longest, end));
      if (count < length || count <= found.count) continue;
      found = {end, count};
      if (count == longest) break;
    }
    if (found.count) return found;
  }
  return found;
}

// A text that a request expects, and where in it the last drafts came from.
struct Prediction {
  std::vector<int32_t> tokens;
  Index index{kRuns};
  int64_t place = 0;

  // Of the places with the longest run the first one behind the last drafts' place, else the latest.
  Place find(const int32_t* tail, int64_t length) {
    Place found;
    for (std::size_t chain = index.num_chains(); chain-- > 0 && !found.count;) {
      const int64_t least = index.length_of(chain);
      if (least > length) continue;
      int64_t looks = kMostLooks;
      for (int64_t end = index.latest(chain, tail); end > 0 && looks-- > 0; end = index.before(chain, end)) {
        if (end == static_cast<int64_t>(tokens.size())) continue;
        const int64_t count = common_end(tokens.data() + end, tail, std::min({kPredictedMatch, end, length}));
        if (count < least || count < found.count || (count == found.count && end < place)) continue;
        found = {end, count};
      }
    }
    if (found.count) place = found.end;
    return found;
  }
};

// Outputs that have ended, of which the older half is dropped when the newer one is full.
class Corpus {
 public:
  explicit Corpus(int64_t max_tokens, int64_t max_texts) : max_tokens_(max_tokens / 2), max_texts_((max_texts + 1) / 2) {}

  void add(const Text& text) {
    const int64_t size = std::min(static_cast<int64_t>(text.size()), max_tokens_ - 1);
    if (size < 1 || max_texts_ < 1) return;
    if (static_cast<int64_t>(halves_[0].tokens.size()) + size + 1 > max_tokens_ || halves_[0].num_texts == max_texts_) {
      std::swap(halves_[0], halves_[1]);
      halves_[0] = Half();
    }
    Half& half = halves_[0];
    half.tokens.push_back(-1);  // no run goes from one text into the next
    half.tokens.insert(half.tokens.end(), text.data() + text.size() - size, text.data() + text.size());
    half.index.extend(half.tokens.data(), static_cast<int64_t>(half.tokens.size()));
    ++half.num_texts;
  }

  int64_t num_bytes() const {
    int64_t total = 0;
    for (const Half& half : halves_) total += half.index.num_bytes() + 4 * static_cast<int64_t>(half.tokens.capacity());
    return total;
  }

  struct Half {
    std::vector<int32_t> tokens;
    Index index{kRuns};
    int64_t num_texts = 0;
  };
  const Half* begin() const { return halves_; }
  const Half* end() const { return halves_ + 2; }

 private:
  Half halves_[2];  // newer, older
  int64_t max_tokens_, max_texts_;
};

// A place that drafts may come from.
struct Source {
  const int32_t* next;
  int64_t left, count;  // tokens behind it in its text; tokens before it that the sequence has, too
  bool is_own;          // in the sequence's own text, behind which the drafts follow
};

struct Rule {
  int64_t depth;
  double factor, least;
};

// The latest places in a text at which the sequence's last tokens occur, those of longer runs first, at most `most`; returns
// how many.
int64_t gather(const Index& index, const int32_t* text, int64_t size, const int32_t* tail, int64_t length, int64_t depth,
               bool is_own, int64_t most, std::vector<Source>& sources) {
  int64_t num_places = 0, above = depth + 1;
  for (std::size_t chain = index.num_chains(); chain-- > 0; above = index.length_of(chain)) {
    const int64_t least = index.length_of(chain);
    if (least > length || least > depth) continue;
    int64_t looks = kMostLooks;
    for (int64_t end = index.latest(chain, tail); end > 0 && num_places < most && looks-- > 0; end = index.before(chain, end)) {
      if (end == size) continue;
      const int64_t count = common_end(text + end, tail, std::min({depth, end, length}));
      if (count < least || count >= above) continue;
      sources.push_back({text + end, size - end, count, is_own});
      ++num_places;
    }
  }
  return num_places;
}

// Chooses the drafts with the highest score, which is the sum of their probabilities by the votes of places.
class Vote {
 public:
  std::vector<Source> sources;

  int64_t choose(const Rule& rule, int64_t width, int32_t* drafts) {
    std::stable_sort(sources.begin(), sources.end(), [](const Source& a, const Source& b) { return a.count > b.count; });
    double best = 0;
    int64_t chosen = 0;
    for (std::size_t number = 0; number < sources.size();) {
      const int64_t most_matched = sources[number].count;
      while (number < sources.size() && sources[number].count == most_matched) ++number;
      const int64_t least_matched = number < sources.size() ? sources[number].count + 1 : 1;
      int64_t limit = 0;
      for (int64_t matched = least_matched; matched <= most_matched; ++matched)
        limit = std::max(limit, std::min({width, rule.depth - matched, static_cast<int64_t>(rule.factor * matched)}));
      if (static_cast<double>(limit) <= best) continue;  // no score is higher than the number of drafts
      const double score = follow(number, limit, rule.least);
      if (score <= best) continue;
      best = score;
      chosen = static_cast<int64_t>(path_.size());
      std::copy(path_.begin(), path_.end(), drafts);
    }
    return chosen;
  }

 private:
  // The path that the first places propose; returns its score.
  double follow(std::size_t number, int64_t limit, double least) {
    alive_.clear();
    for (std::size_t i = 0; i < number; ++i) alive_.push_back(&sources[i]);
    path_.clear();
    double probability = 1, score = 0;
    while (static_cast<int64_t>(path_.size()) < limit) {
      const auto at = static_cast<int64_t>(path_.size());
      tokens_.clear();
      for (const Source* each : alive_)
        tokens_.push_back(at < each->left ? each->next[at] : each->is_own ? path_[at - each->left] : -1);
      int64_t votes = 0, most_votes = 0;
      int32_t token = -1;
      for (std::size_t i = 0; i < tokens_.size(); ++i) {
        votes += tokens_[i] >= 0;
        if (tokens_[i] < 0 || tokens_[i] == token) continue;
        const int64_t same = std::count(tokens_.begin() + static_cast<std::ptrdiff_t>(i), tokens_.end(), tokens_[i]);
        if (same > most_votes) most_votes = same, token = tokens_[i];
      }
      if (!votes) break;
      probability = probability * static_cast<double>(most_votes) / static_cast<double>(votes);
      if (probability < least) break;
      std::size_t kept = 0;
      for (std::size_t i = 0; i < alive_.size(); ++i)
        if (tokens_[i] == token) alive_[kept++] = alive_[i];
      alive_.resize(kept);
      path_.push_back(token);
      score += probability;
    }
    return score;
  }

  std::vector<const Source*> alive_;
  std::vector<int32_t> path_, tokens_;
};

// The texts of request slots, and where their last tokens occur before.
class DraftTexts {
 public:
  DraftTexts(int64_t num_rows, const std::vector<int64_t>& lengths) {
    if (lengths.empty() || lengths[0] < 1 || !std::is_sorted(lengths.begin(), lengths.end()))
      throw std::invalid_argument("ascending lengths of runs expected");
    for (int64_t row = 0; row < num_rows; ++row) rows_.push_back({Index(lengths), nullptr, nullptr});
  }

  void begin(int64_t row, std::shared_ptr<Corpus> corpus, const Text& prediction) {
    Row& each = at(row);
    each.index.forget();
    each.corpus = std::move(corpus);
    each.prediction = nullptr;
    if (!prediction.size()) return;
    each.prediction = std::make_shared<Prediction>();
    each.prediction->tokens.assign(prediction.data(), prediction.data() + prediction.size());
    each.prediction->index.extend(prediction.data(), static_cast<int64_t>(prediction.size()));
  }

  void rewrite(int64_t row, int64_t position) {
    if (position < at(row).index.size()) at(row).index.forget();
  }

  int64_t num_bytes() const {
    int64_t total = 0;
    for (const Row& row : rows_) total += row.index.num_bytes();
    return total;
  }

  int64_t find_runs(const Tokens& table, const Integers& rows, const Integers& lengths, int64_t most, const Tokens& drafts,
                    const Counts& counts) {
    return find(table, rows, lengths, drafts, counts, [&](Row& row, const int32_t* tokens, int64_t length, int32_t* out) {
      const Place place = longest_run(row.index, tokens, tokens + length, std::min(most, length - 1));
      if (!place.count) return int64_t{0};
      const auto width = static_cast<int64_t>(drafts.shape(1));
      // What follows; behind the end of the sequence that is the drafts themselves.
      for (int64_t k = 0; k < width; ++k) out[k] = place.end + k < length ? tokens[place.end + k] : out[place.end + k - length];
      return width;
    });
  }

  int64_t find_likely(const Tokens& table, const Integers& rows, const Integers& lengths, int64_t depth, double factor,
                      double least, const Tokens& drafts, const Counts& counts) {
    const Rule rule{depth, factor, least};
    return find(table, rows, lengths, drafts, counts, [&](Row& row, const int32_t* tokens, int64_t length, int32_t* out) {
      vote_.sources.clear();
      const int32_t* tail = tokens + length;
      gather(row.index, tokens, length, tail, length, depth, true, kMostPlaces, vote_.sources);
      int64_t left = kMostPlaces;
      if (row.corpus)
        for (const Corpus::Half& half : *row.corpus)
          left -= gather(half.index, half.tokens.data(), static_cast<int64_t>(half.tokens.size()), tail, length, depth,
                         false, left, vote_.sources);
      return vote_.choose(rule, static_cast<int64_t>(drafts.shape(1)), out);
    });
  }

 private:
  struct Row {
    Index index;
    std::shared_ptr<Corpus> corpus;
    std::shared_ptr<Prediction> prediction;
  };

  Row& at(int64_t row) {
    if (row < 0 || row >= static_cast<int64_t>(rows_.size())) throw std::invalid_argument("no such request slot");
    return rows_[row];
  }

  // Fills drafts[rows[i]] and counts[rows[i]]; returns the number of rows with drafts.
  template <typename Rule>
  int64_t find(const Tokens& table, const Integers& rows, const Integers& lengths, const Tokens& drafts,
               const Counts& counts, const Rule& rule) {
    const auto num_rows = static_cast<int64_t>(table.shape(0)), capacity = static_cast<int64_t>(table.shape(1));
    const auto width = static_cast<int64_t>(drafts.shape(1));
    if (rows.size() != lengths.size() || static_cast<int64_t>(drafts.shape(0)) != num_rows ||
        static_cast<int64_t>(counts.size()) != num_rows)
      throw std::invalid_argument("a length for each row, and drafts of each request slot expected");
    // What a step's pass over the weights has pushed out of the caches is loaded for all rows at once.
    for (std::size_t i = 0; i < rows.size(); ++i) {
      const int64_t row = rows.data()[i], length = lengths.data()[i];
      if (row < 0 || row >= num_rows || length < 1 || length > capacity)
        throw std::invalid_argument("tokens outside the token table");
      Row& each = at(row);
      const int32_t* tokens = table.data() + row * capacity;
      if (length - 1 < each.index.size()) each.index.forget();
      each.index.prefetch_latest(tokens + length - 1, length - 1);
      each.index.prefetch_latest(tokens + length, length);
      if (each.corpus)
        for (const Corpus::Half& half : *each.corpus) half.index.prefetch_latest(tokens + length, length);
    }
    for (std::size_t i = 0; i < rows.size(); ++i) {
      Row& each = at(rows.data()[i]);
      const int64_t length = lengths.data()[i];
      const int32_t* tokens = table.data() + rows.data()[i] * capacity;
      each.index.extend(tokens, length - 1);
      each.index.prefetch_places(tokens, tokens + length, length);
      if (each.corpus)
        for (const Corpus::Half& half : *each.corpus)
          half.index.prefetch_places(half.tokens.data(), tokens + length, length);
    }
    int64_t total = 0;
    for (std::size_t i = 0; i < rows.size(); ++i) {
      const int64_t row = rows.data()[i], length = lengths.data()[i];
      Row& each = at(row);
      const int32_t* tokens = table.data() + row * capacity;
      int32_t* out = drafts.data() + row * width;
      int64_t count = each.prediction ? predicted(*each.prediction, tokens + length, length, width, out) : 0;
      if (!count) count = rule(each, tokens, length, out);
      counts.data()[row] = count;
      total += count > 0;
    }
    return total;
  }

  static int64_t predicted(Prediction& prediction, const int32_t* tail, int64_t length, int64_t width, int32_t* out) {
    const Place place = prediction.find(tail, length);
    if (!place.count) return 0;
    const int64_t count = std::min(width, static_cast<int64_t>(prediction.tokens.size()) - place.end);
    std::copy_n(prediction.tokens.data() + place.end, count, out);
    return count;
  }

  std::vector<Row> rows_;
  Vote vote_;
};

}  // namespace

void bind_drafts(nb::module_& module) {
  nb::class_<Corpus>(module, "Corpus")
      .def(nb::init<int64_t, int64_t>(), "max_tokens"_a, "max_texts"_a)
      .def("add", &Corpus::add, "text"_a)
      .def_prop_ro("num_bytes", &Corpus::num_bytes);
  nb::class_<DraftTexts>(module, "DraftTexts")
      .def(nb::init<int64_t, const std::vector<int64_t>&>(), "num_rows"_a, "lengths"_a)
      .def("begin", &DraftTexts::begin, "row"_a, "corpus"_a.none(), "prediction"_a)
      .def("rewrite", &DraftTexts::rewrite, "row"_a, "position"_a)
      .def_prop_ro("num_bytes", &DraftTexts::num_bytes)
      .def("find_runs", &DraftTexts::find_runs, "table"_a, "rows"_a, "lengths"_a, "most"_a, "drafts"_a, "counts"_a,
           nb::call_guard<nb::gil_scoped_release>())
      .def("find_likely", &DraftTexts::find_likely, "table"_a, "rows"_a, "lengths"_a, "depth"_a, "factor"_a, "least"_a,
           "drafts"_a, "counts"_a, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace quire
