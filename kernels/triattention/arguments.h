// What the TriAttention ops were given, checked. Shared by the CPU and the CUDA ops.
#pragma once

#include <algorithm>
#include <array>
#include <cstdlib>
#include <tuple>
#include <vector>

#include "common/operands.h"

namespace kvc::triattention {

enum class Mode { kUnion, kPerHead, kPerLayerPerHead };

// One layer's keys; strides in elements.
struct Pool {
  const void* base = nullptr;
  int64_t pages = 0, page_stride = 0, head_stride = 0, token_stride = 0;
};

// Where a result lies; strides in elements.
struct Rows {
  float* data = nullptr;
  int64_t request = 0, row = 0, column = 1;
};

struct PhaseArguments {
  int64_t requests = 0, bands = 0, offset_count = 0;
  const void* positions = nullptr;
  bool wide_positions = false;  // int64, not int32
  const float* omega = nullptr;
  const int64_t* offsets = nullptr;
  std::vector<Tensor> copies;  // of arguments that were not contiguous
};

struct Scoring {
  std::vector<Pool> pools;
  ScalarType key_dtype = ScalarType::Float;
  Mode mode = Mode::kUnion;
  bool normalize = true;
  int64_t requests = 0, kv_heads = 0, q_heads = 0, bands = 0, tokens_per_page = 0, max_pages = 0, width = 0;
  const int32_t* page_table = nullptr;
  int64_t page_table_stride = 0;  // between requests; a request's entries are contiguous
  const int32_t *prompt_lengths = nullptr, *source_lengths = nullptr;
  const float *mean_cos = nullptr, *mean_sin = nullptr, *freq_scale_sq = nullptr;
  const float *q_mean_real = nullptr, *q_mean_imag = nullptr, *q_norm_excess = nullptr;
  std::vector<Tensor> copies;  // of arguments that were not contiguous

  int64_t layers() const { return static_cast<int64_t>(pools.size()); }
  int64_t group() const { return q_heads / kv_heads; }
  int64_t rows() const { return mode == Mode::kUnion ? 1 : mode == Mode::kPerHead ? kv_heads : layers() * kv_heads; }
  // Rows of raw scores a request has: groups can be reduced at once where nothing has to be normalised first.
  int64_t score_rows() const { return layers() * (normalize ? q_heads : kv_heads); }
  // Tokens that a page table can name; their indices are int32.
  int64_t tokens() const { return std::min<int64_t>(max_pages * tokens_per_page, INT32_MAX); }
  Sizes sizes() const { return {requests, rows(), width}; }
  bool empty() const { return requests == 0 || width == 0; }
};

// The tokens of request r that can have a score: [first, last), the first `stored` of which have a column.
struct Range {
  int64_t prompt, first, last, stored;
};
inline Range range_of(const Scoring& s, int64_t prompt, int64_t source) {
  const int64_t first = std::max<int64_t>(prompt, 0), last = std::max(first, std::min(source, s.tokens()));
  return {prompt, first, last, std::max<int64_t>(std::min(last, prompt + s.width) - first, 0)};
}

// Checks tensors against a device and against sizes that have names.
class Reader {
 public:
  Reader(const Context& ctx, const Home& home, std::vector<Tensor>& copies) : ctx_(ctx), home_(home), copies_(copies) {}

  Facts kind(const Tensor& tensor, const char* argument, ScalarType dtype) const {
    const Facts f(tensor);
    if (!home_.has(f)) home_.reject(ctx_, tensor, argument);
    if (!f.is(dtype)) ctx_.dtype(tensor, dtype, argument);
    return f;
  }
  Facts check(const Tensor& tensor, const char* argument, ScalarType dtype, const char* names,
              std::initializer_list<int64_t> sizes) const {
    const Facts f = kind(tensor, argument, dtype);
    if (std::equal(sizes.begin(), sizes.end(), f.sizes, f.sizes + f.dim)) return f;
    std::string text;
    for (const int64_t size : sizes) text += (text.empty() ? "[" : ", ") + std::to_string(size);
    ctx_.value_error(argument, Context::name(dtype) + " " + names + " = " + text + "]",
                     Context::describe_shape(tensor));
  }
  template <typename T>
  const T* contiguous(const Tensor& tensor, const Facts& f) {
    if (f.contiguous()) return static_cast<const T*>(f.data);
    copies_.push_back(torch::stable::contiguous(tensor));
    return static_cast<const T*>(copies_.back().data_ptr());
  }
  template <typename T>
  const T* read(const Tensor& tensor, const char* argument, ScalarType dtype, const char* names,
                std::initializer_list<int64_t> sizes) {
    return contiguous<T>(tensor, check(tensor, argument, dtype, names, sizes));
  }
  const float* floats(const Tensor& tensor, const char* argument, const char* names,
                      std::initializer_list<int64_t> sizes) {
    return read<float>(tensor, argument, ScalarType::Float, names, sizes);
  }
  const int32_t* ints(const Tensor& tensor, const char* argument, const char* names,
                      std::initializer_list<int64_t> sizes) {
    return read<int32_t>(tensor, argument, ScalarType::Int, names, sizes);
  }

 private:
  const Context& ctx_;
  const Home home_;
  std::vector<Tensor>& copies_;
};

// An output given by the caller: any strides, but memory of its own.
inline Rows rows_of(const Tensor& out) {
  const int64_t last = out.dim() - 1;
  return {static_cast<float*>(out.data_ptr()), out.stride(0), last == 2 ? out.stride(1) : 0, out.stride(last)};
}
inline Rows read_output(const Context& ctx, const Tensor& out, const char* argument,
                        std::initializer_list<std::pair<const char*, Tensor>> others) {
  if (may_overlap(out)) ctx.value_error(argument, "free of elements that share memory", Context::describe_shape(out));
  for (const auto& [name, other] : others)
    if (may_alias(out, other)) ctx.value_error(argument, std::string("apart from ") + name, "memory that it lies in");
  return rows_of(out);
}

inline PhaseArguments read_phase(const Context& ctx, const Tensor& positions, const Tensor& omega,
                                 const Tensor& offsets) {
  PhaseArguments p;
  Reader reader(ctx, Home(positions), p.copies);
  const ScalarType dtype = positions.scalar_type();
  if (dtype != ScalarType::Int && dtype != ScalarType::Long)
    ctx.type_error("positions", "torch.int32 or torch.int64", Context::name(dtype));
  ctx.shape(positions.dim() == 1 && positions.size(0) < INT32_MAX, "positions", "[requests]", positions);
  ctx.shape(omega.dim() == 1 && omega.size(0) < INT32_MAX, "omega", "[F]", omega);
  ctx.shape(offsets.dim() == 1 && offsets.size(0) > 0 && offsets.size(0) < INT32_MAX, "offsets",
            "one offset or more, [O]", offsets);
  p.requests = positions.size(0);
  p.bands = omega.size(0);
  p.offset_count = offsets.size(0);
  p.wide_positions = dtype == ScalarType::Long;
  p.positions = reader.contiguous<void>(positions, Facts(positions));
  p.omega = reader.floats(omega, "omega", "[F]", {p.bands});
  p.offsets = reader.read<int64_t>(offsets, "offsets", ScalarType::Long, "[O]", {p.offset_count});
  return p;
}

inline std::pair<Rows, Rows> read_phase_outputs(const Context& ctx, const PhaseArguments& p, const Tensor& positions,
                                                const Tensor& omega, const Tensor& offsets, const Tensor& cos,
                                                const Tensor& sin) {
  std::vector<Tensor> none;
  const Reader reader(ctx, Home(positions), none);
  reader.check(cos, "cos", ScalarType::Float, "[requests, F]", {p.requests, p.bands});
  reader.check(sin, "sin", ScalarType::Float, "[requests, F]", {p.requests, p.bands});
  const Rows cosine = read_output(ctx, cos, "cos", {{"positions", positions}, {"omega", omega}, {"offsets", offsets}});
  const Rows sine =
      read_output(ctx, sin, "sin", {{"positions", positions}, {"omega", omega}, {"offsets", offsets}, {"cos", cos}});
  return {cosine, sine};
}

inline Mode read_mode(const Context& ctx, const std::string& mode) {
  if (mode == "union") return Mode::kUnion;
  if (mode == "per_head") return Mode::kPerHead;
  if (mode == "per_layer_perhead") return Mode::kPerLayerPerHead;
  ctx.value_error("mode", "union, per_head or per_layer_perhead", mode);
}

inline bool is_key_dtype(ScalarType type) {
  return type == ScalarType::BFloat16 || type == ScalarType::Half || type == ScalarType::Float ||
         type == ScalarType::Float8_e4m3fn;
}

inline Scoring read_scoring(const Context& ctx, const TensorList& key_pools, const Tensor& page_table,
                            const Tensor& prompt_lengths, const Tensor& source_lengths, const Tensor& mean_cos,
                            const Tensor& mean_sin, const Tensor& q_mean_real, const Tensor& q_mean_imag,
                            const Tensor& q_norm_excess, const Tensor& freq_scale_sq, const std::string& mode,
                            bool normalize, int64_t width) {
  if (key_pools.empty()) ctx.value_error("key_pools", "at least one tensor", "none");
  const Facts like(key_pools[0]);
  const Home home(like);
  Scoring s;
  Reader reader(ctx, home, s.copies);
  s.mode = read_mode(ctx, mode);
  s.normalize = normalize || s.mode == Mode::kUnion;
  if (width < 0 || width > INT32_MAX) ctx.value_error("width", "in [0, 2^31)", width);
  s.width = width;
  s.key_dtype = like.scalar_type();
  int64_t head_dim = 0;
  s.pools = read_list<Pool>(key_pools, [&](const Facts& f, size_t l) -> Pool {
    const auto argument = [l] { return indexed("key_pools", static_cast<int64_t>(l)); };
    const auto reject = [&](const std::string& expected) {
      ctx.value_error(argument(), expected, Context::describe_shape(key_pools.tensor(l)));
    };
    if (!home.has(f)) home.reject(ctx, key_pools.tensor(l), argument());
    const ScalarType dtype = f.scalar_type();
    if (l == 0 && !is_key_dtype(dtype))
      ctx.type_error(argument(), "torch.bfloat16, torch.float16, torch.float32 or torch.float8_e4m3fn",
                     Context::name(dtype));
    if (dtype != s.key_dtype)
      ctx.type_error(argument(), Context::name(s.key_dtype) + ", as key_pools[0]", Context::name(dtype));
    if (f.dim != 4) reject("[pages, kv_heads, tokens_per_page, D]");
    const int64_t *const sizes = f.sizes, *const strides = f.strides;
    if (l == 0) {
      s.kv_heads = sizes[1];
      s.tokens_per_page = sizes[2];
      head_dim = sizes[3];
      if (s.kv_heads < 1 || s.kv_heads > INT32_MAX) reject("of one KV head or more");
      if (s.tokens_per_page < 1 || s.tokens_per_page > INT32_MAX) reject("of one token a page or more");
      if (head_dim < 2 || head_dim > 256 || head_dim % 2 != 0) reject("of an even D from 2 to 256");
    }
    if (sizes[1] != s.kv_heads || sizes[2] != s.tokens_per_page || sizes[3] != head_dim)
      reject("[pages, " + std::to_string(s.kv_heads) + ", " + std::to_string(s.tokens_per_page) + ", " +
             std::to_string(head_dim) + "], as key_pools[0]");
    if (strides[3] != 1) reject("contiguous in its last dimension");
    return {f.data, std::min<int64_t>(sizes[0], INT32_MAX), strides[0], strides[1], strides[2]};
  });
  s.bands = head_dim / 2;

  const Facts table = reader.kind(page_table, "page_table", ScalarType::Int);
  ctx.shape(table.dim == 2 && table.sizes[0] < INT32_MAX, "page_table", "int32 [requests, max_pages]", page_table);
  s.requests = table.sizes[0];
  s.max_pages = std::min<int64_t>(table.sizes[1], INT32_MAX);
  if (table.strides[1] == 1 || s.max_pages <= 1) {
    s.page_table = static_cast<const int32_t*>(table.data);
    s.page_table_stride = table.strides[0];
  } else {
    s.page_table = reader.contiguous<int32_t>(page_table, table);
    s.page_table_stride = s.max_pages;
  }
  s.prompt_lengths = reader.ints(prompt_lengths, "prompt_lengths", "[requests]", {s.requests});
  s.source_lengths = reader.ints(source_lengths, "source_lengths", "[requests]", {s.requests});
  s.mean_cos = reader.floats(mean_cos, "mean_cos", "[requests, F]", {s.requests, s.bands});
  s.mean_sin = reader.floats(mean_sin, "mean_sin", "[requests, F]", {s.requests, s.bands});
  const Facts queries(q_mean_real);
  if (queries.dim != 3 || queries.sizes[1] < 1 || queries.sizes[1] % s.kv_heads != 0 ||
      queries.sizes[1] > INT32_MAX / s.layers())
    ctx.value_error("q_mean_real",
                    "fp32 [layers, q_heads, F] with a multiple of " + std::to_string(s.kv_heads) + " heads",
                    Context::describe_shape(q_mean_real));
  s.q_heads = queries.sizes[1];
  const std::initializer_list<int64_t> statistics = {s.layers(), s.q_heads, s.bands};
  s.q_mean_real = reader.floats(q_mean_real, "q_mean_real", "[layers, q_heads, F]", statistics);
  s.q_mean_imag = reader.floats(q_mean_imag, "q_mean_imag", "[layers, q_heads, F]", statistics);
  s.q_norm_excess = reader.floats(q_norm_excess, "q_norm_excess", "[layers, q_heads, F]", statistics);
  s.freq_scale_sq = reader.floats(freq_scale_sq, "freq_scale_sq", "[F]", {s.bands});
  return s;
}

// The result is written while arguments are still read.
inline Rows read_score_output(const Context& ctx, const Scoring& s, const TensorList& key_pools,
                              std::initializer_list<std::pair<const char*, Tensor>> others, const Tensor& out) {
  std::vector<Tensor> none;
  const Reader reader(ctx, Home(Facts{key_pools[0]}), none);
  reader.check(out, "out", ScalarType::Float, "[requests, rows, width]", {s.requests, s.rows(), s.width});
  for (size_t l = 0; l < key_pools.size(); ++l)
    if (may_alias(out, key_pools.tensor(l))) ctx.value_error("out", "apart from key_pools", "memory that they lie in");
  return read_output(ctx, out, "out", others);
}

// Debug mode, with lengths and page table on the host: every token to score lies on a page of every pool.
inline void check_scoring(const Context& ctx, const Scoring& s) {
  int64_t pages = s.pools[0].pages;
  for (const Pool& pool : s.pools) pages = std::min(pages, pool.pages);
  for (int64_t r = 0; r < s.requests; ++r) {
    const int64_t prompt = s.prompt_lengths[r], source = s.source_lengths[r];
    if (prompt < 0) ctx.value_error(indexed("prompt_lengths", r), "at least 0", prompt);
    if (prompt >= source) continue;
    if (source > s.tokens())
      ctx.value_error(indexed("source_lengths", r), "at most " + std::to_string(s.tokens()) + ", what the table names",
                      source);
    for (int64_t c = prompt / s.tokens_per_page; c <= (source - 1) / s.tokens_per_page; ++c) {
      const int64_t page = s.page_table[r * s.page_table_stride + c];
      if (page < 0 || page >= pages)
        ctx.value_error("page_table[" + std::to_string(r) + ", " + std::to_string(c) + "]",
                        "in [0, " + std::to_string(pages) + ")", page);
    }
  }
}

}  // namespace kvc::triattention
