#include "cuda_compression.h"

#include <cstdint>
#include <limits>
#include <string>

#include "error.h"
#include "teardown.h"
#include "zero_values_kernels.h"

namespace vmem {
namespace {

constexpr std::size_t kCounts = 2;  // of a site, as Written has them

// The grid; and the kernels' loads and stores are of 16 bytes, which XLA's buffers allow.
unsigned Blocks(const CompressedFormat& format, const void* x, const void* c) {
  for (const void* pointer : {x, c}) {
    if (reinterpret_cast<std::uintptr_t>(pointer) % kPieceNbytes != 0) {
      throw Error(Code::kInternal, "a buffer of XLA's is not aligned to 16 bytes");
    }
  }
  if (format.blocks() > std::numeric_limits<int>::max()) {
    throw Error(Code::kInvalidArgument,
                "a tensor of " + std::to_string(format.nbytes) + " bytes has too many blocks");
  }
  return static_cast<unsigned>(format.blocks());
}

void Advise(void* memory, std::size_t nbytes, int device) {
#if CUDART_VERSION >= 13000
  cudaMemLocation host{};
  host.type = cudaMemLocationTypeHost;
  cudaMemLocation accessor{};
  accessor.type = cudaMemLocationTypeDevice;
  accessor.id = device;
#else
  const int host = cudaCpuDeviceId;
  const int accessor = device;
#endif
  VMEM_CHECK_CUDA(cudaMemAdvise(memory, nbytes, cudaMemAdviseSetPreferredLocation, host));
  VMEM_CHECK_CUDA(cudaMemAdvise(memory, nbytes, cudaMemAdviseSetAccessedBy, accessor));
}

}  // namespace

CudaCompression::Overflow::Overflow(std::size_t nbytes) {
  if (nbytes == 0) return;
  int device = -1;
  int concurrent = 0;
  VMEM_CHECK_CUDA(cudaGetDevice(&device));
  VMEM_CHECK_CUDA(
      cudaDeviceGetAttribute(&concurrent, cudaDevAttrConcurrentManagedAccess, device));
  if (concurrent == 0) {
    throw Error(Code::kFailedPrecondition,
                "CUDA device " + std::to_string(device) +
                    " has no concurrentManagedAccess, so a tensor that turned dense would have "
                    "nowhere to go");
  }
  std::size_t free = 0;
  std::size_t total = 0;
  VMEM_CHECK_CUDA(cudaMemGetInfo(&free, &total));
  if (nbytes > free) {
    throw Error(Code::kResourceExhausted,
                "the overflow memory of all sites is " + std::to_string(nbytes) +
                    " bytes at the worst, and CUDA device " + std::to_string(device) + " has " +
                    std::to_string(free) + " free");
  }
  VMEM_CHECK_CUDA(cudaMallocManaged(&data_, nbytes, cudaMemAttachGlobal));
  try {
    Advise(data_, nbytes, device);
  } catch (...) {
    cudaFree(data_);
    throw;
  }
}

CudaCompression::Overflow::~Overflow() {
  Teardown([this] { VMEM_CHECK_CUDA(cudaFree(data_)); });
}

CudaCompression::CudaCompression(std::size_t sites)
    : sites_(sites), totals_(sites * kCounts * sizeof(DeviceCount)) {
  VMEM_CHECK_CUDA(cudaMemset(totals_.data(), 0, sites * kCounts * sizeof(DeviceCount)));
  VMEM_CHECK_CUDA(cudaDeviceSynchronize());  // no other stream waits for that
}

void CudaCompression::Compress(Stream stream, std::size_t site, const CompressedFormat& format,
                               const void* x, std::byte* c, std::size_t capacity,
                               std::byte* overflow) {
  const unsigned blocks = Blocks(format, x, c);
  VMEM_CHECK_CUDA(cudaMemsetAsync(c, 0, kEntriesOffset, stream));
  if (blocks == 0) return;
  auto* const totals = reinterpret_cast<DeviceCount*>(totals_.data()) + site * kCounts;
  WithItem(format.itemsize, [&](auto item) {
    CompressBlocks<decltype(item)><<<blocks, kThreads, 0, stream>>>(
        Parts(format, capacity), static_cast<const std::byte*>(x), c, overflow, totals);
  });
  VMEM_CHECK_CUDA(cudaGetLastError());
}

void CudaCompression::Decompress(Stream stream, const CompressedFormat& format, const std::byte* c,
                                 std::size_t capacity, const std::byte* overflow, void* x) {
  const unsigned blocks = Blocks(format, x, c);
  if (blocks == 0) return;
  WithItem(format.itemsize, [&](auto item) {
    DecompressBlocks<decltype(item)><<<blocks, kThreads, 0, stream>>>(
        Parts(format, capacity), c, overflow, static_cast<std::byte*>(x));
  });
  VMEM_CHECK_CUDA(cudaGetLastError());
}

std::vector<Written> CudaCompression::Totals() const {
  std::vector<DeviceCount> counts(sites_ * kCounts);
  VMEM_CHECK_CUDA(cudaDeviceSynchronize());  // XLA's streams do not wait for a copy on none
  VMEM_CHECK_CUDA(cudaMemcpy(counts.data(), totals_.data(), counts.size() * sizeof(DeviceCount),
                             cudaMemcpyDeviceToHost));
  std::vector<Written> result;
  for (std::size_t i = 0; i < sites_; ++i) {
    result.push_back({counts[i * kCounts], counts[i * kCounts + 1]});
  }
  return result;
}

}  // namespace vmem
