// The kernels that take the zeros out of a tensor and put them back: one pass, a block of the format
// for each block of threads. Nothing in them is longer than a warp or wider than a block waits, so
// tests run them on threads of the host, too.
//
// A thread has kPieces pieces of 16 bytes. Those of a warp are neighbours, in the order of lanes, so
// that loads are whole lines; the order of elements is pieces first by warp, then by turn, then by
// lane.
#pragma once

#include <cstddef>
#include <cstdint>

#include "zero_values.h"

namespace vmem {

inline constexpr unsigned kThreads = 256;
inline constexpr unsigned kWarpThreads = 32;
inline constexpr unsigned kWarps = kThreads / kWarpThreads;
inline constexpr unsigned kPieceNbytes = kUnitNbytes;
inline constexpr unsigned kPieces = kBlockNbytes / (kThreads * kPieceNbytes);
inline constexpr unsigned kResidentBlocks = 5;  // of a processor: more would spill registers
inline constexpr unsigned kAllLanes = 0xFFFFFFFF;
inline constexpr unsigned kFieldBits = 16;  // of a count in the scan: at most 512 in a warp's turn

static_assert(kPieces * kFieldBits <= 64, "the counts of a thread are scanned in one word");

using DeviceCount = unsigned long long;  // what atomics are made for

// What a kernel needs of a format and a capacity: dividing takes a device long.
struct Parts {
  Parts(const CompressedFormat& format, std::uint64_t capacity)
      : nbytes(format.nbytes),
        mask_offset(format.mask_offset()),
        mask_nbytes(format.mask_nbytes()),
        values_offset(format.values_offset()),
        room(format.units(capacity)) {}

  std::uint64_t nbytes;  // of the tensor
  std::uint64_t mask_offset;
  std::uint64_t mask_nbytes;
  std::uint64_t values_offset;
  std::uint64_t room;  // units
};

// Elements of T in a piece.
template <class T>
inline constexpr unsigned kPerPiece = kPieceNbytes / sizeof(T);

__device__ inline unsigned Lane() { return threadIdx.x % kWarpThreads; }
__device__ inline unsigned Warp() { return threadIdx.x / kWarpThreads; }

// Which piece of the block this thread has in a turn.
__device__ inline unsigned PieceOf(unsigned turn) {
  return (Warp() * kPieces + turn) * kWarpThreads + Lane();
}

struct Piece {
  std::uint32_t words[kPieceNbytes / sizeof(std::uint32_t)] = {};

  template <class T>
  __device__ T Get(unsigned j) const {
    if constexpr (sizeof(T) == 8) {
      return std::uint64_t{words[2 * j + 1]} << 32 | words[2 * j];
    } else {
      constexpr unsigned kPerWord = sizeof(std::uint32_t) / sizeof(T);
      return static_cast<T>(words[j / kPerWord] >> (j % kPerWord) * 8 * sizeof(T));
    }
  }

  // Where there was zero.
  template <class T>
  __device__ void Put(unsigned j, T element) {
    if constexpr (sizeof(T) == 8) {
      words[2 * j] = static_cast<std::uint32_t>(element);
      words[2 * j + 1] = static_cast<std::uint32_t>(element >> 32);
    } else {
      constexpr unsigned kPerWord = sizeof(std::uint32_t) / sizeof(T);
      words[j / kPerWord] |= std::uint32_t{element} << (j % kPerWord) * 8 * sizeof(T);
    }
  }
};

// This thread's pieces of a tensor's block, of which `left` bytes are the tensor's; zeros behind.
template <class T>
__device__ void LoadPieces(const T* x, unsigned left, Piece (&pieces)[kPieces]) {
  if (left == kBlockNbytes) {
#pragma unroll
    for (unsigned i = 0; i < kPieces; ++i) {
      const uint4 raw = __ldcs(reinterpret_cast<const uint4*>(x) + PieceOf(i));  // read once
      pieces[i] = {{raw.x, raw.y, raw.z, raw.w}};
    }
    return;
  }
#pragma unroll
  for (unsigned i = 0; i < kPieces; ++i) {
    pieces[i] = {};
#pragma unroll
    for (unsigned j = 0; j < kPerPiece<T>; ++j) {
      const unsigned element = PieceOf(i) * kPerPiece<T> + j;
      if (element < left / sizeof(T)) pieces[i].Put<T>(j, x[element]);
    }
  }
}

template <class T>
__device__ void StorePiece(T* x, unsigned index, unsigned left, const Piece& piece) {
  if (left == kBlockNbytes) {
    reinterpret_cast<uint4*>(x)[index] =
        make_uint4(piece.words[0], piece.words[1], piece.words[2], piece.words[3]);
    return;
  }
#pragma unroll
  for (unsigned j = 0; j < kPerPiece<T>; ++j) {
    const unsigned element = index * kPerPiece<T> + j;
    if (element < left / sizeof(T)) x[element] = piece.Get<T>(j);
  }
}

// Which elements of a piece have values: lowest bit first.
template <class T>
__device__ unsigned BitsOf(const Piece& piece) {
  unsigned bits = 0;
  if constexpr (sizeof(T) < sizeof(std::uint32_t)) {
    // All elements of a word at once: adding carries into the highest bit where any lower one is set
    constexpr unsigned kPerWord = sizeof(std::uint32_t) / sizeof(T);
    constexpr unsigned kHighest = sizeof(T) == 1 ? 0x80808080 : 0x80008000;
    constexpr unsigned kWidth = 8 * sizeof(T);
#pragma unroll
    for (unsigned i = 0; i < kPieceNbytes / sizeof(std::uint32_t); ++i) {
      const std::uint32_t word = piece.words[i];
      const std::uint32_t set = (((word & ~kHighest) + ~kHighest) | word) & kHighest;
      unsigned gathered = 0;
#pragma unroll
      for (unsigned j = 0; j < kPerWord; ++j) gathered |= set >> (kWidth * (j + 1) - 1 - j);
      bits |= (gathered & ((1U << kPerWord) - 1)) << i * kPerWord;
    }
  } else {
#pragma unroll
    for (unsigned j = 0; j < kPerPiece<T>; ++j) bits |= unsigned{piece.Get<T>(j) != 0} << j;
  }
  return bits;
}

// Hides where a number comes from: the compiler would work out each of its bits again.
__device__ inline unsigned Opaque(unsigned number) {
  asm("" : "+r"(number));
  return number;
}

// Writes the bits of a warp's pieces as whole words of the block's mask, of which there are `words`.
template <class T>
__device__ void StoreBits(std::uint32_t* mask, std::uint64_t words, unsigned piece, unsigned bits) {
  constexpr unsigned kLanes = 32 / kPerPiece<T>;  // that share a word
  unsigned word = bits << Lane() % kLanes * kPerPiece<T>;
#pragma unroll
  for (unsigned distance = 1; distance < kLanes; distance *= 2) {
    word |= __shfl_xor_sync(kAllLanes, word, distance);
  }
  if (Lane() % kLanes == 0 && piece / kLanes < words) mask[piece / kLanes] = word;
}

template <class T>
__device__ unsigned LoadBits(const std::uint8_t* mask, unsigned piece) {
  if constexpr (sizeof(T) == 1) {
    return reinterpret_cast<const std::uint16_t*>(mask)[piece];
  } else {
    constexpr unsigned kPerByte = 8 / kPerPiece<T>;  // pieces
    constexpr unsigned kBits = (1U << kPerPiece<T>) - 1;
    return mask[piece / kPerByte] >> piece % kPerByte * kPerPiece<T> & kBits;
  }
}

// How many values stand before each of a thread's pieces, and how many the block has.
struct Starts {
  unsigned of[kPieces];
  unsigned total;
};

// From how many each piece has. All threads of the block; what they wrote to shared memory before is
// seen by all after it.
__device__ inline Starts Scan(const unsigned (&counts)[kPieces], unsigned (&warp_totals)[kWarps]) {
  std::uint64_t own = 0;
#pragma unroll
  for (unsigned i = 0; i < kPieces; ++i) own |= std::uint64_t{counts[i]} << i * kFieldBits;
  DeviceCount sum = own;
#pragma unroll
  for (unsigned distance = 1; distance < kWarpThreads; distance *= 2) {
    const DeviceCount other = __shfl_up_sync(kAllLanes, sum, distance);
    if (Lane() >= distance) sum += other;
  }
  const DeviceCount whole = __shfl_sync(kAllLanes, sum, kWarpThreads - 1);
  const std::uint64_t before_lane = sum - own;
  auto field = [](std::uint64_t fields, unsigned i) {
    return static_cast<unsigned>(fields >> i * kFieldBits & ((1U << kFieldBits) - 1));
  };

  if (Lane() == 0) {
    unsigned total = 0;
#pragma unroll
    for (unsigned i = 0; i < kPieces; ++i) total += field(whole, i);
    warp_totals[Warp()] = total;
  }
  __syncthreads();
  Starts starts{};
  unsigned before = 0;
#pragma unroll
  for (unsigned warp = 0; warp < kWarps; ++warp) {
    if (warp < Warp()) before += warp_totals[warp];
    starts.total += warp_totals[warp];
  }
#pragma unroll
  for (unsigned i = 0; i < kPieces; ++i) {
    starts.of[i] = before + field(before_lane, i);
    before += field(whole, i);
  }
  return starts;
}

// Bytes of the tensor in this block.
__device__ inline unsigned BytesLeft(const Parts& parts) {
  const std::uint64_t left = parts.nbytes - blockIdx.x * kBlockNbytes;
  return static_cast<unsigned>(left < kBlockNbytes ? left : kBlockNbytes);
}

// A block of threads for each block of the format. The cursor of `c` is 0 before; `totals` are two
// counts, of values and of bytes that overflowed.
template <class T>
__global__ void __launch_bounds__(kThreads, kResidentBlocks)
    CompressBlocks(Parts parts, const std::byte* tensor, std::byte* c, std::byte* overflow,
                   DeviceCount* totals) {
  alignas(kUnitNbytes) __shared__ T staged[kBlockNbytes / sizeof(T)];
  __shared__ unsigned warp_totals[kWarps];
  __shared__ DeviceCount place;

  const std::uint64_t block = blockIdx.x;
  const unsigned left = BytesLeft(parts);
  const T* const x = reinterpret_cast<const T*>(tensor + block * kBlockNbytes);
  Piece pieces[kPieces];
  LoadPieces<T>(x, left, pieces);

  unsigned bits[kPieces];
  unsigned counts[kPieces];
  const std::uint64_t mask_before = block * (kBlockNbytes / sizeof(T) / 8);
  auto* const mask = reinterpret_cast<std::uint32_t*>(c + parts.mask_offset + mask_before);
  const std::uint64_t mask_words = (parts.mask_nbytes - mask_before) / sizeof(std::uint32_t);
#pragma unroll
  for (unsigned i = 0; i < kPieces; ++i) {
    bits[i] = Opaque(BitsOf<T>(pieces[i]));
    counts[i] = static_cast<unsigned>(__popc(bits[i]));
    StoreBits<T>(mask, mask_words, PieceOf(i), bits[i]);
  }
  const Starts starts = Scan(counts, warp_totals);
  const unsigned units = UnitsOf(starts.total, sizeof(T));

  DeviceCount taken = 0;
  if (threadIdx.x == 0 && units > 0) {
    taken = atomicAdd(reinterpret_cast<DeviceCount*>(c), DeviceCount{units});
  }
#pragma unroll
  for (unsigned i = 0; i < kPieces; ++i) {
    T* to = staged + starts.of[i];
#pragma unroll
    for (unsigned j = 0; j < kPerPiece<T>; ++j) {
      if (bits[i] >> j & 1) *to++ = pieces[i].template Get<T>(j);
    }
  }
  // What the last unit has behind the last value is copied, too
  if (starts.total + threadIdx.x < units * kPerPiece<T>) staged[starts.total + threadIdx.x] = 0;
  if (threadIdx.x == 0) {
    place = taken;
    const BlockEntry entry{taken, starts.total};
    reinterpret_cast<std::uint64_t*>(c + kEntriesOffset)[block] = entry.Encoded();
    if (units > 0) atomicAdd(totals, DeviceCount{starts.total});
    if (taken + units > parts.room) atomicAdd(totals + 1, DeviceCount{units * kUnitNbytes});
  }
  __syncthreads();
  std::byte* const values = place + units <= parts.room ? c + parts.values_offset : overflow;
  uint4* const out = reinterpret_cast<uint4*>(values) + place;
#pragma unroll
  for (unsigned i = 0; i < kPieces; ++i) {
    const unsigned unit = i * kThreads + threadIdx.x;
    if (unit < units) out[unit] = reinterpret_cast<const uint4*>(staged)[unit];
  }
}

// The inverse. All of the tensor is written.
template <class T>
__global__ void __launch_bounds__(kThreads, kResidentBlocks)
    DecompressBlocks(Parts parts, const std::byte* c, const std::byte* overflow,
                     std::byte* tensor) {
  alignas(kUnitNbytes) __shared__ T staged[kBlockNbytes / sizeof(T)];
  __shared__ unsigned warp_totals[kWarps];

  const std::uint64_t block = blockIdx.x;
  const unsigned left = BytesLeft(parts);
  const BlockEntry entry = BlockEntry::Decoded(
      reinterpret_cast<const std::uint64_t*>(c + kEntriesOffset)[block]);
  const unsigned units = UnitsOf(entry.count, sizeof(T));
  const std::byte* const values =
      entry.place + units <= parts.room ? c + parts.values_offset : overflow;
  const uint4* const from = reinterpret_cast<const uint4*>(values) + entry.place;
#pragma unroll
  for (unsigned i = 0; i < kPieces; ++i) {
    const unsigned unit = i * kThreads + threadIdx.x;
    if (unit < units) reinterpret_cast<uint4*>(staged)[unit] = __ldcs(from + unit);
  }

  unsigned bits[kPieces];
  unsigned counts[kPieces];
  const std::uint64_t mask_before = block * (kBlockNbytes / sizeof(T) / 8);
  const auto* const mask =
      reinterpret_cast<const std::uint8_t*>(c + parts.mask_offset + mask_before);
#pragma unroll
  for (unsigned i = 0; i < kPieces; ++i) {
    bits[i] = PieceOf(i) * kPieceNbytes < left ? LoadBits<T>(mask, PieceOf(i)) : 0;
    counts[i] = static_cast<unsigned>(__popc(bits[i]));
  }
  const Starts starts = Scan(counts, warp_totals);

  T* const x = reinterpret_cast<T*>(tensor + block * kBlockNbytes);
#pragma unroll
  for (unsigned i = 0; i < kPieces; ++i) {
    Piece piece;
    const T* value = staged + starts.of[i];
#pragma unroll
    for (unsigned j = 0; j < kPerPiece<T>; ++j) {
      if (bits[i] >> j & 1) piece.template Put<T>(j, *value++);
    }
    StorePiece<T>(x, PieceOf(i), left, piece);
  }
}

}  // namespace vmem
