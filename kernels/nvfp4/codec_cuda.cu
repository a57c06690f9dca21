// libkvc_codec_cuda.so: pools on one CUDA device, or in host memory.

#include <cuda_runtime.h>

#include <stdexcept>

#include "common/device.h"
#include "nvfp4/codec.h"

namespace kvc::nvfp4 {
namespace {

constexpr int64_t kPagesPerCut = 64;

// Makes a device current and what was current before afterwards.
class CurrentDevice {
 public:
  explicit CurrentDevice(int device) {
    cuda_check(cudaGetDevice(&before_), "cudaGetDevice");
    if (before_ != device) cuda_check(cudaSetDevice(device), "cudaSetDevice");
  }
  ~CurrentDevice() { (void)cudaSetDevice(before_); }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  int before_ = 0;
};

cudaPointerAttributes attributes(const void* pointer) {
  cudaPointerAttributes found{};
  if (cudaPointerGetAttributes(&found, pointer) != cudaSuccess) {
    (void)cudaGetLastError();
    found.type = cudaMemoryTypeUnregistered;
  }
  return found;
}

bool on_device(const cudaPointerAttributes& a) {
  return a.type == cudaMemoryTypeDevice || a.type == cudaMemoryTypeManaged;
}

class CudaMover final : public PageMover {
 public:
  CudaMover(int device, int64_t max_ctas) : device_(device), max_ctas_(max_ctas) {}

  uint8_t* address(void* cold) const override {
    const cudaPointerAttributes found = attributes(cold);
    const bool pinned = found.type == cudaMemoryTypeHost && found.devicePointer != nullptr;
    if (!pinned && !(on_device(found) && found.device == device_))
      throw std::invalid_argument(
          "kvc.ColdPageCodec: cold_base must be memory of the pools' device or pinned host memory, got another");
    return static_cast<uint8_t*>(pinned ? found.devicePointer : cold);
  }

  void move(PageWork work, bool encode, const void* cold, void* stream) const override {
    const CurrentDevice scope(device_);
    submit(std::move(work), encode, attributes(cold).type == cudaMemoryTypeHost, stream);
  }

 private:
  // Cut until everything a launch must know travels in the kernel's parameters: no memory is allocated.
  void submit(PageWork work, bool encode, bool host_cold, void* stream) const {
    if (page_scratch_bytes(work, true) == 0) {
      launch_pages("ColdPageCodec", encode, std::move(work), true, host_cold, max_ctas_, nullptr, device_, stream);
      return;
    }
    PageWork rest = work;
    if (work.pages > kPagesPerCut || work.segments.size() == 1) {
      work.pages /= 2;
      rest.pages -= work.pages;
      rest.pairs += work.pages * rest.pair_stride[0];
    } else {
      const auto middle = static_cast<int64_t>(work.segments.size() / 2);
      rest.segments.erase(rest.segments.begin(), rest.segments.begin() + middle);
      work.segments.resize(static_cast<size_t>(middle));
    }
    submit(std::move(work), encode, host_cold, stream);
    submit(std::move(rest), encode, host_cold, stream);
  }

  int device_;
  int64_t max_ctas_;
};

}  // namespace

std::unique_ptr<PageMover> make_mover(const std::vector<HotPool>& pools, int64_t max_ctas) {
  const cudaPointerAttributes first = attributes(pools.front().base);
  for (const HotPool& pool : pools) {
    const cudaPointerAttributes found = attributes(pool.base);
    if (on_device(found) != on_device(first) || (on_device(first) && found.device != first.device))
      throw std::invalid_argument("kvc.ColdPageCodec: pools must be all in host memory or all on one device, got both");
  }
  if (on_device(first)) return std::make_unique<CudaMover>(first.device, max_ctas);
  return make_host_mover();
}

}  // namespace kvc::nvfp4
