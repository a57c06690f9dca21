// CUDA errors and facts of a device, without torch.
#pragma once

#include <cuda_runtime.h>

#include <mutex>
#include <stdexcept>
#include <string>

namespace kvc {

inline void cuda_check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  (void)cudaGetLastError();  // nobody else is to be blamed for it
  throw std::runtime_error(std::string("CUDA error in ") + what + ": " + cudaGetErrorString(status));
}

constexpr int kMaxDevices = 128;

// Facts of a device that do not change, read once.
struct DeviceFacts {
  int multiprocessors = 0;
  bool supported = false;
  int major = 0, minor = 0;
};

// `probe` is any kernel of the library: it has an image for the device or it does not.
inline const DeviceFacts& device_facts(const char* op, int device, const void* probe) {
  static DeviceFacts known[kMaxDevices];
  static std::once_flag read[kMaxDevices];
  std::call_once(read[device], [&] {  // a failure throws, and the next call tries again
    DeviceFacts facts;
    const auto attribute = [device](int* value, cudaDeviceAttr name) {
      cuda_check(cudaDeviceGetAttribute(value, name, device), "cudaDeviceGetAttribute");
    };
    attribute(&facts.major, cudaDevAttrComputeCapabilityMajor);
    attribute(&facts.minor, cudaDevAttrComputeCapabilityMinor);
    attribute(&facts.multiprocessors, cudaDevAttrMultiProcessorCount);
    // The first look at a kernel may load the library, which a capture in strict mode would refuse.
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    cuda_check(cudaThreadExchangeStreamCaptureMode(&mode), "cudaThreadExchangeStreamCaptureMode");
    cudaFuncAttributes attributes;
    const cudaError_t status = cudaFuncGetAttributes(&attributes, probe);
    cuda_check(cudaThreadExchangeStreamCaptureMode(&mode), "cudaThreadExchangeStreamCaptureMode");
    const bool missing = status == cudaErrorNoKernelImageForDevice || status == cudaErrorInvalidDeviceFunction ||
                         status == cudaErrorInvalidPtx || status == cudaErrorUnsupportedPtxVersion;
    if (missing) (void)cudaGetLastError();
    else cuda_check(status, "cudaFuncGetAttributes");
    facts.supported = !missing;
    known[device] = facts;
  });
  const DeviceFacts& facts = known[device];
  if (!facts.supported)
    throw std::runtime_error(std::string("kvc.") + op + ": the GPU must be one of the built architectures (" +
                             KVC_CUDA_ARCHS + "), got sm_" + std::to_string(facts.major) + std::to_string(facts.minor));
  return facts;
}

}  // namespace kvc
