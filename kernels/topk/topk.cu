// CUDA side of the top-k ops.

#include "common/launch_compiled.h"
#include "topk/select.cuh"

namespace kvc::topk {
namespace {

void check_cuda(const Context& ctx, const Tensor& scores) {
  if (!scores.is_cuda()) ctx.type_error("scores", "a CUDA tensor", Context::describe_device(scores));
}

Tensor radix_topk(Tensor scores, Tensor lengths, int64_t k, std::optional<Tensor> bases) {
  const Context ctx{"radix_topk"};
  check_cuda(ctx, scores);
  const DeviceScope scope(scores);
  Call call = read_radix_topk(ctx, scores, lengths, k, bases, Home(scores));
  return new_selection(scores, call, [&](const Call& c) { select(ctx, c.selection, scope); });
}

void radix_topk_out(Tensor scores, Tensor lengths, int64_t k, std::optional<Tensor> bases, Tensor out) {
  const Context ctx{"radix_topk"};
  check_cuda(ctx, scores);
  const DeviceScope scope(scores);
  const Home home(scores);
  Call call = read_radix_topk(ctx, scores, lengths, k, bases, home);
  selection_into(ctx, out, scores, lengths, nullptr, bases, home, call,
                 [&](const Call& c) { select(ctx, c.selection, scope); });
}

}  // namespace
}  // namespace kvc::topk

STABLE_TORCH_LIBRARY_IMPL(KVC_NAMESPACE, CUDA, m) {
  m.impl("radix_topk", TORCH_BOX(&kvc::topk::radix_topk));
  m.impl("radix_topk.out", TORCH_BOX(&kvc::topk::radix_topk_out));
}
