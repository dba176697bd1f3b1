// cuDNN 9, opened when something first asks for it. Nothing of it is NEEDED, so the module loads
// where there is none, and it is the copy that JAX uses where JAX has loaded one.
#pragma once

#include <cudnn.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#if CUDNN_VERSION < 90800
#error "cuDNN headers of version 9.8 or newer are needed: older ones have no device properties"
#endif

namespace vmem {

#define VMEM_CUDNN_FUNCTIONS(X)    \
  X(cudnnGetVersion)               \
  X(cudnnGetErrorString)           \
  X(cudnnGetLastErrorString)       \
  X(cudnnCreate)                   \
  X(cudnnDestroy)                  \
  X(cudnnSetStream)                \
  X(cudnnBackendCreateDescriptor)  \
  X(cudnnBackendDestroyDescriptor) \
  X(cudnnBackendSetAttribute)      \
  X(cudnnBackendGetAttribute)      \
  X(cudnnBackendFinalize)          \
  X(cudnnBackendExecute)

struct CudnnFunctions {
#define VMEM_MEMBER(name) decltype(&::name) name = nullptr;
  VMEM_CUDNN_FUNCTIONS(VMEM_MEMBER)
#undef VMEM_MEMBER
};

// Opens cuDNN from `path` unless a copy is loaded already. Returns its version, such as 91900.
// Throws Error if there is none, or none of version 9.
std::size_t OpenCudnn(const std::string& path);

// The functions of the open library; opens the one that the system knows if none is open yet.
const CudnnFunctions& Cudnn();

// Throws Error if `status` is one; `what` is the call. kFailedPrecondition is a library that does
// not work here, kInternal anything else, such as an engine that cannot do what it was asked for.
void CheckCudnn(cudnnStatus_t status, const char* what);
#define VMEM_CHECK_CUDNN(call) ::vmem::CheckCudnn(::vmem::Cudnn().call, #call)

// An object of cuDNN's backend API.
class Descriptor {
 public:
  Descriptor() = default;  // none
  explicit Descriptor(cudnnBackendDescriptorType_t type);
  ~Descriptor();
  Descriptor(Descriptor&& other) noexcept : raw_(std::exchange(other.raw_, nullptr)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(raw_, other.raw_);
    return *this;
  }

  void Set(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, std::int64_t count,
           const void* values);
  void Set(cudnnBackendAttributeName_t name, std::int64_t value);
  void Set(cudnnBackendAttributeName_t name, const std::vector<std::int64_t>& values);
  void Set(cudnnBackendAttributeName_t name, const Descriptor& value);
  void Set(cudnnBackendAttributeName_t name, const std::vector<Descriptor>& values);
  void Finalize();

  // How many values there are; at most `count` of them are written.
  std::int64_t Get(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type,
                   std::int64_t count, void* values) const;
  std::int64_t GetInt(cudnnBackendAttributeName_t name) const;
  // Reads descriptors into `values`, which must have been made, and drops those that were too many.
  void Get(cudnnBackendAttributeName_t name, std::vector<Descriptor>& values) const;

  cudnnBackendDescriptor_t raw() const { return raw_; }
  explicit operator bool() const { return raw_ != nullptr; }

 private:
  cudnnBackendDescriptor_t raw_ = nullptr;
};

}  // namespace vmem
