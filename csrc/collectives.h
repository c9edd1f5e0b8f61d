// Sums and gathered columns of ranks that are processes of one host, over memory that all of them have mapped.
//
// Every rank calls the same collectives in the same order, for the same numbers of rows and columns. Sums go over the
// ranks in their order, so that all hold the same bits, and a row's are its own. Values go through slots, one of each
// rank, in pieces that fit. There are two sets of slots: a rank that is at a piece knows that all have read the one
// before the last, so that one meeting a piece is enough.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "kernels.h"

namespace quire {

// Neighbouring ranks of a group.
struct Peers {
  int first = 0;
  int count = 1;
};

class SharedRanks {
 public:
  // Floats of a slot.
  static constexpr int64_t kSlot = int64_t{1} << 18;

  // Bytes of the memory, which is zero at first.
  static std::size_t bytes(int ranks) noexcept;

  // memory: page-aligned; the caller keeps it. spins: looks at another rank's word before it sleeps. seconds: the longest
  // time to wait for a rank. Throws std::invalid_argument for a rank that is none of `ranks`.
  SharedRanks(std::byte* memory, int rank, int ranks, int spins, double seconds);

  int rank() const noexcept { return rank_; }
  int ranks() const noexcept { return ranks_; }

  // out = the sum of the ranks' x, [rows, width] each; out may be x.
  void all_reduce(const float* x, int64_t x_stride, float* out, int64_t out_stride, int64_t rows, int64_t width,
                  Team& team) noexcept;

  // out, [rows, width] = the x of `peers` side by side: ceil(width / peers.count) columns of each, fewer of the last ones.
  void all_gather(const float* x, int64_t x_stride, float* out, int64_t out_stride, int64_t rows, int64_t width,
                  Peers peers, Team& team) noexcept;

  // out, [rows, num_heads * head_dim] = what this rank's heads come to over the tokens of all peers, added in their order.
  // x: [rows, heads * head_dim + heads], of the heads of all peers: results over this rank's tokens, then the logarithms of
  // the sums of their weights.
  void merge_parts(const float* x, int64_t x_stride, float* out, int64_t out_stride, int64_t rows, int64_t num_heads,
                   int64_t head_dim, Peers peers, Team& team) noexcept;

  // out, [sum of the others' counts, width] = the others' x in the order of the ranks. x: [counts[rank], width]. counts: of
  // all ranks, the same on each; width: at most kSlot.
  void gather_others(const float* x, int64_t x_stride, float* out, int64_t out_stride, const int64_t* counts, int64_t width,
                     Team& team) noexcept;

  // The neighbours among which this rank is, where every `count` ranks are a group (0: all).
  Peers peers(int count) const;

  // Returns when all threads of all ranks are there: what each wrote before is then seen by all. false: a rank has not come.
  bool meet(Team& team) noexcept;

  // Throws std::runtime_error when a rank has not come in time: what collectives have given since then is void.
  void check() const;

 private:
  struct alignas(64) Word {
    std::atomic<uint32_t> meetings;  // that this rank has come to
    std::atomic<uint32_t> sleepers;  // ranks that must be woken
  };

  float* slot(uint32_t meeting, int rank) const noexcept;
  // Returns when all ranks have come to this rank's next meeting; false: one has not.
  bool meet() noexcept;
  bool await(Word& word, uint32_t meeting) noexcept;

  Word* words_;
  float* slots_;
  int rank_;
  int ranks_;
  int spins_;
  double seconds_;
  uint32_t meeting_ = 0;
  std::atomic<bool> failed_{false};
};

// out = the sum of the ranks' x.
struct AllReduceArgs {
  std::shared_ptr<SharedRanks> ranks;
  int64_t width = 0;
  Ref x;
  Ref out;  // may be the same place as x
};

// out, `width` wide = the peers' x side by side.
struct AllGatherArgs {
  std::shared_ptr<SharedRanks> ranks;
  Peers peers;
  int64_t width = 0;
  Ref x;
  Ref out;
};

// SharedRanks::merge_parts.
struct MergePartsArgs {
  std::shared_ptr<SharedRanks> ranks;
  Peers peers;
  int64_t num_heads = 0;  // of each rank
  int64_t head_dim = 0;
  Ref x;
  Ref out;
};

void all_reduce(const AllReduceArgs& args, const Step& step, Team& team);
void all_gather(const AllGatherArgs& args, const Step& step, Team& team);
void merge_parts(const MergePartsArgs& args, const Step& step, Team& team);

}  // namespace quire
