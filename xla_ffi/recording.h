// When each copy ran and how long the compute stream waited for it, for those who ask.
//
// A mark is a point of a stream whose time is known once the stream has passed it: nobody waits for
// it before the spans are read. A backend B supplies
//   B::Mark                   a copyable handle; a default one marks nothing
//   B::NewMark(stream)        a mark at the end of what is on `stream` so far
//   B::Origin(lane)           what marks are measured from; its maker waits for the lane
//   origin.Seconds(mark)      on the host's steady clock; waits until the mark has been passed
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

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

template <class B>
class Recording {
 public:
  using Stream = typename B::Stream;
  using Mark = typename B::Mark;

  // Begins anew, or stops and forgets. Waits for `lane`.
  void Set(bool on, Stream lane) {
    marked_.clear();
    origin_.reset();
    if (on) origin_.emplace(lane);
  }

  // Where a span begins: the end of what is on `stream` so far. Nothing where nothing is recorded.
  Mark Now(Stream stream) const { return origin_ ? B::NewMark(stream) : Mark(); }

  // `span`, whose times are not known yet; it ends with what is on `stream` so far.
  void Note(const Span& span, const Mark& began, Stream stream) {
    if (origin_) marked_.push_back({span, began, B::NewMark(stream)});
  }

  // All so far. Both lanes must have been drained.
  std::vector<Span> Spans() const {
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
  struct Marked {
    Span span;
    Mark begin;
    Mark end;
  };

  std::optional<typename B::Origin> origin_;
  std::vector<Marked> marked_;
};

}  // namespace vmem
