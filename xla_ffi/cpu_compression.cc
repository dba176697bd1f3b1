#include "cpu_compression.h"

#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <bitset>
#include <cerrno>
#include <cstring>
#include <string>

#include "error.h"

namespace vmem {
namespace {

constexpr std::uint64_t kWord = 64;  // elements whose mask is made at a time

template <class T>
T Load(const std::byte* from) {
  T value;
  std::memcpy(&value, from, sizeof(T));
  return value;
}

// A block's values, with room for what is written behind the last before it is known to be no value.
template <class T>
using Staged = std::array<T, kBlockNbytes / sizeof(T) + 1>;

// The elements of one block.
struct Range {
  Range(const CompressedFormat& format, std::uint64_t block)
      : first(block * (kBlockNbytes / format.itemsize)),
        count(std::min(kBlockNbytes / format.itemsize, format.elements() - first)) {}

  std::uint64_t first;
  std::uint64_t count;
};

// Writes the mask of a block; returns how many values it staged. No branch depends on the elements:
// they are as good as random.
template <class T>
std::uint32_t Gather(const std::byte* x, std::uint64_t count, std::byte* mask, Staged<T>& staged) {
  std::uint32_t values = 0;
  for (std::uint64_t first = 0; first < count; first += kWord) {
    const std::uint64_t length = std::min(kWord, count - first);
    std::uint64_t bits = 0;
    for (std::uint64_t i = 0; i < length; ++i) {
      const T element = Load<T>(x + (first + i) * sizeof(T));
      const bool has_value = element != 0;
      staged[values] = element;
      values += has_value;
      bits |= std::uint64_t{has_value} << i;
    }
    for (std::uint64_t byte = 0; byte * 8 < length; ++byte) {
      mask[first / 8 + byte] = static_cast<std::byte>(bits >> 8 * byte);
    }
  }
  return values;
}

template <class T>
void Scatter(const std::byte* mask, std::uint64_t count, const Staged<T>& staged, std::byte* x) {
  std::uint32_t values = 0;
  for (std::uint64_t first = 0; first < count; first += kWord) {
    const std::uint64_t length = std::min(kWord, count - first);
    std::uint64_t bits = 0;
    for (std::uint64_t byte = 0; byte * 8 < length; ++byte) {
      bits |= std::to_integer<std::uint64_t>(mask[first / 8 + byte]) << 8 * byte;
    }
    for (std::uint64_t i = 0; i < length; ++i) {
      const std::uint32_t has_value = bits >> i & 1;
      const auto element = static_cast<T>(staged[values] & (T{0} - has_value));
      values += has_value;
      std::memcpy(x + (first + i) * sizeof(T), &element, sizeof(T));
    }
  }
}

std::uint32_t CountOfMask(const std::byte* mask, std::uint64_t count) {
  std::uint32_t values = 0;
  for (std::uint64_t byte = 0; byte < CeilDiv(count, 8); ++byte) {
    values += static_cast<std::uint32_t>(
        std::bitset<8>(std::to_integer<unsigned long long>(mask[byte])).count());
  }
  return values;
}

template <class T>
Written CompressAs(const CompressedFormat& format, const std::byte* x, std::byte* c,
                   std::size_t capacity, std::byte* overflow) {
  const std::uint64_t room = format.units(capacity);
  std::byte* const mask = c + format.mask_offset();
  std::byte* const values = c + format.values_offset();
  std::memset(mask, 0, format.mask_nbytes());
  std::uint64_t cursor = 0;
  Written written;
  Staged<T> staged;
  for (std::uint64_t block = 0; block < format.blocks(); ++block) {
    const Range range(format, block);
    const BlockEntry entry{
        cursor, Gather<T>(x + block * kBlockNbytes, range.count, mask + range.first / 8, staged)};
    const std::uint64_t units = UnitsOf(entry.count, sizeof(T));
    cursor += units;
    const bool fits = cursor <= room;
    std::memcpy((fits ? values : overflow) + entry.place * kUnitNbytes, staged.data(),
                entry.count * sizeof(T));
    const std::uint64_t bits = entry.Encoded();
    std::memcpy(c + kEntriesOffset + block * sizeof(bits), &bits, sizeof(bits));
    written.values += entry.count;
    if (!fits) written.overflow_nbytes += units * kUnitNbytes;
  }
  std::memcpy(c, &cursor, sizeof(cursor));
  return written;
}

template <class T>
void DecompressAs(const CompressedFormat& format, const std::byte* c, std::size_t capacity,
                  const std::byte* overflow, std::byte* x) {
  const std::uint64_t room = format.units(capacity);
  const std::byte* const mask = c + format.mask_offset();
  const std::byte* const values = c + format.values_offset();
  const auto cursor = Load<std::uint64_t>(c);
  Staged<T> staged;
  for (std::uint64_t block = 0; block < format.blocks(); ++block) {
    const Range range(format, block);
    const auto entry = BlockEntry::Decoded(
        Load<std::uint64_t>(c + kEntriesOffset + block * sizeof(std::uint64_t)));
    const std::byte* const bits = mask + range.first / 8;
    const std::uint64_t end = entry.place + UnitsOf(entry.count, sizeof(T));
    if (entry.count != CountOfMask(bits, range.count) || end > cursor ||
        cursor * kUnitNbytes > format.blocks() * kBlockNbytes) {
      throw Error(Code::kInternal, "block " + std::to_string(block) +
                                       " is not what compress wrote: the byte array was changed, "
                                       "or it belongs to another tensor");
    }
    std::memcpy(staged.data(), (end <= room ? values : overflow) + entry.place * kUnitNbytes,
                entry.count * sizeof(T));
    Scatter<T>(bits, range.count, staged, x + block * kBlockNbytes);
  }
}

}  // namespace

CpuCompression::Overflow::Overflow(std::size_t nbytes) : nbytes_(nbytes) {
  if (nbytes == 0) return;
  void* memory = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) {
    throw Error(Code::kResourceExhausted, std::string("mmap of overflow memory of ") +
                                              std::to_string(nbytes) +
                                              " B: " + std::strerror(errno));
  }
  data_ = static_cast<std::byte*>(memory);
}

CpuCompression::Overflow::~Overflow() {
  if (data_ != nullptr) munmap(data_, nbytes_);
}

void CpuCompression::Compress(Stream, std::size_t site, const CompressedFormat& format,
                              const void* x, std::byte* c, std::size_t capacity,
                              std::byte* overflow) {
  WithItem(format.itemsize, [&](auto item) {
    const Written written = CompressAs<decltype(item)>(format, static_cast<const std::byte*>(x), c,
                                                       capacity, overflow);
    std::lock_guard<std::mutex> lock(mutex_);
    written_[site].values += written.values;
    written_[site].overflow_nbytes += written.overflow_nbytes;
  });
}

void CpuCompression::Decompress(Stream, const CompressedFormat& format, const std::byte* c,
                                std::size_t capacity, std::byte* overflow, void* x) {
  WithItem(format.itemsize, [&](auto item) {
    DecompressAs<decltype(item)>(format, c, capacity, overflow, static_cast<std::byte*>(x));
  });
  if (Load<std::uint64_t>(c) > format.units(capacity)) {
    madvise(overflow, format.nbytes, MADV_DONTNEED);
  }
}

std::vector<Written> CpuCompression::Totals() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return written_;
}

}  // namespace vmem
