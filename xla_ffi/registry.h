// What outlives a call, by id: descriptions of any platform, and what was made of them on devices.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "error.h"

namespace vmem {

// What errors call a thing and how it is made ready on a device.
struct Words {
  const char* thing;    // "arena"
  const char* ready;    // "pinned"
  const char* prepare;  // "pin it"
};

inline Error Unknown(const Words& words, std::int64_t id) {
  return Error(Code::kFailedPrecondition,
               std::string("there is no ") + words.thing + " " + std::to_string(id) +
                   ": it was freed, or this program was made in another process");
}

// All live descriptions. An id is never used twice, so a program that outlives what it names gets
// an error, not somebody else's memory.
template <class Description>
class Registry {
 public:
  // Leaked, as the engines are.
  static Registry& Get() {
    static Registry* const registry = std::make_unique<Registry>().release();
    return *registry;
  }

  std::int64_t Add(Description description) {
    std::lock_guard<std::mutex> lock(mutex_);
    descriptions_[++last_id_] = std::make_shared<const Description>(std::move(description));
    return last_id_;
  }

  // nullptr when there is no such thing (any more).
  std::shared_ptr<const Description> Find(std::int64_t id) const {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = descriptions_.find(id);
    return found == descriptions_.end() ? nullptr : found->second;
  }

  bool Remove(std::int64_t id) {
    std::lock_guard<std::mutex> lock(mutex_);
    return descriptions_.erase(id) > 0;
  }

  std::size_t size() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return descriptions_.size();
  }

 private:
  mutable std::mutex mutex_;
  std::map<std::int64_t, std::shared_ptr<const Description>> descriptions_;
  std::int64_t last_id_ = 0;
};

// What was made of descriptions on the devices of one platform.
template <class Description, class Thing>
class OnDevices {
 public:
  OnDevices(const Words& words, const char* platform) : words_(words), platform_(platform) {}

  // Keeps make(description) for `device`, unless it has one.
  template <class Make>
  void Prepare(std::int64_t id, int device, Make make) {
    std::lock_guard<std::mutex> one_at_a_time(preparing_);
    std::shared_ptr<const Description> description = Registry<Description>::Get().Find(id);
    if (description == nullptr) throw Unknown(words_, id);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (things_.count({id, device}) > 0) return;
    }
    std::shared_ptr<Thing> thing = make(std::move(description));
    std::lock_guard<std::mutex> lock(mutex_);
    things_[{id, device}] = std::move(thing);
  }

  // Destroys those of all devices.
  void Free(std::int64_t id) {
    std::vector<std::shared_ptr<Thing>> freed;  // destroyed without the lock
    std::lock_guard<std::mutex> one_at_a_time(preparing_);
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto thing = things_.lower_bound({id, kFirstDevice});
         thing != things_.end() && thing->first.first == id;) {
      freed.push_back(std::move(thing->second));
      thing = things_.erase(thing);
    }
  }

  std::shared_ptr<Thing> Find(std::int64_t id, int device) const {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      auto found = things_.find({id, device});
      if (found != things_.end()) return found->second;
    }
    if (Registry<Description>::Get().Find(id) == nullptr) throw Unknown(words_, id);
    throw Error(Code::kFailedPrecondition,
                std::string(words_.thing) + " " + std::to_string(id) + " is not " + words_.ready +
                    " on " + platform_ + " device " + std::to_string(device) + ": " +
                    words_.prepare + " before the first run");
  }

 private:
  static constexpr int kFirstDevice = 0;

  Words words_;
  const char* platform_;
  mutable std::mutex mutex_;
  std::mutex preparing_;  // that takes seconds, during which handlers of other things may run
  std::map<std::pair<std::int64_t, int>, std::shared_ptr<Thing>> things_;
};

}  // namespace vmem
