// Reading the tensors of a call: the device they share, index tensors, and outputs that the caller gave.
#pragma once

#include <string>
#include <vector>

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include "common/checks.h"

namespace kvc {

using Sizes = std::vector<int64_t>;

inline std::string indexed(const char* name, int64_t i) { return std::string(name) + "[" + std::to_string(i) + "]"; }

// The device every tensor of a call must be on, read once: a call may bring a hundred pools.
struct Home {
  explicit Home(const Tensor& tensor)
      : anchor(tensor), cpu(tensor.is_cpu()), index(cpu ? 0 : static_cast<int32_t>(tensor.get_device_index())) {}
  bool has(const Tensor& tensor) const {
    return cpu ? tensor.is_cpu() : tensor.is_cuda() && static_cast<int32_t>(tensor.get_device_index()) == index;
  }
  void reject(const Context& ctx, const Tensor& tensor, const std::string& argument) const {
    ctx.type_error(argument, "on " + Context::describe_device(anchor), Context::describe_device(tensor));
  }
  const Tensor& anchor;
  bool cpu;
  int32_t index;
};

inline void check_indices(const Context& ctx, const Tensor& tensor, const char* argument, const Home& home) {
  if (tensor.scalar_type() != ScalarType::Int) ctx.dtype(tensor, ScalarType::Int, argument);
  if (!home.has(tensor)) home.reject(ctx, tensor, argument);
}

// A contiguous int32 tensor on the device of another one. On a GPU it goes past the dispatcher's boxed call, whose host
// cost is that of a launch.
inline Tensor new_output(const Tensor& like, const Sizes& sizes) {
  if (like.is_cpu()) return torch::stable::new_empty(like, sizes, ScalarType::Int);
  Sizes strides(sizes.size());
  int64_t stride = 1;
  for (size_t d = sizes.size(); d-- > 0; stride *= std::max<int64_t>(sizes[d], 1)) strides[d] = stride;
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(),
                                                  aoti_torch_dtype_int32(), aoti_torch_device_type_cuda(),
                                                  like.get_device_index(), &handle));
  return Tensor(handle);
}

inline void check_output(const Context& ctx, const Tensor& out, const char* argument, const Sizes& sizes,
                         const Home& home) {
  check_indices(ctx, out, argument, home);
  bool same = out.dim() == static_cast<int64_t>(sizes.size());
  for (int64_t d = 0; same && d < out.dim(); ++d) same = out.size(d) == sizes[static_cast<size_t>(d)];
  if (same) return;
  std::string text;
  for (const int64_t size : sizes) text += (text.empty() ? "" : ", ") + std::to_string(size);
  ctx.value_error(argument, "int32 [" + text + "]", Context::describe_shape(out));
}

// An output given by the caller. The kernels write contiguous tensors; any other gets the copy of one.
class Output {
 public:
  Output(const Tensor& out, const Sizes& sizes)
      : out_(out), direct_(out.is_contiguous() ? out : new_output(out, sizes)) {}
  int32_t* data() const { return static_cast<int32_t*>(direct_.data_ptr()); }
  void finish() {
    if (direct_.get() != out_.get()) torch::stable::copy_(out_, direct_);
  }

 private:
  Tensor out_, direct_;
};

}  // namespace kvc
