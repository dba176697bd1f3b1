// The handlers of each platform, by the name of their custom call target.
#pragma once

#include "handlers.h"

namespace vmem {

Targets CpuTargets();
#ifdef VMEM_JAX_CUDA
Targets CudaTargets();
#endif
#ifdef VMEM_JAX_CUDNN
Targets CudnnTargets();  // of CUDA, too
#endif

}  // namespace vmem
