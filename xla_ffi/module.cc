// The only nanobind file: names to functions, no logic. Devices are pairs (platform, ordinal).
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "cpu_backend.h"
#include "engine.h"
#include "error.h"
#include "layout.h"
#include "targets.h"
#ifdef VMEM_JAX_CUDA
#include "cuda_backend.h"
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

std::int64_t CreateArena(
    const std::vector<std::tuple<std::size_t, std::size_t, std::size_t, std::size_t>>& slots,
    std::size_t nbytes) {
  std::vector<SlotLayout> layouts;
  for (const auto& [offset, size, stride, depth] : slots) {
    layouts.push_back({offset, size, stride, depth});
  }
  return Layouts::Get().Add(Layout(std::move(layouts), nbytes));
}

void FreeArena(std::int64_t id) {
  if (!Layouts::Get().Remove(id)) throw UnknownArena(id);
  ForEveryEngine([&](auto& engine) { engine.Free(id); });
}

nb::dict ReadCounters(std::int64_t id, const std::string& platform, int device) {
  const Counters now =
      WithEngine(platform, [&](auto& engine) { return engine.Find(id, device)->counters(); });
  nb::dict result;
  result["hits"] = now.hits;
  result["misses"] = now.misses;
  result["evictions"] = now.evictions;
  result["link_nbytes_out"] = now.link_nbytes_out;
  result["link_nbytes_in"] = now.link_nbytes_in;
  result["recopies"] = now.recopies;
  result["resets"] = now.resets;
  result["parked"] = now.parked;
  result["cache_nbytes"] = now.cache_nbytes;
  result["cache_used_nbytes"] = now.cache_used_nbytes;
  result["arena_nbytes"] = now.arena_nbytes;
  return result;
}

nb::list ReadSpans(std::int64_t id, const std::string& platform, int device) {
  std::vector<Span> spans;
  {
    nb::gil_scoped_release release;
    spans = WithEngine(platform, [&](auto& engine) { return engine.Find(id, device)->Spans(); });
  }
  nb::list result;
  for (const Span& span : spans) {
    nb::dict fields;
    fields["waits"] = span.waits;
    fields["out"] = span.out;
    fields["link"] = span.link;
    fields["run"] = span.run;
    fields["slot"] = span.slot;
    fields["nbytes"] = span.nbytes;
    fields["begin"] = span.begin;
    fields["end"] = span.end;
    result.append(fields);
  }
  return result;
}

nb::dict Capsules(const Targets& targets) {
  nb::dict result;
  for (const auto& [name, handler] : targets) {
    result[name.c_str()] = nb::capsule(reinterpret_cast<void*>(handler));
  }
  return result;
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

  m.def("targets", [] {
    nb::dict result;
    result[CpuBackend::kPlatform] = Capsules(CpuTargets());
#ifdef VMEM_JAX_CUDA
    result[CudaBackend::kPlatform] = Capsules(CudaTargets());
#endif
    return result;
  });

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
  m.def("counters", &ReadCounters, "id"_a, "platform"_a, "device"_a);
  m.def(
      "record",
      [](std::int64_t id, const std::string& platform, int device, bool on) {
        WithEngine(platform, [&](auto& engine) { engine.Find(id, device)->Record(on); });
      },
      "id"_a, "platform"_a, "device"_a, "on"_a, unlocked);
  m.def("spans", &ReadSpans, "id"_a, "platform"_a, "device"_a);
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
  m.def("stop", [] { ForEveryEngine([](auto& engine) { engine.Stop(); }); }, unlocked);
}

}  // namespace vmem
