// Faults on purpose, for tests: what a missing wait would hide, a delay and a poisoned buffer show.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>

namespace vmem {

struct Injection {
  double delay_seconds = 0.0;   // before every copy, on its lane
  std::int64_t fail_slot = -1;  // copies of this slot fail
  bool fail_fetch = false;      // ... on the way back instead of on the way out
  bool poison = false;          // NaN bytes in a destination at start, in a place after its fetch
  bool poison_source = false;   // NaN bytes in the source at offload_done: nobody may read it
  bool skip_waits = false;      // done handlers do not wait: what the others must reveal
  double stale_seconds = 30.0;  // patience of Ownership::Await, which tests shorten
};

// Read by every handler call, written by tests.
class InjectionBox {
 public:
  Injection Get() const {
    if (!was_set_.load(std::memory_order_acquire)) return {};  // a process without tests takes no lock
    std::lock_guard<std::mutex> lock(mutex_);
    return value_;
  }
  void Set(const Injection& value) {
    std::lock_guard<std::mutex> lock(mutex_);
    value_ = value;
    was_set_.store(true, std::memory_order_release);
  }

 private:
  std::atomic<bool> was_set_{false};
  mutable std::mutex mutex_;
  Injection value_;
};

}  // namespace vmem
