// Sums of products of a convolution, by a kernel on a stream.
#pragma once

#include <cuda_runtime_api.h>
#include <cudnn.h>

#include <cstddef>
#include <cstdint>

#include "conv_sums.h"

namespace vmem {

#ifdef VMEM_JAX_KERNELS

inline constexpr bool kAddsProducts = true;

// `places` and `found` may be memory of the host, if it is pinned; so many places, twice as many
// found.
void AddProductsOf(cudaStream_t stream, cudnnDataType_t dtype, const ConvSums& sums,
                   const std::int64_t* places, std::size_t count, double* found);
// Likewise; four times as many found.
void AddChannelsOf(cudaStream_t stream, cudnnDataType_t dtype, const ChannelSums& given,
                   const std::int64_t* channels, std::size_t count, double* found);

#else

inline constexpr bool kAddsProducts = false;

inline void AddProductsOf(cudaStream_t, cudnnDataType_t, const ConvSums&, const std::int64_t*,
                          std::size_t, double*) {}
inline void AddChannelsOf(cudaStream_t, cudnnDataType_t, const ChannelSums&, const std::int64_t*,
                          std::size_t, double*) {}

#endif

}  // namespace vmem
