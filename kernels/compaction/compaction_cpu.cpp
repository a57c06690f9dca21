// CPU implementation of the compaction ops, over all of PyTorch's threads.

#include <cstring>

#include "common/boxing.h"
#include "compaction/arguments.h"

namespace kvc::compaction {
namespace {

// Columns of an output row that one task fills.
constexpr int64_t kStripe = 1 << 15;

// Every row of an output in stripes: `request(row, r, columns, out)` fills the columns of r that lie in the stripe, the
// rest holds -1. Requests go in order, so that a later one wins where malformed offsets overlap.
template <typename Request>
void fill_rows(int64_t rows, int64_t total, const int32_t* offsets, int64_t requests, int32_t* out, Request&& request) {
  const int64_t stripes = (total + kStripe - 1) / kStripe;
  torch::stable::parallel_for(0, rows * stripes, 1, [&](int64_t first, int64_t last) {
    for (int64_t task = first; task < last; ++task) {
      const int64_t row = task / stripes, low = task % stripes * kStripe, high = std::min(low + kStripe, total);
      std::fill(out + row * total + low, out + row * total + high, -1);
      for (int64_t r = 0; r < requests; ++r) {
        Columns c = columns_of({offsets, 1}, r, high);
        c.first = std::max(c.first, low);
        if (c.first < c.last) request(row, r, c, out + row * total);
      }
    }
  });
}

// int32 arithmetic that wraps, as on the GPU.
int32_t token(int64_t value) { return static_cast<int32_t>(static_cast<uint32_t>(value)); }

void pack_rows(const Packing& p, int32_t* dense, int32_t* swa) {
  fill_rows(p.rows, p.total, p.offsets, p.requests, dense, [&](int64_t row, int64_t r, Columns c, int32_t* out) {
    const int32_t* kept = p.kept + (r * p.decision_rows + (p.decision_rows > 1 ? row : 0)) * p.kept_count;
    int64_t column = c.first;
    for (; column < std::min(c.last, c.begin + p.kept_count); ++column) out[column] = kept[column - c.begin];
    for (; column < c.last; ++column) out[column] = token(p.valid_lengths[r] + column - c.begin - p.kept_count);
  });
  if (!p.side_offsets) return;
  fill_rows(p.side_rows, p.side_total, p.side_offsets, p.requests, swa,
            [&](int64_t, int64_t r, Columns c, int32_t* out) {
              for (int64_t column = c.first; column < c.last; ++column)
                out[column] = token(p.valid_lengths[r] - p.window + column - c.begin);
            });
}

// The plan of one request and row: the j-th kept token past the range goes to the j-th hole in it.
void plan_fill(const Packing& p, int64_t row, int64_t r, const Columns& c, int32_t* sources, int32_t* destinations) {
  const int64_t base = p.bases[r], end = base + p.kept_count;
  if (p.valid_lengths[r] <= end) return;
  const int32_t* kept = p.kept + (r * p.decision_rows + (p.decision_rows > 1 ? row : 0)) * p.kept_count;
  int64_t stay = 0;  // walks the kept tokens inside the range, beside `hole`
  while (stay < p.kept_count && kept[stay] < base) ++stay;
  int64_t hole = base, move = 0;
  for (int64_t k = stay; k < p.kept_count; ++k) {
    if (kept[k] < end) continue;
    for (; stay < k && kept[stay] == hole; ++stay) ++hole;
    const int64_t column = c.begin + move++;
    if (column >= c.last) return;
    if (column >= c.first) {
      sources[column] = kept[k];
      destinations[column] = token(hole);
    }
    ++hole;
  }
}

void pack_fills(const Packing& p, int32_t* sources, int32_t* destinations, int32_t* tail) {
  // `sources` is filled last and fills both, so that its stripes find the destinations cleared.
  fill_rows(p.rows, p.total, p.offsets, p.requests, destinations, [](int64_t, int64_t, Columns, int32_t*) {});
  fill_rows(p.rows, p.total, p.offsets, p.requests, sources, [&](int64_t row, int64_t r, Columns c, int32_t* out) {
    int32_t* to = destinations + row * p.total;
    std::fill(out + c.first, out + c.last, -1);
    std::fill(to + c.first, to + c.last, -1);
    plan_fill(p, row, r, c, out, to);
  });
  fill_rows(p.side_rows, p.side_total, p.side_offsets, p.requests, tail,
            [&](int64_t, int64_t r, Columns c, int32_t* out) {
              const bool moves = p.valid_lengths[r] > p.bases[r] + p.kept_count;
              for (int64_t column = c.first; column < c.last; ++column)
                out[column] = moves ? token(p.valid_lengths[r] + column - c.begin) : -1;
            });
}

void pack(const Context& ctx, const Packing& p, int32_t* first, int32_t* second, int32_t* side) {
  if (debug_mode) check_packing(ctx, p);
  p.fill ? pack_fills(p, first, second, side) : pack_rows(p, first, side);
}

std::tuple<Tensor, Tensor> pack_move_sources(Tensor kept, Tensor valid_lengths, Tensor dense_offsets,
                                             std::optional<Tensor> swa_offsets, int64_t window, int64_t num_layers,
                                             int64_t num_kv_heads, int64_t dense_total, int64_t swa_total) {
  const Context ctx{"pack_move_sources"};
  ctx.cpu(kept, "kept");
  return move_sources(kept,
                      read_move_sources(ctx, kept, valid_lengths, dense_offsets, swa_offsets, window, num_layers,
                                        num_kv_heads, dense_total, swa_total),
                      [&](auto&&... arguments) { pack(ctx, arguments...); });
}

void pack_move_sources_out(Tensor kept, Tensor valid_lengths, Tensor dense_offsets, std::optional<Tensor> swa_offsets,
                           int64_t window, int64_t num_layers, int64_t num_kv_heads, int64_t dense_total,
                           int64_t swa_total, Tensor dense, Tensor swa) {
  const Context ctx{"pack_move_sources"};
  ctx.cpu(kept, "kept");
  move_sources_out(ctx, kept,
                   read_move_sources(ctx, kept, valid_lengths, dense_offsets, swa_offsets, window, num_layers,
                                     num_kv_heads, dense_total, swa_total),
                   dense, swa, [&](auto&&... arguments) { pack(ctx, arguments...); });
}

std::tuple<Tensor, Tensor, Tensor> pack_fill_moves(Tensor kept, Tensor valid_lengths, Tensor bases, Tensor fill_offsets,
                                                   Tensor tail_offsets, int64_t num_layers, int64_t num_kv_heads,
                                                   int64_t fill_total, int64_t tail_total) {
  const Context ctx{"pack_fill_moves"};
  ctx.cpu(kept, "kept");
  return fill_moves(kept,
                    read_fill_moves(ctx, kept, valid_lengths, bases, fill_offsets, tail_offsets, num_layers,
                                    num_kv_heads, fill_total, tail_total),
                    [&](auto&&... arguments) { pack(ctx, arguments...); });
}

void pack_fill_moves_out(Tensor kept, Tensor valid_lengths, Tensor bases, Tensor fill_offsets, Tensor tail_offsets,
                         int64_t num_layers, int64_t num_kv_heads, int64_t fill_total, int64_t tail_total,
                         Tensor sources, Tensor destinations, Tensor tail_sources) {
  const Context ctx{"pack_fill_moves"};
  ctx.cpu(kept, "kept");
  fill_moves_out(ctx, kept,
                 read_fill_moves(ctx, kept, valid_lengths, bases, fill_offsets, tail_offsets, num_layers, num_kv_heads,
                                 fill_total, tail_total),
                 sources, destinations, tail_sources, [&](auto&&... arguments) { pack(ctx, arguments...); });
}

// The moves of one layer, head and request in ascending order. base + i <= source_i and sources that increase mean
// base + i < source_j for every j > i: no move overwrites a source that is still to be read.
void move_tokens(const Moves& m, const Pool& pool, int64_t plane, int64_t head, int64_t r) {
  const Geometry& g = pool.geometry;
  const int64_t tokens = m.tokens(g);
  const Columns c = columns_of(m.offsets, r, m.total);
  const auto place = [&](int64_t token) -> uint8_t* {
    if (token < 0 || token >= tokens) return nullptr;
    const int64_t page = m.page_table.at(r, token / g.tokens_per_page);
    if (page < 0 || page >= pool.pages) return nullptr;
    return pool.base + page * g.page_stride + token % g.tokens_per_page * g.token_stride + head * g.head_stride;
  };
  for (int64_t column = c.first; column < c.last; ++column) {
    const int64_t source = m.sources.at(plane, head, column);
    const int64_t to = m.destinations.data ? m.destinations.at(plane, head, column) : m.bases[r] + column - c.begin;
    if (source == to) continue;
    const uint8_t* read = place(source);
    uint8_t* write = place(to);
    if (!read || !write) continue;
    for (int64_t i = 0; i < g.planes; ++i)
      std::memmove(write + i * g.plane_stride, read + i * g.plane_stride, static_cast<size_t>(g.row_bytes));
  }
}

void compact(const Moves& m) {
  if (m.empty()) return;
  const int64_t lists = m.heads * m.requests;
  torch::stable::parallel_for(0, lists * static_cast<int64_t>(m.pools.size()), 1, [&](int64_t first, int64_t last) {
    for (int64_t list = first; list < last; ++list) {
      const int64_t layer = list / lists, r = list % lists / m.heads, head = list % m.heads;
      const int64_t plane = m.layer_map.data ? m.layer_map[layer] : 0;
      const Pool& pool = m.pools[static_cast<size_t>(layer)];
      if (plane >= 0 && plane < m.source_planes && pool.pages > 0) move_tokens(m, pool, plane, head, r);
    }
  });
}

void compact_pages_(const TensorList& pools, const Tensor& page_table, const Tensor& sources, const Tensor& offsets,
                    const Tensor& bases, const std::optional<Tensor>& layer_map,
                    const std::optional<Tensor>& destinations) {
  const Context ctx{"compact_pages_"};
  if (!pools.empty()) ctx.cpu(pools.tensor(0), "pools[0]");
  const Moves m = read_moves(ctx, pools, page_table, sources, offsets, bases, layer_map, destinations);
  if (debug_mode) check_moves(ctx, m);
  compact(m);
}

}  // namespace
}  // namespace kvc::compaction

STABLE_TORCH_LIBRARY_IMPL(KVC_NAMESPACE, CPU, m) {
  m.impl("pack_move_sources", kvc::boxed<&kvc::compaction::pack_move_sources>);
  m.impl("pack_move_sources.out", kvc::boxed<&kvc::compaction::pack_move_sources_out>);
  m.impl("pack_fill_moves", kvc::boxed<&kvc::compaction::pack_fill_moves>);
  m.impl("pack_fill_moves.out", kvc::boxed<&kvc::compaction::pack_fill_moves_out>);
  m.impl("compact_pages_", kvc::boxed<&kvc::compaction::compact_pages_>);
}
