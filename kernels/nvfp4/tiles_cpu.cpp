// The page moves on a CPU: tiles of kvc/pages.h, one after the other. Torch-free.

#include <algorithm>
#include <cstring>

#include "nvfp4/launch.h"

// One binary serves every x86-64; the loader picks the widest vector unit the machine has.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define KVC_TARGET_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define KVC_TARGET_CLONES
#endif

namespace kvc::nvfp4 {
namespace {

struct Tile {
  const Segment& segment;
  uint8_t* hot;
  uint8_t* data;
  uint8_t* scales;
  uint32_t begin, end;  // units
};

// Groups of a tile are handled in batches. Each loop below does one thing to every element or every group of a batch,
// which is what compilers vectorise, in each clone with the vectors it has. With 32 groups, the loops over groups fill
// the vectors of AVX2 also where they hold bytes. A batch that is not full is computed all the same, on zeros.
constexpr int kBatch = 32;
constexpr int kElements = kBatch * kGroupSize;

struct Batch {
  uint8_t* hot[kBatch];
  uint32_t slot[kBatch];  // of the main component; the residual one follows it
  int size = 0;
};

struct BatchScales {
  uint32_t code[kBatch];
  float decode[kBatch];
  float encode[kBatch];
};

using BatchData = uint8_t[kBatch * kGroupBytes];  // of one component

KVC_HOST_DEVICE void expand(const float (&groups)[kBatch], float (&elements)[kElements]) {
  for (int g = 0; g < kBatch; ++g)
    for (int i = 0; i < kGroupSize; ++i) elements[g * kGroupSize + i] = groups[g];
}

KVC_HOST_DEVICE void find_scales(const float (&x)[kElements], GlobalScale global, BatchScales& scales) {
  uint32_t amax[kBatch];
  for (int g = 0; g < kBatch; ++g) amax[g] = amax_bits(x + g * kGroupSize);
  for (int g = 0; g < kBatch; ++g) {
    const BlockScale scale = block_scale(bits_to_float(amax[g]), global);
    scales.code[g] = amax[g] < kInfinityBits ? scale.code : kNaNScale;
    scales.decode[g] = scale.decode;
    scales.encode[g] = scale.encode;
  }
}

KVC_HOST_DEVICE void find_codes(const float (&x)[kElements], const float (&encode)[kBatch],
                                uint8_t (&codes)[kElements]) {
  alignas(64) float factor[kElements];
  expand(encode, factor);
  for (int i = 0; i < kElements; ++i) codes[i] = static_cast<uint8_t>(encode_element(x[i], factor[i]));
}

// Nibbles between bytes of their own and pairs. A pair of codes is a 16-bit number with element 2i in its low byte.
KVC_HOST_DEVICE void pack(const uint8_t (&codes)[kElements], BatchData& packed) {
  alignas(64) uint16_t pairs[kElements / 2];
  std::memcpy(pairs, codes, sizeof pairs);
  for (int i = 0; i < kElements / 2; ++i) packed[i] = static_cast<uint8_t>(pairs[i] | (pairs[i] >> 4));
}

KVC_HOST_DEVICE void unpack(const BatchData& packed, uint8_t (&codes)[kElements]) {
  alignas(64) uint16_t pairs[kElements / 2];
  for (int i = 0; i < kElements / 2; ++i) pairs[i] = static_cast<uint16_t>((packed[i] | (packed[i] << 4)) & 0x0F0F);
  std::memcpy(codes, pairs, sizeof pairs);
}

KVC_HOST_DEVICE void store_groups(const Batch& batch, const Tile& t, int component, const BatchData& packed,
                                  const uint32_t (&code)[kBatch]) {
  for (int g = 0; g < batch.size; ++g) {
    const int64_t slot = int64_t{batch.slot[g]} + component;
    uint64_t data;
    std::memcpy(&data, packed + g * kGroupBytes, sizeof data);
    if (code[g] == 0 || code[g] == kNaNScale) data = 0;
    std::memcpy(t.data + slot * kGroupBytes, &data, sizeof data);
    t.scales[slot] = static_cast<uint8_t>(code[g]);
  }
}

KVC_HOST_DEVICE void load_groups(const Batch& batch, const Tile& t, int component, BatchData& packed,
                                 uint32_t (&code)[kBatch]) {
  if (batch.size < kBatch) std::memset(packed, 0, sizeof packed), std::memset(code, 0, sizeof code);
  for (int g = 0; g < batch.size; ++g) {
    const int64_t slot = int64_t{batch.slot[g]} + component;
    std::memcpy(packed + g * kGroupBytes, t.data + slot * kGroupBytes, kGroupBytes);
    code[g] = t.scales[slot];
  }
}

template <DType kType, bool kResidual>
KVC_HOST_DEVICE void encode_batch(const Batch& batch, const Tile& t) {
  using E = Element<kType>;
  const GlobalScale global = t.segment.global;
  alignas(64) typename E::Bits bits[kElements];
  if (batch.size < kBatch) std::memset(bits, 0, sizeof bits);
  for (int g = 0; g < batch.size; ++g) std::memcpy(bits + g * kGroupSize, batch.hot[g], kGroupSize * sizeof bits[0]);
  alignas(64) float x[kElements];
  for (int i = 0; i < kElements; ++i) x[i] = E::to_float(bits[i]);

  BatchScales scales;
  alignas(64) uint8_t codes[kElements];
  alignas(64) BatchData packed;
  find_scales(x, global, scales);
  find_codes(x, scales.encode, codes);
  pack(codes, packed);
  store_groups(batch, t, 0, packed, scales.code);
  if constexpr (kResidual) {
    alignas(64) float factor[kElements];
    expand(scales.decode, factor);
    for (int i = 0; i < kElements; ++i) x[i] = add_rn(x[i], -mul_rn(e2m1_value(codes[i]), factor[i]));
    BatchScales rest;
    find_scales(x, global, rest);
    find_codes(x, rest.encode, codes);
    pack(codes, packed);
    for (int g = 0; g < kBatch; ++g) rest.code[g] = scales.code[g] == kNaNScale ? kNaNScale : rest.code[g];
    store_groups(batch, t, 1, packed, rest.code);
  }
}

template <DType kType, bool kResidual>
KVC_HOST_DEVICE void decode_batch(const Batch& batch, const Tile& t) {
  using E = Element<kType>;
  const float global = t.segment.global.decode;
  alignas(64) BatchData packed;
  alignas(64) uint8_t codes[kElements];
  uint32_t code[kBatch];
  float scale[kBatch];
  alignas(64) float factor[kElements];
  uint32_t nan[kBatch];
  alignas(64) typename E::Bits bits[kElements];
  load_groups(batch, t, 0, packed, code);
  for (int g = 0; g < kBatch; ++g) scale[g] = decode_scale(code[g]);
  for (int g = 0; g < kBatch; ++g) nan[g] = is_nan_scale(code[g]);
  unpack(packed, codes);
  expand(scale, factor);
  if constexpr (kResidual) {
    alignas(64) uint8_t rest[kElements];
    alignas(64) float rest_factor[kElements];
    load_groups(batch, t, 1, packed, code);
    for (int g = 0; g < kBatch; ++g) scale[g] = decode_scale(code[g]);
    for (int g = 0; g < kBatch; ++g) nan[g] |= is_nan_scale(code[g]);
    unpack(packed, rest);
    expand(scale, rest_factor);
    for (int i = 0; i < kElements; ++i)
      bits[i] = E::from_float(decode_residual_element(codes[i], factor[i], rest[i], rest_factor[i], global));
  } else {
    for (int i = 0; i < kElements; ++i) bits[i] = E::from_float(decode_element(codes[i], factor[i], global));
  }
  for (int g = 0; g < batch.size; ++g) {
    if (nan[g] != 0)
      for (int i = 0; i < kGroupSize; ++i) bits[g * kGroupSize + i] = E::kNaN;
    std::memcpy(batch.hot[g], bits + g * kGroupSize, kGroupSize * sizeof bits[0]);
  }
}

// Moves the groups of one kind (one component, or two) of a tile.
template <DType kType, bool kResidual, bool kEncode>
KVC_HOST_DEVICE void move_groups(const Tile& t) {
  constexpr uint32_t kBytes = kGroupSize * itemsize(kType);
  const Segment& s = t.segment;
  const uint32_t groups = s.units_per_row.divisor;
  uint32_t column = t.begin - s.units_per_row.divide(t.begin) * groups, slot = slots_before(s, t.begin);
  uint8_t* hot = t.hot + hot_offset(s, t.begin, kBytes);
  Batch batch;
  for (uint32_t g = t.begin; g < t.end; ++g) {
    const bool residual = is_residual(s, column);
    if (residual == kResidual) {
      batch.hot[batch.size] = hot;
      batch.slot[batch.size] = slot;
      ++batch.size;
    }
    slot += residual ? 2 : 1;
    hot += kBytes;
    if (++column == groups) column = 0, hot += s.row_pitch - int64_t{groups} * kBytes;
    if (batch.size == kBatch || (g + 1 == t.end && batch.size != 0)) {
      if constexpr (kEncode) encode_batch<kType, kResidual>(batch, t);
      else decode_batch<kType, kResidual>(batch, t);
      batch.size = 0;
    }
  }
}

template <DType kType, bool kEncode>
KVC_HOST_DEVICE void move_tile(const Tile& t) {
  move_groups<kType, false, kEncode>(t);
  if (t.segment.residual_groups != 0) move_groups<kType, true, kEncode>(t);
}

KVC_TARGET_CLONES void encode_tile(const Tile& t) {
  switch (t.segment.dtype) {
    case DType::kFloat16: return move_tile<DType::kFloat16, true>(t);
    case DType::kBFloat16: return move_tile<DType::kBFloat16, true>(t);
    case DType::kFloat32: return move_tile<DType::kFloat32, true>(t);
    case DType::kFloat8E4M3: return move_tile<DType::kFloat8E4M3, true>(t);
  }
}

KVC_TARGET_CLONES void decode_tile(const Tile& t) {
  switch (t.segment.dtype) {
    case DType::kFloat16: return move_tile<DType::kFloat16, false>(t);
    case DType::kBFloat16: return move_tile<DType::kBFloat16, false>(t);
    case DType::kFloat32: return move_tile<DType::kFloat32, false>(t);
    case DType::kFloat8E4M3: return move_tile<DType::kFloat8E4M3, false>(t);
  }
}

void copy_tile(const Tile& t, bool encode) {
  const Segment& s = t.segment;
  const auto move = [encode](uint8_t* hot, uint8_t* cold, int64_t bytes) {
    std::memcpy(encode ? cold : hot, encode ? hot : cold, static_cast<size_t>(bytes));
  };
  if (s.kind == SegmentKind::kBytes) {
    const int64_t first = int64_t{t.begin} * 16;
    move(t.hot + first, t.data + first, std::min(int64_t{t.end} * 16, s.nbytes) - first);
    return;
  }
  for (uint32_t u = t.begin; u < t.end; ++u) move(t.hot + hot_offset(s, u, 16), t.data + int64_t{u} * 16, 16);
}

}  // namespace

void move_tiles(const PageWork& work, int64_t tiles_per_page, int64_t first, int64_t last, bool encode) {
  for (int64_t index = first; index < last;) {
    const int64_t page = index / tiles_per_page;
    const int64_t page_end = std::min(last, (page + 1) * tiles_per_page);
    auto tile = static_cast<uint32_t>(index - page * tiles_per_page);
    const auto slot = [&](int column) -> int64_t {
      return work.pairs ? work.pairs[page * work.pair_stride[0] + column * work.pair_stride[1]] : page;
    };
    const int64_t hot_slot = slot(encode ? 1 : 0), cold_slot = slot(encode ? 0 : 1);
    auto s = std::upper_bound(work.segments.begin(), work.segments.end(), tile,
                              [](uint32_t t, const Segment& segment) { return t < segment.first_tile; }) -
             1;
    for (; index < page_end; ++index, ++tile) {
      while (tile - s->first_tile >= s->tiles()) ++s;
      const uint32_t begin = (tile - s->first_tile) * s->units_per_tile;
      const Tile t{*s,
                   s->hot + hot_slot * s->hot_stride,
                   s->data + cold_slot * s->data_stride,
                   s->scales + cold_slot * s->scales_stride,
                   begin,
                   std::min(begin + s->units_per_tile, s->units)};
      if (s->kind == SegmentKind::kQuantize) encode ? encode_tile(t) : decode_tile(t);
      else copy_tile(t, encode);
      if (encode && s->padding_bytes > 0 && t.end == s->units)
        std::memset(s->padding + cold_slot * s->data_stride, 0, s->padding_bytes);
    }
  }
}

}  // namespace kvc::nvfp4
