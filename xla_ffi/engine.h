// What outlives a call: the arenas of one platform, by id and device, and the lanes of its devices.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "device_arena.h"
#include "injection.h"
#include "layout.h"
#include "registry.h"

namespace vmem {

using Layouts = Registry<Layout>;

inline constexpr Words kArenaWords{"arena", "pinned", "pin it"};

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
    arenas_.Prepare(id, device, [&](std::shared_ptr<const Layout> layout) {
      typename B::DeviceGuard guard(device);
      return std::make_shared<DeviceArena<B>>(std::move(layout), LanesOf(device), injection_,
                                              lock_pages);
    });
  }

  // Waits for copies that are in flight, then gives the memory back.
  void Free(std::int64_t id) { arenas_.Free(id); }

  std::shared_ptr<DeviceArena<B>> Find(std::int64_t id, int device) const {
    return arenas_.Find(id, device);
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
  Lanes<B>& LanesOf(int device) {
    std::lock_guard<std::mutex> lock(mutex_);
    std::unique_ptr<Lanes<B>>& lanes = lanes_[device];
    if (lanes == nullptr) lanes = std::make_unique<Lanes<B>>(device);
    return *lanes;
  }

  OnDevices<Layout, DeviceArena<B>> arenas_{kArenaWords, B::kPlatform};
  std::mutex mutex_;
  std::map<int, std::unique_ptr<Lanes<B>>> lanes_;
  InjectionBox injection_;
};

}  // namespace vmem
