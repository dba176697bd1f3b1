// A block of CUDA threads on threads of the host: enough of the language for our kernels, so that the
// sanitizers see their races. Blocks run one after the other. Include it before the kernels.
#pragma once

#include <pthread.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <utility>
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

// The threads of a block, and what they share. They live as long as it: making them takes longest.
class HostBlock {
 public:
  static constexpr unsigned kWidth = 32;

  explicit HostBlock(unsigned threads)
      : all_(threads), begin_(threads + 1), end_(threads + 1), given_(kTurns * threads) {
    for (unsigned first = 0; first < threads; first += kWidth) {
      warps_.push_back(std::make_unique<Barrier>(kWidth));
    }
    for (unsigned i = 0; i < threads; ++i) threads_.emplace_back([this, i] { Run(i); });
    the_block = this;
  }

  ~HostBlock() {
    kernel_ = nullptr;
    begin_.Wait();
    for (std::thread& thread : threads_) thread.join();
  }

  HostBlock(const HostBlock&) = delete;
  HostBlock& operator=(const HostBlock&) = delete;

  // kernel() in so many blocks.
  void Launch(unsigned blocks, std::function<void()> kernel) {
    blocks_ = blocks;
    kernel_ = std::move(kernel);
    begin_.Wait();
    end_.Wait();
  }

  void Wait() { all_.Wait(); }

  // What the thread `lane` of this warp gives; all of the warp must ask.
  template <class T>
  T Exchange(T mine, unsigned lane) {
    thread_local unsigned turn = 0;
    turn = (turn + 1) % kTurns;
    const unsigned first = threadIdx.x / kWidth * kWidth;
    given_[turn + kTurns * threadIdx.x] = mine;
    warps_[threadIdx.x / kWidth]->Wait();
    return static_cast<T>(given_[turn + kTurns * (first + lane)]);
  }

  static HostBlock* the_block;

 private:
  static constexpr unsigned kTurns = 2;  // who is late may still read the last turn's

  void Run(unsigned thread) {
    threadIdx.x = thread;
    for (;;) {
      begin_.Wait();
      if (!kernel_) return;
      for (blockIdx.x = 0; blockIdx.x < blocks_; ++blockIdx.x) {
        kernel_();
        all_.Wait();  // the next block's shared memory is the same
      }
      end_.Wait();
    }
  }

  Barrier all_;
  Barrier begin_;
  Barrier end_;
  std::vector<std::unique_ptr<Barrier>> warps_;
  std::vector<std::uint64_t> given_;
  std::vector<std::thread> threads_;
  std::function<void()> kernel_;
  unsigned blocks_ = 0;
};

inline HostBlock* HostBlock::the_block = nullptr;

inline unsigned LaneHere() { return threadIdx.x % HostBlock::kWidth; }

template <class T>
T __shfl_sync(unsigned, T mine, unsigned lane) {
  return HostBlock::the_block->Exchange(mine, lane);
}

template <class T>
T __shfl_up_sync(unsigned, T mine, unsigned distance) {
  const unsigned lane = LaneHere() < distance ? LaneHere() : LaneHere() - distance;
  return HostBlock::the_block->Exchange(mine, lane);
}

template <class T>
T __shfl_xor_sync(unsigned, T mine, unsigned distance) {
  return HostBlock::the_block->Exchange(mine, LaneHere() ^ distance);
}

inline void __syncthreads() { HostBlock::the_block->Wait(); }

}  // namespace vmem
