// Kernels compiled ahead of time by kernels/common/aot.py: machine code, and how to launch it. No CUDA headers.
#pragma once

#include <vector>

namespace kvc {

struct KernelImage {
  int capability;  // 10 * major + minor, or 0 for PTX
  int shared_bytes;
  const unsigned char* data;
};

struct CompiledKernel {
  const char* name;
  int threads;
  std::vector<KernelImage> images;  // PTX comes last
};

}  // namespace kvc
