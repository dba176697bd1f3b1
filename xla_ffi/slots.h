// The slots of an arena on one device, and which of their places are filled: all that a run changes.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "copy.h"
#include "error.h"
#include "free_ranges.h"
#include "layout.h"
#include "slot_stack.h"

namespace vmem {

template <class B>
class Slots {
 public:
  // `host` is where the arena begins.
  Slots(std::shared_ptr<const Layout> layout, std::byte* host, int device)
      : layout_(std::move(layout)), device_(device), free_(layout_->nbytes()) {
    for (std::size_t slot = 0; slot < layout_->slots().size(); ++slot) {
      const SlotLayout& where = layout_->slots()[slot];
      std::vector<Parked<B>> places(where.depth);
      for (std::size_t i = 0; i < where.depth; ++i) {
        places[i].event = B::NewEvent();
        Copy& copy = places[i].copy;
        copy.place = {slot, i};
        copy.nbytes = where.nbytes;
        copy.stride = where.stride;
        copy.offset = where.offset + i * where.stride;
        copy.host = host + copy.offset;
      }
      stacks_.emplace_back(std::move(places));
    }
  }

  // Tensors that are parked.
  std::size_t parked() const { return parked_; }
  std::size_t nbytes() const { return layout_->nbytes(); }

  // Throws unless the layout has that slot, for tensors of that size.
  void Check(std::size_t slot, std::size_t nbytes) const {
    if (slot >= stacks_.size()) {
      throw Error(Code::kInvalidArgument, Named(slot) + ": the arena's layout has " +
                                              std::to_string(stacks_.size()) + " slots");
    }
    const std::size_t planned = layout_->slots()[slot].nbytes;
    if (planned != nbytes) {
      throw Error(Code::kInvalidArgument,
                  Named(slot) + ": the tensor has " + std::to_string(nbytes) +
                      " bytes, but the slot was laid out for " + std::to_string(planned));
    }
  }

  // Fills the next place of the slot; throws if there is none, or a tensor of another slot lies there.
  Parked<B>& Push(std::size_t slot) {
    Parked<B>* parked = stacks_[slot].Push();
    if (parked == nullptr) {
      throw Error(Code::kFailedPrecondition,
                  Named(slot) + " is full: " + std::to_string(stacks_[slot].depth()) +
                      " tensors are parked in it already");
    }
    const auto& [offset, stride] = std::pair(parked->copy.offset, parked->copy.stride);
    if (stride > 0 && free_.Find(stride, offset) != offset) {
      stacks_[slot].Settle();
      throw Error(Code::kFailedPrecondition,
                  Named(slot) +
                      ": its place in the arena still holds another tensor; the program runs in "
                      "another order than the plan's");
    }
    free_.Take(offset, stride);
    parked->phase = Phase::kLeaving;
    ++parked_;
    return *parked;
  }

  // The last tensor of the slot in that phase, of those for which `wanted` holds; or nullptr.
  template <class Predicate>
  Parked<B>* Last(std::size_t slot, Phase phase, Predicate wanted) {
    return stacks_[slot].Topmost(
        [&](const Parked<B>& parked) { return parked.phase == phase && wanted(parked); });
  }

  // The last, or the first, tensor of the slot in that phase; throws if there is none.
  Parked<B>& Last(std::size_t slot, Phase phase) {
    return Found(slot, phase, Last(slot, phase, [](const Parked<B>&) { return true; }));
  }
  Parked<B>& First(std::size_t slot, Phase phase) {
    return Found(slot, phase, stacks_[slot].Lowest([&](const Parked<B>& parked) {
      return parked.phase == phase;
    }));
  }

  void Empty(Parked<B>& parked) {
    free_.Give(parked.copy.offset, parked.copy.stride);
    parked.phase = Phase::kEmpty;
    stacks_[parked.copy.place.slot].Settle();
    --parked_;
  }

  // Every place is empty, as before the first run.
  void Reset() {
    for (SlotStack<Parked<B>>& stack : stacks_) {
      for (std::size_t i = 0; i < stack.height(); ++i) stack[i].phase = Phase::kEmpty;
      stack.Settle();
    }
    free_ = FreeRanges(layout_->nbytes());
    parked_ = 0;
  }

  Error Missing(std::size_t slot, Phase wanted) {
    SlotStack<Parked<B>>& stack = stacks_[slot];
    const std::string top = stack.height() == 0 ? "nothing is parked in it"
                                                : std::string("the last tensor in it is ") +
                                                      Name(stack[stack.height() - 1].phase);
    return Error(Code::kFailedPrecondition,
                 Named(slot) + " has no tensor that is " + Name(wanted) + ": " + top);
  }

  std::string Named(std::size_t slot) const {
    return "slot " + std::to_string(slot) + " on device " + std::to_string(device_);
  }

 private:
  Parked<B>& Found(std::size_t slot, Phase phase, Parked<B>* parked) {
    if (parked == nullptr) throw Missing(slot, phase);
    return *parked;
  }

  std::shared_ptr<const Layout> layout_;
  int device_;
  FreeRanges free_;  // of the arena: the plan keeps tensors apart, this checks that it does
  std::vector<SlotStack<Parked<B>>> stacks_;
  std::size_t parked_ = 0;  // places that are not empty
};

}  // namespace vmem
