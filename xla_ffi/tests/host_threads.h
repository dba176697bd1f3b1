// A block of CUDA threads on threads of the host: enough of the language for our kernels, so that the
// sanitizers see their races. Blocks run one after the other. Include it before the kernels.
#pragma once

#include <pthread.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#define __device__
#define __global__
#define __shared__ static
#define __launch_bounds__(...)

namespace vmem {

struct Index {
  unsigned x = 0;
};

inline thread_local Index threadIdx;
inline thread_local Index blockIdx;

struct alignas(16) uint4 {
  std::uint32_t x, y, z, w;
};

inline uint4 make_uint4(std::uint32_t x, std::uint32_t y, std::uint32_t z, std::uint32_t w) {
  return {x, y, z, w};
}

inline int __popc(unsigned bits) { return __builtin_popcount(bits); }

inline uint4 __ldcs(const uint4* from) { return *from; }

template <class T>
T atomicAdd(T* to, T more) {
  return __atomic_fetch_add(to, more, __ATOMIC_RELAXED);
}

class Barrier {
 public:
  explicit Barrier(unsigned threads) { pthread_barrier_init(&barrier_, nullptr, threads); }
  ~Barrier() { pthread_barrier_destroy(&barrier_); }
  Barrier(const Barrier&) = delete;
  Barrier& operator=(const Barrier&) = delete;
  void Wait() { pthread_barrier_wait(&barrier_); }

 private:
  pthread_barrier_t barrier_;
};

// What the threads of a block share.
struct HostBlock {
  static constexpr unsigned kWidth = 32;
  static constexpr unsigned kTurns = 2;  // who is late may still read the last turn's

  explicit HostBlock(unsigned threads) : all(threads), given(kTurns * threads) {
    for (unsigned first = 0; first < threads; first += kWidth) {
      warps.push_back(std::make_unique<Barrier>(kWidth));
    }
  }

  // What the thread `lane` of this warp gives; all of the warp must ask.
  template <class T>
  T Exchange(T mine, unsigned lane) {
    thread_local unsigned turn = 0;
    turn = (turn + 1) % kTurns;
    const unsigned first = threadIdx.x / kWidth * kWidth;
    given[turn + kTurns * threadIdx.x] = mine;
    warps[threadIdx.x / kWidth]->Wait();
    return static_cast<T>(given[turn + kTurns * (first + lane)]);
  }

  Barrier all;
  std::vector<std::unique_ptr<Barrier>> warps;
  std::vector<std::uint64_t> given;
};

inline HostBlock* the_block = nullptr;

inline unsigned LaneHere() { return threadIdx.x % HostBlock::kWidth; }

template <class T>
T __shfl_sync(unsigned, T mine, unsigned lane) {
  return the_block->Exchange(mine, lane);
}

template <class T>
T __shfl_up_sync(unsigned, T mine, unsigned distance) {
  return the_block->Exchange(mine, LaneHere() < distance ? LaneHere() : LaneHere() - distance);
}

template <class T>
T __shfl_xor_sync(unsigned, T mine, unsigned distance) {
  return the_block->Exchange(mine, LaneHere() ^ distance);
}

inline void __syncthreads() { the_block->all.Wait(); }

// kernel() in `blocks` blocks of `count` threads.
template <class Kernel>
void Launch(unsigned blocks, unsigned count, Kernel kernel) {
  HostBlock block(count);
  the_block = &block;
  std::vector<std::thread> threads;
  for (unsigned i = 0; i < count; ++i) {
    threads.emplace_back([&, i] {
      threadIdx.x = i;
      for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {
        kernel();
        __syncthreads();  // the next block's shared memory is the same
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace vmem
