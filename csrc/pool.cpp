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

inline void pause_briefly(int) noexcept { pause_core(); }

// Where the others may do without this thread: another process that wants its core gets it within some microseconds.
inline void pause_politely(int spin) noexcept {
  if (spin % 64 == 63)
    std::this_thread::yield();
  else
    pause_core();
}

// Waits until `word` differs from `old`, spinning first, then asleep; returns it. `sleepers` counts those who must be woken.
template <void (*pause)(int) = pause_briefly>
inline uint32_t wait_for_change(std::atomic<uint32_t>& word, uint32_t old, std::atomic<int32_t>& sleepers) noexcept {
  for (int spin = 0; spin < kSpins; ++spin) {
    if (const uint32_t now = word.load(std::memory_order_acquire); now != old) return now;
    pause(spin);
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

// The crew of a run in one word, so that no thread joins a phase that has ended: its phase (which never repeats), how many
// of its threads have ended it, whether another one may join, and how many threads it has. None: there is no run.
constexpr uint64_t kOneMember = 1, kMembers = 0xffff, kOpen = uint64_t{1} << 16, kOneArrived = uint64_t{1} << 17;
constexpr int kPhaseShift = 32;

inline uint64_t members_of(uint64_t crew) noexcept { return crew & kMembers; }
inline uint64_t arrived_of(uint64_t crew) noexcept { return crew >> 17 & 0x7fff; }
inline uint32_t phase_of(uint64_t crew) noexcept { return static_cast<uint32_t>(crew >> kPhaseShift); }

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

void Team::meet(Then then, int64_t place) noexcept {
  uint64_t crew = shared_->crew.fetch_add(kOneArrived, std::memory_order_acq_rel) + kOneArrived;
  const uint32_t phase = phase_of(crew);
  // The last one closes the phase, unless another thread joins first: then that one will be the last.
  if (arrived_of(crew) == members_of(crew) &&
      shared_->crew.compare_exchange_strong(crew, crew & ~kOpen, std::memory_order_acq_rel)) {
    shared_->next.store(0, std::memory_order_relaxed);
    if (then == Then::kNextKernel) shared_->place.store(place, std::memory_order_relaxed);
    const uint64_t left = then == Then::kEnd ? 0 : members_of(crew) | (then == Then::kNextKernel ? kOpen : 0);
    shared_->crew.store(uint64_t{phase + 1} << kPhaseShift | left, std::memory_order_release);
    announce(shared_->phase, shared_->sleeping);
    return;
  }
  // A thread that joins may do so before the phase is announced.
  for (uint32_t now = shared_->phase.load(std::memory_order_acquire); static_cast<int32_t>(now - phase) <= 0;)
    now = wait_for_change(shared_->phase, now, shared_->sleeping);
}

void Team::barrier() noexcept {
  if (count_ == 1)
    shared_->next.store(0, std::memory_order_relaxed);
  else
    meet(Then::kSameKernel, 0);
}

void Team::next(int64_t place) noexcept {
  if (count_ == 1)
    shared_->next.store(0, std::memory_order_relaxed);
  else
    meet(Then::kNextKernel, place);
}

Pool::Pool(int threads, bool pin, bool whole) : whole_(whole) {
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

void Pool::run(void (*body)(void*, Team&), void* argument, Crew crew) noexcept {
  std::lock_guard<std::mutex> one_at_a_time(caller_);
  if (helpers_.empty()) {
    body(argument, teams_[0]);
    teams_[0].barrier();
    return;
  }
  body_ = body;
  argument_ = argument;
  OffHelpers off(*this);
  shared_.place.store(0, std::memory_order_relaxed);
  const uint64_t phase = shared_.crew.load(std::memory_order_relaxed) & ~uint64_t{0xffffffff};
  shared_.crew.store(phase | kOpen | kOneMember, std::memory_order_release);
  wake();
  if (whole_ || crew == Crew::kWhole)
    for (int spin = 0; members_of(shared_.crew.load(std::memory_order_acquire)) < teams_.size();) pause_politely(++spin);
  body(argument, teams_[0]);
  teams_[0].meet(Team::Then::kEnd, 0);
}

void Pool::wake() noexcept {
  if (!helpers_.empty()) announce(calls_, asleep_);
}

// Joins the run, if there is one.
bool Pool::join() noexcept {
  uint64_t crew = shared_.crew.load(std::memory_order_acquire);
  for (int spin = 0; members_of(crew) > 0;) {
    if ((crew & kOpen) == 0) {
      pause_politely(++spin);
      crew = shared_.crew.load(std::memory_order_acquire);
    } else if (shared_.crew.compare_exchange_weak(crew, crew + kOneMember, std::memory_order_acq_rel)) {
      return true;
    }
  }
  return false;
}

void Pool::serve(int index) noexcept {
  Team& team = teams_[static_cast<std::size_t>(index)];
  uint32_t calls = 0;
  for (;;) {
    calls = wait_for_change<pause_politely>(calls_, calls, asleep_);
    if (stop_.load(std::memory_order_relaxed)) return;
    if (!join()) continue;  // a run will follow, or has ended already
    body_(argument_, team);
    team.meet(Team::Then::kEnd, 0);
  }
}

}  // namespace quire
