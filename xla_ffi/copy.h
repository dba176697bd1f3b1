// One copy of a parked tensor, as the layers that make it see it.
//
// An arena hands its copies to a stack of layers. The lowest gives them to the lanes of the device; each
// of the others is an adaptor, which wraps the layer below, its upstream, and adds one concern:
//
//   CachedCopies     keeps tensors in device memory while there is room
//   CountedCopies    counts
//   RecordedCopies   times
//   FaultyCopies     injects faults, for tests
//   LaneCopies       copies
//
// An adaptor inherits what it does not change. All but the topmost have these calls, in this order for
// a copy; only the last is made without the arena's lock:
//
//   Order(main, copy, event)   what is on `main`, and for a fetch what `event` marks, comes before it
//   Run(copy)                  the lane copies
//   Done(copy, event)          `event` marks the end of the copy
//   Wait(main, copy, event)    `main` waits for the copy, which `event` marks
#pragma once

#include <cstddef>
#include <cstdint>

#include "layout.h"
#include "slot_stack.h"

namespace vmem {

// Which memories a copy is between.
enum class Route {
  kBufferToArena,
  kBufferToCache,
  kCacheToArena,  // an eviction
  kArenaToBuffer,
  kCacheToBuffer,
};

// Whether it is on the lane to the host. All that writes to the cache is: an eviction comes before what
// takes its bytes.
inline bool IsOut(Route route) {
  return route != Route::kArenaToBuffer && route != Route::kCacheToBuffer;
}

inline bool IsOverLink(Route route) {
  return route != Route::kBufferToCache && route != Route::kCacheToBuffer;
}

struct Copy {
  // Of the place, fixed
  Place place;
  std::size_t nbytes = 0;
  std::size_t stride = 0;     // bytes that it takes in the arena, or in the cache
  std::size_t offset = 0;     // in the arena
  std::byte* host = nullptr;  // the same, as an address
  // Of the run
  std::int64_t run = 0;
  void* buffer = nullptr;  // XLA's: the source, or the destination
  std::size_t others = 0;  // tensors that are parked beside this one
  // Of the cache
  Route route = Route::kBufferToArena;
  std::byte* cached = nullptr;  // where the tensor is in it, for the routes that it is part of
};

// A place, and the tensor that is parked in it.
template <class B>
struct Parked {
  Phase phase = Phase::kEmpty;
  typename B::Event event;  // the last copy to, from or within this place
  Copy copy;                // that one; an eviction leaves it as it is
};

}  // namespace vmem
