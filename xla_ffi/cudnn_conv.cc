// The call that does one convolution in micro-batches, as docs/ffi.md describes it.
#include <algorithm>
#include <string>
#include <string_view>

#include "cuda_backend.h"
#include "cudnn_runtime.h"
#include "handlers.h"
#include "targets.h"

namespace vmem {
namespace {

using Integers = ffi::Span<const std::int64_t>;

cudnnDataType_t TypeOf(ffi::DataType type) {
  switch (type) {
    case ffi::DataType::F32:
      return CUDNN_DATA_FLOAT;
    case ffi::DataType::BF16:
      return CUDNN_DATA_BFLOAT16;
    case ffi::DataType::F16:
      return CUDNN_DATA_HALF;
    case ffi::DataType::F64:
      return CUDNN_DATA_DOUBLE;
    default:
      throw Error(Code::kInvalidArgument, "values are f32, bf16, f16 or f64");
  }
}

// N, C, space from the order in memory.
Dims Logical(ffi::AnyBuffer::Dimensions dims, bool channels_last) {
  Dims result(dims.begin(), dims.end());
  if (channels_last && result.size() > 2) {
    std::rotate(result.begin() + 1, result.end() - 1, result.end());
  }
  return result;
}

struct Micro {
  std::int64_t samples = 0;
  bool bare = false;  // the epilogue is left to what follows the call
  ConvWay way;
};

std::vector<Micro> DecodeMicros(Integers flat) {
  std::size_t at = 0;
  auto next = [&] {
    if (at == flat.size()) throw Error(Code::kInvalidArgument, "`micros` ends too early");
    return flat[at++];
  };
  std::vector<Micro> micros;
  while (at < flat.size()) {
    Micro& micro = micros.emplace_back();
    micro.samples = next();
    micro.way.engine = next();
    micro.way.channels = next();
    micro.bare = next() != 0;
    for (std::int64_t knobs = next(); knobs > 0; --knobs) {
      const std::int64_t type = next();
      micro.way.knobs.emplace_back(type, next());
    }
  }
  return micros;
}

// A call, decoded and checked.
struct Call {
  ConvGeometry whole;
  ConvBuffers buffers;
  std::vector<Micro> micros;
  std::int64_t workspace = 0;  // bytes that are there
  bool partials = false;
};

void CheckMicros(const Call& call) {
  std::int64_t samples = 0;
  for (const Micro& micro : call.micros) {
    if (micro.samples <= 0) throw Error(Code::kInvalidArgument, "a micro-batch without samples");
    samples += micro.samples;
  }
  if (samples != call.whole.x[0]) {
    throw Error(Code::kInvalidArgument, "the micro-batches have " + std::to_string(samples) +
                                            " samples and the batch has " +
                                            std::to_string(call.whole.x[0]));
  }
  const bool adds = call.whole.pass == ConvPass::kBackwardFilter && !call.partials;
  for (const Micro& micro : call.micros) {
    if (micro.bare && (call.whole.prologue || call.whole.epilogue.sums)) {
      throw Error(Code::kInvalidArgument, "what a bare micro-batch leaves out is a bias alone");
    }
  }
  if (adds && call.micros.size() > 1 && !call.whole.CanAccumulate()) {
    throw Error(Code::kInvalidArgument, "sums of 16 bits lose what is added: ask for `partials`");
  }
}

// Scale and shift are operands only where there is a prologue, and a bias where there is one.
void BindVectors(Call& call, ffi::RemainingArgs more) {
  const std::size_t before = call.whole.prologue ? 2 : 0;
  const std::size_t count = before + (call.whole.epilogue.bias ? 1 : 0);
  if (more.size() != count) {
    throw Error(Code::kInvalidArgument, std::to_string(more.size()) + " more operands, and " +
                                            std::to_string(count - before) + " in the epilogue");
  }
  auto bind = [&](std::size_t i, const char* name, std::int64_t channels) {
    const auto vector = more.get<ffi::AnyBuffer>(i);
    const std::string the = std::string("the ") + name;
    if (!vector.has_value()) throw Error(Code::kInvalidArgument, the + " is no buffer");
    if (TypeOf(vector->element_type()) != call.whole.dtype ||
        static_cast<std::int64_t>(vector->element_count()) != channels) {
      throw Error(Code::kInvalidArgument, the + " is one value of the same type for each of " +
                                              std::to_string(channels) + " channels");
    }
    return vector->untyped_data();
  };
  if (call.whole.prologue) {
    call.buffers.scale = bind(0, "scale", call.whole.x[1]);
    call.buffers.shift = bind(1, "shift", call.whole.x[1]);
  }
  if (call.whole.epilogue.bias) call.buffers.bias = bind(before, "bias", call.whole.w[0]);
}

// The sums are a result only where the epilogue has them: of y, then of its squares, for each
// micro-batch.
void BindSums(Call& call, ffi::RemainingRets more) {
  const std::size_t count = call.whole.epilogue.sums ? 1 : 0;
  if (more.size() != count) {
    throw Error(Code::kInvalidArgument, std::to_string(more.size()) + " more results, and " +
                                            std::to_string(count) + " in the epilogue");
  }
  if (count == 0) return;
  const auto got = more.get<ffi::AnyBuffer>(0);
  if (!got.has_value()) throw Error(Code::kInvalidArgument, "the sums are no buffer");
  ffi::Result<ffi::AnyBuffer> sums = *got;
  const auto values = static_cast<std::int64_t>(sums->element_count());
  const auto micros = static_cast<std::int64_t>(call.micros.size());
  if (sums->element_type() != ffi::DataType::F32 || values != micros * 2 * call.whole.w[0]) {
    throw Error(Code::kInvalidArgument,
                "the sums are two values in f32 for each micro-batch and channel");
  }
  call.buffers.sums = sums->untyped_data();
}

Call Decode(ffi::AnyBuffer first, ffi::AnyBuffer second, ffi::RemainingArgs more,
            ffi::Result<ffi::AnyBuffer> result, ffi::Result<ffi::AnyBuffer> workspace,
            ffi::RemainingRets sums, std::string_view which, std::string_view epilogue, bool channels_last,
            Integers strides, Integers padding_low, Integers padding_high, Integers dilation,
            bool partials, Integers micros) {
  Call call;
  call.micros = DecodeMicros(micros);
  call.partials = partials;
  call.workspace = static_cast<std::int64_t>(workspace->size_bytes());
  call.buffers.workspace = workspace->untyped_data();

  ConvGeometry& whole = call.whole;
  whole.pass = ConvPassOf(std::string(which));
  whole.epilogue = ConvEpilogueOf(std::string(epilogue));
  whole.prologue = more.size() >= 2;
  whole.dtype = TypeOf(result->element_type());
  whole.channels_last = channels_last;
  whole.strides = Dims(strides.begin(), strides.end());
  whole.padding_low = Dims(padding_low.begin(), padding_low.end());
  whole.padding_high = Dims(padding_high.begin(), padding_high.end());
  whole.dilation = Dims(dilation.begin(), dilation.end());
  if (first.element_type() != result->element_type() ||
      second.element_type() != result->element_type()) {
    throw Error(Code::kInvalidArgument, "operands and result are of one type");
  }
  ffi::AnyBuffer::Dimensions made = result->dimensions();
  if (partials) {
    if (whole.pass != ConvPass::kBackwardFilter || made.size() == 0 ||
        made[0] != static_cast<std::int64_t>(call.micros.size())) {
      throw Error(Code::kInvalidArgument, "`partials` is one dw for each micro-batch");
    }
    made = ffi::AnyBuffer::Dimensions(made.begin() + 1, made.size() - 1);
  }
  struct Role {
    Dims* dims;
    void** data;
  };
  const Role x{&whole.x, &call.buffers.x};
  const Role w{&whole.w, &call.buffers.w};
  const Role y{&whole.y, &call.buffers.y};
  auto bind = [&](const Role& role, ffi::AnyBuffer::Dimensions dims, void* data) {
    *role.dims = Logical(dims, channels_last);
    *role.data = data;
  };
  const bool data = whole.pass == ConvPass::kBackwardData;
  const bool filter = whole.pass == ConvPass::kBackwardFilter;
  bind(data ? y : x, first.dimensions(), first.untyped_data());
  bind(filter ? y : w, second.dimensions(), second.untyped_data());
  bind(data ? x : filter ? w : y, made, result->untyped_data());

  whole.Check();
  BindVectors(call, more);
  BindSums(call, sums);
  CheckMicros(call);
  return call;
}

// Calls `use` with the plan, the padding and the buffers of each micro-batch, in order.
template <class Use>
void ForEachMicro(const Call& call, CudnnLease& lease, cudaStream_t stream, Use use) {
  const ConvGeometry& whole = call.whole;
  const bool adds = whole.pass == ConvPass::kBackwardFilter && !call.partials;
  auto offset = [](void* data, std::int64_t nbytes) { return static_cast<char*>(data) + nbytes; };
  ConvBuffers buffers = call.buffers;
  const std::int64_t vector = whole.w[0] * std::int64_t{sizeof(float)};
  bool first = true;
  for (const Micro& micro : call.micros) {
    ConvGeometry part = whole.WithBatch(micro.samples, adds && !first);
    if (micro.bare) part.epilogue = {};
    buffers.bias = micro.bare ? nullptr : call.buffers.bias;
    if (whole.epilogue.sums) buffers.squares = offset(buffers.sums, vector);
    const ConvPadding padding(part, micro.way.channels);
    const auto plan = lease.PlanFor(padding, micro.way, stream);
    const std::int64_t needs = padding.nbytes() + plan->workspace;
    if (needs > call.workspace) {
      throw Error(Code::kFailedPrecondition,
                  "engine " + std::to_string(micro.way.engine) + " needs " +
                      std::to_string(needs) + " bytes of workspace for " +
                      std::to_string(micro.samples) + " samples, and there are " +
                      std::to_string(call.workspace));
    }
    use(*plan, padding, buffers);
    buffers.x = offset(buffers.x, micro.samples * whole.SampleBytes(whole.x));
    buffers.y = offset(buffers.y, micro.samples * whole.SampleBytes(whole.y));
    if (whole.epilogue.sums) buffers.sums = offset(buffers.sums, 2 * vector);
    if (call.partials) buffers.w = offset(buffers.w, whole.w[0] * whole.SampleBytes(whole.w));
    first = false;
  }
}

// Before every run, and before it is recorded into a CUDA graph: a look-up after the first time.
struct Initialize {
  template <class... Args>
  ffi::Error operator()(cudaStream_t stream, std::int32_t device, Args... args) const {
    return Guard("micro_conv", [&] {
      const Call call = Decode(args...);
      CudnnLease lease(device);
      CudaBackend::DeviceGuard guard(device);
      ForEachMicro(call, lease, stream, [](const Plan&, const ConvPadding& padding,
                                           const ConvBuffers&) { padding.Load(); });
    });
  }
};

struct Execute {
  template <class... Args>
  ffi::Error operator()(cudaStream_t stream, std::int32_t device, Args... args) const {
    return Guard("micro_conv", [&] {
      const Call call = Decode(args...);
      CudnnLease lease(device);
      ForEachMicro(call, lease, stream,
                   [&](const Plan& plan, const ConvPadding& padding, const ConvBuffers& buffers) {
                     lease.Run(plan, padding, buffers, stream);
                   });
    });
  }
};

template <ffi::ExecutionStage stage>
auto BindConv() {
  return ffi::Ffi::Bind<stage>()
      .template Ctx<ffi::PlatformStream<cudaStream_t>>()
      .template Ctx<ffi::DeviceOrdinal>()  // a stream that is being recorded does not tell
      .template Arg<ffi::AnyBuffer>()  // x, or y
      .template Arg<ffi::AnyBuffer>()  // w, or y
      .RemainingArgs()                 // scale and shift of a prologue, a bias; or none of them
      .template Ret<ffi::AnyBuffer>()  // y, x or w
      .template Ret<ffi::AnyBuffer>()  // workspace
      .RemainingRets()                 // sums, or none
      .template Attr<std::string_view>("which")
      .template Attr<std::string_view>("epilogue")
      .template Attr<bool>("channels_last")
      .template Attr<Integers>("strides")
      .template Attr<Integers>("padding_low")
      .template Attr<Integers>("padding_high")
      .template Attr<Integers>("dilation")
      .template Attr<bool>("partials")
      .template Attr<Integers>("micros");
}

XLA_FFI_DEFINE_HANDLER(kInitialize, Initialize{}, BindConv<ffi::ExecutionStage::kInitialize>(),
                       {ffi::Traits::kCmdBufferCompatible});
// It launches the same kernels on the same buffers whenever it is called.
XLA_FFI_DEFINE_HANDLER(kExecute, Execute{}, BindConv<ffi::ExecutionStage::kExecute>(),
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace

Targets CudnnTargets() { return {{"micro_conv", {kExecute, kInitialize}}}; }

}  // namespace vmem
