// The convolution call without a GPU: XLA's call frames made by hand, a cuDNN that computes on the
// CPU (fake_cudnn.cc), and no CUDA. For the sanitizers, as transfer_test.cc.
#include "host_threads.h"
// after it
#include "channels_kernels.h"
#include "sums_kernels.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cuda_backend.h"
#include "cuda_channels.h"
#include "cuda_sums.h"
#include "cudnn_geometry.h"
#include "cudnn_library.h"
#include "cudnn_runtime.h"
#include "cudnn_trial.h"
#include "expect.h"
#include "targets.h"

// -- CUDA, as far as it is called: a stream that runs at once

static thread_local bool capturing = false;

extern "C" {
cudaError_t cudaStreamCreateWithFlags(cudaStream_t*, unsigned int) { return cudaSuccess; }
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaMallocHost(void** data, std::size_t nbytes) {
  *data = std::malloc(nbytes);
  return cudaSuccess;
}
cudaError_t cudaFreeHost(void* data) {
  std::free(data);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* data, int byte, std::size_t nbytes, cudaStream_t) {
  std::memset(data, byte, nbytes);
  return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float*, cudaEvent_t, cudaEvent_t) { return cudaSuccess; }
}

namespace vmem {

void CheckCuda(cudaError_t, const char*) {}
CudaEvent::CudaEvent(unsigned int) {}
CudaEvent::~CudaEvent() {}
CudaBackend::DeviceGuard::DeviceGuard(int) {}
CudaBackend::DeviceGuard::~DeviceGuard() {}
CudaBackend::Mark CudaBackend::NewMark(Stream) { return std::make_shared<CudaEvent>(); }
bool CudaBackend::IsCapturing(Stream) { return capturing; }

// The kernels run on threads of the host; one call at a time has the lease.
static bool loaded = false;
void LoadChannels() { loaded = true; }
void CopyChannels(cudaStream_t, const void* from, std::int64_t given, void* to, std::int64_t made,
                  std::int64_t rows) {
  EXPECT(loaded);
  const auto kernel = AreFours(to, made) ? CopyRows<FourValues> : CopyRows<OneValue>;
  HostBlock::the_block->Launch(ChannelBlocks(rows), [&] {
    kernel(static_cast<const std::uint16_t*>(from), static_cast<unsigned>(given),
           static_cast<std::uint16_t*>(to), static_cast<unsigned>(made),
           static_cast<std::uint64_t>(rows));
  });
}

void AddProductsOf(cudaStream_t, cudnnDataType_t dtype, const ConvSums& sums,
                   const std::int64_t* places, std::size_t count, double* found) {
  auto* kernel = AddProducts<float>;
  if (dtype == CUDNN_DATA_DOUBLE) kernel = AddProducts<double>;
  if (dtype == CUDNN_DATA_BFLOAT16) kernel = AddProducts<Bf16>;
  HostBlock::the_block->Launch(static_cast<unsigned>(count), [&] { kernel(sums, places, found); });
}

void AddChannelsOf(cudaStream_t, cudnnDataType_t dtype, const ChannelSums& given,
                   const std::int64_t* channels, std::size_t count, double* found) {
  auto* kernel = dtype == CUDNN_DATA_BFLOAT16 ? AddChannels<Bf16> : AddChannels<float>;
  HostBlock::the_block->Launch(static_cast<unsigned>(count),
                               [&] { kernel(given, channels, found); });
}

namespace {

// -- XLA, as far as it is called

XLA_FFI_Error* MakeError(XLA_FFI_Error_Create_Args* args) {
  return reinterpret_cast<XLA_FFI_Error*>(new std::string(args->message));
}

XLA_FFI_Error* GetStream(XLA_FFI_Stream_Get_Args* args) {
  args->stream = nullptr;
  return nullptr;
}

XLA_FFI_Error* GetDevice(XLA_FFI_DeviceOrdinal_Get_Args* args) {
  args->device_ordinal = 0;
  return nullptr;
}

struct Array {
  XLA_FFI_DataType dtype;
  Dims dims;
  std::vector<double> values;  // row-major
};

std::size_t SizeOf(XLA_FFI_DataType dtype) {
  return dtype == XLA_FFI_DataType_F64 ? 8 : dtype == XLA_FFI_DataType_F32 ? 4 : 2;
}

std::size_t Count(const Dims& dims) {
  std::size_t count = 1;
  for (std::int64_t dim : dims) count *= dim;
  return count;
}

std::vector<char> Pack(const Array& array) {
  std::vector<char> bytes(array.values.size() * SizeOf(array.dtype));
  for (std::size_t i = 0; i < array.values.size(); ++i) {
    const auto single = static_cast<float>(array.values[i]);
    const char* from = reinterpret_cast<const char*>(&single);
    if (array.dtype == XLA_FFI_DataType_F64) from = reinterpret_cast<const char*>(&array.values[i]);
    if (array.dtype == XLA_FFI_DataType_BF16) from += 2;  // the high half
    std::memcpy(&bytes[i * SizeOf(array.dtype)], from, SizeOf(array.dtype));
  }
  return bytes;
}

void Unpack(const std::vector<char>& bytes, Array& array) {
  array.values.resize(bytes.size() / SizeOf(array.dtype));
  for (std::size_t i = 0; i < array.values.size(); ++i) {
    const char* from = &bytes[i * SizeOf(array.dtype)];
    float single = 0;
    char* to = reinterpret_cast<char*>(&single);
    if (array.dtype == XLA_FFI_DataType_BF16) to += 2;
    if (array.dtype == XLA_FFI_DataType_F64) {
      std::memcpy(&array.values[i], from, 8);
    } else {
      std::memcpy(to, from, SizeOf(array.dtype));
      array.values[i] = single;
    }
  }
}

struct Attributes {
  std::string which = "forward";
  bool channels_last = true;
  Dims strides, padding_low, padding_high, dilation, micros{};
  bool partials = false;
  std::string epilogue{};
  std::vector<Array> more{};  // operands
  Array* sums = nullptr;      // one more result, or none
};

// Calls a handler as XLA does. Returns its error, or "".
std::string Call(XLA_FFI_Handler* handler, XLA_FFI_ExecutionStage stage, const Array& first,
                 const Array& second, Array& result, std::size_t workspace, Attributes attributes) {
  XLA_FFI_Api api{};
  api.struct_size = XLA_FFI_Api_STRUCT_SIZE;
  api.XLA_FFI_Error_Create = MakeError;
  api.XLA_FFI_Stream_Get = GetStream;
  api.XLA_FFI_DeviceOrdinal_Get = GetDevice;

  std::vector<char> memory[] = {Pack(first), Pack(second), {}, {}, {}, {}, {}, {}};
  memory[2].assign(Count(result.dims) * SizeOf(result.dtype), 0x7F);  // what was there before
  memory[3].assign(workspace, static_cast<char>(0xFF));  // NaNs
  std::int64_t bytes = static_cast<std::int64_t>(workspace);
  auto buffer = [&](int i, XLA_FFI_DataType dtype, const Dims& dims) {
    return XLA_FFI_Buffer{XLA_FFI_Buffer_STRUCT_SIZE, nullptr, dtype, memory[i].data(),
                          static_cast<std::int64_t>(dims.size()),
                          const_cast<std::int64_t*>(dims.data())};
  };
  const Dims bytes_dims{bytes};
  XLA_FFI_Buffer buffers[] = {buffer(0, first.dtype, first.dims),
                              buffer(1, second.dtype, second.dims),
                              buffer(2, result.dtype, result.dims),
                              buffer(3, XLA_FFI_DataType_U8, bytes_dims)};
  XLA_FFI_ArgType arg_types[] = {XLA_FFI_ArgType_BUFFER, XLA_FFI_ArgType_BUFFER,
                                 XLA_FFI_ArgType_BUFFER, XLA_FFI_ArgType_BUFFER,
                                 XLA_FFI_ArgType_BUFFER};
  XLA_FFI_RetType ret_types[] = {XLA_FFI_RetType_BUFFER, XLA_FFI_RetType_BUFFER,
                                 XLA_FFI_RetType_BUFFER};
  XLA_FFI_Buffer more[3] = {};
  EXPECT(attributes.more.size() <= 3);
  for (std::size_t i = 0; i < attributes.more.size(); ++i) {
    const Array& each = attributes.more[i];
    memory[4 + i] = Pack(each);
    more[i] = buffer(static_cast<int>(4 + i), each.dtype, each.dims);
  }
  void* args[] = {&buffers[0], &buffers[1], &more[0], &more[1], &more[2]};
  XLA_FFI_Buffer sums{};
  if (attributes.sums != nullptr) {
    memory[7].assign(Count(attributes.sums->dims) * SizeOf(attributes.sums->dtype), 0x7F);
    sums = buffer(7, attributes.sums->dtype, attributes.sums->dims);
  }
  void* rets[] = {&buffers[2], &buffers[3], &sums};

  // by name, in order
  std::map<std::string, std::pair<XLA_FFI_AttrType, void*>> named;
  std::map<std::string, XLA_FFI_Array> arrays;
  std::map<std::string, XLA_FFI_Scalar> scalars;
  XLA_FFI_ByteSpan which{attributes.which.data(), attributes.which.size()};
  named["which"] = {XLA_FFI_AttrType_STRING, &which};
  XLA_FFI_ByteSpan epilogue{attributes.epilogue.data(), attributes.epilogue.size()};
  named["epilogue"] = {XLA_FFI_AttrType_STRING, &epilogue};
  for (auto [name, flag] : {std::pair<const char*, bool*>{"partials", &attributes.partials},
                            {"channels_last", &attributes.channels_last}}) {
    scalars[name] = {XLA_FFI_DataType_PRED, flag};
    named[name] = {XLA_FFI_AttrType_SCALAR, &scalars[name]};
  }
  for (auto [name, values] : {std::pair<const char*, Dims*>{"strides", &attributes.strides},
                              {"padding_low", &attributes.padding_low},
                              {"padding_high", &attributes.padding_high},
                              {"dilation", &attributes.dilation},
                              {"micros", &attributes.micros}}) {
    arrays[name] = {XLA_FFI_DataType_S64, values->size(), values->data()};
    named[name] = {XLA_FFI_AttrType_ARRAY, &arrays[name]};
  }
  std::vector<XLA_FFI_AttrType> types;
  std::vector<XLA_FFI_ByteSpan> names;
  std::vector<XLA_FFI_ByteSpan*> name_pointers;
  std::vector<void*> values;
  for (auto& [name, typed] : named) {
    types.push_back(typed.first);
    names.push_back({name.data(), name.size()});
    values.push_back(typed.second);
  }
  for (XLA_FFI_ByteSpan& name : names) name_pointers.push_back(&name);

  XLA_FFI_CallFrame frame{};
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.api = &api;
  frame.stage = stage;
  const auto count = static_cast<std::int64_t>(2 + attributes.more.size());
  frame.args = {XLA_FFI_Args_STRUCT_SIZE, nullptr, count, arg_types, args};
  frame.rets = {XLA_FFI_Rets_STRUCT_SIZE, nullptr, attributes.sums == nullptr ? 2 : 3, ret_types,
                rets};
  frame.attrs = {XLA_FFI_Attrs_STRUCT_SIZE, nullptr, static_cast<std::int64_t>(types.size()),
                 types.data(), name_pointers.data(), values.data()};
  auto* error = reinterpret_cast<std::string*>(handler(&frame));
  const std::string message = error == nullptr ? "" : *error;
  delete error;
  Unpack(memory[2], result);
  if (attributes.sums != nullptr) Unpack(memory[7], *attributes.sums);
  return message;
}

std::string Run(const Array& first, const Array& second, Array& result, std::size_t workspace,
                const Attributes& attributes) {
  static const Targets targets = CudnnTargets();
  const Target& target = targets.at("micro_conv");
  std::string error = Call(target.initialize, XLA_FFI_ExecutionStage_INITIALIZE, first, second,
                           result, workspace, attributes);
  if (!error.empty()) return error;
  capturing = true;  // everything has been made by now
  error = Call(target.execute, XLA_FFI_ExecutionStage_EXECUTE, first, second, result, workspace,
               attributes);
  capturing = false;
  return error;
}

Array Random(XLA_FFI_DataType dtype, Dims dims) {
  static std::mt19937 random(1);
  std::uniform_int_distribution<int> small(-4, 4);  // sums of products are exact, even in bfloat16
  Array array{dtype, std::move(dims), {}};
  for (std::size_t i = Count(array.dims); i > 0; --i) array.values.push_back(small(random));
  return array;
}

double Dot(const Array& a, const Array& b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.values.size(); ++i) sum += a.values[i] * b.values[i];
  return sum;
}

// -- what has to hold

constexpr std::int64_t kBatch = 6;
// for each micro-batch: samples, engine, channels, whether the epilogue is left out, knobs
const Dims kUndivided{kBatch, 0, 0, 0, 0};
// engines 2 and 1, of which the first has two knobs; 40 bytes of workspace at most
const Dims kDivided{2, 2, 0, 0, 2, 7, 1, 9, 0, 1, 0, 0, 0, 0, 3, 1, 0, 0, 0};
// the same, but for the epilogue of the one in the middle
const Dims kMixed{2, 2, 0, 0, 2, 7, 1, 9, 0, 1, 0, 0, 1, 0, 3, 1, 0, 0, 0};
constexpr std::size_t kWorkspace = 40;

struct Layer {
  Dims x, w, y;
  Attributes attributes;
};

std::vector<Layer> Layers() {
  Attributes plain{"", true, {2, 1}, {1, 0}, {0, 2}, {1, 2}};
  Attributes first = plain;
  first.channels_last = false;
  const Attributes line{"", true, {2}, {1}, {1}, {1}};
  const Attributes solid{"", true, {1, 1, 1}, {0, 1, 0}, {0, 1, 0}, {1, 1, 1}};
  return {{{kBatch, 5, 6, 4}, {3, 2, 3, 4}, {kBatch, 3, 4, 3}, plain},
          {{kBatch, 4, 5, 6}, {6, 2, 2, 3}, {kBatch, 6, 3, 4}, first},  // two groups
          {{kBatch, 7, 3}, {2, 3, 3}, {kBatch, 4, 2}, line},
          {{kBatch, 3, 3, 2, 2}, {2, 2, 3, 1, 2}, {kBatch, 2, 3, 2, 2}, solid}};
}

// One output of the first layer of Layers, written out.
void TestOneOutput() {
  Layer layer = Layers()[0];
  layer.attributes.which = "forward";
  layer.attributes.micros = kDivided;
  const Array x = Random(XLA_FFI_DataType_F32, layer.x);
  const Array w = Random(XLA_FFI_DataType_F32, layer.w);
  Array y{XLA_FFI_DataType_F32, layer.y, {}};
  EXPECT(Run(x, w, y, kWorkspace, layer.attributes) == "");
  auto at = [](const Array& a, Dims i) {
    std::size_t offset = 0;
    for (std::size_t d = 0; d < i.size(); ++d) offset = offset * a.dims[d] + i[d];
    return a.values[offset];
  };
  double sum = 0;  // sample 4, row 0, column 3, channel 2
  for (int row = 1; row < 2; ++row) {  // row 0 of the kernel is in the padding
    for (int column = 0; column < 3; ++column) {
      if (3 + 2 * column >= 6) continue;
      for (int c = 0; c < 4; ++c) {
        sum += at(x, {4, row - 1, 3 + 2 * column, c}) * at(w, {2, row, column, c});
      }
    }
  }
  EXPECT(at(y, {4, 0, 3, 2}) == sum);
}

// ⟨dy, w * x⟩ = ⟨dx, x⟩ = ⟨dw, w⟩, and micro-batches give what the whole batch gives.
void TestPasses(XLA_FFI_DataType dtype) {
  const bool narrow = dtype == XLA_FFI_DataType_BF16;
  for (const Layer& layer : Layers()) {
    const Array x = Random(dtype, layer.x);
    const Array w = Random(dtype, layer.w);
    const Array dy = Random(dtype, layer.y);
    double products[2][3];
    for (bool divided : {false, true}) {
      Attributes attributes = layer.attributes;
      attributes.micros = divided ? kDivided : kUndivided;
      Array y{dtype, layer.y, {}};
      attributes.which = "forward";
      EXPECT(Run(x, w, y, kWorkspace, attributes) == "");
      Array dx{dtype, layer.x, {}};
      attributes.which = "backward data";
      EXPECT(Run(dy, w, dx, kWorkspace, attributes) == "");
      Array dw{dtype, layer.w, {}};
      attributes.which = "backward filter";
      attributes.partials = narrow;
      if (narrow) dw.dims.insert(dw.dims.begin(), divided ? 3 : 1);
      EXPECT(Run(x, dy, dw, kWorkspace, attributes) == "");
      Array sum{dtype, layer.w, std::vector<double>(Count(layer.w), 0.0)};
      for (std::size_t i = 0; i < dw.values.size(); ++i) {
        sum.values[i % sum.values.size()] += dw.values[i];
      }
      products[divided][0] = Dot(dy, y);
      products[divided][1] = Dot(dx, x);
      products[divided][2] = Dot(sum, w);
    }
    // y, dx and parts of dw are rounded to bfloat16, and its sums are large
    const double allowed = narrow ? 200 : 0;
    for (int i = 0; i < 3; ++i) {
      EXPECT(std::fabs(products[0][i] - products[1][i]) <= allowed);
      EXPECT(std::fabs(products[0][0] - products[0][i]) <= allowed);
    }
  }
}

// What follows a forward pass is done to every micro-batch, but where that is left to others.
void TestEpilogues() {
  for (const Layer& layer : Layers()) {
    const Array x = Random(XLA_FFI_DataType_F32, layer.x);
    const Array w = Random(XLA_FFI_DataType_F32, layer.w);
    const Array b = Random(XLA_FFI_DataType_F32, {layer.w[0]});
    Attributes attributes = layer.attributes;
    attributes.which = "forward";
    attributes.micros = kDivided;
    Array plain{XLA_FFI_DataType_F32, layer.y, {}};
    EXPECT(Run(x, w, plain, kWorkspace, attributes) == "");
    for (const char* name : {"bias", "bias and relu"}) {
      attributes.epilogue = name;
      const bool relu = std::strstr(name, "relu") != nullptr;
      attributes.more = {b};
      for (const Dims& micros : {kUndivided, kDivided, kMixed}) {
        attributes.micros = micros;
        Array y{XLA_FFI_DataType_F32, layer.y, {}};
        EXPECT(Run(x, w, y, kWorkspace, attributes) == "");
        const std::size_t space = Count(layer.y) / layer.y[0] / layer.w[0];
        for (std::size_t i = 0; i < y.values.size(); ++i) {
          const std::size_t inner = attributes.channels_last ? 1 : space;
          const bool bare = micros == kMixed && i / (Count(layer.y) / kBatch) == 2;
          double expected = plain.values[i];
          if (!bare) expected += b.values[i / inner % layer.w[0]];
          if (relu && !bare) expected = std::max(expected, 0.0);
          EXPECT(y.values[i] == expected);
        }
      }
    }
  }
}

// x with ReLU(x * scale + shift) of each channel.
Array Normalised(const Array& x, const Array& scale, const Array& shift, bool channels_last) {
  Array made = x;
  const std::size_t channels = Count(scale.dims);
  const std::size_t inner = channels_last ? 1 : Count(x.dims) / x.dims[0] / channels;
  for (std::size_t i = 0; i < made.values.size(); ++i) {
    const std::size_t channel = i / inner % channels;
    made.values[i] = std::max(made.values[i] * scale.values[channel] + shift.values[channel], 0.0);
  }
  return made;
}

// With a prologue a call gives what it gives without one of x after it, whose padding is zero; and
// sums are those of each micro-batch.
void TestPrologues(XLA_FFI_DataType dtype) {
  for (const Layer& layer : Layers()) {
    const bool last = layer.attributes.channels_last;
    const std::int64_t channels = last ? layer.x.back() : layer.x[1];
    const Array x = Random(dtype, layer.x);
    const Array w = Random(dtype, layer.w);
    const Array dy = Random(dtype, layer.y);
    const Array scale = Random(dtype, {channels});
    const Array shift = Random(dtype, {channels});
    const Array made = Normalised(x, scale, shift, last);
    for (const Dims& micros : {kUndivided, kDivided}) {
      const std::int64_t parts = micros == kUndivided ? 1 : 3;
      Attributes plain = layer.attributes;
      plain.micros = micros;
      plain.which = "forward";
      Attributes carrying = plain;
      carrying.more = {scale, shift};
      Array expected{dtype, layer.y, {}};
      Array y{dtype, layer.y, {}};
      EXPECT(Run(made, w, expected, kWorkspace, plain) == "");
      EXPECT(Run(x, w, y, kWorkspace, carrying) == "");
      EXPECT(y.values == expected.values);

      Array sums{XLA_FFI_DataType_F32, {parts, 2, layer.w[0]}, {}};
      carrying.epilogue = "sums";
      carrying.sums = &sums;
      EXPECT(Run(x, w, y, kWorkspace, carrying) == "");
      EXPECT(y.values == expected.values);
      std::vector<double> wanted(sums.values.size(), 0.0);
      const std::size_t inner = last ? 1 : Count(layer.y) / layer.y[0] / layer.w[0];
      for (std::size_t i = 0; i < y.values.size(); ++i) {
        const std::size_t sample = i / (y.values.size() / kBatch);
        const std::size_t part = parts == 1 ? 0 : sample < 2 ? 0 : sample < 3 ? 1 : 2;
        const std::size_t at = part * 2 * layer.w[0] + i / inner % layer.w[0];
        wanted[at] += y.values[i];
        wanted[at + layer.w[0]] += y.values[i] * y.values[i];
      }
      EXPECT(sums.values == wanted);

      plain.which = carrying.which = "backward filter";
      plain.partials = carrying.partials = dtype == XLA_FFI_DataType_BF16;
      carrying.epilogue = "";
      carrying.sums = nullptr;
      Dims dims = layer.w;
      if (plain.partials) dims.insert(dims.begin(), parts);
      Array dw{dtype, dims, {}};
      Array with{dtype, dims, {}};
      EXPECT(Run(made, dy, dw, kWorkspace, plain) == "");
      EXPECT(Run(x, dy, with, kWorkspace, carrying) == "");
      EXPECT(with.values == dw.values);
    }
  }
}

// Bytes of the copies of x and w with so many channels, each a multiple of 256.
std::size_t PaddingBytes(const Layer& layer, std::int64_t samples, std::int64_t channels) {
  auto up = [](std::size_t values) { return (2 * values + 255) / 256 * 256; };
  const std::size_t x = Count(layer.x) / kBatch * samples / layer.x.back() * channels;
  return up(x) + up(Count(layer.w) / layer.w.back() * channels);
}

// With padded channels a call gives the very same numbers, whatever was in its workspace.
void TestPaddedChannels() {
  const auto kNarrow = XLA_FFI_DataType_BF16;
  // all of it; engines 2 and 1 to 8 channels and to 9, which cannot be copied four at a time; none
  const Dims undivided{kBatch, 0, 8, 0, 0};
  const Dims divided{2, 2, 8, 0, 1, 7, 1, 1, 0, 0, 0, 0, 3, 1, 9, 0, 0};
  for (const Layer& layer : Layers()) {
    const std::int64_t channels = layer.x.back();
    if (!layer.attributes.channels_last || layer.w.back() != channels) continue;
    const Array x = Random(kNarrow, layer.x);
    const Array w = Random(kNarrow, layer.w);
    const Array dy = Random(kNarrow, layer.y);
    Attributes biased = layer.attributes;
    biased.epilogue = "bias and relu";
    biased.more = {Random(kNarrow, {layer.w[0]})};
    struct Case {
      const char* which;
      const Array &first, &second;
      Dims result;
      Attributes attributes;
    };
    for (Case& each : std::vector<Case>{{"forward", x, w, layer.y, layer.attributes},
                                        {"forward", x, w, layer.y, biased},
                                        {"backward data", dy, w, layer.x, layer.attributes},
                                        {"backward filter", x, dy, layer.w, layer.attributes}}) {
      each.attributes.which = each.which;
      each.attributes.partials = each.which == std::string("backward filter");
      for (const Dims& micros : {undivided, divided}) {
        const bool whole = micros == undivided;
        if (each.attributes.partials) each.result = layer.w;
        if (each.attributes.partials) each.result.insert(each.result.begin(), whole ? 1 : 3);
        Array expected{kNarrow, each.result, {}};
        each.attributes.micros = whole ? kUndivided : Dims{2, 2, 0, 0, 0, 1, 0, 0, 0, 0, 3, 1, 0, 0, 0};
        EXPECT(Run(each.first, each.second, expected, kWorkspace, each.attributes) == "");
        each.attributes.micros = micros;
        Array result{kNarrow, each.result, {}};
        const std::size_t workspace =
            whole ? PaddingBytes(layer, kBatch, 8)
                  : std::max(PaddingBytes(layer, 2, 8) + 40, PaddingBytes(layer, 3, 9) + 30);
        EXPECT(Run(each.first, each.second, result, workspace, each.attributes) == "");
        EXPECT(result.values == expected.values);
        const std::string less =
            Run(each.first, each.second, result, workspace - 1, each.attributes);
        EXPECT(less.find("needs " + std::to_string(workspace) + " bytes") != std::string::npos);
      }
    }
  }
}

// A trial runs a way, padding included, on its sets of buffers in turn.
void TestTrial() {
  const Dims x{2, 3, 4, 4};
  const Dims w{2, 3, 1, 1};
  const Dims y{2, 2, 4, 4};
  ConvGeometry geometry;
  geometry.dtype = CUDNN_DATA_BFLOAT16;
  std::tie(geometry.x, geometry.w, geometry.y) = std::tie(x, w, y);
  geometry.strides = geometry.dilation = {1, 1};
  geometry.padding_low = geometry.padding_high = {0, 0};
  geometry.Check();
  const std::size_t needs = 512 + 256 + 20;  // of x and w with 8 channels, and of engine 1
  std::vector<std::uint16_t> ones(Count(x), 0x3F80);
  std::vector<std::uint16_t> results[2];
  std::vector<char> workspace(needs);
  std::vector<ConvBuffers> sets;
  for (std::vector<std::uint16_t>& result : results) {
    result.assign(Count(y), 0);
    sets.push_back({ones.data(), ones.data(), result.data(), workspace.data(), nullptr});
  }
  const ConvWay way{1, 8, {}};
  ConvTrial trial(geometry, way, 0, sets, needs);
  LoadChannels();
  EXPECT(trial.Run(1).size() == 1);
  EXPECT(results[0][0] == 0x4040 && results[1][0] == 0);  // 3, of three channels
  EXPECT(trial.Run(3).size() == 3);
  EXPECT(results[1] == results[0]);
  const std::string less = "needs " + std::to_string(needs) + " bytes of workspace. Got ";
  EXPECT(Throws([&] { ConvTrial(geometry, way, 0, sets, needs - 1); }, less));
  EXPECT(Throws([&] { ConvTrial(geometry, way, 0, {}, needs); }, "no buffers"));
}

// What is wrong is far off; what is right is not, whatever the layer.
void TestDeviation(XLA_FFI_DataType dtype, const std::vector<Layer>& layers) {
  for (const Layer& layer : layers) {
    for (const char* which : {"forward", "backward data", "backward filter"}) {
      ConvGeometry geometry;
      geometry.pass = ConvPassOf(which);
      geometry.dtype = dtype == XLA_FFI_DataType_F64   ? CUDNN_DATA_DOUBLE
                       : dtype == XLA_FFI_DataType_F32 ? CUDNN_DATA_FLOAT
                                                       : CUDNN_DATA_BFLOAT16;
      const Attributes& window = layer.attributes;
      geometry.channels_last = window.channels_last;
      std::vector<char> memory[3];
      Dims* shapes[] = {&geometry.x, &geometry.w, &geometry.y};
      const Dims* given[] = {&layer.x, &layer.w, &layer.y};
      for (int i = 0; i < 3; ++i) {
        *shapes[i] = *given[i];
        if (window.channels_last) {
          std::rotate(shapes[i]->begin() + 1, shapes[i]->end() - 1, shapes[i]->end());
        }
        memory[i] = Pack(Random(dtype, *given[i]));
      }
      std::tie(geometry.strides, geometry.padding_low, geometry.padding_high, geometry.dilation) =
          std::tie(window.strides, window.padding_low, window.padding_high, window.dilation);
      geometry.Check();
      std::vector<char> workspace(40 * kBatch);
      const ConvBuffers set{memory[0].data(), memory[1].data(), memory[2].data(),
                            workspace.data(), nullptr};
      auto deviation = [&](std::int64_t engine) {
        const auto nbytes = static_cast<std::int64_t>(workspace.size());
        return ConvTrial(geometry, {engine, 0, {}}, 0, {set}, nbytes).Deviation();
      };
      EXPECT(deviation(1) < 0.01);
      if (layers.size() == 1) continue;
      EXPECT(deviation(3) > 0.1);
      EXPECT(std::isinf(deviation(4)));
    }
  }
}

// A prologue belongs to what a result is held against, and so do the sums, whose padding is zero.
void TestDeviationOfPrologues() {
  const Layer layer = Layers()[0];
  for (const char* which : {"forward", "backward filter"}) {
    ConvGeometry geometry;
    geometry.pass = ConvPassOf(which);
    geometry.prologue = true;
    geometry.epilogue.sums = geometry.pass == ConvPass::kForward;
    std::vector<char> memory[5];
    Dims* shapes[] = {&geometry.x, &geometry.w, &geometry.y};
    const Dims* given[] = {&layer.x, &layer.w, &layer.y};
    for (int i = 0; i < 3; ++i) {
      *shapes[i] = *given[i];
      std::rotate(shapes[i]->begin() + 1, shapes[i]->end() - 1, shapes[i]->end());
      memory[i] = Pack(Random(XLA_FFI_DataType_F32, *given[i]));
    }
    for (int i = 3; i < 5; ++i) memory[i] = Pack(Random(XLA_FFI_DataType_F32, {layer.x.back()}));
    const Attributes& window = layer.attributes;
    std::tie(geometry.strides, geometry.padding_low, geometry.padding_high, geometry.dilation) =
        std::tie(window.strides, window.padding_low, window.padding_high, window.dilation);
    geometry.Check();
    std::vector<char> workspace(50 * kBatch);
    std::vector<float> sums(2 * layer.w[0]);
    auto deviation = [&](std::int64_t engine, bool prologue) {
      ConvGeometry asked = geometry;
      asked.prologue = prologue;
      ConvBuffers set{memory[0].data(), memory[1].data(), memory[2].data(), workspace.data()};
      if (prologue) set.scale = memory[3].data();
      if (prologue) set.shift = memory[4].data();
      if (geometry.epilogue.sums) set.sums = sums.data();
      if (geometry.epilogue.sums) set.squares = sums.data() + layer.w[0];
      const auto nbytes = static_cast<std::int64_t>(workspace.size());
      return ConvTrial(asked, {engine, 0, {}}, 0, {set}, nbytes).Deviation();
    };
    EXPECT(deviation(1, true) < 0.01);
    EXPECT(deviation(1, false) < 0.01);
    EXPECT(deviation(3, true) > 0.1);
    EXPECT(std::isinf(deviation(4, true)));
    EXPECT((deviation(5, true) > 0.1) == geometry.epilogue.sums);
  }
}

// Devices are shared by executions, so several threads ask for one handle and the same plans.
void TestThreads() {
  std::vector<std::thread> threads;
  for (const Layer& layer : Layers()) {
    const Array x = Random(XLA_FFI_DataType_F32, layer.x);
    const Array w = Random(XLA_FFI_DataType_F32, layer.w);
    for (const Dims& micros : {kUndivided, kDivided}) {
      threads.emplace_back([=] {
        Attributes attributes = layer.attributes;
        attributes.which = "forward";
        attributes.micros = micros;
        attributes.micros[1] = 1;  // plans that no test before has made
        for (int i = 0; i < 5; ++i) {
          Array y{XLA_FFI_DataType_F32, layer.y, {}};
          EXPECT(Run(x, w, y, 2 * kWorkspace, attributes) == "");
        }
      });
    }
  }
  for (std::thread& thread : threads) thread.join();
}

void TestMisuse() {
  const Layer layer = Layers()[0];
  const auto kFloat = XLA_FFI_DataType_F32;
  const Array x = Random(kFloat, layer.x);
  const Array w = Random(kFloat, layer.w);
  Array y{kFloat, layer.y, {}};
  auto fails = [&](const char* why, Attributes attributes, std::size_t workspace = kWorkspace) {
    const std::string error = Run(x, w, y, workspace, attributes);
    if (error.find(why) == std::string::npos) {
      std::fprintf(stderr, "not \"%s\" but \"%s\"\n", why, error.c_str());
    }
    EXPECT(error.find("vmem_jax micro_conv: ") == 0 && error.find(why) != std::string::npos);
  };
  Attributes right = layer.attributes;
  right.which = "forward";
  right.micros = kDivided;
  auto with = [&](auto change) {
    Attributes changed = right;
    change(changed);
    return changed;
  };
  fails("needs 40 bytes of workspace for 2 samples, and there are 39", right, kWorkspace - 1);
  fails("have 5 samples and the batch has 6", with([](auto& a) { a.micros = {5, 0, 0, 0, 0}; }));
  fails("without samples", with([](auto& a) { a.micros = {6, 0, 0, 0, 0, 0, 0, 0, 0, 0}; }));
  fails("ends too early", with([](auto& a) { a.micros = {6, 0, 0, 0, 1, 3}; }));
  fails("fake error", with([](auto& a) { a.micros = {6, 99, 0, 0, 0}; }));
  fails("no pass \"sideways\"", with([](auto& a) { a.which = "sideways"; }));
  fails("y has another size", with([](auto& a) { a.padding_low = {3, 0}; }));
  fails("negative padding", with([](auto& a) { a.padding_low = {-1, 0}; }));
  fails("one dw for each", with([](auto& a) { a.partials = true; }));
  fails("no epilogue \"tanh\"", with([](auto& a) { a.epilogue = "tanh"; }));
  fails("0 more operands, and 1", with([](auto& a) { a.epilogue = "bias"; }));
  fails("1 more operands, and 0", with([&](auto& a) { a.more = {x}; }));
  fails("for each of 3 channels", with([&](auto& a) {
          a.epilogue = "bias";
          a.more = {Random(kFloat, {4})};
        }));
  fails("only a forward pass", with([](auto& a) {
          a.which = "backward data";
          a.epilogue = "bias";
        }));
  const Array vector = Random(kFloat, {4});
  Array sums{kFloat, {3, 2, 3}, {}};
  fails("2 more operands, and 1", with([&](auto& a) {
          a.epilogue = "bias";
          a.more = {vector, vector};
        }));
  fails("the scale is one value", with([&](auto& a) { a.more = {x, vector}; }));
  fails("the shift is one value", with([&](auto& a) { a.more = {vector, x}; }));
  fails("does not read x", with([&](auto& a) {
          a.which = "backward data";
          a.more = {vector, vector};
        }));
  fails("0 more results, and 1", with([](auto& a) { a.epilogue = "sums"; }));
  fails("1 more results, and 0", with([&](auto& a) { a.sums = &sums; }));
  fails("a bias alone", with([&](auto& a) {
          a.epilogue = "sums";
          a.sums = &sums;
          a.micros = kMixed;
        }));
  Array short_sums{kFloat, {2, 2, 3}, {}};
  fails("for each micro-batch and channel", with([&](auto& a) {
          a.epilogue = "sums";
          a.sums = &short_sums;
        }));

  fails("in bf16 and f16 alone", with([](auto& a) { a.micros = {6, 0, 8, 0, 0}; }));
  const Array narrow_x = Random(XLA_FFI_DataType_BF16, layer.x);
  const Array narrow_w = Random(XLA_FFI_DataType_BF16, layer.w);
  Array narrow_y{XLA_FFI_DataType_BF16, layer.y, {}};
  right.micros = {6, 0, 4, 0, 0};
  const std::string equal = Run(narrow_x, narrow_w, narrow_y, kWorkspace, right);
  EXPECT(equal.find("has 4 channels, to be padded to 4") != std::string::npos);
  right.micros = kDivided;
  const Array dy = Random(XLA_FFI_DataType_BF16, layer.y);
  Array dw{XLA_FFI_DataType_BF16, layer.w, {}};
  right.which = "backward filter";
  EXPECT(Run(narrow_x, dy, dw, kWorkspace, right).find("ask for `partials`") != std::string::npos);
  EXPECT(Run(x, dy, dw, kWorkspace, right).find("of one type") != std::string::npos);

  // a plan that nobody has made before the recording began
  capturing = true;
  right.which = "forward";
  right.micros = {kBatch, 1, 0, 0, 1, 5, 5};
  const std::string error = Call(CudnnTargets().at("micro_conv").execute,
                                 XLA_FFI_ExecutionStage_EXECUTE, x, w, y, 60, right);
  capturing = false;
  EXPECT(error.find("before the plan was made") != std::string::npos);
}

}  // namespace
}  // namespace vmem

int main(int, char** argv) {
  EXPECT(vmem::OpenCudnn(argv[1]) == CUDNN_VERSION);
  static_assert(vmem::kChannelThreads == vmem::kSumThreads);
  vmem::HostBlock block(vmem::kSumThreads);
  vmem::TestOneOutput();
  vmem::TestEpilogues();
  vmem::TestPaddedChannels();
  vmem::TestPrologues(XLA_FFI_DataType_F32);
  vmem::TestPrologues(XLA_FFI_DataType_F64);
  vmem::TestPrologues(XLA_FFI_DataType_BF16);
  vmem::TestTrial();
  vmem::TestDeviation(XLA_FFI_DataType_F32, vmem::Layers());
  vmem::TestDeviation(XLA_FFI_DataType_F64, {vmem::Layers()[0]});
  vmem::TestDeviation(XLA_FFI_DataType_BF16, {vmem::Layers()[0]});
  vmem::TestDeviationOfPrologues();
  vmem::TestPasses(XLA_FFI_DataType_F32);
  vmem::TestPasses(XLA_FFI_DataType_F64);
  vmem::TestPasses(XLA_FFI_DataType_BF16);
  vmem::TestThreads();
  vmem::TestMisuse();
  std::puts("all passed");
}
