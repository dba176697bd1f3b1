// When each copy ran and how long the compute stream waited for it, for those who ask.
//
// A mark is a point of a stream whose time is known once the stream has passed it: nobody waits for
// it before the spans are read. A backend B supplies
//   B::Mark                   a copyable handle
//   B::NewMark(stream)        a mark at the end of what is on `stream` so far
//   B::Origin(lane)           what marks are measured from; its maker waits for the lane
//   origin.Seconds(mark)      on the host's steady clock; waits until the mark has been passed
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "copy.h"
#include "error.h"

namespace vmem {

// One copy, or one wait for it.
struct Span {
  bool waits = false;  // the compute stream waited; else a lane copied
  bool out = false;    // to the host (an eviction is one too); else to the device
  bool link = false;   // over the link; else between the cache and XLA's buffer
  std::int64_t run = 0;
  std::size_t slot = 0;
  std::size_t nbytes = 0;
  double begin = 0.0;  // seconds of the host's steady clock
  double end = 0.0;
};

template <class Upstream>
class RecordedCopies : public Upstream {
 public:
  using B = typename Upstream::Backend;
  using Stream = typename Upstream::Stream;
  using Event = typename Upstream::Event;

  using Upstream::Upstream;

  void Run(const Copy& copy) {
    const Stream lane = this->LaneOf(copy);
    const Began began = Now(lane);
    Upstream::Run(copy);
    Note(false, copy, began, lane);
  }

  void Wait(Stream main, const Copy& copy, const Event& event) {
    const Began began = Now(main);
    Upstream::Wait(main, copy, event);
    Note(true, copy, began, main);
  }

  // Begins anew, or stops and forgets. Waits for the lane to the host.
  void Record(bool on) {
    std::lock_guard<std::mutex> lock(recording_);
    marked_.clear();
    origin_.reset();
    if (on) origin_.emplace(this->lanes().to_host);
    is_recording_.store(on, std::memory_order_relaxed);
  }

  // All so far. Both lanes must have been drained.
  std::vector<Span> Spans() const {
    std::lock_guard<std::mutex> lock(recording_);
    if (!origin_) throw Error(Code::kFailedPrecondition, "nothing is being recorded");
    std::vector<Span> spans;
    for (const Marked& marked : marked_) {
      Span span = marked.span;
      span.begin = origin_->Seconds(marked.begin);
      span.end = origin_->Seconds(marked.end);
      spans.push_back(span);
    }
    return spans;
  }

 private:
  using Mark = typename B::Mark;
  using Began = std::optional<Mark>;  // none where nothing was recorded

  struct Marked {
    Span span;
    Mark begin;
    Mark end;
  };

  Began Now(Stream stream) const {
    if (!is_recording_.load(std::memory_order_relaxed)) return std::nullopt;  // without a lock
    std::lock_guard<std::mutex> lock(recording_);
    return origin_ ? Began(B::NewMark(stream)) : std::nullopt;
  }

  // What began then ends with what is on `stream` so far.
  void Note(bool waits, const Copy& copy, const Began& began, Stream stream) {
    if (!began) return;
    std::lock_guard<std::mutex> lock(recording_);
    if (!origin_) return;
    const Span span{waits,    IsOut(copy.route), IsOverLink(copy.route),
                    copy.run, copy.place.slot,   copy.nbytes};
    marked_.push_back({span, *began, B::NewMark(stream)});
  }

  mutable std::mutex recording_;  // waits are noted without the arena's lock
  std::atomic<bool> is_recording_{false};
  std::optional<typename B::Origin> origin_;
  std::vector<Marked> marked_;
};

}  // namespace vmem
