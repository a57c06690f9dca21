// Reading the tensors of a call: the device they share, lists, index tensors, and outputs that the caller gave.
#pragma once

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include "common/checks.h"

namespace kvc {

using Sizes = std::vector<int64_t>;

inline std::string indexed(const char* name, int64_t i) { return std::string(name) + "[" + std::to_string(i) + "]"; }

// The tensors of a list argument: the handles that the call was given, without the allocation that a Tensor each costs.
class TensorList {
 public:
  explicit TensorList(std::vector<AtenTensorHandle> handles) : handles_(std::move(handles)) {}
  TensorList(TensorList&&) = default;
  TensorList& operator=(TensorList&&) = delete;
  ~TensorList() {
    for (const AtenTensorHandle handle : handles_) (void)aoti_torch_delete_tensor_object(handle);
  }
  size_t size() const { return handles_.size(); }
  bool empty() const { return handles_.empty(); }
  AtenTensorHandle operator[](size_t i) const { return handles_[i]; }
  Tensor tensor(size_t i) const {
    AtenTensorHandle handle = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(handles_[i], &handle));
    return Tensor(handle);
  }

 private:
  std::vector<AtenTensorHandle> handles_;
};

// What the host asks of a tensor, each fact by one call into torch. Sizes and strides are the tensor's own.
struct Facts {
  Facts() = default;
  explicit Facts(AtenTensorHandle tensor) {
    int64_t *own_sizes = nullptr, *own_strides = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor, &device_type));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(tensor, &device_index));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor, &dtype));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(tensor, &dim));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(tensor, &own_sizes));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(tensor, &own_strides));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(tensor, &data));
    sizes = own_sizes;
    strides = own_strides;
  }
  explicit Facts(const Tensor& tensor) : Facts(tensor.get()) {}

  ScalarType scalar_type() const { return torch::stable::detail::to<ScalarType>(torch::stable::detail::from(dtype)); }
  int64_t element_size() const { return static_cast<int64_t>(aoti_torch_dtype_element_size(dtype)); }
  bool is(ScalarType type) const {
    return dtype == torch::stable::detail::to<int32_t>(torch::stable::detail::from(type));
  }
  bool contiguous() const {
    int64_t expected = 1;
    bool dense = true;
    for (int64_t d = dim; d-- > 0; expected *= sizes[d]) dense = dense && (sizes[d] == 1 || strides[d] == expected);
    return dense || expected == 0;
  }
  // Alike but for the memory: what holds of one then holds of the other.
  bool alike(const Facts& f) const {
    return device_type == f.device_type && device_index == f.device_index && dtype == f.dtype && dim == f.dim &&
           std::equal(sizes, sizes + dim, f.sizes) && std::equal(strides, strides + dim, f.strides);
  }

  int32_t device_type = 0, device_index = 0;
  int32_t dtype = 0;  // torch's code
  int64_t dim = 0;
  const int64_t *sizes = nullptr, *strides = nullptr;
  void* data = nullptr;
};

// The device every tensor of a call must be on.
struct Home {
  explicit Home(const Tensor& tensor)
      : cpu(tensor.is_cpu()), index(cpu ? 0 : static_cast<int32_t>(tensor.get_device_index())) {}
  explicit Home(const Facts& f) : cpu(f.device_type == aoti_torch_device_type_cpu()), index(cpu ? 0 : f.device_index) {}
  bool has(const Tensor& tensor) const {
    return cpu ? tensor.is_cpu() : tensor.is_cuda() && static_cast<int32_t>(tensor.get_device_index()) == index;
  }
  bool has(const Facts& f) const {
    return cpu ? f.device_type == aoti_torch_device_type_cpu()
               : f.device_type == aoti_torch_device_type_cuda() && f.device_index == index;
  }
  std::string name() const { return cpu ? "cpu" : "cuda:" + std::to_string(index); }
  void reject(const Context& ctx, const Tensor& tensor, const std::string& argument) const {
    ctx.type_error(argument, "on " + name(), Context::describe_device(tensor));
  }
  bool cpu;
  int32_t index;
};

// What `read(facts, index)` makes of each tensor of a list. Of tensors in a row that are alike, as pools mostly are,
// the first is read and the others are the same at another `base`.
template <typename Pool, typename Read>
std::vector<Pool> read_list(const TensorList& list, Read&& read) {
  std::vector<Pool> pools(list.size());
  Facts before;
  for (size_t i = 0; i < pools.size(); ++i) {
    const Facts f(list[i]);
    if (i > 0 && f.alike(before)) {
      pools[i] = pools[i - 1];
      pools[i].base = static_cast<decltype(Pool::base)>(f.data);
    } else {
      pools[i] = read(f, i);
    }
    before = f;
  }
  return pools;
}

inline void check_indices(const Context& ctx, const Tensor& tensor, const char* argument, const Home& home) {
  if (tensor.scalar_type() != ScalarType::Int) ctx.dtype(tensor, ScalarType::Int, argument);
  if (!home.has(tensor)) home.reject(ctx, tensor, argument);
}

// A contiguous tensor on the device of another one. On a GPU it goes past the dispatcher's boxed call, whose host cost
// is that of a launch.
inline Tensor new_output(const Tensor& like, const Sizes& sizes, ScalarType dtype = ScalarType::Int) {
  if (like.is_cpu()) return torch::stable::new_empty(like, sizes, dtype);
  Sizes strides(sizes.size());
  int64_t stride = 1;
  for (size_t d = sizes.size(); d-- > 0; stride *= std::max<int64_t>(sizes[d], 1)) strides[d] = stride;
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(
      aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(),
                               torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype)),
                               aoti_torch_device_type_cuda(), like.get_device_index(), &handle));
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
