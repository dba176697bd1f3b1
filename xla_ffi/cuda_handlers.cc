#include "cuda_backend.h"
#include "handlers.h"
#include "targets.h"
#ifdef VMEM_JAX_KERNELS
#include "compression_handlers.h"
#include "cuda_compression.h"
#endif

namespace vmem {
namespace {

struct CudaPlatform {
  using Backend = CudaBackend;
#ifdef VMEM_JAX_KERNELS
  using Compression = CudaCompression;
#endif
  using Context = ffi::PlatformStream<cudaStream_t>;
  using Decoded = cudaStream_t;
  static Caller<Backend> Resolve(Decoded stream) {
    CudaBackend::RefuseCapture(stream);
    return {stream, CudaBackend::DeviceOf(stream)};
  }
};

// Without the trait kCmdBufferCompatible: a CUDA graph would replay the copies, but not us.
XLA_FFI_DEFINE_HANDLER(kOffloadStart, OffloadStart<CudaPlatform>, BindOffload<CudaPlatform>());
XLA_FFI_DEFINE_HANDLER(kOffloadDone, OffloadDone<CudaPlatform>, BindOffload<CudaPlatform>());
XLA_FFI_DEFINE_HANDLER(kFetchStart, FetchStart<CudaPlatform>, BindFetchStart<CudaPlatform>());
XLA_FFI_DEFINE_HANDLER(kFetchDone, FetchDone<CudaPlatform>, BindFetchDone<CudaPlatform>());
#ifdef VMEM_JAX_KERNELS
XLA_FFI_DEFINE_HANDLER(kCompress, Compress<CudaPlatform>, BindCompression<CudaPlatform>());
XLA_FFI_DEFINE_HANDLER(kDecompress, Decompress<CudaPlatform>, BindCompression<CudaPlatform>());
#endif

}  // namespace

Targets CudaTargets() {
  return {{"offload_start", kOffloadStart},
          {"offload_done", kOffloadDone},
          {"fetch_start", kFetchStart},
#ifdef VMEM_JAX_KERNELS
          {"compress", kCompress},
          {"decompress", kDecompress},
#endif
          {"fetch_done", kFetchDone}};
}

}  // namespace vmem
