// Compression by kernels on XLA's stream.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <vector>

#include "cuda_backend.h"
#include "zero_values.h"

namespace vmem {

class CudaCompression {
 public:
  using Backend = CudaBackend;
  using Stream = CudaBackend::Stream;

  // Managed memory of the current device that stays on the host, where the device writes and reads
  // it. It is taken page by page when it is written, and kept then.
  class Overflow {
   public:
    // Throws where the device cannot do so, or has not so much free: the driver may move managed
    // memory there whatever it is advised.
    explicit Overflow(std::size_t nbytes);
    ~Overflow();
    Overflow(const Overflow&) = delete;
    Overflow& operator=(const Overflow&) = delete;
    std::byte* data() const { return static_cast<std::byte*>(data_); }

   private:
    void* data_ = nullptr;
  };

  // Of the current device.
  explicit CudaCompression(std::size_t sites);

  void Compress(Stream stream, std::size_t site, const CompressedFormat& format, const void* x,
                std::byte* c, std::size_t capacity, std::byte* overflow);
  void Decompress(Stream stream, const CompressedFormat& format, const std::byte* c,
                  std::size_t capacity, const std::byte* overflow, void* x);
  // By site, since the begin. Waits for the device.
  std::vector<Written> Totals() const;

 private:
  std::size_t sites_;
  CudaBackend::DeviceMemory totals_;  // two counts a site
};

}  // namespace vmem
