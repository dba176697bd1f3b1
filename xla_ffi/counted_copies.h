// What the copies of an arena come to.
#pragma once

#include "copy.h"
#include "counters.h"

namespace vmem {

template <class Upstream>
class CountedCopies : public Upstream {
 public:
  using Upstream::Upstream;

  void Run(const Copy& copy) {
    Upstream::Run(copy);
    counted_.evictions += copy.route == Route::kCacheToArena;
    counted_.hits += copy.route == Route::kCacheToBuffer;
    counted_.misses += copy.route == Route::kArenaToBuffer;
    if (!IsOverLink(copy.route)) return;
    (IsOut(copy.route) ? counted_.link_nbytes_out : counted_.link_nbytes_in) += copy.nbytes;
  }

  // Those that are of copies; the others are 0.
  const Counters& counted() const { return counted_; }

 private:
  Counters counted_;
};

}  // namespace vmem
