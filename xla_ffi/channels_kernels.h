// The kernel that copies rows of 16-bit values into wider or narrower ones. Nothing in it waits, so
// tests run it on threads of the host, too.
#pragma once

#include <cstdint>

namespace vmem {

inline constexpr unsigned kChannelThreads = 256;
inline constexpr unsigned kChannelRows = 256;  // of a block: indices within it have 32 bits
inline constexpr unsigned kPaddedUnit = 4;     // rows are padded to multiples of so many values

template <unsigned kWidth>
struct alignas(kWidth * sizeof(std::uint16_t)) Values {
  std::uint16_t values[kWidth];
};

// Each of `rows` rows of `given` values becomes one of `made`, a multiple of kWidth: what it has more is
// zero, what it has less is left out. A thread writes kWidth values at once.
template <unsigned kWidth>
__global__ void __launch_bounds__(kChannelThreads)
    CopyRows(const std::uint16_t* from, unsigned given, std::uint16_t* to, unsigned made,
             std::uint64_t rows) {
  const std::uint64_t first = std::uint64_t{blockIdx.x} * kChannelRows;
  const std::uint64_t left = rows - first;
  const unsigned here = left < kChannelRows ? static_cast<unsigned>(left) : kChannelRows;
  const unsigned pieces = made / kWidth;
  from += first * given;
  to += first * made;
  for (unsigned i = threadIdx.x; i < here * pieces; i += kChannelThreads) {
    const unsigned row = i / pieces;
    const unsigned channel = i % pieces * kWidth;
    Values<kWidth> piece;
    for (unsigned k = 0; k < kWidth; ++k) {
      const bool is_there = channel + k < given;
      piece.values[k] = is_there ? from[row * given + channel + k] : std::uint16_t{0};
    }
    *reinterpret_cast<Values<kWidth>*>(to + row * made + channel) = piece;
  }
}

// Whether CopyRows may write kPaddedUnit values at once.
inline bool AreWide(const void* to, std::int64_t made) {
  return made % kPaddedUnit == 0 &&
         reinterpret_cast<std::uintptr_t>(to) % sizeof(Values<kPaddedUnit>) == 0;
}

inline unsigned ChannelBlocks(std::int64_t rows) {
  return static_cast<unsigned>((rows + kChannelRows - 1) / kChannelRows);
}

}  // namespace vmem
