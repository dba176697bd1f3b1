// What is convolved, in cuDNN's terms: shapes N, C, space whatever the layout in memory.
#pragma once

#include <cudnn.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace vmem {

using Dims = std::vector<std::int64_t>;

enum class ConvPass { kForward, kBackwardData, kBackwardFilter };

// "forward", "backward data" or "backward filter"
ConvPass ConvPassOf(const std::string& name);
cudnnDataType_t ConvTypeOf(const std::string& dtype);

// What a forward pass does to its result before it writes it, in this order. cuDNN has no kernels
// for a ReLU without a bias, and none for sums with either.
struct ConvEpilogue {
  bool bias = false;  // adds one value for each channel
  bool relu = false;
  bool sums = false;  // writes sums of y and of its squares, too, for each channel, in float32
};

// "", "bias", "bias and relu" or "sums"
ConvEpilogue ConvEpilogueOf(const std::string& name);

struct ConvGeometry {
  ConvPass pass = ConvPass::kForward;
  cudnnDataType_t dtype = CUDNN_DATA_FLOAT;
  bool channels_last = true;
  Dims x, w, y;  // of one call; w: K, C of one group, space
  Dims strides, padding_low, padding_high, dilation;
  // What is convolved is ReLU(x * scale + shift), of one value each for each channel: computed in
  // float32, rounded to the type of x, and then padded with zeros.
  bool prologue = false;
  ConvEpilogue epilogue;
  bool accumulate = false;  // the result is added to what is there

  // Throws Error if the shapes do not belong together: cuDNN would write past the end of a buffer.
  // Everything else takes this for granted.
  void Check() const;
  // With two spatial dimensions instead of one, which cuDNN does not have.
  ConvGeometry Widened() const;
  ConvGeometry WithBatch(std::int64_t samples, bool accumulating) const;
  // With so many channels of x. Throws Error where zeros cannot be added to them: only values of 16
  // bits are padded, with channels last, without groups, to more than there are.
  ConvGeometry WithChannels(std::int64_t channels) const;

  std::size_t ItemSize() const;
  std::int64_t SampleBytes(const Dims& dims) const;  // of one entry of the first dimension
  // Elements between neighbours, for each dimension.
  Dims StridesOf(const Dims& dims) const;
  // Whether several calls can add up their results in it without rounding in between.
  bool CanAccumulate() const;
  // All of it, for a look-up.
  void AppendTo(Dims& key) const;
};

// Where a call finds its tensors, on the device.
struct ConvBuffers {
  void* x = nullptr;
  void* w = nullptr;
  void* y = nullptr;
  void* workspace = nullptr;
  void* bias = nullptr;  // if the epilogue has one
  void* scale = nullptr;  // of the prologue
  void* shift = nullptr;
  void* sums = nullptr;  // of the epilogue
  void* squares = nullptr;
};

}  // namespace vmem
