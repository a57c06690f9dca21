// Loads and launches the kernels of common/compiled.h through the CUDA library API.
#pragma once

#include <mutex>
#include <type_traits>

#include "common/compiled.h"
#include "common/cuda.h"

namespace kvc {

// One compiled kernel on every device of this process. A static object per kernel; loading happens at the first launch.
class KernelLoader {
 public:
  explicit KernelLoader(const CompiledKernel& kernel) : kernel_(kernel) {}

  // `arguments` are the kernel's, in order and of its types.
  template <typename... Arguments>
  void launch(const Context& ctx, int device, dim3 grid, cudaStream_t stream, Arguments... arguments) {
    static_assert(((std::is_pointer_v<Arguments> || std::is_same_v<Arguments, int32_t>) && ...));
    const Loaded& loaded = on(ctx, device);
    // Triton's kernels end in two pointers to scratch memory; aot.py refuses kernels that use any.
    void* scratch = nullptr;
    void* all[] = {&arguments..., &scratch, &scratch};
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = dim3(static_cast<unsigned>(kernel_.threads));
    config.dynamicSmemBytes = static_cast<size_t>(loaded.shared_bytes);
    config.stream = stream;
    cuda_check(cudaLaunchKernelExC(&config, loaded.function, all), kernel_.name);
  }

 private:
  struct Loaded {
    const void* function = nullptr;
    int shared_bytes = 0;
  };

  const Loaded& on(const Context& ctx, int device) {
    std::call_once(once_[device], [&] { loaded_[device] = load(ctx, device); });
    return loaded_[device];
  }

  Loaded load(const Context& ctx, int device) {
    int major = 0, minor = 0;
    cuda_check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "cudaDeviceGetAttribute");
    cuda_check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device), "cudaDeviceGetAttribute");
    const KernelImage* image = &kernel_.images.back();
    for (const KernelImage& candidate : kernel_.images)
      if (runs_on(candidate.capability, 10 * major + minor)) image = &candidate;
    // Loading inside a capture is not part of what is captured.
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    cuda_check(cudaThreadExchangeStreamCaptureMode(&mode), "cudaThreadExchangeStreamCaptureMode");
    cudaLibrary_t library{};
    cudaKernel_t function{};
    cudaError_t status = cudaLibraryLoadData(&library, image->data, nullptr, nullptr, 0, nullptr, nullptr, 0);
    if (status == cudaSuccess) status = cudaLibraryGetKernel(&function, library, kernel_.name);
    (void)cudaThreadExchangeStreamCaptureMode(&mode);
    if (status == cudaErrorNoKernelImageForDevice || status == cudaErrorInvalidPtx ||
        status == cudaErrorUnsupportedPtxVersion) {
      (void)cudaGetLastError();
      throw std::runtime_error(std::string("kvc.") + ctx.op + ": the GPU must be one of the built architectures (" +
                               KVC_CUDA_ARCHS + "), got sm_" + std::to_string(major) + std::to_string(minor));
    }
    cuda_check(status, "cudaLibraryLoadData");
    return {reinterpret_cast<const void*>(function), image->shared_bytes};
  }

  // Triton compiles for "a" targets from 9.0 on, whose code runs on that very capability only; before, code runs on
  // later minors too.
  static bool runs_on(int compiled, int device) {
    return compiled >= 90 ? compiled == device : compiled / 10 == device / 10 && compiled <= device;
  }

  const CompiledKernel& kernel_;
  std::once_flag once_[kMaxDevices];
  Loaded loaded_[kMaxDevices];
};

}  // namespace kvc
