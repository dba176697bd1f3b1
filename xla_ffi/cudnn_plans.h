// Execution plans of cuDNN's backend API: all that there are for a convolution, or a chosen one.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "cudnn_geometry.h"
#include "cudnn_library.h"

namespace vmem {

// Settings of an engine: type and value of each, sorted.
using Knobs = std::vector<std::pair<std::int64_t, std::int64_t>>;

// How a convolution is done.
struct ConvWay {
  std::int64_t engine = -1;
  std::int64_t channels = 0;  // that x is padded to; 0 for none
  Knobs knobs;
};

// What plans are for: a device that is here, by a handle, or one that is described.
struct ConvDevice {
  cudnnHandle_t handle = nullptr;
  Descriptor described;

  static ConvDevice Here(cudnnHandle_t handle);
  // `json` has the members that cuDNN gives a device of its own (9.8 or newer).
  static ConvDevice Described(const std::string& json);
};

struct PlanInfo {
  std::int64_t engine = -1;
  Knobs knobs;
  std::int64_t workspace = 0;
  std::vector<std::int64_t> notes;      // cudnnBackendNumericalNote_t
  std::vector<std::int64_t> behaviour;  // cudnnBackendBehaviorNote_t
  std::string source;  // "A", "B", "fallback" (heuristics) or "default" (knobs)
};

// Every plan, best first by cuDNN's own judgement. Where several calls are to add up their results
// (CanAccumulate), a plan is one that can, and its workspace does for both kinds of call. Making
// one takes longest: those whose engine has one of the notes `banned` are left out before. Plans
// that compile a kernel when they are made take seconds each: they are left out unless `compiling`.
std::vector<PlanInfo> FindPlans(const ConvGeometry& geometry, const ConvDevice& device,
                                const std::vector<std::int64_t>& banned, bool compiling);

struct Plan {
  Descriptor descriptor;
  std::int64_t workspace = 0;
};

Plan MakePlan(const ConvGeometry& geometry, const ConvDevice& device, std::int64_t engine,
              const Knobs& knobs);

// Names of the tensors in a variant pack.
constexpr std::int64_t kIdOfX = 'x';
constexpr std::int64_t kIdOfW = 'w';
constexpr std::int64_t kIdOfY = 'y';
constexpr std::int64_t kIdOfBias = 'b';
constexpr std::int64_t kIdOfScale = 's';
constexpr std::int64_t kIdOfShift = 't';
constexpr std::int64_t kIdOfSums = 'u';
constexpr std::int64_t kIdOfSquares = 'v';

}  // namespace vmem
