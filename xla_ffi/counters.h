// What an arena counts.
#pragma once

#include <cstdint>

namespace vmem {

// What an arena did on one device since it was pinned.
struct Counters {
  std::uint64_t hits = 0;       // fetches that the cache served
  std::uint64_t misses = 0;     // fetches that crossed the link
  std::uint64_t evictions = 0;  // tensors that left the cache for the arena
  std::uint64_t link_nbytes_out = 0;
  std::uint64_t link_nbytes_in = 0;
  std::uint64_t recopies = 0;  // offloads begun again because XLA had moved the source
  std::uint64_t resets = 0;    // leftovers of failed runs dropped
  std::uint64_t parked = 0;    // tensors between offload_start and fetch_done, now
  std::uint64_t cache_nbytes = 0;
  std::uint64_t cache_used_nbytes = 0;
  std::uint64_t arena_nbytes = 0;
};

}  // namespace vmem
