// What outlives a call: the arenas of one platform, by id and device, and the lanes of its devices.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "device_arena.h"
#include "error.h"
#include "injection.h"
#include "layout.h"

namespace vmem {

// The layouts of all live arenas, of any platform. An id is never used twice, so a program that
// outlives its arena gets an error, not somebody else's memory.
class Layouts {
 public:
  // Leaked, as the engines are.
  static Layouts& Get() {
    static Layouts* const layouts = std::make_unique<Layouts>().release();
    return *layouts;
  }

  std::int64_t Add(Layout layout) {
    std::lock_guard<std::mutex> lock(mutex_);
    layouts_[++last_id_] = std::make_shared<const Layout>(std::move(layout));
    return last_id_;
  }

  // nullptr when there is no such arena (any more).
  std::shared_ptr<const Layout> Find(std::int64_t id) const {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = layouts_.find(id);
    return found == layouts_.end() ? nullptr : found->second;
  }

  bool Remove(std::int64_t id) {
    std::lock_guard<std::mutex> lock(mutex_);
    return layouts_.erase(id) > 0;
  }

  std::size_t size() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return layouts_.size();
  }

 private:
  mutable std::mutex mutex_;
  std::map<std::int64_t, std::shared_ptr<const Layout>> layouts_;
  std::int64_t last_id_ = 0;
};

inline Error UnknownArena(std::int64_t id) {
  return Error(Code::kFailedPrecondition,
               "there is no arena " + std::to_string(id) +
                   ": it was freed, or this program was made in another process");
}

template <class B>
class Engine {
 public:
  // Leaked on purpose: XLA's threads and the CUDA driver may outlive static destructors, and no
  // destructor may call either when the process ends.
  static Engine& Get() {
    static Engine* const engine = std::make_unique<Engine>().release();
    return *engine;
  }

  // Pins the arena on `device` if it is not pinned there yet.
  void Pin(std::int64_t id, int device, bool lock_pages) {
    std::shared_ptr<const Layout> layout = Layouts::Get().Find(id);
    if (layout == nullptr) throw UnknownArena(id);
    std::lock_guard<std::mutex> one_at_a_time(pinning_);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (arenas_.count({id, device}) > 0) return;
    }
    typename B::DeviceGuard guard(device);
    auto arena = std::make_shared<DeviceArena<B>>(layout, LanesOf(device), injection_, lock_pages);
    std::lock_guard<std::mutex> lock(mutex_);
    arenas_[{id, device}] = std::move(arena);
  }

  // Waits for copies that are in flight, then gives the memory back.
  void Free(std::int64_t id) {
    std::vector<std::shared_ptr<DeviceArena<B>>> freed;  // destroyed without the lock
    std::lock_guard<std::mutex> one_at_a_time(pinning_);
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto arena = arenas_.lower_bound({id, kFirstDevice});
         arena != arenas_.end() && arena->first.first == id;) {
      freed.push_back(std::move(arena->second));
      arena = arenas_.erase(arena);
    }
  }

  std::shared_ptr<DeviceArena<B>> Find(std::int64_t id, int device) const {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      auto found = arenas_.find({id, device});
      if (found != arenas_.end()) return found->second;
    }
    if (Layouts::Get().Find(id) == nullptr) throw UnknownArena(id);
    throw Error(Code::kFailedPrecondition, "arena " + std::to_string(id) + " is not pinned on " +
                                               B::kPlatform + " device " + std::to_string(device) +
                                               ": pin it before the first run");
  }

  void Inject(const Injection& injection) { injection_.Set(injection); }

  // Ends the lanes for good: before XLA frees what they may be copying, at the end of the process.
  void Stop() {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& [device, lanes] : lanes_) {
      B::StopLane(lanes->to_host);
      B::StopLane(lanes->to_device);
    }
    for (auto& [device, lanes] : lanes_) {
      B::JoinLane(lanes->to_host);
      B::JoinLane(lanes->to_device);
    }
  }

 private:
  static constexpr int kFirstDevice = 0;

  Lanes<B>& LanesOf(int device) {
    std::lock_guard<std::mutex> lock(mutex_);
    std::unique_ptr<Lanes<B>>& lanes = lanes_[device];
    if (lanes == nullptr) lanes = std::make_unique<Lanes<B>>(device);
    return *lanes;
  }

  mutable std::mutex mutex_;
  std::mutex pinning_;  // pinning takes seconds, during which handlers of other arenas may run
  std::map<std::pair<std::int64_t, int>, std::shared_ptr<DeviceArena<B>>> arenas_;
  std::map<int, std::unique_ptr<Lanes<B>>> lanes_;
  InjectionBox injection_;
};

}  // namespace vmem
