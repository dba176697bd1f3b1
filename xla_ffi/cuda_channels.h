// Channels that are added or left out, by a kernel on XLA's stream. 16-bit values, channels last.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "error.h"

namespace vmem {

#ifdef VMEM_JAX_KERNELS

inline constexpr bool kCopiesChannels = true;

// Loads the kernels onto the current device, which may not be done while a stream is recorded.
void LoadChannels();

// Each of `rows` rows of `given` values becomes one of `made`: cut short, or with zeros behind it.
void CopyChannels(cudaStream_t stream, const void* from, std::int64_t given, void* to,
                  std::int64_t made, std::int64_t rows);

#else

inline constexpr bool kCopiesChannels = false;

[[noreturn]] inline void LoadChannels() {
  throw Error(Code::kFailedPrecondition,
              "channels are padded by kernels, and the extension was built without nvcc");
}

inline void CopyChannels(cudaStream_t, const void*, std::int64_t, void*, std::int64_t,
                         std::int64_t) {
  LoadChannels();
}

#endif

}  // namespace vmem
