#include "cudnn_geometry.h"

#include <functional>
#include <numeric>

#include "error.h"

namespace vmem {
namespace {

constexpr std::size_t kSpace = 2;  // the first spatial dimension

[[noreturn]] void Refuse(const std::string& why) {
  throw Error(Code::kInvalidArgument, "no convolution: " + why);
}

}  // namespace

ConvPass ConvPassOf(const std::string& name) {
  if (name == "forward") return ConvPass::kForward;
  if (name == "backward data") return ConvPass::kBackwardData;
  if (name == "backward filter") return ConvPass::kBackwardFilter;
  Refuse("there is no pass \"" + name + "\"");
}

cudnnDataType_t ConvTypeOf(const std::string& dtype) {
  if (dtype == "float32") return CUDNN_DATA_FLOAT;
  if (dtype == "bfloat16") return CUDNN_DATA_BFLOAT16;
  if (dtype == "float16") return CUDNN_DATA_HALF;
  if (dtype == "float64") return CUDNN_DATA_DOUBLE;
  Refuse("values of type " + dtype);
}

ConvEpilogue ConvEpilogueOf(const std::string& name) {
  if (name.empty()) return {};
  if (name == "bias") return {true, false};
  if (name == "bias and relu") return {true, true};
  if (name == "sums") return {false, false, true};
  Refuse("there is no epilogue \"" + name + "\"");
}

void ConvGeometry::Check() const {
  const std::size_t rank = x.size();
  if (rank < kSpace + 1 || rank > kSpace + 3) {
    Refuse("x has " + std::to_string(rank) + " dimensions");
  }
  if (w.size() != rank || y.size() != rank) Refuse("x, w and y differ in their dimensions");
  for (const Dims* each : {&strides, &padding_low, &padding_high, &dilation}) {
    if (each->size() != rank - kSpace) Refuse("strides, padding and dilation are for other shapes");
  }
  for (const Dims* dims : {&x, &w, &y}) {
    for (std::int64_t dim : *dims) {
      if (dim <= 0) Refuse("a dimension of " + std::to_string(dim));
    }
  }
  if (pass != ConvPass::kForward && (epilogue.bias || epilogue.sums)) {
    Refuse("only a forward pass has an epilogue");
  }
  if (pass == ConvPass::kBackwardData && prologue) {
    Refuse("a gradient to x has no prologue: it does not read x");
  }
  if (x[0] != y[0]) Refuse("x and y have different batches");
  if (w[0] != y[1]) Refuse("w and y have different output channels");
  if (x[1] % w[1] != 0 || w[0] % (x[1] / w[1]) != 0) Refuse("the channels do not make groups");
  for (std::size_t i = 0; i + kSpace < rank; ++i) {
    if (strides[i] <= 0 || dilation[i] <= 0) Refuse("strides and dilation are at least 1");
    if (padding_low[i] < 0 || padding_high[i] < 0) Refuse("cuDNN has no negative padding");
    const std::int64_t room =
        x[i + kSpace] + padding_low[i] + padding_high[i] - (dilation[i] * (w[i + kSpace] - 1) + 1);
    if (room < 0 || room / strides[i] + 1 != y[i + kSpace]) Refuse("y has another size");
  }
}

ConvGeometry ConvGeometry::Widened() const {
  ConvGeometry wide = *this;
  if (x.size() > kSpace + 1) return wide;
  for (Dims* dims : {&wide.x, &wide.w, &wide.y}) dims->insert(dims->begin() + kSpace, 1);
  for (Dims* each : {&wide.strides, &wide.dilation}) each->insert(each->begin(), 1);
  for (Dims* each : {&wide.padding_low, &wide.padding_high}) each->insert(each->begin(), 0);
  return wide;
}

ConvGeometry ConvGeometry::WithBatch(std::int64_t samples, bool accumulating) const {
  ConvGeometry part = *this;
  part.x[0] = part.y[0] = samples;
  part.accumulate = accumulating;
  return part;
}

ConvGeometry ConvGeometry::WithChannels(std::int64_t channels) const {
  if (ItemSize() != 2) Refuse("channels are padded in bf16 and f16 alone");
  if (!channels_last) Refuse("channels are padded where they are last alone");
  if (x[1] != w[1]) Refuse("channels are padded without groups alone");
  if (prologue) Refuse("channels are padded without a prologue alone");
  if (channels <= x[1]) {
    Refuse("x has " + std::to_string(x[1]) + " channels, to be padded to " +
           std::to_string(channels));
  }
  ConvGeometry wide = *this;
  wide.x[1] = wide.w[1] = channels;
  return wide;
}

std::size_t ConvGeometry::ItemSize() const {
  switch (dtype) {
    case CUDNN_DATA_DOUBLE:
      return 8;
    case CUDNN_DATA_FLOAT:
      return 4;
    default:
      return 2;
  }
}

std::int64_t ConvGeometry::SampleBytes(const Dims& dims) const {
  return std::accumulate(dims.begin() + 1, dims.end(), static_cast<std::int64_t>(ItemSize()),
                         std::multiplies<>());
}

Dims ConvGeometry::StridesOf(const Dims& dims) const {
  Dims result(dims.size());
  std::int64_t next = 1;
  if (channels_last) {
    result[1] = next;
    next *= dims[1];
  }
  for (std::size_t i = dims.size(); i-- > (channels_last ? kSpace : 1);) {
    result[i] = next;
    next *= dims[i];
  }
  result[0] = next;
  return result;
}

bool ConvGeometry::CanAccumulate() const {
  return pass == ConvPass::kBackwardFilter && ItemSize() >= 4;
}

void ConvGeometry::AppendTo(Dims& key) const {
  key.insert(key.end(), {static_cast<std::int64_t>(pass), static_cast<std::int64_t>(dtype),
                         channels_last, prologue, epilogue.bias, epilogue.relu, epilogue.sums,
                         accumulate, static_cast<std::int64_t>(x.size())});
  for (const Dims* each : {&x, &w, &y, &strides, &padding_low, &padding_high, &dilation}) {
    key.insert(key.end(), each->begin(), each->end());
  }
}

}  // namespace vmem
