// The CPU twin: worker threads stand in for the copy streams, ordinary memory for both sides.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

namespace vmem {

// What a point of a lane's work comes to: done, or failed with a reason.
class CpuSignal {
 public:
  void Set(std::string error);
  // The work before it never happens, since its lane has been stopped.
  void Abandon() noexcept;
  // Blocks until it is set; throws Error if the work before it failed.
  void Wait();
  // Blocks until it is set, whatever came of it.
  void WaitQuietly() noexcept;

 private:
  enum class State { kPending, kDone, kAbandoned };

  void Become(State state, std::string error) noexcept;

  std::mutex mutex_;
  std::condition_variable changed_;
  State state_ = State::kPending;
  std::string error_;
};

// One copy lane: a thread that runs what it is given, in order.
class CpuLane {
 public:
  CpuLane();
  ~CpuLane();
  CpuLane(const CpuLane&) = delete;
  CpuLane& operator=(const CpuLane&) = delete;

  void Push(std::function<void()> work);
  // Sets `signal` once all work before it is done, with the failure of that work, if any.
  void Signal(std::shared_ptr<CpuSignal> signal);
  // Called by work on this lane: the next signal carries the failure.
  void Fail(std::string error) { error_ = std::move(error); }
  // Called by work on this lane; ends early when the lane is stopped.
  void Sleep(double seconds);
  // Waits for the work that there is, whatever comes of it. Takes no memory, so it cannot fail.
  void Drain() noexcept;
  // Drops the copies that wait and abandons their signals; the one that is running goes on. For good.
  void Stop() noexcept;
  // Waits for that one. All lanes that wait for each other must have been stopped.
  void Join() noexcept;

 private:
  struct Job {
    std::function<void()> work;
    std::shared_ptr<CpuSignal> signal;
  };

  void Run();
  void Add(Job job);

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Job> jobs_;
  std::uint64_t added_ = 0;  // jobs so far
  std::uint64_t ended_ = 0;  // those of them that were done or dropped
  bool stopping_ = false;
  std::string error_;  // of the lane's own thread
  std::thread thread_;
};

struct CpuBackend {
  // nullptr is the calling thread: XLA:CPU runs a custom call where its computation is.
  using Stream = CpuLane*;
  // Each record makes a new signal, so a wait keeps what was recorded when it was asked for.
  using Event = std::shared_ptr<CpuSignal>;

  // Several threads of one pool run pieces of several executions.
  static constexpr bool kOneThreadLaunches = false;
  static constexpr const char* kPlatform = "cpu";

  class HostMemory {
   public:
    // `lock_pages` keeps them from being swapped, under RLIMIT_MEMLOCK, as a driver pins them.
    HostMemory(std::size_t nbytes, bool lock_pages);
    ~HostMemory();
    HostMemory(const HostMemory&) = delete;
    HostMemory& operator=(const HostMemory&) = delete;
    std::byte* data() const { return data_; }

   private:
    std::byte* data_ = nullptr;
    std::size_t nbytes_ = 0;
  };

  class DeviceMemory : public HostMemory {
   public:
    explicit DeviceMemory(std::size_t nbytes) : HostMemory(nbytes, false) {}
  };

  struct DeviceGuard {
    explicit DeviceGuard(int) {}
  };

  using Clock = std::chrono::steady_clock;
  // Written by the lane, read once that has been drained.
  using Mark = std::shared_ptr<Clock::time_point>;

  struct Origin {
    explicit Origin(Stream) {}
    double Seconds(const Mark& mark) const {
      return std::chrono::duration<double>(mark->time_since_epoch()).count();
    }
  };

  static Mark NewMark(Stream stream);
  static Stream NewLane(int device);
  static void StopLane(Stream lane) { lane->Stop(); }
  static void JoinLane(Stream lane) { lane->Join(); }
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
  static void Drain(Stream lane) noexcept { lane->Drain(); }
};

}  // namespace vmem
