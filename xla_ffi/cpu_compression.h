// Compression by the calling thread, in ordinary memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

#include "cpu_backend.h"
#include "zero_values.h"

namespace vmem {

class CpuCompression {
 public:
  using Backend = CpuBackend;
  using Stream = CpuBackend::Stream;

  // Addresses without memory, until they are written.
  class Overflow {
   public:
    explicit Overflow(std::size_t nbytes);
    ~Overflow();
    Overflow(const Overflow&) = delete;
    Overflow& operator=(const Overflow&) = delete;
    std::byte* data() const { return data_; }

   private:
    std::byte* data_ = nullptr;
    std::size_t nbytes_ = 0;
  };

  explicit CpuCompression(std::size_t sites) : written_(sites) {}

  void Compress(Stream stream, std::size_t site, const CompressedFormat& format, const void* x,
                std::byte* c, std::size_t capacity, std::byte* overflow);
  // Gives overflow memory back as well. Throws Error where `c` is not what Compress wrote.
  void Decompress(Stream stream, const CompressedFormat& format, const std::byte* c,
                  std::size_t capacity, std::byte* overflow, void* x);
  // By site, since the begin.
  std::vector<Written> Totals() const;

 private:
  mutable std::mutex mutex_;
  std::vector<Written> written_;
};

}  // namespace vmem
