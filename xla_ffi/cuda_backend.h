// The CUDA backend: two non-blocking streams a device, pinned memory, device-side waits only.
//
// The CUDA runtime is linked statically and stays private to the module. Streams and events of two
// copies of it work together, since both use the device's primary context, which is XLA's as well.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <memory>
#include <string>

namespace vmem {

// Throws Error if `status` is one; `what` is the call.
void CheckCuda(cudaError_t status, const char* what);
#define VMEM_CHECK_CUDA(call) ::vmem::CheckCuda((call), #call)

class CudaEvent {
 public:
  explicit CudaEvent(unsigned int flags = cudaEventDisableTiming);
  ~CudaEvent();
  CudaEvent(const CudaEvent&) = delete;
  CudaEvent& operator=(const CudaEvent&) = delete;
  cudaEvent_t get() const { return event_; }

 private:
  cudaEvent_t event_ = nullptr;
};

struct CudaBackend {
  using Stream = cudaStream_t;
  // A wait keeps the state that the event had when it was asked for, so events are recorded again
  // as soon as everybody has asked.
  using Event = std::shared_ptr<CudaEvent>;

  // The thread that runs an executable on a device launches all of its work before it goes on.
  static constexpr bool kOneThreadLaunches = true;
  static constexpr const char* kPlatform = "CUDA";

  class HostMemory {
   public:
    // Always pinned, by the driver, which does not count it against RLIMIT_MEMLOCK.
    HostMemory(std::size_t nbytes, bool lock_pages);
    ~HostMemory();
    HostMemory(const HostMemory&) = delete;
    HostMemory& operator=(const HostMemory&) = delete;
    std::byte* data() const { return static_cast<std::byte*>(data_); }

   private:
    void* data_ = nullptr;
  };

  // Beside XLA's own pool, not from it.
  class DeviceMemory {
   public:
    explicit DeviceMemory(std::size_t nbytes);
    ~DeviceMemory();
    DeviceMemory(const DeviceMemory&) = delete;
    DeviceMemory& operator=(const DeviceMemory&) = delete;
    std::byte* data() const { return static_cast<std::byte*>(data_); }

   private:
    void* data_ = nullptr;
  };

  class DeviceGuard {
   public:
    explicit DeviceGuard(int device);
    ~DeviceGuard();
    DeviceGuard(const DeviceGuard&) = delete;
    DeviceGuard& operator=(const DeviceGuard&) = delete;

   private:
    int previous_ = -1;  // to go back to, or -1
  };

  using Mark = std::shared_ptr<CudaEvent>;  // one that keeps the time

  class Origin {
   public:
    explicit Origin(Stream lane);
    double Seconds(const Mark& mark) const;

   private:
    Mark mark_;
    double seconds_ = 0.0;  // when the device passed it, on the host's clock
  };

  static Mark NewMark(Stream stream);
  static Stream NewLane(int device);
  // At the end of the process the driver takes streams down together with their context.
  static void StopLane(Stream) {}
  static void JoinLane(Stream) {}
  static Event NewEvent();
  static void Record(Event& event, Stream stream);
  static void Wait(Stream stream, const Event& event);
  static void CopyToHost(Stream lane, void* to, const void* from, std::size_t nbytes);
  static void CopyToDevice(Stream lane, void* to, const void* from, std::size_t nbytes);
  static void CopyOnDevice(Stream lane, void* to, const void* from, std::size_t nbytes);
  static void PoisonDevice(Stream stream, void* memory, std::size_t nbytes);
  static void PoisonHost(Stream stream, void* memory, std::size_t nbytes);
  static void Delay(Stream lane, double seconds);
  static void Fail(Stream lane, const std::string& message);
  static void Drain(Stream lane) noexcept;

  // The device of XLA's stream: ordinals of ours and of XLA's cannot disagree then.
  static int DeviceOf(Stream stream);
  // Whether `stream` is being recorded into a CUDA graph.
  static bool IsCapturing(Stream stream);
  // Throws if `stream` is being recorded into a CUDA graph: it would replay the copies without the
  // bookkeeping around them.
  static void RefuseCapture(Stream stream);
};

}  // namespace vmem
