// One arena on one device: its pinned memory, and the four calls that move a tensor through a slot.
//
// A template over a backend B: the device, its streams and its memory. Each file says what it needs of
// it; this one needs
//   B::Stream                            a handle of an ordered queue: XLA's own, or a copy lane
//   B::HostMemory(nbytes, lock_pages)    RAII, data()
//   B::DeviceGuard(device)               makes the device current for a scope
//
// What a run changes is in run_state.h: the places that are filled, and whose turn it is. How copies
// are made, with the tensor cache, counters, recording and faults, is in the layers of copy.h.
//
// No method that a handler calls waits for the device. Where the backend has no streams of its own
// for computing (the CPU), Wait(XLA's stream, event) blocks the calling thread instead.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "cached_copies.h"
#include "copy.h"
#include "counted_copies.h"
#include "counters.h"
#include "error.h"
#include "faulty_copies.h"
#include "injection.h"
#include "lane_copies.h"
#include "lanes.h"
#include "layout.h"
#include "recorded_copies.h"
#include "run_state.h"
#include "teardown.h"

namespace vmem {

template <class B>
class DeviceArena {
 public:
  using Stream = typename B::Stream;

  // Pins the whole arena. Slow (a second for 2 GiB): before the first step, never in a handler.
  DeviceArena(std::shared_ptr<const Layout> layout, Lanes<B>& lanes, const InjectionBox& injection,
              bool lock_pages)
      : device_(lanes.device),
        injection_(injection),
        host_(layout->nbytes(), lock_pages),
        copies_(injection, lanes),
        state_(std::move(layout), host_.data(), device_) {}

  // Copies that are in flight use the memory that goes now, so this one waits for them.
  ~DeviceArena() {
    const TeardownGuard<B> guard(device_);
    copies_.Drain();
  }

  DeviceArena(const DeviceArena&) = delete;
  DeviceArena& operator=(const DeviceArena&) = delete;

  // Begins to park `source`; it must stay as it is until OffloadDone.
  void OffloadStart(std::int64_t run, Stream main, std::size_t slot, void* source,
                    std::size_t nbytes) {
    Guarded(run, main, [&](Lock& lock) {
      state_.slots.Check(slot, nbytes);
      state_.Begin(lock, run, injection_.Get().stale_seconds, [&] {
        copies_.JoinLanes(main);
        Drop();
      });
      Parked<B>& parked = state_.slots.Push(slot);
      parked.copy.run = run;
      parked.copy.buffer = source;
      copies_.Store(main, parked);
    });
  }

  // From here on later work of `main` may overwrite `source`.
  void OffloadDone(std::int64_t run, Stream main, std::size_t slot, void* source,
                   std::size_t nbytes) {
    Guarded(run, main, [&](Lock& lock) {
      state_.slots.Check(slot, nbytes);
      state_.CheckRun(run, slot);
      Parked<B>* parked = state_.slots.Last(slot, Phase::kLeaving, [&](const Parked<B>& each) {
        return each.copy.buffer == source;
      });
      if (parked == nullptr) {
        // XLA moved the value, so the buffer that was being copied had no holder. What we are given
        // is right by data flow: copy that instead, on the same lane and hence after the first one.
        parked = &state_.slots.First(slot, Phase::kLeaving);
        copies_.Forget(*parked);
        parked->copy.buffer = source;
        ++recopies_;
        copies_.Store(main, *parked);
      }
      Join(lock, run, main, *parked);
      parked->phase = Phase::kParked;
      copies_.Stored(*parked);
    });
  }

  // Begins to write the last tensor parked in the slot to `destination`; nobody may read that, nor
  // may XLA move it, until FetchDone.
  void FetchStart(std::int64_t run, Stream main, std::size_t slot, void* destination,
                  std::size_t nbytes) {
    Guarded(run, main, [&](Lock&) {
      state_.slots.Check(slot, nbytes);
      state_.CheckRun(run, slot);
      Parked<B>& parked = state_.slots.Last(slot, Phase::kParked);
      parked.phase = Phase::kReturning;
      parked.copy.buffer = destination;
      copies_.Load(main, parked);
    });
  }

  // From here on `buffer`, which must be the destination of a FetchStart, holds the tensor.
  void FetchDone(std::int64_t run, Stream main, std::size_t slot, const void* buffer,
                 std::size_t nbytes) {
    Guarded(run, main, [&](Lock& lock) {
      state_.slots.Check(slot, nbytes);
      state_.CheckRun(run, slot);
      (void)state_.slots.Last(slot, Phase::kReturning);
      Parked<B>* parked = state_.slots.Last(slot, Phase::kReturning, [&](const Parked<B>& each) {
        return each.copy.buffer == buffer;
      });
      if (parked == nullptr) {
        throw Error(Code::kInternal,
                    state_.slots.Named(slot) +
                        ": XLA moved the buffer of fetch_start before fetch_done, while the "
                        "transfer was writing it; fetch_done must be its only reader, in the same "
                        "computation");
      }
      Join(lock, run, main, *parked);
      copies_.Forget(*parked);
      state_.slots.Empty(*parked);
    });
  }

  // Drops what a failed run has left behind. The caller knows that no run is in flight.
  void Reset() {
    const Lock lock(mutex_);
    if (state_.IsIdle()) return;
    const typename B::DeviceGuard guard(device_);
    copies_.Drain();
    Drop();
  }

  // Device memory in front of the arena, in bytes; 0 takes the cache away. Between runs only.
  void SetCacheCapacity(std::size_t nbytes) {
    const Lock lock(mutex_);
    state_.CheckIdle("the cache cannot change");
    const typename B::DeviceGuard guard(device_);
    copies_.Drain();
    Drop();
    copies_.SetCapacity(nbytes);
  }

  // From here on every copy and every wait is timed; without `on`, no more. Between runs only.
  void Record(bool on) {
    const Lock lock(mutex_);
    state_.CheckIdle("recording cannot begin or end");
    const typename B::DeviceGuard guard(device_);
    copies_.Record(on);
  }

  // What was recorded so far. Waits for the lanes.
  std::vector<Span> Spans() const {
    const Lock lock(mutex_);
    const typename B::DeviceGuard guard(device_);
    copies_.Drain();
    return copies_.Spans();
  }

  Counters counters() const {
    const Lock lock(mutex_);
    Counters now = copies_.counted();
    now.recopies = recopies_;
    now.resets = resets_;
    now.parked = state_.slots.parked();
    now.cache_nbytes = copies_.cache().capacity();
    now.cache_used_nbytes = copies_.cache().used();
    now.arena_nbytes = state_.slots.nbytes();
    return now;
  }

 private:
  using Lock = Ownership::Lock;
  using Copies = CachedCopies<CountedCopies<RecordedCopies<FaultyCopies<LaneCopies<B>>>>>;

  // Runs `body` under the lock and on the device. When it throws, the run is over for this arena:
  // the compute stream waits for the lanes, because XLA may now reuse the buffers they work on.
  template <class Body>
  void Guarded(std::int64_t run, Stream main, Body body) {
    Lock lock(mutex_);
    const typename B::DeviceGuard guard(device_);
    state_.owner.Beat(run);
    try {
      body(lock);
    } catch (...) {
      if (!lock.owns_lock()) lock.lock();
      if (run == state_.owner.run()) {
        state_.owner.Fail();
        try {
          copies_.JoinLanes(main);
        } catch (const std::exception&) {  // the first error is the one to report
        }
      }
      throw;
    }
    if (state_.IsIdle()) state_.owner.Release();
  }

  void Drop() {
    if (state_.IsIdle()) return;
    ++resets_;
    copies_.ForgetAll();
    state_.Reset();
  }

  // `main` waits for the last copy of `parked`. Unlocked meanwhile: on the CPU the wait blocks this
  // thread, and another one of the same run may have a transfer to start.
  void Join(Lock& lock, std::int64_t run, Stream main, const Parked<B>& parked) {
    const Phase phase = parked.phase;
    const typename B::Event event = parked.event;
    Copy copy = parked.copy;
    copy.others = state_.slots.parked() - 1;
    lock.unlock();
    copies_.Wait(main, copy, event);
    lock.lock();
    state_.CheckRun(run, copy.place.slot);
    if (parked.phase != phase) throw state_.slots.Missing(copy.place.slot, phase);
  }

  const int device_;
  const InjectionBox& injection_;
  typename B::HostMemory host_;

  mutable std::mutex mutex_;
  Copies copies_;
  RunState<B> state_;
  std::uint64_t recopies_ = 0;
  std::uint64_t resets_ = 0;
};

}  // namespace vmem
