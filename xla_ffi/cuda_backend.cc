#include "cuda_backend.h"

#include <chrono>
#include <cstdint>
#include <cstring>
#include <thread>
#include <utility>

#include "error.h"
#include "teardown.h"

namespace vmem {
namespace {

constexpr int kPoison = 0xFF;  // a NaN in every floating-point format, -1 in every integer one

constexpr int kTries = 16;

double HostSeconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// A delay that tests inject: nothing is waited for, so there is no event to wait on in its place.
void CUDART_CB SleepOnHost(void* microseconds) {
  std::this_thread::sleep_for(
      std::chrono::microseconds(reinterpret_cast<std::intptr_t>(microseconds)));
}

void Copy(cudaStream_t lane, void* to, const void* from, std::size_t nbytes, cudaMemcpyKind kind) {
  if (nbytes > 0) VMEM_CHECK_CUDA(cudaMemcpyAsync(to, from, nbytes, kind, lane));
}

}  // namespace

void CheckCuda(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  (void)cudaGetLastError();  // or the next caller of the runtime is told of it
  const Code code =
      status == cudaErrorMemoryAllocation ? Code::kResourceExhausted : Code::kInternal;
  throw Error(code, std::string(what) + ": " + cudaGetErrorString(status));
}

CudaEvent::CudaEvent(unsigned int flags) {
  VMEM_CHECK_CUDA(cudaEventCreateWithFlags(&event_, flags));
}

CudaEvent::~CudaEvent() {
  Teardown([this] { VMEM_CHECK_CUDA(cudaEventDestroy(event_)); });  // allowed while it is pending
}

CudaBackend::HostMemory::HostMemory(std::size_t nbytes, bool) {
  if (nbytes > 0) VMEM_CHECK_CUDA(cudaHostAlloc(&data_, nbytes, cudaHostAllocPortable));
}

CudaBackend::HostMemory::~HostMemory() {
  if (data_ != nullptr) Teardown([this] { VMEM_CHECK_CUDA(cudaFreeHost(data_)); });
}

CudaBackend::DeviceMemory::DeviceMemory(std::size_t nbytes) {
  VMEM_CHECK_CUDA(cudaMalloc(&data_, nbytes));
}

CudaBackend::DeviceMemory::~DeviceMemory() {
  Teardown([this] { VMEM_CHECK_CUDA(cudaFree(data_)); });
}

CudaBackend::DeviceGuard::DeviceGuard(int device) {
  int current = -1;
  VMEM_CHECK_CUDA(cudaGetDevice(&current));
  if (current == device) return;
  VMEM_CHECK_CUDA(cudaSetDevice(device));
  previous_ = current;
}

CudaBackend::DeviceGuard::~DeviceGuard() {
  if (previous_ >= 0) Teardown([this] { VMEM_CHECK_CUDA(cudaSetDevice(previous_)); });
}

// The host sees an event some microseconds after the device has passed it; of a few tries the one
// that was seen soonest is kept. The events have no cudaEventBlockingSync: a thread that sleeps would
// see them later.
CudaBackend::Origin::Origin(Stream lane) {
  VMEM_CHECK_CUDA(cudaStreamSynchronize(lane));
  double narrowest = 0.0;
  for (int i = 0; i < kTries; ++i) {
    const double before = HostSeconds();
    Mark mark = NewMark(lane);
    VMEM_CHECK_CUDA(cudaEventSynchronize(mark->get()));
    const double after = HostSeconds();
    if (mark_ != nullptr && after - before >= narrowest) continue;
    narrowest = after - before;
    mark_ = std::move(mark);
    seconds_ = (before + after) / 2;
  }
}

double CudaBackend::Origin::Seconds(const Mark& mark) const {
  float milliseconds = 0.0F;
  VMEM_CHECK_CUDA(cudaEventSynchronize(mark->get()));
  VMEM_CHECK_CUDA(cudaEventElapsedTime(&milliseconds, mark_->get(), mark->get()));
  return seconds_ + milliseconds * 1e-3;
}

CudaBackend::Mark CudaBackend::NewMark(Stream stream) {
  auto mark = std::make_shared<CudaEvent>(cudaEventDefault);
  VMEM_CHECK_CUDA(cudaEventRecord(mark->get(), stream));
  return mark;
}

cudaStream_t CudaBackend::NewLane(int device) {
  DeviceGuard guard(device);
  int lowest = 0;
  int highest = 0;
  VMEM_CHECK_CUDA(cudaDeviceGetStreamPriorityRange(&lowest, &highest));
  Stream lane = nullptr;
  VMEM_CHECK_CUDA(cudaStreamCreateWithPriority(&lane, cudaStreamNonBlocking, highest));
  return lane;
}

CudaBackend::Event CudaBackend::NewEvent() { return std::make_shared<CudaEvent>(); }

void CudaBackend::Record(Event& event, Stream stream) {
  VMEM_CHECK_CUDA(cudaEventRecord(event->get(), stream));
}

void CudaBackend::Wait(Stream stream, const Event& event) {
  VMEM_CHECK_CUDA(cudaStreamWaitEvent(stream, event->get(), 0));
}

void CudaBackend::CopyToHost(Stream lane, void* to, const void* from, std::size_t nbytes) {
  Copy(lane, to, from, nbytes, cudaMemcpyDeviceToHost);
}

void CudaBackend::CopyToDevice(Stream lane, void* to, const void* from, std::size_t nbytes) {
  Copy(lane, to, from, nbytes, cudaMemcpyHostToDevice);
}

void CudaBackend::CopyOnDevice(Stream lane, void* to, const void* from, std::size_t nbytes) {
  Copy(lane, to, from, nbytes, cudaMemcpyDeviceToDevice);
}

void CudaBackend::PoisonDevice(Stream stream, void* memory, std::size_t nbytes) {
  if (nbytes > 0) VMEM_CHECK_CUDA(cudaMemsetAsync(memory, kPoison, nbytes, stream));
}

void CudaBackend::PoisonHost(Stream stream, void* memory, std::size_t nbytes) {
  PoisonDevice(stream, memory, nbytes);  // pinned memory has an address on the device
}

void CudaBackend::Delay(Stream lane, double seconds) {
  const auto microseconds = static_cast<std::intptr_t>(seconds * 1e6);
  VMEM_CHECK_CUDA(cudaLaunchHostFunc(lane, SleepOnHost, reinterpret_cast<void*>(microseconds)));
}

void CudaBackend::Fail(Stream, const std::string& message) {
  throw Error(Code::kInternal, message);
}

void CudaBackend::Drain(Stream lane) noexcept {
  cudaStreamSynchronize(lane);  // an error of earlier work has been, or will be, XLA's to report
  (void)cudaGetLastError();
}

int CudaBackend::DeviceOf(Stream stream) {
  int device = -1;
#if CUDART_VERSION >= 12080
  VMEM_CHECK_CUDA(cudaStreamGetDevice(stream, &device));
#else
  (void)stream;
  VMEM_CHECK_CUDA(cudaGetDevice(&device));  // XLA makes its device current before it calls us
#endif
  return device;
}

bool CudaBackend::IsCapturing(Stream stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  VMEM_CHECK_CUDA(cudaStreamIsCapturing(stream, &status));
  return status != cudaStreamCaptureStatusNone;
}

void CudaBackend::RefuseCapture(Stream stream) {
  if (IsCapturing(stream)) {
    throw Error(Code::kFailedPrecondition,
                "the stream is being recorded into a CUDA graph, which cannot hold a transfer");
  }
}

}  // namespace vmem
