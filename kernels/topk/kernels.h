// What the top-k ops do on a GPU.
#pragma once

#include <cstdlib>
#include <string_view>
#include <vector>

#include "common/cuda.h"
#include "topk/arguments.h"

namespace kvc::topk {

// For comparisons: whether to run what `gpu` would, whatever the GPU is. An sm_80 has no clusters; for an sm_80 and an
// sm_120 the CuTe DSL's kernels are not compiled.
inline bool as_on(std::string_view gpu) {
  static const char* const wanted = std::getenv("KVC_TOPK_AS_ON");
  return wanted != nullptr && wanted == gpu;
}

// What C++ kernels may ask of a device.
struct Limits {
  int shared = 0;         // bytes of dynamic shared memory a block may have
  bool clusters = false;  // what was compiled for older architectures has none, wherever it runs
};

// Lets `kernels`, all compiled for the same architectures, have that much shared memory. Not a part of a capture.
inline Limits read_limits(int device, const std::vector<const void*>& kernels) {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  cuda_check(cudaThreadExchangeStreamCaptureMode(&mode), "cudaThreadExchangeStreamCaptureMode");
  Limits found;
  cudaFuncAttributes attributes{};
  int most = 0;
  cudaError_t status = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  found.shared = most;
  for (const void* kernel : kernels) {
    if (status == cudaSuccess) status = cudaFuncGetAttributes(&attributes, kernel);
    const int room = most - static_cast<int>(attributes.sharedSizeBytes);
    found.shared = std::min(found.shared, room);
    if (status == cudaSuccess) status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, room);
  }
  (void)cudaThreadExchangeStreamCaptureMode(&mode);
  cuda_check(status, "cudaFuncSetAttribute");
  found.clusters = attributes.ptxVersion >= 90 && !as_on("sm_80");
  return found;
}

// Most scores between a row and the place that its positions count from: a multiple of `bytes`, four scores most often.
template <typename Score>
int64_t slack_of(const Selection& s, int64_t bytes = 4 * sizeof(Score)) {
  constexpr int64_t kScore = sizeof(Score);
  const bool aligned = reinterpret_cast<uintptr_t>(s.scores) % bytes == 0 && s.row_stride * kScore % bytes == 0;
  return aligned ? 0 : bytes / kScore - 1;
}

// Launches a C++ kernel, `cluster` blocks side by side.
template <typename Parameters>
void launch(void (*kernel)(Parameters), const char* name, const Parameters& parameters, int64_t blocks, int threads,
            int64_t shared, cudaStream_t stream, int cluster = 1) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(shared);
  config.stream = stream;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  config.attrs = &attribute;
  config.numAttrs = cluster > 1 ? 1 : 0;
  cuda_check(cudaLaunchKernelEx(&config, kernel, parameters), name);
}

// Each fills s.out on the scope's stream and needs at least one row and one column of the result.
void select(const Context& ctx, const Selection& s, const DeviceScope& scope);
void settle(const Context& ctx, const Selection& s, const Provisional& p, const DeviceScope& scope);

}  // namespace kvc::topk
