// The one exception of all that stands behind the handlers. They turn it into an ffi::Error, the
// module into a Python exception; nothing else crosses either boundary.
#pragma once

#include <stdexcept>
#include <string>

namespace vmem {

enum class Code { kInvalidArgument, kFailedPrecondition, kResourceExhausted, kInternal };

class Error : public std::runtime_error {
 public:
  Error(Code code, const std::string& message) : std::runtime_error(message), code_(code) {}
  Code code() const { return code_; }

 private:
  Code code_;
};

}  // namespace vmem
