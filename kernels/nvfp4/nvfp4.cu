// CUDA implementation of the nvfp4 ops: arguments in, launch_pages out.

#include <tuple>

#include "common/boxing.h"
#include "common/cuda.h"
#include "nvfp4/arguments.h"

namespace kvc::nvfp4 {
namespace {

// `anchor` is any tensor of the device, for the allocator; `host_pairs` says where work.pairs lies.
void run(const Context& ctx, bool encode, PageWork work, bool host_pairs, bool host_cold, int64_t max_ctas,
         const Tensor& anchor, const DeviceScope& scope) {
  Tensor scratch;
  const int64_t bytes = page_scratch_bytes(work, host_pairs);
  if (bytes > 0) scratch = new_output(anchor, {bytes}, ScalarType::Byte);
  launch_pages(ctx.op, encode, std::move(work), host_pairs, host_cold, max_ctas,
               bytes > 0 ? static_cast<uint8_t*>(scratch.data_ptr()) : nullptr, scope.device, scope.stream);
}

std::tuple<Tensor, Tensor, Tensor> nvfp4_quantize(Tensor x, double global_scale, int64_t quantized_range_start,
                                                  int64_t quantized_range_elements, int64_t residual_start,
                                                  int64_t residual_elements) {
  const Context ctx{"nvfp4_quantize"};
  const DeviceScope scope(x);
  const Quantized q = quantize_rows(ctx, x, global_scale, quantized_range_start, quantized_range_elements,
                                    residual_start, residual_elements, 16,
                                    [&](PageWork work) { run(ctx, true, std::move(work), false, false, 0, x, scope); });
  return {q.data, q.scales, q.lossless};
}

Tensor nvfp4_dequantize(Tensor data, Tensor scales, Tensor lossless, ScalarType dtype, double global_scale,
                        int64_t quantized_range_start, int64_t residual_start, int64_t residual_elements) {
  const Context ctx{"nvfp4_dequantize"};
  for (const Tensor* t : {&data, &scales, &lossless})
    if (!t->is_cuda())
      ctx.type_error(t == &data     ? "data"
                     : t == &scales ? "scales"
                                    : "lossless",
                     "a CUDA tensor", Context::describe_device(*t));
  const DeviceScope scope(data);
  return dequantize_rows(ctx, data, scales, lossless, dtype, global_scale, quantized_range_start, residual_start,
                         residual_elements,
                         [&](PageWork work) { run(ctx, false, std::move(work), false, false, 0, data, scope); });
}

// The address of `cold` for kernels on `device`; the first and the last byte of host memory must be pinned.
uint8_t* device_address(const Context& ctx, const Tensor& cold, const Home& home, bool* on_host) {
  auto* base = static_cast<uint8_t*>(cold.data_ptr());
  *on_host = !cold.is_cuda();
  if (!*on_host) {
    if (!home.has(cold))
      ctx.type_error("cold", "on " + home.name() + " or in pinned host memory", Context::describe_device(cold));
    return base;
  }
  ctx.cpu(cold, "cold");
  int64_t extent = cold.numel() == 0 ? 0 : 1;
  for (int64_t d = 0; d < cold.dim(); ++d) extent += (cold.size(d) - 1) * cold.stride(d) * (extent > 0);
  if (extent <= 0) return base;
  cudaPointerAttributes first{}, last{};
  const bool pinned = cudaPointerGetAttributes(&first, base) == cudaSuccess && first.type == cudaMemoryTypeHost &&
                      cudaPointerGetAttributes(&last, base + extent - 1) == cudaSuccess &&
                      last.type == cudaMemoryTypeHost;
  if (!pinned) {
    (void)cudaGetLastError();
    ctx.value_error("cold", "a CUDA tensor or pinned host memory beside CUDA pools", "unpinned host memory");
  }
  return static_cast<uint8_t*>(first.devicePointer);
}

// Debug mode: the pair list of the device, read back and checked like one of the host.
void check_device_pairs(const Context& ctx, PageWork work, const Tensor& pairs, bool encode, const DeviceScope& scope) {
  const Tensor dense = torch::stable::contiguous(pairs);
  std::vector<int32_t> host(static_cast<size_t>(work.pages) * 2);
  cuda_check(cudaMemcpyAsync(host.data(), dense.data_ptr(), host.size() * 4, cudaMemcpyDeviceToHost, scope.stream),
             "cudaMemcpyAsync");
  cuda_check(cudaStreamSynchronize(scope.stream), "cudaStreamSynchronize");
  work.pairs = host.data();
  work.pair_stride[0] = 2;
  work.pair_stride[1] = 1;
  check_pairs(ctx, work, encode);
}

template <bool kEncode>
void move_pages(const Context& ctx, const Tensor& cold, const TensorList& pools, const Tensor& pairs,
                const Tensor& table, const Tensor& scales, int64_t max_ctas) {
  if (pools.empty()) ctx.value_error("pools", "at least one tensor", "none");
  const Tensor first = pools.tensor(0);
  if (!first.is_cuda()) ctx.type_error("pools[0]", "a CUDA tensor", Context::describe_device(first));
  const Home home(first);
  const bool host_pairs = pairs.is_cpu();
  if (!host_pairs && !home.has(pairs))
    ctx.type_error("pairs", "on the CPU or on " + home.name(), Context::describe_device(pairs));
  const DeviceScope scope(first);
  bool host_cold = false;
  uint8_t* base = device_address(ctx, cold, home, &host_cold);
  PageWork work = read_pages(ctx, cold, base, pools, home, pairs, table, scales, max_ctas, kEncode);
  if (debug_mode && !host_pairs) check_device_pairs(ctx, work, pairs, kEncode, scope);
  run(ctx, kEncode, std::move(work), host_pairs, host_cold, max_ctas, first, scope);
}

void encode_pages_(const Tensor& cold, const TensorList& pools, const Tensor& pairs, const Tensor& table,
                   const Tensor& scales, int64_t max_ctas) {
  move_pages<true>(Context{"encode_pages_"}, cold, pools, pairs, table, scales, max_ctas);
}

void decode_pages_(const TensorList& pools, const Tensor& cold, const Tensor& pairs, const Tensor& table,
                   const Tensor& scales, int64_t max_ctas) {
  move_pages<false>(Context{"decode_pages_"}, cold, pools, pairs, table, scales, max_ctas);
}

}  // namespace
}  // namespace kvc::nvfp4

STABLE_TORCH_LIBRARY_IMPL(KVC_NAMESPACE, CUDA, m) {
  m.impl("nvfp4_quantize", kvc::boxed<&kvc::nvfp4::nvfp4_quantize>);
  m.impl("nvfp4_dequantize", kvc::boxed<&kvc::nvfp4::nvfp4_dequantize>);
  m.impl("encode_pages_", kvc::boxed<&kvc::nvfp4::encode_pages_>);
  m.impl("decode_pages_", kvc::boxed<&kvc::nvfp4::decode_pages_>);
}
