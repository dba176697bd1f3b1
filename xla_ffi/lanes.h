// The copy lanes of one device, shared by all of its arenas: one out, one in.
#pragma once

#include <mutex>

namespace vmem {

template <class B>
struct Lanes {
  explicit Lanes(int ordinal)
      : device(ordinal), to_host(B::NewLane(ordinal)), to_device(B::NewLane(ordinal)) {}

  int device;
  typename B::Stream to_host;
  typename B::Stream to_device;
  std::mutex order;  // keeps the operations of one transfer together
};

}  // namespace vmem
