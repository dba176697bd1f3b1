// The transfer core without Python and XLA, for the sanitizers: every law of docs/ffi.md in small.
//
//   cmake -S . -B build -DVMEM_JAX_SANITIZE=thread && cmake --build build && build/transfer_test
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cpu_backend.h"
#include "engine.h"
#include "expect.h"
#include "teardown.h"

namespace vmem {
namespace {

constexpr CpuLane* kMain = nullptr;  // this thread computes
constexpr std::size_t kNbytes = 4096;

using Arena = DeviceArena<CpuBackend>;
using Tensor = std::vector<std::uint8_t>;

Engine<CpuBackend>& TheEngine() { return Engine<CpuBackend>::Get(); }

// `count` slots of `depth` places, side by side.
Layout Flat(std::size_t count, std::size_t depth = 1) {
  std::vector<SlotLayout> slots;
  for (std::size_t i = 0; i < count; ++i) {
    slots.push_back({i * depth * kNbytes, kNbytes, kNbytes, depth});
  }
  return Layout(std::move(slots), count * depth * kNbytes);
}

// An arena that is pinned on device 0 and freed with the scope.
class Pinned {
 public:
  explicit Pinned(Layout layout, int device = 0)
      : id_(Layouts::Get().Add(std::move(layout))), device_(device) {
    TheEngine().Pin(id_, device, false);
  }
  ~Pinned() {
    Layouts::Get().Remove(id_);
    TheEngine().Free(id_);
  }
  Arena* operator->() const { return TheEngine().Find(id_, device_).get(); }

 private:
  std::int64_t id_;
  int device_;
};

// Injects for the length of a scope.
class Injected {
 public:
  explicit Injected(const Injection& injection) { TheEngine().Inject(injection); }
  ~Injected() { TheEngine().Inject({}); }
};

Injection Delayed(double seconds) {
  Injection injection;
  injection.delay_seconds = seconds;
  injection.poison = injection.poison_source = true;
  return injection;
}

Tensor Filled(std::uint8_t seed) {
  Tensor tensor(kNbytes);
  for (std::size_t i = 0; i < kNbytes; ++i) tensor[i] = static_cast<std::uint8_t>(seed + 7 * i);
  return tensor;
}

// A training step: parks `count` tensors, one for each place, and takes them back in reverse.
void Step(const Pinned& arena, std::int64_t run, std::size_t slots, std::size_t depth) {
  std::vector<Tensor> sources;
  for (std::size_t i = 0; i < slots * depth; ++i) {
    sources.push_back(Filled(static_cast<std::uint8_t>(run * 31 + i)));
    arena->OffloadStart(run, kMain, i / depth, sources.back().data(), kNbytes);
    arena->OffloadDone(run, kMain, i / depth, sources.back().data(), kNbytes);
    std::memset(sources.back().data(), 0xAB, kNbytes);  // the memory is somebody else's now
  }
  for (std::size_t i = slots * depth; i-- > 0;) {
    Tensor back(kNbytes);
    arena->FetchStart(run, kMain, i / depth, back.data(), kNbytes);
    arena->FetchDone(run, kMain, i / depth, back.data(), kNbytes);
    EXPECT(back == Filled(static_cast<std::uint8_t>(run * 31 + i)));
  }
}

void TestRoundTripsWithEveryCapacity() {
  for (std::size_t capacity : {0, 3, 5, 10, 100}) {
    Pinned arena(Flat(5, 2));
    Injected injected(Delayed(1e-4));
    arena->SetCacheCapacity(capacity * kNbytes);
    for (std::int64_t run = 1; run < 4; ++run) Step(arena, run, 5, 2);
    const Counters counters = arena->counters();
    EXPECT(counters.hits + counters.misses == 30);
    EXPECT(counters.parked == 0 && counters.cache_used_nbytes == 0);
    EXPECT(counters.link_nbytes_in == counters.misses * kNbytes);
    EXPECT(counters.link_nbytes_out == counters.misses * kNbytes);
    EXPECT(counters.hits == 3 * std::min<std::size_t>(capacity, 10));
    EXPECT((counters.evictions > 0) == (capacity > 0 && capacity < 10));
  }
}

void TestOverlappingTransfers() {
  Pinned arena(Flat(3));
  Injected injected(Delayed(2e-3));
  std::vector<Tensor> sources = {Filled(1), Filled(2), Filled(3)};
  for (std::size_t i = 0; i < 3; ++i) arena->OffloadStart(1, kMain, i, sources[i].data(), kNbytes);
  for (std::size_t i = 0; i < 3; ++i) arena->OffloadDone(1, kMain, i, sources[i].data(), kNbytes);
  std::vector<Tensor> back(3, Tensor(kNbytes));
  for (std::size_t i = 0; i < 3; ++i) arena->FetchStart(1, kMain, i, back[i].data(), kNbytes);
  for (std::size_t i = 0; i < 3; ++i) arena->FetchDone(1, kMain, i, back[i].data(), kNbytes);
  EXPECT(back[0] == Filled(1) && back[1] == Filled(2) && back[2] == Filled(3));
}

void TestMisuse() {
  Pinned arena(Layout({{0, kNbytes, kNbytes, 1}, {0, kNbytes, kNbytes, 1}}, kNbytes));
  Tensor source = Filled(1);
  Tensor other(kNbytes);
  std::int64_t run = 0;
  const auto park = [&] {
    ++run;
    arena->OffloadStart(run, kMain, 0, source.data(), kNbytes);
    arena->OffloadDone(run, kMain, 0, source.data(), kNbytes);
  };
  EXPECT(Throws([&] { arena->OffloadStart(1, kMain, 2, source.data(), kNbytes); }, "2 slots"));
  EXPECT(Throws([&] { arena->OffloadStart(1, kMain, 0, source.data(), 8); }, "8 bytes"));
  EXPECT(Throws([&] { arena->FetchStart(1, kMain, 0, other.data(), kNbytes); }, "nothing parked"));
  park();
  EXPECT(Throws([&] { arena->OffloadStart(run, kMain, 0, other.data(), kNbytes); }, "is full"));
  park();  // a failed run does not stand in the way of the next
  EXPECT(Throws([&] { arena->OffloadStart(run, kMain, 1, other.data(), kNbytes); }, "still holds"));
  park();
  EXPECT(Throws([&] { arena->FetchDone(run, kMain, 0, other.data(), kNbytes); }, "returning"));
  park();
  arena->FetchStart(run, kMain, 0, source.data(), kNbytes);
  EXPECT(Throws([&] { arena->FetchDone(run, kMain, 0, other.data(), kNbytes); }, "XLA moved"));
  EXPECT(Throws([&] { arena->FetchDone(run, kMain, 0, source.data(), kNbytes); }, "before"));
  park();
  EXPECT(arena->counters().resets == 4);
}

void TestMovedSourceIsCopiedAgain() {
  for (std::size_t capacity : {0, 1}) {
    Pinned arena(Flat(1));
    arena->SetCacheCapacity(capacity * kNbytes);
    Tensor source = Filled(1), moved = Filled(1), back(kNbytes);
    Injected injected(Delayed(2e-3));
    arena->OffloadStart(1, kMain, 0, source.data(), kNbytes);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    arena->OffloadDone(1, kMain, 0, moved.data(), kNbytes);
    arena->FetchStart(1, kMain, 0, back.data(), kNbytes);
    arena->FetchDone(1, kMain, 0, back.data(), kNbytes);
    EXPECT(back == Filled(1));
    EXPECT(arena->counters().recopies == 1);
  }
}

void TestFailedCopies() {
  for (bool fetch : {false, true}) {
    Pinned arena(Flat(2));
    {
      Injection injection;
      injection.fail_slot = 1;
      injection.fail_fetch = fetch;
      Injected injected(injection);
      EXPECT(Throws([&] { Step(arena, 1, 2, 1); }, "on purpose"));
    }
    Step(arena, 2, 2, 1);
    EXPECT(arena->counters().parked == 0);
  }
}

// XLA may reuse buffers as soon as it hears of the failure, so nothing writes to them any more.
void TestFailureWaitsForTheLanes() {
  Pinned arena(Flat(1));
  Tensor source = Filled(1), back(kNbytes);
  arena->OffloadStart(1, kMain, 0, source.data(), kNbytes);
  arena->OffloadDone(1, kMain, 0, source.data(), kNbytes);
  Injected injected(Delayed(2e-2));
  arena->FetchStart(1, kMain, 0, back.data(), kNbytes);
  EXPECT(Throws([&] { arena->FetchStart(1, kMain, 0, source.data(), kNbytes); }, "returning"));
  EXPECT(back == Filled(1));
}

// The tensor is on its way out of the cache when it is wanted back.
void TestFetchDuringEviction() {
  Pinned arena(Flat(2));
  arena->SetCacheCapacity(kNbytes);
  Tensor first = Filled(1), second = Filled(2), back(kNbytes);
  arena->OffloadStart(1, kMain, 0, first.data(), kNbytes);
  arena->OffloadDone(1, kMain, 0, first.data(), kNbytes);
  {
    Injected injected(Delayed(2e-2));
    arena->OffloadStart(1, kMain, 1, second.data(), kNbytes);
  }
  arena->FetchStart(1, kMain, 0, back.data(), kNbytes);
  arena->FetchDone(1, kMain, 0, back.data(), kNbytes);
  EXPECT(back == Filled(1));
  EXPECT(arena->counters().evictions == 1);
  arena->OffloadDone(1, kMain, 1, second.data(), kNbytes);
}

void TestRunThatDiedElsewhere() {
  Pinned arena(Flat(1));
  Injection injection;
  injection.stale_seconds = 0.05;
  Injected injected(injection);
  Tensor source = Filled(1);
  arena->OffloadStart(1, kMain, 0, source.data(), kNbytes);
  Step(arena, 2, 1, 1);
  EXPECT(arena->counters().resets == 1);
  EXPECT(
      Throws([&] { arena->OffloadDone(1, kMain, 0, source.data(), kNbytes); }, "nothing parked"));
}

// Every copy and every wait, in the order of each lane, and nothing unless asked.
// Several calls of one run find what a failed run left: the first drops it, and no other drops what
// that one has parked since.
void TestCallsOfOneRunTakeOverTogether() {
  constexpr std::size_t kCalls = 4;
  Tensor left = Filled(9);
  std::vector<Tensor> sources(kCalls, Filled(3));
  Pinned arena(Flat(kCalls + 1));
  Injection injection;
  injection.stale_seconds = 0.05;
  Injected injected(injection);
  arena->OffloadStart(1, kMain, kCalls, left.data(), kNbytes);
  std::vector<std::thread> calls;
  for (std::size_t i = 0; i < kCalls; ++i) {
    calls.emplace_back([&, i] { arena->OffloadStart(2, kMain, i, sources[i].data(), kNbytes); });
  }
  for (std::thread& call : calls) call.join();
  EXPECT(arena->counters().parked == kCalls && arena->counters().resets == 1);
}

// What a dead run has left can be dropped by those who know that it is dead; nobody waits for it then.
void TestReset() {
  for (std::size_t capacity : {0, 1}) {
    Pinned arena(Flat(1));
    arena->SetCacheCapacity(capacity * kNbytes);
    Injection injection = Delayed(2e-3);
    injection.stale_seconds = 3600;
    Injected injected(injection);
    Tensor source = Filled(1);
    arena->OffloadStart(1, kMain, 0, source.data(), kNbytes);
    arena->Reset();
    source.assign(kNbytes, 0);  // nothing reads it any more
    EXPECT(arena->counters().parked == 0 && arena->counters().cache_used_nbytes == 0);
    EXPECT(arena->counters().resets == 1);
    EXPECT(Throws([&] { arena->OffloadDone(1, kMain, 0, source.data(), kNbytes); },
                  "nothing parked"));
    EXPECT(Throws([&] { arena->OffloadStart(1, kMain, 0, source.data(), kNbytes); },
                  "failed before"));
    Step(arena, 2, 1, 1);
    arena->Reset();
    EXPECT(arena->counters().resets == 1);
  }
}

// A run that waits for its turn begins as soon as the owner fails.
void TestTurnAfterAFailure() {
  Pinned arena(Flat(2));
  Injection injection;
  injection.stale_seconds = 3600;
  Injected injected(injection);
  Tensor held = Filled(9);
  arena->OffloadStart(1, kMain, 1, held.data(), kNbytes);
  std::thread waits([&] { Step(arena, 2, 1, 1); });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT(Throws([&] { arena->FetchStart(1, kMain, 1, held.data(), kNbytes); }, "leaving"));
  waits.join();
  EXPECT(arena->counters().resets == 1);
}

// A run of several threads that wait for their turn begins once.
void TestThreadsOfOneRun() {
  Pinned arena(Flat(3));
  Tensor held = Filled(9), back(kNbytes);
  arena->OffloadStart(1, kMain, 2, held.data(), kNbytes);
  arena->OffloadDone(1, kMain, 2, held.data(), kNbytes);
  std::vector<Tensor> sources = {Filled(1), Filled(2)};
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < 2; ++i) {
    threads.emplace_back([&, i] {
      arena->OffloadStart(2, kMain, i, sources[i].data(), kNbytes);
      arena->OffloadDone(2, kMain, i, sources[i].data(), kNbytes);
    });
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  arena->FetchStart(1, kMain, 2, back.data(), kNbytes);
  arena->FetchDone(1, kMain, 2, back.data(), kNbytes);
  for (std::thread& thread : threads) thread.join();
  EXPECT(arena->counters().parked == 2 && arena->counters().resets == 0);
  for (std::size_t i = 0; i < 2; ++i) {
    arena->FetchStart(2, kMain, i, back.data(), kNbytes);
    arena->FetchDone(2, kMain, i, back.data(), kNbytes);
    EXPECT(back == sources[i]);
  }
}

// Every copy and every wait, in the order of each lane, and nothing unless asked.
void TestRecording() {
  Pinned arena(Flat(2));
  Step(arena, 1, 2, 1);
  EXPECT(Throws([&] { (void)arena->Spans(); }, "nothing is being recorded"));
  for (std::size_t capacity : {0, 1}) {
    arena->SetCacheCapacity(capacity * kNbytes);
    arena->Record(true);
    Injected injected(Delayed(2e-3));
    Step(arena, 2, 2, 1);
    const std::vector<Span> spans = arena->Spans();
    EXPECT(spans.size() == 8 + capacity);  // an eviction is one more
    std::size_t linked = 0;
    double passed[2] = {0.0, 0.0};
    for (const Span& span : spans) {
      EXPECT(span.run == 2 && span.nbytes == kNbytes && span.slot < 2 && span.end >= span.begin);
      if (span.waits) continue;
      double& lane = passed[span.out ? 1 : 0];
      EXPECT(span.begin >= lane);  // one after another
      lane = span.end;
      linked += span.link ? 1 : 0;
      if (capacity == 0) EXPECT(span.end - span.begin >= 2e-3);
    }
    EXPECT(linked == (capacity == 0 ? 4 : 2));  // out and back; or one evicted, and that one back
  }
  Tensor source = Filled(1), back(kNbytes);
  arena->OffloadStart(3, kMain, 0, source.data(), kNbytes);
  EXPECT(Throws([&] { arena->Record(false); }, "while a run holds"));
  arena->OffloadDone(3, kMain, 0, source.data(), kNbytes);
  arena->FetchStart(3, kMain, 0, back.data(), kNbytes);
  arena->FetchDone(3, kMain, 0, back.data(), kNbytes);
  arena->Record(false);
  EXPECT(Throws([&] { (void)arena->Spans(); }, "nothing is being recorded"));
}

// Threads that run steps at once: on one arena, on two of one device, on two devices.
void TestThreads() {
  Pinned first(Flat(4, 2), 0), second(Flat(4, 2), 0), elsewhere(Flat(4, 2), 1);
  first->SetCacheCapacity(3 * kNbytes);
  elsewhere->SetCacheCapacity(8 * kNbytes);
  first->Record(true);
  Injected injected(Delayed(1e-5));
  std::atomic<std::int64_t> runs{0};
  std::vector<std::thread> threads;
  for (const Pinned* arena : {&first, &first, &second, &elsewhere}) {
    threads.emplace_back([&runs, arena] {
      for (int i = 0; i < 20; ++i) Step(*arena, ++runs, 4, 2);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT(first->counters().resets == 0);
  EXPECT(first->Spans().size() >= 2 * 20 * 4 * 8);
}

void TestFreedWhileInFlight() {
  Tensor source = Filled(1);
  Injected injected(Delayed(5e-3));
  Pinned arena(Flat(1));
  arena->OffloadStart(1, kMain, 0, source.data(), kNbytes);
}

// The CPU twin of a device that may be lost: it cannot be made current then.
struct LosableBackend : CpuBackend {
  static inline bool lost = false;

  struct DeviceGuard {
    explicit DeviceGuard(int) {
      if (lost) throw Error(Code::kInternal, "the device is lost");
    }
  };
};

// A failure in the destructor does not end the process, and copies in flight are still waited for.
void TestFreedOnALostDevice() {
  auto& engine = Engine<LosableBackend>::Get();
  const std::int64_t id = Layouts::Get().Add(Flat(1));
  engine.Pin(id, 0, false);
  Tensor source = Filled(1);
  engine.Inject(Delayed(5e-3));
  engine.Find(id, 0)->OffloadStart(1, kMain, 0, source.data(), kNbytes);
  engine.Inject({});
  const std::uint64_t before = TeardownFailures::Get().count();
  LosableBackend::lost = true;
  Layouts::Get().Remove(id);
  engine.Free(id);
  LosableBackend::lost = false;
  EXPECT(TeardownFailures::Get().count() == before + 1);
  EXPECT(TeardownFailures::Get().first().find("the device is lost") != std::string::npos);
}

// Against a list of bytes.
void TestFreeRanges() {
  std::mt19937 random(0);
  constexpr std::size_t kCapacity = 64;
  FreeRanges ranges(kCapacity);
  std::vector<bool> used(kCapacity, false);
  std::vector<std::pair<std::size_t, std::size_t>> taken;
  for (int i = 0; i < 20000; ++i) {
    if (!taken.empty() && random() % 2 == 0) {
      std::swap(taken[random() % taken.size()], taken.back());
      const auto [offset, nbytes] = taken.back();
      taken.pop_back();
      ranges.Give(offset, nbytes);
      for (std::size_t b = offset; b < offset + nbytes; ++b) used[b] = false;
      continue;
    }
    const std::size_t nbytes = 1 + random() % 12, preferred = random() % kCapacity;
    std::size_t longest = 0, length = 0;
    for (bool b : used) longest = std::max(longest, length = b ? 0 : length + 1);
    const auto offset = ranges.Find(nbytes, preferred);
    EXPECT(offset.has_value() == (longest >= nbytes));
    if (!offset) continue;
    for (std::size_t b = *offset; b < *offset + nbytes; ++b) {
      EXPECT(!used[b]);
      used[b] = true;
    }
    ranges.Take(*offset, nbytes);
    taken.push_back({*offset, nbytes});
  }
}

void TestLocksHoldTensorsInTheCache() {
  TensorCache cache(2);
  auto first = cache.Insert({0, 0}, cache.Admit(1, 0)->offset, 1);
  auto second = cache.Insert({1, 0}, cache.Admit(1, 1)->offset, 1);
  EXPECT(!cache.Admit(1, 2) && !cache.Admit(3, 0));  // both locked; too large for it
  second->locked = false;
  EXPECT(cache.Admit(1, 2)->victims.size() == 1 && cache.Admit(1, 2)->victims[0] == second);
  first->locked = false;
  EXPECT(cache.Admit(1, 2)->victims[0] == first);  // least recently used
  EXPECT(cache.Admit(2, 0)->victims.size() == 2);
  cache.Remove(first);
  EXPECT(cache.Admit(1, 0)->victims.empty());
}

// Last: lanes do not come back.
void TestStopWithTransfersInFlight() {
  Tensor source = Filled(1);
  Injected injected(Delayed(3600));
  Pinned arena(Flat(1));
  arena->OffloadStart(1, kMain, 0, source.data(), kNbytes);
  std::thread waits([&] {
    EXPECT(Throws([&] { arena->OffloadDone(1, kMain, 0, source.data(), kNbytes); }, "stopped"));
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  TheEngine().Stop();
  waits.join();
}

}  // namespace
}  // namespace vmem

int main() {
  vmem::TestFreeRanges();
  vmem::TestLocksHoldTensorsInTheCache();
  vmem::TestRoundTripsWithEveryCapacity();
  vmem::TestOverlappingTransfers();
  vmem::TestMisuse();
  vmem::TestMovedSourceIsCopiedAgain();
  vmem::TestFailedCopies();
  vmem::TestFailureWaitsForTheLanes();
  vmem::TestFetchDuringEviction();
  vmem::TestRunThatDiedElsewhere();
  vmem::TestCallsOfOneRunTakeOverTogether();
  vmem::TestReset();
  vmem::TestTurnAfterAFailure();
  vmem::TestThreadsOfOneRun();
  vmem::TestRecording();
  vmem::TestThreads();
  vmem::TestFreedWhileInFlight();
  vmem::TestFreedOnALostDevice();
  vmem::TestStopWithTransfersInFlight();
  std::puts("all passed");
}
