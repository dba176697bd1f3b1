#include "cuda_channels.h"

#include "channels_kernels.h"
#include "cuda_backend.h"

namespace vmem {

void LoadChannels() {
  cudaFuncAttributes attributes;
  VMEM_CHECK_CUDA(cudaFuncGetAttributes(&attributes, CopyRows<OneValue>));
  VMEM_CHECK_CUDA(cudaFuncGetAttributes(&attributes, CopyRows<FourValues>));
}

void CopyChannels(cudaStream_t stream, const void* from, std::int64_t given, void* to,
                  std::int64_t made, std::int64_t rows) {
  const auto kernel = AreFours(to, made) ? CopyRows<FourValues> : CopyRows<OneValue>;
  kernel<<<ChannelBlocks(rows), kChannelThreads, 0, stream>>>(
      static_cast<const std::uint16_t*>(from), static_cast<unsigned>(given),
      static_cast<std::uint16_t*>(to), static_cast<unsigned>(made),
      static_cast<std::uint64_t>(rows));
  VMEM_CHECK_CUDA(cudaGetLastError());
}

}  // namespace vmem
