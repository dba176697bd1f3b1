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
  const std::pair<std::int64_t, void*> named[] = {
      {kIdOfX, inside.x},         {kIdOfW, inside.w},         {kIdOfY, inside.y},
      {kIdOfBias, inside.bias},   {kIdOfScale, inside.scale}, {kIdOfShift, inside.shift},
      {kIdOfSums, inside.sums},   {kIdOfSquares, inside.squares}};
  Dims ids;
  std::vector<void*> pointers;
  for (const auto& [id, pointer] : named) {
    if (pointer == nullptr) continue;  // a tensor that the graph does not have
    ids.push_back(id);
    pointers.push_back(pointer);
  }
  Descriptor pack(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR);
  pack.Set(CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR,
           static_cast<std::int64_t>(pointers.size()), pointers.data());
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

}  // namespace vmem
