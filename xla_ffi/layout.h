// Where each slot of an arena lies: fixed by the plan before anything runs.
#pragma once

#include <cstddef>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "error.h"

namespace vmem {

// A stack of `depth` places for tensors of `nbytes` each, `stride` bytes apart from `offset` on.
struct SlotLayout {
  std::size_t offset = 0;
  std::size_t nbytes = 0;
  std::size_t stride = 0;
  std::size_t depth = 1;
};

// Slots may lie on top of each other when they are never parked at the same time: the plan knows.
class Layout {
 public:
  Layout(std::vector<SlotLayout> slots, std::size_t nbytes)
      : slots_(std::move(slots)), nbytes_(nbytes) {
    for (std::size_t i = 0; i < slots_.size(); ++i) {
      const SlotLayout& slot = slots_[i];
      if (slot.depth == 0 || slot.stride < slot.nbytes ||
          slot.offset + slot.depth * slot.stride > nbytes_) {
        throw Error(Code::kInvalidArgument,
                    "slot " + std::to_string(i) + " (offset " + std::to_string(slot.offset) + ", " +
                        std::to_string(slot.depth) + " places of " + std::to_string(slot.stride) +
                        " B) does not fit in an arena of " + std::to_string(nbytes_) + " B");
      }
    }
  }

  const std::vector<SlotLayout>& slots() const { return slots_; }
  std::size_t nbytes() const { return nbytes_; }

 private:
  std::vector<SlotLayout> slots_;
  std::size_t nbytes_;
};

// One place of one slot.
struct Place {
  std::size_t slot = 0;
  std::size_t index = 0;
};

inline bool operator<(const Place& a, const Place& b) {
  return std::tie(a.slot, a.index) < std::tie(b.slot, b.index);
}

}  // namespace vmem
