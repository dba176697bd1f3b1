#include "cudnn_plans.h"

#include <algorithm>
#include <numeric>
#include <set>

#include "error.h"

// A handle still names the device of a graph and of a plan; the descriptors that are to take its
// place are for devices that are not here.
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"

namespace vmem {
namespace {

// cuDNN hands out so many at most, and says 0 when it is asked how many there are.
constexpr std::size_t kMostKnobs = 64;
constexpr std::size_t kMostNotes = 64;
static_assert(CUDNN_KNOB_TYPE_COUNTS <= kMostKnobs);
static_assert(CUDNN_NUMERICAL_NOTE_TYPE_COUNT <= kMostNotes);

// Bytes that engines like to read at once; XLA aligns whole buffers to more.
constexpr std::int64_t kAlignment = 16;

struct Graph {
  std::vector<Descriptor> parts;  // that `operations` are made of
  std::vector<Descriptor> operations;
  Descriptor graph;

  const Descriptor& Keep(Descriptor part) { return parts.emplace_back(std::move(part)); }
};

Descriptor MakeTensor(std::int64_t id, const ConvGeometry& geometry, const Dims& dims,
                      cudnnDataType_t dtype, std::int64_t alignment, bool is_virtual) {
  Descriptor tensor(CUDNN_BACKEND_TENSOR_DESCRIPTOR);
  tensor.Set(CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &dtype);
  tensor.Set(CUDNN_ATTR_TENSOR_DIMENSIONS, dims);
  tensor.Set(CUDNN_ATTR_TENSOR_STRIDES, geometry.StridesOf(dims));
  tensor.Set(CUDNN_ATTR_TENSOR_UNIQUE_ID, id);
  tensor.Set(CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, alignment);
  tensor.Set(CUDNN_ATTR_TENSOR_IS_VIRTUAL, CUDNN_TYPE_BOOLEAN, 1, &is_virtual);
  tensor.Finalize();
  return tensor;
}

// `unit` is what slices of the tensor begin at multiples of, in bytes.
Descriptor MakeTensor(std::int64_t id, const ConvGeometry& geometry, const Dims& dims,
                      std::int64_t unit) {
  return MakeTensor(id, geometry, dims, geometry.dtype, std::gcd(kAlignment, unit), false);
}

// One between two operations, that is never in memory.
Descriptor MakeVirtual(std::int64_t id, const ConvGeometry& geometry, const Dims& dims,
                       cudnnDataType_t dtype) {
  return MakeTensor(id, geometry, dims, dtype, kAlignment, true);
}

// One value for each of `channels`, of a tensor of as many dimensions as y.
Dims ChannelsOf(const ConvGeometry& geometry, std::int64_t channels) {
  Dims one(geometry.y.size(), 1);
  one[1] = channels;
  return one;
}

struct OperationNames {
  cudnnBackendDescriptorType_t operation;
  cudnnBackendAttributeName_t x, w, y, convolution, alpha, beta;
};

const OperationNames& NamesOf(ConvPass pass) {
  static constexpr OperationNames kForward = {
      CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR,
      CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_X,
      CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_W,
      CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_Y,
      CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_CONV_DESC,
      CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_ALPHA,
      CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_BETA};
  static constexpr OperationNames kBackwardData = {
      CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR,
      CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DX,
      CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_W,
      CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DY,
      CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_CONV_DESC,
      CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_ALPHA,
      CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_BETA};
  static constexpr OperationNames kBackwardFilter = {
      CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR,
      CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_X,
      CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DW,
      CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DY,
      CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_CONV_DESC,
      CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_ALPHA,
      CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_BETA};
  switch (pass) {
    case ConvPass::kForward:
      return kForward;
    case ConvPass::kBackwardData:
      return kBackwardData;
    case ConvPass::kBackwardFilter:
      break;
  }
  return kBackwardFilter;
}

template <class Scale>
void SetScales(Descriptor& operation, const OperationNames& names, cudnnBackendAttributeType_t type,
               bool accumulate) {
  const Scale alpha = 1;
  const Scale beta = accumulate ? 1 : 0;
  operation.Set(names.alpha, type, 1, &alpha);
  operation.Set(names.beta, type, 1, &beta);
}

// An operation by element on `x`, and on `b` if there is one.
Descriptor MakePointwise(cudnnPointwiseMode_t mode, cudnnDataType_t computed_in,
                         const Descriptor& x, const Descriptor* b, const Descriptor& y,
                         Graph& graph) {
  Descriptor pointwise(CUDNN_BACKEND_POINTWISE_DESCRIPTOR);
  pointwise.Set(CUDNN_ATTR_POINTWISE_MODE, CUDNN_TYPE_POINTWISE_MODE, 1, &mode);
  pointwise.Set(CUDNN_ATTR_POINTWISE_MATH_PREC, CUDNN_TYPE_DATA_TYPE, 1, &computed_in);
  pointwise.Finalize();
  Descriptor operation(CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR);
  operation.Set(CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, pointwise);
  operation.Set(CUDNN_ATTR_OPERATION_POINTWISE_XDESC, x);
  if (b != nullptr) operation.Set(CUDNN_ATTR_OPERATION_POINTWISE_BDESC, *b);
  operation.Set(CUDNN_ATTR_OPERATION_POINTWISE_YDESC, y);
  operation.Finalize();
  graph.Keep(std::move(pointwise));
  return operation;
}

// ReLU(x * scale + shift), in float32: what is convolved in place of x. The engines for it round that
// to the type of x themselves, and have scale and shift in that type alone. (cuDNN 9.28 has such
// engines with float32 between the operations, and none with scale and shift in float32.)
const Descriptor& AddPrologue(const ConvGeometry& g, const Descriptor& x, Graph& made) {
  const Dims one = ChannelsOf(g, g.x[1]);
  const auto nbytes = static_cast<std::int64_t>(g.ItemSize()) * g.x[1];
  constexpr cudnnDataType_t kIn = CUDNN_DATA_FLOAT;
  const Descriptor& scale = made.Keep(MakeTensor(kIdOfScale, g, one, nbytes));
  const Descriptor& shift = made.Keep(MakeTensor(kIdOfShift, g, one, nbytes));
  const Descriptor& scaled = made.Keep(MakeVirtual('m', g, g.x, kIn));
  const Descriptor& shifted = made.Keep(MakeVirtual('n', g, g.x, kIn));
  const Descriptor& convolved = made.Keep(MakeVirtual('r', g, g.x, kIn));
  made.operations.push_back(MakePointwise(CUDNN_POINTWISE_MUL, kIn, x, &scale, scaled, made));
  made.operations.push_back(MakePointwise(CUDNN_POINTWISE_ADD, kIn, scaled, &shift, shifted, made));
  made.operations.push_back(
      MakePointwise(CUDNN_POINTWISE_RELU_FWD, kIn, shifted, nullptr, convolved, made));
  return convolved;
}

// Sums of `y` and of its squares, in float32. By the graph they are those of y as it is stored.
void AddSums(const ConvGeometry& g, const Descriptor& y, Graph& made) {
  constexpr cudnnDataType_t kIn = CUDNN_DATA_FLOAT;
  const cudnnGenStatsMode_t mode = CUDNN_GENSTATS_SUM_SQSUM;
  const Dims one = ChannelsOf(g, g.y[1]);
  const std::int64_t alignment = std::gcd(kAlignment, g.y[1] * std::int64_t{sizeof(float)});
  const Descriptor& sums = made.Keep(MakeTensor(kIdOfSums, g, one, kIn, alignment, false));
  const Descriptor& squares = made.Keep(MakeTensor(kIdOfSquares, g, one, kIn, alignment, false));
  Descriptor operation(CUDNN_BACKEND_OPERATION_GEN_STATS_DESCRIPTOR);
  operation.Set(CUDNN_ATTR_OPERATION_GENSTATS_MODE, CUDNN_TYPE_GENSTATS_MODE, 1, &mode);
  operation.Set(CUDNN_ATTR_OPERATION_GENSTATS_MATH_PREC, CUDNN_TYPE_DATA_TYPE, 1, &kIn);
  operation.Set(CUDNN_ATTR_OPERATION_GENSTATS_XDESC, y);
  operation.Set(CUDNN_ATTR_OPERATION_GENSTATS_SUMDESC, sums);
  operation.Set(CUDNN_ATTR_OPERATION_GENSTATS_SQSUMDESC, squares);
  operation.Finalize();
  made.operations.push_back(std::move(operation));
}

Graph MakeGraph(const ConvGeometry& given, const ConvDevice& device) {
  const ConvGeometry g = given.Widened();
  const bool twice = g.dtype == CUDNN_DATA_DOUBLE;
  const cudnnDataType_t computed_in = twice ? CUDNN_DATA_DOUBLE : CUDNN_DATA_FLOAT;
  const cudnnConvolutionMode_t mode = CUDNN_CROSS_CORRELATION;

  Graph made;
  made.parts.reserve(32);  // so that references to them hold
  const Descriptor& x = made.Keep(MakeTensor(kIdOfX, g, g.x, g.SampleBytes(g.x)));
  const Descriptor& w = made.Keep(MakeTensor(kIdOfW, g, g.w, g.w[0] * g.SampleBytes(g.w)));
  const Descriptor& y = made.Keep(MakeTensor(kIdOfY, g, g.y, g.SampleBytes(g.y)));
  const auto [bias, relu, sums] = g.epilogue;
  const Descriptor& operand = g.prologue ? AddPrologue(g, x, made) : x;
  const Descriptor& convolved = bias ? made.Keep(MakeVirtual('c', g, g.y, computed_in)) : y;

  const Descriptor& convolution =
      made.Keep(Descriptor(CUDNN_BACKEND_CONVOLUTION_DESCRIPTOR));
  Descriptor& set = made.parts.back();
  set.Set(CUDNN_ATTR_CONVOLUTION_SPATIAL_DIMS, static_cast<std::int64_t>(g.strides.size()));
  set.Set(CUDNN_ATTR_CONVOLUTION_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &computed_in);
  set.Set(CUDNN_ATTR_CONVOLUTION_CONV_MODE, CUDNN_TYPE_CONVOLUTION_MODE, 1, &mode);
  set.Set(CUDNN_ATTR_CONVOLUTION_PRE_PADDINGS, g.padding_low);
  set.Set(CUDNN_ATTR_CONVOLUTION_POST_PADDINGS, g.padding_high);
  set.Set(CUDNN_ATTR_CONVOLUTION_DILATIONS, g.dilation);
  set.Set(CUDNN_ATTR_CONVOLUTION_FILTER_STRIDES, g.strides);
  set.Finalize();

  const OperationNames& names = NamesOf(g.pass);
  Descriptor operation(names.operation);
  operation.Set(names.x, operand);
  operation.Set(names.w, w);
  operation.Set(names.y, convolved);
  operation.Set(names.convolution, convolution);
  if (twice) {
    SetScales<double>(operation, names, CUDNN_TYPE_DOUBLE, g.accumulate);
  } else {
    SetScales<float>(operation, names, CUDNN_TYPE_FLOAT, g.accumulate);
  }
  operation.Finalize();
  made.operations.push_back(std::move(operation));
  if (bias) {
    const Dims one = ChannelsOf(g, g.y[1]);
    const auto nbytes = static_cast<std::int64_t>(g.ItemSize()) * g.y[1];
    const Descriptor& b = made.Keep(MakeTensor(kIdOfBias, g, one, nbytes));
    const Descriptor& added = relu ? made.Keep(MakeVirtual('a', g, g.y, computed_in)) : y;
    made.operations.push_back(
        MakePointwise(CUDNN_POINTWISE_ADD, computed_in, convolved, &b, added, made));
    if (relu) {
      made.operations.push_back(
          MakePointwise(CUDNN_POINTWISE_RELU_FWD, computed_in, added, nullptr, y, made));
    }
  }
  if (sums) AddSums(g, y, made);

  made.graph = Descriptor(CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
  made.graph.Set(CUDNN_ATTR_OPERATIONGRAPH_OPS, made.operations);
  if (device.handle != nullptr) {
    made.graph.Set(CUDNN_ATTR_OPERATIONGRAPH_HANDLE, CUDNN_TYPE_HANDLE, 1, &device.handle);
  }
  made.graph.Finalize();
  return made;
}

std::vector<Descriptor> HeuristicConfigs(const Graph& graph, const ConvDevice& device,
                                         cudnnBackendHeurMode_t mode) {
  Descriptor heuristics(CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR);
  heuristics.Set(CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, graph.graph);
  heuristics.Set(CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, 1, &mode);
  if (device.described) heuristics.Set(CUDNN_ATTR_ENGINEHEUR_DEVICEPROP, device.described);
  heuristics.Finalize();
  const std::int64_t count = heuristics.Get(CUDNN_ATTR_ENGINEHEUR_RESULTS,
                                            CUDNN_TYPE_BACKEND_DESCRIPTOR, 0, nullptr);
  std::vector<Descriptor> configs;
  for (std::int64_t i = 0; i < count; ++i) {
    configs.emplace_back(CUDNN_BACKEND_ENGINECFG_DESCRIPTOR);
  }
  heuristics.Get(CUDNN_ATTR_ENGINEHEUR_RESULTS, configs);
  return configs;
}

Descriptor ConfigOf(const Graph& graph, const ConvDevice& device, std::int64_t index,
                    const Knobs& knobs) {
  Descriptor engine(CUDNN_BACKEND_ENGINE_DESCRIPTOR);
  engine.Set(CUDNN_ATTR_ENGINE_OPERATION_GRAPH, graph.graph);
  engine.Set(CUDNN_ATTR_ENGINE_GLOBAL_INDEX, index);
  if (device.described) engine.Set(CUDNN_ATTR_ENGINE_DEVICEPROP, device.described);
  engine.Finalize();
  Descriptor config(CUDNN_BACKEND_ENGINECFG_DESCRIPTOR);
  config.Set(CUDNN_ATTR_ENGINECFG_ENGINE, engine);
  std::vector<Descriptor> choices;
  for (const auto& [type, value] : knobs) {
    const auto knob = static_cast<cudnnBackendKnobType_t>(type);
    Descriptor& choice = choices.emplace_back(CUDNN_BACKEND_KNOB_CHOICE_DESCRIPTOR);
    choice.Set(CUDNN_ATTR_KNOB_CHOICE_KNOB_TYPE, CUDNN_TYPE_KNOB_TYPE, 1, &knob);
    choice.Set(CUDNN_ATTR_KNOB_CHOICE_KNOB_VALUE, value);
    choice.Finalize();
  }
  if (!choices.empty()) config.Set(CUDNN_ATTR_ENGINECFG_KNOB_CHOICES, choices);
  config.Finalize();
  return config;
}

Plan PlanOf(const Descriptor& config, const ConvDevice& device) {
  Plan plan;
  plan.descriptor = Descriptor(CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR);
  plan.descriptor.Set(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, config);
  if (device.described) {
    plan.descriptor.Set(CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP, device.described);
  } else {
    plan.descriptor.Set(CUDNN_ATTR_EXECUTION_PLAN_HANDLE, CUDNN_TYPE_HANDLE, 1, &device.handle);
  }
  plan.descriptor.Finalize();
  plan.workspace = plan.descriptor.GetInt(CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE);
  return plan;
}

template <class Note>
std::vector<std::int64_t> NotesOf(const Descriptor& engine, cudnnBackendAttributeName_t name,
                                  cudnnBackendAttributeType_t type) {
  std::vector<Note> notes(kMostNotes);
  notes.resize(engine.Get(name, type, static_cast<std::int64_t>(notes.size()), notes.data()));
  return {notes.begin(), notes.end()};
}

Knobs KnobsOf(const Descriptor& config) {
  std::vector<Descriptor> choices;
  while (choices.size() < kMostKnobs) choices.emplace_back(CUDNN_BACKEND_KNOB_CHOICE_DESCRIPTOR);
  config.Get(CUDNN_ATTR_ENGINECFG_KNOB_CHOICES, choices);
  Knobs knobs;
  for (const Descriptor& choice : choices) {
    cudnnBackendKnobType_t type{};
    choice.Get(CUDNN_ATTR_KNOB_CHOICE_KNOB_TYPE, CUDNN_TYPE_KNOB_TYPE, 1, &type);
    knobs.emplace_back(type, choice.GetInt(CUDNN_ATTR_KNOB_CHOICE_KNOB_VALUE));
  }
  std::sort(knobs.begin(), knobs.end());
  return knobs;
}

// Of which engine with which knobs a configuration is; not yet whether it works.
PlanInfo InfoOf(const Descriptor& config, const char* source) {
  std::vector<Descriptor> engines;
  engines.emplace_back(CUDNN_BACKEND_ENGINE_DESCRIPTOR);
  config.Get(CUDNN_ATTR_ENGINECFG_ENGINE, engines);
  const Descriptor& engine = engines.at(0);
  PlanInfo info;
  info.engine = engine.GetInt(CUDNN_ATTR_ENGINE_GLOBAL_INDEX);
  info.knobs = KnobsOf(config);
  info.notes = NotesOf<cudnnBackendNumericalNote_t>(engine, CUDNN_ATTR_ENGINE_NUMERICAL_NOTE,
                                                    CUDNN_TYPE_NUMERICAL_NOTE);
  info.behaviour = NotesOf<cudnnBackendBehaviorNote_t>(engine, CUDNN_ATTR_ENGINE_BEHAVIOR_NOTE,
                                                       CUDNN_TYPE_BEHAVIOR_NOTE);
  info.source = source;
  return info;
}

bool Has(const std::vector<std::int64_t>& notes, std::int64_t note) {
  return std::find(notes.begin(), notes.end(), note) != notes.end();
}

// Runs `attempt`. cuDNN has no question whether an engine can do something: it is made, or fails.
template <class Attempt>
void Try(Attempt attempt) {
  try {
    attempt();
  } catch (const Error& error) {
    if (error.code() != Code::kInternal) throw;  // not this engine's failure, but the library's
  }
}

}  // namespace

ConvDevice ConvDevice::Here(cudnnHandle_t handle) {
  ConvDevice device;
  device.handle = handle;
  return device;
}

ConvDevice ConvDevice::Described(const std::string& json) {
  ConvDevice device;
  device.described = Descriptor(CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR);
  device.described.Set(CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION, CUDNN_TYPE_CHAR,
                       static_cast<std::int64_t>(json.size()), json.data());
  device.described.Finalize();
  return device;
}

std::vector<PlanInfo> FindPlans(const ConvGeometry& geometry, const ConvDevice& device,
                                const std::vector<std::int64_t>& banned, bool compiling) {
  const Graph graph = MakeGraph(geometry, device);
  Graph adding;
  if (geometry.CanAccumulate()) {
    adding = MakeGraph(geometry.WithBatch(geometry.x[0], true), device);
  }
  std::vector<PlanInfo> plans;
  std::set<std::pair<std::int64_t, Knobs>> seen;
  auto add = [&](const Descriptor& config, const char* source) {
    Try([&] {
      PlanInfo info = InfoOf(config, source);
      if (!seen.insert({info.engine, info.knobs}).second) return;
      for (std::int64_t note : banned) {
        if (Has(info.notes, note)) return;
      }
      if (!compiling && Has(info.behaviour, CUDNN_BEHAVIOR_NOTE_RUNTIME_COMPILATION)) return;
      info.workspace = PlanOf(config, device).workspace;
      if (adding.graph) {
        const Descriptor same = ConfigOf(adding, device, info.engine, info.knobs);
        info.workspace = std::max(info.workspace, PlanOf(same, device).workspace);
      }
      plans.push_back(std::move(info));
    });
  };
  constexpr std::pair<cudnnBackendHeurMode_t, const char*> kModes[] = {
      {CUDNN_HEUR_MODE_A, "A"},
      {CUDNN_HEUR_MODE_B, "B"},
      {CUDNN_HEUR_MODE_FALLBACK, "fallback"}};
  for (const auto& [mode, source] : kModes) {
    Try([&, mode = mode, source = source] {
      for (const Descriptor& config : HeuristicConfigs(graph, device, mode)) add(config, source);
    });
  }
  const std::int64_t engines = graph.graph.GetInt(CUDNN_ATTR_OPERATIONGRAPH_ENGINE_GLOBAL_COUNT);
  for (std::int64_t engine = 0; engine < engines; ++engine) {
    Try([&] { add(ConfigOf(graph, device, engine, {}), "default"); });
  }
  return plans;
}

Plan MakePlan(const ConvGeometry& geometry, const ConvDevice& device, std::int64_t engine,
              const Knobs& knobs) {
  return PlanOf(ConfigOf(MakeGraph(geometry, device), device, engine, knobs), device);
}

}  // namespace vmem
