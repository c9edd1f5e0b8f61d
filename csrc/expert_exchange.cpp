#include "expert_exchange.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace quire {
namespace {

constexpr int64_t kFloat = sizeof(float), kLine = 64, kRowElements = 16;

int64_t padded(int64_t width) { return (width + kRowElements - 1) / kRowElements * kRowElements; }

struct Places {
  int64_t counts, x, routing, results, end;

  explicit Places(const ExchangeShape& shape) {
    const int64_t rows = shape.replicas * shape.rows;
    counts = static_cast<int64_t>(SharedRanks::bytes(static_cast<int>(shape.replicas * shape.tp)));
    x = counts + shape.replicas * kLine;
    routing = x + rows * padded(shape.width) * kFloat;
    results = routing + rows * padded(2 * shape.top_k) * kFloat;
    end = results + shape.replicas * shape.tp * rows * shape.top_k * shape.width * kFloat;
  }
};

Ref moved(Ref ref, int64_t rows) {
  ref.offset += rows * ref.stride * kFloat;
  return ref;
}

}  // namespace

std::size_t ExpertExchange::bytes(const ExchangeShape& shape) {
  if (shape.replicas < 1 || shape.replicas > kMaxRuns || shape.tp < 1 || shape.rows < 1 || shape.width < 1 || shape.top_k < 1)
    throw std::invalid_argument("an exchange of rows needs sizes of at least 1, and few replicas");
  return static_cast<std::size_t>(Places(shape).end);
}

ExpertExchange::ExpertExchange(std::byte* memory, const ExchangeShape& shape, int rank, int spins, double seconds)
    : ranks_(memory, rank, static_cast<int>(shape.replicas * shape.tp), spins, seconds), memory_(memory), shape_(shape),
      rank_(rank) {
  bytes(shape);
}

int64_t& ExpertExchange::count(int64_t replica) const noexcept {
  return *reinterpret_cast<int64_t*>(memory_ + Places(shape_).counts + replica * kLine);
}

int64_t ExpertExchange::x(int64_t replica, int64_t stride) const noexcept {
  return Places(shape_).x + replica * shape_.rows * stride * kFloat;
}

int64_t ExpertExchange::routing(int64_t replica, int64_t stride) const noexcept {
  return Places(shape_).routing + replica * shape_.rows * stride * kFloat;
}

int64_t ExpertExchange::results(int64_t rank) const noexcept {
  return Places(shape_).results + rank * shape_.replicas * shape_.rows * shape_.top_k * shape_.width * kFloat;
}

bool ExpertExchange::meet(Team& team) noexcept {
  if (is_open_) return ranks_.meet(team);
  team.barrier();
  return true;
}

void place_exchange(ExchangeArgs& args, const std::vector<int64_t>& ranks) {
  const ExpertExchange& exchange = *args.exchange;
  const ExchangeShape& shape = exchange.shape();
  ExpertsArgs& experts = args.experts;
  const int64_t width = experts.table->down.empty() ? 0 : experts.table->down[0].out_features, top_k = experts.top_k;
  const auto is_rank = [&](int64_t rank) { return 0 <= rank && rank < shape.replicas * shape.tp; };
  if (width > shape.width || top_k > shape.top_k || static_cast<int64_t>(ranks.size()) != experts.num_placed ||
      !std::all_of(ranks.begin(), ranks.end(), is_rank))
    throw std::invalid_argument("experts that do not fit their exchange");
  const int64_t of_x = padded(width), of_routing = padded(2 * top_k), of_results = top_k * width;
  experts.apart = true;
  experts.residual = {};
  experts.x = {kExchangeArea, 0, exchange.x(0, of_x), of_x};
  experts.routing = {kExchangeArea, 0, exchange.routing(0, of_routing), of_routing};
  experts.out = {kExchangeArea, 0, exchange.results(exchange.rank()), of_results};
  auto holders = std::make_shared<std::vector<const float*>>();
  for (const int64_t rank : ranks)
    holders->push_back(reinterpret_cast<const float*>(exchange.memory() + exchange.results(rank)) +
                       exchange.replica() * shape.rows * of_results);
  args.holders = std::move(holders);
}

void exchange_experts(const ExchangeArgs& args, const Step& step, Team& team) {
  ExpertExchange& exchange = *args.exchange;
  const ExchangeShape& shape = exchange.shape();
  const ExpertsArgs& experts = args.experts;
  const int64_t replica = exchange.replica(), top_k = experts.top_k, width = experts.table->down[0].out_features;
  const auto lay = [&](const Ref& from, const Ref& to, int64_t columns, int64_t first, int64_t rows) {
    const float* source = step.at(from) + first * from.stride;
    float* target = reinterpret_cast<float*>(exchange.memory() + to.offset) + replica * shape.rows * to.stride;
    for (int64_t t = team.index(); t < rows; t += team.count())
      std::memcpy(target + t * to.stride, source + t * from.stride, static_cast<std::size_t>(columns * kFloat));
  };
  if (args.counts != nullptr && team.index() == 0) {
    const float* routing = step.at(args.routing);
    for (int64_t t = 0; t < step.rows; ++t)
      for (int64_t place = 0; place < top_k; ++place)
        ++args.counts[expert_number(routing[t * args.routing.stride + place], experts.num_placed)];
  }
  int64_t longest = 0, first = 0;
  do {
    const int64_t own = std::clamp<int64_t>(step.rows - first, 0, shape.rows);
    if (exchange.lays_rows() && own > 0) {
      lay(args.x, experts.x, width, first, own);
      lay(args.routing, experts.routing, 2 * top_k, first, own);
    }
    if (exchange.lays_rows() && team.index() == 0) exchange.count(replica) = step.rows;
    if (!exchange.meet(team)) return;
    RowRuns runs;
    runs.count = shape.replicas;
    runs.distance = shape.rows;
    Step all = step;
    all.areas[kExchangeArea] = exchange.memory();
    all.runs = &runs;
    all.rows = 0;
    for (int64_t each = 0; each < shape.replicas; ++each) {
      const int64_t total = exchange.is_open() ? exchange.count(each) : each == replica ? step.rows : 0;
      longest = std::max(longest, total);
      runs.rows[each] = std::clamp<int64_t>(total - first, 0, shape.rows);
      all.rows += runs.rows[each];
    }
    args.compute(experts, all, team);
    if (!exchange.meet(team)) return;
    Step mine = step;
    mine.rows = own;
    AddExpertsArgs add;
    add.top_k = top_k;
    add.weighs_input = experts.weighs_input;
    add.width = width;
    add.parts.stride = top_k * width;
    add.holders = args.holders.get();
    add.routing = moved(args.routing, first);
    add.residual = moved(args.residual, first);
    add.out = moved(args.out, first);
    args.add(add, mine, team);
    first += shape.rows;
  } while (first < longest);
}

}  // namespace quire
