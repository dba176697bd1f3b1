// The kernel that tells what a convolution must give at single places of its result: the products,
// added up one by one in double precision. Slow and plain, so that what an engine gives can be held
// against it. Nothing in it is wider than a block, so tests run it on threads of the host, too.
#pragma once

#include <cstdint>
#include <cstring>

#include "conv_sums.h"

namespace vmem {

inline constexpr unsigned kSumThreads = 256;

// Values of 16 bits.
struct Bf16 {
  std::uint16_t bits;
};
struct F16 {
  std::uint16_t bits;
};

__device__ inline float FloatOf(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

__device__ inline double Real(double value) { return value; }
__device__ inline double Real(float value) { return value; }
__device__ inline double Real(Bf16 value) { return FloatOf(std::uint32_t{value.bits} << 16); }
__device__ inline double Real(F16 value) {
  const std::uint32_t sign = std::uint32_t{value.bits} >> 15 << 31;
  const std::uint32_t exponent = value.bits >> 10 & 31U;
  const std::uint32_t digits = value.bits & 1023U;
  if (exponent == 0) return (sign == 0 ? 1 : -1) * (digits / 16777216.0);  // 2^24
  const std::uint32_t wide = exponent == 31 ? 255 : exponent + 112;  // the bias is 127, not 15
  return FloatOf(sign | wide << 23 | digits << 13);
}

template <class Value>
__device__ double At(const SumTensor& tensor, const std::int64_t* at) {
  std::int64_t offset = 0;
  for (int i = 0; i < kMostDims; ++i) offset += at[i] * tensor.strides[i];
  return Real(static_cast<const Value*>(tensor.data)[offset]);
}

// What is convolved at `at`.
template <class Value>
__device__ double OperandAt(const ConvSums& sums, const std::int64_t* at) {
  const double x = At<Value>(sums.x, at);
  if (sums.scale == nullptr) return x;
  const double scaled = x * Real(static_cast<const Value*>(sums.scale)[at[1]]);
  const double shifted = scaled + Real(static_cast<const Value*>(sums.shift)[at[1]]);
  return shifted < 0 ? 0 : shifted;
}

__device__ inline const SumTensor& ResultOf(const ConvSums& sums) {
  return sums.computed == ConvSums::kY ? sums.y : sums.computed == ConvSums::kX ? sums.x : sums.w;
}

// Outputs of a group.
__device__ inline std::int64_t FeaturesOf(const ConvSums& sums) {
  return sums.w.dims[0] / (sums.x.dims[1] / sums.w.dims[1]);
}

// `flat` as an index of `count` dimensions, the last one fastest.
__device__ inline void Split(std::int64_t flat, const std::int64_t* dims, int count,
                             std::int64_t* at) {
  for (int i = count; i-- > 0;) {
    at[i] = flat % dims[i];
    flat /= dims[i];
  }
}

// Of y at `out`, w at `tap` and x where they meet, the product of the two that are operands; 0 where
// they meet outside of x.
template <class Value>
__device__ double Product(const ConvSums& sums, const std::int64_t* out, const std::int64_t* tap) {
  std::int64_t in[kMostDims] = {out[0], tap[0] / FeaturesOf(sums) * sums.w.dims[1] + tap[1], 0, 0, 0};
  for (int i = 0; i < kMostSpace; ++i) {
    const std::int64_t at =
        out[2 + i] * sums.strides[i] + tap[2 + i] * sums.dilation[i] - sums.padding[i];
    if (at < 0 || at >= sums.x.dims[2 + i]) return 0;
    in[2 + i] = at;
  }
  if (sums.computed == ConvSums::kY) return OperandAt<Value>(sums, in) * At<Value>(sums.w, tap);
  if (sums.computed == ConvSums::kX) return At<Value>(sums.y, out) * At<Value>(sums.w, tap);
  return OperandAt<Value>(sums, in) * At<Value>(sums.y, out);
}

// How many products there are for one value of the result, some of them outside of it.
__device__ inline std::int64_t TermsOf(const ConvSums& sums) {
  std::int64_t terms = 1;
  const bool filter = sums.computed == ConvSums::kW;
  for (int i = 2; i < kMostDims; ++i) terms *= filter ? sums.y.dims[i] : sums.w.dims[i];
  if (filter) return terms * sums.y.dims[0];
  return terms * (sums.computed == ConvSums::kY ? sums.w.dims[1] : FeaturesOf(sums));
}

// The term of this number for the value of the result at `at`.
template <class Value>
__device__ double TermOf(const ConvSums& sums, const std::int64_t* at, std::int64_t term) {
  std::int64_t out[kMostDims];
  std::int64_t tap[kMostDims];
  if (sums.computed == ConvSums::kY) {
    Split(term, sums.w.dims + 1, kMostDims - 1, tap + 1);
    tap[0] = at[1];
    return Product<Value>(sums, at, tap);
  }
  if (sums.computed == ConvSums::kW) {
    std::int64_t dims[kMostDims];
    for (int i = 0; i < kMostDims; ++i) dims[i] = i == 1 ? 1 : sums.y.dims[i];
    Split(term, dims, kMostDims, out);
    out[1] = at[0];
    return Product<Value>(sums, out, at);
  }
  std::int64_t dims[kMostDims];
  for (int i = 0; i < kMostDims; ++i) dims[i] = sums.w.dims[i];
  dims[0] = FeaturesOf(sums);
  dims[1] = 1;
  Split(term, dims, kMostDims, tap);
  tap[0] += at[1] / sums.w.dims[1] * FeaturesOf(sums);
  tap[1] = at[1] % sums.w.dims[1];
  out[0] = at[0];
  out[1] = tap[0];
  for (int i = 0; i < kMostSpace; ++i) {
    const std::int64_t far = at[2 + i] + sums.padding[i] - tap[2 + i] * sums.dilation[i];
    if (far < 0 || far % sums.strides[i] != 0) return 0;
    out[2 + i] = far / sums.strides[i];
    if (out[2 + i] >= sums.y.dims[2 + i]) return 0;
  }
  return Product<Value>(sums, out, tap);
}

// A block for each of `places`, flat indices of the result: `found` is what must be there and what
// is there.
template <class Value>
__global__ void __launch_bounds__(kSumThreads)
    AddProducts(ConvSums sums, const std::int64_t* places, double* found) {
  __shared__ double partial[kSumThreads];
  const SumTensor& result = ResultOf(sums);
  std::int64_t at[kMostDims];
  Split(places[blockIdx.x], result.dims, kMostDims, at);
  const std::int64_t terms = TermsOf(sums);
  double sum = 0;
  for (std::int64_t term = threadIdx.x; term < terms; term += kSumThreads) {
    sum += TermOf<Value>(sums, at, term);
  }
  partial[threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (unsigned i = 1; i < kSumThreads; ++i) sum += partial[i];
  if (sums.bias != nullptr) sum += Real(static_cast<const Value*>(sums.bias)[at[1]]);
  if (sums.relu && sum < 0) sum = 0;
  found[2 * blockIdx.x] = sum;
  found[2 * blockIdx.x + 1] = At<Value>(result, at);
}

// A block for each of `channels`: `found` is the sum that must be there and that is there, and the
// same of squares.
template <class Value>
__global__ void __launch_bounds__(kSumThreads)
    AddChannels(ChannelSums given, const std::int64_t* channels, double* found) {
  __shared__ double partial[2 * kSumThreads];
  const std::int64_t channel = channels[blockIdx.x];
  std::int64_t dims[kMostDims];
  std::int64_t terms = 1;
  for (int i = 0; i < kMostDims; ++i) {
    dims[i] = i == 1 ? 1 : given.y.dims[i];
    terms *= dims[i];
  }
  double sum = 0;
  double squares = 0;
  for (std::int64_t term = threadIdx.x; term < terms; term += kSumThreads) {
    std::int64_t at[kMostDims];
    Split(term, dims, kMostDims, at);
    at[1] = channel;
    const double value = At<Value>(given.y, at);
    sum += value;
    squares += value * value;
  }
  partial[2 * threadIdx.x] = sum;
  partial[2 * threadIdx.x + 1] = squares;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (unsigned i = 1; i < kSumThreads; ++i) {
    sum += partial[2 * i];
    squares += partial[2 * i + 1];
  }
  double* here = found + 4 * blockIdx.x;
  here[0] = sum;
  here[1] = Real(given.sums[channel]);
  here[2] = squares;
  here[3] = Real(given.squares[channel]);
}

}  // namespace vmem
