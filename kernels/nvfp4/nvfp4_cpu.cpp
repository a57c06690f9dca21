// CPU implementation of the nvfp4 ops: the tiles of kvc/pages.h, spread over PyTorch's threads.

#include <cstring>
#include <tuple>

#include "common/module.h"
#include "kvc/pages.h"
#include "nvfp4/arguments.h"

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

template <typename T>
KVC_HOST_DEVICE T load(const uint8_t* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

template <DType kType>
KVC_HOST_DEVICE void load_group(const uint8_t* from, float (&x)[kGroupSize]) {
  using E = Element<kType>;
  typename E::Bits bits[kGroupSize];
  std::memcpy(bits, from, sizeof bits);
  for (int i = 0; i < kGroupSize; ++i) x[i] = E::to_float(bits[i]);
}

KVC_HOST_DEVICE void store_group(const Group& group, uint8_t* data, uint8_t* scale) {
  std::memcpy(data, &group.data, sizeof group.data);
  *scale = static_cast<uint8_t>(group.scale);
}

template <DType kType>
KVC_HOST_DEVICE void encode_groups(const Tile& t) {
  constexpr uint32_t kBytes = kGroupSize * itemsize(kType);
  const Segment& s = t.segment;
  uint32_t slot = slots_before(s, t.begin);
  for (uint32_t g = t.begin; g < t.end; ++g) {
    float x[kGroupSize];
    load_group<kType>(t.hot + hot_offset(s, g, kBytes), x);
    const uint32_t column = g - s.units_per_row.divide(g) * s.units_per_row.divisor;
    if (is_residual(s, column)) {
      const ResidualGroup r = encode_residual_group(x, s.global);
      store_group(r.main, t.data + int64_t{slot} * kGroupBytes, t.scales + slot);
      store_group(r.residual, t.data + int64_t{slot + 1} * kGroupBytes, t.scales + slot + 1);
      slot += 2;
    } else {
      store_group(encode_group(x, s.global), t.data + int64_t{slot} * kGroupBytes, t.scales + slot);
      slot += 1;
    }
  }
}

template <DType kType>
KVC_HOST_DEVICE void decode_groups(const Tile& t) {
  using E = Element<kType>;
  constexpr uint32_t kBytes = kGroupSize * itemsize(kType);
  const Segment& s = t.segment;
  uint32_t slot = slots_before(s, t.begin);
  for (uint32_t g = t.begin; g < t.end; ++g) {
    const uint32_t column = g - s.units_per_row.divide(g) * s.units_per_row.divisor;
    const uint64_t main = load<uint64_t>(t.data + int64_t{slot} * kGroupBytes);
    const uint32_t scale_code = t.scales[slot];
    const float scale = decode_scale(scale_code);
    bool nan = is_nan_scale(scale_code);
    typename E::Bits out[kGroupSize];
    // Unpacked in steps of their own so that each loop of sixteen vectorises.
    uint8_t codes[kGroupSize];
    for (int i = 0; i < 8; ++i) {
      const uint8_t byte = static_cast<uint8_t>(main >> (8 * i));
      codes[2 * i] = byte & 15u;
      codes[2 * i + 1] = byte >> 4;
    }
    if (is_residual(s, column)) {
      const uint64_t residual = load<uint64_t>(t.data + int64_t{slot + 1} * kGroupBytes);
      const uint32_t residual_code = t.scales[slot + 1];
      const float residual_scale = decode_scale(residual_code);
      nan = nan || is_nan_scale(residual_code);
      for (int i = 0; i < kGroupSize; ++i) {
        const uint32_t q = static_cast<uint32_t>(residual >> (4 * i)) & 15u;
        out[i] = E::from_float(decode_residual_element(codes[i], scale, q, residual_scale, s.global.decode));
      }
      slot += 2;
    } else {
      for (int i = 0; i < kGroupSize; ++i) out[i] = E::from_float(decode_element(codes[i], scale, s.global.decode));
      slot += 1;
    }
    if (nan)
      for (auto& bits : out) bits = E::kNaN;
    std::memcpy(t.hot + hot_offset(s, g, kBytes), out, sizeof out);
  }
}

KVC_TARGET_CLONES void encode_tile(const Tile& t) {
  switch (t.segment.dtype) {
    case DType::kFloat16: return encode_groups<DType::kFloat16>(t);
    case DType::kBFloat16: return encode_groups<DType::kBFloat16>(t);
    case DType::kFloat32: return encode_groups<DType::kFloat32>(t);
    case DType::kFloat8E4M3: return encode_groups<DType::kFloat8E4M3>(t);
  }
}

KVC_TARGET_CLONES void decode_tile(const Tile& t) {
  switch (t.segment.dtype) {
    case DType::kFloat16: return decode_groups<DType::kFloat16>(t);
    case DType::kBFloat16: return decode_groups<DType::kBFloat16>(t);
    case DType::kFloat32: return decode_groups<DType::kFloat32>(t);
    case DType::kFloat8E4M3: return decode_groups<DType::kFloat8E4M3>(t);
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

void run(PageWork work, bool encode) {
  const int64_t tiles_per_page = number_tiles(&work.segments);
  const int64_t total = work.pages * tiles_per_page;
  torch::stable::parallel_for(0, total, 4, [&](int64_t first, int64_t last) {
    for (int64_t index = first; index < last;) {
      const int64_t page = index / tiles_per_page;
      const int64_t page_end = std::min(last, (page + 1) * tiles_per_page);
      auto tile = static_cast<uint32_t>(index - page * tiles_per_page);
      const auto slot = [&](int column) -> int64_t {
        return work.pairs ? work.pairs[page * work.pair_stride[0] + column * work.pair_stride[1]] : page;
      };
      const int64_t hot_slot = slot(encode ? 1 : 0), cold_slot = slot(encode ? 0 : 1);
      auto s = std::upper_bound(work.segments.begin(), work.segments.end(), tile,
                                [](uint32_t t, const Segment& segment) { return t < segment.first_tile; }) - 1;
      for (; index < page_end; ++index, ++tile) {
        while (tile - s->first_tile >= s->tiles()) ++s;
        const uint32_t begin = (tile - s->first_tile) * s->units_per_tile;
        const Tile t{*s, s->hot + hot_slot * s->hot_stride, s->data + cold_slot * s->data_stride,
                     s->scales + cold_slot * s->scales_stride, begin, std::min(begin + s->units_per_tile, s->units)};
        if (s->kind == SegmentKind::kQuantize)
          encode ? encode_tile(t) : decode_tile(t);
        else
          copy_tile(t, encode);
        if (encode && s->padding_bytes > 0 && t.end == s->units)
          std::memset(s->padding + cold_slot * s->data_stride, 0, s->padding_bytes);
      }
    }
  });
}

std::tuple<Tensor, Tensor, Tensor> nvfp4_quantize(Tensor x, double global_scale, int64_t quantized_range_start,
                                                  int64_t quantized_range_elements, int64_t residual_start,
                                                  int64_t residual_elements) {
  const Quantized q = quantize_rows(Context{"nvfp4_quantize"}, x, global_scale, quantized_range_start, quantized_range_elements,
                                    residual_start, residual_elements, 1, [](PageWork work) { run(std::move(work), true); });
  return {q.data, q.scales, q.lossless};
}

Tensor nvfp4_dequantize(Tensor data, Tensor scales, Tensor lossless, ScalarType dtype, double global_scale,
                        int64_t quantized_range_start, int64_t residual_start, int64_t residual_elements) {
  return dequantize_rows(Context{"nvfp4_dequantize"}, data, scales, lossless, dtype, global_scale, quantized_range_start,
                         residual_start, residual_elements, [](PageWork work) { run(std::move(work), false); });
}

void move_pages(const Context& ctx, const Tensor& cold, const std::vector<Tensor>& pools, const Tensor& pairs,
                const Tensor& table, const Tensor& scales, int64_t max_ctas, bool encode) {
  if (pools.empty()) ctx.value_error("pools", "at least one tensor", "none");
  ctx.cpu(cold, "cold");
  for (size_t i = 0; i < pools.size(); ++i)
    if (!pools[i].is_cpu()) ctx.cpu(pools[i], "pools[" + std::to_string(i) + "]");
  ctx.cpu(pairs, "pairs");
  run(read_pages(ctx, cold, static_cast<uint8_t*>(cold.data_ptr()), pools, pairs, table, scales, max_ctas, encode), encode);
}

void encode_pages_(const Tensor& cold, const std::vector<Tensor>& pools, const Tensor& pairs, const Tensor& table,
                   const Tensor& scales, int64_t max_ctas) {
  move_pages(Context{"encode_pages_"}, cold, pools, pairs, table, scales, max_ctas, true);
}

void decode_pages_(const std::vector<Tensor>& pools, const Tensor& cold, const Tensor& pairs, const Tensor& table,
                   const Tensor& scales, int64_t max_ctas) {
  move_pages(Context{"decode_pages_"}, cold, pools, pairs, table, scales, max_ctas, false);
}

}  // namespace
}  // namespace kvc::nvfp4

STABLE_TORCH_LIBRARY_IMPL(KVC_NAMESPACE, CPU, m) {
  m.impl("nvfp4_quantize", TORCH_BOX(&kvc::nvfp4::nvfp4_quantize));
  m.impl("nvfp4_dequantize", TORCH_BOX(&kvc::nvfp4::nvfp4_dequantize));
  m.impl("encode_pages_", TORCH_BOX(&kvc::nvfp4::encode_pages_));
  m.impl("decode_pages_", TORCH_BOX(&kvc::nvfp4::decode_pages_));
}
