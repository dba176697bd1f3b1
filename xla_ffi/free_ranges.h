// The byte ranges of a fixed capacity that nobody uses.
#pragma once

#include <cstddef>
#include <iterator>
#include <map>
#include <optional>

namespace vmem {

class FreeRanges {
 public:
  explicit FreeRanges(std::size_t capacity) {
    if (capacity > 0) ranges_[0] = capacity;
  }

  // Where `nbytes` fit: at `preferred` if that is free, else in the tightest range.
  std::optional<std::size_t> Find(std::size_t nbytes, std::size_t preferred) const {
    if (nbytes == 0) return 0;
    auto after = ranges_.upper_bound(preferred);
    if (after != ranges_.begin()) {
      const auto& [begin, size] = *std::prev(after);
      if (preferred + nbytes <= begin + size) return preferred;
    }
    auto best = ranges_.end();
    for (auto range = ranges_.begin(); range != ranges_.end(); ++range) {
      if (range->second >= nbytes && (best == ranges_.end() || range->second < best->second)) {
        best = range;
      }
    }
    if (best == ranges_.end()) return std::nullopt;
    return best->first;
  }

  // Takes a range that Find returned.
  void Take(std::size_t offset, std::size_t nbytes) {
    if (nbytes == 0) return;
    auto range = std::prev(ranges_.upper_bound(offset));
    const auto [begin, size] = *range;
    ranges_.erase(range);
    if (begin < offset) ranges_[begin] = offset - begin;
    if (offset + nbytes < begin + size) ranges_[offset + nbytes] = begin + size - offset - nbytes;
  }

  void Give(std::size_t offset, std::size_t nbytes) {
    if (nbytes == 0) return;
    auto range = ranges_.emplace(offset, nbytes).first;
    if (auto next = std::next(range);
        next != ranges_.end() && range->first + range->second == next->first) {
      range->second += next->second;
      ranges_.erase(next);
    }
    if (range != ranges_.begin()) {
      auto previous = std::prev(range);
      if (previous->first + previous->second == range->first) {
        previous->second += range->second;
        ranges_.erase(range);
      }
    }
  }

 private:
  std::map<std::size_t, std::size_t> ranges_;  // begin -> size, never adjacent
};

}  // namespace vmem
