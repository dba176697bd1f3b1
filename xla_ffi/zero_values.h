// The bytes of a compressed tensor, for host and device: which elements are zero, and the others.
//
// An element is zero if all of its bits are: -0.0 and NaN are values like others. The tensor is cut
// into blocks of kBlockNbytes. From the first byte on lie
//
//   cursor    u64            units of values that blocks have taken
//   entries   u64 a block    where its values lie (in units, upper 48 bits), and how many (lower 16)
//   mask      1 bit an element, 1 where it has a value; lowest bit of each byte first
//   values    in units of kUnitNbytes, a block's own together and in order, up to the capacity
//
// mask and values begin at multiples of kUnitNbytes. A block takes its units by adding to the
// cursor, so where it lies may differ from run to run. One whose units end beyond the capacity lies
// in the overflow memory of its site, at the same place from the begin of that, which is as large as
// the tensor.
#pragma once

#include <cstddef>
#include <cstdint>

#ifdef __CUDACC__
#define VMEM_HOST_DEVICE __host__ __device__
#else
#define VMEM_HOST_DEVICE
#endif

namespace vmem {

inline constexpr std::uint64_t kBlockNbytes = 16384;
inline constexpr std::uint64_t kUnitNbytes = 16;
inline constexpr std::uint64_t kEntriesOffset = sizeof(std::uint64_t);  // behind the cursor

constexpr std::uint64_t CeilDiv(std::uint64_t n, std::uint64_t by) {
  return (n + by - 1) / by;
}

// Units that so many values of a block take.
VMEM_HOST_DEVICE constexpr std::uint32_t UnitsOf(std::uint32_t count, std::uint32_t itemsize) {
  return static_cast<std::uint32_t>((count * itemsize + kUnitNbytes - 1) / kUnitNbytes);
}

// Where a block's values lie, and how many they are.
struct BlockEntry {
  std::uint64_t place = 0;  // units
  std::uint32_t count = 0;  // at most kBlockNbytes

  VMEM_HOST_DEVICE std::uint64_t Encoded() const { return place << 16 | count; }
  VMEM_HOST_DEVICE static BlockEntry Decoded(std::uint64_t bits) {
    return {bits >> 16, static_cast<std::uint32_t>(bits & 0xFFFF)};
  }
};

// Where the parts of a tensor of `nbytes` lie; its elements have `itemsize` bytes: 1, 2, 4 or 8.
struct CompressedFormat {
  std::uint64_t nbytes = 0;
  std::uint32_t itemsize = 1;

  std::uint64_t elements() const { return nbytes / itemsize; }
  std::uint64_t blocks() const { return CeilDiv(nbytes, kBlockNbytes); }
  std::uint64_t mask_offset() const {
    return CeilDiv(kEntriesOffset + blocks() * sizeof(std::uint64_t), kUnitNbytes) * kUnitNbytes;
  }
  std::uint64_t mask_nbytes() const { return CeilDiv(elements(), 8 * kUnitNbytes) * kUnitNbytes; }
  // As many bytes as there must be.
  std::uint64_t values_offset() const { return mask_offset() + mask_nbytes(); }
  // That of the values which a byte array of `capacity` has room for.
  std::uint64_t units(std::uint64_t capacity) const {
    return (capacity - values_offset()) / kUnitNbytes;
  }
};

// Calls `use` with a value of the unsigned type of `itemsize` bytes.
template <class Use>
void WithItem(std::uint32_t itemsize, Use use) {
  switch (itemsize) {
    case 1:
      return use(std::uint8_t{});
    case 2:
      return use(std::uint16_t{});
    case 4:
      return use(std::uint32_t{});
    default:
      return use(std::uint64_t{});
  }
}

// Elements that have values, and the bytes of those that found no room.
struct Written {
  std::uint64_t values = 0;
  std::uint64_t overflow_nbytes = 0;
};

}  // namespace vmem
