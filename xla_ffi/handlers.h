// The four calls, once for every platform. A handler decodes, checks and passes on; nothing throws
// across the boundary, and nothing waits for a device.
//
// A platform P supplies
//   P::Backend, P::Context (what XLA hands out), P::Decoded (what that decodes to)
//   P::Resolve(decoded) -> {stream, device}
#pragma once

#include <cstdint>
#include <exception>
#include <map>
#include <string>

#include "engine.h"
#include "error.h"
#include "xla/ffi/api/ffi.h"

namespace vmem {

namespace ffi = ::xla::ffi;

// The handlers of a custom call, by the stage that XLA calls them in.
struct Target {
  Target(XLA_FFI_Handler* execute, XLA_FFI_Handler* initialize = nullptr)  // NOLINT: from one alone
      : execute(execute), initialize(initialize) {}

  XLA_FFI_Handler* execute;
  XLA_FFI_Handler* initialize;  // before each run, or nullptr
};

// By the names of custom call targets, without the prefix.
using Targets = std::map<std::string, Target>;

template <class B>
struct Caller {
  typename B::Stream stream;
  int device;
};

// Runs `body` and turns what it throws into an ffi::Error that begins with `what`.
template <class Body>
ffi::Error Guard(const char* what, Body body) noexcept {
  const std::string prefix = std::string("vmem_jax ") + what + ": ";
  try {
    body();
    return ffi::Error::Success();
  } catch (const Error& error) {
    switch (error.code()) {
      case Code::kInvalidArgument:
        return ffi::Error::InvalidArgument(prefix + error.what());
      case Code::kFailedPrecondition:
        return ffi::Error(ffi::ErrorCode::kFailedPrecondition, prefix + error.what());
      case Code::kResourceExhausted:
        return ffi::Error(ffi::ErrorCode::kResourceExhausted, prefix + error.what());
      case Code::kInternal:
        return ffi::Error::Internal(prefix + error.what());
    }
    return ffi::Error::Internal(prefix + error.what());
  } catch (const std::exception& error) {
    return ffi::Error::Internal(prefix + error.what());
  }
}

inline std::size_t SlotIndex(std::int64_t slot) {
  if (slot < 0) {
    throw Error(Code::kInvalidArgument, "slot " + std::to_string(slot) + " is negative");
  }
  return static_cast<std::size_t>(slot);
}

template <class P>
ffi::Error OffloadStart(typename P::Decoded where, ffi::RunId run, ffi::AnyBuffer x,
                        ffi::AnyBuffer /*token*/, ffi::RemainingArgs /*tokens*/,
                        ffi::Result<ffi::AnyBuffer> /*token_out*/, std::int64_t arena,
                        std::int64_t slot) {
  return Guard("offload_start", [&] {
    const auto [stream, device] = P::Resolve(where);
    Engine<typename P::Backend>::Get()
        .Find(arena, device)
        ->OffloadStart(run.run_id, stream, SlotIndex(slot), x.untyped_data(), x.size_bytes());
  });
}

template <class P>
ffi::Error OffloadDone(typename P::Decoded where, ffi::RunId run, ffi::AnyBuffer x,
                       ffi::AnyBuffer /*token*/, ffi::RemainingArgs /*tokens*/,
                       ffi::Result<ffi::AnyBuffer> /*token_out*/, std::int64_t arena,
                       std::int64_t slot) {
  return Guard("offload_done", [&] {
    const auto [stream, device] = P::Resolve(where);
    Engine<typename P::Backend>::Get()
        .Find(arena, device)
        ->OffloadDone(run.run_id, stream, SlotIndex(slot), x.untyped_data(), x.size_bytes());
  });
}

template <class P>
ffi::Error FetchStart(typename P::Decoded where, ffi::RunId run, ffi::AnyBuffer /*token*/,
                      ffi::Result<ffi::AnyBuffer> out, std::int64_t arena, std::int64_t slot) {
  return Guard("fetch_start", [&] {
    const auto [stream, device] = P::Resolve(where);
    Engine<typename P::Backend>::Get()
        .Find(arena, device)
        ->FetchStart(run.run_id, stream, SlotIndex(slot), out->untyped_data(), out->size_bytes());
  });
}

template <class P>
ffi::Error FetchDone(typename P::Decoded where, ffi::RunId run, ffi::AnyBuffer buffer,
                     ffi::RemainingArgs /*tokens*/, ffi::Result<ffi::AnyBuffer> out,
                     ffi::RemainingRets /*token_out*/, std::int64_t arena, std::int64_t slot) {
  return Guard("fetch_done", [&] {
    const auto [stream, device] = P::Resolve(where);
    // With the alias broken, `out` holds nothing and `buffer` is a copy at best: the arena says so.
    Engine<typename P::Backend>::Get()
        .Find(arena, device)
        ->FetchDone(run.run_id, stream, SlotIndex(slot), out->untyped_data(), out->size_bytes());
    if (out->untyped_data() != buffer.untyped_data()) {
      throw Error(Code::kInternal, "the result does not alias the operand");
    }
  });
}

template <class P>
auto BindOffload() {
  return ffi::Ffi::Bind()
      .Ctx<typename P::Context>()
      .template Ctx<ffi::RunId>()
      .template Arg<ffi::AnyBuffer>()  // x: any shape and dtype
      .template Arg<ffi::AnyBuffer>()  // token
      .RemainingArgs()                 // and more of them
      .template Ret<ffi::AnyBuffer>()  // token
      .template Attr<std::int64_t>("arena")
      .template Attr<std::int64_t>("slot");
}

// token -> buffer
template <class P>
auto BindFetchStart() {
  return ffi::Ffi::Bind()
      .Ctx<typename P::Context>()
      .template Ctx<ffi::RunId>()
      .template Arg<ffi::AnyBuffer>()
      .template Ret<ffi::AnyBuffer>()
      .template Attr<std::int64_t>("arena")
      .template Attr<std::int64_t>("slot");
}

// buffer -> the same buffer; tokens, which only order the calls, may follow on both sides.
template <class P>
auto BindFetchDone() {
  return ffi::Ffi::Bind()
      .Ctx<typename P::Context>()
      .template Ctx<ffi::RunId>()
      .template Arg<ffi::AnyBuffer>()
      .RemainingArgs()
      .template Ret<ffi::AnyBuffer>()
      .RemainingRets()
      .template Attr<std::int64_t>("arena")
      .template Attr<std::int64_t>("slot");
}

}  // namespace vmem
