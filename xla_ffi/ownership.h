// Whose an arena is: the memory of one run at a time, of the one that has something parked.
//
// Runs that were launched by other threads take turns; what a failed run left behind is dropped. All
// calls are made under the arena's lock.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>

namespace vmem {

class Ownership {
 public:
  using Lock = std::unique_lock<std::mutex>;
  using Clock = std::chrono::steady_clock;

  // XLA numbers executions; -1 means that it did not. Those take no turns.
  static constexpr std::int64_t kUnknownRun = -1;

  std::int64_t run() const { return run_; }
  // Whether a call of this run has failed.
  bool failed() const { return failed_; }

  // The run shows that it lives.
  void Beat(std::int64_t run) {
    if (run == run_) alive_ = Clock::now();
  }

  // Its later calls are refused, and who waits goes on.
  void Fail() {
    failed_ = true;
    changed_.notify_all();
  }

  // Nothing is parked any more.
  void Release() { changed_.notify_all(); }

  // Waits until `run` may have the arena: until `is_free()`, or the owner has failed or is the same
  // run. The owner may have failed elsewhere, in another custom call, and never says so. It is given
  // up at once where this thread cannot be here before its end (`one_thread_launches`), else when it
  // has shown no life for `patience` seconds. That time limit is the only thing that ends such a wait;
  // what else does is notified.
  template <class IsFree>
  void Await(Lock& lock, std::int64_t run, bool one_thread_launches, double patience,
             IsFree is_free) {
    const auto limit =
        std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(patience));
    const Clock::time_point began = Clock::now();
    while (!is_free() && !failed_ && run != run_) {
      if (one_thread_launches && launcher_ == std::this_thread::get_id()) return;
      const Clock::time_point end = std::max(alive_, began) + limit;
      if (Clock::now() >= end) return;
      changed_.wait_until(lock, end);
    }
  }

  // The calling thread launches `run`, which has the arena from here on.
  void Begin(std::int64_t run) {
    run_ = run;
    failed_ = false;
    launcher_ = std::this_thread::get_id();
    alive_ = Clock::now();
    changed_.notify_all();
  }

 private:
  std::condition_variable changed_;
  std::int64_t run_ = kUnknownRun;
  bool failed_ = false;
  std::thread::id launcher_;
  Clock::time_point alive_;
};

}  // namespace vmem
