// Argument checks shared by the CPU and the CUDA library: every check is written once, its text reads
// "kvc.<op>: <argument> must be <expected>, got <actual>".
#pragma once

#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

namespace kvc {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// pybind11 turns std::invalid_argument into ValueError; TypeError and NotImplementedError have no std:: counterpart,
// so they travel as runtime_error and `ops/_ops.py` restores the Python type.
struct Context {
  const char* op;

  template <typename Got>
  [[noreturn]] void value_error(const std::string& argument, const std::string& expected, const Got& got) const {
    throw std::invalid_argument(text(argument, expected, describe(got)));
  }
  template <typename Got>
  [[noreturn]] void type_error(const std::string& argument, const std::string& expected, const Got& got) const {
    throw std::runtime_error(text(argument, expected, describe(got)));
  }
  void shape(bool ok, const char* argument, const char* expected, const Tensor& got) const {
    if (!ok) value_error(argument, expected, describe_shape(got));
  }
  void dtype(const Tensor& tensor, ScalarType expected, const std::string& argument) const {
    if (tensor.scalar_type() != expected) type_error(argument, name(expected), name(tensor.scalar_type()));
  }
  void cpu(const Tensor& tensor, const std::string& argument) const {
    if (!tensor.is_cpu()) type_error(argument, "a CPU tensor", describe_device(tensor));
  }

  static std::string describe_shape(const Tensor& t) {
    std::string out = "[";
    for (int64_t i = 0; i < t.dim(); ++i) out += (i ? ", " : "") + std::to_string(t.size(i));
    out += "] with strides [";
    for (int64_t i = 0; i < t.dim(); ++i) out += (i ? ", " : "") + std::to_string(t.stride(i));
    return out + "]";
  }
  static std::string describe_device(const Tensor& t) {
    return t.is_cuda() ? "cuda:" + std::to_string(t.get_device_index()) : t.is_cpu() ? "cpu" : "another device";
  }
  static std::string name(ScalarType type) {
    switch (type) {
      case ScalarType::Byte: return "torch.uint8";
      case ScalarType::Char: return "torch.int8";
      case ScalarType::Short: return "torch.int16";
      case ScalarType::Int: return "torch.int32";
      case ScalarType::Long: return "torch.int64";
      case ScalarType::Half: return "torch.float16";
      case ScalarType::BFloat16: return "torch.bfloat16";
      case ScalarType::Float: return "torch.float32";
      case ScalarType::Double: return "torch.float64";
      case ScalarType::Bool: return "torch.bool";
      case ScalarType::Float8_e4m3fn: return "torch.float8_e4m3fn";
      case ScalarType::Float8_e5m2: return "torch.float8_e5m2";
      default: return "dtype code " + std::to_string(static_cast<int>(type));
    }
  }

 private:
  std::string text(const std::string& argument, const std::string& expected, const std::string& got) const {
    return std::string("kvc.") + op + ": " + argument + " must be " + expected + ", got " + got;
  }
  static std::string describe(const std::string& got) { return got; }
  static std::string describe(const char* got) { return got; }
  static std::string describe(int64_t got) { return std::to_string(got); }
  static std::string describe(double got) { return std::to_string(got); }
};

// Whether two elements of a tensor may share memory: ordered by stride, a dimension must step over those below it.
inline bool may_overlap(int64_t dim, const int64_t* sizes, const int64_t* strides) {
  std::vector<std::pair<int64_t, int64_t>> dims;
  for (int64_t i = 0; i < dim; ++i) {
    if (sizes[i] == 0) return false;
    if (sizes[i] > 1) dims.emplace_back(strides[i], sizes[i]);
  }
  std::sort(dims.begin(), dims.end());
  int64_t reach = 0;
  for (const auto& [stride, size] : dims) {
    if (stride <= reach) return true;
    reach += stride * (size - 1);
  }
  return false;
}
inline bool may_overlap(const Tensor& tensor) {
  return may_overlap(tensor.dim(), tensor.sizes().data(), tensor.strides().data());
}

// Whether the memory between the first and the last element of one tensor meets that of another.
inline bool may_alias(const Tensor& a, const Tensor& b) {
  const auto range = [](const Tensor& t) {
    int64_t last = 0;
    for (int64_t i = 0; i < t.dim(); ++i) last += (t.size(i) - 1) * t.stride(i);
    const auto begin = reinterpret_cast<uintptr_t>(t.data_ptr());
    return std::make_pair(
        begin,
        t.numel() == 0 ? begin : begin + static_cast<uintptr_t>((last + 1) * static_cast<int64_t>(t.element_size())));
  };
  const auto [a_begin, a_end] = range(a);
  const auto [b_begin, b_end] = range(b);
  return std::max(a_begin, b_begin) < std::min(a_end, b_end);
}

inline bool is_float(ScalarType type) {
  return type == ScalarType::Half || type == ScalarType::BFloat16 || type == ScalarType::Float ||
         type == ScalarType::Double || type == ScalarType::Float8_e4m3fn || type == ScalarType::Float8_e5m2;
}

// kvc.set_debug(True): values on the device are read back and checked too.
inline std::atomic<bool> debug_mode{false};

}  // namespace kvc
