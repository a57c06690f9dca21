// CUDA side of the top-k ops.

#include "common/boxing.h"
#include "topk/kernels.h"

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

Tensor settle_ties(Tensor scores, Tensor lengths, Tensor provisional, std::optional<Tensor> bases) {
  const Context ctx{"settle_ties"};
  check_cuda(ctx, scores);
  const DeviceScope scope(scores);
  Call call = read_settle_ties(ctx, scores, lengths, provisional, bases, Home(scores));
  return new_selection(scores, call, [&](const Call& c) { settle(ctx, c.selection, c.provisional, scope); });
}

void settle_ties_out(Tensor scores, Tensor lengths, Tensor provisional, std::optional<Tensor> bases, Tensor out) {
  const Context ctx{"settle_ties"};
  check_cuda(ctx, scores);
  const DeviceScope scope(scores);
  const Home home(scores);
  Call call = read_settle_ties(ctx, scores, lengths, provisional, bases, home);
  selection_into(ctx, out, scores, lengths, &provisional, bases, home, call,
                 [&](const Call& c) { settle(ctx, c.selection, c.provisional, scope); });
}

}  // namespace
}  // namespace kvc::topk

STABLE_TORCH_LIBRARY_IMPL(KVC_NAMESPACE, CUDA, m) {
  m.impl("radix_topk", kvc::boxed<&kvc::topk::radix_topk>);
  m.impl("radix_topk.out", kvc::boxed<&kvc::topk::radix_topk_out>);
  m.impl("settle_ties", kvc::boxed<&kvc::topk::settle_ties>);
  m.impl("settle_ties.out", kvc::boxed<&kvc::topk::settle_ties_out>);
}
