#include "pool.h"

#include <cstdlib>
#include <new>

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace quire {
namespace {

// About 50 microseconds: longer than the gap between two kernels or between the programs of one step, shorter than
// what a person or a power meter would notice of an idle server.
constexpr int kSpins = 2000;

inline void pause_core() noexcept {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

// Waits until `word` differs from `old`: spinning first, then asleep. `sleepers` counts those who must be woken.
inline void wait_for_change(std::atomic<uint32_t>& word, uint32_t old, std::atomic<int32_t>& sleepers) noexcept {
  for (int spin = 0; spin < kSpins; ++spin) {
    if (word.load(std::memory_order_acquire) != old) return;
    pause_core();
  }
  sleepers.fetch_add(1, std::memory_order_seq_cst);
  while (word.load(std::memory_order_seq_cst) == old) word.wait(old, std::memory_order_seq_cst);
  sleepers.fetch_sub(1, std::memory_order_relaxed);
}

inline void announce(std::atomic<uint32_t>& word, std::atomic<int32_t>& sleepers) noexcept {
  word.fetch_add(1, std::memory_order_seq_cst);
  if (sleepers.load(std::memory_order_seq_cst) > 0) word.notify_all();
}

void pin_to_core([[maybe_unused]] std::thread& thread, [[maybe_unused]] int index) noexcept {
#if defined(__linux__)
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return;
  int cores = CPU_COUNT(&allowed);
  if (cores <= index) return;  // more threads than cores: leave them to the system
  int seen = 0;
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (!CPU_ISSET(core, &allowed) || seen++ != index) continue;
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(core, &one);
    pthread_setaffinity_np(thread.native_handle(), sizeof(one), &one);
    return;
  }
#endif
}

}  // namespace

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
    if (pin) pin_to_core(helpers_.back(), index);
  }
}

Pool::~Pool() {
  stop_.store(true, std::memory_order_relaxed);
  announce(generation_, asleep_);
  for (std::thread& helper : helpers_) helper.join();
}

void Pool::run(void (*body)(void*, Team&), void* argument) noexcept {
  std::lock_guard<std::mutex> one_at_a_time(caller_);
  body_ = body;
  argument_ = argument;
  if (!helpers_.empty()) announce(generation_, asleep_);
  body(argument, teams_[0]);
  teams_[0].barrier();
}

void Pool::serve(int index) noexcept {
  uint32_t seen = 0;
  for (;;) {
    wait_for_change(generation_, seen, asleep_);
    if (stop_.load(std::memory_order_relaxed)) return;
    ++seen;
    body_(argument_, teams_[static_cast<std::size_t>(index)]);
    teams_[static_cast<std::size_t>(index)].barrier();
  }
}

}  // namespace quire
