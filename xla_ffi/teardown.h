// What destructors do when a call fails: they go on, and the failure is kept for whoever asks.
//
// An exception that leaves a destructor ends the process, and no caller could act on it: the device is
// lost, or the process ends and the driver has taken its context down already. What the call was to
// free goes with that context.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <mutex>
#include <optional>
#include <string>

namespace vmem {

// The failures in destructors of this process.
class TeardownFailures {
 public:
  static TeardownFailures& Get() {
    static TeardownFailures failures;  // destroyed trivially, so it may be asked at any time
    return failures;
  }

  void Add(const char* message) noexcept {
    std::lock_guard<std::mutex> lock(mutex_);
    if (count_++ == 0) std::strncpy(first_, message, kLongest - 1);
  }

  std::uint64_t count() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return count_;
  }

  // The message of the first, cut to 255 bytes; later ones usually follow from it.
  std::string first() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return first_;
  }

 private:
  static constexpr std::size_t kLongest = 256;  // kept here: an allocation could fail in its turn

  mutable std::mutex mutex_;
  std::uint64_t count_ = 0;
  char first_[kLongest] = "";
};

// Runs a part of a destructor. What it throws is added to TeardownFailures.
template <class Body>
void Teardown(Body body) noexcept {
  try {
    body();
  } catch (const std::exception& error) {
    TeardownFailures::Get().Add(error.what());
  } catch (...) {
    TeardownFailures::Get().Add("an exception of an unknown type");
  }
}

// Makes `device` current for the length of a destructor, if that can be done. Where it cannot, the
// destructor goes on: a failed device has no copies in flight.
template <class B>
class TeardownGuard {
 public:
  explicit TeardownGuard(int device) noexcept {
    Teardown([&] { guard_.emplace(device); });
  }

 private:
  std::optional<typename B::DeviceGuard> guard_;
};

}  // namespace vmem
