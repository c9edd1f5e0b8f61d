#include "collectives.h"

#include <algorithm>
#include <chrono>
#include <climits>
#include <cmath>
#include <cstring>
#include <new>
#include <stdexcept>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#endif

namespace quire {
namespace {

static_assert(std::atomic<uint32_t>::is_always_lock_free && sizeof(std::atomic<uint32_t>) == 4);

// std::atomic's own wait looks for sleepers of one process alone, so these are the system's calls.
void sleep_on(std::atomic<uint32_t>& word, uint32_t value, double seconds) noexcept {
#if defined(__linux__)
  const auto whole = static_cast<time_t>(seconds);
  const timespec longest{whole, static_cast<long>((seconds - static_cast<double>(whole)) * 1e9)};
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, value, &longest, nullptr, 0);
#else
  static_cast<void>(word), static_cast<void>(value), static_cast<void>(seconds);
#endif
}

void wake_all(std::atomic<uint32_t>& word) noexcept {
#if defined(__linux__)
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
#else
  static_cast<void>(word);
#endif
}

// Columns are shared out among threads by whole cache lines.
struct Columns {
  int64_t first, last;
};

Columns columns_of(const Team& team, int64_t width) noexcept {
  constexpr int64_t kLine = 16;
  const int64_t lines = (width + kLine - 1) / kLine, each = (lines + team.count() - 1) / team.count() * kLine;
  return {std::min(width, team.index() * each), std::min(width, (team.index() + 1) * each)};
}

// Rows and columns at a time, so that they fit into a slot.
struct Piece {
  int64_t rows, columns;
};

Piece piece_of(int64_t rows, int64_t width) noexcept {
  const int64_t columns = std::min(width, SharedRanks::kSlot);
  return {std::max<int64_t>(1, std::min(rows, SharedRanks::kSlot / std::max<int64_t>(1, columns))), columns};
}

}  // namespace

std::size_t SharedRanks::bytes(int ranks) noexcept {
  return static_cast<std::size_t>(ranks) * (sizeof(Word) + 2 * kSlot * sizeof(float));
}

SharedRanks::SharedRanks(std::byte* memory, int rank, int ranks, int spins, double seconds)
    : words_(reinterpret_cast<Word*>(memory)),
      slots_(reinterpret_cast<float*>(memory + static_cast<std::size_t>(ranks) * sizeof(Word))),
      rank_(rank), ranks_(ranks), spins_(spins), seconds_(seconds) {
  if (rank < 0 || rank >= ranks) throw std::invalid_argument("a rank is one of its group");
}

float* SharedRanks::slot(uint32_t meeting, int rank) const noexcept {
  return slots_ + ((meeting & 1) * ranks_ + rank) * kSlot;
}

bool SharedRanks::await(Word& word, uint32_t meeting) noexcept {
  const auto has_come = [&](uint32_t seen) { return static_cast<int32_t>(seen - meeting) >= 0; };
  for (int spin = 0; spin < spins_; ++spin) {
    if (has_come(word.meetings.load(std::memory_order_acquire))) return true;
    pause_core();
  }
  const auto start = std::chrono::steady_clock::now();
  word.sleepers.fetch_add(1, std::memory_order_seq_cst);
  uint32_t seen;
  while (!has_come(seen = word.meetings.load(std::memory_order_seq_cst))) {
    const double waited = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    if (waited >= seconds_) break;
    sleep_on(word.meetings, seen, seconds_ - waited);
  }
  word.sleepers.fetch_sub(1, std::memory_order_relaxed);
  return has_come(seen);
}

bool SharedRanks::meet() noexcept {
  Word& own = words_[rank_];
  own.meetings.store(++meeting_, std::memory_order_seq_cst);
  if (own.sleepers.load(std::memory_order_seq_cst) > 0) wake_all(own.meetings);
  for (int rank = 0; rank < ranks_; ++rank)
    if (rank != rank_ && !await(words_[rank], meeting_)) return false;
  return true;
}

bool SharedRanks::meet(Team& team) noexcept {
  team.barrier();
  if (team.index() == 0 && !meet()) failed_.store(true, std::memory_order_relaxed);
  team.barrier();
  return !failed_.load(std::memory_order_relaxed);
}

void SharedRanks::all_reduce(const float* x, int64_t x_stride, float* out, int64_t out_stride, int64_t rows,
                             int64_t width, Team& team) noexcept {
  const Piece piece = piece_of(rows, width);
  for (int64_t row = 0; row < rows; row += piece.rows) {
    for (int64_t column = 0; column < width; column += piece.columns) {
      if (failed_.load(std::memory_order_relaxed)) return;
      const int64_t count = std::min(piece.rows, rows - row), wide = std::min(piece.columns, width - column);
      const auto [first, last] = columns_of(team, wide);
      const uint32_t meeting = meeting_;
      float* own = slot(meeting, rank_);
      const std::size_t size = static_cast<std::size_t>(last - first) * sizeof(float);
      for (int64_t t = 0; t < count; ++t)
        std::memcpy(own + t * wide + first, x + (row + t) * x_stride + column + first, size);
      if (!meet(team)) return;
      for (int64_t t = 0; t < count; ++t) {
        float* to = out + (row + t) * out_stride + column;
        const float* one = slot(meeting, 0) + t * wide;
        const float* two = slot(meeting, std::min(1, ranks_ - 1)) + t * wide;
        if (ranks_ == 1)
          std::memcpy(to + first, one + first, size);
        else
          for (int64_t i = first; i < last; ++i) to[i] = one[i] + two[i];
        for (int rank = 2; rank < ranks_; ++rank) {
          const float* part = slot(meeting, rank) + t * wide;
          for (int64_t i = first; i < last; ++i) to[i] += part[i];
        }
      }
    }
  }
}

void SharedRanks::all_gather(const float* x, int64_t x_stride, float* out, int64_t out_stride, int64_t rows,
                             int64_t width, Peers peers, Team& team) noexcept {
  const int64_t share = (width + peers.count - 1) / peers.count;
  const auto held = [&](int peer) { return std::clamp<int64_t>(width - peer * share, 0, share); };
  const Piece piece = piece_of(rows, share);
  for (int64_t row = 0; row < rows; row += piece.rows) {
    for (int64_t column = 0; column < share; column += piece.columns) {
      if (failed_.load(std::memory_order_relaxed)) return;
      const int64_t count = std::min(piece.rows, rows - row), wide = std::min(piece.columns, share - column);
      const auto [first, last] = columns_of(team, wide);
      const uint32_t meeting = meeting_;
      const auto copy = [&](int peer, auto&& each) {
        const int64_t end = std::min(last, held(peer) - column);
        if (first < end)
          for (int64_t t = 0; t < count; ++t) each(t, static_cast<std::size_t>(end - first) * sizeof(float));
      };
      float* own = slot(meeting, rank_);
      copy(rank_ - peers.first, [&](int64_t t, std::size_t size) {
        std::memcpy(own + t * wide + first, x + (row + t) * x_stride + column + first, size);
      });
      if (!meet(team)) return;
      for (int peer = 0; peer < peers.count; ++peer) {
        const float* part = slot(meeting, peers.first + peer);
        copy(peer, [&](int64_t t, std::size_t size) {
          std::memcpy(out + (row + t) * out_stride + peer * share + column + first, part + t * wide + first, size);
        });
      }
    }
  }
}

void SharedRanks::merge_parts(const float* x, int64_t x_stride, float* out, int64_t out_stride, int64_t rows,
                              int64_t num_heads, int64_t head_dim, Peers peers, Team& team) noexcept {
  const int64_t heads = peers.count * num_heads, wide = heads * (head_dim + 1), own_head = (rank_ - peers.first) * num_heads;
  const int64_t most = std::max<int64_t>(1, kSlot / wide);
  for (int64_t row = 0; row < rows; row += most) {
    if (failed_.load(std::memory_order_relaxed)) return;
    const int64_t count = std::min(most, rows - row);
    const auto [first, last] = columns_of(team, wide);
    const uint32_t meeting = meeting_;
    for (int64_t t = 0; t < count; ++t)
      std::memcpy(slot(meeting, rank_) + t * wide + first, x + (row + t) * x_stride + first,
                  static_cast<std::size_t>(last - first) * sizeof(float));
    if (!meet(team)) return;
    const int64_t items = count * num_heads;
    for (int64_t i = items * team.index() / team.count(); i < items * (team.index() + 1) / team.count(); ++i) {
      const int64_t t = i / num_heads, head = own_head + i % num_heads;
      const auto part = [&](int peer) { return slot(meeting, peers.first + peer) + t * wide; };
      const auto sum = [&](int peer) { return part(peer)[heads * head_dim + head]; };
      float top = sum(0), total = 0;
      for (int peer = 1; peer < peers.count; ++peer) top = sum(peer) > top ? sum(peer) : top;
      const auto weight = [&](int peer) { return static_cast<float>(std::exp(static_cast<double>(sum(peer) - top))); };
      for (int peer = 0; peer < peers.count; ++peer) total += weight(peer);
      float* to = out + (row + t) * out_stride + i % num_heads * head_dim;
      for (int peer = 0; peer < peers.count; ++peer) {
        const float factor = weight(peer) / total;
        const float* from = part(peer) + head * head_dim;
        for (int64_t d = 0; d < head_dim; ++d) to[d] = peer == 0 ? factor * from[d] : to[d] + factor * from[d];
      }
    }
  }
}

void SharedRanks::gather_others(const float* x, int64_t x_stride, float* out, int64_t out_stride, const int64_t* counts,
                                int64_t width, Team& team) noexcept {
  const int64_t longest = *std::max_element(counts, counts + ranks_), most = std::max<int64_t>(1, kSlot / width);
  const auto [first, last] = columns_of(team, width);
  const std::size_t size = static_cast<std::size_t>(last - first) * sizeof(float);
  for (int64_t row = 0; row < longest; row += most) {
    if (failed_.load(std::memory_order_relaxed)) return;
    const auto held = [&](int rank) { return std::clamp<int64_t>(counts[rank] - row, 0, most); };
    const uint32_t meeting = meeting_;
    float* own = slot(meeting, rank_);
    for (int64_t t = 0; t < held(rank_); ++t)
      std::memcpy(own + t * width + first, x + (row + t) * x_stride + first, size);
    if (!meet(team)) return;
    float* to = out + row * out_stride;
    for (int rank = 0; rank < ranks_; ++rank) {
      if (rank == rank_) continue;
      const float* part = slot(meeting, rank);
      for (int64_t t = 0; t < held(rank); ++t)
        std::memcpy(to + t * out_stride + first, part + t * width + first, size);
      to += counts[rank] * out_stride;
    }
  }
}

Peers SharedRanks::peers(int count) const {
  if (count == 0) return {0, ranks_};
  if (count < 1 || ranks_ % count != 0) throw std::invalid_argument("groups of ranks that do not divide them");
  return {rank_ / count * count, count};
}

void SharedRanks::check() const {
  if (failed_.load(std::memory_order_relaxed))
    throw std::runtime_error("a rank has not come to a sum of all ranks in time");
}

void all_reduce(const AllReduceArgs& args, const Step& step, Team& team) {
  args.ranks->all_reduce(step.at(args.x), args.x.stride, step.at(args.out), args.out.stride, step.rows, args.width, team);
}

void all_gather(const AllGatherArgs& args, const Step& step, Team& team) {
  args.ranks->all_gather(step.at(args.x), args.x.stride, step.at(args.out), args.out.stride, step.rows, args.width, args.peers,
                         team);
}

void merge_parts(const MergePartsArgs& args, const Step& step, Team& team) {
  args.ranks->merge_parts(step.at(args.x), args.x.stride, step.at(args.out), args.out.stride, step.rows, args.num_heads,
                          args.head_dim, args.peers, team);
}

}  // namespace quire
