// The tensor cache in front of an arena: which way each tensor goes, and the evictions that makes.
//
// Out goes into the cache, by a copy on the device, or over the link where it does not fit; back from
// where it is. SuperNeurons, section 3.3.2; tensor_cache.h chooses who leaves. A backend B supplies
// B::DeviceMemory(nbytes): RAII, data().
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <utility>

#include "copy.h"
#include "tensor_cache.h"

namespace vmem {

template <class Upstream>
class CachedCopies : public Upstream {
 public:
  using B = typename Upstream::Backend;
  using Stream = typename Upstream::Stream;

  using Upstream::Upstream;

  // Begins the copy out.
  void Store(Stream main, Parked<B>& parked) {
    Copy& copy = parked.copy;
    copy.route = Route::kBufferToArena;
    const auto together = this->Together();
    Upstream::Order(main, copy, parked.event);
    if (const auto admission = cache_.Admit(copy.stride, copy.offset)) {
      for (TensorCache::Handle victim : admission->victims) Evict(victim, copy.run);
      held_[copy.place] = {cache_.Insert(copy.place, admission->offset, copy.stride), &parked};
      copy.route = Route::kBufferToCache;
      copy.cached = memory_->data() + admission->offset;
    }
    Upstream::Run(copy);
    Upstream::Done(copy, parked.event);
  }

  // The copy out has been waited for, so the tensor may be evicted.
  void Stored(const Parked<B>& parked) {
    const auto held = held_.find(parked.copy.place);
    if (held != held_.end()) held->second.cached->locked = false;
  }

  // Begins the copy back.
  void Load(Stream main, Parked<B>& parked) {
    Copy& copy = parked.copy;
    const auto held = held_.find(copy.place);
    copy.route = held == held_.end() ? Route::kArenaToBuffer : Route::kCacheToBuffer;
    if (held != held_.end()) held->second.cached->locked = true;
    const auto together = this->Together();
    Upstream::Order(main, copy, parked.event);
    Upstream::Run(copy);
    Upstream::Done(copy, parked.event);
  }

  // The tensor is needed no more.
  void Forget(const Parked<B>& parked) {
    const auto held = held_.find(parked.copy.place);
    if (held == held_.end()) return;
    cache_.Remove(held->second.cached);
    held_.erase(held);
  }

  // None is.
  void ForgetAll() {
    held_.clear();
    cache_ = TensorCache(cache_.capacity());
  }

  // Device memory for the cache, in bytes; 0 takes it away. Nothing may be parked.
  void SetCapacity(std::size_t nbytes) {
    held_.clear();
    cache_ = TensorCache(0);
    memory_.reset();
    if (nbytes == 0) return;
    memory_.emplace(nbytes);
    cache_ = TensorCache(nbytes);
  }

  const TensorCache& cache() const { return cache_; }

 private:
  struct Held {
    TensorCache::Handle cached;
    Parked<B>* parked = nullptr;
  };

  void Evict(TensorCache::Handle victim, std::int64_t run) {
    Parked<B>& parked = *held_.at(victim->place).parked;
    Copy copy = parked.copy;
    copy.route = Route::kCacheToArena;
    copy.run = run;
    Upstream::Run(copy);
    Upstream::Done(copy, parked.event);  // its fetch has to wait for this copy too
    Forget(parked);
  }

  TensorCache cache_{0};
  std::optional<typename B::DeviceMemory> memory_;
  std::map<Place, Held> held_;  // what is in the cache
};

}  // namespace vmem
