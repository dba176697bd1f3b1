#include "cpu_backend.h"

#include <sys/mman.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <utility>

#include "error.h"

namespace vmem {
namespace {

constexpr int kPoison = 0xFF;  // a NaN in every floating-point format, -1 in every integer one

// On `stream`, or here and now where that is XLA's own thread.
void On(CpuLane* stream, std::function<void()> work) {
  if (stream == nullptr) {
    work();
  } else {
    stream->Push(std::move(work));
  }
}

}  // namespace

void CpuSignal::Set(std::string error) { Become(State::kDone, std::move(error)); }

void CpuSignal::Abandon() noexcept { Become(State::kAbandoned, {}); }

void CpuSignal::Become(State state, std::string error) noexcept {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    state_ = state;
    error_ = std::move(error);
  }
  changed_.notify_all();
}

void CpuSignal::Wait() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return state_ != State::kPending; });
  if (state_ == State::kAbandoned) {
    throw Error(Code::kInternal, "the copy lanes have been stopped");
  }
  if (!error_.empty()) throw Error(Code::kInternal, error_);
}

void CpuSignal::WaitQuietly() noexcept {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return state_ != State::kPending; });
}

CpuLane::CpuLane() : thread_([this] { Run(); }) {}

CpuLane::~CpuLane() {
  Stop();
  Join();
}

void CpuLane::Push(std::function<void()> work) { Add({std::move(work), nullptr}); }

void CpuLane::Signal(std::shared_ptr<CpuSignal> signal) { Add({nullptr, std::move(signal)}); }

void CpuLane::Add(Job job) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!stopping_) {
      jobs_.push_back(std::move(job));
      job.signal = nullptr;
      ++added_;
    }
  }
  changed_.notify_all();
  if (job.signal != nullptr) job.signal->Abandon();
}

void CpuLane::Sleep(double seconds) {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait_for(lock, std::chrono::duration<double>(seconds), [this] { return stopping_; });
}

void CpuLane::Drain() noexcept {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this, all = added_] { return ended_ >= all; });
}

void CpuLane::Stop() noexcept {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
    for (; !jobs_.empty(); jobs_.pop_front()) {
      if (jobs_.front().signal != nullptr) jobs_.front().signal->Abandon();
      ++ended_;
    }
  }
  changed_.notify_all();
}

void CpuLane::Join() noexcept {
  if (thread_.joinable()) thread_.join();
}

void CpuLane::Run() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return stopping_ || !jobs_.empty(); });
    if (jobs_.empty()) return;
    Job job = std::move(jobs_.front());
    jobs_.pop_front();
    lock.unlock();
    if (job.work) job.work();
    if (job.signal != nullptr) job.signal->Set(std::exchange(error_, {}));
    job = {};
    lock.lock();
    ++ended_;
    changed_.notify_all();
  }
}

CpuBackend::HostMemory::HostMemory(std::size_t nbytes, bool lock_pages) : nbytes_(nbytes) {
  if (nbytes == 0) return;
  int flags = MAP_PRIVATE | MAP_ANONYMOUS;
#ifdef MAP_POPULATE
  flags |= MAP_POPULATE;  // now: the first step shall not pay for page faults
#endif
  void* memory = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (memory == MAP_FAILED) {
    throw Error(Code::kResourceExhausted, std::string("mmap: ") + std::strerror(errno));
  }
  if (lock_pages && mlock(memory, nbytes) != 0) {
    const std::string reason = std::strerror(errno);
    munmap(memory, nbytes);
    throw Error(Code::kResourceExhausted, "mlock: " + reason);
  }
  data_ = static_cast<std::byte*>(memory);
}

CpuBackend::HostMemory::~HostMemory() {
  if (data_ != nullptr) munmap(data_, nbytes_);
}

// Lanes belong to the registry of engines, which lives until the process ends.
CpuLane* CpuBackend::NewLane(int) { return std::make_unique<CpuLane>().release(); }

CpuBackend::Mark CpuBackend::NewMark(Stream stream) {
  auto mark = std::make_shared<Clock::time_point>();
  On(stream, [mark] { *mark = Clock::now(); });
  return mark;
}

CpuBackend::Event CpuBackend::NewEvent() {
  Event event = std::make_shared<CpuSignal>();
  event->Set({});
  return event;
}

void CpuBackend::Record(Event& event, Stream stream) {
  event = std::make_shared<CpuSignal>();
  if (stream == nullptr) {
    event->Set({});
  } else {
    stream->Signal(event);
  }
}

void CpuBackend::Wait(Stream stream, const Event& event) {
  if (stream == nullptr) {
    event->Wait();
  } else {
    stream->Push([event] { event->WaitQuietly(); });
  }
}

void CpuBackend::CopyToHost(Stream lane, void* to, const void* from, std::size_t nbytes) {
  if (nbytes > 0) lane->Push([=] { std::memcpy(to, from, nbytes); });
}

void CpuBackend::CopyToDevice(Stream lane, void* to, const void* from, std::size_t nbytes) {
  CopyToHost(lane, to, from, nbytes);
}

void CpuBackend::CopyOnDevice(Stream lane, void* to, const void* from, std::size_t nbytes) {
  CopyToHost(lane, to, from, nbytes);
}

void CpuBackend::PoisonDevice(Stream stream, void* memory, std::size_t nbytes) {
  if (nbytes > 0) On(stream, [=] { std::memset(memory, kPoison, nbytes); });
}

void CpuBackend::PoisonHost(Stream stream, void* memory, std::size_t nbytes) {
  PoisonDevice(stream, memory, nbytes);
}

void CpuBackend::Delay(Stream lane, double seconds) {
  lane->Push([=] { lane->Sleep(seconds); });
}

void CpuBackend::Fail(Stream lane, const std::string& message) {
  lane->Push([=] { lane->Fail(message); });
}

}  // namespace vmem
