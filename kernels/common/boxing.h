// How torch's call of an op reaches its C++ function.
#pragma once

#include <Python.h>

#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "common/operands.h"

namespace kvc {

// torch takes Python's lock for every tensor whose last reference beside Python's own goes, and a call gives back all
// of its arguments: with the lock held throughout, that costs a third where lists are long. Threads that Python does
// not know have no part in it. As with any op: who holds a lock that a thread with Python's waits for, must not call.
class PythonLock {
 public:
  PythonLock() : held_(Py_IsInitialized() && PyGILState_GetThisThreadState() != nullptr) {
    if (held_) state_ = PyGILState_Ensure();
  }
  ~PythonLock() {
    if (held_) PyGILState_Release(state_);
  }
  PythonLock(const PythonLock&) = delete;
  PythonLock& operator=(const PythonLock&) = delete;

 private:
  bool held_;
  PyGILState_STATE state_{};
};

template <typename T>
T take(StableIValue value) {
  return torch::stable::detail::to<T>(value);
}

template <>
inline TensorList take<TensorList>(StableIValue value) {
  const auto list = torch::stable::detail::to<StableListHandle>(value);
  size_t size = 0;
  TORCH_ERROR_CODE_CHECK(torch_list_size(list, &size));
  std::vector<AtenTensorHandle> handles(size);
  for (size_t i = 0; i < size; ++i) {
    StableIValue item = 0;
    TORCH_ERROR_CODE_CHECK(torch_list_get_item(list, i, &item));
    handles[i] = torch::stable::detail::to<AtenTensorHandle>(item);
  }
  TORCH_ERROR_CODE_CHECK(torch_delete_list(list));
  return TensorList(std::move(handles));
}

// torch's own conversion leaks a string.
template <>
inline std::string take<std::string>(StableIValue value) {
  const auto string = torch::stable::detail::to<StringHandle>(value);
  size_t length = 0;
  const char* data = nullptr;
  TORCH_ERROR_CODE_CHECK(torch_string_length(string, &length));
  TORCH_ERROR_CODE_CHECK(torch_string_c_str(string, &data));
  std::string text(data, length);
  TORCH_ERROR_CODE_CHECK(torch_delete_string(string));
  return text;
}

// The arguments of a call, given back under one lock if there is a list among them, also when the op throws.
template <typename... Values>
struct Arguments {
  std::optional<PythonLock> lock;  // before the values, so that it outlives them
  std::tuple<Values...> values;
  ~Arguments() {
    if constexpr ((std::is_same_v<Values, TensorList> || ...)) lock.emplace();
  }
};

template <typename Op>
struct Boxing;

template <typename Result, typename... Parameters>
struct Boxing<Result (*)(Parameters...)> {
  template <Result (*kOp)(Parameters...), size_t... kIndex>
  static void call(StableIValue* stack, std::index_sequence<kIndex...>) {
    Arguments<std::decay_t<Parameters>...> arguments{{}, {take<std::decay_t<Parameters>>(stack[kIndex])...}};
    if constexpr (std::is_void_v<Result>) std::apply(kOp, arguments.values);
    else give(stack, std::apply(kOp, arguments.values));
  }
  template <Result (*kOp)(Parameters...)>
  static void boxed(StableIValue* stack, uint64_t arguments, uint64_t results) {
    // A library of another build than ops/_ops.py.
    STD_TORCH_CHECK(arguments == sizeof...(Parameters) && results == kResults,
                    "kvc: the schema of an op must be that of the installed library, got ", arguments,
                    " arguments and ", results, " results, not ", sizeof...(Parameters), " and ", kResults);
    call<kOp>(stack, std::index_sequence_for<Parameters...>{});
  }

 private:
  template <typename T>
  struct Count : std::integral_constant<uint64_t, std::is_void_v<T> ? 0 : 1> {};
  template <typename... Tensors>
  struct Count<std::tuple<Tensors...>> : std::integral_constant<uint64_t, sizeof...(Tensors)> {};
  static constexpr uint64_t kResults = Count<Result>::value;

  static void give(StableIValue* stack, const Tensor& result) { stack[0] = torch::stable::detail::from(result); }
  template <typename... Tensors>
  static void give(StableIValue* stack, const std::tuple<Tensors...>& results) {
    std::apply([&](const auto&... result) { ((*stack++ = torch::stable::detail::from(result)), ...); }, results);
  }
};

// What TORCH_BOX makes of a function, for less: m.impl("op", kvc::boxed<&op>).
template <auto kOp>
constexpr auto boxed = &Boxing<decltype(kOp)>::template boxed<kOp>;

}  // namespace kvc
