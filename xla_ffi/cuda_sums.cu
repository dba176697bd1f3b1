#include "cuda_sums.h"

#include "cuda_backend.h"
#include "sums_kernels.h"

namespace vmem {

void AddProductsOf(cudaStream_t stream, cudnnDataType_t dtype, const ConvSums& sums,
                   const std::int64_t* places, std::size_t count, double* found) {
  auto* kernel = AddProducts<float>;
  if (dtype == CUDNN_DATA_DOUBLE) kernel = AddProducts<double>;
  if (dtype == CUDNN_DATA_BFLOAT16) kernel = AddProducts<Bf16>;
  if (dtype == CUDNN_DATA_HALF) kernel = AddProducts<F16>;
  kernel<<<static_cast<unsigned>(count), kSumThreads, 0, stream>>>(sums, places, found);
  VMEM_CHECK_CUDA(cudaGetLastError());
}

void AddChannelsOf(cudaStream_t stream, cudnnDataType_t dtype, const ChannelSums& given,
                   const std::int64_t* channels, std::size_t count, double* found) {
  auto* kernel = AddChannels<float>;
  if (dtype == CUDNN_DATA_DOUBLE) kernel = AddChannels<double>;
  if (dtype == CUDNN_DATA_BFLOAT16) kernel = AddChannels<Bf16>;
  if (dtype == CUDNN_DATA_HALF) kernel = AddChannels<F16>;
  kernel<<<static_cast<unsigned>(count), kSumThreads, 0, stream>>>(given, channels, found);
  VMEM_CHECK_CUDA(cudaGetLastError());
}

}  // namespace vmem
