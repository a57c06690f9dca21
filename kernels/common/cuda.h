// What every CUDA op needs around its launch: device guard, current stream, architecture gate, error checks.
#pragma once

#include <cuda_runtime.h>

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>

#include "common/checks.h"

namespace kvc {

inline void cuda_check(cudaError_t status, const char* what) {
  if (status != cudaSuccess)
    throw std::runtime_error(std::string("CUDA error in ") + what + ": " + cudaGetErrorString(status));
}

// Makes the tensors' device current and finds its stream.
class DeviceScope {
 public:
  explicit DeviceScope(const Tensor& tensor) : device(tensor.get_device_index()), guard_(device) {
    void* raw = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &raw));
    stream = static_cast<cudaStream_t>(raw);
  }
  int32_t device;
  cudaStream_t stream;

 private:
  torch::stable::accelerator::DeviceGuard guard_;
};

constexpr int kMaxDevices = 128;

// Facts of a device that do not change, read once.
struct DeviceFacts {
  int multiprocessors = 0;
  bool supported = false;
  int major = 0, minor = 0;
};

// `probe` is any kernel of the library: it has an image for the device or it does not.
inline const DeviceFacts& device_facts(const Context& ctx, int device, const void* probe) {
  static DeviceFacts known[kMaxDevices];
  DeviceFacts& facts = known[device];
  if (facts.multiprocessors == 0) {
    DeviceFacts read;
    cuda_check(cudaDeviceGetAttribute(&read.major, cudaDevAttrComputeCapabilityMajor, device),
               "cudaDeviceGetAttribute");
    cuda_check(cudaDeviceGetAttribute(&read.minor, cudaDevAttrComputeCapabilityMinor, device),
               "cudaDeviceGetAttribute");
    int multiprocessors = 0;
    cuda_check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device),
               "cudaDeviceGetAttribute");
    cudaFuncAttributes attributes;
    read.supported = cudaFuncGetAttributes(&attributes, probe) == cudaSuccess;
    if (!read.supported) (void)cudaGetLastError();
    facts = read;
    facts.multiprocessors = multiprocessors;
  }
  if (!facts.supported)
    throw std::runtime_error(std::string("kvc.") + ctx.op + ": the GPU must be one of the built architectures (" +
                             KVC_CUDA_ARCHS + "), got sm_" + std::to_string(facts.major) + std::to_string(facts.minor));
  return facts;
}

}  // namespace kvc
