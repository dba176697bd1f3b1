#include "cudnn_library.h"

#include <dlfcn.h>

#include <mutex>

#include "error.h"
#include "teardown.h"

namespace vmem {
namespace {

constexpr const char* kName = "libcudnn.so.9";
constexpr std::size_t kOldest = 90000;
constexpr std::size_t kTooNew = 100000;

struct Library {
  std::mutex mutex;
  CudnnFunctions functions;
  std::size_t version = 0;  // of an open library
};

// Leaked: threads of XLA may outlive static destructors.
Library& TheLibrary() {
  static Library* const library = new Library;
  return *library;
}

void* OpenAny(const std::string& path) {
  constexpr int kMode = RTLD_LAZY | RTLD_LOCAL;
  // A second copy beside JAX's would have handles of its own, and not the same plans.
  void* handle = dlopen(kName, kMode | RTLD_NOLOAD);
  if (handle == nullptr) handle = dlopen(path.empty() ? kName : path.c_str(), kMode);
  if (handle != nullptr) return handle;
  const char* reason = dlerror();
  throw Error(Code::kFailedPrecondition,
              std::string("cuDNN 9 cannot be loaded: ") + (reason == nullptr ? "?" : reason));
}

CudnnFunctions FunctionsOf(void* handle) {
  CudnnFunctions functions;
#define VMEM_FIND(name)                                                                     \
  functions.name = reinterpret_cast<decltype(functions.name)>(dlsym(handle, #name));        \
  if (functions.name == nullptr) {                                                          \
    throw Error(Code::kFailedPrecondition, "the cuDNN that is loaded has no function " #name); \
  }
  VMEM_CUDNN_FUNCTIONS(VMEM_FIND)
#undef VMEM_FIND
  return functions;
}

}  // namespace

std::size_t OpenCudnn(const std::string& path) {
  Library& library = TheLibrary();
  std::lock_guard<std::mutex> lock(library.mutex);
  if (library.version != 0) return library.version;
  const CudnnFunctions functions = FunctionsOf(OpenAny(path));
  const std::size_t version = functions.cudnnGetVersion();
  if (version < kOldest || version >= kTooNew) {
    throw Error(Code::kFailedPrecondition,
                "cuDNN 9 is needed, and " + std::to_string(version) + " is loaded");
  }
  library.functions = functions;
  return library.version = version;
}

const CudnnFunctions& Cudnn() {
  static const CudnnFunctions& functions = (OpenCudnn(""), TheLibrary().functions);
  return functions;
}

void CheckCudnn(cudnnStatus_t status, const char* what) {
  if (status == CUDNN_STATUS_SUCCESS) return;
  char reason[1024] = "";
  Cudnn().cudnnGetLastErrorString(reason, sizeof reason);
  // Those below are of a library that is not whole, or of parts that do not fit together.
  const Code code =
      status < CUDNN_STATUS_BAD_PARAM ? Code::kFailedPrecondition : Code::kInternal;
  throw Error(code, std::string(what) + ": " + Cudnn().cudnnGetErrorString(status) + " " + reason);
}

Descriptor::Descriptor(cudnnBackendDescriptorType_t type) {
  VMEM_CHECK_CUDNN(cudnnBackendCreateDescriptor(type, &raw_));
}

Descriptor::~Descriptor() {
  if (raw_ == nullptr) return;
  Teardown([this] { VMEM_CHECK_CUDNN(cudnnBackendDestroyDescriptor(raw_)); });
}

void Descriptor::Set(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type,
                     std::int64_t count, const void* values) {
  VMEM_CHECK_CUDNN(cudnnBackendSetAttribute(raw_, name, type, count, values));
}

void Descriptor::Set(cudnnBackendAttributeName_t name, std::int64_t value) {
  Set(name, CUDNN_TYPE_INT64, 1, &value);
}

void Descriptor::Set(cudnnBackendAttributeName_t name, const std::vector<std::int64_t>& values) {
  Set(name, CUDNN_TYPE_INT64, static_cast<std::int64_t>(values.size()), values.data());
}

void Descriptor::Set(cudnnBackendAttributeName_t name, const Descriptor& value) {
  Set(name, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &value.raw_);
}

void Descriptor::Set(cudnnBackendAttributeName_t name, const std::vector<Descriptor>& values) {
  std::vector<cudnnBackendDescriptor_t> raw;
  for (const Descriptor& value : values) raw.push_back(value.raw_);
  Set(name, CUDNN_TYPE_BACKEND_DESCRIPTOR, static_cast<std::int64_t>(raw.size()), raw.data());
}

void Descriptor::Finalize() { VMEM_CHECK_CUDNN(cudnnBackendFinalize(raw_)); }

std::int64_t Descriptor::Get(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type,
                             std::int64_t count, void* values) const {
  std::int64_t found = 0;
  VMEM_CHECK_CUDNN(cudnnBackendGetAttribute(raw_, name, type, count, &found, values));
  return found;
}

std::int64_t Descriptor::GetInt(cudnnBackendAttributeName_t name) const {
  std::int64_t value = 0;
  Get(name, CUDNN_TYPE_INT64, 1, &value);
  return value;
}

void Descriptor::Get(cudnnBackendAttributeName_t name, std::vector<Descriptor>& values) const {
  std::vector<cudnnBackendDescriptor_t> raw;
  for (const Descriptor& value : values) raw.push_back(value.raw_);
  const std::int64_t found = Get(name, CUDNN_TYPE_BACKEND_DESCRIPTOR,
                                 static_cast<std::int64_t>(raw.size()), raw.data());
  if (found < static_cast<std::int64_t>(values.size())) values.resize(found);
}

}  // namespace vmem
