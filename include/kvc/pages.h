// Page geometry: how the buffers of a hot page lie inside a cold page (format version 1), and the flat list of
// segments that the CPU op and the CUDA kernels walk. Torch-free, C++17.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include "kvc/nvfp4.h"

namespace kvc {

enum class Transform : int64_t { kNvfp4 = 0, kCopy = 1 };

// One buffer of a hot page. Ranges are in elements of a row, offsets and nbytes in bytes.
struct BufferSpec {
  int64_t layer = 0;
  int64_t pool = 0;
  int64_t offset = 0;
  Transform transform = Transform::kNvfp4;
  DType dtype = DType::kBFloat16;
  int64_t rows = 0;
  int64_t row_elements = 0;
  int64_t quantized_start = 0;
  int64_t quantized_elements = 0;
  int64_t residual_start = 0;
  int64_t residual_elements = 0;
  int64_t nbytes = 0;
  float global_scale = 1.0f;

  int64_t row_bytes() const { return row_elements * itemsize(dtype); }
  int64_t hot_bytes() const { return transform == Transform::kCopy ? nbytes : rows * row_bytes(); }
  int64_t slots_per_row() const { return (quantized_elements + residual_elements) / nvfp4::kGroupSize; }
  int64_t data_bytes() const { return rows * slots_per_row() * nvfp4::kGroupBytes; }
  int64_t scale_bytes() const { return rows * slots_per_row(); }
  int64_t lossless_bytes() const { return rows * (row_elements - quantized_elements) * itemsize(dtype); }
};

constexpr int64_t kMaxExtent = int64_t{1} << 46;  // bytes or elements; keeps every product below 2^63
constexpr int64_t kMaxGroups = int64_t{1} << 31;  // groups (or 16-byte chunks) of one buffer in one page
constexpr float kMinGlobalScale = 0x1p-100f;
constexpr float kMaxGlobalScale = 0x1p+100f;

// Slots and 16-byte chunks of a buffer are counted in 31 bits.
inline int64_t max_rows(const BufferSpec& b) {
  const int64_t chunks = (b.row_elements - b.quantized_elements) * itemsize(b.dtype) / 16;
  return (kMaxGroups - 1) / std::max(b.slots_per_row(), chunks);
}

// What is wrong with a buffer on its own, or an empty string. `expected, got` ends the public error text.
inline std::string check(const BufferSpec& b) {
  const auto outside = [](int64_t v, int64_t low, int64_t high) { return v < low || v > high; };
  const auto text = [](const char* what, int64_t got) { return std::string(what) + ", got " + std::to_string(got); };
  if (b.layer < 0) return text("layer >= 0", b.layer);
  if (b.pool < 0) return text("pool >= 0", b.pool);
  if (outside(b.offset, 0, kMaxExtent)) return text("offset in [0, 2^46]", b.offset);
  if (b.transform == Transform::kCopy) {
    if (outside(b.nbytes, 1, kMaxExtent)) return text("nbytes in [1, 2^46]", b.nbytes);
    if (b.nbytes / 16 >= kMaxGroups) return text("nbytes below 2^35", b.nbytes);
    return {};
  }
  if (b.transform != Transform::kNvfp4)
    return text("transform 0 (nvfp4) or 1 (copy)", static_cast<int64_t>(b.transform));
  if (static_cast<int>(b.dtype) > 3) return text("a dtype code in [0, 3]", static_cast<int64_t>(b.dtype));
  const int64_t q_end = b.quantized_start + b.quantized_elements;
  if (outside(b.rows, 1, kMaxExtent)) return text("rows in [1, 2^46]", b.rows);
  if (outside(b.row_elements, 16, kMaxGroups)) return text("row_elements in [16, 2^31]", b.row_elements);
  for (const int64_t v :
       {b.row_elements, b.quantized_start, b.quantized_elements, b.residual_start, b.residual_elements})
    if (v % nvfp4::kGroupSize != 0) return text("multiples of 16 for row_elements and ranges", v);
  if (outside(b.quantized_start, 0, b.row_elements) || outside(b.quantized_elements, 16, b.row_elements) ||
      q_end > b.row_elements)
    return text("a quantized range that covers part of the row and lies inside it", b.quantized_elements);
  if (outside(b.residual_elements, 0, b.quantized_elements) ||
      (b.residual_elements > 0 &&
       (outside(b.residual_start, b.quantized_start, q_end) || b.residual_start + b.residual_elements > q_end)))
    return text("a residual range inside the quantized range", b.residual_elements);
  if (b.rows > max_rows(b)) return text(("at most " + std::to_string(max_rows(b)) + " rows").c_str(), b.rows);
  if (b.offset % 16 != 0) return text("an offset that is a multiple of 16", b.offset);
  if (!(b.global_scale >= kMinGlobalScale && b.global_scale <= kMaxGlobalScale))
    return "global_scale in [2^-100, 2^100], got " + std::to_string(b.global_scale);
  return {};
}

// Byte positions of one buffer inside the cold page.
struct ColdPlacement {
  int64_t data = 0;  // packed E2M1, or the copied bytes
  int64_t scales = 0;
  int64_t lossless = 0;
  int64_t padding = 0;  // first padding byte of the layer; set on the layer's last buffer only
  int padding_bytes = 0;
};

// Places the buffers (layers in ascending order) and returns the cold page's size. Per layer: all data, then for every
// NVFP4 buffer its scales and its lossless rows, then the copied buffers, then zeros up to a multiple of 16.
inline int64_t place(const std::vector<BufferSpec>& buffers, std::vector<ColdPlacement>* placements) {
  placements->assign(buffers.size(), {});
  int64_t end = 0;
  for (size_t first = 0; first < buffers.size();) {
    size_t last = first;
    while (last < buffers.size() && buffers[last].layer == buffers[first].layer) ++last;
    const auto each = [&](Transform transform, auto&& visit) {
      for (size_t i = first; i < last; ++i)
        if (buffers[i].transform == transform) visit(buffers[i], (*placements)[i]);
    };
    const auto take = [&end](int64_t bytes) { return (end += bytes) - bytes; };
    each(Transform::kNvfp4, [&](const BufferSpec& b, ColdPlacement& p) { p.data = take(b.data_bytes()); });
    each(Transform::kNvfp4, [&](const BufferSpec& b, ColdPlacement& p) {
      p.scales = take(b.scale_bytes());
      p.lossless = take(b.lossless_bytes());
    });
    each(Transform::kCopy, [&](const BufferSpec& b, ColdPlacement& p) { p.data = take(b.nbytes); });
    ColdPlacement& padded = (*placements)[last - 1];
    padded.padding_bytes = static_cast<int>(-end & 15);
    padded.padding = take(padded.padding_bytes);
    first = last;
  }
  return end;
}

// n / divisor for n < 2^31 by one multiply-high (Granlund and Montgomery, "Division by invariant integers using
// multiplication", PLDI 1994).
struct FastDivisor {
  uint32_t divisor = 1;
  uint32_t multiplier = 0;
  uint32_t shift = 0;

  FastDivisor() = default;
  explicit FastDivisor(uint32_t d) : divisor(d) {
    while ((uint64_t{1} << shift) < d) ++shift;
    multiplier = static_cast<uint32_t>((((uint64_t{1} << 32) * ((uint64_t{1} << shift) - d)) / d) + 1);
  }
  KVC_HOST_DEVICE uint32_t divide(uint32_t n) const {
#if defined(__CUDA_ARCH__)
    return (__umulhi(n, multiplier) + n) >> shift;
#else
    return static_cast<uint32_t>(((uint64_t{n} * multiplier >> 32) + n) >> shift);
#endif
  }
};

enum class SegmentKind : uint8_t {
  kQuantize,  // groups of 16 elements <-> packed data and scales
  kRows,      // the lossless parts of rows, in chunks of 16 bytes <-> contiguous bytes
  kBytes,     // contiguous bytes on both sides, any alignment
};

// How much of a segment one warp (or one step of a CPU thread) handles at a time.
struct TileLimits {
  uint32_t hot_bytes = 4096;
  uint32_t slots = 256;  // output slots; a residual group takes two
  uint32_t copied_bytes = 4096;
  uint32_t residual_bytes = 4096;  // hot bytes where groups take two slots
  uint32_t joined_bytes = 0;       // hot bytes of a tile that holds both halves of its rows; 0 keeps the halves apart
};

// A homogeneous run of work inside one page. Strides are between consecutive page slots.
struct alignas(16) Segment {
  uint8_t* hot = nullptr;  // first byte of row 0 (kQuantize: of its quantized range)
  int64_t hot_stride = 0;
  uint8_t* data = nullptr;  // packed data, or the copied bytes
  int64_t data_stride = 0;
  uint8_t* scales = nullptr;
  int64_t scales_stride = 0;
  int64_t row_pitch = 0;  // bytes between hot rows
  uint32_t units = 0;     // groups (kQuantize), 16-byte chunks (kRows) or bytes / 16 rounded up (kBytes)
  uint32_t units_per_tile = 0;
  uint32_t first_tile = 0;  // tiles of a page are numbered through all its segments
  uint32_t end_tile = 0;
  FastDivisor units_per_row;
  uint32_t residual_groups = 0;  // of the row
  uint8_t padding_bytes = 0;     // zeroed on encode
  SegmentKind kind = SegmentKind::kQuantize;
  DType dtype = DType::kBFloat16;
  bool joined = false;  // kQuantize: a tile moves whole rows, those of the same tile of the next segment included
  nvfp4::GlobalScale global{1.0f, 1.0f};
  // What the kernels read of every segment stands in front: the fewer lines of the constant cache, the sooner they
  // start.
  uint32_t residual_first = 0;   // group of the row, relative to the quantized range
  FastDivisor residual_per_row;  // residual_groups, to divide by
  FastDivisor plain_per_row;     // groups of one component
  FastDivisor chunks_per_row;    // of 16 hot bytes, where `joined`
  uint32_t before_units = 0;     // kRows: 16-byte chunks in front of the quantized range
  int64_t gap_bytes = 0;         // kRows: bytes of the quantized range
  int64_t nbytes = 0;            // kBytes
  uint8_t* padding = nullptr;    // with data_stride

  uint32_t tiles() const { return (units + units_per_tile - 1) / units_per_tile; }
  int64_t hot_bytes() const {
    return int64_t{units} * (kind == SegmentKind::kQuantize ? nvfp4::kGroupSize * itemsize(dtype) : 16);
  }
};

// Appends the one or two segments of a buffer. `hot` is the address of the buffer in slot 0; data, scales and lossless
// are addresses in cold slot 0.
struct ColdPointers {
  uint8_t* data;
  int64_t data_stride;
  uint8_t* scales;
  int64_t scales_stride;
  uint8_t* lossless;
  int64_t lossless_stride;
};

inline void append_segments(const BufferSpec& b, uint8_t* hot, int64_t hot_stride, int64_t row_pitch,
                            const ColdPointers& cold, std::vector<Segment>* segments) {
  Segment s;
  s.hot = hot;
  s.hot_stride = hot_stride;
  s.data = cold.data;
  s.data_stride = cold.data_stride;
  s.dtype = b.dtype;
  if (b.transform == Transform::kCopy) {
    s.kind = SegmentKind::kBytes;
    s.nbytes = b.nbytes;
    s.units = static_cast<uint32_t>((b.nbytes + 15) / 16);
    segments->push_back(s);
    return;
  }
  const int64_t item = itemsize(b.dtype);
  s.kind = SegmentKind::kQuantize;
  s.hot = hot + b.quantized_start * item;
  s.scales = cold.scales;
  s.scales_stride = cold.scales_stride;
  s.row_pitch = row_pitch;
  s.units_per_row = FastDivisor(static_cast<uint32_t>(b.quantized_elements / nvfp4::kGroupSize));
  s.units = static_cast<uint32_t>(b.rows) * s.units_per_row.divisor;
  s.residual_first = static_cast<uint32_t>((b.residual_start - b.quantized_start) / nvfp4::kGroupSize);
  s.residual_groups = static_cast<uint32_t>(b.residual_elements / nvfp4::kGroupSize);
  if (s.residual_groups != 0) {
    s.residual_per_row = FastDivisor(s.residual_groups);
    s.plain_per_row = FastDivisor(std::max(1u, s.units_per_row.divisor - s.residual_groups));
  }
  s.global = nvfp4::global_scale(b.global_scale);
  segments->push_back(s);
  const int64_t lossless_row = (b.row_elements - b.quantized_elements) * item;
  if (lossless_row == 0) return;
  Segment l;
  l.kind = SegmentKind::kRows;
  l.dtype = b.dtype;
  l.hot = hot;
  l.hot_stride = hot_stride;
  l.data = cold.lossless;
  l.data_stride = cold.lossless_stride;
  l.row_pitch = row_pitch;
  l.units_per_row = FastDivisor(static_cast<uint32_t>(lossless_row / 16));
  l.units = static_cast<uint32_t>(b.rows) * l.units_per_row.divisor;
  l.before_units = static_cast<uint32_t>(b.quantized_start * item / 16);
  l.gap_bytes = b.quantized_elements * item;
  segments->push_back(l);
}

// As many whole rows as fit, such that the scales of a tile start at 16 bytes if they can.
inline uint32_t whole_rows(const Segment& s, uint32_t most_groups, uint32_t most_slots) {
  const uint32_t slots = s.units_per_row.divisor + s.residual_groups;
  const uint32_t rows = std::min(most_groups / s.units_per_row.divisor, most_slots / slots);
  const uint32_t aligned = 16 / std::gcd(16u, slots);
  return rows < aligned ? rows : rows - rows % aligned;
}

// Cuts the segments into tiles, numbers them and returns how many a page has. The second half of joined rows has none.
inline int64_t number_tiles(std::vector<Segment>* segments, TileLimits limits = {}) {
  int64_t tiles = 0;
  for (size_t i = 0; i < segments->size(); ++i) {
    Segment& s = (*segments)[i];
    const uint32_t row = s.units_per_row.divisor;
    s.first_tile = s.end_tile = static_cast<uint32_t>(tiles);
    if (i > 0 && (*segments)[i - 1].joined) {
      const Segment& first = (*segments)[i - 1];
      s.units_per_tile = first.units_per_tile / first.units_per_row.divisor * row;
      continue;
    }
    s.joined = false;
    if (s.kind == SegmentKind::kQuantize) {
      const uint32_t group_bytes = nvfp4::kGroupSize * static_cast<uint32_t>(itemsize(s.dtype));
      const uint32_t groups = (s.residual_groups != 0 ? limits.residual_bytes : limits.hot_bytes) / group_bytes;
      uint32_t rows = s.residual_groups != 0 ? whole_rows(s, groups, limits.slots) : 0;
      const bool rest = i + 1 < segments->size() && (*segments)[i + 1].kind == SegmentKind::kRows;
      if (rest && s.residual_groups == 0 && int64_t{row} * group_bytes <= limits.joined_bytes) {
        s.chunks_per_row = FastDivisor(row * group_bytes / 16 + (*segments)[i + 1].units_per_row.divisor);
        rows = whole_rows(s, limits.joined_bytes / 16 / s.chunks_per_row.divisor * row, limits.slots);
        s.joined = rows > 0;
      }
      // Whole rows, if one fits: then a tile's residual groups can be counted off without looking for them.
      s.units_per_tile =
          rows > 0 ? rows * row : std::min(groups, s.residual_groups != 0 ? limits.slots / 2 : limits.slots);
    } else {
      s.units_per_tile = limits.copied_bytes / 16;
    }
    tiles += s.tiles();
    s.end_tile = static_cast<uint32_t>(tiles);
  }
  return tiles;
}

// Hot address of a unit (group or 16-byte chunk) of page `slot`.
KVC_HOST_DEVICE int64_t hot_offset(const Segment& s, uint32_t unit, uint32_t group_bytes) {
  const uint32_t row = s.units_per_row.divide(unit);
  const uint32_t column = unit - row * s.units_per_row.divisor;
  if (s.kind == SegmentKind::kQuantize) return row * s.row_pitch + int64_t{column} * group_bytes;
  return row * s.row_pitch + int64_t{column} * 16 + (column >= s.before_units ? s.gap_bytes : int64_t{0});
}

// Output slots (main and residual components) that stand before group `group`.
KVC_HOST_DEVICE uint32_t slots_before(const Segment& s, uint32_t group) {
  if (s.residual_groups == 0) return group;
  const uint32_t row = s.units_per_row.divide(group);
  const uint32_t column = group - row * s.units_per_row.divisor;
  const uint32_t past = column > s.residual_first ? column - s.residual_first : 0;
  return group + row * s.residual_groups + (past < s.residual_groups ? past : s.residual_groups);
}

// Whether tiles hold whole rows (see number_tiles).
KVC_HOST_DEVICE bool has_whole_rows(const Segment& s) { return s.units_per_row.divisor <= s.units_per_tile; }

// A group of a tile of whole rows: its number within the tile and its first slot there.
struct TileGroup {
  uint32_t group, slot;
};

// The i-th group of one component, and the i-th of two.
KVC_HOST_DEVICE TileGroup plain_group(const Segment& s, uint32_t i) {
  const uint32_t row = s.plain_per_row.divide(i);
  const uint32_t k = i - row * s.plain_per_row.divisor;
  const bool behind = k >= s.residual_first;
  const uint32_t group = row * s.units_per_row.divisor + k + (behind ? s.residual_groups : 0);
  return {group, group + row * s.residual_groups + (behind ? s.residual_groups : 0)};
}

KVC_HOST_DEVICE TileGroup residual_group(const Segment& s, uint32_t i) {
  const uint32_t row = s.residual_per_row.divide(i);
  const uint32_t group = row * s.units_per_row.divisor + s.residual_first + (i - row * s.residual_groups);
  return {group, group + i};
}

// Whether the hot bytes of a row lie in one piece: lossless parts before and behind the quantized range do not.
KVC_HOST_DEVICE bool has_one_part(const Segment& s) {
  return s.before_units == 0 || s.before_units == s.units_per_row.divisor;
}

KVC_HOST_DEVICE bool is_residual(const Segment& s, uint32_t column) {
  return column - s.residual_first < s.residual_groups;
}

}  // namespace kvc
