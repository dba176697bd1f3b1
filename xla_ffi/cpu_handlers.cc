#include "compression_handlers.h"
#include "cpu_backend.h"
#include "cpu_compression.h"
#include "handlers.h"
#include "targets.h"

namespace vmem {
namespace {

struct CpuPlatform {
  using Backend = CpuBackend;
  using Compression = CpuCompression;
  using Context = ffi::DeviceOrdinal;
  using Decoded = std::int32_t;
  static Caller<Backend> Resolve(Decoded device) { return {nullptr, device}; }
};

// Stateless on purpose: jaxlib 0.11.2 registers handlers with its CPU client before their types, so
// one that has a state and comes early breaks the whole backend.
XLA_FFI_DEFINE_HANDLER(kOffloadStart, OffloadStart<CpuPlatform>, BindOffload<CpuPlatform>());
XLA_FFI_DEFINE_HANDLER(kOffloadDone, OffloadDone<CpuPlatform>, BindOffload<CpuPlatform>());
XLA_FFI_DEFINE_HANDLER(kFetchStart, FetchStart<CpuPlatform>, BindFetchStart<CpuPlatform>());
XLA_FFI_DEFINE_HANDLER(kFetchDone, FetchDone<CpuPlatform>, BindFetchDone<CpuPlatform>());
XLA_FFI_DEFINE_HANDLER(kCompress, Compress<CpuPlatform>, BindCompression<CpuPlatform>());
XLA_FFI_DEFINE_HANDLER(kDecompress, Decompress<CpuPlatform>, BindCompression<CpuPlatform>());

}  // namespace

Targets CpuTargets() {
  return {{"offload_start", kOffloadStart},
          {"offload_done", kOffloadDone},
          {"fetch_start", kFetchStart},
          {"fetch_done", kFetchDone},
          {"compress", kCompress},
          {"decompress", kDecompress}};
}

}  // namespace vmem
