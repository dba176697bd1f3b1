// What a test without a framework needs: a condition that ends it where it does not hold, and errors.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <string>

#include "error.h"

#define EXPECT(condition)                                                            \
  do {                                                                               \
    if (!(condition)) {                                                              \
      std::fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                                  \
    }                                                                                \
  } while (false)

namespace vmem {

// Whether `body` throws an Error with that text in it.
template <class Body>
bool Throws(Body body, const std::string& text) {
  try {
    body();
  } catch (const Error& error) {
    if (std::string(error.what()).find(text) == std::string::npos) {
      std::fprintf(stderr, "another error: %s\n", error.what());
      return false;
    }
    return true;
  }
  return false;
}

}  // namespace vmem
