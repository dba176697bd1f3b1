// The phases of a parked tensor, and the stack that a slot in a loop body is.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

namespace vmem {

//            offload_start        offload_done       fetch_start          fetch_done
//   kEmpty ---------------> kLeaving -------> kParked ------> kReturning ----------> kEmpty
enum class Phase { kEmpty, kLeaving, kParked, kReturning };

inline const char* Name(Phase phase) {
  switch (phase) {
    case Phase::kEmpty:
      return "empty";
    case Phase::kLeaving:
      return "leaving";
    case Phase::kParked:
      return "parked";
    default:
      return "returning";
  }
}

// Places of one slot. A forward loop pushes one tensor an iteration, the backward loop pops them in
// reverse; outside of loops the stack is one place deep.
//
// `Entry` has a member `phase`; whoever changes it calls Settle afterwards.
template <class Entry>
class SlotStack {
 public:
  explicit SlotStack(std::vector<Entry> entries) : entries_(std::move(entries)) {}

  Entry& operator[](std::size_t index) { return entries_[index]; }
  std::size_t depth() const { return entries_.size(); }
  std::size_t height() const { return height_; }  // above it every place is empty

  // The place that the next tensor takes, or nullptr when the stack is full.
  Entry* Push() { return height_ == entries_.size() ? nullptr : &entries_[height_++]; }

  // The topmost entry for which `wanted` holds, or nullptr.
  template <class Predicate>
  Entry* Topmost(Predicate wanted) {
    for (std::size_t i = height_; i-- > 0;) {
      if (wanted(entries_[i])) return &entries_[i];
    }
    return nullptr;
  }

  // The lowest entry for which `wanted` holds, or nullptr.
  template <class Predicate>
  Entry* Lowest(Predicate wanted) {
    for (std::size_t i = 0; i < height_; ++i) {
      if (wanted(entries_[i])) return &entries_[i];
    }
    return nullptr;
  }

  // After a change of phases: the places above the topmost tensor can be pushed to again.
  void Settle() {
    while (height_ > 0 && entries_[height_ - 1].phase == Phase::kEmpty) --height_;
  }

  std::size_t IndexOf(const Entry& entry) const {
    return static_cast<std::size_t>(&entry - entries_.data());
  }

 private:
  std::vector<Entry> entries_;
  std::size_t height_ = 0;
};

}  // namespace vmem
