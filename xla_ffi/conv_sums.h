// A convolution whose result is held against sums of its products: what the kernel of sums_kernels.h
// takes.
#pragma once

#include <cstdint>

namespace vmem {

inline constexpr int kMostSpace = 3;
inline constexpr int kMostDims = 2 + kMostSpace;

// N, C, space (w: K, C of one group, space); what is missing of space is 1.
struct SumTensor {
  const void* data = nullptr;
  std::int64_t dims[kMostDims] = {1, 1, 1, 1, 1};
  std::int64_t strides[kMostDims] = {};  // elements
};

struct ConvSums {
  enum Result { kY, kX, kW };

  Result computed = kY;
  SumTensor x, w, y;
  std::int64_t strides[kMostSpace] = {1, 1, 1};
  std::int64_t padding[kMostSpace] = {};  // before x
  std::int64_t dilation[kMostSpace] = {1, 1, 1};
  const void* scale = nullptr;  // what is convolved is ReLU(x * scale + shift), or x without them
  const void* shift = nullptr;
  const void* bias = nullptr;  // of y, or none
  bool relu = false;
};

// Sums over all but the channels of `y` and of its squares, as something else has computed them.
struct ChannelSums {
  SumTensor y;
  const float* sums = nullptr;
  const float* squares = nullptr;
};

}  // namespace vmem
