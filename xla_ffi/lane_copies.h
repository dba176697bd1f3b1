// Copies as they are: what comes before them, the lane that makes them, and who waits for them.
//
// A backend B supplies
//   B::Stream, B::Event       copyable handles; NewEvent() marks nothing yet
//   B::Record(event, stream)  the event marks the end of what is on the stream so far
//   B::Wait(stream, event)    what comes later on the stream waits for that
//   B::CopyToHost, CopyToDevice, CopyOnDevice(lane, to, from, nbytes)
//   B::Drain(stream)          the caller waits for what is on it, whatever comes of that; noexcept
#pragma once

#include <cstddef>
#include <mutex>

#include "copy.h"
#include "lanes.h"

namespace vmem {

template <class B>
class LaneCopies {
 public:
  using Backend = B;
  using Stream = typename B::Stream;
  using Event = typename B::Event;

  explicit LaneCopies(Lanes<B>& lanes) : lanes_(lanes), ready_(B::NewEvent()) {}

  LaneCopies(const LaneCopies&) = delete;
  LaneCopies& operator=(const LaneCopies&) = delete;

  // Holds off the other arenas of the device while one transfer's operations are enqueued.
  std::unique_lock<std::mutex> Together() { return std::unique_lock<std::mutex>(lanes_.order); }

  // The buffer of a fetch may be recycled memory, with users before it on `main`.
  void Order(Stream main, const Copy& copy, const Event& event) {
    const Stream lane = LaneOf(copy);
    B::Record(ready_, main);
    B::Wait(lane, ready_);
    if (!IsOut(copy.route)) B::Wait(lane, event);
  }

  void Run(const Copy& copy) {
    const Stream lane = LaneOf(copy);
    switch (copy.route) {
      case Route::kBufferToArena:
        return B::CopyToHost(lane, copy.host, copy.buffer, copy.nbytes);
      case Route::kBufferToCache:
        return B::CopyOnDevice(lane, copy.cached, copy.buffer, copy.nbytes);
      case Route::kCacheToArena:
        return B::CopyToHost(lane, copy.host, copy.cached, copy.nbytes);
      case Route::kArenaToBuffer:
        return B::CopyToDevice(lane, copy.buffer, copy.host, copy.nbytes);
      case Route::kCacheToBuffer:
        return B::CopyOnDevice(lane, copy.buffer, copy.cached, copy.nbytes);
    }
  }

  void Done(const Copy& copy, Event& event) { B::Record(event, LaneOf(copy)); }

  void Wait(Stream main, const Copy&, const Event& event) { B::Wait(main, event); }

  // `main` waits for all that is on both lanes, and the lanes for each other.
  void JoinLanes(Stream main) {
    const auto together = Together();
    B::Record(ready_, lanes_.to_host);
    B::Wait(lanes_.to_device, ready_);
    B::Wait(main, ready_);
    B::Record(ready_, lanes_.to_device);
    B::Wait(lanes_.to_host, ready_);
    B::Wait(main, ready_);
  }

  // The calling thread waits for both lanes.
  void Drain() const noexcept {
    B::Drain(lanes_.to_host);
    B::Drain(lanes_.to_device);
  }

 protected:
  Stream LaneOf(const Copy& copy) const {
    return IsOut(copy.route) ? lanes_.to_host : lanes_.to_device;
  }
  Lanes<B>& lanes() const { return lanes_; }

 private:
  Lanes<B>& lanes_;
  Event ready_;  // recorded and waited for in one go, so one is enough
};

}  // namespace vmem
