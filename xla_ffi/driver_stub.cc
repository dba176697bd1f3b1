// Stands in for NVIDIA's driver library, libcuda.so.1, where there is none. Newer versions of cuDNN
// cannot be loaded without it, although they need no device to say which plans there are for one.
// Loaded for that question alone, and only where the real one cannot be. Every function fails.

namespace {

constexpr int kStubLibrary = 34;  // CUDA_ERROR_STUB_LIBRARY

}  // namespace

#define VMEM_FAIL(name) \
  extern "C" __attribute__((visibility("default"))) int name() { return kStubLibrary; }

// What cuDNN links to, and then what it looks up and complains about on stderr where it is missing.
VMEM_FAIL(cuGetErrorString)
VMEM_FAIL(cuModuleGetFunction)
VMEM_FAIL(cuModuleLoadData)
VMEM_FAIL(cuModuleUnload)
VMEM_FAIL(cuTensorMapEncodeIm2col)
VMEM_FAIL(cuTensorMapEncodeTiled)

VMEM_FAIL(cuCtxGetCurrent)
VMEM_FAIL(cuCtxGetLimit)
VMEM_FAIL(cuCtxPopCurrent)
VMEM_FAIL(cuCtxPushCurrent)
VMEM_FAIL(cuDeviceGet)
VMEM_FAIL(cuDeviceGetCount)
VMEM_FAIL(cuDriverGetVersion)
VMEM_FAIL(cuGetErrorName)
VMEM_FAIL(cuKernelGetAttribute)
VMEM_FAIL(cuKernelGetFunction)
VMEM_FAIL(cuKernelSetAttribute)
VMEM_FAIL(cuLaunchCooperativeKernel)
VMEM_FAIL(cuLaunchKernel)
VMEM_FAIL(cuLaunchKernelEx)
VMEM_FAIL(cuLibraryGetKernel)
VMEM_FAIL(cuLibraryLoadData)
VMEM_FAIL(cuLibraryLoadFromFile)
VMEM_FAIL(cuLibraryUnload)
VMEM_FAIL(cuLinkAddData)
VMEM_FAIL(cuLinkComplete)
VMEM_FAIL(cuLinkCreate)
VMEM_FAIL(cuLinkDestroy)
VMEM_FAIL(cuOccupancyMaxPotentialClusterSize)
VMEM_FAIL(cuStreamGetCtx)
