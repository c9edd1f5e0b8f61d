// One thread's view of the threads that run a kernel together. Every thread of a team calls the same kernels in the
// same order; work is taken by number, so that a thread that is held up by another process takes less of it. One that
// is held up when a run begins is not waited for: it joins at the kernel that the others have reached, or not at all.
// The thread that computes an element never changes how it is computed.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace quire {

// Between two looks at a word that another thread will change.
inline void pause_core() noexcept {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

// What the threads of one team share. Padded: the counter and the barrier are written by all of them.
struct TeamShared {
  alignas(64) std::atomic<int64_t> next{0};
  alignas(64) std::atomic<uint64_t> crew{0};  // the phase, and its threads (pool.cpp)
  alignas(64) std::atomic<uint32_t> phase{0};  // the crew's, once its `next` and `place` are set
  alignas(64) std::atomic<int32_t> sleeping{0};
  std::atomic<int64_t> place{0};  // of the kernel that this phase begins
};

class Team {
 public:
  Team(int index, int count, TeamShared* shared, std::byte* scratch) noexcept
      : index_(index), count_(count), shared_(shared), scratch_(scratch) {}

  int index() const noexcept { return index_; }
  int count() const noexcept { return count_; }

  // The first of the next `grain` work items. Items that lie at or beyond the kernel's total mean: nothing left.
  // Counting starts at 0 at the start of a run and after every barrier.
  int64_t take(int64_t grain = 1) noexcept { return shared_->next.fetch_add(grain, std::memory_order_relaxed); }

  // Returns when all threads of the run are here; what each wrote before is then seen by all. Resets `take`.
  void barrier() noexcept;

  // The number of the kernel at which this thread begins its part of a run: 0, or what the others gave to `next`.
  int64_t place() const noexcept { return count_ == 1 ? 0 : shared_->place.load(std::memory_order_relaxed); }

  // A barrier between two kernels of a run. A thread may join behind it, and begins with kernel `place`.
  void next(int64_t place) noexcept;

  // kThreadScratch bytes of this thread's own, 64-byte aligned, not initialised.
  std::byte* scratch() const noexcept { return scratch_; }

 private:
  friend class Pool;
  enum class Then { kSameKernel, kNextKernel, kEnd };
  void meet(Then then, int64_t place) noexcept;

  int index_;
  int count_;
  TeamShared* shared_;
  std::byte* scratch_;
};

inline constexpr std::size_t kThreadScratch = std::size_t{2} << 20;

}  // namespace quire
