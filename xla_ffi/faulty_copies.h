// Faults on purpose in the copies of an arena, for tests. Without an Injection it changes nothing.
//
// A backend B supplies
//   B::PoisonDevice, PoisonHost(stream, memory, nbytes)    NaN bytes
//   B::Delay(lane, seconds)
//   B::Fail(lane, message)    throws, or fails what next waits for the lane
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "copy.h"
#include "injection.h"

namespace vmem {

template <class Upstream>
class FaultyCopies : public Upstream {
 public:
  using B = typename Upstream::Backend;
  using Stream = typename Upstream::Stream;
  using Event = typename Upstream::Event;

  template <class... Rest>
  explicit FaultyCopies(const InjectionBox& injection, Rest&&... rest)
      : Upstream(std::forward<Rest>(rest)...), injection_(injection) {}

  // Nobody may read the destination of a fetch before the copy is done.
  void Order(Stream main, const Copy& copy, const Event& event) {
    if (injection_.Get().poison && !IsOut(copy.route)) {
      B::PoisonDevice(main, copy.buffer, copy.nbytes);
    }
    Upstream::Order(main, copy, event);
  }

  // Nobody may read a place again after its fetch.
  void Run(const Copy& copy) {
    const Injection injection = injection_.Get();
    const Stream lane = this->LaneOf(copy);
    if (injection.delay_seconds > 0) B::Delay(lane, injection.delay_seconds);
    if (IsToFail(injection, copy)) {
      B::Fail(lane, "slot " + std::to_string(copy.place.slot) + " on device " +
                        std::to_string(this->lanes().device) + ": the copy failed on purpose");
    }
    Upstream::Run(copy);
    if (!injection.poison) return;
    if (copy.route == Route::kArenaToBuffer) B::PoisonHost(lane, copy.host, copy.nbytes);
    if (copy.route == Route::kCacheToBuffer) B::PoisonDevice(lane, copy.cached, copy.nbytes);
  }

  // Nobody may read the source of an offload after it.
  void Wait(Stream main, const Copy& copy, const Event& event) {
    const Injection injection = injection_.Get();
    // The last one waits all the same, and by the lanes' order for all: XLA frees the buffers next.
    if (!injection.skip_waits || copy.others == 0) Upstream::Wait(main, copy, event);
    if (injection.poison_source && IsOut(copy.route)) {
      B::PoisonDevice(main, copy.buffer, copy.nbytes);
    }
  }

 private:
  // An eviction does not: the fetch that waits for it would not hear of it on the CPU.
  static bool IsToFail(const Injection& injection, const Copy& copy) {
    return injection.fail_slot == static_cast<std::int64_t>(copy.place.slot) &&
           injection.fail_fetch != IsOut(copy.route) && copy.route != Route::kCacheToArena;
  }

  const InjectionBox& injection_;
};

}  // namespace vmem
