// One arena on one device: the state machine of its slots, its pinned memory and its tensor cache.
//
// A template over a backend B, which supplies
//   B::Stream                 a handle of an ordered queue: XLA's own, or a copy lane
//   B::Event                  a copyable handle
//   B::NewEvent(), B::Record(event, stream), B::Wait(stream, event)
//   B::HostMemory(nbytes, lock_pages), B::DeviceMemory(nbytes): RAII, data()
//   B::DeviceGuard(device)    makes the device current for a scope
//   B::CopyToHost, CopyToDevice, CopyOnDevice(stream, to, from, nbytes)
//   B::PoisonDevice, PoisonHost(stream, memory, nbytes)
//   B::Delay(stream, seconds), B::Fail(stream, message), B::Drain(stream)
//   B::Mark, B::NewMark, B::Origin: see recording.h
//   B::kOneThreadLaunches     whether one thread at a time launches a device's work, run by run
//
// No method that a handler calls waits for the device. Where the backend has no streams of its own
// for computing (the CPU), Wait(XLA's stream, event) blocks the calling thread instead.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "counters.h"
#include "error.h"
#include "injection.h"
#include "layout.h"
#include "recording.h"
#include "slot_stack.h"
#include "tensor_cache.h"

namespace vmem {

// The copy lanes of one device, shared by all of its arenas: one out, one in.
template <class B>
struct Lanes {
  explicit Lanes(int ordinal)
      : device(ordinal), to_host(B::NewLane(ordinal)), to_device(B::NewLane(ordinal)) {}

  int device;
  typename B::Stream to_host;
  typename B::Stream to_device;
  std::mutex order;  // keeps the operations of one transfer together
};

template <class B>
class DeviceArena {
 public:
  using Stream = typename B::Stream;

  // Pins the whole arena. Slow (a second for 2 GiB): before the first step, never in a handler.
  DeviceArena(std::shared_ptr<const Layout> layout, Lanes<B>& lanes, const InjectionBox& injection,
              bool lock_pages)
      : layout_(std::move(layout)),
        lanes_(lanes),
        injection_(injection),
        places_(layout_->nbytes()),
        host_(layout_->nbytes(), lock_pages),
        ready_(B::NewEvent()) {
    for (const SlotLayout& slot : layout_->slots()) {
      std::vector<Entry> entries(slot.depth);
      for (Entry& entry : entries) entry.event = B::NewEvent();
      slots_.emplace_back(std::move(entries));
    }
  }

  // Copies that are in flight use the memory that goes now, so this one waits for them.
  ~DeviceArena() {
    typename B::DeviceGuard guard(lanes_.device);
    B::Drain(lanes_.to_host);
    B::Drain(lanes_.to_device);
  }

  DeviceArena(const DeviceArena&) = delete;
  DeviceArena& operator=(const DeviceArena&) = delete;

  // Begins to park `source`; it must stay as it is until OffloadDone.
  void OffloadStart(std::int64_t run, Stream main, std::size_t slot, const void* source,
                    std::size_t nbytes) {
    Guarded(run, main, [&](Lock& lock) {
      Check(slot, nbytes);
      Claim(lock, run, main);
      Entry* entry = slots_[slot].Push();
      if (entry == nullptr) {
        throw Error(Code::kFailedPrecondition,
                    Named(slot) + " is full: " + std::to_string(slots_[slot].depth()) +
                        " tensors are parked in it already");
      }
      const std::size_t stride = layout_->slots()[slot].stride;
      const std::size_t offset = OffsetOf(slot, *entry);
      if (places_.Find(stride, offset) != offset && stride > 0) {
        slots_[slot].Settle();
        throw Error(Code::kFailedPrecondition,
                    Named(slot) +
                        ": its place in the arena still holds another tensor; the "
                        "program runs in another order than the plan's");
      }
      places_.Take(offset, stride);
      entry->phase = Phase::kLeaving;
      entry->source = source;
      ++parked_;
      Store(*entry, slot, main);
    });
  }

  // From here on later work of `main` may overwrite `source`.
  void OffloadDone(std::int64_t run, Stream main, std::size_t slot, void* source,
                   std::size_t nbytes) {
    Guarded(run, main, [&](Lock& lock) {
      Check(slot, nbytes);
      CheckRun(run, slot);
      auto is_it = [&](Entry& e) { return e.phase == Phase::kLeaving && e.source == source; };
      Entry* entry = slots_[slot].Topmost(is_it);
      if (entry == nullptr) {
        // XLA moved the value, so the buffer that was being copied had no holder. What we are given
        // is right by data flow: copy that instead, on the same lane and hence after the first one.
        entry = slots_[slot].Lowest([](Entry& e) { return e.phase == Phase::kLeaving; });
        if (entry == nullptr) throw Missing(slot, Phase::kLeaving);
        Uncache(*entry);
        entry->source = source;
        ++counters_.recopies;
        Store(*entry, slot, main);
      }
      Join(lock, run, main, slot, *entry);
      if (injection_.Get().poison_source) B::PoisonDevice(main, source, nbytes);
      entry->phase = Phase::kParked;
      if (entry->cached) (*entry->cached)->locked = false;
    });
  }

  // Begins to write the last tensor parked in the slot to `destination`; nobody may read that, nor
  // may XLA move it, until FetchDone.
  void FetchStart(std::int64_t run, Stream main, std::size_t slot, void* destination,
                  std::size_t nbytes) {
    Guarded(run, main, [&](Lock&) {
      Check(slot, nbytes);
      CheckRun(run, slot);
      Entry* entry = slots_[slot].Topmost([](Entry& e) { return e.phase == Phase::kParked; });
      if (entry == nullptr) throw Missing(slot, Phase::kParked);
      entry->phase = Phase::kReturning;
      entry->destination = destination;
      Load(*entry, slot, main);
    });
  }

  // From here on `buffer`, which must be the destination of a FetchStart, holds the tensor.
  void FetchDone(std::int64_t run, Stream main, std::size_t slot, const void* buffer,
                 std::size_t nbytes) {
    Guarded(run, main, [&](Lock& lock) {
      Check(slot, nbytes);
      CheckRun(run, slot);
      auto returns = [](Entry& e) { return e.phase == Phase::kReturning; };
      if (slots_[slot].Topmost(returns) == nullptr) throw Missing(slot, Phase::kReturning);
      Entry* entry =
          slots_[slot].Topmost([&](Entry& e) { return returns(e) && e.destination == buffer; });
      if (entry == nullptr) {
        throw Error(Code::kInternal,
                    Named(slot) +
                        ": XLA moved the buffer of fetch_start before fetch_done, while the "
                        "transfer was writing it; fetch_done must be its only reader, in the same "
                        "computation");
      }
      Join(lock, run, main, slot, *entry);
      Empty(slot, *entry);
    });
  }

  // Device memory in front of the arena, in bytes; 0 takes the cache away. Between runs only.
  void SetCacheCapacity(std::size_t nbytes) {
    Lock lock(mutex_);
    CheckIdle("the cache cannot change");
    typename B::DeviceGuard guard(lanes_.device);
    B::Drain(lanes_.to_host);
    B::Drain(lanes_.to_device);
    Drop();
    cache_ = TensorCache(0);
    cache_memory_.reset();
    if (nbytes == 0) return;
    cache_memory_.emplace(nbytes);
    cache_ = TensorCache(nbytes);
  }

  // Drops what failed runs left behind. The caller knows that no run is in flight.
  void Reset() {
    Lock lock(mutex_);
    if (parked_ == 0) return;
    typename B::DeviceGuard guard(lanes_.device);
    B::Drain(lanes_.to_host);
    B::Drain(lanes_.to_device);
    Drop();
    ++counters_.resets;
    failed_ = true;  // what is still to come of that run is refused
    changed_.notify_all();
  }

  // From here on every copy and every wait is timed; without `on`, no more. Between runs only.
  void Record(bool on) {
    Lock lock(mutex_);
    CheckIdle("recording cannot begin or end");
    typename B::DeviceGuard guard(lanes_.device);
    recording_.Set(on, lanes_.to_host);
  }

  // What was recorded so far. Waits for the lanes.
  std::vector<Span> Spans() const {
    Lock lock(mutex_);
    typename B::DeviceGuard guard(lanes_.device);
    B::Drain(lanes_.to_host);
    B::Drain(lanes_.to_device);
    return recording_.Spans();
  }

  Counters counters() const {
    Lock lock(mutex_);
    Counters now = counters_;
    now.parked = parked_;
    now.cache_nbytes = cache_.capacity();
    now.cache_used_nbytes = cache_.used();
    now.arena_nbytes = layout_->nbytes();
    return now;
  }

 private:
  using Lock = std::unique_lock<std::mutex>;
  using Mark = typename B::Mark;
  using Clock = std::chrono::steady_clock;

  struct Entry {
    Phase phase = Phase::kEmpty;
    typename B::Event event;  // the last copy out of, or into, or away from this place
    const void* source = nullptr;
    void* destination = nullptr;
    std::optional<TensorCache::Handle> cached;
  };

  // XLA numbers executions; -1 means that it did not.
  static constexpr std::int64_t kUnknownRun = -1;

  // Runs `body` under the lock and on the device. When it throws, the run is over for this arena:
  // the compute stream waits for the lanes, because XLA may now reuse the buffers they work on.
  template <class Body>
  void Guarded(std::int64_t run, Stream main, Body body) {
    Lock lock(mutex_);
    typename B::DeviceGuard guard(lanes_.device);
    if (run == run_) ++beats_;
    try {
      body(lock);
    } catch (...) {
      if (!lock.owns_lock()) lock.lock();
      if (run == run_) {
        failed_ = true;
        try {
          JoinLanes(main);
        } catch (const std::exception&) {  // the first error is the one to report
        }
      }
      changed_.notify_all();
      throw;
    }
    changed_.notify_all();
  }

  // Makes `run` the owner. The arena is the memory of one run at a time: of the one that has
  // something parked. Runs that were launched by other threads take turns; what a failed run left
  // behind is dropped. A run that failed elsewhere never says so: it is given up when it shows no
  // life for `stale_seconds`, or at once where this thread cannot be here before its end.
  void Claim(Lock& lock, std::int64_t run, Stream main) {
    if (run == run_ && run != kUnknownRun) {
      if (failed_) throw AlreadyFailed();
      if (parked_ > 0) return;
    }
    if (run == kUnknownRun && run == run_ && !failed_) {
      launcher_ = std::this_thread::get_id();
      return;
    }
    std::uint64_t beats = beats_;
    Clock::time_point seen = Clock::now();
    const std::chrono::duration<double> patience(injection_.Get().stale_seconds);
    while (parked_ > 0 && !failed_ && run != run_) {
      if (B::kOneThreadLaunches && launcher_ == std::this_thread::get_id()) break;
      changed_.wait_for(lock, std::chrono::milliseconds(20));
      if (beats != beats_) {
        beats = beats_;
        seen = Clock::now();
      } else if (Clock::now() - seen > patience) {
        break;
      }
    }
    if (run == run_ && run != kUnknownRun) {  // another call of this run was here meanwhile
      if (failed_) throw AlreadyFailed();
      return;
    }
    if (parked_ > 0) {
      JoinLanes(main);
      Drop();
      ++counters_.resets;
    }
    run_ = run;
    failed_ = false;
    launcher_ = std::this_thread::get_id();
  }

  void Drop() {
    for (std::size_t slot = 0; slot < slots_.size(); ++slot) {
      while (Entry* entry =
                 slots_[slot].Topmost([](Entry& e) { return e.phase != Phase::kEmpty; })) {
        Empty(slot, *entry);
      }
    }
  }

  void Empty(std::size_t slot, Entry& entry) {
    Uncache(entry);
    places_.Give(OffsetOf(slot, entry), layout_->slots()[slot].stride);
    entry.phase = Phase::kEmpty;
    entry.source = entry.destination = nullptr;
    slots_[slot].Settle();
    --parked_;
  }

  void Uncache(Entry& entry) {
    if (entry.cached) cache_.Remove(*entry.cached);
    entry.cached.reset();
  }

  // Out: into the cache by a copy on the device, or over the link. Both on the lane to the host, so
  // an eviction comes before what takes its bytes, and nobody but that lane writes to the cache.
  void Store(Entry& entry, std::size_t slot, Stream main) {
    const SlotLayout& where = layout_->slots()[slot];
    const std::size_t offset = OffsetOf(slot, entry);
    std::lock_guard<std::mutex> order(lanes_.order);
    Begin(main, lanes_.to_host);
    Mark began = recording_.Now(lanes_.to_host);
    Inject(slot, false, lanes_.to_host);
    auto admission = cache_.Admit(where.stride, offset);
    if (admission) {
      for (TensorCache::Handle victim : admission->victims) Evict(victim);
      if (!admission->victims.empty()) began = recording_.Now(lanes_.to_host);
      entry.cached =
          cache_.Insert({slot, slots_[slot].IndexOf(entry)}, admission->offset, where.stride);
      B::CopyOnDevice(lanes_.to_host, Cached(entry), entry.source, where.nbytes);
    } else {
      B::CopyToHost(lanes_.to_host, host_.data() + offset, entry.source, where.nbytes);
      counters_.link_nbytes_out += where.nbytes;
    }
    recording_.Note({false, true, !admission, run_, slot, where.nbytes}, began, lanes_.to_host);
    B::Record(entry.event, lanes_.to_host);
  }

  void Evict(TensorCache::Handle victim) {
    const auto [slot, index] = victim->place;
    Entry& entry = slots_[slot][index];
    const std::size_t nbytes = layout_->slots()[slot].nbytes;
    const Mark began = recording_.Now(lanes_.to_host);
    B::CopyToHost(lanes_.to_host, host_.data() + OffsetOf(slot, entry), Cached(entry), nbytes);
    recording_.Note({false, true, true, run_, slot, nbytes}, began, lanes_.to_host);
    B::Record(entry.event, lanes_.to_host);  // its fetch has to wait for this copy too
    Uncache(entry);
    ++counters_.evictions;
    counters_.link_nbytes_out += nbytes;
  }

  void Load(Entry& entry, std::size_t slot, Stream main) {
    const std::size_t nbytes = layout_->slots()[slot].nbytes;
    std::byte* place = host_.data() + OffsetOf(slot, entry);
    const bool poison = injection_.Get().poison;
    if (poison) B::PoisonDevice(main, entry.destination, nbytes);
    std::lock_guard<std::mutex> order(lanes_.order);
    Begin(main, lanes_.to_device);  // the destination may be recycled memory with users before us
    B::Wait(lanes_.to_device, entry.event);
    const Mark began = recording_.Now(lanes_.to_device);
    const bool link = !entry.cached;
    Inject(slot, true, lanes_.to_device);
    if (entry.cached) {
      (*entry.cached)->locked = true;
      B::CopyOnDevice(lanes_.to_device, entry.destination, Cached(entry), nbytes);
      if (poison) B::PoisonDevice(lanes_.to_device, Cached(entry), nbytes);
      ++counters_.hits;
    } else {
      B::CopyToDevice(lanes_.to_device, entry.destination, place, nbytes);
      if (poison) B::PoisonHost(lanes_.to_device, place, nbytes);
      ++counters_.misses;
      counters_.link_nbytes_in += nbytes;
    }
    recording_.Note({false, false, link, run_, slot, nbytes}, began, lanes_.to_device);
    B::Record(entry.event, lanes_.to_device);
  }

  // What is on `main` so far comes before what comes on `lane` from now on.
  void Begin(Stream main, Stream lane) {
    B::Record(ready_, main);
    B::Wait(lane, ready_);
  }

  void Inject(std::size_t slot, bool fetch, Stream lane) {
    const Injection injection = injection_.Get();
    if (injection.delay_seconds > 0) B::Delay(lane, injection.delay_seconds);
    if (injection.fail_slot == static_cast<std::int64_t>(slot) && injection.fail_fetch == fetch) {
      B::Fail(lane, Named(slot) + ": the copy failed on purpose");
    }
  }

  // `main` waits for the entry's copy. Unlocked meanwhile: on the CPU the wait blocks this thread,
  // and another one of the same run may have a transfer to start.
  void Join(Lock& lock, std::int64_t run, Stream main, std::size_t slot, Entry& entry) {
    // The last one waits all the same, and by the lanes' order for all: XLA frees the buffers next.
    if (injection_.Get().skip_waits && parked_ > 1) return;
    const Phase phase = entry.phase;
    const typename B::Event event = entry.event;
    const Mark began = recording_.Now(main);
    lock.unlock();
    B::Wait(main, event);
    lock.lock();
    const std::size_t nbytes = layout_->slots()[slot].nbytes;
    recording_.Note({true, phase == Phase::kLeaving, !entry.cached, run, slot, nbytes}, began, main);
    CheckRun(run, slot);
    if (entry.phase != phase) throw Missing(slot, phase);
  }

  void JoinLanes(Stream main) {
    std::lock_guard<std::mutex> order(lanes_.order);
    B::Record(ready_, lanes_.to_host);
    B::Wait(lanes_.to_device, ready_);
    B::Wait(main, ready_);
    B::Record(ready_, lanes_.to_device);
    B::Wait(lanes_.to_host, ready_);
    B::Wait(main, ready_);
  }

  // Throws while a run holds the arena.
  void CheckIdle(const char* what) const {
    if (parked_ > 0 && !failed_) {
      throw Error(Code::kFailedPrecondition,
                  std::string(what) + " while a run holds the arena: " + std::to_string(parked_) +
                      " tensors are parked");
    }
  }

  void Check(std::size_t slot, std::size_t nbytes) const {
    if (slot >= slots_.size()) {
      throw Error(Code::kInvalidArgument, Named(slot) + ": the arena's layout has " +
                                              std::to_string(slots_.size()) + " slots");
    }
    if (layout_->slots()[slot].nbytes != nbytes) {
      throw Error(Code::kInvalidArgument, Named(slot) + ": the tensor has " +
                                              std::to_string(nbytes) +
                                              " bytes, but the slot was laid out for " +
                                              std::to_string(layout_->slots()[slot].nbytes));
    }
  }

  void CheckRun(std::int64_t run, std::size_t slot) const {
    if (run != run_ || parked_ == 0) {
      throw Error(Code::kFailedPrecondition,
                  Named(slot) +
                      ": this run has nothing parked: it started no transfer, or it showed no "
                      "life for so long that another run took the arena over");
    }
    if (failed_) throw AlreadyFailed();
  }

  Error AlreadyFailed() const {
    return Error(Code::kFailedPrecondition, "a transfer of this run failed before");
  }

  Error Missing(std::size_t slot, Phase wanted) {
    SlotStack<Entry>& stack = slots_[slot];
    std::string top = stack.height() == 0 ? "nothing is parked in it"
                                          : std::string("the last tensor in it is ") +
                                                Name(stack[stack.height() - 1].phase);
    return Error(Code::kFailedPrecondition,
                 Named(slot) + " has no tensor that is " + Name(wanted) + ": " + top);
  }

  std::string Named(std::size_t slot) const {
    return "slot " + std::to_string(static_cast<std::int64_t>(slot)) + " on device " +
           std::to_string(lanes_.device);
  }

  std::size_t OffsetOf(std::size_t slot, const Entry& entry) const {
    const SlotLayout& where = layout_->slots()[slot];
    return where.offset + slots_[slot].IndexOf(entry) * where.stride;
  }

  std::byte* Cached(const Entry& entry) const {
    return cache_memory_->data() + (*entry.cached)->offset;
  }

  const std::shared_ptr<const Layout> layout_;
  Lanes<B>& lanes_;
  const InjectionBox& injection_;
  FreeRanges places_;  // of the arena: the plan keeps them apart, this checks that it does
  typename B::HostMemory host_;
  typename B::Event ready_;  // recorded and waited for in one go, so one is enough

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<SlotStack<Entry>> slots_;
  std::optional<typename B::DeviceMemory> cache_memory_;
  TensorCache cache_{0};
  Counters counters_;
  Recording<B> recording_;
  std::size_t parked_ = 0;  // entries that are not empty
  std::uint64_t beats_ = 0;
  std::int64_t run_ = kUnknownRun;
  bool failed_ = false;
  std::thread::id launcher_;
};

}  // namespace vmem
