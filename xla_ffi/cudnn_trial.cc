#include "cudnn_trial.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <utility>

#include "cuda_backend.h"
#include "cuda_sums.h"
#include "cudnn_runtime.h"
#include "error.h"
#include "teardown.h"

namespace vmem {
namespace {

constexpr std::size_t kPlaces = 32;

SumTensor TensorOf(const ConvGeometry& geometry, const Dims& dims, const void* data) {
  SumTensor tensor;
  tensor.data = data;
  const Dims strides = geometry.StridesOf(dims);
  std::copy(dims.begin(), dims.end(), tensor.dims);
  std::copy(strides.begin(), strides.end(), tensor.strides);
  return tensor;
}

ConvSums SumsOf(const ConvGeometry& g, const ConvBuffers& buffers) {
  ConvSums sums;
  sums.computed = g.pass == ConvPass::kForward        ? ConvSums::kY
                  : g.pass == ConvPass::kBackwardData ? ConvSums::kX
                                                      : ConvSums::kW;
  sums.x = TensorOf(g, g.x, buffers.x);
  sums.w = TensorOf(g, g.w, buffers.w);
  sums.y = TensorOf(g, g.y, buffers.y);
  std::copy(g.strides.begin(), g.strides.end(), sums.strides);
  std::copy(g.padding_low.begin(), g.padding_low.end(), sums.padding);
  std::copy(g.dilation.begin(), g.dilation.end(), sums.dilation);
  sums.scale = g.prologue ? buffers.scale : nullptr;
  sums.shift = g.prologue ? buffers.shift : nullptr;
  sums.bias = g.epilogue.bias ? buffers.bias : nullptr;
  sums.relu = g.epilogue.relu;
  return sums;
}

const Dims& ResultDims(const ConvGeometry& g) {
  return g.pass == ConvPass::kForward ? g.y : g.pass == ConvPass::kBackwardData ? g.x : g.w;
}

void* ResultOf(const ConvGeometry& g, const ConvBuffers& buffers) {
  return g.pass == ConvPass::kForward        ? buffers.y
         : g.pass == ConvPass::kBackwardData ? buffers.x
                                             : buffers.w;
}

// Flat indices of a tensor, every other one first or last in each dimension of space. The same each
// time.
std::vector<std::int64_t> PlacesIn(const Dims& dims) {
  std::mt19937_64 random(0);
  std::vector<std::int64_t> places;
  for (std::size_t i = 0; i < kPlaces; ++i) {
    std::int64_t place = 0;
    for (std::size_t d = 0; d < dims.size(); ++d) {
      const bool edge = d >= 2 && i % 2 == 1;
      std::uniform_int_distribution<std::int64_t> draw(0, edge ? 1 : dims[d] - 1);
      place = place * dims[d] + draw(random) * (edge ? dims[d] - 1 : 1);
    }
    places.push_back(place);
  }
  return places;
}

// Memory of the host that kernels reach.
template <class T>
class Pinned {
 public:
  explicit Pinned(std::size_t count) {
    void* data = nullptr;
    VMEM_CHECK_CUDA(cudaMallocHost(&data, count * sizeof(T)));
    data_ = static_cast<T*>(data);
  }
  ~Pinned() {
    Teardown([this] { VMEM_CHECK_CUDA(cudaFreeHost(data_)); });
  }
  Pinned(const Pinned&) = delete;
  Pinned& operator=(const Pinned&) = delete;

  T* get() const { return data_; }

 private:
  T* data_;
};

}  // namespace

ConvTrial::ConvTrial(const ConvGeometry& geometry, const ConvWay& way, int device,
                     std::vector<ConvBuffers> sets, std::int64_t workspace)
    : given_(geometry),
      way_(way),
      device_(device),
      sets_(std::move(sets)),
      workspace_(workspace),
      padding_(geometry, way.channels) {
  CudaBackend::DeviceGuard guard(device);
  {
    CudnnLease lease(device);
    plan_ = MakePlan(padding_.geometry(), ConvDevice::Here(lease.handle()), way.engine, way.knobs);
  }
  const std::int64_t needs = padding_.nbytes() + plan_.workspace;
  if (sets_.empty()) throw Error(Code::kInvalidArgument, "there are no buffers");
  if (needs > workspace) {
    throw Error(Code::kInvalidArgument, "the plan needs " + std::to_string(needs) +
                                            " bytes of workspace. Got " +
                                            std::to_string(workspace) + ".");
  }
  VMEM_CHECK_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
}

ConvTrial::~ConvTrial() {
  Teardown([this] { VMEM_CHECK_CUDA(cudaStreamDestroy(stream_)); });
}

std::vector<double> ConvTrial::Run(int times) {
  CudaBackend::DeviceGuard guard(device_);
  CudnnLease lease(device_);
  std::vector<CudaBackend::Mark> marks{CudaBackend::NewMark(stream_)};
  for (int i = 0; i < times; ++i) {
    lease.Run(plan_, padding_, sets_.at(runs_++ % sets_.size()), stream_);
    marks.push_back(CudaBackend::NewMark(stream_));
  }
  VMEM_CHECK_CUDA(cudaStreamSynchronize(stream_));
  std::vector<double> seconds;
  for (int i = 0; i < times; ++i) {
    float milliseconds = 0.0F;
    VMEM_CHECK_CUDA(cudaEventElapsedTime(&milliseconds, marks[i]->get(), marks[i + 1]->get()));
    seconds.push_back(milliseconds * 1e-3);
  }
  return seconds;
}

double ConvTrial::Off(double times) {
  const std::vector<std::int64_t> drawn = PlacesIn(ResultDims(given_));
  const Pinned<std::int64_t> places(drawn.size());
  const Pinned<double> found(2 * drawn.size());
  std::copy(drawn.begin(), drawn.end(), places.get());
  AddProductsOf(stream_, given_.dtype, SumsOf(given_, sets_[0]), places.get(), drawn.size(),
                found.get());
  VMEM_CHECK_CUDA(cudaStreamSynchronize(stream_));
  double squares = 0;
  double most = 0;
  for (std::size_t i = 0; i < drawn.size(); ++i) {
    const double wanted = times * found.get()[2 * i];
    const double off = std::abs(found.get()[2 * i + 1] - wanted);
    squares += wanted * wanted;
    most = std::isnan(off) ? std::numeric_limits<double>::infinity() : std::max(most, off);
  }
  return most == 0 ? 0 : most / std::sqrt(squares / static_cast<double>(drawn.size()));
}

double ConvTrial::SumsOff() {
  std::mt19937_64 random(0);
  std::uniform_int_distribution<std::int64_t> draw(0, given_.y[1] - 1);
  const Pinned<std::int64_t> channels(kPlaces);
  const Pinned<double> found(4 * kPlaces);
  std::generate_n(channels.get(), kPlaces, [&] { return draw(random); });
  const ConvBuffers& set = sets_[0];
  const ChannelSums given{TensorOf(given_, given_.y, set.y), static_cast<const float*>(set.sums),
                          static_cast<const float*>(set.squares)};
  AddChannelsOf(stream_, given_.dtype, given, channels.get(), kPlaces, found.get());
  VMEM_CHECK_CUDA(cudaStreamSynchronize(stream_));
  double most = 0;
  for (std::size_t i = 0; i < kPlaces; ++i) {
    const double* each = found.get() + 4 * i;
    const double off = std::max(std::abs(each[1] - each[0]) / std::sqrt(each[2]),
                                std::abs(each[3] - each[2]) / each[2]);
    const bool is_nan = std::isnan(each[1] + each[3]);
    most = is_nan ? std::numeric_limits<double>::infinity() : std::max(most, off);
  }
  return most;
}

double ConvTrial::Deviation() {
  if (!kAddsProducts) return std::numeric_limits<double>::quiet_NaN();
  CudaBackend::DeviceGuard guard(device_);
  const Dims& dims = ResultDims(given_);
  const auto nbytes = static_cast<std::size_t>(dims[0] * given_.SampleBytes(dims));
  // all ones are nan in every type
  VMEM_CHECK_CUDA(cudaMemsetAsync(ResultOf(given_, sets_[0]), 0xFF, nbytes, stream_));
  const bool sums = given_.epilogue.sums;
  for (void* vector : {sets_[0].sums, sets_[0].squares}) {
    const std::size_t size = given_.y[1] * sizeof(float);
    if (sums) VMEM_CHECK_CUDA(cudaMemsetAsync(vector, 0xFF, size, stream_));
  }
  CudnnLease lease(device_);
  lease.Run(plan_, padding_, sets_[0], stream_);
  const double off = sums ? std::max(Off(1), SumsOff()) : Off(1);
  if (!given_.CanAccumulate()) return off;
  const ConvPadding padding(given_.WithBatch(given_.x[0], true), way_.channels);
  const Plan adding =
      MakePlan(padding.geometry(), ConvDevice::Here(lease.handle()), way_.engine, way_.knobs);
  if (padding.nbytes() + adding.workspace > workspace_) {
    throw Error(Code::kInvalidArgument, "the plan that adds up needs more workspace");
  }
  lease.Run(adding, padding, sets_[0], stream_);
  return std::max(off, Off(2));
}

}  // namespace vmem
