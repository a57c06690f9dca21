// What the top-k ops were given, checked. Shared by the CPU and the CUDA ops.
#pragma once

#include <optional>

#include "common/operands.h"

namespace kvc::topk {

enum class Score { kFloat, kHalf, kBFloat16 };

// One radix_topk: the k largest of each row.
struct Selection {
  const void* scores = nullptr;  // aligned to an element only
  Score dtype = Score::kFloat;
  int64_t row_stride = 0;  // in elements; 0: every row is the same memory
  int64_t rows = 0, width = 0, k = 0;
  const int32_t* lengths = nullptr;  // [rows], not yet clamped to [0, width]
  const int32_t* bases = nullptr;    // [rows], or null for zeros
  int32_t* out = nullptr;            // [rows, k], contiguous
  const Tensor* like = nullptr;      // of the device, for scratch memory
};

// One settle_ties: the same selection from another one's answer, of which k are the columns.
struct Provisional {
  const void* indices = nullptr;  // [rows, k], contiguous
  bool wide = false;              // int64, else int32
};

// A checked call: keeps the copies of arguments that were not contiguous.
struct Call {
  Selection selection;
  Provisional provisional;
  std::vector<Tensor> copies;
  Sizes sizes;

  const void* contiguous(const Tensor& tensor) {
    if (tensor.is_contiguous()) return tensor.data_ptr();
    copies.push_back(torch::stable::contiguous(tensor));
    return copies.back().data_ptr();
  }
  bool empty() const { return selection.rows == 0 || selection.k == 0; }
};

inline Score read_dtype(const Context& ctx, const Tensor& scores) {
  switch (scores.scalar_type()) {
    case ScalarType::Float: return Score::kFloat;
    case ScalarType::Half: return Score::kHalf;
    case ScalarType::BFloat16: return Score::kBFloat16;
    default:
      ctx.type_error("scores", "torch.float32, torch.float16 or torch.bfloat16", Context::name(scores.scalar_type()));
  }
}

inline const int32_t* read_per_row(const Context& ctx, const Tensor& tensor, const char* argument, const Home& home,
                                   Call& call) {
  check_indices(ctx, tensor, argument, home);
  const int64_t rows = call.selection.rows;
  if (tensor.dim() != 1 || tensor.size(0) != rows)
    ctx.value_error(argument, "int32 [rows] = [" + std::to_string(rows) + "]", Context::describe_shape(tensor));
  return static_cast<const int32_t*>(call.contiguous(tensor));
}

inline Call read_scores(const Context& ctx, const Tensor& scores, const Tensor& lengths,
                        const std::optional<Tensor>& bases, const Home& home) {
  Call call;
  Selection& s = call.selection;
  s.dtype = read_dtype(ctx, scores);
  if (scores.dim() != 2 || (scores.size(1) > 1 && scores.stride(1) != 1))
    ctx.value_error("scores", "[rows, W] with unit stride in dim 1", Context::describe_shape(scores));
  s.rows = scores.size(0);
  s.width = scores.size(1);
  if (s.rows >= INT32_MAX || s.width >= INT32_MAX)
    ctx.value_error("scores", "of fewer than 2^31 - 1 rows and columns", Context::describe_shape(scores));
  s.scores = scores.data_ptr();
  s.row_stride = s.rows > 1 ? scores.stride(0) : s.width;
  s.lengths = read_per_row(ctx, lengths, "lengths", home, call);
  if (bases) s.bases = read_per_row(ctx, *bases, "bases", home, call);
  s.like = &scores;
  return call;
}

inline Call read_radix_topk(const Context& ctx, const Tensor& scores, const Tensor& lengths, int64_t k,
                            const std::optional<Tensor>& bases, const Home& home) {
  Call call = read_scores(ctx, scores, lengths, bases, home);
  if (k < 1) ctx.value_error("k", "at least 1", k);
  call.selection.k = k;
  call.sizes = {call.selection.rows, k};
  return call;
}

inline Call read_settle_ties(const Context& ctx, const Tensor& scores, const Tensor& lengths, const Tensor& provisional,
                             const std::optional<Tensor>& bases, const Home& home) {
  Call call = read_scores(ctx, scores, lengths, bases, home);
  const ScalarType type = provisional.scalar_type();
  if (type != ScalarType::Int && type != ScalarType::Long)
    ctx.type_error("provisional", "torch.int32 or torch.int64", Context::name(type));
  if (!home.has(provisional)) home.reject(ctx, provisional, "provisional");
  if (provisional.dim() != 2 || provisional.size(0) != call.selection.rows)
    ctx.value_error("provisional", "[rows, k] with rows = " + std::to_string(call.selection.rows),
                    Context::describe_shape(provisional));
  call.selection.k = provisional.size(1);
  call.sizes = {call.selection.rows, call.selection.k};
  call.provisional = {call.contiguous(provisional), type == ScalarType::Long};
  return call;
}

inline void check_apart(const Context& ctx, const Tensor& out, const Tensor& argument, const char* name) {
  if (may_alias(out, argument))
    ctx.value_error("out", std::string("apart from ") + name, std::string("memory that ") + name + " lies in");
}

// The two ops of a device, but for what does the work: `run(call)` fills call.selection.out.
template <typename Run>
Tensor new_selection(const Tensor& scores, Call& call, Run&& run) {
  Tensor out = new_output(scores, call.sizes);
  call.selection.out = static_cast<int32_t*>(out.data_ptr());
  if (!call.empty()) run(call);
  return out;
}

template <typename Run>
void selection_into(const Context& ctx, const Tensor& out, const Tensor& scores, const Tensor& lengths,
                    const Tensor* provisional, const std::optional<Tensor>& bases, const Home& home, Call& call,
                    Run&& run) {
  check_output(ctx, out, "out", call.sizes, home);
  if (may_overlap(out)) ctx.value_error("out", "free of elements that share memory", Context::describe_shape(out));
  check_apart(ctx, out, scores, "scores");
  check_apart(ctx, out, lengths, "lengths");
  if (provisional) check_apart(ctx, out, *provisional, "provisional");
  if (bases) check_apart(ctx, out, *bases, "bases");
  Output output(out, call.sizes);
  call.selection.out = output.data();
  if (!call.empty()) run(call);
  output.finish();
}

}  // namespace kvc::topk
