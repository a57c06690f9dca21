// Kernels compiled ahead of time by kernels/common/aot.py: machine code, and how to launch it. No CUDA headers.
#pragma once

#include <vector>

namespace kvc {

struct KernelImage {
  int first, last;  // the compute capabilities it runs on, as 10 * major + minor
  int shared_bytes;
  bool waits;  // for the kernel before it, so that it may be launched while that one ends
  const unsigned char* data;
  const char* entry;
};

struct CompiledKernel {
  const char* name;
  int threads;
  std::vector<KernelImage> images;  // in order of preference
};

}  // namespace kvc
