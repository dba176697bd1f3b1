// What a run changes in an arena: which places are filled, and whose turn it is.
//
// A failed run leaves both as they are, since XLA calls nobody then: the next run resets them. A backend
// B supplies B::kOneThreadLaunches: whether one thread at a time launches a device's work, run by run.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "error.h"
#include "layout.h"
#include "ownership.h"
#include "slots.h"

namespace vmem {

template <class B>
struct RunState {
  using Lock = Ownership::Lock;

  RunState(std::shared_ptr<const Layout> layout, std::byte* host, int device)
      : slots(std::move(layout), host, device) {}

  // `run` has the arena from here on, when it is its turn: see Ownership. Calls `drop`, which resets,
  // where another run has left something.
  template <class Drop>
  void Begin(Lock& lock, std::int64_t run, double patience, Drop drop) {
    if (run != owner.run()) {
      owner.Await(lock, run, B::kOneThreadLaunches, patience, [this] { return IsIdle(); });
    }
    const bool is_owner = run == owner.run();  // by now: another thread of it may have begun it
    if (is_owner && owner.failed() && run != Ownership::kUnknownRun) throw AlreadyFailed();
    if (!IsIdle() && (!is_owner || owner.failed())) drop();
    owner.Begin(run);
  }

  // Nothing is parked, as before the first run. What is still to come of the run that had the arena is
  // refused.
  void Reset() {
    slots.Reset();
    owner.Fail();
  }

  bool IsIdle() const { return slots.parked() == 0; }

  // Throws while a run holds the arena.
  void CheckIdle(const char* what) const {
    if (!IsIdle() && !owner.failed()) {
      throw Error(Code::kFailedPrecondition,
                  std::string(what) + " while a run holds the arena: " +
                      std::to_string(slots.parked()) + " tensors are parked");
    }
  }

  // Throws unless `run` holds the arena.
  void CheckRun(std::int64_t run, std::size_t slot) const {
    if (run != owner.run() || IsIdle()) {
      throw Error(Code::kFailedPrecondition,
                  slots.Named(slot) +
                      ": this run has nothing parked: it started no transfer, or it showed no "
                      "life for so long that another run took the arena over");
    }
    if (owner.failed()) throw AlreadyFailed();
  }

  Slots<B> slots;
  Ownership owner;

 private:
  static Error AlreadyFailed() {
    return Error(Code::kFailedPrecondition, "a transfer of this run failed before");
  }
};

}  // namespace vmem
