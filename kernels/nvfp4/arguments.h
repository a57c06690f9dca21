// What the nvfp4 ops were given, checked and turned into segments. Shared by the CPU and the CUDA op.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "common/operands.h"
#include "kvc/pages.h"
#include "nvfp4/launch.h"

namespace kvc::nvfp4 {

constexpr int64_t kTableColumns = 12;  // see PageLayout.table in ops/nvfp4.py
constexpr int64_t kMaxBuffers = int64_t{1} << 20;

inline ScalarType scalar_type(DType dtype) {
  constexpr ScalarType types[] = {ScalarType::Half, ScalarType::BFloat16, ScalarType::Float, ScalarType::Float8_e4m3fn};
  return types[static_cast<int>(dtype)];
}

inline DType element_dtype(const Context& ctx, ScalarType type, const char* argument) {
  for (const DType d : {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kFloat8E4M3})
    if (scalar_type(d) == type) return d;
  ctx.type_error(argument, "torch.float16, bfloat16, float32 or float8_e4m3fn", Context::name(type));
}

inline float checked_global_scale(const Context& ctx, double scale) {
  const float rounded = static_cast<float>(scale);
  if (!(rounded >= kMinGlobalScale && rounded <= kMaxGlobalScale))
    ctx.value_error("global_scale", "in [2^-100, 2^100]", scale);
  return rounded;
}

inline std::vector<BufferSpec> read_table(const Context& ctx, const Tensor& table, const Tensor& scales) {
  ctx.cpu(table, "table");
  ctx.cpu(scales, "scales");
  ctx.dtype(table, ScalarType::Long, "table");
  ctx.dtype(scales, ScalarType::Float, "scales");
  ctx.shape(table.dim() == 2 && table.size(1) == kTableColumns && table.size(0) > 0 && table.size(0) < kMaxBuffers,
            "table", "PageLayout.table, int64 [buffers, 12]", table);
  ctx.shape(scales.dim() == 1 && scales.size(0) == table.size(0), "scales", "PageLayout.scales, float32 [buffers]",
            scales);
  const auto* values = static_cast<const int64_t*>(table.data_ptr());
  const auto* global = static_cast<const float*>(scales.data_ptr());
  const int64_t row_stride = table.stride(0), column_stride = table.stride(1), scale_stride = scales.stride(0);
  std::vector<BufferSpec> buffers(static_cast<size_t>(table.size(0)));
  for (size_t i = 0; i < buffers.size(); ++i) {
    const auto at = [&](int64_t c) { return values[static_cast<int64_t>(i) * row_stride + c * column_stride]; };
    BufferSpec& b = buffers[i];
    b.layer = at(0);
    b.pool = at(1);
    b.offset = at(2);
    b.transform = static_cast<Transform>(at(3));
    const int64_t dtype = at(4);
    b.dtype = static_cast<DType>(dtype >= 0 && dtype <= 3 ? dtype : 255);
    b.rows = at(5);
    b.row_elements = at(6);
    b.quantized_start = at(7);
    b.quantized_elements = at(8);
    b.residual_start = at(10) ? at(9) : at(7);
    b.residual_elements = at(10);
    b.nbytes = at(11);
    b.global_scale = global[static_cast<int64_t>(i) * scale_stride];
    const std::string wrong = check(b);
    const auto where = [i] { return "table (buffer " + std::to_string(i) + ")"; };
    if (!wrong.empty()) {
      const size_t comma = wrong.rfind(", got ");
      ctx.value_error(where(), wrong.substr(0, comma), wrong.substr(comma + 6));
    }
    if (i > 0 && buffers[i - 1].layer > b.layer) ctx.value_error(where(), "in ascending layer order", b.layer);
  }
  return buffers;
}

struct Pool {
  uint8_t* base = nullptr;
  int64_t slots = 0;
  int64_t slot_bytes = 0;
  int64_t slot_stride = 0;  // bytes
  ScalarType dtype = ScalarType::Byte;
};

// Whether the dims after the first occupy one gap-free run of memory, in any order.
inline bool is_dense_slot(int64_t dim, const int64_t* sizes, const int64_t* strides) {
  int64_t expected = 1;
  bool in_order = true;
  for (int64_t i = dim - 1; i > 0 && in_order; --i) {
    in_order = sizes[i] == 1 || strides[i] == expected;
    expected *= sizes[i];
  }
  if (in_order) return true;
  std::vector<std::pair<int64_t, int64_t>> dims;
  for (int64_t i = 1; i < dim; ++i)
    if (sizes[i] != 1) dims.emplace_back(strides[i], sizes[i]);
  std::sort(dims.begin(), dims.end());
  expected = 1;
  for (const auto& [stride, size] : dims) {
    if (stride != expected) return false;
    expected *= size;
  }
  return true;
}

inline Pool read_pool(const Context& ctx, const TensorList& pools, size_t index, const Facts& f, const Home& home) {
  const auto argument = [&] { return indexed("pools", static_cast<int64_t>(index)); };
  const auto shape = [&] { return Context::describe_shape(pools.tensor(index)); };
  if (!home.has(f)) {
    const Tensor tensor = pools.tensor(index);
    if (home.cpu) ctx.cpu(tensor, argument());
    if (!tensor.is_cuda()) ctx.type_error(argument(), "a CUDA tensor", Context::describe_device(tensor));
    home.reject(ctx, tensor, argument());
  }
  if (f.dim < 1) ctx.value_error(argument(), "at least 1-D with dim 0 = slot", "a 0-D tensor");
  Pool p{static_cast<uint8_t*>(f.data), f.sizes[0], 0, 0, f.scalar_type()};
  const int64_t item = f.element_size();
  p.slot_bytes = item;
  for (int64_t i = 1; i < f.dim; ++i) p.slot_bytes *= f.sizes[i];
  p.slot_stride = f.strides[0] * item;
  if (p.slot_bytes > 0 && !is_dense_slot(f.dim, f.sizes, f.strides))
    ctx.value_error(argument(), "contiguous within a slot", shape());
  if (p.slots > 1 && p.slot_stride < p.slot_bytes) ctx.value_error(argument(), "slots that do not overlap", shape());
  return p;
}

// Host pairs: all slots in range and no destination twice.
inline void check_pairs(const Context& ctx, const PageWork& work, bool encode) {
  if (work.pages == 0) return;
  const int64_t limits[2] = {encode ? work.cold_slots : work.hot_slots, encode ? work.hot_slots : work.cold_slots};
  constexpr const char* names[2] = {"destination", "source"};
  static thread_local std::vector<bool> seen;  // stays all false between calls
  static thread_local std::vector<int32_t> marked;
  marked.clear();
  if (static_cast<int64_t>(seen.size()) < limits[0]) seen.resize(static_cast<size_t>(limits[0]));
  const auto at = [&](int64_t i, int c) { return work.pairs[i * work.pair_stride[0] + c * work.pair_stride[1]]; };
  int64_t repeated = -1;
  std::string range_error;
  int bad_value = 0;
  for (int64_t i = 0; i < work.pages; ++i) {
    const int32_t pair[2] = {at(i, 0), at(i, 1)};  // read once: another thread may be writing what it should not
    for (int c = 0; c < 2 && range_error.empty(); ++c)
      if (pair[c] < 0 || pair[c] >= limits[c]) {
        bad_value = pair[c];
        range_error = std::string("a ") + names[c] + " slot in [0, " + std::to_string(limits[c]) + ")";
      }
    if (!range_error.empty()) break;
    if (seen[static_cast<size_t>(pair[0])]) {
      repeated = pair[0];
      break;
    }
    seen[static_cast<size_t>(pair[0])] = true;
    marked.push_back(pair[0]);
  }
  for (const int32_t slot : marked) seen[static_cast<size_t>(slot)] = false;
  if (range_error.empty() && repeated < 0) return;
  const std::string where = "pairs[" + std::to_string(marked.size()) + "]";
  if (!range_error.empty()) ctx.value_error(where, range_error, int64_t{bad_value});
  if (repeated >= 0) ctx.value_error(where, "a destination named once", "slot " + std::to_string(repeated) + " again");
}

// What a table says, worked out.
struct Layout {
  std::vector<int64_t> table;
  std::vector<float> scales;
  std::vector<BufferSpec> buffers;
  PagePlan plan;
};

// Engines hand over the same table call after call: each thread keeps the last one worked out.
inline const Layout& read_layout(const Context& ctx, const Tensor& table, const Tensor& scales) {
  static thread_local Layout last;
  const auto matches = [](const Tensor& tensor, const auto& known) {
    return !known.empty() && tensor.is_cpu() && tensor.is_contiguous() &&
           tensor.numel() == static_cast<int64_t>(known.size()) &&
           std::memcmp(tensor.data_ptr(), known.data(), known.size() * sizeof(known[0])) == 0;
  };
  if (table.dim() == 2 && table.size(1) == kTableColumns && table.scalar_type() == ScalarType::Long &&
      scales.dim() == 1 && scales.scalar_type() == ScalarType::Float && matches(table, last.table) &&
      matches(scales, last.scales))
    return last;
  Layout layout;
  layout.buffers = read_table(ctx, table, scales);
  int64_t chunks = 0;
  for (const BufferSpec& b : layout.buffers)
    if ((chunks += b.hot_bytes() / 16) >= kMaxGroups)
      ctx.value_error("table", "a hot page below 2^35 bytes", chunks * 16);
  layout.plan = plan_pages(layout.buffers);
  if (table.is_contiguous() && scales.is_contiguous()) {
    const auto* t = static_cast<const int64_t*>(table.data_ptr());
    const auto* g = static_cast<const float*>(scales.data_ptr());
    layout.table.assign(t, t + table.numel());
    layout.scales.assign(g, g + scales.numel());
  }
  last = std::move(layout);
  return last;
}

// What a buffer asks of its pool.
inline void check_pool(const Context& ctx, const BufferSpec& b, const Pool& pool) {
  const auto argument = [&] { return "pools[" + std::to_string(b.pool) + "]"; };
  if (pool.slots > 0 && b.offset + b.hot_bytes() > pool.slot_bytes)
    ctx.value_error(argument(), "at least " + std::to_string(b.offset + b.hot_bytes()) + " bytes a slot",
                    pool.slot_bytes);
  if (b.transform != Transform::kNvfp4) return;
  if (is_float(pool.dtype) && pool.dtype != scalar_type(b.dtype))
    ctx.type_error(argument(), Context::name(scalar_type(b.dtype)) + ", its buffer's dtype, or an integer dtype",
                   Context::name(pool.dtype));
  if (reinterpret_cast<uintptr_t>(pool.base) % 16 != 0)
    ctx.value_error(argument(), "16-byte aligned", "address " + std::to_string(reinterpret_cast<uintptr_t>(pool.base)));
  if (pool.slots > 1 && pool.slot_stride % 16 != 0)
    ctx.value_error(argument(), "a slot stride that is a multiple of 16 bytes", pool.slot_stride);
}

// Checks everything but what depends on where `cold` lives; `cold_base` is its address as the pools' device sees it.
inline PageWork read_pages(const Context& ctx, const Tensor& cold, uint8_t* cold_base, const TensorList& pools,
                           const Home& home, const Tensor& pairs, const Tensor& table, const Tensor& scales,
                           int64_t max_ctas, bool encode) {
  if (max_ctas < 0) ctx.value_error("max_ctas", ">= 0", max_ctas);
  ctx.dtype(cold, ScalarType::Byte, "cold");
  ctx.shape(cold.dim() == 2 && (cold.size(1) <= 1 || cold.stride(1) == 1), "cold",
            "uint8 [slots, cold_page_bytes] with contiguous rows", cold);
  ctx.dtype(pairs, ScalarType::Int, "pairs");
  ctx.shape(pairs.dim() == 2 && pairs.size(1) == 2, "pairs", "int32 [n, 2]", pairs);

  const Layout& layout = read_layout(ctx, table, scales);
  if (cold.size(1) != layout.plan.cold_page_bytes)
    ctx.value_error("cold", std::to_string(layout.plan.cold_page_bytes) + " bytes a row, as the table says",
                    cold.size(1));
  const int64_t cold_stride = cold.stride(0);
  PageWork work;
  work.cold_slots = cold.size(0);
  if (work.cold_slots > 1 && cold_stride < layout.plan.cold_page_bytes)
    ctx.value_error("cold", "rows that do not overlap", Context::describe_shape(cold));

  const std::vector<Pool> hot =
      read_list<Pool>(pools, [&](const Facts& f, size_t i) { return read_pool(ctx, pools, i, f, home); });
  work.hot_slots = INT64_MAX;
  for (size_t i = 0; i < layout.buffers.size(); ++i) {
    const BufferSpec& b = layout.buffers[i];
    if (b.pool >= static_cast<int64_t>(hot.size()))
      ctx.value_error("table (buffer " + std::to_string(i) + ")", "a pool index below " + std::to_string(hot.size()),
                      b.pool);
    const Pool& pool = hot[static_cast<size_t>(b.pool)];
    check_pool(ctx, b, pool);
    work.hot_slots = std::min(work.hot_slots, pool.slots);
  }
  work.segments = placed_segments(layout.plan, cold_base, cold_stride,
                                  [&hot](int64_t pool) -> const Pool& { return hot[static_cast<size_t>(pool)]; });
  work.pages = pairs.size(0);
  work.pairs = static_cast<const int32_t*>(pairs.data_ptr());
  work.pair_stride[0] = pairs.stride(0);
  work.pair_stride[1] = pairs.stride(1);
  if (pairs.is_cpu()) check_pairs(ctx, work, encode);
  return work;
}

// Rows of a strided tensor as `outer` runs of `inner` rows; false when two strides cannot express them.
struct Rows {
  int64_t outer = 1, outer_stride = 0;  // strides in elements
  int64_t inner = 1, inner_stride = 0;
};

inline bool collapse_rows(const Tensor& x, Rows* rows) {
  std::vector<std::pair<int64_t, int64_t>> dims;  // size, stride; outermost first
  for (int64_t i = 0; i + 1 < x.dim(); ++i) {
    if (x.size(i) == 1) continue;
    if (!dims.empty() && dims.back().second == x.stride(i) * x.size(i))
      dims.back() = {dims.back().first * x.size(i), x.stride(i)};
    else dims.emplace_back(x.size(i), x.stride(i));
  }
  if (dims.size() > 2) return false;
  if (!dims.empty()) std::tie(rows->inner, rows->inner_stride) = dims.back();
  if (dims.size() == 2) std::tie(rows->outer, rows->outer_stride) = dims.front();
  return true;
}

inline Tensor contiguous_copy(const Tensor& x) {
  Tensor out = torch::stable::new_empty(x, x.sizes());
  return torch::stable::copy_(out, x);
}

// x, or a copy whose rows the segments can express. `alignment` is in bytes.
inline Tensor expressible_rows(const Tensor& x, int64_t alignment, Rows* rows) {
  const int64_t item = static_cast<int64_t>(x.element_size());
  if (collapse_rows(x, rows) && reinterpret_cast<uintptr_t>(x.data_ptr()) % alignment == 0 &&
      rows->inner_stride * item % alignment == 0 && rows->outer_stride * item % alignment == 0)
    return x;
  Tensor copy = contiguous_copy(x);
  *rows = {};
  collapse_rows(copy, rows);
  return copy;
}

inline void check_range(const Context& ctx, const BufferSpec& b, const char* row, const char* range) {
  const auto multiple = [&](int64_t value, const char* argument) {
    if (value % kGroupSize != 0) ctx.value_error(argument, "a multiple of 16", value);
  };
  multiple(b.row_elements, row);
  multiple(b.quantized_start, "quantized_range_start");
  multiple(b.quantized_elements, range);
  multiple(b.residual_elements, "residual_elements");
  if (b.quantized_start < 0 || b.quantized_start >= b.row_elements)
    ctx.value_error("quantized_range_start", "in [0, " + std::to_string(b.row_elements) + ")", b.quantized_start);
  if (b.quantized_elements <= 0 || b.quantized_elements > b.row_elements - b.quantized_start)
    ctx.value_error(range, "in [16, " + std::to_string(b.row_elements - b.quantized_start) + "] or -1",
                    b.quantized_elements);
  if (b.residual_elements < 0 || b.residual_elements > b.quantized_elements)
    ctx.value_error("residual_elements", "in [0, " + std::to_string(b.quantized_elements) + "]", b.residual_elements);
  if (b.residual_elements == 0) return;
  multiple(b.residual_start, "residual_start");
  if (b.residual_start < b.quantized_start ||
      b.residual_start > b.quantized_start + b.quantized_elements - b.residual_elements)
    ctx.value_error("residual_start", "such that the residual range lies inside the quantized range", b.residual_start);
}

inline std::vector<int64_t> with_last(const Tensor& like, int64_t last) {
  std::vector<int64_t> sizes(like.sizes().begin(), like.sizes().end());
  sizes.back() = last;
  return sizes;
}

// The single "page" of a row op: outer runs are its slots.
inline PageWork row_work(const Context& ctx, BufferSpec b, const Rows& rows, uint8_t* hot, uint8_t* data,
                         uint8_t* scales, uint8_t* lossless) {
  const int64_t item = itemsize(b.dtype);
  b.rows = rows.inner;
  if (b.rows > max_rows(b)) ctx.value_error("rows", "at most " + std::to_string(max_rows(b)), b.rows);
  PageWork work;
  append_segments(b, hot, rows.outer_stride * item, rows.inner_stride * item,
                  {data, b.data_bytes(), scales, b.scale_bytes(), lossless, b.lossless_bytes()}, &work.segments);
  work.pages = rows.outer;
  work.hot_slots = work.cold_slots = rows.outer;
  return work;
}

struct Quantized {
  Tensor data, scales, lossless;
};

// `run(work)` executes; `alignment` is what it needs of hot addresses.
template <typename Run>
Quantized quantize_rows(const Context& ctx, const Tensor& x, double global_scale, int64_t start, int64_t elements,
                        int64_t residual_start, int64_t residual_elements, int64_t alignment, Run&& run) {
  BufferSpec b;
  b.dtype = element_dtype(ctx, x.scalar_type(), "x");
  if (x.dim() < 1) ctx.value_error("x", "at least 1-D", "a 0-D tensor");
  b.row_elements = x.size(-1);
  ctx.shape(b.row_elements <= 1 || x.stride(-1) == 1, "x", "contiguous in its last dimension", x);
  b.quantized_start = start;
  b.quantized_elements = elements == -1 ? b.row_elements - start : elements;
  b.residual_start = residual_elements == 0 ? start : residual_start;
  b.residual_elements = residual_elements;
  check_range(ctx, b, "x (its last dimension)", "quantized_range_elements");
  b.global_scale = checked_global_scale(ctx, global_scale);
  Quantized out{
      new_output(x, with_last(x, b.slots_per_row() * kGroupBytes), ScalarType::Byte),
      new_output(x, with_last(x, b.slots_per_row()), ScalarType::Byte),
      new_output(x, with_last(x, b.row_elements - b.quantized_elements), x.scalar_type()),
  };
  if (x.numel() == 0) return out;
  Rows rows;
  const Tensor hot = expressible_rows(x, alignment, &rows);
  const auto bytes = [](const Tensor& t) { return static_cast<uint8_t*>(t.data_ptr()); };
  run(row_work(ctx, b, rows, bytes(hot), bytes(out.data), bytes(out.scales), bytes(out.lossless)));
  return out;
}

template <typename Run>
Tensor dequantize_rows(const Context& ctx, const Tensor& data, const Tensor& scales, const Tensor& lossless,
                       ScalarType dtype, double global_scale, int64_t start, int64_t residual_start,
                       int64_t residual_elements, Run&& run) {
  BufferSpec b;
  b.dtype = element_dtype(ctx, dtype, "dtype");
  ctx.dtype(data, ScalarType::Byte, "data");
  ctx.dtype(scales, ScalarType::Byte, "scales");
  ctx.dtype(lossless, dtype, "lossless");
  const Tensor* parts[3] = {&data, &scales, &lossless};
  constexpr const char* names[3] = {"data", "scales", "lossless"};
  for (int i = 0; i < 3; ++i) {
    if (parts[i]->is_cuda() != data.is_cuda() || parts[i]->get_device_index() != data.get_device_index())
      ctx.type_error(names[i], "on " + Context::describe_device(data), Context::describe_device(*parts[i]));
    bool same = parts[i]->dim() == data.dim() && data.dim() >= 1;
    for (int64_t d = 0; same && d + 1 < data.dim(); ++d) same = parts[i]->size(d) == data.size(d);
    ctx.shape(same, names[i], "at least 1-D with the leading dimensions of data", *parts[i]);
    ctx.shape(parts[i]->size(-1) <= 1 || parts[i]->stride(-1) == 1, names[i], "contiguous in its last dimension",
              *parts[i]);
  }
  ctx.shape(data.size(-1) % kGroupBytes == 0 && data.size(-1) > 0, "data", "[..., (Q + P) / 2]", data);
  ctx.shape(scales.size(-1) * kGroupBytes == data.size(-1), "scales", "[..., (Q + P) / 16]", scales);
  if (residual_elements < 0 || residual_elements > data.size(-1))
    ctx.value_error("residual_elements", "in [0, " + std::to_string(data.size(-1)) + "], half of what data holds",
                    residual_elements);
  b.residual_elements = residual_elements;
  b.quantized_start = start;
  b.quantized_elements = data.size(-1) * 2 - residual_elements;
  b.row_elements = b.quantized_elements + lossless.size(-1);
  b.residual_start = residual_elements == 0 ? start : residual_start;
  check_range(ctx, b, "the row of data and lossless", "data (its last dimension, in elements)");
  b.global_scale = checked_global_scale(ctx, global_scale);
  Tensor out = new_output(data, with_last(data, b.row_elements), dtype);
  if (out.numel() == 0) return out;
  const auto contiguous = [](const Tensor& t) { return t.is_contiguous() ? t : torch::stable::contiguous(t); };
  const Tensor cold[3] = {contiguous(data), contiguous(scales), contiguous(lossless)};
  const auto bytes = [](const Tensor& t) { return static_cast<uint8_t*>(t.data_ptr()); };
  Rows rows;
  collapse_rows(out, &rows);
  run(row_work(ctx, b, rows, bytes(out), bytes(cold[0]), bytes(cold[1]), bytes(cold[2])));
  return out;
}

}  // namespace kvc::nvfp4
