// Packed data and scales to hot rows.
//
// Cold bytes come to shared memory first, where each lane takes what makes 16 bytes of a hot row: from host memory
// through registers, a tile ahead of the arithmetic, because asynchronous copies read it at four fifths of the speed.
#pragma once

#include "nvfp4/tile.cuh"

namespace kvc::nvfp4 {

// The cold runs of a tile: packed data (or copied bytes) and scales.
struct ColdRuns {
  const uint8_t* data;
  const uint8_t* scales;
  uint32_t data_bytes, scale_bytes;

  template <typename Tile>
  __device__ __forceinline__ explicit ColdRuns(const Tile& tile) {
    const Segment& s = tile.segment();
    const Extent e = extent(s, tile.index);
    const bool groups = s.kind == SegmentKind::kQuantize;
    data = tile.at().data + (groups ? int64_t{e.first_slot} * kGroupBytes : int64_t{e.first} * 16);
    data_bytes = groups ? (e.end_slot - e.first_slot) * kGroupBytes : copied_bytes(s, e);
    scales = tile.at().scales + e.first_slot;
    scale_bytes = groups ? e.end_slot - e.first_slot : 0;
  }
};

// Cold bytes on their way to shared memory, as far as they lie on 16-byte boundaries. Nothing but the loaded registers
// is carried, and no branch stands around the loads: a register that had to be moved would have to be waited for.
struct Carried {
  static constexpr uint32_t kChunks = kStagedData / 512;  // of 16 bytes, a lane
  uint4 data[kChunks];
  uint4 scales;

  static __device__ __forceinline__ uint32_t whole_chunks(const uint8_t* from, uint32_t bytes) {
    return misalignment(from) == 0 ? bytes / 16 : 0;
  }
  __device__ __forceinline__ void load(const ColdRuns& runs, uint32_t lane) {
    const uint32_t count = whole_chunks(runs.data, runs.data_bytes);
#pragma unroll
    for (uint32_t k = 0; k < kChunks; ++k)
      if (lane + k * kWarp < count) data[k] = reinterpret_cast<const uint4*>(runs.data)[lane + k * kWarp];
    if (lane < whole_chunks(runs.scales, runs.scale_bytes)) scales = reinterpret_cast<const uint4*>(runs.scales)[lane];
  }
  __device__ __forceinline__ void put(const ColdRuns& runs, uint8_t* shared, uint32_t lane) const {
    const uint32_t count = whole_chunks(runs.data, runs.data_bytes);
    const uint32_t scale_count = whole_chunks(runs.scales, runs.scale_bytes);
#pragma unroll
    for (uint32_t k = 0; k < kChunks; ++k)
      if (lane + k * kWarp < count) reinterpret_cast<uint4*>(shared)[lane + k * kWarp] = data[k];
    if (lane < scale_count) reinterpret_cast<uint4*>(shared + kStagedData)[lane] = scales;
    // What was not carried: all of an unaligned run, or the few bytes behind the last whole chunk.
    fetch_run(shared + 16 * count, runs.data + 16 * count, runs.data_bytes - 16 * count, lane);
    fetch_run(shared + kStagedData + 16 * scale_count, runs.scales + 16 * scale_count,
              runs.scale_bytes - 16 * scale_count, lane);
  }
};

// The nibbles of one 16-byte hot chunk: part `part` of a slot's eight bytes.
template <DType kType>
__device__ __forceinline__ uint64_t load_nibbles(const uint8_t* data, uint32_t slot, uint32_t part) {
  const uint8_t* from = data + int64_t{slot} * kGroupBytes + part * (kGroupBytes / itemsize(kType));
  if constexpr (kType == DType::kFloat8E4M3) {
    const uint2 v = *reinterpret_cast<const uint2*>(from);
    return v.x | (static_cast<uint64_t>(v.y) << 32);
  } else if constexpr (kType == DType::kFloat32) {
    return *reinterpret_cast<const uint16_t*>(from);
  } else {
    return *reinterpret_cast<const uint32_t*>(from);
  }
}

// `data` and `scales`, in shared memory, begin with the tile's own.
template <DType kType, typename Tile>
__device__ __forceinline__ void decode_tile(const Tile& tile, const uint8_t* data, const uint8_t* scales,
                                            uint32_t lane) {
  constexpr uint32_t kParts = itemsize(kType);  // 16-byte chunks of a hot group
  constexpr int kAtOnce = 4;
  const Segment& s = tile.segment();
  const Extent e = extent(s, tile.index);
  const float global = s.global.decode;
  const HotTile hot(s, tile.at().hot, e.first);
  const uint32_t groups = e.end - e.first;
  const auto to = [&](uint32_t c) {
    return reinterpret_cast<uint4*>(hot.linear ? hot.base + c * 16 : hot.scattered(c));
  };
  // All reads of a step before its first write: the compiler cannot know that they do not overlap.
  const auto plain_chunks = [&](uint32_t count, auto&& place, auto&& store) {
#pragma unroll 1
    for (uint32_t base = lane; base < count; base += kAtOnce * kWarp) {
      uint64_t nibbles[kAtOnce];
      uint32_t codes[kAtOnce], chunks[kAtOnce];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const uint32_t c = min(base + k * kWarp, count - 1);  // the last chunk again rather than a branch
        const TileGroup at = place(c / kParts);
        nibbles[k] = load_nibbles<kType>(data, at.slot, c % kParts);
        codes[k] = scales[at.slot];
        chunks[k] = at.group * kParts + c % kParts;
      }
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k)
        if (k == 0 || base + k * kWarp < count) store(chunks[k], nibbles[k], codes[k]);
    }
  };
  const auto in_order = [](uint32_t i) { return TileGroup{i, i}; };
  const auto any = [&](uint32_t c, uint64_t nibbles, uint32_t code) {
    *to(c) = decode_chunk<kType>(nibbles, code, global == 1.0f, global);
  };
  const auto put_residual = [&](TileGroup at, uint32_t part) {
    *to(at.group * kParts + part) =
        decode_residual_chunk<kType>(load_nibbles<kType>(data, at.slot, part), scales[at.slot],
                                     load_nibbles<kType>(data, at.slot + 1, part), scales[at.slot + 1], global);
  };
  if (s.residual_groups == 0) {
    if (hot.linear && global == 1.0f) {
      uint4* out = reinterpret_cast<uint4*>(hot.base);
      plain_chunks(groups * kParts, in_order, [&](uint32_t c, uint64_t nibbles, uint32_t code) {
        __stcs(out + c, decode_chunk<kType>(nibbles, code, true, 1.0f));
      });
    } else {
      plain_chunks(groups * kParts, in_order, any);
    }
  } else if (has_whole_rows(s)) {
    const uint32_t residual = s.units_per_row.divide(groups) * s.residual_groups;
    plain_chunks((groups - residual) * kParts, [&](uint32_t i) { return plain_group(s, i); }, any);
#pragma unroll 1
    for (uint32_t c = lane; c < residual * kParts; c += kWarp) put_residual(residual_group(s, c / kParts), c % kParts);
  } else {
#pragma unroll 1
    for (uint32_t c = lane; c < groups * kParts; c += kWarp) {
      const uint32_t i = c / kParts, part = c % kParts;
      const TileGroup at{i, slots_before(s, e.first + i) - e.first_slot};
      const uint32_t column = e.first + i - s.units_per_row.divide(e.first + i) * s.units_per_row.divisor;
      if (is_residual(s, column)) put_residual(at, part);
      else any(c, load_nibbles<kType>(data, at.slot, part), scales[at.slot]);
    }
  }
}

// A tile of whole rows of which only a range is quantized: every lane writes the chunk that is next in memory, whether
// decoded or copied, and past the cache, which leaves more of it to what is read. The lossless bytes begin at `copied`.
template <DType kType>
__device__ __forceinline__ void decode_rows(const PlacedTile& tile, const uint8_t* data, const uint8_t* scales,
                                            const uint8_t* copied, uint32_t lane) {
  constexpr uint32_t kParts = itemsize(kType);
  constexpr int kAtOnce = 2;
  const Segment& s = tile.segment();
  const Extent e = extent(s, tile.index);
  const PlacedTile rest = tile.rest();
  const float global = s.global.decode;
  const FastDivisor per_row = s.chunks_per_row;
  const uint32_t quantized = s.units_per_row.divisor * kParts, before = rest.segment().before_units;
  const uint32_t count = s.units_per_row.divide(e.end - e.first) * per_row.divisor;
  uint8_t* const hot = rest.at().hot + s.units_per_row.divide(e.first) * s.row_pitch;
#pragma unroll 1
  for (uint32_t base = lane; base < count; base += kAtOnce * kWarp) {
    uint64_t nibbles[kAtOnce];
    uint32_t codes[kAtOnce];
    uint4 lossless[kAtOnce];
    bool is_lossless[kAtOnce];
    uint8_t* to[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const uint32_t c = min(base + k * kWarp, count - 1);  // the last chunk again rather than a branch
      const uint32_t row = per_row.divide(c), column = c - row * per_row.divisor;
      is_lossless[k] = column - before >= quantized;
      const uint32_t at = is_lossless[k] ? 0 : row * quantized + column - before;
      nibbles[k] = load_nibbles<kType>(data, at / kParts, at % kParts);
      codes[k] = scales[at / kParts];
      if (is_lossless[k])
        lossless[k] = reinterpret_cast<const uint4*>(
            copied)[row * (per_row.divisor - quantized) + (column < before ? column : column - quantized)];
      to[k] = hot + row * s.row_pitch + column * 16;
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      if (k > 0 && base + k * kWarp >= count) break;
      const uint4 decoded = decode_chunk<kType>(nibbles[k], codes[k], global == 1.0f, global);
      __stcs(reinterpret_cast<uint4*>(to[k]), is_lossless[k] ? lossless[k] : decoded);
    }
  }
}

}  // namespace kvc::nvfp4
