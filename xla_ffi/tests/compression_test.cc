// Compression without Python, XLA and CUDA, for the sanitizers: the CPU twin, the kernels on threads
// of the host, each reading what the other wrote, and stores with runs that interleave.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "host_threads.h"
// after it
#include "compression.h"
#include "cpu_compression.h"
#include "expect.h"
#include "zero_values_kernels.h"

namespace vmem {
namespace {

using Bytes = std::vector<std::byte>;

// Begins at a multiple of 16 bytes, as buffers of XLA do.
class Buffer {
 public:
  explicit Buffer(std::size_t nbytes) : units_(nbytes / sizeof(uint4) + 1), nbytes_(nbytes) {
    std::memset(units_.data(), 0xAB, units_.size() * sizeof(uint4));
  }
  std::byte* data() { return reinterpret_cast<std::byte*>(units_.data()); }
  bool operator==(const Buffer& other) const {
    return nbytes_ == other.nbytes_ && std::memcmp(units_.data(), other.units_.data(), nbytes_) == 0;
  }
  // Whether nothing was written behind it.
  bool IsWhole() {
    std::byte* const begin = data() + nbytes_;
    return std::all_of(begin, data() + units_.size() * sizeof(uint4),
                       [](std::byte b) { return b == std::byte{0xAB}; });
  }

 private:
  std::vector<uint4> units_;
  std::size_t nbytes_;
};

Buffer Random(std::size_t nbytes, std::uint32_t itemsize, double density, unsigned seed) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<double> uniform(0, 1);
  Buffer x(nbytes);
  for (std::size_t i = 0; i < nbytes; i += itemsize) {
    const bool has_value = uniform(random) < density;
    for (std::size_t j = 0; j < itemsize; ++j) {
      // One byte of a value may be the only one that is not zero
      x.data()[i + j] = static_cast<std::byte>(has_value && (random() % 2 || j + 1 == itemsize)
                                                   ? 1 + random() % 255
                                                   : 0);
    }
  }
  return x;
}

// One tensor in its byte array, made by either platform.
struct Compressed {
  Compressed(CompressedFormat format, std::size_t capacity)
      : format(format), capacity(capacity), c(capacity), overflow(format.nbytes + kUnitNbytes) {}

  CompressedFormat format;
  std::size_t capacity;
  Buffer c;
  Buffer overflow;
  Written written;
};

template <class T>
void ByKernel(Compressed& to, Buffer& x) {
  DeviceCount totals[2] = {};
  std::memset(to.c.data(), 0, kEntriesOffset);
  HostBlock::the_block->Launch(static_cast<unsigned>(to.format.blocks()), [&] {
    CompressBlocks<T>(Parts(to.format, to.capacity), x.data(), to.c.data(), to.overflow.data(),
                      totals);
  });
  to.written = {totals[0], totals[1]};
}

template <class T>
Buffer BackByKernel(Compressed& from) {
  Buffer x(from.format.nbytes);
  HostBlock::the_block->Launch(static_cast<unsigned>(from.format.blocks()), [&] {
    DecompressBlocks<T>(Parts(from.format, from.capacity), from.c.data(), from.overflow.data(),
                        x.data());
  });
  EXPECT(x.IsWhole());
  return x;
}

void ByHost(Compressed& to, Buffer& x) {
  CpuCompression codec(1);
  codec.Compress(nullptr, 0, to.format, x.data(), to.c.data(), to.capacity, to.overflow.data());
  to.written = codec.Totals()[0];
}

Buffer BackByHost(Compressed& from) {
  Buffer x(from.format.nbytes);
  CpuCompression(1).Decompress(nullptr, from.format, from.c.data(), from.capacity,
                               from.overflow.data(), x.data());
  EXPECT(x.IsWhole());
  return x;
}

template <class T>
void TestKernelsAndTwinAgree() {
  struct Case {
    std::size_t elements;
    double density;
    double room;  // share of the tensor that its values may take
  };
  const std::size_t block = kBlockNbytes / sizeof(T);
  const std::vector<Case> cases{
      {3, 0.5, 1}, {block + 7, 1, 1}, {2 * block + 3, 0.6, 0.3}, {block, 0, 0}};
  for (const Case& each : cases) {
    const CompressedFormat format{each.elements * sizeof(T), sizeof(T)};
    const auto room = static_cast<std::size_t>(each.room * static_cast<double>(format.nbytes));
    const bool overflows = each.room < each.density;
    const std::size_t capacity =
        format.values_offset() + room + (overflows ? 0 : kUnitNbytes * format.blocks());
    Buffer x = Random(format.nbytes, sizeof(T), each.density, 7);
    Compressed by_kernel(format, capacity);
    Compressed by_host(format, capacity);
    ByKernel<T>(by_kernel, x);
    ByHost(by_host, x);
    EXPECT(by_kernel.c.IsWhole() && by_host.c.IsWhole());
    EXPECT(by_kernel.written.values == by_host.written.values);
    EXPECT((by_kernel.written.overflow_nbytes > 0) == overflows);
    EXPECT((by_host.written.overflow_nbytes > 0) == overflows);
    // Each reads what the other wrote; but the host gives overflow memory back, which this is not
    EXPECT(BackByKernel<T>(overflows ? by_kernel : by_host) == x);
    if (!overflows) EXPECT(BackByHost(by_kernel) == x);
  }
}

// A store of two sites, the first with room for next to nothing.
class Opened {
 public:
  Opened() : id_(Registry<Sites>::Get().Add(Sites({{kNbytes, kTight}, {kNbytes, kRoomy}}))) {
    Stores<CpuCompression>::Get().Open(id_, 0);
  }
  ~Opened() {
    Registry<Sites>::Get().Remove(id_);
    Stores<CpuCompression>::Get().Free(id_);
  }
  DeviceStore<CpuCompression>* operator->() const {
    return Stores<CpuCompression>::Get().Find(id_, 0).get();
  }

  static constexpr std::size_t kNbytes = 5 * kBlockNbytes + 12;
  static constexpr std::size_t kTight = 16384;
  static constexpr std::size_t kRoomy = 2 * kNbytes;
  static constexpr std::size_t kCapacities[] = {kTight, kRoomy};

 private:
  std::int64_t id_;
};

constexpr std::uint32_t kItem = 4;

void Put(const Opened& store, std::int64_t run, std::size_t site, Buffer& x, Buffer& c) {
  store->Compress(run, nullptr, site, kItem, x.data(), Opened::kNbytes, c.data(),
                  Opened::kCapacities[site]);
}

Buffer Get(const Opened& store, std::int64_t run, std::size_t site, Buffer& c) {
  Buffer x(Opened::kNbytes);
  store->Decompress(run, nullptr, site, kItem, c.data(), Opened::kCapacities[site], x.data(),
                    Opened::kNbytes);
  return x;
}

void TestRunsThatInterleave() {
  Opened store;
  constexpr std::int64_t kRuns = 4;
  for (int turn = 0; turn < 2; ++turn) {
    std::vector<Buffer> x;
    std::vector<Buffer> c;
    for (std::int64_t run = 0; run < kRuns; ++run) {
      for (std::size_t site = 0; site < 2; ++site) {
        x.push_back(Random(Opened::kNbytes, kItem, 0.9, static_cast<unsigned>(x.size())));
        c.emplace_back(Opened::kCapacities[site]);
        Put(store, turn * kRuns + run, site, x.back(), c.back());
      }
    }
    for (std::size_t i : {5, 0, 7, 1, 6, 2, 4, 3}) {
      EXPECT(Get(store, turn * kRuns + static_cast<std::int64_t>(i / 2), i % 2, c[i]) == x[i]);
    }
  }
  const std::vector<SiteCounters> counters = store->counters();
  EXPECT(counters[0].runs == 2 * kRuns && counters[1].runs == 2 * kRuns);
  EXPECT(counters[0].overflow_nbytes > 0 && counters[1].overflow_nbytes == 0);
  EXPECT(counters[0].elements == 2 * kRuns * Opened::kNbytes / kItem);
}

void TestThreads() {
  Opened store;
  std::vector<std::thread> threads;
  for (std::int64_t run = 0; run < 4; ++run) {
    threads.emplace_back([&, run] {
      Buffer x = Random(Opened::kNbytes, kItem, 0.9, static_cast<unsigned>(run));
      for (std::int64_t turn = 0; turn < 20; ++turn) {
        Buffer first(Opened::kTight);
        Buffer second(Opened::kRoomy);
        Put(store, 4 * turn + run, 0, x, first);
        Put(store, 4 * turn + run, 1, x, second);
        EXPECT(Get(store, 4 * turn + run, 0, first) == x);
        EXPECT(Get(store, 4 * turn + run, 1, second) == x);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// As loops do: all of a site before the first comes back, the last one first.
void TestSlots() {
  constexpr std::size_t kSlots = 3;
  const std::vector<Site> sites{{Opened::kNbytes, Opened::kTight, kSlots},
                                {Opened::kNbytes, Opened::kTight}};
  DeviceStore<CpuCompression> store(std::make_shared<const Sites>(sites), 0);
  auto put = [&](std::size_t site, Buffer& x, Buffer& c) {
    store.Compress(0, nullptr, site, kItem, x.data(), Opened::kNbytes, c.data(), Opened::kTight);
  };
  auto get = [&](std::size_t site, Buffer& c) {
    Buffer x(Opened::kNbytes);
    store.Decompress(0, nullptr, site, kItem, c.data(), Opened::kTight, x.data(), Opened::kNbytes);
    return x;
  };
  Buffer other = Random(Opened::kNbytes, kItem, 0.9, 7);
  for (int turn = 0; turn < 2; ++turn) {
    std::vector<Buffer> x;
    std::vector<Buffer> c(kSlots, Buffer(Opened::kTight));
    Buffer last(Opened::kTight);
    for (std::size_t i = 0; i < kSlots; ++i) {
      x.push_back(Random(Opened::kNbytes, kItem, 0.9, static_cast<unsigned>(i)));
      put(0, x[i], c[i]);
    }
    put(1, other, last);
    EXPECT(Throws([&] { put(0, other, last); }, "more than 3 times"));
    for (std::size_t i = kSlots; i-- > 0;) EXPECT(get(0, c[i]) == x[i]);
    EXPECT(Throws([&] { get(0, c[0]); }, "holds nothing"));
    EXPECT(get(1, last) == other);
  }
  EXPECT(store.counters()[0].runs == 2 * kSlots && store.counters()[0].overflow_nbytes > 0);
}

// A device whose work one thread launches, as CUDA's are, and which counts its overflow memory.
class Launched : public CpuCompression {
 public:
  struct Backend : CpuBackend {
    static constexpr bool kOneThreadLaunches = true;
  };

  struct Overflow : CpuCompression::Overflow {
    explicit Overflow(std::size_t nbytes) : CpuCompression::Overflow(nbytes) { ++made; }
    static int made;
  };

  using CpuCompression::CpuCompression;
};

int Launched::Overflow::made = 0;

void TestRunsThatDied() {
  CpuLane first;
  CpuLane second;
  const std::vector<Site> one{{Opened::kNbytes, Opened::kTight}};
  DeviceStore<Launched> store(std::make_shared<const Sites>(one), 0);
  Buffer x = Random(Opened::kNbytes, kItem, 0.9, 1);
  auto put = [&](std::int64_t run, CpuLane& stream, Buffer& c) {
    store.Compress(run, &stream, 0, kItem, x.data(), Opened::kNbytes, c.data(), Opened::kTight);
  };
  auto get = [&](std::int64_t run, CpuLane& stream, Buffer& c) {
    Buffer back(Opened::kNbytes);
    store.Decompress(run, &stream, 0, kItem, c.data(), Opened::kTight, back.data(),
                     Opened::kNbytes);
    EXPECT(back == x);
  };
  Buffer c(Opened::kTight);
  for (std::int64_t run = 0; run < 9; ++run) put(run, first, c);  // none is decompressed
  EXPECT(Launched::Overflow::made == 1);
  EXPECT(Throws([&] { put(8, first, c); }, "second time"));
  EXPECT(Throws([&] { get(7, first, c); }, "holds nothing"));
  put(9, first, c);
  get(9, first, c);
  EXPECT(Launched::Overflow::made == 1);

  // Of another thread: it may still be alive, and keeps its own
  put(10, first, c);
  std::thread([&] {
    Buffer other(Opened::kTight);
    put(11, first, other);
    get(11, first, other);
  }).join();
  get(10, first, c);
  EXPECT(Launched::Overflow::made == 2);

  // Who knows that runs have died says so, whatever thread they were of
  put(20, first, c);
  std::thread([&] {
    Buffer other(Opened::kTight);
    put(21, first, other);
  }).join();
  store.Reset();
  EXPECT(Throws([&] { get(20, first, c); }, "holds nothing"));
  put(22, first, c);
  std::thread([&] {
    Buffer other(Opened::kTight);
    put(23, first, other);
    get(23, first, other);
  }).join();
  get(22, first, c);
  EXPECT(Launched::Overflow::made == 2);

  // What work on one stream may still use, no other stream gets
  put(12, second, c);
  get(12, second, c);
  EXPECT(Launched::Overflow::made == 3);
}

// The CPU codec of a device that may be lost: it cannot be made current then.
struct LosableCompression : CpuCompression {
  static inline bool lost = false;

  struct Backend : CpuBackend {
    struct DeviceGuard {
      explicit DeviceGuard(int) {
        if (lost) throw Error(Code::kInternal, "the device is lost");
      }
    };
  };

  using CpuCompression::CpuCompression;
};

// A failure in the destructor does not end the process.
void TestFreedOnALostDevice() {
  const std::int64_t id = Registry<Sites>::Get().Add(Sites({{Opened::kNbytes, Opened::kTight}}));
  auto& stores = Stores<LosableCompression>::Get();
  stores.Open(id, 0);
  const std::uint64_t before = TeardownFailures::Get().count();
  LosableCompression::lost = true;
  Registry<Sites>::Get().Remove(id);
  stores.Free(id);
  LosableCompression::lost = false;
  EXPECT(TeardownFailures::Get().count() == before + 1);
}

}  // namespace
}  // namespace vmem

int main() {
  const vmem::HostBlock block(vmem::kThreads);
  vmem::TestKernelsAndTwinAgree<std::uint8_t>();
  vmem::TestKernelsAndTwinAgree<std::uint16_t>();
  vmem::TestKernelsAndTwinAgree<std::uint32_t>();
  vmem::TestKernelsAndTwinAgree<std::uint64_t>();
  vmem::TestRunsThatInterleave();
  vmem::TestThreads();
  vmem::TestSlots();
  vmem::TestRunsThatDied();
  vmem::TestFreedOnALostDevice();
  std::puts("all passed");
}
