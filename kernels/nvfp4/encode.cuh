// Hot rows to packed data and scales.
//
// Hot bytes come by asynchronous copies, ahead of the arithmetic. Towards device memory a tile streams through a ring
// of stages, and 8 data bytes and 1 scale byte a lane fill whole sectors of L2. Towards host memory the next tile is
// fetched meanwhile, and the output is put together in shared memory first, so that PCIe sees 16-byte stores to
// contiguous runs and never single scale bytes.
#pragma once

#include "nvfp4/tile.cuh"

namespace kvc::nvfp4 {

// Sixteen hot elements as they lie in memory.
template <DType kType>
struct HotGroup {
  static constexpr uint32_t kBytes = kGroupSize * itemsize(kType);
  using P = Packed<kType == DType::kFloat32 ? DType::kFloat16 : kType>;
  struct Raw {
    uint4 v[kBytes / 16];
  };

  static __device__ __forceinline__ Raw load_raw(const uint8_t* from) {
    Raw raw;
#pragma unroll
    for (uint32_t i = 0; i < kBytes / 16; ++i) raw.v[i] = reinterpret_cast<const uint4*>(from)[i];
    return raw;
  }

  static __device__ __forceinline__ void to_float(const Raw& raw, float (&x)[kGroupSize]) {
    using E = Element<kType>;
    const auto* bits = reinterpret_cast<const typename E::Bits*>(raw.v);
#pragma unroll
    for (int i = 0; i < kGroupSize; ++i) x[i] = E::to_float(bits[i]);
  }

  static __device__ __forceinline__ void to_pairs(const Raw& raw, uint32_t (&pairs)[2][4]) {
    if constexpr (kType == DType::kFloat8E4M3) {
      split_bytes(raw.v[0].x, raw.v[0].y, pairs[0]);
      split_bytes(raw.v[0].z, raw.v[0].w, pairs[1]);
    } else {
      split_words(raw.v[0], pairs[0]);
      split_words(raw.v[1], pairs[1]);
    }
  }

  static __device__ __forceinline__ PackedGroup unpack(const Raw& raw) {
    if constexpr (kType == DType::kFloat8E4M3) {
      return from_e4m3(raw.v[0]);
    } else {
      uint32_t pairs[2][4];
      to_pairs(raw, pairs);
      return from_pairs<P>(pairs);
    }
  }

  // Out of line: their sixteen floats would cost every other path its registers.
  static __device__ __noinline__ Group encode_any(const uint8_t* from, GlobalScale global) {
    float x[kGroupSize];
    to_float(load_raw(from), x);
    return encode_group(x, global);
  }

  static __device__ __noinline__ ResidualGroup encode_any_residual(const uint8_t* from, GlobalScale global) {
    float x[kGroupSize];
    to_float(load_raw(from), x);
    return encode_residual_group(x, global);
  }

  // With global scale 1, two elements an instruction. Where the hardware converts E2M1, encode_any lets it.
  static constexpr bool kPacked = kType != DType::kFloat32 && !KVC_HARDWARE_E2M1;

  static __device__ __forceinline__ Group encode_one(const uint8_t* from, bool unit, GlobalScale global) {
    if constexpr (kPacked) {
      if (unit) return encode_packed<P>(unpack(load_raw(from)));
    }
    return encode_any(from, global);
  }

  static __device__ __forceinline__ ResidualGroup encode_residual(const uint8_t* from, GlobalScale global) {
    if constexpr (kPacked) {
      if (global.decode == 1.0f) {
        const Raw raw = load_raw(from);
        ResidualGroup both;
        both.main = encode_packed<P>(unpack(raw));
        uint32_t pairs[2][4];
        to_pairs(raw, pairs);
        if (encode_residual_pairs<P>(pairs, both.main, &both.residual)) return both;
      }
    }
    return encode_any_residual(from, global);
  }
};

// Starts to bring the hot bytes of a tile into shared memory.
template <typename Tile>
__device__ __forceinline__ void fetch_hot(const Tile& tile, uint8_t* input, uint32_t lane) {
  const Segment& s = tile.segment();
  const Extent e = extent(s, tile.index);
  const HotTile hot(s, tile.at().hot, e.first);
  if (hot.linear) {
    const uint32_t bytes =
        s.kind == SegmentKind::kBytes ? copied_bytes(s, e) : (e.end - e.first) << (4 + hot.log_chunks);
    fetch_run(input, hot.base, bytes, lane);
  } else {
    const uint32_t chunks = (e.end - e.first) << hot.log_chunks;
#pragma unroll 4
    for (uint32_t c = lane; c < chunks; c += kWarp) copy_async(input + 16 * c, hot.scattered(c));
  }
}

__device__ __forceinline__ void put_group(uint8_t* data, uint8_t* scales, uint32_t slot, const Group& group) {
  *reinterpret_cast<uint2*>(data + int64_t{slot} * kGroupBytes) =
      make_uint2(static_cast<uint32_t>(group.data), static_cast<uint32_t>(group.data >> 32));
  scales[slot] = static_cast<uint8_t>(group.scale);
}

// Groups whose slots follow each other: three pointers to carry along and nothing else.
template <int kAtOnce, typename Encode>
__device__ __forceinline__ void encode_in_order(const uint8_t* from, uint8_t* data, uint8_t* scales, uint32_t groups,
                                                uint32_t lane, uint32_t group_bytes, Encode&& encode) {
  constexpr int kStep = kAtOnce * static_cast<int>(kWarp);
  from += lane * group_bytes;
  data += lane * kGroupBytes;
  scales += lane;
#pragma unroll 1
  for (int left = static_cast<int>(groups - lane); left > 0; left -= kStep) {
    Group group[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k)
      if (k == 0 || left > k * static_cast<int>(kWarp)) group[k] = encode(from + k * kWarp * group_bytes);
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k)
      if (k == 0 || left > k * static_cast<int>(kWarp)) put_group(data, scales, k * kWarp, group[k]);
    from += kStep * group_bytes;
    data += kStep * kGroupBytes;
    scales += kStep;
  }
}

// Hot bytes pass through a ring in shared memory: while one stage is worked on, the next ones are on their way.
constexpr uint32_t kStageBytes = 2048;
constexpr uint32_t kStageChunks = kStageBytes / 16;
constexpr uint32_t kStages = 4;
constexpr uint32_t kRingBytes = kStages * kStageBytes;

// Streams the 16-byte chunks of a tile through `ring` and calls work(stage's bytes, number of the stage's first chunk).
template <typename Work>
__device__ __forceinline__ void stream_chunks(const HotTile& hot, uint32_t chunks, uint8_t* ring, uint32_t lane,
                                              Work&& work) {
  // A lane's chunks lie 32 apart: some whole rows further, and now and then past the end of one more.
  const int64_t pitch = hot.s.row_pitch;
  const uint32_t row_chunks = hot.s.units_per_row.divisor << hot.log_chunks;
  const uint32_t rows = hot.linear ? 0 : kWarp / row_chunks;
  const uint32_t columns = kWarp - rows * row_chunks;
  const int64_t step = rows * pitch + columns * 16;
  const bool wraps = !hot.linear && columns != 0;
  const uint8_t* next = hot.linear ? hot.base + lane * 16 : hot.scattered(min(lane, chunks - 1));
  uint32_t column = wraps ? hot.column(lane) : 0;
  int left = static_cast<int>(chunks - lane);
  const auto fetch = [&](uint32_t stage) {
    uint8_t* to = ring + stage * kStageBytes + lane * 16;
    if (wraps) {
#pragma unroll 1
      for (uint32_t i = 0; i < kStageChunks; i += kWarp) {
        if (left > static_cast<int>(i)) copy_async(to + i * 16, next);
        next += step;
        column += columns;
        if (column >= row_chunks) {
          column -= row_chunks;
          next += pitch - row_chunks * int64_t{16};
        }
      }
    } else {
#pragma unroll
      for (uint32_t i = 0; i < kStageChunks; i += kWarp) {
        if (left > static_cast<int>(i)) copy_async(to + i * 16, next);
        next += step;
      }
    }
    left -= kStageChunks;
    commit_async();
  };
#pragma unroll 1
  for (uint32_t i = 0; i + 1 < kStages; ++i) fetch(i);
  uint32_t stage = 0;
#pragma unroll 1
  for (uint32_t first = 0; first < chunks; first += kStageChunks) {
    wait_async<kStages - 2>();
    __syncwarp();
    fetch((stage + kStages - 1) % kStages);
    work(ring + stage * kStageBytes, first);
    stage = (stage + 1) % kStages;
  }
  wait_async<0>();
  __syncwarp();
}

template <DType kType, bool kStaged, typename Tile>
__device__ __forceinline__ void encode_tile(const Tile& tile, const uint8_t* input, uint8_t* staged, uint32_t lane) {
  using Hot = HotGroup<kType>;
  const Segment& s = tile.segment();
  const Extent e = extent(s, tile.index);
  uint8_t* cold_data = tile.at().data + int64_t{e.first_slot} * kGroupBytes;
  uint8_t* cold_scales = tile.at().scales + e.first_slot;
  uint8_t* data = kStaged ? staged : cold_data;
  uint8_t* scales = kStaged ? staged + kStagedData : cold_scales;
  const GlobalScale global = s.global;
  const uint32_t groups = e.end - e.first;
  const bool unit = Hot::kPacked && global.decode == 1.0f;
  const auto encode = [&](const uint8_t* from) { return Hot::encode_one(from, unit, global); };
  const auto put_residual = [&](TileGroup at) {
    const ResidualGroup both = Hot::encode_residual(input + at.group * Hot::kBytes, global);
    put_group(data, scales, at.slot, both.main);
    put_group(data, scales, at.slot + 1, both.residual);
  };
  if (kStaged && s.residual_groups == 0) {
    // With few warps a multiprocessor, a second group a lane hides the arithmetic's latency.
    if (unit)
      encode_in_order<2>(input, data, scales, groups, lane, Hot::kBytes,
                         [&](const uint8_t* from) { return Hot::encode_one(from, true, global); });
    else
      encode_in_order<1>(input, data, scales, groups, lane, Hot::kBytes,
                         [&](const uint8_t* from) { return Hot::encode_one(from, false, global); });
  } else if (has_whole_rows(s)) {
    // Residual groups are a few of each row: counted off together, so that no lane idles beside them.
    const uint32_t residual = s.units_per_row.divide(groups) * s.residual_groups;
#pragma unroll 1
    for (uint32_t i = lane; i < groups - residual; i += kWarp) {
      const TileGroup at = plain_group(s, i);
      put_group(data, scales, at.slot, encode(input + at.group * Hot::kBytes));
    }
#pragma unroll 1
    for (uint32_t i = lane; i < residual; i += kWarp) put_residual(residual_group(s, i));
  } else {
#pragma unroll 1
    for (uint32_t i = lane; i < groups; i += kWarp) {
      const TileGroup at{i, slots_before(s, e.first + i) - e.first_slot};
      const uint32_t column = e.first + i - s.units_per_row.divide(e.first + i) * s.units_per_row.divisor;
      if (is_residual(s, column)) put_residual(at);
      else put_group(data, scales, at.slot, encode(input + i * Hot::kBytes));
    }
  }
  if (!kStaged) return;
  __syncwarp();
  store_run(cold_data, data, (e.end_slot - e.first_slot) * kGroupBytes, lane);
  store_run(cold_scales, scales, e.end_slot - e.first_slot, lane);
}

// Little work of global scale 1: all loads at once, and no ring to set up. `from` says where a group lies.
constexpr uint32_t kGroupsAtOnce = 2 * kWarp;

template <DType kType, typename From>
__device__ __forceinline__ void encode_at_once(uint32_t groups, uint8_t* data, uint8_t* scales, uint32_t lane,
                                               From&& from) {
  using Hot = HotGroup<kType>;
  typename Hot::Raw raw[kGroupsAtOnce / kWarp];
#pragma unroll
  for (uint32_t k = 0; k < kGroupsAtOnce / kWarp; ++k) raw[k] = Hot::load_raw(from(min(lane + k * kWarp, groups - 1)));
#pragma unroll
  for (uint32_t k = 0; k < kGroupsAtOnce / kWarp; ++k)
    if (lane + k * kWarp < groups)
      put_group(data, scales, lane + k * kWarp, encode_packed<typename Hot::P>(Hot::unpack(raw[k])));
}

// A tile in device memory on both sides.
template <DType kType>
__device__ __forceinline__ void encode_streamed(const PlacedTile& tile, uint8_t* ring, uint32_t lane) {
  using Hot = HotGroup<kType>;
  constexpr uint32_t kGroups = kStageBytes / Hot::kBytes;
  const Segment& s = tile.segment();
  const Extent e = extent(s, tile.index);
  const HotTile hot(s, tile.at().hot, e.first);
  const uint32_t groups = e.end - e.first;
  uint8_t* data = tile.at().data + int64_t{e.first} * kGroupBytes;
  uint8_t* scales = tile.at().scales + e.first;
  const GlobalScale global = s.global;
  if (Hot::kPacked && global.decode == 1.0f && groups <= kGroupsAtOnce) {
    encode_at_once<kType>(groups, data, scales, lane, [&](uint32_t group) {
      const uint32_t chunk = group << hot.log_chunks;
      return hot.linear ? hot.base + chunk * 16 : hot.scattered(chunk);
    });
    return;
  }
  data += lane * kGroupBytes;
  scales += lane;
  const auto stream = [&](auto&& encode) {
    int left = static_cast<int>(groups - lane);
    stream_chunks(hot, groups * (Hot::kBytes / 16), ring, lane, [&](const uint8_t* from, uint32_t) {
#pragma unroll
      for (uint32_t k = 0; k < kGroups / kWarp; ++k) {
        if (left > 0) put_group(data, scales, 0, encode(from + (k * kWarp + lane) * Hot::kBytes));
        left -= static_cast<int>(kWarp);
        data += kWarp * kGroupBytes;
        scales += kWarp;
      }
    });
  };
  if (Hot::kPacked && global.decode == 1.0f)
    stream([&](const uint8_t* from) { return Hot::encode_one(from, true, global); });
  else stream([&](const uint8_t* from) { return Hot::encode_one(from, false, global); });
}

__device__ __forceinline__ void copy_streamed(const PlacedTile& tile, uint8_t* ring, uint32_t lane) {
  const Segment& s = tile.segment();
  const Extent e = extent(s, tile.index);
  const HotTile hot(s, tile.at().hot, e.first);
  const uint32_t bytes = copied_bytes(s, e);
  uint8_t* to = tile.at().data + int64_t{e.first} * 16;
  if (misalignment(to) != 0 || bytes % 16 != 0 || (hot.linear && misalignment(hot.base) != 0) || !has_one_part(s)) {
    fetch_hot(tile, ring, lane);
    commit_async();
    wait_async<0>();
    __syncwarp();
    copy_tile<true>(tile, ring, lane);
    __syncwarp();
    return;
  }
  stream_chunks(hot, bytes / 16, ring, lane, [&](const uint8_t* from, uint32_t first) {
#pragma unroll
    for (uint32_t i = 0; i < kStageChunks; i += kWarp)
      if (first + i + lane < bytes / 16)
        reinterpret_cast<uint4*>(to)[first + i + lane] = reinterpret_cast<const uint4*>(from)[i + lane];
  });
}

}  // namespace kvc::nvfp4
