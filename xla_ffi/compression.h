// What compressions need beside their byte arrays: a store for each executable and device, with what
// was counted at each site, and overflow memory for tensors that turned denser than planned.
//
// A template over a codec C, which supplies
//   C::Backend, C::Stream      those of transfers
//   C::Overflow(nbytes)        RAII, data(): addresses for that many bytes, memory when written
//   C(sites)                   counts, for that many sites, of one device
//   C::Compress, C::Decompress on a stream; nobody waits for the device
//   C::Totals()                waits for the device
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "error.h"
#include "registry.h"
#include "teardown.h"
#include "zero_values.h"

namespace vmem {

// A tensor of `nbytes` that a step compresses into a byte array of `capacity`: once, or, in a loop,
// `slots` times, before a later loop decompresses it as often, the last one first.
struct Site {
  std::size_t nbytes = 0;
  std::size_t capacity = 0;
  std::size_t slots = 1;
};

// Those of a store, and where the overflow memory of each begins.
class Sites {
 public:
  explicit Sites(std::vector<Site> sites) : sites_(std::move(sites)) {
    for (std::size_t i = 0; i < sites_.size(); ++i) {
      overflow_offsets_.push_back(overflow_nbytes_);
      // One with room for everything, whatever its elements, never overflows.
      const CompressedFormat widest_mask{sites_[i].nbytes, 1};
      if (sites_[i].capacity < widest_mask.values_offset() + Most(i)) {
        overflow_nbytes_ += sites_[i].slots * OverflowStride(i);
      }
    }
  }

  std::size_t size() const { return sites_.size(); }
  const Site& operator[](std::size_t i) const { return sites_[i]; }
  std::size_t overflow_offset(std::size_t i, std::size_t slot) const {
    return overflow_offsets_[i] + slot * OverflowStride(i);
  }
  // Of all, at the worst.
  std::size_t overflow_nbytes() const { return overflow_nbytes_; }

 private:
  static constexpr std::size_t kLargestPage = 1 << 16;  // so that each tensor's can be given back

  // Bytes of all values of a tensor.
  std::uint64_t Most(std::size_t i) const {
    return CeilDiv(sites_[i].nbytes, kUnitNbytes) * kUnitNbytes;
  }
  std::uint64_t OverflowStride(std::size_t i) const {
    return CeilDiv(Most(i), kLargestPage) * kLargestPage;
  }

  std::vector<Site> sites_;
  std::vector<std::size_t> overflow_offsets_;
  std::size_t overflow_nbytes_ = 0;
};

// What one site did on one device since its store was opened.
struct SiteCounters {
  std::uint64_t runs = 0;
  std::uint64_t elements = 0;
  std::uint64_t values = 0;
  std::uint64_t overflow_nbytes = 0;
};

template <class C>
class DeviceStore {
 public:
  using Backend = typename C::Backend;
  using Stream = typename C::Stream;

  // Takes the first overflow memory now: a device that cannot have any shall say so before a run.
  DeviceStore(std::shared_ptr<const Sites> sites, int device)
      : sites_(std::move(sites)), device_(device), codec_(sites_->size()), counted_(sites_->size()) {
    vacant_.push_back({std::make_unique<Overflow>(sites_->overflow_nbytes()), std::nullopt});
  }

  // Frees memory that what is in flight may use: XLA's effects say when nothing is.
  ~DeviceStore() {
    const TeardownGuard<Backend> guard(device_);
    runs_.clear();
    vacant_.clear();
  }

  DeviceStore(const DeviceStore&) = delete;
  DeviceStore& operator=(const DeviceStore&) = delete;

  void Compress(std::int64_t run, Stream stream, std::size_t site, std::uint32_t itemsize,
                const void* x, std::size_t nbytes, void* c, std::size_t capacity) {
    const CompressedFormat format = Checked(site, itemsize, nbytes, capacity);
    Lock lock(mutex_);
    Run& mine = Begun(run, stream);
    Held& held = mine.held.try_emplace(site, Held{itemsize, 0}).first->second;
    const std::size_t slots = (*sites_)[site].slots;
    if (held.count == slots) {
      throw Error(Code::kFailedPrecondition,
                  Named(site) + (slots == 1 ? " is compressed for the second time"
                                            : " is compressed more than " + std::to_string(slots) +
                                                  " times") +
                      " before it was decompressed");
    }
    std::byte* const overflow = OverflowOf(mine, site, held.count);
    held.count += 1;
    counted_[site].runs += 1;
    counted_[site].elements += format.elements();
    lock.unlock();
    codec_.Compress(stream, site, format, x, static_cast<std::byte*>(c), capacity, overflow);
  }

  void Decompress(std::int64_t run, Stream stream, std::size_t site, std::uint32_t itemsize,
                  const void* c, std::size_t capacity, void* x, std::size_t nbytes) {
    const CompressedFormat format = Checked(site, itemsize, nbytes, capacity);
    Lock lock(mutex_);
    auto mine = runs_.find(run);
    if (mine == runs_.end() || mine->second.held.count(site) == 0) {
      throw Error(Code::kFailedPrecondition,
                  Named(site) + " holds nothing: this run has not compressed it, or has "
                  "decompressed it already");
    }
    const std::uint32_t compressed = mine->second.held[site].itemsize;
    if (compressed != itemsize) {
      throw Error(Code::kInvalidArgument,
                  Named(site) + " was compressed as elements of " + std::to_string(compressed) +
                      " bytes, and is decompressed as elements of " + std::to_string(itemsize));
    }
    Held& held = mine->second.held[site];
    std::byte* const overflow = OverflowOf(mine->second, site, held.count - 1);
    lock.unlock();
    codec_.Decompress(stream, format, static_cast<const std::byte*>(c), capacity, overflow, x);
    lock.lock();
    // Only now: what another run writes there must come later on the stream
    held.count -= 1;
    if (held.count == 0) mine->second.held.erase(site);
    if (mine->second.held.empty()) End(mine);
  }

  // Gives back the overflow memory of failed runs. The caller knows that no run is in flight.
  void Reset() {
    Lock lock(mutex_);
    while (!runs_.empty()) End(runs_.begin());
  }

  // By site. Waits for the device.
  std::vector<SiteCounters> counters() const {
    typename Backend::DeviceGuard guard(device_);
    const std::vector<Written> totals = codec_.Totals();
    Lock lock(mutex_);
    std::vector<SiteCounters> result = counted_;
    for (std::size_t i = 0; i < result.size(); ++i) {
      result[i].values = totals[i].values;
      result[i].overflow_nbytes = totals[i].overflow_nbytes;
    }
    return result;
  }

 private:
  using Lock = std::unique_lock<std::mutex>;
  using Overflow = typename C::Overflow;

  // How many tensors of a site are compressed, and the bytes of their elements.
  struct Held {
    std::uint32_t itemsize = 1;
    std::size_t count = 0;
  };

  // One execution that has something compressed, and the overflow memory that is its own.
  struct Run {
    std::thread::id launcher;
    Stream stream;
    std::unique_ptr<Overflow> overflow;
    std::map<std::size_t, Held> held;  // by site
  };
  using Runs = std::map<std::int64_t, Run>;

  // Overflow memory that no run has. Work on `last` may still use it.
  struct Vacant {
    std::unique_ptr<Overflow> overflow;
    std::optional<Stream> last;
  };

  static std::string Named(std::size_t site) { return "site " + std::to_string(site); }

  CompressedFormat Checked(std::size_t site, std::uint32_t itemsize, std::size_t nbytes,
                           std::size_t capacity) const {
    if (site >= sites_->size()) {
      throw Error(Code::kInvalidArgument,
                  Named(site) + " of a store with " + std::to_string(sites_->size()) + " sites");
    }
    const Site& planned = (*sites_)[site];
    if (nbytes != planned.nbytes || capacity != planned.capacity) {
      throw Error(Code::kInvalidArgument,
                  Named(site) + " is for a tensor of " + std::to_string(planned.nbytes) +
                      " bytes in " + std::to_string(planned.capacity) + ", not for one of " +
                      std::to_string(nbytes) + " bytes in " + std::to_string(capacity));
    }
    const CompressedFormat format{nbytes, itemsize};
    if (capacity < format.values_offset()) {
      throw Error(Code::kInvalidArgument,
                  Named(site) + " has a capacity of " + std::to_string(capacity) +
                      " bytes; its entries and its mask alone take " +
                      std::to_string(format.values_offset()));
    }
    return format;
  }

  std::byte* OverflowOf(const Run& run, std::size_t site, std::size_t slot) const {
    std::byte* const data = run.overflow->data();
    return data == nullptr ? nullptr : data + sites_->overflow_offset(site, slot);
  }

  // The run, which begins where it holds nothing yet.
  Run& Begun(std::int64_t id, Stream stream) {
    auto found = runs_.find(id);
    if (found != runs_.end()) return found->second;
    const std::thread::id launcher = std::this_thread::get_id();
    if (Backend::kOneThreadLaunches) {
      // An earlier run of this thread that still holds something has failed on the way
      for (auto run = runs_.begin(); run != runs_.end();) {
        const auto next = std::next(run);
        if (run->second.launcher == launcher) End(run);
        run = next;
      }
    }
    std::unique_ptr<Overflow> overflow;
    for (auto vacant = vacant_.begin(); vacant != vacant_.end(); ++vacant) {
      if (vacant->last.value_or(stream) != stream) continue;
      overflow = std::move(vacant->overflow);
      vacant_.erase(vacant);
      break;
    }
    if (overflow == nullptr) overflow = std::make_unique<Overflow>(sites_->overflow_nbytes());
    return runs_.emplace(id, Run{launcher, stream, std::move(overflow), {}}).first->second;
  }

  void End(typename Runs::iterator run) {
    vacant_.push_back({std::move(run->second.overflow), run->second.stream});
    runs_.erase(run);
  }

  std::shared_ptr<const Sites> sites_;
  int device_;
  C codec_;
  mutable std::mutex mutex_;
  Runs runs_;
  std::vector<Vacant> vacant_;
  std::vector<SiteCounters> counted_;  // what the device does not count
};

inline constexpr Words kStoreWords{"store of compressed tensors", "open", "open it"};

// The stores of one platform.
template <class C>
class Stores {
 public:
  // Leaked, as the engines are.
  static Stores& Get() {
    static Stores* const stores = std::make_unique<Stores>().release();
    return *stores;
  }

  // Opens the store on `device` if it is not open there yet.
  void Open(std::int64_t id, int device) {
    stores_.Prepare(id, device, [&](std::shared_ptr<const Sites> sites) {
      typename C::Backend::DeviceGuard guard(device);
      return std::make_shared<DeviceStore<C>>(std::move(sites), device);
    });
  }

  void Free(std::int64_t id) { stores_.Free(id); }

  std::shared_ptr<DeviceStore<C>> Find(std::int64_t id, int device) const {
    return stores_.Find(id, device);
  }

 private:
  OnDevices<Sites, DeviceStore<C>> stores_{kStoreWords, C::Backend::kPlatform};
};

}  // namespace vmem
