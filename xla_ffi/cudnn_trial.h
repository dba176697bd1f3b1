// A way of cuDNN, tried before it is used: how long it takes, and whether it is the convolution.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cudnn_padding.h"
#include "cudnn_plans.h"

namespace vmem {

// On a stream of its own. Runs take the sets of buffers in turn, so that none finds its own in the
// cache. Their contents matter: a device is faster on zeros than on anything else, and of zeros every
// way gives what it should.
class ConvTrial {
 public:
  // Makes a plan of its own: not one of those that calls use, which are kept. `workspace` is the
  // bytes that are there.
  ConvTrial(const ConvGeometry& geometry, const ConvWay& way, int device,
            std::vector<ConvBuffers> sets, std::int64_t workspace);
  ~ConvTrial();
  ConvTrial(const ConvTrial&) = delete;
  ConvTrial& operator=(const ConvTrial&) = delete;

  // The seconds of each of so many runs, padding included, one right after the other.
  std::vector<double> Run(int times);

  // How far its result is off, in units of the result's root mean square: the most that was seen at
  // some places, half of them on an edge. What can accumulate is run so, too. Infinite where a place
  // was not written, nan where the extension was built without the kernel that knows.
  double Deviation();

 private:
  // The most by which the values of the first set are off what they should be, `times` the sums.
  double Off(double times);
  // The most by which the sums of the epilogue are off those of the y that was written, in units of
  // the square root of the sum of squares, and of that sum.
  double SumsOff();

  ConvGeometry given_;
  ConvWay way_;
  int device_;
  std::vector<ConvBuffers> sets_;
  std::int64_t workspace_;
  ConvPadding padding_;
  Plan plan_;
  cudaStream_t stream_ = nullptr;
  std::size_t runs_ = 0;
};

}  // namespace vmem
