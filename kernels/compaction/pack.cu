// CUDA side of the packing ops: launches the Triton kernels of pack.py.

#include "common/boxing.h"
#include "common/launch_compiled.h"
#include "compaction/arguments.h"

namespace kvc::compiled {
extern const CompiledKernel pack_move_sources, pack_fill_moves;
}

namespace kvc::compaction {
namespace {

constexpr int64_t kBlock = 1024;     // columns a program of pack_move_sources fills at a time: BLOCK of pack.py
constexpr int64_t kClearing = 4;     // most programs a row and block that clear columns of no request
constexpr int64_t kMaxRows = 65535;  // of a grid; programs walk over further ones

int32_t int32(int64_t value) { return static_cast<int32_t>(value); }

int64_t clearing_programs(const Packing& p, int64_t columns) {
  return std::clamp<int64_t>(std::max(p.total, p.side_total) / columns, 1, kClearing);
}

void pack_sources(const Context& ctx, const Packing& p, int32_t* dense, int32_t* swa, const DeviceScope& scope) {
  static KernelLoader kernel(compiled::pack_move_sources);
  const int64_t side_rows = p.side_offsets ? p.side_rows : 0;
  // As many programs a request as its usual moves need: K, or the window. The tail is a second round of some.
  const int64_t usual = std::max(p.kept_count, side_rows ? p.window : 0);
  const int64_t blocks = std::clamp<int64_t>((usual + kBlock - 1) / kBlock, 1, INT32_MAX / (p.requests + kClearing));
  const int64_t programs = (p.requests + clearing_programs(p, blocks * kBlock)) * blocks;
  const dim3 grid(static_cast<unsigned>(programs), static_cast<unsigned>(std::min(p.rows + side_rows, kMaxRows)));
  kernel.launch_triton(ctx, scope.device, grid, scope.stream, p.kept, p.valid_lengths, p.offsets,
                       side_rows ? p.side_offsets : p.offsets, dense, swa, int32(p.requests), int32(p.decision_rows),
                       int32(p.kept_count), int32(p.window), int32(p.rows), int32(p.total), int32(side_rows),
                       int32(p.side_total), int32(blocks));
}

void pack_fills(const Context& ctx, const Packing& p, int32_t* sources, int32_t* destinations, int32_t* tail,
                const DeviceScope& scope) {
  static KernelLoader kernel(compiled::pack_fill_moves);
  const dim3 grid(static_cast<unsigned>(p.requests + clearing_programs(p, kBlock)),
                  static_cast<unsigned>(std::min(p.rows + p.side_rows, kMaxRows)));
  kernel.launch_triton(ctx, scope.device, grid, scope.stream, p.kept, p.valid_lengths, p.bases, p.offsets,
                       p.side_offsets, sources, destinations, tail, int32(p.requests), int32(p.decision_rows),
                       int32(p.kept_count), int32(p.rows), int32(p.total), int32(p.side_rows), int32(p.side_total));
}

// Debug mode: the same packing in terms of host copies.
void check_on_host(const Context& ctx, const Packing& p, cudaStream_t stream) {
  Packing host = p;
  std::vector<std::vector<int32_t>> copies;
  const auto fetch = [&](const int32_t*& values, int64_t count) {
    if (values == nullptr) return;
    copies.emplace_back(static_cast<size_t>(count) + 1);  // never without an address
    if (count > 0)
      cuda_check(
          cudaMemcpyAsync(copies.back().data(), values, static_cast<size_t>(count) * 4, cudaMemcpyDeviceToHost, stream),
          "cudaMemcpyAsync");
    values = copies.back().data();
  };
  fetch(host.kept, p.requests * p.decision_rows * p.kept_count);
  fetch(host.valid_lengths, p.requests);
  fetch(host.offsets, p.requests + 1);
  fetch(host.side_offsets, p.requests + 1);
  fetch(host.bases, p.requests);
  cuda_check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  check_packing(ctx, host);
}

// Fills the outputs of either op; `second` counts for pack_fill_moves only.
void pack(const Context& ctx, const DeviceScope& scope, const Packing& p, int32_t* first, int32_t* second,
          int32_t* side) {
  if (debug_mode) check_on_host(ctx, p, scope.stream);
  if (p.total == 0 && p.side_total == 0) return;
  p.fill ? pack_fills(ctx, p, first, second, side, scope) : pack_sources(ctx, p, first, side, scope);
}

void check_cuda(const Context& ctx, const Tensor& kept) {
  if (!kept.is_cuda()) ctx.type_error("kept", "a CUDA tensor", Context::describe_device(kept));
}

std::tuple<Tensor, Tensor> pack_move_sources(Tensor kept, Tensor valid_lengths, Tensor dense_offsets,
                                             std::optional<Tensor> swa_offsets, int64_t window, int64_t num_layers,
                                             int64_t num_kv_heads, int64_t dense_total, int64_t swa_total) {
  const Context ctx{"pack_move_sources"};
  check_cuda(ctx, kept);
  const DeviceScope scope(kept);
  return move_sources(kept,
                      read_move_sources(ctx, kept, valid_lengths, dense_offsets, swa_offsets, window, num_layers,
                                        num_kv_heads, dense_total, swa_total),
                      [&](auto&&... arguments) { pack(ctx, scope, arguments...); });
}

void pack_move_sources_out(Tensor kept, Tensor valid_lengths, Tensor dense_offsets, std::optional<Tensor> swa_offsets,
                           int64_t window, int64_t num_layers, int64_t num_kv_heads, int64_t dense_total,
                           int64_t swa_total, Tensor dense, Tensor swa) {
  const Context ctx{"pack_move_sources"};
  check_cuda(ctx, kept);
  const DeviceScope scope(kept);
  move_sources_out(ctx, kept,
                   read_move_sources(ctx, kept, valid_lengths, dense_offsets, swa_offsets, window, num_layers,
                                     num_kv_heads, dense_total, swa_total),
                   dense, swa, [&](auto&&... arguments) { pack(ctx, scope, arguments...); });
}

std::tuple<Tensor, Tensor, Tensor> pack_fill_moves(Tensor kept, Tensor valid_lengths, Tensor bases, Tensor fill_offsets,
                                                   Tensor tail_offsets, int64_t num_layers, int64_t num_kv_heads,
                                                   int64_t fill_total, int64_t tail_total) {
  const Context ctx{"pack_fill_moves"};
  check_cuda(ctx, kept);
  const DeviceScope scope(kept);
  return fill_moves(kept,
                    read_fill_moves(ctx, kept, valid_lengths, bases, fill_offsets, tail_offsets, num_layers,
                                    num_kv_heads, fill_total, tail_total),
                    [&](auto&&... arguments) { pack(ctx, scope, arguments...); });
}

void pack_fill_moves_out(Tensor kept, Tensor valid_lengths, Tensor bases, Tensor fill_offsets, Tensor tail_offsets,
                         int64_t num_layers, int64_t num_kv_heads, int64_t fill_total, int64_t tail_total,
                         Tensor sources, Tensor destinations, Tensor tail_sources) {
  const Context ctx{"pack_fill_moves"};
  check_cuda(ctx, kept);
  const DeviceScope scope(kept);
  fill_moves_out(ctx, kept,
                 read_fill_moves(ctx, kept, valid_lengths, bases, fill_offsets, tail_offsets, num_layers, num_kv_heads,
                                 fill_total, tail_total),
                 sources, destinations, tail_sources, [&](auto&&... arguments) { pack(ctx, scope, arguments...); });
}

}  // namespace
}  // namespace kvc::compaction

STABLE_TORCH_LIBRARY_IMPL(KVC_NAMESPACE, CUDA, m) {
  m.impl("pack_move_sources", kvc::boxed<&kvc::compaction::pack_move_sources>);
  m.impl("pack_move_sources.out", kvc::boxed<&kvc::compaction::pack_move_sources_out>);
  m.impl("pack_fill_moves", kvc::boxed<&kvc::compaction::pack_fill_moves>);
  m.impl("pack_fill_moves.out", kvc::boxed<&kvc::compaction::pack_fill_moves_out>);
}
