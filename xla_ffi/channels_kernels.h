// The kernel that copies rows of 16-bit values into wider or narrower ones. Nothing in it waits, so
// tests run it on threads of the host, too.
#pragma once

#include <cstdint>

namespace vmem {

inline constexpr unsigned kChannelThreads = 256;
inline constexpr unsigned kChannelRows = 256;  // of a block: indices within it have 32 bits
inline constexpr unsigned kValueBits = 16;

using OneValue = std::uint16_t;
using FourValues = std::uint64_t;

// Each of `rows` rows of `given` values becomes one of `made`: with zeros behind it, or cut short. A
// thread writes a Piece at once, an integer made up of as many values as it has room for; `made` is a
// multiple of that.
template <class Piece>
__global__ void __launch_bounds__(kChannelThreads)
    CopyRows(const std::uint16_t* from, unsigned given, std::uint16_t* to, unsigned made,
             std::uint64_t rows) {
  const std::uint64_t first = std::uint64_t{blockIdx.x} * kChannelRows;
  const std::uint64_t left = rows - first;
  const unsigned here = left < kChannelRows ? static_cast<unsigned>(left) : kChannelRows;
  constexpr unsigned kWidth = sizeof(Piece) / sizeof(std::uint16_t);
  const unsigned pieces = made / kWidth;
  from += first * given;
  to += first * made;
  for (unsigned i = threadIdx.x; i < here * pieces; i += kChannelThreads) {
    const unsigned row = i / pieces;
    const unsigned channel = i % pieces * kWidth;
    Piece piece = 0;
    for (unsigned k = 0; k < kWidth; ++k) {
      if (channel + k < given) {
        piece |= static_cast<Piece>(Piece{from[row * given + channel + k]} << (k * kValueBits));
      }
    }
    *reinterpret_cast<Piece*>(to + row * made + channel) = piece;
  }
}

// Whether CopyRows may write four values at once.
inline bool AreFours(const void* to, std::int64_t made) {
  return made * sizeof(OneValue) % sizeof(FourValues) == 0 &&
         reinterpret_cast<std::uintptr_t>(to) % sizeof(FourValues) == 0;
}

inline unsigned ChannelBlocks(std::int64_t rows) {
  return static_cast<unsigned>((rows + kChannelRows - 1) / kChannelRows);
}

}  // namespace vmem
