// The two calls that compress and decompress, once for every platform. As in handlers.h, a platform P
// decodes and resolves; it also supplies P::Compression, the codec of compression.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "compression.h"
#include "error.h"
#include "handlers.h"

namespace vmem {

inline std::size_t SiteIndex(std::int64_t site) {
  if (site < 0) {
    throw Error(Code::kInvalidArgument, "site " + std::to_string(site) + " is negative");
  }
  return static_cast<std::size_t>(site);
}

// Bytes of what is or is not zero: a complex128 is two elements.
inline std::uint32_t ItemSize(ffi::DataType dtype) {
  constexpr std::size_t kWidest = 8;
  const std::size_t width = ffi::ByteWidth(dtype);
  return static_cast<std::uint32_t>(width < kWidest ? width : kWidest);
}

template <class P>
ffi::Error Compress(typename P::Decoded where, ffi::RunId run, ffi::AnyBuffer x,
                    ffi::Result<ffi::AnyBuffer> c, std::int64_t store, std::int64_t site) {
  return Guard("compress", [&] {
    const auto [stream, device] = P::Resolve(where);
    Stores<typename P::Compression>::Get()
        .Find(store, device)
        ->Compress(run.run_id, stream, SiteIndex(site), ItemSize(x.element_type()),
                   x.untyped_data(), x.size_bytes(), c->untyped_data(), c->size_bytes());
  });
}

template <class P>
ffi::Error Decompress(typename P::Decoded where, ffi::RunId run, ffi::AnyBuffer c,
                      ffi::Result<ffi::AnyBuffer> x, std::int64_t store, std::int64_t site) {
  return Guard("decompress", [&] {
    const auto [stream, device] = P::Resolve(where);
    Stores<typename P::Compression>::Get()
        .Find(store, device)
        ->Decompress(run.run_id, stream, SiteIndex(site), ItemSize(x->element_type()),
                     c.untyped_data(), c.size_bytes(), x->untyped_data(), x->size_bytes());
  });
}

// compress: tensor -> byte array; decompress: byte array -> tensor.
template <class P>
auto BindCompression() {
  return ffi::Ffi::Bind()
      .Ctx<typename P::Context>()
      .template Ctx<ffi::RunId>()
      .template Arg<ffi::AnyBuffer>()
      .template Ret<ffi::AnyBuffer>()
      .template Attr<std::int64_t>("store")
      .template Attr<std::int64_t>("site");
}

}  // namespace vmem
