// The only nanobind file: names to functions and structs, no logic. Devices are pairs (platform,
// ordinal).
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <string>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "compression.h"
#include "cpu_backend.h"
#include "cpu_compression.h"
#include "engine.h"
#include "error.h"
#include "layout.h"
#include "targets.h"
#include "teardown.h"
#ifdef VMEM_JAX_CUDA
#include "cuda_backend.h"
#endif
#ifdef VMEM_JAX_KERNELS
#include "cuda_compression.h"
#endif
#ifdef VMEM_JAX_CUDNN
#include "cuda_channels.h"
#include "cudnn_runtime.h"
#include "cudnn_trial.h"
#endif

namespace nb = nanobind;
using nb::literals::operator""_a;

namespace vmem {
namespace {

// Calls `use` with the engine of `platform`.
template <class Use>
auto WithEngine(const std::string& platform, Use use) {
#ifdef VMEM_JAX_CUDA
  if (platform == CudaBackend::kPlatform) return use(Engine<CudaBackend>::Get());
#endif
  if (platform != CpuBackend::kPlatform) {
    throw Error(Code::kInvalidArgument, "this build has no handlers for platform " + platform);
  }
  return use(Engine<CpuBackend>::Get());
}

template <class Use>
void ForEveryEngine(Use use) {
  use(Engine<CpuBackend>::Get());
#ifdef VMEM_JAX_CUDA
  use(Engine<CudaBackend>::Get());
#endif
}

std::int64_t CreateArena(std::vector<SlotLayout> slots, std::size_t nbytes) {
  return Layouts::Get().Add(Layout(std::move(slots), nbytes));
}

void FreeArena(std::int64_t id) {
  if (!Layouts::Get().Remove(id)) throw Unknown(kArenaWords, id);
  ForEveryEngine([&](auto& engine) { engine.Free(id); });
}

// Calls `use` with the stores of `platform`.
template <class Use>
auto WithStores(const std::string& platform, Use use) {
#ifdef VMEM_JAX_KERNELS
  if (platform == CudaBackend::kPlatform) return use(Stores<CudaCompression>::Get());
#endif
  if (platform != CpuBackend::kPlatform) {
    throw Error(Code::kInvalidArgument,
                "this build has no compression for platform " + platform);
  }
  return use(Stores<CpuCompression>::Get());
}

std::int64_t CreateStore(std::vector<Site> sites) {
  return Registry<Sites>::Get().Add(Sites(std::move(sites)));
}

void FreeStore(std::int64_t id) {
  if (!Registry<Sites>::Get().Remove(id)) throw Unknown(kStoreWords, id);
  Stores<CpuCompression>::Get().Free(id);
#ifdef VMEM_JAX_KERNELS
  Stores<CudaCompression>::Get().Free(id);
#endif
}

std::vector<SiteCounters> ReadStoreCounters(std::int64_t id, const std::string& platform,
                                            int device) {
  return WithStores(platform, [&](auto& stores) { return stores.Find(id, device)->counters(); });
}

Counters ReadCounters(std::int64_t id, const std::string& platform, int device) {
  return WithEngine(platform, [&](auto& engine) { return engine.Find(id, device)->counters(); });
}

std::vector<Span> ReadSpans(std::int64_t id, const std::string& platform, int device) {
  return WithEngine(platform, [&](auto& engine) { return engine.Find(id, device)->Spans(); });
}

// As JAX registers them: a capsule, or capsules by stage where there are several.
nb::dict Capsules(const Targets& targets) {
  auto capsule = [](XLA_FFI_Handler* handler) {
    return nb::capsule(reinterpret_cast<void*>(handler));
  };
  nb::dict result;
  for (const auto& [name, target] : targets) {
    if (target.initialize == nullptr) {
      result[name.c_str()] = capsule(target.execute);
      continue;
    }
    nb::dict stages;
    stages["initialize"] = capsule(target.initialize);
    stages["execute"] = capsule(target.execute);
    result[name.c_str()] = stages;
  }
  return result;
}

#ifdef VMEM_JAX_CUDNN
ConvGeometry GeometryOf(const std::string& which, const std::string& epilogue,
                        const std::string& dtype, bool channels_last,
                        const std::tuple<Dims, Dims, Dims>& shapes,
                        const std::tuple<Dims, Dims, Dims, Dims>& window, bool prologue) {
  ConvGeometry geometry;
  geometry.prologue = prologue;
  geometry.pass = ConvPassOf(which);
  geometry.epilogue = ConvEpilogueOf(epilogue);
  geometry.dtype = ConvTypeOf(dtype);
  geometry.channels_last = channels_last;
  std::tie(geometry.x, geometry.w, geometry.y) = shapes;
  std::tie(geometry.strides, geometry.padding_low, geometry.padding_high, geometry.dilation) =
      window;
  geometry.Check();
  return geometry;
}

// `device` is the ordinal of one that is here, or the JSON text that describes one. The latter has
// no driver that could load what is compiled. `banned` are notes that no plan may have. `channels`
// is what x is padded to, 0 for none: no way does so in a build without kernels.
std::vector<PlanInfo> ConvPlans(const std::string& which, const std::string& epilogue,
                                const std::string& dtype, bool channels_last,
                                const std::tuple<Dims, Dims, Dims>& shapes,
                                const std::tuple<Dims, Dims, Dims, Dims>& window,
                                const std::variant<int, std::string>& device,
                                const std::vector<std::int64_t>& banned, bool compiling,
                                std::int64_t channels, bool prologue) {
  if (channels != 0 && !kCopiesChannels) return {};
  const ConvPadding padding(
      GeometryOf(which, epilogue, dtype, channels_last, shapes, window, prologue), channels);
  const ConvGeometry& geometry = padding.geometry();
  std::vector<PlanInfo> plans =
      device.index() == 0
          ? FindPlansHere(geometry, std::get<int>(device), banned, compiling)
          : FindPlans(geometry, ConvDevice::Described(std::get<std::string>(device)), banned, false);
  for (PlanInfo& plan : plans) plan.workspace += padding.nbytes();
  return plans;
}

// Constructs a trial in `self`. `sets` are the addresses of x, w, y, the workspace, the bias, scale
// and shift of the prologue, and sums of y and of its squares, each; 0 for those that there are not,
// and the last may be left out. What is computed is overwritten.
void InitTrial(ConvTrial* self, const std::string& which, const std::string& epilogue,
               const std::string& dtype, bool channels_last,
               const std::tuple<Dims, Dims, Dims>& shapes,
               const std::tuple<Dims, Dims, Dims, Dims>& window, int device, std::int64_t engine,
               std::int64_t channels, const Knobs& knobs,
               const std::vector<std::vector<std::uintptr_t>>& sets, std::int64_t workspace,
               bool prologue) {
  auto at = [](std::uintptr_t address) { return reinterpret_cast<void*>(address); };
  std::vector<ConvBuffers> buffers;
  for (std::vector<std::uintptr_t> set : sets) {
    set.resize(9);
    buffers.push_back({at(set[0]), at(set[1]), at(set[2]), at(set[3]), at(set[4]), at(set[5]),
                       at(set[6]), at(set[7]), at(set[8])});
  }
  new (self) ConvTrial(GeometryOf(which, epilogue, dtype, channels_last, shapes, window, prologue),
                       {engine, channels, knobs}, device, std::move(buffers), workspace);
}
#endif

// What Python reads. Its own dataclasses, which have the documentation, are made of these by name.
void BindStructs(nb::module_& m) {
  nb::class_<SlotLayout>(m, "SlotLayout")
      .def(nb::init<std::size_t, std::size_t, std::size_t, std::size_t>(), nb::kw_only(), "offset"_a,
           "nbytes"_a, "stride"_a, "depth"_a)
      .def_ro("offset", &SlotLayout::offset)
      .def_ro("nbytes", &SlotLayout::nbytes)
      .def_ro("stride", &SlotLayout::stride)
      .def_ro("depth", &SlotLayout::depth);
  nb::class_<Counters>(m, "Counters")
      .def_ro("hits", &Counters::hits)
      .def_ro("misses", &Counters::misses)
      .def_ro("evictions", &Counters::evictions)
      .def_ro("link_nbytes_out", &Counters::link_nbytes_out)
      .def_ro("link_nbytes_in", &Counters::link_nbytes_in)
      .def_ro("recopies", &Counters::recopies)
      .def_ro("resets", &Counters::resets)
      .def_ro("parked", &Counters::parked)
      .def_ro("cache_nbytes", &Counters::cache_nbytes)
      .def_ro("cache_used_nbytes", &Counters::cache_used_nbytes)
      .def_ro("arena_nbytes", &Counters::arena_nbytes);
  nb::class_<Span>(m, "Span")
      .def_ro("waits", &Span::waits)
      .def_ro("out", &Span::out)
      .def_ro("link", &Span::link)
      .def_ro("run", &Span::run)
      .def_ro("slot", &Span::slot)
      .def_ro("nbytes", &Span::nbytes)
      .def_ro("begin", &Span::begin)
      .def_ro("end", &Span::end);
  nb::class_<Site>(m, "Site")
      .def(nb::init<std::size_t, std::size_t, std::size_t>(), nb::kw_only(), "nbytes"_a,
           "capacity"_a, "slots"_a = 1)
      .def_ro("nbytes", &Site::nbytes)
      .def_ro("capacity", &Site::capacity)
      .def_ro("slots", &Site::slots);
  nb::class_<SiteCounters>(m, "SiteCounters")
      .def_ro("runs", &SiteCounters::runs)
      .def_ro("elements", &SiteCounters::elements)
      .def_ro("values", &SiteCounters::values)
      .def_ro("overflow_nbytes", &SiteCounters::overflow_nbytes);
#ifdef VMEM_JAX_CUDNN
  nb::class_<PlanInfo>(m, "PlanInfo")
      .def_ro("engine", &PlanInfo::engine)
      .def_ro("knobs", &PlanInfo::knobs)
      .def_ro("workspace", &PlanInfo::workspace)
      .def_ro("notes", &PlanInfo::notes)
      .def_ro("behaviour", &PlanInfo::behaviour)
      .def_ro("source", &PlanInfo::source);
#endif
}

void Translate(const std::exception_ptr& pointer, void*) {
  try {
    std::rethrow_exception(pointer);
  } catch (const Error& error) {
    switch (error.code()) {
      case Code::kResourceExhausted:
        PyErr_SetString(PyExc_MemoryError, error.what());
        return;
      case Code::kInvalidArgument:
        PyErr_SetString(PyExc_ValueError, error.what());
        return;
      default:
        PyErr_SetString(PyExc_RuntimeError, error.what());
    }
  }
}

}  // namespace

NB_MODULE(_xla_ffi, m) {
  nb::register_exception_translator(Translate);

  m.attr("FFI_API_VERSION") = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  m.attr("JAXLIB_VERSION") = VMEM_JAX_JAXLIB_VERSION;  // whose headers these are
#ifdef VMEM_JAX_CUDA
  m.attr("CUDA_VERSION") = nb::make_tuple(CUDART_VERSION / 1000, CUDART_VERSION / 10 % 100);
#else
  m.attr("CUDA_VERSION") = nb::none();
#endif
#ifdef VMEM_JAX_CUDNN
  m.attr("CUDNN_BUILT") = nb::make_tuple(CUDNN_MAJOR, CUDNN_MINOR, CUDNN_PATCHLEVEL);
#else
  m.attr("CUDNN_BUILT") = nb::none();  // whose headers, as for XLA's
#endif

  m.def("targets", [] {
    nb::dict result;
    result[CpuBackend::kPlatform] = Capsules(CpuTargets());
#ifdef VMEM_JAX_CUDA
    Targets cuda = CudaTargets();
#ifdef VMEM_JAX_CUDNN
    cuda.merge(CudnnTargets());
#endif
    result[CudaBackend::kPlatform] = Capsules(cuda);
#endif
    return result;
  });

  BindStructs(m);

  const auto unlocked = nb::call_guard<nb::gil_scoped_release>();
  m.def("arena_create", &CreateArena, "slots"_a, "nbytes"_a);
  m.def(
      "arena_pin",
      [](std::int64_t id, const std::string& platform, int device, bool lock_pages) {
        WithEngine(platform, [&](auto& engine) { engine.Pin(id, device, lock_pages); });
      },
      "id"_a, "platform"_a, "device"_a, "lock_pages"_a = false, unlocked);
  m.def("arena_free", &FreeArena, "id"_a, unlocked);
  m.def("arena_count", [] { return Layouts::Get().size(); });
  m.def(
      "cache_set_capacity",
      [](std::int64_t id, const std::string& platform, int device, std::size_t nbytes) {
        WithEngine(platform,
                   [&](auto& engine) { engine.Find(id, device)->SetCacheCapacity(nbytes); });
      },
      "id"_a, "platform"_a, "device"_a, "nbytes"_a, unlocked);
  m.def(
      "arena_reset",
      [](std::int64_t id, const std::string& platform, int device) {
        WithEngine(platform, [&](auto& engine) { engine.Find(id, device)->Reset(); });
      },
      "id"_a, "platform"_a, "device"_a, unlocked);
  m.def("counters", &ReadCounters, "id"_a, "platform"_a, "device"_a, unlocked);
  m.def(
      "record",
      [](std::int64_t id, const std::string& platform, int device, bool on) {
        WithEngine(platform, [&](auto& engine) { engine.Find(id, device)->Record(on); });
      },
      "id"_a, "platform"_a, "device"_a, "on"_a, unlocked);
  m.def("spans", &ReadSpans, "id"_a, "platform"_a, "device"_a, unlocked);
  m.def(
      "inject",
      [](double delay_seconds, std::int64_t fail_slot, bool fail_fetch, bool poison,
         bool poison_source, bool skip_waits, double stale_seconds) {
        const Injection injection{delay_seconds, fail_slot,  fail_fetch,   poison,
                                  poison_source, skip_waits, stale_seconds};
        ForEveryEngine([&](auto& engine) { engine.Inject(injection); });
      },
      nb::kw_only(), "delay_seconds"_a, "fail_slot"_a, "fail_fetch"_a, "poison"_a,
      "poison_source"_a, "skip_waits"_a, "stale_seconds"_a);
  m.def("store_create", &CreateStore, "sites"_a);
  m.def(
      "store_open",
      [](std::int64_t id, const std::string& platform, int device) {
        WithStores(platform, [&](auto& stores) { stores.Open(id, device); });
      },
      "id"_a, "platform"_a, "device"_a, unlocked);
  m.def(
      "store_reset",
      [](std::int64_t id, const std::string& platform, int device) {
        WithStores(platform, [&](auto& stores) { stores.Find(id, device)->Reset(); });
      },
      "id"_a, "platform"_a, "device"_a, unlocked);
  m.def("store_free", &FreeStore, "id"_a, unlocked);
  m.def("store_count", [] { return Registry<Sites>::Get().size(); });
  m.def("store_counters", &ReadStoreCounters, "id"_a, "platform"_a, "device"_a, unlocked);
#ifdef VMEM_JAX_CUDNN
  m.def("cudnn_open", &OpenCudnn, "path"_a, unlocked);
  m.def("conv_plans", &ConvPlans, "which"_a, "epilogue"_a, "dtype"_a, "channels_last"_a,
        "shapes"_a, "window"_a, "device"_a, "banned"_a, "compiling"_a, "channels"_a,
        "prologue"_a = false, unlocked);
  nb::class_<ConvTrial>(m, "ConvTrial")
      .def("__init__", &InitTrial, "which"_a, "epilogue"_a, "dtype"_a, "channels_last"_a,
           "shapes"_a, "window"_a, "device"_a, "engine"_a, "channels"_a, "knobs"_a, "sets"_a,
           "workspace"_a, "prologue"_a = false, unlocked)
      .def("run", &ConvTrial::Run, "times"_a, unlocked)
      .def("deviation", &ConvTrial::Deviation, unlocked);
#endif
  // How many calls failed in destructors, and the message of the first.
  m.def("teardown_failures", [] {
    const TeardownFailures& failures = TeardownFailures::Get();
    return std::pair(failures.count(), failures.first());
  });
  m.def("stop", [] { ForEveryEngine([](auto& engine) { engine.Stop(); }); }, unlocked);
}

}  // namespace vmem
