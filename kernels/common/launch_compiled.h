// Loads and launches the kernels of common/compiled.h through the CUDA library API.
#pragma once

#include <mutex>
#include <type_traits>

#include "common/compiled.h"
#include "common/cuda.h"

namespace kvc {

// The shape of a launch. Triton's kernels know their shared memory; CuTe's have no other than `dynamic_shared` bytes.
struct LaunchShape {
  dim3 grid;
  int dynamic_shared = 0;
  int cluster = 1;
};

// One compiled kernel on every device of this process. A static object per kernel; loading happens at the first launch.
class KernelLoader {
 public:
  explicit KernelLoader(const CompiledKernel& kernel) : kernel_(kernel) {}

  // Whether the kernel has code for a GPU of this compute capability.
  bool supports(int major, int minor) const { return image_for(major, minor) != nullptr; }

  // `arguments` are the kernel's, in order and of its types. Triton's kernels end in two pointers to scratch memory,
  // which aot.py makes sure they do not use: pass `nullptr` for both, as launch_triton does.
  template <typename... Arguments>
  void launch(const Context& ctx, int device, const LaunchShape& shape, cudaStream_t stream, Arguments... arguments) {
    static_assert(((std::is_trivially_copyable_v<Arguments>) && ...));
    const Loaded& loaded = on(ctx, device);
    void* all[] = {&arguments...};
    cudaLaunchConfig_t config{};
    config.gridDim = shape.grid;
    config.blockDim = dim3(static_cast<unsigned>(kernel_.threads));
    config.dynamicSmemBytes = static_cast<size_t>(loaded.shared_bytes + shape.dynamic_shared);
    config.stream = stream;
    cudaLaunchAttribute attributes[2];
    config.attrs = attributes;
    if (shape.cluster > 1) {
      cudaLaunchAttribute& cluster = attributes[config.numAttrs++];
      cluster.id = cudaLaunchAttributeClusterDimension;
      cluster.val.clusterDim = {static_cast<unsigned>(shape.cluster), 1, 1};
    }
    if (loaded.waits) {
      cudaLaunchAttribute& early = attributes[config.numAttrs++];
      early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
      early.val.programmaticStreamSerializationAllowed = 1;
    }
    cuda_check(cudaLaunchKernelExC(&config, loaded.function, all), kernel_.name);
  }

  template <typename... Arguments>
  void launch_triton(const Context& ctx, int device, dim3 grid, cudaStream_t stream, Arguments... arguments) {
    void* scratch = nullptr;
    launch(ctx, device, LaunchShape{grid}, stream, arguments..., scratch, scratch);
  }

 private:
  struct Loaded {
    const void* function = nullptr;
    int shared_bytes = 0;
    bool waits = false;
  };

  const KernelImage* image_for(int major, int minor) const {
    const int capability = 10 * major + minor;
    for (const KernelImage& image : kernel_.images)
      if (image.first <= capability && capability <= image.last) return &image;
    return nullptr;
  }

  const Loaded& on(const Context& ctx, int device) {
    std::call_once(once_[device], [&] { loaded_[device] = load(ctx, device); });
    return loaded_[device];
  }

  Loaded load(const Context& ctx, int device) {
    int major = 0, minor = 0, most_shared = 0;
    cuda_check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "cudaDeviceGetAttribute");
    cuda_check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device), "cudaDeviceGetAttribute");
    cuda_check(cudaDeviceGetAttribute(&most_shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
               "cudaDeviceGetAttribute");
    const auto refuse = [&]() -> std::runtime_error {
      return std::runtime_error(std::string("kvc.") + ctx.op + ": the GPU must be one of the built architectures (" +
                                KVC_CUDA_ARCHS + "), got sm_" + std::to_string(major) + std::to_string(minor));
    };
    const KernelImage* image = image_for(major, minor);
    if (image == nullptr) throw refuse();
    // Loading inside a capture is not part of what is captured.
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    cuda_check(cudaThreadExchangeStreamCaptureMode(&mode), "cudaThreadExchangeStreamCaptureMode");
    cudaLibrary_t library{};
    cudaKernel_t function{};
    cudaError_t status = cudaLibraryLoadData(&library, image->data, nullptr, nullptr, 0, nullptr, nullptr, 0);
    if (status == cudaSuccess) status = cudaLibraryGetKernel(&function, library, image->entry);
    if (status == cudaSuccess && image->shared_bytes == 0)
      status =
          cudaKernelSetAttributeForDevice(function, cudaFuncAttributeMaxDynamicSharedMemorySize, most_shared, device);
    (void)cudaThreadExchangeStreamCaptureMode(&mode);
    if (status == cudaErrorNoKernelImageForDevice || status == cudaErrorInvalidPtx ||
        status == cudaErrorUnsupportedPtxVersion) {
      (void)cudaGetLastError();
      throw refuse();
    }
    cuda_check(status, "cudaLibraryLoadData");
    int driver = 0;
    cuda_check(cudaDriverGetVersion(&driver), "cudaDriverGetVersion");
    const bool may_wait = driver >= 12030;  // drivers before CUDA 12.3 do not capture such launches
    return {reinterpret_cast<const void*>(function), image->shared_bytes, image->waits && may_wait};
  }

  const CompiledKernel& kernel_;
  std::once_flag once_[kMaxDevices];
  Loaded loaded_[kMaxDevices];
};

}  // namespace kvc
