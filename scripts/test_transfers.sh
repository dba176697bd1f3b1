#!/bin/sh
# Builds the tests in C++ (no Python) and runs them under the thread sanitizer, then under the address
# and undefined-behaviour sanitizers. Needs CMake and GCC or Clang; the test of the convolution call is
# left out without a CUDA toolkit, or where PYTHON has no jaxlib or no cuDNN, for their headers.
set -eu
cd "$(dirname "$0")/.."
headers() {
    "${PYTHON:-python3}" -c "
import importlib.util as u
parent = u.find_spec('$1'.partition('.')[0])
found = parent and u.find_spec('$1')
print(next(iter(found.submodule_search_locations)) + '/include' if found else '')" 2>/dev/null || true
}
xla=$(headers jaxlib)
cudnn=$(headers nvidia.cudnn)
[ "$xla" ] && [ "$cudnn" ] || echo "without the convolution call: no headers of jaxlib or of cuDNN"
for sanitizer in thread address; do
    build=build/sanitize-$sanitizer
    cmake -S . -B "$build" -DVMEM_JAX_SANITIZE=$sanitizer \
        "-DXLA_FFI_INCLUDE_DIR=$xla" "-DCUDNN_INCLUDE_DIR=$cudnn" >/dev/null
    cmake --build "$build" --parallel >/dev/null
    echo "$sanitizer:"
    ctest --test-dir "$build" --output-on-failure
done
