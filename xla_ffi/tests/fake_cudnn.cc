// A cuDNN for conv_test: the part of the backend API that the convolution call uses, on the CPU.
// What it computes follows from the descriptors that it was given, so that they are tested, too.
//
// It has kEngines engines; each wants a workspace of its own size, and writes all of it. The last
// three are wrong, as some of cuDNN's are: kShifting pads one more before x than it was told, kIdle
// computes nothing, and kForgetful leaves the first sample out of its sums.
#include <cudnn.h>

#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <set>
#include <vector>

namespace {

constexpr std::int64_t kEngines = 6;
constexpr std::int64_t kShifting = 3;
constexpr std::int64_t kIdle = 4;
constexpr std::int64_t kForgetful = 5;

struct Object;
struct Value {
  std::vector<char> bytes;
  std::vector<std::shared_ptr<Object>> objects;
};
struct Object {
  cudnnBackendDescriptorType_t type;
  std::map<int, Value> values;

  template <class T>
  std::vector<T> All(int name) const {
    const std::vector<char>& bytes = values.at(name).bytes;
    std::vector<T> result(bytes.size() / sizeof(T));
    std::memcpy(result.data(), bytes.data(), bytes.size());
    return result;
  }
  template <class T>
  T One(int name) const {
    return All<T>(name).at(0);
  }
  const Object& Child(int name) const { return *values.at(name).objects.at(0); }
};

Object& ObjectOf(cudnnBackendDescriptor_t raw) {
  return **static_cast<std::shared_ptr<Object>*>(raw);
}

std::size_t SizeOf(cudnnBackendAttributeType_t type) {
  switch (type) {
    case CUDNN_TYPE_INT64:
    case CUDNN_TYPE_DOUBLE:
    case CUDNN_TYPE_VOID_PTR:
    case CUDNN_TYPE_HANDLE:
      return 8;
    case CUDNN_TYPE_CHAR:
    case CUDNN_TYPE_BOOLEAN:
      return 1;
    default:
      return 4;
  }
}

struct Tensor {
  cudnnDataType_t type;
  std::vector<std::int64_t> dims, strides;
  char* data = nullptr;

  std::int64_t Offset(const std::vector<std::int64_t>& at) const {
    std::int64_t offset = 0;
    for (std::size_t i = 0; i < at.size(); ++i) offset += at[i] * strides[i];
    return offset;
  }
  double Read(std::int64_t offset) const {
    if (type == CUDNN_DATA_DOUBLE) return reinterpret_cast<double*>(data)[offset];
    if (type == CUDNN_DATA_FLOAT) return reinterpret_cast<float*>(data)[offset];
    const auto bits =
        static_cast<std::uint32_t>(reinterpret_cast<std::uint16_t*>(data)[offset]) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
  }
  void Write(std::int64_t offset, double number) const {
    const auto value = static_cast<float>(number);
    if (type == CUDNN_DATA_DOUBLE) {
      reinterpret_cast<double*>(data)[offset] = number;
    } else if (type == CUDNN_DATA_FLOAT) {
      reinterpret_cast<float*>(data)[offset] = value;
    } else {
      std::uint32_t bits;
      std::memcpy(&bits, &value, sizeof bits);
      reinterpret_cast<std::uint16_t*>(data)[offset] =
          static_cast<std::uint16_t>((bits + 0x8000U) >> 16);
    }
  }
};

// Calls `use` with every index below `dims`.
template <class Use>
void ForEach(const std::vector<std::int64_t>& dims, Use use) {
  std::vector<std::int64_t> at(dims.size(), 0);
  for (;;) {
    use(at);
    std::size_t i = at.size();
    while (i-- > 0) {
      if (++at[i] < dims[i]) break;
      at[i] = 0;
    }
    if (i == static_cast<std::size_t>(-1)) return;
  }
}

struct Names {
  int x, w, y, convolution, alpha, beta;
};

Names NamesOf(cudnnBackendDescriptorType_t operation) {
  switch (operation) {
    case CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR:
      return {CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_X,
              CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_W,
              CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_Y,
              CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_CONV_DESC,
              CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_ALPHA,
              CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_BETA};
    case CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR:
      return {CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DX,
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_W,
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DY,
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_CONV_DESC,
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_ALPHA,
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_BETA};
    default:
      return {CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_X,
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DW,
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DY,
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_CONV_DESC,
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_ALPHA,
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_BETA};
  }
}

const Object& EngineOf(const Object& plan) {
  return plan.Child(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG).Child(CUDNN_ATTR_ENGINECFG_ENGINE);
}

const Object& GraphOf(const Object& plan) {
  return EngineOf(plan).Child(CUDNN_ATTR_ENGINE_OPERATION_GRAPH);
}

// The operations of a graph: those by element before its convolution, it, and what follows it.
struct Operations {
  std::vector<const Object*> before, behind;
  const Object* convolution = nullptr;
};

Operations OperationsOf(const Object& graph) {
  Operations found;
  for (const auto& operation : graph.values.at(CUDNN_ATTR_OPERATIONGRAPH_OPS).objects) {
    const bool pointwise = operation->type == CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR;
    const bool stats = operation->type == CUDNN_BACKEND_OPERATION_GEN_STATS_DESCRIPTOR;
    if (!pointwise && !stats) {
      found.convolution = operation.get();
    } else {
      (found.convolution == nullptr ? found.before : found.behind).push_back(operation.get());
    }
  }
  return found;
}

std::int64_t WorkspaceOf(const Object& plan) {
  const Object& operation = *OperationsOf(GraphOf(plan)).convolution;
  const Object& x = operation.Child(NamesOf(operation.type).x);
  const auto engine = EngineOf(plan).One<std::int64_t>(CUDNN_ATTR_ENGINE_GLOBAL_INDEX);
  return engine * 10 * x.All<std::int64_t>(CUDNN_ATTR_TENSOR_DIMENSIONS).at(0);
}

Tensor TensorOf(const Object& descriptor, const Object& pack) {
  const auto ids = pack.All<std::int64_t>(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS);
  const auto pointers = pack.All<char*>(CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS);
  Tensor tensor;
  tensor.type = descriptor.One<cudnnDataType_t>(CUDNN_ATTR_TENSOR_DATA_TYPE);
  tensor.dims = descriptor.All<std::int64_t>(CUDNN_ATTR_TENSOR_DIMENSIONS);
  tensor.strides = descriptor.All<std::int64_t>(CUDNN_ATTR_TENSOR_STRIDES);
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] == descriptor.One<std::int64_t>(CUDNN_ATTR_TENSOR_UNIQUE_ID)) {
      tensor.data = pointers[i];
    }
  }
  const auto alignment = descriptor.One<std::int64_t>(CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT);
  const bool aligned = reinterpret_cast<std::uintptr_t>(tensor.data) % alignment == 0;
  return aligned ? tensor : Tensor{};
}

// Each of some operations by element, on a value of one channel.
double Applied(const std::vector<const Object*>& operations, const Object& pack,
               std::int64_t channel, double value) {
  for (const Object* each : operations) {
    const Object& operation = *each;
    if (operation.type != CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR) continue;
    const auto mode = operation.Child(CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR)
                          .One<cudnnPointwiseMode_t>(CUDNN_ATTR_POINTWISE_MODE);
    if (mode == CUDNN_POINTWISE_RELU_FWD) {
      value = value > 0 ? value : 0;
      continue;
    }
    const Tensor b = TensorOf(operation.Child(CUDNN_ATTR_OPERATION_POINTWISE_BDESC), pack);
    const double other = b.Read(channel * b.strides[1]);
    value = mode == CUDNN_POINTWISE_MUL ? value * other : value + other;
  }
  return value;
}

// Sums of y and of its squares for each channel, from this sample on.
void AddStatistics(const Object& operation, const Object& pack, const Tensor& y,
                   std::int64_t first) {
  const Tensor sums = TensorOf(operation.Child(CUDNN_ATTR_OPERATION_GENSTATS_SUMDESC), pack);
  const Tensor squares = TensorOf(operation.Child(CUDNN_ATTR_OPERATION_GENSTATS_SQSUMDESC), pack);
  for (std::int64_t channel = 0; channel < y.dims[1]; ++channel) {
    double sum = 0;
    double square = 0;
    ForEach(y.dims, [&](const auto& at) {
      if (at[1] != channel || at[0] < first) return;
      const double value = y.Read(y.Offset(at));
      sum += value;
      square += value * value;
    });
    sums.Write(channel * sums.strides[1], sum);
    squares.Write(channel * squares.strides[1], square);
  }
}

void Convolve(const Object& graph, const Object& pack, const Tensor& x, const Tensor& w,
              const Tensor& y, std::int64_t shift) {
  const Operations operations = OperationsOf(graph);
  const Object& operation = *operations.convolution;
  const Names names = NamesOf(operation.type);
  const Object& convolution = operation.Child(names.convolution);
  const auto strides = convolution.All<std::int64_t>(CUDNN_ATTR_CONVOLUTION_FILTER_STRIDES);
  const auto padding = convolution.All<std::int64_t>(CUDNN_ATTR_CONVOLUTION_PRE_PADDINGS);
  const auto dilation = convolution.All<std::int64_t>(CUDNN_ATTR_CONVOLUTION_DILATIONS);
  const bool twice = y.type == CUDNN_DATA_DOUBLE;
  const double beta = twice ? operation.One<double>(names.beta) : operation.One<float>(names.beta);
  const bool forward = operation.type == CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR;
  const bool data = operation.type == CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR;
  const Tensor& result = forward ? y : data ? x : w;
  std::map<std::int64_t, double> sums;
  ForEach(result.dims, [&](const auto& at) { sums[result.Offset(at)] = 0; });
  const std::int64_t outputs_of_group = w.dims[0] / (x.dims[1] / w.dims[1]);
  ForEach(y.dims, [&](const auto& out) {
    ForEach(w.dims, [&](std::vector<std::int64_t> tap) {
      if (tap[0] != out[1]) return;
      std::vector<std::int64_t> in = out;
      in[1] = out[1] / outputs_of_group * w.dims[1] + tap[1];
      for (std::size_t i = 2; i < in.size(); ++i) {
        in[i] = out[i] * strides[i - 2] + tap[i] * dilation[i - 2] - padding[i - 2] - shift;
        if (in[i] < 0 || in[i] >= x.dims[i]) return;
      }
      const std::int64_t xi = x.Offset(in);
      const std::int64_t wi = w.Offset(tap);
      const std::int64_t yi = y.Offset(out);
      if (data) {
        sums[xi] += y.Read(yi) * w.Read(wi);
        return;
      }
      const double operand = Applied(operations.before, pack, in[1], x.Read(xi));
      if (forward) sums[yi] += operand * w.Read(wi);
      if (!forward) sums[wi] += operand * y.Read(yi);
    });
  });
  ForEach(result.dims, [&](const auto& at) {
    const std::int64_t offset = result.Offset(at);
    const double sum = Applied(operations.behind, pack, at[1], sums[offset]);
    result.Write(offset, beta == 0 ? sum : sum + beta * result.Read(offset));
  });
}

}  // namespace

#define FAKE extern "C" __attribute__((visibility("default")))

FAKE std::size_t cudnnGetVersion() { return CUDNN_VERSION; }
FAKE const char* cudnnGetErrorString(cudnnStatus_t) { return "fake error"; }
FAKE void cudnnGetLastErrorString(char* message, std::size_t size) {
  std::strncpy(message, "for a reason", size);
}
FAKE cudnnStatus_t cudnnCreate(cudnnHandle_t* handle) {
  *handle = reinterpret_cast<cudnnHandle_t>(0x1234);
  return CUDNN_STATUS_SUCCESS;
}
FAKE cudnnStatus_t cudnnDestroy(cudnnHandle_t) { return CUDNN_STATUS_SUCCESS; }
FAKE cudnnStatus_t cudnnSetStream(cudnnHandle_t, cudaStream_t) { return CUDNN_STATUS_SUCCESS; }

FAKE cudnnStatus_t cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t type,
                                                cudnnBackendDescriptor_t* raw) {
  *raw = new std::shared_ptr<Object>(new Object{type, {}});
  return CUDNN_STATUS_SUCCESS;
}

FAKE cudnnStatus_t cudnnBackendDestroyDescriptor(cudnnBackendDescriptor_t raw) {
  delete static_cast<std::shared_ptr<Object>*>(raw);
  return CUDNN_STATUS_SUCCESS;
}

FAKE cudnnStatus_t cudnnBackendSetAttribute(cudnnBackendDescriptor_t raw,
                                            cudnnBackendAttributeName_t name,
                                            cudnnBackendAttributeType_t type, std::int64_t count,
                                            const void* from) {
  Value value;
  if (type == CUDNN_TYPE_BACKEND_DESCRIPTOR) {
    auto* all = static_cast<const cudnnBackendDescriptor_t*>(from);
    for (std::int64_t i = 0; i < count; ++i) {
      value.objects.push_back(*static_cast<std::shared_ptr<Object>*>(all[i]));
    }
  } else {
    auto* bytes = static_cast<const char*>(from);
    value.bytes.assign(bytes, bytes + count * SizeOf(type));
  }
  ObjectOf(raw).values[name] = value;
  return CUDNN_STATUS_SUCCESS;
}

FAKE cudnnStatus_t cudnnBackendGetAttribute(const cudnnBackendDescriptor_t raw,
                                            cudnnBackendAttributeName_t name,
                                            cudnnBackendAttributeType_t, std::int64_t,
                                            std::int64_t* count, void* to) {
  if (name != CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE) return CUDNN_STATUS_NOT_SUPPORTED;
  *count = 1;
  *static_cast<std::int64_t*>(to) = WorkspaceOf(ObjectOf(raw));
  return CUDNN_STATUS_SUCCESS;
}

FAKE cudnnStatus_t cudnnBackendFinalize(cudnnBackendDescriptor_t raw) {
  const Object& object = ObjectOf(raw);
  const bool engine = object.type == CUDNN_BACKEND_ENGINE_DESCRIPTOR;
  if (engine && object.One<std::int64_t>(CUDNN_ATTR_ENGINE_GLOBAL_INDEX) >= kEngines) {
    return CUDNN_STATUS_NOT_SUPPORTED;
  }
  return CUDNN_STATUS_SUCCESS;
}

FAKE cudnnStatus_t cudnnBackendExecute(cudnnHandle_t, cudnnBackendDescriptor_t raw,
                                       cudnnBackendDescriptor_t raw_pack) {
  const Object& plan = ObjectOf(raw);
  const Object& pack = ObjectOf(raw_pack);
  const Object& graph = GraphOf(plan);
  const Operations operations = OperationsOf(graph);
  const Object& operation = *operations.convolution;
  const Names names = NamesOf(operation.type);
  const Object* statistics = nullptr;
  const Object* y_descriptor = &operation.Child(names.y);
  for (const Object* each : operations.behind) {
    if (each->type == CUDNN_BACKEND_OPERATION_GEN_STATS_DESCRIPTOR) {
      statistics = each;
      if (&each->Child(CUDNN_ATTR_OPERATION_GENSTATS_XDESC) != y_descriptor) {
        return CUDNN_STATUS_BAD_PARAM;
      }
    } else {
      y_descriptor = &each->Child(CUDNN_ATTR_OPERATION_POINTWISE_YDESC);
    }
  }
  const Object& x_descriptor =
      operations.before.empty()
          ? operation.Child(names.x)
          : operations.before[0]->Child(CUDNN_ATTR_OPERATION_POINTWISE_XDESC);
  const Tensor x = TensorOf(x_descriptor, pack);
  const Tensor w = TensorOf(operation.Child(names.w), pack);
  const Tensor y = TensorOf(*y_descriptor, pack);
  if (x.data == nullptr || w.data == nullptr || y.data == nullptr) return CUDNN_STATUS_BAD_PARAM;
  std::memset(pack.One<char*>(CUDNN_ATTR_VARIANT_PACK_WORKSPACE), 0xFF, WorkspaceOf(plan));
  const auto engine = EngineOf(plan).One<std::int64_t>(CUDNN_ATTR_ENGINE_GLOBAL_INDEX);
  if (engine == kIdle) return CUDNN_STATUS_SUCCESS;
  Convolve(graph, pack, x, w, y, engine == kShifting ? 1 : 0);
  if (statistics != nullptr) AddStatistics(*statistics, pack, y, engine == kForgetful ? 1 : 0);
  return CUDNN_STATUS_SUCCESS;
}
