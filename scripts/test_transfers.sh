#!/bin/sh
# Builds the test of the transfer core (C++, no Python) and runs it under the thread sanitizer, then
# under the address and undefined-behaviour sanitizers. Needs CMake and GCC or Clang.
set -eu
cd "$(dirname "$0")/.."
for sanitizer in thread address; do
    build=build/sanitize-$sanitizer
    cmake -S . -B "$build" -DVMEM_JAX_SANITIZE=$sanitizer >/dev/null
    cmake --build "$build" >/dev/null
    echo "$sanitizer: $("$build/transfer_test")"
done
