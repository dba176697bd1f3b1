// Which parked tensors stay in device memory: SuperNeurons, section 3.3.2 (LRU with locks).
//
// Bookkeeping only: it hands out byte ranges of a fixed capacity and names what must leave for a
// newcomer. The device arena copies and counts.
#pragma once

#include <cstddef>
#include <list>
#include <optional>
#include <vector>

#include "free_ranges.h"
#include "layout.h"

namespace vmem {

// A tensor in the cache. Locked while a copy to or from it is in flight: then it cannot leave.
struct CachedTensor {
  Place place;
  std::size_t offset = 0;
  std::size_t nbytes = 0;
  bool locked = true;
};

class TensorCache {
 public:
  using Handle = std::list<CachedTensor>::iterator;

  explicit TensorCache(std::size_t capacity) : capacity_(capacity), free_(capacity) {}

  struct Admission {
    std::size_t offset = 0;
    std::vector<Handle> victims;  // to be copied out and removed first, least recently used first
  };

  // How `nbytes` could come in, or nothing when even all unlocked tensors would not make room.
  // Prefers the tensor's own arena offset: with a capacity of the whole arena nothing ever leaves,
  // because the plan keeps arena places that are in use at once apart.
  std::optional<Admission> Admit(std::size_t nbytes, std::size_t arena_offset) {
    if (nbytes > capacity_) return std::nullopt;
    Admission admission;
    FreeRanges ranges = free_;
    auto candidate = lru_.end();
    for (;;) {
      if (auto offset = ranges.Find(nbytes, arena_offset)) {
        admission.offset = *offset;
        return admission;
      }
      do {
        if (candidate == lru_.begin()) return std::nullopt;
        --candidate;
      } while (candidate->locked);
      ranges.Give(candidate->offset, candidate->nbytes);
      admission.victims.push_back(candidate);
    }
  }

  // Puts a tensor in, locked and most recently used, where Admit said.
  Handle Insert(Place place, std::size_t offset, std::size_t nbytes) {
    free_.Take(offset, nbytes);
    used_ += nbytes;
    lru_.push_front(CachedTensor{place, offset, nbytes, true});
    return lru_.begin();
  }

  void Remove(Handle tensor) {
    free_.Give(tensor->offset, tensor->nbytes);
    used_ -= tensor->nbytes;
    lru_.erase(tensor);
  }

  std::size_t capacity() const { return capacity_; }
  std::size_t used() const { return used_; }

 private:
  std::size_t capacity_;
  std::size_t used_ = 0;
  FreeRanges free_;
  std::list<CachedTensor> lru_;  // most recently used first
};

}  // namespace vmem
