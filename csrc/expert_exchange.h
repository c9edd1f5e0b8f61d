// Experts of a layer that ranks of several replicas share: each replica brings rows of its own, as many as it has, or none.
//
// Every rank holds whole experts. In a round each replica lays up to `rows` of its rows into memory that all ranks have
// mapped, with their routing; each rank computes the results of its own experts over the rows of all replicas and leaves
// them there apart; then each replica adds up those of its rows in the order of the experts' numbers, which has the bits of
// one rank. The replica with the most rows says how many rounds there are. Two meetings a round are enough: rows are
// written when all have computed those before, results when all have read theirs.
#pragma once

#include <memory>
#include <vector>

#include "collectives.h"

namespace quire {

// Sizes that are alike on every rank. tp: ranks of a replica, which bring the same rows. rows: of a replica in a round.
// width, top_k: the most of any layer.
struct ExchangeShape {
  int64_t replicas = 1;
  int64_t tp = 1;
  int64_t rows = 1;
  int64_t width = 0;
  int64_t top_k = 0;
};

class ExpertExchange {
 public:
  // Bytes of the memory, which is zero at first. Throws std::invalid_argument for sizes below 1, or too many replicas.
  static std::size_t bytes(const ExchangeShape& shape);

  // memory: page-aligned; the caller keeps it. rank: of the ranks of all replicas, whose ranks are neighbours. spins,
  // seconds: as SharedRanks has them.
  ExpertExchange(std::byte* memory, const ExchangeShape& shape, int rank, int spins, double seconds);

  int rank() const noexcept { return rank_; }
  const ExchangeShape& shape() const noexcept { return shape_; }
  int64_t replica() const noexcept { return rank_ / shape_.tp; }
  bool lays_rows() const noexcept { return rank_ % shape_.tp == 0; }
  std::byte* memory() const noexcept { return memory_; }

  // From now on the other ranks take part. Before, a run computes with this rank's experts alone, for its time and memory:
  // what it gives is void.
  void open() noexcept { is_open_ = true; }
  bool is_open() const noexcept { return is_open_; }

  // Rows of each replica's step, [replicas].
  int64_t& count(int64_t replica) const noexcept;
  // Bytes from `memory` on: rows of a replica, [rows, stride] each; results of a rank, [replicas, rows, top_k * width].
  int64_t x(int64_t replica, int64_t stride) const noexcept;
  int64_t routing(int64_t replica, int64_t stride) const noexcept;
  int64_t results(int64_t rank) const noexcept;

  // Returns when all threads of all ranks are there; false: a rank has not come.
  bool meet(Team& team) noexcept;
  void check() const { ranks_.check(); }

 private:
  SharedRanks ranks_;
  std::byte* memory_;
  ExchangeShape shape_;
  int rank_;
  bool is_open_ = false;
};

// out = residual + the weighted sum of what each row's experts give for x, wherever they are.
struct ExchangeArgs {
  std::shared_ptr<ExpertExchange> exchange;
  ExpertsArgs experts;  // apart; its refs are into the exchange's memory
  std::shared_ptr<const std::vector<const float*>> holders;  // by an expert's number: results of its rank, of this replica's rows
  void (*compute)(const ExpertsArgs&, const Step&, Team&) = nullptr;
  void (*add)(const AddExpertsArgs&, const Step&, Team&) = nullptr;
  int64_t* counts = nullptr;  // as ExpertsArgs has them, of this replica's rows
  Ref x;
  Ref routing;
  Ref residual;  // may be the same place as out
  Ref out;
};

// Sets what follows from the rest: refs, holders. ranks: of each expert, by its number.
void place_exchange(ExchangeArgs& args, const std::vector<int64_t>& ranks);

void exchange_experts(const ExchangeArgs& args, const Step& step, Team& team);

}  // namespace quire
