// CUDA implementation of the nvfp4 ops: one launch moves any number of buffers and pages.
//
// Warps are independent. The tiles of all pages are numbered through, and each warp walks one contiguous range of
// them, fetching ahead of itself. What the kernel must know (segments and page pairs) travels
// in the kernel's parameters; if that is too much, small kernels first carry it to a scratch tensor, in their
// parameters, so that nothing is copied from host memory behind the caller's back and a captured graph keeps its
// values.

#include <tuple>

#include "common/cuda.h"
#include "nvfp4/arguments.h"
#include "nvfp4/decode.cuh"
#include "nvfp4/encode.cuh"

namespace kvc::nvfp4 {
namespace {

constexpr int kSmallInline = 14 * 1024;  // 72 segments and some three hundred pages
constexpr int kLargeInline = 31 * 1024;  // kernel parameters end at 32,764 bytes

// Blocks of device-memory moves are short-lived: the hardware keeps the chip full and neighbours close together.
constexpr uint32_t kWarpsPerBlock = 4;
constexpr int64_t kTilesPerWarp = 4;
// Blocks of host-memory moves are few and stay: enough of them for PCIe, few enough to share the chip with a model.
constexpr uint32_t kWarpsPerHostBlock = 8;
constexpr int64_t kHostBlocks = 16;
constexpr uint32_t kLogHostRun = 4;
constexpr int64_t kMaxBlocks = 0x7FFFFFFF;

enum class Direction { kEncode, kEncodeStaged, kDecode };  // staged: the output goes through shared memory

constexpr TileLimits kEncodeLimits{kStagedHot, kStagedSlots, kStagedHot};
constexpr TileLimits kDecodeLimits{1 << 20, kStagedSlots, kStagedData};  // bounded by what registers carry

// Where a warp stands in its block's share. In shared memory, since registers are what limits the number of warps.
struct Walk {
  int64_t first, end;  // of the tiles of all pages: the warp's first, and where the block's share ends
  int64_t turn;        // how many of the warp's tiles are behind it
  int64_t page_begin;
  int64_t hot_slot, cold_slot;
  uint32_t segment_end;
  uint32_t count;   // visits so far
  Visit visits[2];  // the last two: at most two tiles are under way
};

// Shared memory of a warp.
template <Direction kDirection>
struct WarpMemory;

template <>
struct WarpMemory<Direction::kEncode> {
  Walk walk;
  alignas(16) uint8_t input[2][kStagedHot];
  static constexpr uint8_t* output = nullptr;
};

template <>
struct WarpMemory<Direction::kEncodeStaged> {
  Walk walk;
  alignas(16) uint8_t input[2][kStagedHot];
  alignas(16) uint8_t output[kStagedData + kStagedSlots];
};

template <>
struct WarpMemory<Direction::kDecode> {
  Walk walk;
  alignas(16) uint8_t input[kStagedData + kStagedSlots];
};

// The segments, where each starts (first_tile once more, packed for a quick search) and the page pairs.
struct Metadata {
  const Segment* segments;
  const uint32_t* starts;
  const int32_t* pairs;  // null: slot i to slot i
};

struct Header {
  Metadata metadata;  // used when `inlined` is false
  bool inlined;
  bool inlined_pairs;
  uint32_t starts_at;  // byte positions in the inlined block
  uint32_t pairs_at;
  int64_t pair_stride[2];
  int64_t total_tiles;
  uint32_t tiles_per_page;
  uint32_t num_segments;
  uint32_t log_run;  // of the tiles a warp takes in a row before the others of its block have their turn
  int64_t hot_slots;
  int64_t cold_slots;
};

template <int kBytes>
struct Inline {
  alignas(16) uint8_t bytes[kBytes];
};

// Walks a warp's tiles and describes each. The warps of a block take turns: short ones in device memory,
// so that the block as a whole moves through memory in one place; long ones towards host memory, where a block has so
// few warps that looking up where the next tile belongs would show.
template <bool kEncode>
struct Cursor {
  const Header& h;
  const uint8_t* inlined;
  Walk& walk;
  uint32_t lane;

  __device__ __forceinline__ const Segment* segments() const {
    return h.inlined ? reinterpret_cast<const Segment*>(inlined) : h.metadata.segments;
  }
  __device__ __forceinline__ const uint32_t* starts() const {
    return h.inlined ? reinterpret_cast<const uint32_t*>(inlined + h.starts_at) : h.metadata.starts;
  }
  __device__ __forceinline__ const int32_t* pairs() const {
    return h.inlined_pairs ? reinterpret_cast<const int32_t*>(inlined + h.pairs_at) : h.metadata.pairs;
  }

  // The last segment that starts at or before `tile`; every lane looks at its share of the starts at once.
  __device__ __forceinline__ uint32_t find(uint32_t tile) const {
    uint32_t below = 0;
    for (uint32_t base = 0; base < h.num_segments; base += kWarp) {
      const uint32_t i = base + lane;
      below += __popc(__ballot_sync(0xFFFFFFFFu, i < h.num_segments && starts()[i] <= tile));
    }
    return below - 1;
  }

  __device__ __forceinline__ bool next(Tile& to) {
    const auto index_of = [&](int64_t turn) {
      return walk.first + (turn >> h.log_run) * (blockDim.x / kWarp << h.log_run) + (turn & ((1 << h.log_run) - 1));
    };
    int64_t turn = walk.turn;
    int64_t index = index_of(turn);
    if (index >= walk.end) return false;
    uint32_t count = walk.count;
    int64_t page_begin = walk.page_begin;
    uint32_t tile = static_cast<uint32_t>(index - page_begin);
    if (count == 0 || index - page_begin >= walk.segment_end) {
      int64_t hot_slot = walk.hot_slot, cold_slot = walk.cold_slot;
      uint32_t segment;
      while (true) {
        if (count != 0 && index - page_begin < h.tiles_per_page) {
          segment = find(tile);
          break;
        }
        const int64_t page = index / h.tiles_per_page;
        page_begin = page * h.tiles_per_page;
        tile = static_cast<uint32_t>(index - page_begin);
        hot_slot = cold_slot = page;
        if (pairs() != nullptr) {
          const int32_t* pair = pairs() + page * h.pair_stride[0];
          hot_slot = pair[kEncode ? h.pair_stride[1] : 0];
          cold_slot = pair[kEncode ? 0 : h.pair_stride[1]];
        }
        segment = find(tile);  // before the slots are looked at: both loads are then under way together
        if (hot_slot >= 0 && hot_slot < h.hot_slots && cold_slot >= 0 && cold_slot < h.cold_slots) break;
        // No such page: on to the warp's first turn that may lie behind it.
        const int64_t stride = static_cast<int64_t>(blockDim.x / kWarp) << h.log_run;
        const int64_t behind = page_begin + h.tiles_per_page - walk.first;
        turn = max(turn + 1, behind > 0 ? (behind / stride) << h.log_run : int64_t{0});
        index = index_of(turn);
        if (index >= walk.end) return false;
        count = 0;
      }
      count = walk.count + 1;
      Visit& visit = walk.visits[count & 1];
      if (lane < sizeof(Segment) / 16)
        reinterpret_cast<uint4*>(&visit.segment)[lane] = reinterpret_cast<const uint4*>(segments() + segment)[lane];
      const uint32_t segment_end = segment + 1 < h.num_segments ? starts()[segment + 1] : h.tiles_per_page;
      __syncwarp();
      const Segment& s = visit.segment;
      if (lane == 0) {
        visit.at = {s.hot + hot_slot * s.hot_stride, s.data + cold_slot * s.data_stride,
                    s.scales + cold_slot * s.scales_stride};
        walk.page_begin = page_begin;
        walk.hot_slot = hot_slot;
        walk.cold_slot = cold_slot;
        walk.segment_end = segment_end;
        walk.count = count;
      }
      __syncwarp();
    }
    to.visit = &walk.visits[count & 1];
    const Segment& s = to.segment();
    to.index = tile - s.first_tile;
    if (kEncode && s.padding_bytes > 0 && to.index == 0 && lane < s.padding_bytes)
      s.padding[walk.cold_slot * s.data_stride + lane] = 0;
    __syncwarp();
    if (lane == 0) walk.turn = turn + 1;
    __syncwarp();
    return true;
  }
};

template <typename Move>
__device__ __forceinline__ void with_type(DType dtype, Move&& move) {
  switch (dtype) {
    case DType::kFloat16: return move(std::integral_constant<DType, DType::kFloat16>{});
    case DType::kBFloat16: return move(std::integral_constant<DType, DType::kBFloat16>{});
    case DType::kFloat32: return move(std::integral_constant<DType, DType::kFloat32>{});
    case DType::kFloat8E4M3: return move(std::integral_constant<DType, DType::kFloat8E4M3>{});
  }
}

// Two stages: while one tile is encoded, the hot bytes of the next are on their way.
template <Direction kDirection>
__device__ __forceinline__ void encode_all(Cursor<true>& cursor, WarpMemory<kDirection>& memory, uint32_t lane) {
  const auto fetch = [&](Tile& tile, int stage) {
    const bool found = cursor.next(tile);
    if (found) fetch_hot(tile, memory.input[stage], lane);
    commit_async();
    return found;
  };
  Tile tile, following;
  bool ready = fetch(tile, 0);
  bool more = ready && fetch(following, 1);
#pragma unroll 1
  for (int i = 0; ready; i ^= 1) {
    if (more) wait_async<1>();
    else wait_async<0>();
    __syncwarp();
    if (tile.segment().kind != SegmentKind::kQuantize) {
      copy_tile<true>(tile, memory.input[i], lane);
    } else {
      with_type(tile.segment().dtype, [&](auto type) {
        encode_tile<decltype(type)::value, kDirection == Direction::kEncodeStaged>(tile, memory.input[i], memory.output,
                                                                                   lane);
      });
    }
    __syncwarp();
    ready = more;
    tile = following;
    more = more && fetch(following, i);
  }
}

// While one tile is decoded, the cold bytes of the next are on their way to registers.
__device__ __forceinline__ void decode_all(Cursor<false>& cursor, WarpMemory<Direction::kDecode>& memory,
                                           uint32_t lane) {
  Carried next;
  Tile tile, following;
  bool more = cursor.next(following);
  if (more) next.load(ColdRuns(following), lane);
#pragma unroll 1
  while (more) {
    next.put(ColdRuns(following), memory.input, lane);
    __syncwarp();
    tile = following;
    more = cursor.next(following);
    if (more) next.load(ColdRuns(following), lane);
    if (tile.segment().kind != SegmentKind::kQuantize) copy_tile<false>(tile, memory.input, lane);
    else
      with_type(tile.segment().dtype, [&](auto type) { decode_tile<decltype(type)::value>(tile, memory.input, lane); });
    __syncwarp();
  }
}

template <Direction kDirection, int kBytes>
__global__ void __launch_bounds__(kWarpsPerHostBlock* kWarp, kDirection == Direction::kEncodeStaged ? 2 : 3)
    move_pages_kernel(const __grid_constant__ Header h, const __grid_constant__ Inline<kBytes> inlined) {
  extern __shared__ __align__(16) uint8_t shared[];
  const uint32_t lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  auto& memory = reinterpret_cast<WarpMemory<kDirection>*>(shared)[warp];
  if (lane == 0) {
    const int64_t share = h.total_tiles / gridDim.x, extra = h.total_tiles % gridDim.x;
    const int64_t begin = blockIdx.x * share + min(int64_t{blockIdx.x}, extra);
    Walk& walk = memory.walk;
    walk.first = begin + (int64_t{warp} << h.log_run);
    walk.turn = 0;
    walk.end = begin + share + (blockIdx.x < extra ? 1 : 0);
    walk.page_begin = walk.hot_slot = walk.cold_slot = 0;
    walk.segment_end = walk.count = 0;
  }
  __syncwarp();
  Cursor<kDirection != Direction::kDecode> cursor{h, inlined.bytes, memory.walk, lane};
  if constexpr (kDirection == Direction::kDecode) decode_all(cursor, memory, lane);
  else encode_all(cursor, memory, lane);
}

__global__ void upload_kernel(uint8_t* to, int bytes, const __grid_constant__ Inline<kLargeInline> payload) {
  for (int i = static_cast<int>(threadIdx.x) * 16; i < bytes; i += static_cast<int>(blockDim.x) * 16)
    *reinterpret_cast<uint4*>(to + i) = *reinterpret_cast<const uint4*>(payload.bytes + i);
}

struct Grid {
  int64_t blocks;
  uint32_t warps;  // a block
};

template <Direction kDirection, int kBytes>
void launch(const Header& h, const Inline<kBytes>& inlined, Grid grid, const DeviceScope& scope) {
  const auto kernel = move_pages_kernel<kDirection, kBytes>;
  // More than 48 KiB of shared memory has to be asked for, once on every device.
  static bool allowed[kMaxDevices] = {};
  if (!allowed[scope.device]) {
    constexpr int kMost = sizeof(WarpMemory<kDirection>) * kWarpsPerHostBlock;
    cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMost),
               "cudaFuncSetAttribute");
    allowed[scope.device] = true;
  }
  kernel<<<static_cast<unsigned>(grid.blocks), grid.warps * kWarp, sizeof(WarpMemory<kDirection>) * grid.warps,
           scope.stream>>>(h, inlined);
  cuda_check(cudaGetLastError(), "move_pages_kernel");
}

// `anchor` is any tensor of the device, for the allocator; `host_pairs` says where work.pairs lies. `max_ctas` of 0
// leaves the grid to us.
template <Direction kDirection>
void run(PageWork work, bool host_pairs, bool host_cold, int64_t max_ctas, int multiprocessors, const Tensor& anchor,
         const DeviceScope& scope) {
  Header h{};
  TileLimits limits = kDirection == Direction::kDecode ? kDecodeLimits : kEncodeLimits;
  Grid grid{max_ctas > 0 ? max_ctas : kHostBlocks, kWarpsPerHostBlock};
  h.tiles_per_page = static_cast<uint32_t>(number_tiles(&work.segments, limits));
  if (!host_cold) {
    // Little work is cut finer, until every multiprocessor has some.
    while (work.pages * h.tiles_per_page < 16 * int64_t{multiprocessors} && limits.slots > 32) {
      limits = {limits.hot_bytes / 2, limits.slots / 2, limits.copied_bytes / 2};
      h.tiles_per_page = static_cast<uint32_t>(number_tiles(&work.segments, limits));
    }
  }
  h.total_tiles = work.pages * h.tiles_per_page;
  h.log_run = kLogHostRun;
  if (!host_cold && max_ctas == 0) {
    h.log_run = 0;
    grid.warps = kWarpsPerBlock;
    const int64_t tiles = std::clamp<int64_t>(h.total_tiles / (32 * multiprocessors), 1, kTilesPerWarp);
    grid.blocks = (h.total_tiles + tiles * grid.warps - 1) / (tiles * grid.warps);
  }
  grid.blocks = std::min({grid.blocks, (h.total_tiles + grid.warps - 1) / grid.warps, kMaxBlocks});
  while (h.log_run > 0 && (int64_t{grid.warps} << h.log_run) > h.total_tiles / grid.blocks) --h.log_run;
  h.num_segments = static_cast<uint32_t>(work.segments.size());
  h.hot_slots = work.hot_slots;
  h.cold_slots = work.cold_slots;
  h.metadata.pairs = host_pairs ? nullptr : work.pairs;
  h.pair_stride[0] = host_pairs ? 2 : work.pair_stride[0];
  h.pair_stride[1] = host_pairs ? 1 : work.pair_stride[1];

  const size_t starts_at = work.segments.size() * sizeof(Segment);
  const size_t pairs_at = starts_at + work.segments.size() * sizeof(uint32_t);
  const size_t bytes = pairs_at + (host_pairs ? static_cast<size_t>(work.pages) * 8 : 0);
  const auto fill = [&](uint8_t* to) {
    std::memcpy(to, work.segments.data(), starts_at);
    auto* starts = reinterpret_cast<uint32_t*>(to + starts_at);
    for (const Segment& s : work.segments) *starts++ = s.first_tile;
    auto* pairs = reinterpret_cast<int32_t*>(to + pairs_at);
    for (int64_t i = 0; host_pairs && i < work.pages; ++i)
      for (int c = 0; c < 2; ++c) *pairs++ = work.pairs[i * work.pair_stride[0] + c * work.pair_stride[1]];
  };

  if (bytes <= kLargeInline) {
    h.inlined = true;
    h.inlined_pairs = host_pairs;
    h.starts_at = static_cast<uint32_t>(starts_at);
    h.pairs_at = static_cast<uint32_t>(pairs_at);
    const auto inline_and_launch = [&](auto&& inlined) {
      fill(inlined.bytes);
      launch<kDirection>(h, inlined, grid, scope);
    };
    if (bytes <= kSmallInline) {
      Inline<kSmallInline> small;
      inline_and_launch(small);
    } else {
      Inline<kLargeInline> large;
      inline_and_launch(large);
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
  h.metadata.segments = reinterpret_cast<const Segment*>(device);
  h.metadata.starts = reinterpret_cast<const uint32_t*>(device + starts_at);
  if (host_pairs) h.metadata.pairs = reinterpret_cast<const int32_t*>(device + pairs_at);
  launch<kDirection>(h, Inline<kSmallInline>(), grid, scope);
}

// Whether a lane may store a group's eight bytes at once.
bool has_aligned_data(const PageWork& work) {
  return std::all_of(work.segments.begin(), work.segments.end(), [&](const Segment& s) {
    return s.kind != SegmentKind::kQuantize || (reinterpret_cast<uintptr_t>(s.data) % kGroupBytes == 0 &&
                                                (work.cold_slots <= 1 || s.data_stride % kGroupBytes == 0));
  });
}

template <bool kEncode>
void run(const Context& ctx, PageWork work, bool host_pairs, bool host_cold, int64_t max_ctas, const Tensor& anchor,
         const DeviceScope& scope) {
  if (work.pages == 0) return;
  const auto* probe = reinterpret_cast<const void*>(move_pages_kernel<Direction::kDecode, kSmallInline>);
  const int multiprocessors = device_facts(ctx, scope.device, probe).multiprocessors;
  const bool staged = host_cold || !has_aligned_data(work);
  const auto go = [&](auto direction) {
    run<decltype(direction)::value>(std::move(work), host_pairs, host_cold, max_ctas, multiprocessors, anchor, scope);
  };
  if constexpr (!kEncode) go(std::integral_constant<Direction, Direction::kDecode>{});
  else if (staged) go(std::integral_constant<Direction, Direction::kEncodeStaged>{});
  else go(std::integral_constant<Direction, Direction::kEncode>{});
}

std::tuple<Tensor, Tensor, Tensor> nvfp4_quantize(Tensor x, double global_scale, int64_t quantized_range_start,
                                                  int64_t quantized_range_elements, int64_t residual_start,
                                                  int64_t residual_elements) {
  const Context ctx{"nvfp4_quantize"};
  const DeviceScope scope(x);
  const Quantized q = quantize_rows(ctx, x, global_scale, quantized_range_start, quantized_range_elements,
                                    residual_start, residual_elements, 16,
                                    [&](PageWork work) { run<true>(ctx, std::move(work), false, false, 0, x, scope); });
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
                         [&](PageWork work) { run<false>(ctx, std::move(work), false, false, 0, data, scope); });
}

// The address of `cold` for kernels on `device`; the first and the last byte of host memory must be pinned.
uint8_t* device_address(const Context& ctx, const Tensor& cold, const Tensor& pool, bool* on_host) {
  auto* base = static_cast<uint8_t*>(cold.data_ptr());
  *on_host = !cold.is_cuda();
  if (cold.is_cuda()) {
    if (cold.get_device_index() != pool.get_device_index())
      ctx.type_error("cold", "on " + Context::describe_device(pool) + " or in pinned host memory",
                     Context::describe_device(cold));
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
void move_pages(const Context& ctx, const Tensor& cold, const std::vector<Tensor>& pools, const Tensor& pairs,
                const Tensor& table, const Tensor& scales, int64_t max_ctas) {
  if (pools.empty()) ctx.value_error("pools", "at least one tensor", "none");
  const int32_t device = pools[0].get_device_index();
  for (size_t i = 0; i < pools.size(); ++i) {
    const auto argument = [&] { return "pools[" + std::to_string(i) + "]"; };
    if (!pools[i].is_cuda()) ctx.type_error(argument(), "a CUDA tensor", Context::describe_device(pools[i]));
    if (pools[i].get_device_index() != device)
      ctx.type_error(argument(), "on " + Context::describe_device(pools[0]), Context::describe_device(pools[i]));
  }
  const bool host_pairs = pairs.is_cpu();
  if (!host_pairs && !(pairs.is_cuda() && pairs.get_device_index() == pools[0].get_device_index()))
    ctx.type_error("pairs", "on the CPU or on " + Context::describe_device(pools[0]), Context::describe_device(pairs));
  const DeviceScope scope(pools[0]);
  bool host_cold = false;
  uint8_t* base = device_address(ctx, cold, pools[0], &host_cold);
  PageWork work = read_pages(ctx, cold, base, pools, pairs, table, scales, max_ctas, kEncode);
  if (debug_mode && !host_pairs) check_device_pairs(ctx, work, pairs, kEncode, scope);
  run<kEncode>(ctx, std::move(work), host_pairs, host_cold, max_ctas, pools[0], scope);
}

void encode_pages_(const Tensor& cold, const std::vector<Tensor>& pools, const Tensor& pairs, const Tensor& table,
                   const Tensor& scales, int64_t max_ctas) {
  move_pages<true>(Context{"encode_pages_"}, cold, pools, pairs, table, scales, max_ctas);
}

void decode_pages_(const std::vector<Tensor>& pools, const Tensor& cold, const Tensor& pairs, const Tensor& table,
                   const Tensor& scales, int64_t max_ctas) {
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
