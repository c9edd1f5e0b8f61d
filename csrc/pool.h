// The thread pool: the calling thread and up to `threads - 1` helpers run one function together.
#pragma once

#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "team.h"

namespace quire {

class Pool {
 public:
  // pin: helper i stays on the i-th core of the process's affinity mask. The caller, thread 0, is left alone, but for the
  // time of a run that finds it on a helper's core.
  // whole: every run is Crew::kWhole. Throws std::system_error when threads cannot be started.
  Pool(int threads, bool pin, bool whole = false);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const noexcept { return static_cast<int>(teams_.size()); }

  // Runs body(argument, team) on this thread and on the helpers that come before it has ended, and returns when all
  // have. One run at a time: callers queue. Allocates nothing. Helpers that are idle spin for some tens of
  // microseconds, then sleep. Crew::kWhole: it begins when all helpers are there, for kernels that give each its part.
  enum class Crew { kAnyHelpers, kWhole };
  void run(void (*body)(void*, Team&), void* argument, Crew crew = Crew::kAnyHelpers) noexcept;

  // Says that a run follows within some tens of microseconds: helpers that sleep take as long to wake, and can do it
  // meanwhile. Returns at once, and does nothing while they run.
  void wake() noexcept;

 private:
  friend class OffHelpers;
  bool join() noexcept;
  void serve(int index) noexcept;

  std::mutex caller_;
  TeamShared shared_;
  alignas(64) std::atomic<uint32_t> calls_{0};  // of `wake`: a run's, and those before it
  alignas(64) std::atomic<int32_t> asleep_{0};
  void (*body_)(void*, Team&) = nullptr;
  void* argument_ = nullptr;
  std::atomic<bool> stop_{false};
  std::vector<std::unique_ptr<std::byte, void (*)(std::byte*)>> scratch_;
  std::vector<Team> teams_;
  std::vector<std::thread> helpers_;
  bool whole_;
  int caller_core_ = -1;
  std::vector<int> helper_cores_;
};

}  // namespace quire
