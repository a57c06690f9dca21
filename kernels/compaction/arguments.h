// What the compaction ops were given, checked. Shared by the CPU and the CUDA ops.
#pragma once

#include <algorithm>
#include <optional>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "common/operands.h"

namespace kvc::compaction {

// int32 values somewhere in memory; strides in elements.
struct Vector {
  const int32_t* data = nullptr;
  int64_t stride = 1;
  int32_t operator[](int64_t i) const { return data[i * stride]; }
};
struct Table {
  const int32_t* data = nullptr;
  int64_t row = 0, column = 1;
  int32_t at(int64_t r, int64_t c) const { return data[r * row + c * column]; }
};
struct Planes {
  const int32_t* data = nullptr;
  int64_t plane = 0, head = 0, column = 1;
  int32_t at(int64_t p, int64_t h, int64_t c) const { return data[p * plane + h * head + c * column]; }
};

// How one layer's pool lies in memory; everything in bytes.
struct Geometry {
  int64_t page_stride = 0, plane_stride = 0, head_stride = 0, token_stride = 0;
  int64_t planes = 0, tokens_per_page = 0, row_bytes = 0;
  bool operator==(const Geometry& g) const {
    return page_stride == g.page_stride && plane_stride == g.plane_stride && head_stride == g.head_stride &&
           token_stride == g.token_stride && planes == g.planes && tokens_per_page == g.tokens_per_page &&
           row_bytes == g.row_bytes;
  }
};
struct Pool {
  uint8_t* base = nullptr;
  int64_t pages = 0;
  Geometry geometry;
};

struct Moves {
  std::vector<Pool> pools;
  int64_t heads = 0, requests = 0, max_pages = 0, total = 0, source_planes = 1;
  Table page_table;
  Planes sources, destinations;      // destinations.data == nullptr: bases count
  Vector offsets, bases, layer_map;  // layer_map.data == nullptr: all layers use plane 0

  // Token indices are int32, so a longer table names no more of them.
  int64_t tokens(const Geometry& g) const { return std::min<int64_t>(max_pages * g.tokens_per_page, INT32_MAX); }
  bool empty() const { return pools.empty() || heads == 0 || requests == 0 || max_pages == 0 || total == 0; }
};

inline Vector read_vector(const Context& ctx, const Tensor& tensor, const char* argument, int64_t size,
                          const char* meaning, const Home& home) {
  check_indices(ctx, tensor, argument, home);
  if (tensor.dim() != 1 || tensor.size(0) != size)
    ctx.value_error(argument, std::string("int32 [") + meaning + "] = [" + std::to_string(size) + "]",
                    Context::describe_shape(tensor));
  return {static_cast<const int32_t*>(tensor.data_ptr()), tensor.stride(0)};
}

inline Pool read_pool(const Context& ctx, const TensorList& pools, size_t index, const Facts& f, const Home& home,
                      int64_t* heads) {
  const auto argument = [&] { return indexed("pools", static_cast<int64_t>(index)); };
  const auto reject = [&](const char* expected) {
    ctx.value_error(argument(), expected, Context::describe_shape(pools.tensor(index)));
  };
  if (!home.has(f)) home.reject(ctx, pools.tensor(index), argument());
  if (f.dim != 5) reject("[pages, planes, heads, tokens_per_page, D]");
  const int64_t *const sizes = f.sizes, *const strides = f.strides;
  if (sizes[4] > 1 && strides[4] != 1) reject("contiguous in its last dimension");
  if (index == 0) *heads = sizes[2];
  if (sizes[2] != *heads) ctx.value_error(argument(), "of " + std::to_string(*heads) + " heads, as pools[0]", sizes[2]);
  const int64_t item = f.element_size();
  int64_t bytes[4];  // a dimension of one element has no say
  bool empty = sizes[4] == 0;
  for (int d = 0; d < 4; ++d) {
    bytes[d] = sizes[d] > 1 ? strides[d] * item : 0;
    empty = empty || sizes[d] == 0;
  }
  if (may_overlap(f.dim, sizes, strides)) reject("free of elements that share memory");
  if (sizes[1] * sizes[2] >= INT32_MAX) reject("fewer than 2^31 planes times heads");
  Pool p;
  p.base = static_cast<uint8_t*>(f.data);
  p.pages = empty ? 0 : std::min<int64_t>(sizes[0], INT32_MAX);
  p.geometry = {bytes[0],       bytes[1], bytes[2], bytes[3], sizes[1], std::min<int64_t>(sizes[3], INT32_MAX),
                sizes[4] * item};
  return p;
}

inline Planes read_planes(const Context& ctx, const Tensor& tensor, const char* argument, const Moves& moves,
                          bool per_layer, const Home& home) {
  check_indices(ctx, tensor, argument, home);
  const int64_t dim = tensor.dim();
  if (dim != (per_layer ? 3 : 2) || tensor.size(dim - 2) != moves.heads || tensor.size(dim - 1) > INT32_MAX)
    ctx.value_error(argument,
                    (per_layer ? "int32 [S, heads, total] beside layer_map, with "
                               : "int32 [heads, total] without layer_map, with ") +
                        std::to_string(moves.heads) + " heads",
                    Context::describe_shape(tensor));
  return {static_cast<const int32_t*>(tensor.data_ptr()), per_layer ? tensor.stride(0) : 0, tensor.stride(dim - 2),
          tensor.stride(dim - 1)};
}

inline Moves read_moves(const Context& ctx, const TensorList& pools, const Tensor& page_table, const Tensor& sources,
                        const Tensor& offsets, const Tensor& bases, const std::optional<Tensor>& layer_map,
                        const std::optional<Tensor>& destinations) {
  if (pools.empty()) ctx.value_error("pools", "at least one tensor", "none");
  const Home home(Facts{pools[0]});
  Moves moves;
  moves.pools =
      read_list<Pool>(pools, [&](const Facts& f, size_t i) { return read_pool(ctx, pools, i, f, home, &moves.heads); });
  check_indices(ctx, page_table, "page_table", home);
  ctx.shape(page_table.dim() == 2 && page_table.size(0) < INT32_MAX, "page_table", "int32 [requests, max_pages]",
            page_table);
  moves.requests = page_table.size(0);
  moves.max_pages = std::min<int64_t>(page_table.size(1), INT32_MAX);
  moves.page_table = {static_cast<const int32_t*>(page_table.data_ptr()), page_table.stride(0), page_table.stride(1)};
  moves.sources = read_planes(ctx, sources, "sources", moves, layer_map.has_value(), home);
  moves.total = sources.size(-1);
  moves.source_planes = layer_map ? sources.size(0) : 1;
  moves.offsets = read_vector(ctx, offsets, "offsets", moves.requests + 1, "requests + 1", home);
  moves.bases = read_vector(ctx, bases, "bases", moves.requests, "requests", home);
  if (layer_map)
    moves.layer_map = read_vector(ctx, *layer_map, "layer_map", static_cast<int64_t>(pools.size()), "layers", home);
  if (destinations) {
    moves.destinations = read_planes(ctx, *destinations, "destinations", moves, layer_map.has_value(), home);
    bool same = true;
    for (int64_t d = 0; d < sources.dim(); ++d) same = same && destinations->size(d) == sources.size(d);
    if (!same)
      ctx.value_error("destinations", "of the shape of sources, " + Context::describe_shape(sources),
                      Context::describe_shape(*destinations));
  }
  return moves;
}

// Columns [first, last) of request r that lie inside a buffer of `total` columns; none when the offsets decrease.
struct Columns {
  int64_t begin, first, last;
};
inline Columns columns_of(const Vector& offsets, int64_t r, int64_t total) {
  const int64_t begin = offsets[r];
  const int64_t first = std::max<int64_t>(begin, 0);
  return {begin, first, std::max(first, std::min<int64_t>(offsets[r + 1], total))};
}

// Debug mode, on host copies: cumulative offsets inside a buffer of `total` columns.
inline void check_offsets(const Context& ctx, const Vector& offsets, const char* name, int64_t requests,
                          int64_t total) {
  for (int64_t r = 0; r <= requests; ++r) {
    const int64_t low = r == 0 ? 0 : offsets[r - 1];
    if (offsets[r] < low || offsets[r] > total)
      ctx.value_error(indexed(name, r), "in [" + std::to_string(low) + ", " + std::to_string(total) + "]",
                      int64_t{offsets[r]});
  }
}

// Debug mode, with every pointer but those of the pools on the host.
inline void check_moves(const Context& ctx, const Moves& m) {
  check_offsets(ctx, m.offsets, "offsets", m.requests, m.total);
  const auto plane_of = [&](int64_t layer) -> int64_t { return m.layer_map.data ? m.layer_map[layer] : 0; };
  for (size_t l = 0; l < m.pools.size(); ++l)
    if (plane_of(static_cast<int64_t>(l)) < 0 || plane_of(static_cast<int64_t>(l)) >= m.source_planes)
      ctx.value_error(indexed("layer_map", static_cast<int64_t>(l)), "in [0, " + std::to_string(m.source_planes) + ")",
                      plane_of(static_cast<int64_t>(l)));
  const auto range = [](int64_t end) { return "in [0, " + std::to_string(end) + ")"; };
  for (size_t l = 0; l < m.pools.size(); ++l) {
    const int64_t layer = static_cast<int64_t>(l), plane = plane_of(layer);
    const Pool& pool = m.pools[l];
    const auto alike = [&](size_t k) {
      return plane_of(static_cast<int64_t>(k)) == plane && m.pools[k].pages == pool.pages &&
             m.pools[k].geometry.tokens_per_page == pool.geometry.tokens_per_page;
    };
    size_t earlier = 0;
    while (!alike(earlier)) ++earlier;
    if (earlier < l || pool.pages == 0) continue;
    const int64_t tokens = m.tokens(pool.geometry), slots = pool.geometry.tokens_per_page;
    struct Use {
      int64_t request;
      bool written;
    };
    std::unordered_map<int32_t, Use> uses;
    for (int64_t r = 0; r < m.requests; ++r) {
      const Columns c = columns_of(m.offsets, r, m.total);
      for (int64_t h = 0; h < m.heads; ++h) {
        int64_t previous = -1;
        std::vector<std::pair<int64_t, int64_t>> read, written;  // token, move
        for (int64_t column = c.first; column < c.last; ++column) {
          const int64_t i = column - c.begin;
          const auto where = [&](const char* name) {
            return std::string(name) + " (request " + std::to_string(r) + ", layer " + std::to_string(layer) +
                   ", head " + std::to_string(h) + ", index " + std::to_string(i) + ")";
          };
          const int64_t source = m.sources.at(plane, h, column);
          const int64_t to = m.destinations.data ? m.destinations.at(plane, h, column) : m.bases[r] + i;
          if (source == -1 || (m.destinations.data && to == -1)) continue;
          if (source < 0 || source >= tokens) ctx.value_error(where("sources"), range(tokens) + " or -1", source);
          if (m.destinations.data) {
            if (to < 0 || to >= tokens) ctx.value_error(where("destinations"), range(tokens) + " or -1", to);
            read.emplace_back(source, i);
            written.emplace_back(to, i);
          } else {
            if (source <= previous)
              ctx.value_error(where("sources"), "above the source before it, " + std::to_string(previous), source);
            if (source < to)
              ctx.value_error(where("sources"), "at or above its destination, " + std::to_string(to), source);
            if (to < 0)
              ctx.value_error(where("bases"), "such that the destination is in " + range(tokens).substr(3), to);
            previous = source;
          }
          for (const auto& [token, writes] : {std::pair{source, false}, std::pair{to, source != to}}) {
            const int32_t page = m.page_table.at(r, token / slots);
            if (page < 0 || page >= pool.pages)
              ctx.value_error(where("page_table") + " for token " + std::to_string(token), range(pool.pages),
                              int64_t{page});
            Use& use = uses.try_emplace(page, Use{r, writes}).first->second;
            if (use.request != r && (use.written || writes))
              ctx.value_error(where("page_table") + " for token " + std::to_string(token),
                              "a page of this request alone, as one of its tokens is written",
                              "page " + std::to_string(page) + " of request " + std::to_string(use.request));
            use.written = use.written || writes;
          }
        }
        std::sort(read.begin(), read.end());
        std::sort(written.begin(), written.end());
        const auto where = [&](int64_t i) {
          return "destinations (request " + std::to_string(r) + ", layer " + std::to_string(layer) + ", head " +
                 std::to_string(h) + ", index " + std::to_string(i) + ")";
        };
        for (size_t k = 0; k < written.size(); ++k) {
          const auto [token, i] = written[k];
          if (k > 0 && written[k - 1].first == token)
            ctx.value_error(where(i), "named once", "token " + std::to_string(token) + " again");
          const auto same = std::lower_bound(read.begin(), read.end(), std::pair{token, int64_t{-1}});
          if (same != read.end() && same->first == token)
            ctx.value_error(where(i), "no source of the same request", "token " + std::to_string(token));
        }
      }
    }
  }
}

// The packing ops. `rows` counts the rows of dense, or of sources and destinations; the side output is swa or
// tail_sources. All values are contiguous.
struct Packing {
  int64_t requests = 0, decision_rows = 0, kept_count = 0, window = 0;
  int64_t rows = 0, total = 0;
  int64_t side_rows = 0, side_total = 0;
  const int32_t *kept = nullptr, *valid_lengths = nullptr, *offsets = nullptr;
  const int32_t* side_offsets = nullptr;  // null: no side output
  const int32_t* bases = nullptr;         // of pack_fill_moves
  bool fill = false;                      // pack_fill_moves
  Sizes sizes, side_sizes;
  std::vector<Tensor> copies;  // of arguments that were not contiguous

  const int32_t* contiguous(const Tensor& tensor) {
    if (tensor.is_contiguous()) return static_cast<const int32_t*>(tensor.data_ptr());
    copies.push_back(torch::stable::contiguous(tensor));
    return static_cast<const int32_t*>(copies.back().data_ptr());
  }
  const int32_t* read(const Context& ctx, const Tensor& tensor, const char* argument, int64_t extra, const Home& home) {
    read_vector(ctx, tensor, argument, requests + extra, extra ? "requests + 1" : "requests", home);
    return contiguous(tensor);
  }
};

inline Packing read_packing(const Context& ctx, const Tensor& kept, const Tensor& valid_lengths, int64_t num_layers,
                            int64_t num_kv_heads, int64_t total, const char* total_name, int64_t side_total,
                            const char* side_total_name) {
  const auto at_least = [&](int64_t value, int64_t low, const char* argument) {
    if (value < low || value >= INT32_MAX)
      ctx.value_error(argument, "in [" + std::to_string(low) + ", 2^31 - 1)", value);
  };
  at_least(num_layers, 1, "num_layers");
  at_least(num_kv_heads, 1, "num_kv_heads");
  if (num_layers * num_kv_heads >= INT32_MAX)
    ctx.value_error("num_layers * num_kv_heads", "below 2^31 - 1", num_layers * num_kv_heads);
  at_least(total, 0, total_name);
  at_least(side_total, 0, side_total_name);
  const Home home(kept);
  check_indices(ctx, kept, "kept", home);
  const int64_t both = num_layers * num_kv_heads;
  if (kept.dim() != 3 || (kept.size(1) != 1 && kept.size(1) != num_kv_heads && kept.size(1) != both) ||
      kept.size(0) >= INT32_MAX || kept.size(2) >= INT32_MAX)
    ctx.value_error("kept",
                    "int32 [requests, decision_rows, K] with 1, " + std::to_string(num_kv_heads) + " or " +
                        std::to_string(both) + " decision rows",
                    Context::describe_shape(kept));
  Packing p;
  p.requests = kept.size(0);
  p.decision_rows = kept.size(1);
  p.kept_count = kept.size(2);
  const bool per_layer = num_layers > 1 && p.decision_rows == both;
  p.rows = per_layer ? both : num_kv_heads;
  p.total = total;
  p.side_rows = num_kv_heads;
  p.side_total = side_total;
  p.sizes = per_layer ? Sizes{num_layers, num_kv_heads, total} : Sizes{num_kv_heads, total};
  p.side_sizes = {num_kv_heads, side_total};
  p.kept = p.contiguous(kept);
  p.valid_lengths = p.read(ctx, valid_lengths, "valid_lengths", 0, home);
  return p;
}

inline Packing read_move_sources(const Context& ctx, const Tensor& kept, const Tensor& valid_lengths,
                                 const Tensor& dense_offsets, const std::optional<Tensor>& swa_offsets, int64_t window,
                                 int64_t num_layers, int64_t num_kv_heads, int64_t dense_total, int64_t swa_total) {
  Packing p = read_packing(ctx, kept, valid_lengths, num_layers, num_kv_heads, dense_total, "dense_total", swa_total,
                           "swa_total");
  if (window < 0 || window > INT32_MAX) ctx.value_error("window", "in [0, 2^31)", window);
  p.window = window;
  const Home home(kept);
  p.offsets = p.read(ctx, dense_offsets, "dense_offsets", 1, home);
  if (!swa_offsets && swa_total != 0) ctx.value_error("swa_total", "0 without swa_offsets", swa_total);
  if (swa_offsets) p.side_offsets = p.read(ctx, *swa_offsets, "swa_offsets", 1, home);
  return p;
}

inline Packing read_fill_moves(const Context& ctx, const Tensor& kept, const Tensor& valid_lengths, const Tensor& bases,
                               const Tensor& fill_offsets, const Tensor& tail_offsets, int64_t num_layers,
                               int64_t num_kv_heads, int64_t fill_total, int64_t tail_total) {
  Packing p = read_packing(ctx, kept, valid_lengths, num_layers, num_kv_heads, fill_total, "fill_total", tail_total,
                           "tail_total");
  const Home home(kept);
  p.fill = true;
  p.bases = p.read(ctx, bases, "bases", 0, home);
  p.offsets = p.read(ctx, fill_offsets, "fill_offsets", 1, home);
  p.side_offsets = p.read(ctx, tail_offsets, "tail_offsets", 1, home);
  return p;
}

// Outputs must not share memory with each other, within themselves, or with the decision they are computed from.
inline void check_apart(const Context& ctx, const Tensor& kept,
                        std::initializer_list<std::pair<const char*, Tensor>> outputs) {
  for (auto out = outputs.begin(); out != outputs.end(); ++out) {
    if (may_overlap(out->second))
      ctx.value_error(out->first, "free of elements that share memory", Context::describe_shape(out->second));
    if (may_alias(out->second, kept)) ctx.value_error(out->first, "apart from kept", "memory that kept lies in");
    for (auto other = outputs.begin(); other != out; ++other)
      if (may_alias(out->second, other->second))
        ctx.value_error(out->first, std::string("apart from ") + other->first, "memory that it lies in");
  }
}

// The packing ops of a device, but for what does the work: `run(packing, first, second, side)` fills the outputs, of
// which pack_move_sources has no second.
template <typename Run>
std::tuple<Tensor, Tensor> move_sources(const Tensor& kept, const Packing& p, Run&& run) {
  Tensor dense = new_output(kept, p.sizes), swa = new_output(kept, p.side_sizes);
  const auto data = [](const Tensor& t) { return static_cast<int32_t*>(t.data_ptr()); };
  run(p, data(dense), nullptr, data(swa));
  return {dense, swa};
}

template <typename Run>
void move_sources_out(const Context& ctx, const Tensor& kept, const Packing& p, const Tensor& dense, const Tensor& swa,
                      Run&& run) {
  check_output(ctx, dense, "dense", p.sizes, Home(kept));
  check_output(ctx, swa, "swa", p.side_sizes, Home(kept));
  check_apart(ctx, kept, {{"dense", dense}, {"swa", swa}});
  Output outputs[2] = {{dense, p.sizes}, {swa, p.side_sizes}};
  run(p, outputs[0].data(), nullptr, outputs[1].data());
  for (Output& output : outputs) output.finish();
}

template <typename Run>
std::tuple<Tensor, Tensor, Tensor> fill_moves(const Tensor& kept, const Packing& p, Run&& run) {
  Tensor sources = new_output(kept, p.sizes), destinations = new_output(kept, p.sizes),
         tail = new_output(kept, p.side_sizes);
  const auto data = [](const Tensor& t) { return static_cast<int32_t*>(t.data_ptr()); };
  run(p, data(sources), data(destinations), data(tail));
  return {sources, destinations, tail};
}

template <typename Run>
void fill_moves_out(const Context& ctx, const Tensor& kept, const Packing& p, const Tensor& sources,
                    const Tensor& destinations, const Tensor& tail_sources, Run&& run) {
  check_output(ctx, sources, "sources", p.sizes, Home(kept));
  check_output(ctx, destinations, "destinations", p.sizes, Home(kept));
  check_output(ctx, tail_sources, "tail_sources", p.side_sizes, Home(kept));
  check_apart(ctx, kept, {{"sources", sources}, {"destinations", destinations}, {"tail_sources", tail_sources}});
  Output outputs[3] = {{sources, p.sizes}, {destinations, p.sizes}, {tail_sources, p.side_sizes}};
  run(p, outputs[0].data(), outputs[1].data(), outputs[2].data());
  for (Output& output : outputs) output.finish();
}

// Debug mode, with every value on the host: offsets, lengths and ordinals.
inline void check_packing(const Context& ctx, const Packing& v) {
  const char* offsets = v.fill ? "fill_offsets" : "dense_offsets";
  const char* side_offsets = v.fill ? "tail_offsets" : "swa_offsets";
  check_offsets(ctx, {v.offsets, 1}, offsets, v.requests, v.total);
  if (v.side_offsets) check_offsets(ctx, {v.side_offsets, 1}, side_offsets, v.requests, v.side_total);
  for (int64_t r = 0; r < v.requests; ++r) {
    const int64_t length = v.valid_lengths[r], moves = v.offsets[r + 1] - v.offsets[r];
    if (length < 0) ctx.value_error(indexed("valid_lengths", r), "at least 0", length);
    if (v.fill && v.bases[r] < 0) ctx.value_error(indexed("bases", r), "at least 0", int64_t{v.bases[r]});
    const int64_t end = v.fill ? v.bases[r] + v.kept_count : 0;
    if (v.fill ? length <= end : moves == 0) continue;
    if (!v.fill && v.side_offsets && v.side_offsets[r + 1] > v.side_offsets[r] && length < v.window)
      ctx.value_error(indexed("valid_lengths", r), "at least the window, " + std::to_string(v.window), length);
    for (int64_t row = 0; row < v.decision_rows; ++row) {
      const int32_t* kept = v.kept + (r * v.decision_rows + row) * v.kept_count;
      int64_t previous = -1, movers = 0;
      bool ended = false;
      for (int64_t k = 0; k < (v.fill ? v.kept_count : std::min(moves, v.kept_count)); ++k) {
        const auto where = [&] {
          return "kept (request " + std::to_string(r) + ", row " + std::to_string(row) + ", index " +
                 std::to_string(k) + ")";
        };
        const int64_t token = kept[k];
        if (token == -1) {
          ended = true;
          continue;
        }
        if (token < 0 || token >= length)
          ctx.value_error(where(), "in [0, " + std::to_string(length) + ") or -1", token);
        if (ended) ctx.value_error(where(), "-1 behind a -1", token);
        if (token <= previous)
          ctx.value_error(where(), "above the ordinal before it, " + std::to_string(previous), token);
        previous = token;
        movers += token >= end;
      }
      if (v.fill && movers > moves)
        ctx.value_error(
            indexed(offsets, r + 1),
            "at least " + std::to_string(v.offsets[r] + movers) + " for the moves of row " + std::to_string(row),
            int64_t{v.offsets[r + 1]});
    }
  }
}

}  // namespace kvc::compaction
