// A call of cuDNN whose channels of x are padded with zeros, so that tensor cores can do it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cudnn_geometry.h"

namespace vmem {

// Of one call. The copies of x and w lie in front of cuDNN's own workspace, in this order, each
// at a multiple of 256 bytes from its beginning.
class ConvPadding {
 public:
  // `channels` is what x is padded to; 0 for none. Throws Error if that cannot be.
  ConvPadding(const ConvGeometry& given, std::int64_t channels);

  // What cuDNN does.
  const ConvGeometry& geometry() const { return padded_; }
  // Bytes in front of cuDNN's own workspace.
  std::int64_t nbytes() const { return x_nbytes_ + w_nbytes_; }
  // Loads what the copies need; not allowed while a stream is recorded.
  void Load() const;

  // Where cuDNN finds the tensors of a call that has `buffers`.
  ConvBuffers Inside(const ConvBuffers& buffers) const;
  // Before cuDNN runs: its operands.
  void Pad(const ConvBuffers& buffers, cudaStream_t stream) const;
  // After it: its result, where that is x or w.
  void Strip(const ConvBuffers& buffers, cudaStream_t stream) const;

 private:
  bool is_padded() const { return nbytes() > 0; }

  ConvGeometry given_, padded_;
  std::int64_t x_nbytes_ = 0, w_nbytes_ = 0;
};

}  // namespace vmem
