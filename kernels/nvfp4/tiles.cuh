// One warp moves one tile: 128 groups of a buffer through NVFP4, or 4 KiB of copied bytes.
//
// Packed data and scales are staged in the warp's own shared memory, so that whatever lies behind the cold address
// (HBM, or host memory across PCIe) sees 16-byte accesses to contiguous runs and never single scale bytes.
#pragma once

#include "kvc/pages.h"
#include "nvfp4/packed.cuh"

namespace kvc::nvfp4 {

constexpr uint32_t kWarp = 32;
constexpr uint32_t kMaxSlotsPerTile = 2 * kGroupsPerTile;  // every group may have two components

struct WarpStage {
  alignas(16) uint8_t data[kMaxSlotsPerTile * kGroupBytes];
  alignas(16) uint8_t scales[kMaxSlotsPerTile];
  alignas(16) Segment segment;  // kept here because it would cost every lane thirty registers
};

__device__ __forceinline__ uint32_t misalignment(const void* p) { return static_cast<uint32_t>(reinterpret_cast<uintptr_t>(p)) & 15u; }

union Chunk {
  uint4 vector;
  uint8_t bytes[16];
};

// Global -> stage and stage -> global for any length and alignment: 16-byte global accesses in the middle, bytes at
// the ends.
__device__ __forceinline__ void load_run(uint8_t* stage, const uint8_t* from, uint32_t bytes, uint32_t lane) {
  const uint32_t head = min((16u - misalignment(from)) & 15u, bytes);
  const uint32_t middle = (bytes - head) / 16;
  if (head == 0) {
#pragma unroll 2
    for (uint32_t i = lane; i < middle; i += kWarp)
      reinterpret_cast<uint4*>(stage)[i] = reinterpret_cast<const uint4*>(from)[i];
  } else {
    if (lane < head) stage[lane] = from[lane];
    for (uint32_t i = lane; i < middle; i += kWarp) {
      Chunk chunk{reinterpret_cast<const uint4*>(from + head)[i]};
#pragma unroll
      for (int b = 0; b < 16; ++b) stage[head + 16 * i + b] = chunk.bytes[b];
    }
  }
  const uint32_t done = head + 16 * middle;
  if (lane < bytes - done) stage[done + lane] = from[done + lane];
}

__device__ __forceinline__ void store_run(uint8_t* to, const uint8_t* stage, uint32_t bytes, uint32_t lane) {
  const uint32_t head = min((16u - misalignment(to)) & 15u, bytes);
  const uint32_t middle = (bytes - head) / 16;
  if (head == 0) {
#pragma unroll 2
    for (uint32_t i = lane; i < middle; i += kWarp)
      reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(stage)[i];
  } else {
    if (lane < head) to[lane] = stage[lane];
    for (uint32_t i = lane; i < middle; i += kWarp) {
      Chunk chunk;
#pragma unroll
      for (int b = 0; b < 16; ++b) chunk.bytes[b] = stage[head + 16 * i + b];
      reinterpret_cast<uint4*>(to + head)[i] = chunk.vector;
    }
  }
  const uint32_t done = head + 16 * middle;
  if (lane < bytes - done) to[done + lane] = stage[done + lane];
}

// A segment at one page slot.
struct Place {
  uint8_t* hot;
  uint8_t* data;
  uint8_t* scales;
};

template <DType kType>
struct HotGroup {
  static constexpr uint32_t kBytes = kGroupSize * itemsize(kType);
  uint4 v[kBytes / 16];

  __device__ __forceinline__ void load(const uint8_t* from) {
#pragma unroll
    for (uint32_t i = 0; i < kBytes / 16; ++i) v[i] = reinterpret_cast<const uint4*>(from)[i];
  }

  __device__ __forceinline__ void to_float(float (&x)[kGroupSize]) const {
    using E = Element<kType>;
    const auto* bits = reinterpret_cast<const typename E::Bits*>(v);
#pragma unroll
    for (int i = 0; i < kGroupSize; ++i) x[i] = E::to_float(bits[i]);
  }

  __device__ __forceinline__ Group encode(GlobalScale global) const {
    float x[kGroupSize];
    to_float(x);
    return encode_group(x, global);
  }

  __device__ __forceinline__ Group encode_packed() const {
    uint32_t pairs[2][4];
    if constexpr (kType == DType::kFloat8E4M3) {
      split_bytes(v[0].x, v[0].y, pairs[0]);
      split_bytes(v[0].z, v[0].w, pairs[1]);
    } else {
      split_words(v[0], pairs[0]);
      split_words(v[1], pairs[1]);
    }
    if constexpr (kType == DType::kBFloat16) return encode_pairs<__nv_bfloat162>(pairs);
    else return encode_pairs<__half2>(pairs);
  }
};

// Whether two elements an instruction give the bytes of kvc/nvfp4.h.
template <DType kType>
__device__ __forceinline__ bool can_pack(float global) {
  return kType != DType::kFloat32 && global == 1.0f;
}

template <uint32_t kGroupBytesHot>
__device__ __forceinline__ int64_t group_offset(const Segment& s, bool linear, uint32_t group) {
  return linear ? int64_t{group} * kGroupBytesHot : hot_offset(s, group, kGroupBytesHot);
}

__device__ __forceinline__ void stage_group(WarpStage& stage, uint32_t slot, const Group& group) {
  *reinterpret_cast<uint2*>(stage.data + slot * kGroupBytes) =
      make_uint2(static_cast<uint32_t>(group.data), static_cast<uint32_t>(group.data >> 32));
  stage.scales[slot] = static_cast<uint8_t>(group.scale);
}

template <DType kType>
__device__ __forceinline__ void encode_tile(const Segment& s, const Place& at, uint32_t tile, WarpStage& stage, uint32_t lane) {
  using Hot = HotGroup<kType>;
  const uint32_t first = tile * kGroupsPerTile;
  const uint32_t end = min(first + kGroupsPerTile, s.units);
  const uint32_t first_slot = slots_before(s, first), end_slot = slots_before(s, end);
  const bool linear = s.row_pitch == int64_t{s.units_per_row.divisor} * Hot::kBytes;
  const bool one_slot_each = s.residual_groups == 0;
  const GlobalScale global = s.global;
  const auto hot = [&](uint32_t group) { return at.hot + group_offset<Hot::kBytes>(s, linear, group); };
  const auto slot = [&](uint32_t group) { return (one_slot_each ? group : slots_before(s, group)) - first_slot; };
  if (!KVC_HARDWARE_E2M1 && can_pack<kType>(global.decode)) {
    if constexpr (kType != DType::kFloat32) {
      constexpr int kInFlight = 2;  // groups a lane loads before it encodes the first
#pragma unroll 1
      for (uint32_t base = first + lane; base < end; base += kInFlight * kWarp) {
        Hot groups[kInFlight];
#pragma unroll
        for (int k = 0; k < kInFlight; ++k)
          if (base + k * kWarp < end) groups[k].load(hot(base + k * kWarp));
#pragma unroll
        for (int k = 0; k < kInFlight; ++k)
          if (base + k * kWarp < end) stage_group(stage, slot(base + k * kWarp), groups[k].encode_packed());
      }
    }
  } else {
#pragma unroll 1
    for (uint32_t group = first + lane; group < end; group += kWarp) {
      Hot one;
      one.load(hot(group));
      stage_group(stage, slot(group), one.encode(global));
    }
  }
  if (!one_slot_each) {
    // Residual groups are a few of each row: gathered here so that every lane has one, instead of idling beside them.
    __syncwarp();
    for (uint32_t r = first_slot - first + lane; r < end_slot - end; r += kWarp) {
      const uint32_t row = r / s.residual_groups;
      const uint32_t group = row * s.units_per_row.divisor + s.residual_first + (r - row * s.residual_groups);
      Hot one;
      one.load(hot(group));
      float x[kGroupSize];
      one.to_float(x);
      const ResidualGroup both = encode_residual_group(x, global);
      const uint32_t slot = group + r - first_slot;
      stage_group(stage, slot, both.main);
      stage_group(stage, slot + 1, both.residual);
    }
  }
  __syncwarp();
  store_run(at.data + int64_t{first_slot} * kGroupBytes, stage.data, (end_slot - first_slot) * kGroupBytes, lane);
  store_run(at.scales + first_slot, stage.scales, end_slot - first_slot, lane);
  __syncwarp();
}

// Sixteen bytes of hot elements from their nibbles (element 0 lowest).
template <DType kType>
__device__ __forceinline__ uint4 decode_packed_chunk(uint64_t nibbles, uint32_t scale_code) {
  uint32_t pairs[4];
  if constexpr (kType == DType::kFloat8E4M3) {
    uint4 out;
    decode_pairs<__half2>(static_cast<uint32_t>(nibbles), scale_code, pairs);
    encode_fp8_pairs(pairs, out.x, out.y);
    decode_pairs<__half2>(static_cast<uint32_t>(nibbles >> 32), scale_code, pairs);
    encode_fp8_pairs(pairs, out.z, out.w);
    return out;
  } else {
    if constexpr (kType == DType::kBFloat16) decode_pairs<__nv_bfloat162>(static_cast<uint32_t>(nibbles), scale_code, pairs);
    else decode_pairs<__half2>(static_cast<uint32_t>(nibbles), scale_code, pairs);
    return join_words(pairs);
  }
}

template <DType kType>
__device__ __forceinline__ uint4 decode_chunk(float global, uint64_t nibbles, uint32_t scale_code) {
  using E = Element<kType>;
  constexpr int kElements = 16 / itemsize(kType);
  const float scale = decode_scale(scale_code);
  const bool nan = is_nan_scale(scale_code);
  uint4 out;
  auto* bits = reinterpret_cast<typename E::Bits*>(&out);
#pragma unroll
  for (int i = 0; i < kElements; ++i) {
    const float v = decode_element(static_cast<uint32_t>(nibbles >> (4 * i)) & 15u, scale, global);
    bits[i] = nan ? E::kNaN : E::from_float(v);
  }
  return out;
}

template <DType kType>
__device__ __forceinline__ uint4 decode_residual_chunk(uint64_t main, uint32_t main_code, uint64_t residual, uint32_t residual_code,
                                                    float global) {
  using E = Element<kType>;
  constexpr int kElements = 16 / itemsize(kType);
  const float main_scale = decode_scale(main_code), residual_scale = decode_scale(residual_code);
  const bool nan = is_nan_scale(main_code) || is_nan_scale(residual_code);
  uint4 out;
  auto* bits = reinterpret_cast<typename E::Bits*>(&out);
#pragma unroll
  for (int i = 0; i < kElements; ++i) {
    const float v = decode_residual_element(static_cast<uint32_t>(main >> (4 * i)) & 15u, main_scale,
                                            static_cast<uint32_t>(residual >> (4 * i)) & 15u, residual_scale, global);
    bits[i] = nan ? E::kNaN : E::from_float(v);
  }
  return out;
}

// The nibbles of one 16-byte hot chunk: part `part` of a slot's eight bytes.
template <DType kType>
__device__ __forceinline__ uint64_t staged_nibbles(const WarpStage& stage, uint32_t slot, uint32_t part) {
  const uint8_t* from = stage.data + slot * kGroupBytes + part * (kGroupBytes / itemsize(kType));
  if constexpr (kType == DType::kFloat8E4M3) {
    const uint2 v = *reinterpret_cast<const uint2*>(from);
    return v.x | (static_cast<uint64_t>(v.y) << 32);
  } else if constexpr (kType == DType::kFloat32) {
    return *reinterpret_cast<const uint16_t*>(from);
  } else {
    return *reinterpret_cast<const uint32_t*>(from);
  }
}

template <DType kType>
__device__ __forceinline__ void decode_tile(const Segment& s, const Place& at, uint32_t tile, WarpStage& stage, uint32_t lane) {
  constexpr uint32_t kParts = itemsize(kType);  // 16-byte chunks of a hot group
  constexpr uint32_t kBytes = HotGroup<kType>::kBytes;
  const uint32_t first = tile * kGroupsPerTile;
  const uint32_t end = min(first + kGroupsPerTile, s.units);
  const uint32_t first_slot = slots_before(s, first), end_slot = slots_before(s, end);
  const bool linear = s.row_pitch == int64_t{s.units_per_row.divisor} * kBytes;
  const bool one_slot_each = s.residual_groups == 0;
  const float global = s.global.decode;
  load_run(stage.data, at.data + int64_t{first_slot} * kGroupBytes, (end_slot - first_slot) * kGroupBytes, lane);
  load_run(stage.scales, at.scales + first_slot, end_slot - first_slot, lane);
  __syncwarp();
  const uint32_t chunks = (end - first) * kParts;
  const auto write = [&](uint32_t u, const uint4& out) {
    const uint32_t group = first + u / kParts;
    *reinterpret_cast<uint4*>(at.hot + group_offset<kBytes>(s, linear, group) + (u % kParts) * 16) = out;
  };
  if (can_pack<kType>(global) && one_slot_each) {
    if constexpr (kType != DType::kFloat32) {
#pragma unroll 4
      for (uint32_t u = lane; u < chunks; u += kWarp)
        write(u, decode_packed_chunk<kType>(staged_nibbles<kType>(stage, u / kParts, u % kParts), stage.scales[u / kParts]));
    }
  } else {
#pragma unroll 1
    for (uint32_t u = lane; u < chunks; u += kWarp) {
      const uint32_t group = first + u / kParts, part = u % kParts;
      const uint32_t column = group - s.units_per_row.divide(group) * s.units_per_row.divisor;
      const uint32_t slot = slots_before(s, group) - first_slot;
      const uint64_t nibbles = staged_nibbles<kType>(stage, slot, part);
      if (is_residual(s, column)) {
        write(u, decode_residual_chunk<kType>(nibbles, stage.scales[slot], staged_nibbles<kType>(stage, slot + 1, part),
                                              stage.scales[slot + 1], global));
      } else if (can_pack<kType>(global)) {
        if constexpr (kType != DType::kFloat32) write(u, decode_packed_chunk<kType>(nibbles, stage.scales[slot]));
      } else {
        write(u, decode_chunk<kType>(global, nibbles, stage.scales[slot]));
      }
    }
  }
  __syncwarp();
}

// Copied bytes. The hot side of kRows is always 16-byte aligned; everything else may lie anywhere.
template <bool kEncode>
__device__ __forceinline__ void copy_tile(const Segment& s, const Place& at, uint32_t tile, WarpStage& stage, uint32_t lane) {
  constexpr uint32_t kUnits = kBytesPerTile / 16;
  constexpr int kInFlight = 4;  // chunks a lane loads before it stores the first
  const bool rows = s.kind == SegmentKind::kRows;
  const uint32_t first = tile * kUnits;
  const int64_t bytes = rows ? int64_t{s.units} * 16 : s.nbytes;
  const uint32_t whole = static_cast<uint32_t>(bytes / 16);
  const uint32_t end = min(first + kUnits, whole);
  const auto hot = [&](uint32_t unit) { return at.hot + (rows ? hot_offset(s, unit, 16) : int64_t{unit} * 16); };
  const auto cold = [&](uint32_t unit) { return at.data + int64_t{unit} * 16; };
  if (misalignment(at.hot) == 0 && misalignment(at.data) == 0) {
#pragma unroll 1
    for (uint32_t base = first + lane; base < end; base += kInFlight * kWarp) {
      uint4 v[kInFlight];
#pragma unroll
      for (int k = 0; k < kInFlight; ++k)
        if (const uint32_t unit = base + k * kWarp; unit < end)
          v[k] = *reinterpret_cast<const uint4*>(kEncode ? hot(unit) : cold(unit));
#pragma unroll
      for (int k = 0; k < kInFlight; ++k)
        if (const uint32_t unit = base + k * kWarp; unit < end)
          *reinterpret_cast<uint4*>(kEncode ? cold(unit) : hot(unit)) = v[k];
    }
  } else {
    constexpr uint32_t kStaged = sizeof(stage.data) / 16;
    for (uint32_t base = first; base < end; base += kStaged) {
      const uint32_t stop = min(base + kStaged, end);
      const auto staged = [&](uint32_t unit) { return reinterpret_cast<uint4*>(stage.data) + (unit - base); };
      if (kEncode && rows) {
        for (uint32_t u = base + lane; u < stop; u += kWarp) *staged(u) = *reinterpret_cast<const uint4*>(hot(u));
      } else {
        load_run(stage.data, kEncode ? hot(base) : cold(base), (stop - base) * 16, lane);
      }
      __syncwarp();
      if (!kEncode && rows) {
        for (uint32_t u = base + lane; u < stop; u += kWarp) *reinterpret_cast<uint4*>(hot(u)) = *staged(u);
      } else {
        store_run(kEncode ? cold(base) : hot(base), stage.data, (stop - base) * 16, lane);
      }
      __syncwarp();
    }
  }
  const uint32_t tail = static_cast<uint32_t>(bytes % 16);
  if (tail != 0 && first + kUnits > whole && lane < tail) {
    if (kEncode) cold(whole)[lane] = hot(whole)[lane];
    else hot(whole)[lane] = cold(whole)[lane];
  }
}

}  // namespace kvc::nvfp4
