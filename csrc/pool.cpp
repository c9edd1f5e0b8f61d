#include "pool.h"

#include <cstdlib>
#include <new>

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif

namespace quire {
namespace {

// About 50 microseconds: longer than the gap between two kernels or between the programs of one step, shorter than
// what a person or a power meter would notice of an idle server.
constexpr int kSpins = 2000;

// Waits until `word` differs from `old`, spinning first, then asleep; returns it. `sleepers` counts those who must be woken.
inline uint32_t wait_for_change(std::atomic<uint32_t>& word, uint32_t old, std::atomic<int32_t>& sleepers) noexcept {
  for (int spin = 0; spin < kSpins; ++spin) {
    if (const uint32_t now = word.load(std::memory_order_acquire); now != old) return now;
    pause_core();
  }
  sleepers.fetch_add(1, std::memory_order_seq_cst);
  uint32_t now;
  while ((now = word.load(std::memory_order_seq_cst)) == old) word.wait(old, std::memory_order_seq_cst);
  sleepers.fetch_sub(1, std::memory_order_relaxed);
  return now;
}

inline void announce(std::atomic<uint32_t>& word, std::atomic<int32_t>& sleepers) noexcept {
  word.fetch_add(1, std::memory_order_seq_cst);
  if (sleepers.load(std::memory_order_seq_cst) > 0) word.notify_all();
}

#if defined(__linux__)
// The core that thread `index` of a pool stays on: the index-th that this process may use, -1 if there are too few.
int core_of(int index) noexcept {
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return -1;
  int seen = 0;
  for (int core = 0; core < CPU_SETSIZE; ++core)
    if (CPU_ISSET(core, &allowed) && seen++ == index) return core;
  return -1;
}
#endif

}  // namespace

// For the time of a run, takes the calling thread off the helpers' cores: two threads that wait for one another on one
// core halve the speed, and the system needs milliseconds to notice. Costs a few nanoseconds when it already is elsewhere.
class OffHelpers {
 public:
#if defined(__linux__)
  explicit OffHelpers(const Pool& pool) noexcept {
    const int here = pool.caller_core_ < 0 ? -1 : sched_getcpu();
    bool shared = false;
    for (int core : pool.helper_cores_) shared |= core == here;
    if (!shared || here < 0 || sched_getaffinity(0, sizeof(before_), &before_) != 0) return;
    if (!CPU_ISSET(pool.caller_core_, &before_)) return;  // the thread may not run there
    cpu_set_t own;
    CPU_ZERO(&own);
    CPU_SET(pool.caller_core_, &own);
    moved_ = sched_setaffinity(0, sizeof(own), &own) == 0;
  }
  ~OffHelpers() {
    if (moved_) sched_setaffinity(0, sizeof(before_), &before_);
  }

 private:
  bool moved_ = false;
  cpu_set_t before_;
#else
  explicit OffHelpers(const Pool&) noexcept {}
#endif
};

void Team::barrier() noexcept {
  if (count_ == 1) {
    shared_->next.store(0, std::memory_order_relaxed);
    return;
  }
  uint32_t phase = shared_->phase.load(std::memory_order_relaxed);
  if (shared_->arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == count_) {
    shared_->arrived.store(0, std::memory_order_relaxed);
    shared_->next.store(0, std::memory_order_relaxed);
    announce(shared_->phase, shared_->sleeping);
  } else {
    wait_for_change(shared_->phase, phase, shared_->sleeping);
  }
}

Pool::Pool(int threads, bool pin) {
  for (int index = 0; index < threads; ++index) {
    auto* memory = static_cast<std::byte*>(std::aligned_alloc(64, kThreadScratch));
    if (memory == nullptr) throw std::bad_alloc();
    scratch_.emplace_back(memory, [](std::byte* held) { std::free(held); });
    teams_.emplace_back(index, threads, &shared_, memory);
  }
  for (int index = 1; index < threads; ++index) {
    helpers_.emplace_back([this, index] { serve(index); });
  }
#if defined(__linux__)
  if (!pin || core_of(threads - 1) < 0) return;  // more threads than cores: leave them to the system
  caller_core_ = core_of(0);
  for (int index = 1; index < threads; ++index) {
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(core_of(index), &one);
    const std::size_t helper = static_cast<std::size_t>(index) - 1;
    if (pthread_setaffinity_np(helpers_[helper].native_handle(), sizeof(one), &one) == 0)
      helper_cores_.push_back(core_of(index));
  }
#else
  static_cast<void>(pin);
#endif
}

Pool::~Pool() {
  stop_.store(true, std::memory_order_relaxed);
  wake();
  for (std::thread& helper : helpers_) helper.join();
}

void Pool::run(void (*body)(void*, Team&), void* argument) noexcept {
  std::lock_guard<std::mutex> one_at_a_time(caller_);
  body_ = body;
  argument_ = argument;
  OffHelpers off(*this);
  runs_.fetch_add(1, std::memory_order_release);
  wake();
  body(argument, teams_[0]);
  teams_[0].barrier();
}

void Pool::wake() noexcept {
  if (!helpers_.empty()) announce(calls_, asleep_);
}

void Pool::serve(int index) noexcept {
  uint32_t calls = 0, runs = 0;
  for (;;) {
    calls = wait_for_change(calls_, calls, asleep_);
    if (stop_.load(std::memory_order_relaxed)) return;
    if (runs_.load(std::memory_order_acquire) == runs) continue;  // a run will follow
    ++runs;
    body_(argument_, teams_[static_cast<std::size_t>(index)]);
    teams_[static_cast<std::size_t>(index)].barrier();
  }
}

}  // namespace quire
