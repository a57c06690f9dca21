// The page moves on a GPU, without torch: one launch moves any number of buffers and pages.
//
// Warps are independent. The tiles of all pages are numbered through. In device memory a warp takes a single one
// (each_tile); towards host memory it walks its share of them, fetching ahead of itself (Cursor). What the kernel must
// know (segments and page pairs) travels in the kernel's parameters; if that is too much, small kernels first carry it
// to a scratch tensor, in their parameters, so that nothing is copied from host memory behind the caller's back and a
// captured graph keeps its values.

#include <algorithm>
#include <cstring>
#include <mutex>
#include <type_traits>
#include <vector>

#include "common/device.h"
#include "nvfp4/decode.cuh"
#include "nvfp4/encode.cuh"
#include "nvfp4/launch.h"

namespace kvc::nvfp4 {
namespace {

constexpr int kSmallInline = 15 * 1024;  // 72 segments and some three hundred pages
constexpr int kLargeInline = 31 * 1024;  // kernel parameters end at 32,764 bytes
constexpr int kNothingInline = 16;       // everything is in device memory

enum class Direction {
  kEncode,
  kEncodeStaged,  // the output goes through shared memory: towards host memory, or where 8 bytes cannot be stored at
                  // once
  kDecode,        // from device memory
  kDecodeStaged,  // from host memory
};
constexpr bool is_encode(Direction d) { return d == Direction::kEncode || d == Direction::kEncodeStaged; }
constexpr bool is_staged(Direction d) { return d == Direction::kEncodeStaged || d == Direction::kDecodeStaged; }

// Blocks of device-memory moves are short-lived: the hardware keeps the chip full and neighbours close together.
constexpr uint32_t warps_per_block(Direction d) { return is_encode(d) ? 8 : 2; }

// Blocks of host-memory moves are few and stay: enough of them for PCIe, few enough to share the chip with a model.
constexpr uint32_t kWarpsPerHostBlock = 8;
constexpr int64_t kHostBlocks = 16;
constexpr uint32_t kLogHostRun = 4;
constexpr int64_t kMaxBlocks = 0x7FFFFFFF;
constexpr uint32_t kTileBytes = 8192;  // hot bytes of a tile that is decoded from device memory; no more are cold ones

constexpr TileLimits tile_limits(Direction d) {
  switch (d) {
    case Direction::kEncode: return {8192, 1024, kRingBytes, kRingBytes};
    case Direction::kEncodeStaged: return {kStagedHot, kStagedSlots, kStagedHot, kStagedHot};
    case Direction::kDecode: return {kTileBytes, 512, kTileBytes, kTileBytes, kTileBytes};
    default: return {1 << 20, kStagedSlots, kStagedData, 1 << 20};  // what registers carry
  }
}

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
  alignas(16) uint8_t ring[kRingBytes];
};

template <>
struct WarpMemory<Direction::kEncodeStaged> {
  Walk walk;
  alignas(16) uint8_t input[2][kStagedHot];
  alignas(16) uint8_t output[kStagedData + kStagedSlots];
};

template <>
struct WarpMemory<Direction::kDecode> {
  // Three runs, each from 16 bytes on, and room for nothing: on an H200, 20 warps on a multiprocessor are faster than
  // the 24 that would fit, whose writes scatter further.
  alignas(16) uint8_t input[kTileBytes + 64 + 2752];
};

template <>
struct WarpMemory<Direction::kDecodeStaged> {
  Walk walk;
  alignas(16) uint8_t input[kStagedData + kStagedSlots];
};

// The segments and the page pairs.
struct Metadata {
  const Segment* segments;
  const int32_t* pairs;  // null: slot i to slot i
};

struct Header {
  Metadata metadata;  // of what is not inlined
  bool inlined;       // the segments; kernels of device-memory moves know it from their type
  bool inlined_pairs;
  uint32_t pairs_at;  // byte position in the inlined block
  int64_t pair_stride[2];
  int64_t pages;
  int64_t total_tiles;
  uint64_t segments_per_tile;  // times 2^32
  uint32_t tiles_per_page;
  uint32_t strip;  // tiles of a page that are decoded before the same tiles of the next page
  int64_t hot_slots;
  int64_t cold_slots;
  int64_t share, extra;  // tiles of every block, and how many blocks have one more
  uint32_t log_run;      // of the tiles a warp takes in a row before the others of its block have their turn
};

template <int kBytes>
struct Inline {
  alignas(16) uint8_t bytes[kBytes];
};
static_assert(sizeof(Header) + sizeof(Inline<kLargeInline>) <= 32764);

// The search begins where a tile's segment would be if all had as many.
__device__ __forceinline__ uint32_t find_segment(const Header& h, const Segment* segments, uint32_t tile) {
  uint32_t i = static_cast<uint32_t>(tile * h.segments_per_tile >> 32);
  while (tile < segments[i].first_tile) --i;
  while (tile >= segments[i].end_tile) ++i;
  return i;
}

// Walks a warp's tiles and describes each. The warps of a block take turns, long ones: a block has so few warps that
// looking up where the next tile belongs would show.
template <bool kEncode>
struct Cursor {
  const Header& h;
  const uint8_t* inlined;
  Walk& walk;
  uint32_t lane;

  __device__ __forceinline__ const Segment* segments() const {
    return h.inlined ? reinterpret_cast<const Segment*>(inlined) : h.metadata.segments;
  }
  __device__ __forceinline__ const int32_t* pairs() const {
    return h.inlined_pairs ? reinterpret_cast<const int32_t*>(inlined + h.pairs_at) : h.metadata.pairs;
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
          segment = find_segment(h, segments(), tile);
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
        // Before the slots are looked at: both loads are then under way together.
        segment = find_segment(h, segments(), tile);
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
      __syncwarp();
      const Segment& s = visit.segment;
      if (lane == 0) {
        visit.at = {s.hot + hot_slot * s.hot_stride, s.data + cold_slot * s.data_stride,
                    s.scales + cold_slot * s.scales_stride};
        walk.page_begin = page_begin;
        walk.hot_slot = hot_slot;
        walk.cold_slot = cold_slot;
        walk.segment_end = s.end_tile;
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

// Towards host memory, two stages: while one tile is encoded, the hot bytes of the next are on their way.
__device__ __forceinline__ void encode_all(Cursor<true>& cursor, WarpMemory<Direction::kEncodeStaged>& memory,
                                           uint32_t lane) {
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
        encode_tile<decltype(type)::value, true>(tile, memory.input[i], memory.output, lane);
      });
    }
    __syncwarp();
    ready = more;
    tile = following;
    more = more && fetch(following, i);
  }
}

// Between places in device memory: many short-lived warps, a tile each, hide the latency. Calls move(PlacedTile).
//
// Encoding goes from page to page, decoding from strip to strip: hot pages lie anywhere, and writes that scatter cost
// device memory time, so those to one pool follow each other.
template <bool kEncode, int kBytes, typename Move>
__device__ __forceinline__ void each_tile(const Header& h, const Inline<kBytes>& inlined, uint32_t warp, Move&& move) {
  constexpr bool kInlined = kBytes > kNothingInline;
  const auto* segments = kInlined ? reinterpret_cast<const Segment*>(inlined.bytes) : h.metadata.segments;
  const int64_t stride = int64_t{gridDim.x} * (blockDim.x / kWarp);
#pragma unroll 1
  for (int64_t index = int64_t{blockIdx.x} * (blockDim.x / kWarp) + warp; index < h.total_tiles; index += stride) {
    const uint32_t first = kEncode ? 0 : static_cast<uint32_t>(index / (h.pages * h.strip)) * h.strip;
    const uint32_t width = kEncode ? h.tiles_per_page : min(h.strip, h.tiles_per_page - first);
    const int64_t within = index - h.pages * first;
    const int64_t page = within / width;
    const uint32_t tile = first + static_cast<uint32_t>(within - page * width);
    const Segment& s = segments[find_segment(h, segments, tile)];
    int64_t hot_slot = page, cold_slot = page;
    if (kInlined && h.inlined_pairs) {
      const auto* pair = reinterpret_cast<const int32_t*>(inlined.bytes + h.pairs_at) + page * 2;
      hot_slot = pair[kEncode], cold_slot = pair[!kEncode];
    } else if (h.metadata.pairs != nullptr) {
      const int32_t* pair = h.metadata.pairs + page * h.pair_stride[0];
      hot_slot = pair[kEncode ? h.pair_stride[1] : 0], cold_slot = pair[kEncode ? 0 : h.pair_stride[1]];
    }
    if (hot_slot < 0 || hot_slot >= h.hot_slots || cold_slot < 0 || cold_slot >= h.cold_slots) continue;
    move(PlacedTile{s, hot_slot, cold_slot, tile - s.first_tile});
    __syncwarp();
  }
}

__device__ __forceinline__ void encode(const PlacedTile& tile, WarpMemory<Direction::kEncode>& memory, uint32_t lane) {
  const Segment& s = tile.segment();
  if (tile.index == 0 && lane < s.padding_bytes) s.padding[tile.cold_slot * s.data_stride + lane] = 0;
  if (s.kind != SegmentKind::kQuantize) {
    copy_streamed(tile, memory.ring, lane);
    return;
  }
  with_type(s.dtype, [&](auto type) {
    constexpr DType kType = decltype(type)::value;
    if (s.residual_groups == 0) {
      encode_streamed<kType>(tile, memory.ring, lane);
    } else {
      fetch_hot(tile, memory.ring, lane);
      commit_async();
      wait_async<0>();
      __syncwarp();
      encode_tile<kType, false>(tile, memory.ring, nullptr, lane);
    }
  });
}

__device__ __forceinline__ void decode(const PlacedTile& tile, WarpMemory<Direction::kDecode>& memory, uint32_t lane) {
  const Segment& s = tile.segment();
  const ColdRuns runs(tile);
  uint8_t* const scales = memory.input + (runs.data_bytes + 15) / 16 * 16;
  uint8_t* const copied = scales + (runs.scale_bytes + 15) / 16 * 16;
  fetch_run(memory.input, runs.data, runs.data_bytes, lane);
  fetch_run(scales, runs.scales, runs.scale_bytes, lane);
  if (s.joined) {
    const ColdRuns beside(tile.rest());
    fetch_run(copied, beside.data, beside.data_bytes, lane);
  }
  commit_async();
  wait_async<0>();
  __syncwarp();
  if (s.kind != SegmentKind::kQuantize) {
    copy_tile<false>(tile, memory.input, lane);
    return;
  }
  with_type(s.dtype, [&](auto type) {
    if (s.joined) decode_rows<decltype(type)::value>(tile, memory.input, scales, copied, lane);
    else decode_tile<decltype(type)::value>(tile, memory.input, scales, lane);
  });
}

// While one tile is decoded, the cold bytes of the next are on their way to registers.
__device__ __forceinline__ void decode_all(Cursor<false>& cursor, WarpMemory<Direction::kDecodeStaged>& memory,
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
      with_type(tile.segment().dtype, [&](auto type) {
        decode_tile<decltype(type)::value>(tile, memory.input, memory.input + kStagedData, lane);
      });
    __syncwarp();
  }
}

__device__ __forceinline__ void start(Walk& walk, const Header& h, uint32_t warp) {
  const int64_t begin = blockIdx.x * h.share + min(int64_t{blockIdx.x}, h.extra);
  walk.first = begin + (int64_t{warp} << h.log_run);
  walk.turn = 0;
  walk.end = begin + h.share + (blockIdx.x < h.extra ? 1 : 0);
  walk.page_begin = walk.hot_slot = walk.cold_slot = 0;
  walk.segment_end = walk.count = 0;
}

// Of kWarpsPerHostBlock warps each; fewer registers would spill.
constexpr int blocks_per_multiprocessor(Direction d) { return d == Direction::kEncodeStaged ? 2 : 3; }

template <Direction kDirection, int kBytes>
__global__ void __launch_bounds__(kWarpsPerHostBlock* kWarp, blocks_per_multiprocessor(kDirection))
    move_pages_kernel(const __grid_constant__ Header h, const __grid_constant__ Inline<kBytes> inlined) {
  extern __shared__ __align__(16) uint8_t shared[];
  const uint32_t lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  auto& memory = reinterpret_cast<WarpMemory<kDirection>*>(shared)[warp];
  if constexpr (!is_staged(kDirection)) {
    each_tile<is_encode(kDirection)>(h, inlined, warp, [&](const PlacedTile& tile) {
      if constexpr (is_encode(kDirection)) encode(tile, memory, lane);
      else decode(tile, memory, lane);
    });
  } else {
    if (lane == 0) start(memory.walk, h, warp);
    __syncwarp();
    Cursor<is_encode(kDirection)> cursor{h, inlined.bytes, memory.walk, lane};
    if constexpr (is_encode(kDirection)) encode_all(cursor, memory, lane);
    else decode_all(cursor, memory, lane);
  }
}

// Groups that follow each other in hot memory as in cold.
struct GroupRun {
  const uint8_t* hot;
  uint8_t* data;
  uint8_t* scales;
  uint32_t groups;
  uint32_t first_tile;  // of kGroupsAtOnce groups; numbered through all runs
};

constexpr int kMostRuns = 126;  // 4 KiB of parameters
constexpr uint32_t kRunWarps = 8;
constexpr uint32_t kRunBlocks = 4;  // at least, a multiprocessor

struct GroupRuns {
  uint64_t runs_per_tile;  // times 2^32
  uint32_t tiles;
  GroupRun runs[kMostRuns];
};

// What little work takes is the time until its loads are under way: few instructions and few parameters, since both
// come from device memory.
template <DType kType>
__global__ void __launch_bounds__(kRunWarps* kWarp, kRunBlocks)
    encode_runs_kernel(const __grid_constant__ GroupRuns work) {
  const uint32_t lane = threadIdx.x % kWarp, tile = blockIdx.x * kRunWarps + threadIdx.x / kWarp;
  if (tile >= work.tiles) return;
  auto i = static_cast<uint32_t>(tile * work.runs_per_tile >> 32);
  while (tile < work.runs[i].first_tile) --i;
  while ((tile - work.runs[i].first_tile) * kGroupsAtOnce >= work.runs[i].groups) ++i;
  const GroupRun& run = work.runs[i];
  const uint32_t first = (tile - run.first_tile) * kGroupsAtOnce;
  encode_at_once<kType>(min(run.groups - first, kGroupsAtOnce), run.data + first * kGroupBytes, run.scales + first,
                        lane, [&](uint32_t group) { return run.hot + (first + group) * HotGroup<kType>::kBytes; });
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
void launch(Header& h, Inline<kBytes>& inlined, Grid grid, int device, cudaStream_t stream) {
  const auto kernel = move_pages_kernel<kDirection, kBytes>;
  // More than 48 KiB of shared memory has to be asked for, once on every device.
  static std::once_flag allowed[kMaxDevices];
  std::call_once(allowed[device], [&] {
    constexpr int kMost = sizeof(WarpMemory<kDirection>) * kWarpsPerHostBlock;
    cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMost),
               "cudaFuncSetAttribute");
  });
  // By address: a launch with <<<>>> would copy the parameters once more.
  void* parameters[] = {&h, &inlined};
  cuda_check(
      cudaLaunchKernel(reinterpret_cast<const void*>(kernel), dim3(static_cast<unsigned>(grid.blocks)),
                       dim3(grid.warps * kWarp), parameters, sizeof(WarpMemory<kDirection>) * grid.warps, stream),
      "move_pages_kernel");
}

template <typename Holds>
bool all_quantized(const PageWork& work, Holds&& holds) {
  return std::all_of(work.segments.begin(), work.segments.end(),
                     [&](const Segment& s) { return s.kind != SegmentKind::kQuantize || holds(s); });
}

// What the kernel must know of the work: the segments and host pairs.
size_t pairs_at(const PageWork& work) { return work.segments.size() * sizeof(Segment); }
size_t metadata_bytes(const PageWork& work, bool host_pairs) {
  return pairs_at(work) + (host_pairs ? static_cast<size_t>(work.pages) * 8 : 0);
}

void write_metadata(const PageWork& work, bool host_pairs, uint8_t* to) {
  std::memcpy(to, work.segments.data(), pairs_at(work));
  if (!host_pairs) return;
  struct Pair {
    int32_t dst, src;
  };
  auto* pairs = reinterpret_cast<Pair*>(to + pairs_at(work));
  for (int64_t i = 0; i < work.pages; ++i) {
    const int32_t* pair = work.pairs + i * work.pair_stride[0];
    pairs[i] = {pair[0], pair[work.pair_stride[1]]};
  }
  // The order of the pages is ours: writes go through memory in one direction.
  std::sort(pairs, pairs + work.pages, [](const Pair& a, const Pair& b) { return a.dst < b.dst; });
}

// Decoding whole buffers is fastest one buffer after the other. Where rows have a lossless range, buffers differ in
// what is read for what is written: twelve of them together keep both going.
uint32_t strip(const PageWork& work, uint32_t tiles_per_page) {
  const auto filled = std::count_if(work.segments.begin(), work.segments.end(),
                                    [](const Segment& s) { return s.first_tile < s.end_tile; });
  const bool joined =
      std::any_of(work.segments.begin(), work.segments.end(), [](const Segment& s) { return s.joined; });
  return std::max<uint32_t>(tiles_per_page / static_cast<uint32_t>(filled), 1) * (joined ? 12 : 1);
}

// Whole rows of 16- or 8-bit elements with global scale 1, all of which the GPU takes at once, go through a kernel of
// their own. False, and nothing done, if the work is not of that kind.
bool encode_little(const PageWork& work, bool host_pairs, int multiprocessors, cudaStream_t stream) {
  const bool known = host_pairs || work.pairs == nullptr;
  const auto segments = static_cast<int64_t>(work.segments.size());
  const DType dtype = work.segments.front().dtype;
  const int64_t group_bytes = kGroupSize * itemsize(dtype);
  if (!known || dtype == DType::kFloat32 || work.pages > kMostRuns / segments) return false;
  int64_t tiles = 0;
  for (const Segment& s : work.segments) {
    if (s.kind != SegmentKind::kQuantize || s.dtype != dtype || s.residual_groups != 0 || s.padding_bytes != 0 ||
        s.global.decode != 1.0f || s.row_pitch != s.units_per_row.divisor * group_bytes)
      return false;
    tiles += (s.units + kGroupsAtOnce - 1) / kGroupsAtOnce;
  }
  if (work.pages * tiles > int64_t{kRunWarps * kRunBlocks} * multiprocessors) return false;

  GroupRuns runs;
  runs.tiles = 0;
  GroupRun* next = runs.runs;
  for (int64_t page = 0; page < work.pages; ++page) {
    int64_t hot_slot = page, cold_slot = page;
    if (host_pairs) {
      const int32_t* pair = work.pairs + page * work.pair_stride[0];
      hot_slot = pair[work.pair_stride[1]], cold_slot = pair[0];
    }
    if (hot_slot < 0 || hot_slot >= work.hot_slots || cold_slot < 0 || cold_slot >= work.cold_slots) continue;
    for (const Segment& s : work.segments) {
      *next++ = {s.hot + hot_slot * s.hot_stride, s.data + cold_slot * s.data_stride,
                 s.scales + cold_slot * s.scales_stride, s.units, runs.tiles};
      runs.tiles += (s.units + kGroupsAtOnce - 1) / kGroupsAtOnce;
    }
  }
  if (runs.tiles == 0) return true;
  runs.runs_per_tile = (static_cast<uint64_t>(next - runs.runs) << 32) / runs.tiles;
  const uint32_t blocks = (runs.tiles + kRunWarps - 1) / kRunWarps;
  const auto launch = [&](auto kernel) { kernel<<<blocks, kRunWarps * kWarp, 0, stream>>>(runs); };
  if (dtype == DType::kFloat16) launch(encode_runs_kernel<DType::kFloat16>);
  else if (dtype == DType::kBFloat16) launch(encode_runs_kernel<DType::kBFloat16>);
  else launch(encode_runs_kernel<DType::kFloat8E4M3>);
  cuda_check(cudaGetLastError(), "encode_runs_kernel");
  return true;
}

// `max_ctas` of 0 leaves the grid to us.
template <Direction kDirection>
void run(PageWork work, bool host_pairs, bool host_cold, int64_t max_ctas, int multiprocessors, uint8_t* scratch,
         int device, cudaStream_t stream) {
  if (kDirection == Direction::kEncode && max_ctas == 0 && encode_little(work, host_pairs, multiprocessors, stream))
    return;
  Header h{};
  TileLimits limits = tile_limits(kDirection);
  Grid grid{max_ctas > 0 ? max_ctas : kHostBlocks, kWarpsPerHostBlock};
  if (!host_cold) {
    // Arithmetic is what limits encoding 8-bit elements: a longer tile pays for the start of a block.
    if (kDirection == Direction::kEncode &&
        all_quantized(work, [](const Segment& s) { return s.dtype == DType::kFloat8E4M3; }))
      limits.hot_bytes *= 2;
    // Little work is cut finer, until every multiprocessor has some.
    constexpr int64_t kTiles = is_encode(kDirection) ? 16 : 8;
    int64_t hot_bytes = 0;
    for (const Segment& s : work.segments) hot_bytes += s.hot_bytes();
    while (work.pages * hot_bytes < kTiles * multiprocessors * limits.hot_bytes && limits.slots > 32)
      limits = {limits.hot_bytes / 2, limits.slots / 2, limits.copied_bytes / 2, limits.residual_bytes / 2,
                limits.joined_bytes / 2};
  }
  h.tiles_per_page = static_cast<uint32_t>(number_tiles(&work.segments, limits));
  h.pages = work.pages;
  h.total_tiles = work.pages * h.tiles_per_page;
  h.segments_per_tile = (uint64_t{work.segments.size()} << 32) / h.tiles_per_page;
  if (kDirection == Direction::kDecode) h.strip = strip(work, h.tiles_per_page);
  h.log_run = kLogHostRun;
  if (!host_cold && max_ctas == 0) {
    h.log_run = 0;
    grid.warps = warps_per_block(kDirection);
    grid.blocks = kMaxBlocks;  // as many as there are tiles for
  }
  grid.blocks = std::min({grid.blocks, (h.total_tiles + grid.warps - 1) / grid.warps, kMaxBlocks});
  h.share = h.total_tiles / grid.blocks;
  h.extra = h.total_tiles % grid.blocks;
  while (h.log_run > 0 && (int64_t{grid.warps} << h.log_run) > h.share) --h.log_run;
  h.hot_slots = work.hot_slots;
  h.cold_slots = work.cold_slots;
  h.metadata.pairs = host_pairs ? nullptr : work.pairs;
  h.pair_stride[0] = host_pairs ? 2 : work.pair_stride[0];
  h.pair_stride[1] = host_pairs ? 1 : work.pair_stride[1];

  const size_t bytes = metadata_bytes(work, host_pairs);
  if (bytes <= kLargeInline) {
    h.inlined = true;
    h.inlined_pairs = host_pairs;
    h.pairs_at = static_cast<uint32_t>(pairs_at(work));
    const auto inline_and_launch = [&](auto&& inlined) {
      write_metadata(work, host_pairs, inlined.bytes);
      launch<kDirection>(h, inlined, grid, device, stream);
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
  write_metadata(work, host_pairs, all.data());
  Inline<kLargeInline> payload;
  for (size_t done = 0; done < bytes; done += kLargeInline) {
    const size_t part = std::min<size_t>(bytes - done, kLargeInline);
    std::memcpy(payload.bytes, all.data() + done, part);
    upload_kernel<<<1, 512, 0, stream>>>(scratch + done, static_cast<int>(part), payload);
    cuda_check(cudaGetLastError(), "upload_kernel");
  }
  h.metadata.segments = reinterpret_cast<const Segment*>(scratch);
  if (host_pairs) h.metadata.pairs = reinterpret_cast<const int32_t*>(scratch + pairs_at(work));
  // Kernels of host-memory moves ask `inlined`, which spares two of them.
  Inline<is_staged(kDirection) ? kSmallInline : kNothingInline> none{};
  launch<kDirection>(h, none, grid, device, stream);
}

Direction direction_of(const PageWork& work, bool encode, bool host_cold) {
  if (!encode) return host_cold ? Direction::kDecodeStaged : Direction::kDecode;
  // Whether a lane may write a group's eight bytes at once.
  const bool aligned = all_quantized(work, [&](const Segment& s) {
    return reinterpret_cast<uintptr_t>(s.data) % kGroupBytes == 0 &&
           (work.cold_slots <= 1 || s.data_stride % kGroupBytes == 0);
  });
  return host_cold || !aligned ? Direction::kEncodeStaged : Direction::kEncode;
}

}  // namespace

int64_t page_scratch_bytes(const PageWork& work, bool host_pairs) {
  const auto bytes = static_cast<int64_t>(metadata_bytes(work, host_pairs));
  return bytes <= kLargeInline ? 0 : (bytes + 15) / 16 * 16;
}

void launch_pages(const char* op, bool encode, PageWork work, bool host_pairs, bool host_cold, int64_t max_ctas,
                  uint8_t* scratch, int device, void* stream) {
  if (work.pages == 0) return;
  const auto* probe = reinterpret_cast<const void*>(move_pages_kernel<Direction::kDecode, kSmallInline>);
  const int multiprocessors = device_facts(op, device, probe).multiprocessors;
  const auto go = [&](auto direction) {
    run<decltype(direction)::value>(std::move(work), host_pairs, host_cold, max_ctas, multiprocessors, scratch, device,
                                    static_cast<cudaStream_t>(stream));
  };
  switch (direction_of(work, encode, host_cold)) {
    case Direction::kEncode: return go(std::integral_constant<Direction, Direction::kEncode>{});
    case Direction::kEncodeStaged: return go(std::integral_constant<Direction, Direction::kEncodeStaged>{});
    case Direction::kDecode: return go(std::integral_constant<Direction, Direction::kDecode>{});
    case Direction::kDecodeStaged: return go(std::integral_constant<Direction, Direction::kDecodeStaged>{});
  }
}

}  // namespace kvc::nvfp4
