// One warp moves one tile: a few KiB of a hot buffer through NVFP4, or as many copied bytes. What it needs to know
// about the tile, and the ways in and out of its shared memory.
#pragma once

#include "common/async.cuh"
#include "kvc/pages.h"
#include "nvfp4/packed.cuh"

namespace kvc::nvfp4 {

constexpr uint32_t kWarp = 32;
constexpr uint32_t kStagedHot = 4096;                         // most hot bytes of a tile in shared memory (encode)
constexpr uint32_t kStagedSlots = 256;                        // most slots of a tile in shared memory
constexpr uint32_t kStagedData = kStagedSlots * kGroupBytes;  // where the scales stand behind the packed data

// A segment at one page slot.
struct Place {
  uint8_t* hot;
  uint8_t* data;
  uint8_t* scales;

  // The compiler must know that these are not shared memory: it may then let loads and stores of the two overtake.
  __device__ __forceinline__ Place in_global() const {
    __builtin_assume(__isGlobal(hot));
    __builtin_assume(__isGlobal(data));
    __builtin_assume(__isGlobal(scales));
    return *this;
  }
};

// A change of page or segment, written once and shared by the tiles that follow.
struct alignas(16) Visit {
  Segment segment;
  Place at;
};

struct Tile {
  const Visit* visit;
  uint32_t index;  // within the segment

  __device__ __forceinline__ const Segment& segment() const { return visit->segment; }
  __device__ __forceinline__ Place at() const { return visit->at.in_global(); }
};

// A tile whose segment stays where the launch put it, in the kernel's parameters.
struct PlacedTile {
  const Segment& in;
  int64_t hot_slot, cold_slot;
  uint32_t index;

  __device__ __forceinline__ const Segment& segment() const { return in; }
  __device__ __forceinline__ Place at() const {
    return Place{in.hot + hot_slot * in.hot_stride, in.data + cold_slot * in.data_stride,
                 in.scales + cold_slot * in.scales_stride}
        .in_global();
  }
  // The lossless bytes of the same rows, where `joined`.
  __device__ __forceinline__ PlacedTile rest() const { return {(&in)[1], hot_slot, cold_slot, index}; }
};

__device__ __forceinline__ uint32_t misalignment(const void* p) {
  return static_cast<uint32_t>(reinterpret_cast<uintptr_t>(p)) & 15u;
}

// Units of the tile: [first, end), and the output slots in front of it and behind it.
struct Extent {
  uint32_t first, end;
  uint32_t first_slot, end_slot;
};

__device__ __forceinline__ Extent extent(const Segment& s, uint32_t tile) {
  Extent e;
  e.first = tile * s.units_per_tile;
  e.end = min(e.first + s.units_per_tile, s.units);
  const bool residual = s.residual_groups != 0;
  e.first_slot = residual ? slots_before(s, e.first) : e.first;
  e.end_slot = residual ? slots_before(s, e.end) : e.end;
  return e;
}

// Bytes of a copied tile: the last chunk of kBytes may be cut short.
__device__ __forceinline__ uint32_t copied_bytes(const Segment& s, const Extent& e) {
  const int64_t end = int64_t{e.end} * 16;
  return static_cast<uint32_t>((s.kind == SegmentKind::kBytes ? min(end, s.nbytes) : end) - int64_t{e.first} * 16);
}

// Where a tile's hot bytes lie: from `base` on if `linear`, else chunk c of 16 bytes at scattered(c).
struct HotTile {
  const Segment& s;
  uint8_t* base;
  uint32_t first;
  uint32_t log_chunks;  // of 16 bytes, a unit
  bool linear;

  __device__ __forceinline__ HotTile(const Segment& segment, uint8_t* hot, uint32_t first_unit)
      : s(segment), base(hot), first(first_unit) {
    const bool groups = s.kind == SegmentKind::kQuantize;
    log_chunks = !groups ? 0 : s.dtype == DType::kFloat32 ? 2 : s.dtype == DType::kFloat8E4M3 ? 0 : 1;
    linear =
        groups ? s.row_pitch == int64_t{s.units_per_row.divisor} << (4 + log_chunks) : s.kind == SegmentKind::kBytes;
    if (linear) base += int64_t{first} << (4 + log_chunks);
  }
  // The chunk's position within its row.
  __device__ __forceinline__ uint32_t column(uint32_t chunk) const {
    const uint32_t unit = first + (chunk >> log_chunks);
    const uint32_t in_row = unit - s.units_per_row.divide(unit) * s.units_per_row.divisor;
    return (in_row << log_chunks) + (chunk & ((1u << log_chunks) - 1u));
  }
  __device__ __forceinline__ uint8_t* scattered(uint32_t chunk) const {
    const uint32_t in_unit = chunk & ((1u << log_chunks) - 1u);
    return base + hot_offset(s, first + (chunk >> log_chunks), 16u << log_chunks) + in_unit * 16;
  }
};

union Chunk {
  uint4 vector;
  uint8_t bytes[16];
};

// A contiguous run of any length and alignment into shared memory: 16 bytes at a time where the address allows.
__device__ __forceinline__ void fetch_run(uint8_t* shared, const uint8_t* from, uint32_t bytes, uint32_t lane) {
  const uint32_t head = min((16u - misalignment(from)) & 15u, bytes);
  const uint32_t middle = (bytes - head) / 16;
  if (head == 0) {
#pragma unroll 4
    for (uint32_t i = lane; i < middle; i += kWarp) copy_async(shared + 16 * i, from + 16 * i);
  } else {
    if (lane < head) shared[lane] = from[lane];
#pragma unroll 1
    for (uint32_t i = lane; i < middle; i += kWarp) {
      const Chunk chunk{reinterpret_cast<const uint4*>(from + head)[i]};
#pragma unroll
      for (int b = 0; b < 16; ++b) shared[head + 16 * i + b] = chunk.bytes[b];
    }
  }
  const uint32_t done = head + 16 * middle;
  if (lane < bytes - done) shared[done + lane] = from[done + lane];
}

__device__ __forceinline__ void store_run(uint8_t* to, const uint8_t* shared, uint32_t bytes, uint32_t lane) {
  const uint32_t head = min((16u - misalignment(to)) & 15u, bytes);
  const uint32_t middle = (bytes - head) / 16;
  if (head == 0) {
#pragma unroll 2
    for (uint32_t i = lane; i < middle; i += kWarp)
      reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(shared)[i];
  } else {
    if (lane < head) to[lane] = shared[lane];
#pragma unroll 1
    for (uint32_t i = lane; i < middle; i += kWarp) {
      Chunk chunk;
#pragma unroll
      for (int b = 0; b < 16; ++b) chunk.bytes[b] = shared[head + 16 * i + b];
      reinterpret_cast<uint4*>(to + head)[i] = chunk.vector;
    }
  }
  const uint32_t done = head + 16 * middle;
  if (lane < bytes - done) to[done + lane] = shared[done + lane];
}

template <bool kEncode, typename Tile>
__device__ __forceinline__ void copy_tile(const Tile& tile, const uint8_t* input, uint32_t lane) {
  const Segment& s = tile.segment();
  const Extent e = extent(s, tile.index);
  if (kEncode || s.kind == SegmentKind::kBytes) {
    store_run((kEncode ? tile.at().data : tile.at().hot) + int64_t{e.first} * 16, input, copied_bytes(s, e), lane);
  } else {
    const HotTile hot(s, tile.at().hot, e.first);
#pragma unroll 4
    for (uint32_t c = lane; c < e.end - e.first; c += kWarp)
      *reinterpret_cast<uint4*>(hot.scattered(c)) = reinterpret_cast<const uint4*>(input)[c];
  }
}

}  // namespace kvc::nvfp4
