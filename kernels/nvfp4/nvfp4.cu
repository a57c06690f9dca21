// CUDA implementation of the nvfp4 ops: one launch moves any number of buffers and pages.
//
// Warps are independent. The tiles of all pages are numbered through, and each warp walks one contiguous range of
// them, so the search for its first segment happens once. What the kernel must know (segments and page pairs) travels
// in the kernel's parameters; if that is too much, small kernels first carry it to a scratch tensor, in their
// parameters, so that nothing is copied from host memory behind the caller's back and a captured graph keeps its values.

#include <tuple>

#include "common/cuda.h"
#include "nvfp4/arguments.h"
#include "nvfp4/tiles.cuh"

namespace kvc::nvfp4 {
namespace {

constexpr int kThreads = 256;
constexpr int kWarpsPerBlock = kThreads / static_cast<int>(kWarp);
constexpr int kSmallInline = 14 * 1024;  // 72 buffers, half of them with a lossless part, and a few hundred pages
constexpr int kLargeInline = 31 * 1024;  // kernel parameters end at 32,764 bytes
constexpr int kHostBlocks = 16;          // default when the cold side is host memory: enough for PCIe, few enough to share

struct Header {
  const Segment* segments;  // null: inline
  const int32_t* pairs;     // null: inline, or no pairs at all
  int64_t pair_stride[2];
  int64_t total_tiles;
  uint32_t tiles_per_page;
  uint32_t num_segments;
  uint32_t inline_pairs;    // byte position of inline pairs, 0 if there are none
  bool identity;
  int64_t hot_slots;
  int64_t cold_slots;
};

template <int kBytes>
struct Inline {
  alignas(16) uint8_t bytes[kBytes];
};

template <bool kEncode>
__device__ __forceinline__ void run_tile(const Segment& s, const Place& at, uint32_t tile, WarpStage& stage, uint32_t lane) {
  if (s.kind != SegmentKind::kQuantize) return copy_tile<kEncode>(s, at, tile, stage, lane);
  const auto typed = [&](auto type) {
    constexpr DType kType = decltype(type)::value;
    if constexpr (kEncode) encode_tile<kType>(s, at, tile, stage, lane);
    else decode_tile<kType>(s, at, tile, stage, lane);
  };
  switch (s.dtype) {
    case DType::kFloat16: return typed(std::integral_constant<DType, DType::kFloat16>{});
    case DType::kBFloat16: return typed(std::integral_constant<DType, DType::kBFloat16>{});
    case DType::kFloat32: return typed(std::integral_constant<DType, DType::kFloat32>{});
    case DType::kFloat8E4M3: return typed(std::integral_constant<DType, DType::kFloat8E4M3>{});
  }
}

template <bool kEncode, int kBytes>
__global__ void __launch_bounds__(kThreads, 3) move_pages_kernel(const __grid_constant__ Header h, const __grid_constant__ Inline<kBytes> inlined) {
  // Raw bytes: Segment's member initialisers must not run here.
  __shared__ alignas(16) uint8_t stages[kWarpsPerBlock][sizeof(WarpStage)];
  const uint32_t lane = threadIdx.x % kWarp;
  WarpStage& stage = *reinterpret_cast<WarpStage*>(stages[threadIdx.x / kWarp]);
  const Segment* segments = h.segments ? h.segments : reinterpret_cast<const Segment*>(inlined.bytes);
  const int32_t* pairs = h.inline_pairs ? reinterpret_cast<const int32_t*>(inlined.bytes + h.inline_pairs) : h.pairs;

  const int64_t warp = int64_t{blockIdx.x} * kWarpsPerBlock + threadIdx.x / kWarp;
  const int64_t warps = int64_t{gridDim.x} * kWarpsPerBlock;
  const int64_t share = h.total_tiles / warps, extra = h.total_tiles % warps;
  int64_t index = warp * share + min(warp, extra);
  const int64_t end = index + share + (warp < extra ? 1 : 0);

  while (index < end) {
    const int64_t page = index / h.tiles_per_page;
    uint32_t tile = static_cast<uint32_t>(index - page * h.tiles_per_page);
    const uint32_t page_end = static_cast<uint32_t>(min(int64_t{h.tiles_per_page}, tile + (end - index)));
    index += page_end - tile;
    const auto slot = [&](int column) -> int64_t {
      return h.identity ? page : pairs[page * h.pair_stride[0] + column * h.pair_stride[1]];
    };
    const int64_t hot_slot = slot(kEncode ? 1 : 0), cold_slot = slot(kEncode ? 0 : 1);
    if (hot_slot < 0 || hot_slot >= h.hot_slots || cold_slot < 0 || cold_slot >= h.cold_slots) continue;

    uint32_t low = 0, high = h.num_segments;  // the last segment that starts at or before `tile`
    while (high - low > 1) {
      const uint32_t middle = (low + high) / 2;
      if (segments[middle].first_tile <= tile) low = middle;
      else high = middle;
    }
    for (; tile < page_end; ++low) {
      __syncwarp();
      if (lane < sizeof(Segment) / 16)
        reinterpret_cast<uint4*>(&stage.segment)[lane] = reinterpret_cast<const uint4*>(segments + low)[lane];
      __syncwarp();
      const Segment& s = stage.segment;
      const uint32_t segment_end = min(low + 1 < h.num_segments ? segments[low + 1].first_tile : h.tiles_per_page, page_end);
      const Place at{s.hot + hot_slot * s.hot_stride, s.data + cold_slot * s.data_stride, s.scales + cold_slot * s.scales_stride};
      if (kEncode && s.padding_bytes > 0 && tile == s.first_tile && lane < s.padding_bytes)
        s.padding[cold_slot * s.data_stride + lane] = 0;
      for (; tile < segment_end; ++tile) run_tile<kEncode>(s, at, tile - s.first_tile, stage, lane);
    }
  }
}

__global__ void upload_kernel(uint8_t* to, int bytes, const __grid_constant__ Inline<kLargeInline> payload) {
  for (int i = static_cast<int>(threadIdx.x) * 16; i < bytes; i += static_cast<int>(blockDim.x) * 16)
    *reinterpret_cast<uint4*>(to + i) = *reinterpret_cast<const uint4*>(payload.bytes + i);
}

template <bool kEncode, int kBytes>
void launch(const Header& h, const Inline<kBytes>& inlined, int64_t blocks, cudaStream_t stream) {
  move_pages_kernel<kEncode, kBytes><<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(h, inlined);
  cuda_check(cudaGetLastError(), "move_pages_kernel");
}

template <bool kEncode>
int blocks_per_multiprocessor() {
  static const int blocks = [] {
    int value = 0;
    cuda_check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&value, move_pages_kernel<kEncode, kSmallInline>, kThreads, 0),
               "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
    return value;
  }();
  return blocks;
}

// `anchor` is any tensor of the device, for the allocator; `host_pairs` says where work.pairs lies.
template <bool kEncode>
void run(const Context& ctx, const PageWork& work, bool host_pairs, bool host_cold, int64_t max_ctas, const Tensor& anchor,
         const DeviceScope& scope) {
  if (work.pages == 0) return;
  const DeviceFacts& facts =
      device_facts(ctx, scope.device, reinterpret_cast<const void*>(move_pages_kernel<kEncode, kSmallInline>));
  Header h{};
  h.tiles_per_page = static_cast<uint32_t>(work.tiles_per_page);
  h.total_tiles = work.pages * work.tiles_per_page;
  h.num_segments = static_cast<uint32_t>(work.segments.size());
  h.hot_slots = work.hot_slots;
  h.cold_slots = work.cold_slots;
  h.identity = work.pairs == nullptr;
  h.pairs = work.pairs;
  h.pair_stride[0] = work.pair_stride[0];
  h.pair_stride[1] = work.pair_stride[1];

  const size_t segment_bytes = work.segments.size() * sizeof(Segment);
  const size_t pair_bytes = host_pairs ? static_cast<size_t>(work.pages) * 8 : 0;
  const size_t bytes = segment_bytes + pair_bytes;
  if (host_pairs) {
    h.pair_stride[0] = 2;
    h.pair_stride[1] = 1;
  }
  const auto fill = [&](uint8_t* to) {
    std::memcpy(to, work.segments.data(), segment_bytes);
    auto* pairs = reinterpret_cast<int32_t*>(to + segment_bytes);
    for (int64_t i = 0; host_pairs && i < work.pages; ++i)
      for (int c = 0; c < 2; ++c) pairs[2 * i + c] = work.pairs[i * work.pair_stride[0] + c * work.pair_stride[1]];
  };

  const int64_t wanted = (h.total_tiles + kWarpsPerBlock - 1) / kWarpsPerBlock;
  int64_t blocks = host_cold ? kHostBlocks : int64_t{facts.multiprocessors} * blocks_per_multiprocessor<kEncode>();
  if (max_ctas > 0) blocks = max_ctas;
  blocks = std::min(blocks, wanted);

  if (bytes <= kLargeInline) {
    if (host_pairs) {
      h.pairs = nullptr;
      h.inline_pairs = static_cast<uint32_t>(segment_bytes);
    }
    if (bytes <= kSmallInline) {
      Inline<kSmallInline> inlined;
      fill(inlined.bytes);
      launch<kEncode>(h, inlined, blocks, scope.stream);
    } else {
      Inline<kLargeInline> inlined;
      fill(inlined.bytes);
      launch<kEncode>(h, inlined, blocks, scope.stream);
    }
    return;
  }
  std::vector<uint8_t> all(bytes);
  fill(all.data());
  Tensor scratch = torch::stable::new_empty(anchor, {static_cast<int64_t>((bytes + 15) / 16 * 16)}, ScalarType::Byte);
  auto* device = static_cast<uint8_t*>(scratch.data_ptr());
  Inline<kLargeInline> payload;
  for (size_t done = 0; done < bytes; done += kLargeInline) {
    const size_t part = std::min<size_t>(bytes - done, kLargeInline);
    std::memcpy(payload.bytes, all.data() + done, part);
    upload_kernel<<<1, 512, 0, scope.stream>>>(device + done, static_cast<int>(part), payload);
    cuda_check(cudaGetLastError(), "upload_kernel");
  }
  h.segments = reinterpret_cast<const Segment*>(device);
  if (host_pairs) h.pairs = reinterpret_cast<const int32_t*>(device + segment_bytes);
  launch<kEncode>(h, Inline<kSmallInline>{}, blocks, scope.stream);
}

std::tuple<Tensor, Tensor, Tensor> nvfp4_quantize(Tensor x, double global_scale, int64_t quantized_range_start,
                                                  int64_t quantized_range_elements, int64_t residual_start,
                                                  int64_t residual_elements) {
  const Context ctx{"nvfp4_quantize"};
  const DeviceScope scope(x);
  const Quantized q = quantize_rows(ctx, x, global_scale, quantized_range_start, quantized_range_elements, residual_start,
                                    residual_elements, 16, [&](const PageWork& work) { run<true>(ctx, work, false, false, 0, x, scope); });
  return {q.data, q.scales, q.lossless};
}

Tensor nvfp4_dequantize(Tensor data, Tensor scales, Tensor lossless, ScalarType dtype, double global_scale,
                        int64_t quantized_range_start, int64_t residual_start, int64_t residual_elements) {
  const Context ctx{"nvfp4_dequantize"};
  for (const Tensor* t : {&data, &scales, &lossless})
    if (!t->is_cuda()) ctx.type_error(t == &data ? "data" : t == &scales ? "scales" : "lossless", "a CUDA tensor", Context::describe_device(*t));
  const DeviceScope scope(data);
  return dequantize_rows(ctx, data, scales, lossless, dtype, global_scale, quantized_range_start, residual_start, residual_elements,
                         [&](const PageWork& work) { run<false>(ctx, work, false, false, 0, data, scope); });
}

// The address of `cold` for kernels on `device`; host memory must be pinned from end to end.
uint8_t* device_address(const Context& ctx, const Tensor& cold, const Tensor& pool, bool* on_host) {
  auto* base = static_cast<uint8_t*>(cold.data_ptr());
  *on_host = !cold.is_cuda();
  if (cold.is_cuda()) {
    if (cold.get_device_index() != pool.get_device_index())
      ctx.type_error("cold", "on " + Context::describe_device(pool) + " or in pinned host memory", Context::describe_device(cold));
    return base;
  }
  ctx.cpu(cold, "cold");
  int64_t extent = cold.numel() == 0 ? 0 : 1;
  for (int64_t d = 0; d < cold.dim(); ++d) extent += (cold.size(d) - 1) * cold.stride(d) * (extent > 0);
  if (extent <= 0) return base;
  cudaPointerAttributes first{}, last{};
  const bool pinned = cudaPointerGetAttributes(&first, base) == cudaSuccess && first.type == cudaMemoryTypeHost &&
                      cudaPointerGetAttributes(&last, base + extent - 1) == cudaSuccess && last.type == cudaMemoryTypeHost;
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
  cuda_check(cudaMemcpyAsync(host.data(), dense.data_ptr(), host.size() * 4, cudaMemcpyDeviceToHost, scope.stream), "cudaMemcpyAsync");
  cuda_check(cudaStreamSynchronize(scope.stream), "cudaStreamSynchronize");
  work.pairs = host.data();
  work.pair_stride[0] = 2;
  work.pair_stride[1] = 1;
  check_pairs(ctx, work, encode);
}

template <bool kEncode>
void move_pages(const Context& ctx, const Tensor& cold, const std::vector<Tensor>& pools, const Tensor& pairs,
                const Tensor& table, const Tensor& scales, int64_t max_ctas) {
  if (pools.empty()) ctx.value_error("pools", "at least one tensor", "none");
  for (size_t i = 0; i < pools.size(); ++i) {
    const std::string argument = "pools[" + std::to_string(i) + "]";
    if (!pools[i].is_cuda()) ctx.type_error(argument, "a CUDA tensor", Context::describe_device(pools[i]));
    if (pools[i].get_device_index() != pools[0].get_device_index())
      ctx.type_error(argument, "on " + Context::describe_device(pools[0]), Context::describe_device(pools[i]));
  }
  const bool host_pairs = pairs.is_cpu();
  if (!host_pairs && !(pairs.is_cuda() && pairs.get_device_index() == pools[0].get_device_index()))
    ctx.type_error("pairs", "on the CPU or on " + Context::describe_device(pools[0]), Context::describe_device(pairs));
  const DeviceScope scope(pools[0]);
  bool host_cold = false;
  uint8_t* base = device_address(ctx, cold, pools[0], &host_cold);
  const PageWork work = read_pages(ctx, cold, base, pools, pairs, table, scales, max_ctas, kEncode);
  if (debug_mode && !host_pairs) check_device_pairs(ctx, work, pairs, kEncode, scope);
  run<kEncode>(ctx, work, host_pairs, host_cold, max_ctas, pools[0], scope);
}

void encode_pages_(Tensor cold, std::vector<Tensor> pools, Tensor pairs, Tensor table, Tensor scales, int64_t max_ctas) {
  move_pages<true>(Context{"encode_pages_"}, cold, pools, pairs, table, scales, max_ctas);
}

void decode_pages_(std::vector<Tensor> pools, Tensor cold, Tensor pairs, Tensor table, Tensor scales, int64_t max_ctas) {
  move_pages<false>(Context{"decode_pages_"}, cold, pools, pairs, table, scales, max_ctas);
}

}  // namespace
}  // namespace kvc::nvfp4

STABLE_TORCH_LIBRARY_IMPL(KVC_NAMESPACE, CUDA, m) {
  m.impl("nvfp4_quantize", TORCH_BOX(&kvc::nvfp4::nvfp4_quantize));
  m.impl("nvfp4_dequantize", TORCH_BOX(&kvc::nvfp4::nvfp4_dequantize));
  m.impl("encode_pages_", TORCH_BOX(&kvc::nvfp4::encode_pages_));
  m.impl("decode_pages_", TORCH_BOX(&kvc::nvfp4::decode_pages_));
}
