// What runs plans: one handle and the plans of each device.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "cudnn_padding.h"
#include "cudnn_plans.h"

namespace vmem {

// A device's handle, which one thread at a time may use, for as long as it holds this.
class CudnnLease {
 public:
  // Makes the handle if there is none yet, which no stream may be recorded during.
  explicit CudnnLease(int device);

  int device() const { return device_; }
  cudnnHandle_t handle() const { return handle_; }

  // The plan, made when it is first asked for: slow, and not allowed while `stream` is recorded
  // into a CUDA graph.
  std::shared_ptr<const Plan> PlanFor(const ConvPadding& padding, const ConvWay& way,
                                      cudaStream_t stream);

  // `plan` is one for `padding`, which comes before and after it.
  void Run(const Plan& plan, const ConvPadding& padding, const ConvBuffers& buffers,
           cudaStream_t stream);

 private:
  int device_;
  std::unique_lock<std::mutex> lock_;
  cudnnHandle_t handle_ = nullptr;
};

// Every plan for a device that is here.
std::vector<PlanInfo> FindPlansHere(const ConvGeometry& geometry, int device,
                                    const std::vector<std::int64_t>& banned, bool compiling);

}  // namespace vmem
