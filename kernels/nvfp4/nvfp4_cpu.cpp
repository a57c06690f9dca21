// CPU implementation of the nvfp4 ops: the tiles of all pages, spread over PyTorch's threads.

#include <tuple>

#include "common/boxing.h"
#include "nvfp4/arguments.h"

namespace kvc::nvfp4 {
namespace {

void run(PageWork work, bool encode) {
  const int64_t tiles_per_page = number_tiles(&work.segments);
  torch::stable::parallel_for(0, work.pages * tiles_per_page, 4, [&](int64_t first, int64_t last) {
    move_tiles(work, tiles_per_page, first, last, encode);
  });
}

std::tuple<Tensor, Tensor, Tensor> nvfp4_quantize(Tensor x, double global_scale, int64_t quantized_range_start,
                                                  int64_t quantized_range_elements, int64_t residual_start,
                                                  int64_t residual_elements) {
  const Quantized q =
      quantize_rows(Context{"nvfp4_quantize"}, x, global_scale, quantized_range_start, quantized_range_elements,
                    residual_start, residual_elements, 1, [](PageWork work) { run(std::move(work), true); });
  return {q.data, q.scales, q.lossless};
}

Tensor nvfp4_dequantize(Tensor data, Tensor scales, Tensor lossless, ScalarType dtype, double global_scale,
                        int64_t quantized_range_start, int64_t residual_start, int64_t residual_elements) {
  return dequantize_rows(Context{"nvfp4_dequantize"}, data, scales, lossless, dtype, global_scale,
                         quantized_range_start, residual_start, residual_elements,
                         [](PageWork work) { run(std::move(work), false); });
}

void move_pages(const Context& ctx, const Tensor& cold, const TensorList& pools, const Tensor& pairs,
                const Tensor& table, const Tensor& scales, int64_t max_ctas, bool encode) {
  if (pools.empty()) ctx.value_error("pools", "at least one tensor", "none");
  ctx.cpu(cold, "cold");
  ctx.cpu(pairs, "pairs");
  run(read_pages(ctx, cold, static_cast<uint8_t*>(cold.data_ptr()), pools, Home(cold), pairs, table, scales, max_ctas,
                 encode),
      encode);
}

void encode_pages_(const Tensor& cold, const TensorList& pools, const Tensor& pairs, const Tensor& table,
                   const Tensor& scales, int64_t max_ctas) {
  move_pages(Context{"encode_pages_"}, cold, pools, pairs, table, scales, max_ctas, true);
}

void decode_pages_(const TensorList& pools, const Tensor& cold, const Tensor& pairs, const Tensor& table,
                   const Tensor& scales, int64_t max_ctas) {
  move_pages(Context{"decode_pages_"}, cold, pools, pairs, table, scales, max_ctas, false);
}

}  // namespace
}  // namespace kvc::nvfp4

STABLE_TORCH_LIBRARY_IMPL(KVC_NAMESPACE, CPU, m) {
  m.impl("nvfp4_quantize", kvc::boxed<&kvc::nvfp4::nvfp4_quantize>);
  m.impl("nvfp4_dequantize", kvc::boxed<&kvc::nvfp4::nvfp4_dequantize>);
  m.impl("encode_pages_", kvc::boxed<&kvc::nvfp4::encode_pages_>);
  m.impl("decode_pages_", kvc::boxed<&kvc::nvfp4::decode_pages_>);
}
