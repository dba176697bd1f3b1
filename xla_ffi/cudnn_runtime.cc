#include "cudnn_runtime.h"

#include <string>
#include <utility>

#include "cuda_backend.h"
#include "error.h"

namespace vmem {
namespace {

// Plans are immutable; only making them and looking them up needs the lock, which the lease holds.
struct DeviceState {
  std::mutex mutex;
  cudnnHandle_t handle = nullptr;
  std::map<Dims, std::shared_ptr<const Plan>> plans;
};

// Leaked: no destructor may call cuDNN when the process ends.
DeviceState& StateOf(int device) {
  static std::mutex* const mutex = new std::mutex;
  static auto* const states = new std::map<int, std::unique_ptr<DeviceState>>;
  std::lock_guard<std::mutex> lock(*mutex);
  std::unique_ptr<DeviceState>& state = (*states)[device];
  if (state == nullptr) state = std::make_unique<DeviceState>();
  return *state;
}

}  // namespace

CudnnLease::CudnnLease(int device) : device_(device) {
  DeviceState& state = StateOf(device);
  lock_ = std::unique_lock<std::mutex>(state.mutex);
  if (state.handle == nullptr) {
    CudaBackend::DeviceGuard guard(device);
    VMEM_CHECK_CUDNN(cudnnCreate(&state.handle));
  }
  handle_ = state.handle;
}

std::shared_ptr<const Plan> CudnnLease::PlanFor(const ConvPadding& padding, const ConvWay& way,
                                                cudaStream_t stream) {
  Dims key{way.engine};
  padding.geometry().AppendTo(key);
  for (const auto& [type, value] : way.knobs) key.insert(key.end(), {type, value});
  std::shared_ptr<const Plan>& plan = StateOf(device_).plans[key];
  if (plan == nullptr) {
    if (CudaBackend::IsCapturing(stream)) {
      throw Error(Code::kFailedPrecondition,
                  "the stream is being recorded into a CUDA graph before the plan was made");
    }
    CudaBackend::DeviceGuard guard(device_);
    plan = std::make_shared<const Plan>(
        MakePlan(padding.geometry(), ConvDevice::Here(handle_), way.engine, way.knobs));
  }
  return plan;
}

void CudnnLease::Run(const Plan& plan, const ConvPadding& padding, const ConvBuffers& buffers,
                     cudaStream_t stream) {
  const ConvBuffers inside = padding.Inside(buffers);
  const bool bias = inside.bias != nullptr;
  const void* pointers[] = {inside.x, inside.w, inside.y, inside.bias};
  Dims ids{kIdOfX, kIdOfW, kIdOfY};
  if (bias) ids.push_back(kIdOfBias);
  Descriptor pack(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR);
  pack.Set(CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, bias ? 4 : 3, pointers);
  pack.Set(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, ids);
  pack.Set(CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, 1, &inside.workspace);
  pack.Finalize();
  CudaBackend::DeviceGuard guard(device_);
  padding.Pad(buffers, stream);
  VMEM_CHECK_CUDNN(cudnnSetStream(handle_, stream));
  VMEM_CHECK_CUDNN(cudnnBackendExecute(handle_, plan.descriptor.raw(), pack.raw()));
  padding.Strip(buffers, stream);
}

std::vector<PlanInfo> FindPlansHere(const ConvGeometry& geometry, int device,
                                    const std::vector<std::int64_t>& banned, bool compiling) {
  CudnnLease lease(device);
  CudaBackend::DeviceGuard guard(device);
  return FindPlans(geometry, ConvDevice::Here(lease.handle()), banned, compiling);
}

ConvTimer::ConvTimer(const ConvGeometry& geometry, const ConvWay& way, int device,
                     std::vector<ConvBuffers> sets, std::int64_t workspace)
    : device_(device), sets_(std::move(sets)), padding_(geometry, way.channels) {
  CudaBackend::DeviceGuard guard(device);
  {
    CudnnLease lease(device);
    plan_ = MakePlan(padding_.geometry(), ConvDevice::Here(lease.handle()), way.engine, way.knobs);
  }
  const std::int64_t needs = padding_.nbytes() + plan_.workspace;
  if (sets_.empty()) throw Error(Code::kInvalidArgument, "there are no buffers");
  if (needs > workspace) {
    throw Error(Code::kInvalidArgument, "the plan needs " + std::to_string(needs) +
                                            " bytes of workspace. Got " +
                                            std::to_string(workspace) + ".");
  }
  VMEM_CHECK_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
}

ConvTimer::~ConvTimer() { cudaStreamDestroy(stream_); }

std::vector<double> ConvTimer::Run(int times) {
  CudaBackend::DeviceGuard guard(device_);
  CudnnLease lease(device_);
  std::vector<CudaBackend::Mark> marks{CudaBackend::NewMark(stream_)};
  for (int i = 0; i < times; ++i) {
    lease.Run(plan_, padding_, sets_.at(runs_++ % sets_.size()), stream_);
    marks.push_back(CudaBackend::NewMark(stream_));
  }
  VMEM_CHECK_CUDA(cudaStreamSynchronize(stream_));
  std::vector<double> seconds;
  for (int i = 0; i < times; ++i) {
    float milliseconds = 0.0F;
    VMEM_CHECK_CUDA(cudaEventElapsedTime(&milliseconds, marks[i]->get(), marks[i + 1]->get()));
    seconds.push_back(milliseconds * 1e-3);
  }
  return seconds;
}

}  // namespace vmem
