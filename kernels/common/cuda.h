// What every CUDA op needs around its launch: device guard, current stream, architecture gate, error checks.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>

#include "common/checks.h"
#include "common/device.h"

namespace kvc {

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

inline const DeviceFacts& device_facts(const Context& ctx, int device, const void* probe) {
  return device_facts(ctx.op, device, probe);
}

}  // namespace kvc
