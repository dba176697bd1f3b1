#include "cuda_backend.h"
#include "handlers.h"
#include "targets.h"

namespace vmem {
namespace {

struct CudaPlatform {
  using Backend = CudaBackend;
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
XLA_FFI_DEFINE_HANDLER(kFetchStart, FetchStart<CudaPlatform>, BindFetch<CudaPlatform>());
XLA_FFI_DEFINE_HANDLER(kFetchDone, FetchDone<CudaPlatform>, BindFetch<CudaPlatform>());

}  // namespace

Targets CudaTargets() {
  return {{"offload_start", kOffloadStart},
          {"offload_done", kOffloadDone},
          {"fetch_start", kFetchStart},
          {"fetch_done", kFetchDone}};
}

}  // namespace vmem
