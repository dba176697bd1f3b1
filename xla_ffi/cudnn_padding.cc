#include "cudnn_padding.h"

#include "cuda_channels.h"

namespace vmem {
namespace {

constexpr std::int64_t kAlignment = 256;  // as XLA's buffers

std::int64_t AlignedBytes(const ConvGeometry& geometry, const Dims& dims) {
  const std::int64_t nbytes = dims[0] * geometry.SampleBytes(dims);
  return (nbytes + kAlignment - 1) / kAlignment * kAlignment;
}

void* Behind(void* data, std::int64_t nbytes) { return static_cast<char*>(data) + nbytes; }

// Rows of channels, which are last.
std::int64_t Rows(const ConvGeometry& geometry, const Dims& dims) {
  const auto itemsize = static_cast<std::int64_t>(geometry.ItemSize());
  return dims[0] * geometry.SampleBytes(dims) / itemsize / dims[1];
}

}  // namespace

ConvPadding::ConvPadding(const ConvGeometry& given, std::int64_t channels)
    : given_(given), padded_(channels == 0 ? given : given.WithChannels(channels)) {
  if (channels == 0) return;
  x_nbytes_ = AlignedBytes(padded_, padded_.x);
  w_nbytes_ = AlignedBytes(padded_, padded_.w);
}

void ConvPadding::Load() const {
  if (is_padded()) LoadChannels();
}

ConvBuffers ConvPadding::Inside(const ConvBuffers& buffers) const {
  if (!is_padded()) return buffers;
  ConvBuffers inside = buffers;
  inside.x = buffers.workspace;
  inside.w = Behind(buffers.workspace, x_nbytes_);
  inside.workspace = Behind(buffers.workspace, nbytes());
  return inside;
}

void ConvPadding::Pad(const ConvBuffers& buffers, cudaStream_t stream) const {
  if (!is_padded()) return;
  const ConvBuffers inside = Inside(buffers);
  auto pad = [&](const void* from, void* to, const Dims& dims) {
    CopyChannels(stream, from, dims[1], to, padded_.x[1], Rows(given_, dims));
  };
  if (given_.pass != ConvPass::kBackwardData) pad(buffers.x, inside.x, given_.x);
  if (given_.pass != ConvPass::kBackwardFilter) pad(buffers.w, inside.w, given_.w);
}

void ConvPadding::Strip(const ConvBuffers& buffers, cudaStream_t stream) const {
  if (!is_padded()) return;
  const ConvBuffers inside = Inside(buffers);
  auto strip = [&](const void* from, void* to, const Dims& dims) {
    CopyChannels(stream, from, padded_.x[1], to, dims[1], Rows(given_, dims));
  };
  if (given_.pass == ConvPass::kBackwardData) strip(inside.x, buffers.x, given_.x);
  if (given_.pass == ConvPass::kBackwardFilter) strip(inside.w, buffers.w, given_.w);
}

}  // namespace vmem
