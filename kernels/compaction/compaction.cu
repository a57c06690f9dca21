// In-place compaction of paged pools: one launch moves the tokens of up to kMaxLayers layers of one geometry.
//
// The unit of order is a list: the moves of one layer, request, plane, head and slice of the row. Lists write disjoint
// bytes (bytes of different layers, planes, heads and slices are different bytes; requests do not share a page that
// one of them writes), so a list belongs to one warp and warps never wait for each other. Within a list the warp walks
// tiles of kUnits * 32 vectors, in the order of the moves, through a ring of kStages tiles in shared memory: while tile
// t is stored, the loads of tiles t + 1 ... t + kStages - 1 are in flight.
//
// Why no store can hit a source that is still to be read. Let move i bring token s(i) to token d(i) = base + i, with
// s(i) < s(i + 1) and d(i) <= s(i), and let i belong to tile t (a row may be cut by a tile border; the argument holds
// for each of its vectors alone, since vectors of different columns never share bytes).
//  1. Moves behind i: for j > i, d(i) = base + i < base + j = d(j) <= s(j). So the store of i misses the source of
//     every later move, read or not. In particular it misses the tiles t + 1, t + 2, ... whose loads are in flight,
//     and it does not matter how far ahead they run.
//  2. Moves up to i: d(i) = s(j) is possible for j <= i only. Such a j lies in tile t or in an earlier one, and every
//     load of those tiles, by any lane, is complete before any lane stores tile t: each lane waits for its own
//     asynchronous copies of tile t (they complete in order) and __syncwarp() makes that mutual.
//  3. Nothing is read after it was written: by 1 and 2 a source is the destination of earlier moves never, and of
//     later ones (or itself) only after it was read.
// Page tables change nothing: within a request, tokens and their bytes correspond one to one as long as no page is
// listed twice. Skipped moves (-1, out of range, token already in place) only take reads and writes away from a
// sequence for which 1 to 3 hold. With `destinations` no destination is a source, so any order will do, and pieces of
// kFreeMoves moves go to different warps.

#include "common/async.cuh"
#include "common/boxing.h"
#include "common/cuda.h"
#include "compaction/arguments.h"

namespace kvc::compaction {
namespace {

constexpr uint32_t kWarp = 32;
constexpr uint32_t kAll = 0xffffffffu;
constexpr uint32_t kWarpsPerBlock = 2;
constexpr uint32_t kThreads = kWarpsPerBlock * kWarp;
constexpr int kMinBlocks = 6;        // per multiprocessor, as far as registers go; shared memory allows as many
constexpr int kUnits = 8;            // vectors of a tile per lane
constexpr int kStages = 4;           // tiles in the ring
constexpr uint32_t kFreeMoves = 64;  // moves of a piece when the order is free
constexpr uint32_t kScan = 8;        // 32-move chunks looked at together when skipping tokens that stay
constexpr int kMaxLayers = 240;      // parameters stay below 4 KiB
constexpr int64_t kMinSlice = 128;   // bytes of a row a warp takes at least when rows are cut
constexpr int64_t kWaves = 8;        // grid limit, in blocks per resident block: balance against idle blocks

struct LayerPool {
  uint8_t* base;
  int32_t pages;
  int32_t layer;
};

struct Parameters {
  Table page_table;
  Planes sources, destinations;
  Vector offsets, bases, layer_map;
  int64_t page_stride, plane_stride, head_stride, token_stride;
  int32_t requests, source_planes, total, tokens;
  uint32_t tokens_per_page, layers, heads, vectors, slice_vectors, slices;
  uint32_t lists;  // of one layer and request: planes * heads * slices
  LayerPool pools[kMaxLayers];
};
static_assert(sizeof(Parameters) <= 4096);

__device__ __forceinline__ int32_t value(const int32_t* data, int64_t offset) { return __ldg(data + offset); }

template <int kVector>
struct VectorType;
template <>
struct VectorType<16> {
  using type = uint4;
};
template <>
struct VectorType<8> {
  using type = uint2;
};
template <>
struct VectorType<4> {
  using type = uint32_t;
};
template <>
struct VectorType<2> {
  using type = uint16_t;
};
template <>
struct VectorType<1> {
  using type = uint8_t;
};

// The place of one vector among those of 32 rows, counted row by row; steps are of 32 vectors.
struct Place {
  uint32_t row, column;
  __device__ __forceinline__ void advance(uint32_t vectors, uint32_t step) {
    row += step >> 16;
    column += step & 0xffffu;
    if (column >= vectors) {
      column -= vectors;
      ++row;
    }
  }
};
// Rows and columns of a step of 32, in one register. Rows of more than 32 vectors advance by columns alone.
__device__ __forceinline__ uint32_t step_of(uint32_t vectors) {
  return vectors > kWarp ? kWarp : (kWarp / vectors) << 16 | kWarp % vectors;
}

// The moves that fall to a warp, 32 at a time.
template <int kVector>
class Walk {
 public:
  uint64_t source = 0, destination = 0;  // this lane's row; 0: nothing to move
  uint32_t vectors = 1, step = 0;        // of the rows

  __device__ Walk(const Parameters& p, uint32_t lane, uint64_t warp, uint64_t warps) : p_(p), lane_(lane) {
    load_window(0);
    pieces_ = window_pieces_;
    while (window_ + kWarp < static_cast<uint32_t>(p.requests)) {
      load_window(window_ + kWarp);
      pieces_ += window_pieces_;
    }
    if (pieces_ == 0) {
      layer_ = p.layers;
      return;
    }
    if (window_ > 0) load_window(0);
    // Items are numbered with the list fastest and the layer slowest, so that warps at work together stay near each
    // other in memory. The number is kept in these three digits, which spares a division per item.
    list_ = static_cast<uint32_t>(warp % p.lists);
    piece_ = warp / p.lists % pieces_;
    layer_ = warp / p.lists / pieces_;
    step_list_ = static_cast<uint32_t>(warps % p.lists);
    step_piece_ = warps / p.lists % pieces_;
    step_layer_ = warps / p.lists / pieces_;
  }

  // The next chunk of 32 moves of which at least one moves something; false at the end.
  __device__ bool next() {
    for (;;) {
      while (column_ >= end_)
        if (!next_item()) return false;
      const int64_t from = ahead_source_;
      const int64_t to = p_.destinations.data ? ahead_destination_ : int64_t{column_ + lane_} + shift_;
      const bool mine = column_ + lane_ < end_ && column_ + lane_ >= column_;
      column_ = column_ + kWarp > column_ ? column_ + kWarp : end_;
      look_ahead();
      source = destination = 0;
      if (mine && from >= 0 && from < p_.tokens && to >= 0 && to < p_.tokens && from != to) {
        const uint32_t from_page = static_cast<uint32_t>(from) / p_.tokens_per_page;
        const uint32_t to_page = static_cast<uint32_t>(to) / p_.tokens_per_page;
        const int32_t read = value(table_, from_page * p_.page_table.column);
        const int32_t write = value(table_, to_page * p_.page_table.column);
        if (read >= 0 && read < pages_ && write >= 0 && write < pages_) {
          source = base_ + read * p_.page_stride + (from - int64_t{from_page} * p_.tokens_per_page) * p_.token_stride;
          destination = base_ + write * p_.page_stride + (to - int64_t{to_page} * p_.tokens_per_page) * p_.token_stride;
        }
      }
      if (__any_sync(kAll, source != 0)) return true;
    }
  }

 private:
  // Lane l learns what request first + l has: its columns, and how many pieces they make.
  __device__ void load_window(uint32_t first) {
    window_ = first;
    const uint32_t r = first + lane_;
    uint32_t mine = 0;
    if (r < static_cast<uint32_t>(p_.requests)) {
      my_begin_ = value(p_.offsets.data, r * p_.offsets.stride);
      const int32_t end = min(value(p_.offsets.data, (r + 1) * p_.offsets.stride), p_.total);
      my_first_ = static_cast<uint32_t>(max(my_begin_, 0));
      my_end_ = static_cast<uint32_t>(max(end, 0));
      if (my_end_ > my_first_) mine = p_.destinations.data ? (my_end_ - my_first_ + kFreeMoves - 1) / kFreeMoves : 1;
    }
    my_pieces_ = mine;
#pragma unroll
    for (uint32_t distance = 1; distance < kWarp; distance *= 2) {
      const uint32_t before = __shfl_up_sync(kAll, mine, distance);
      if (lane_ >= distance) mine += before;
    }
    my_last_ = mine;
    window_pieces_ = __shfl_sync(kAll, mine, kWarp - 1);
  }

  __device__ bool next_item() {
    for (;;) {
      if (layer_ >= p_.layers) return false;
      const uint32_t list = list_;
      const uint64_t piece = piece_;
      const LayerPool& pool = p_.pools[layer_];
      list_ += step_list_;
      uint32_t carry = list_ >= p_.lists;
      list_ -= carry ? p_.lists : 0;
      piece_ += step_piece_ + carry;
      carry = piece_ >= pieces_;
      piece_ -= carry ? pieces_ : 0;
      layer_ += step_layer_ + carry;
      if (start(pool, list, piece)) return true;
    }
  }

  __device__ bool start(const LayerPool& pool, uint32_t list, uint64_t piece) {
    const int32_t plane_of_sources = p_.layer_map.data ? value(p_.layer_map.data, pool.layer * p_.layer_map.stride) : 0;
    if (plane_of_sources < 0 || plane_of_sources >= p_.source_planes) return false;
    const uint32_t slice = list % p_.slices, head = list / p_.slices % p_.heads, plane = list / p_.slices / p_.heads;

    if (piece < window_before_) {
      window_before_ = 0;
      load_window(0);
    }
    while (piece - window_before_ >= window_pieces_) {
      window_before_ += window_pieces_;
      load_window(window_ + kWarp);
    }
    const uint32_t rank = static_cast<uint32_t>(piece - window_before_);
    const int owner = __ffs(static_cast<int>(__ballot_sync(kAll, my_last_ > rank))) - 1;
    const uint32_t part = rank - __shfl_sync(kAll, my_last_ - my_pieces_, owner);
    const int32_t begin = __shfl_sync(kAll, my_begin_, owner);
    column_ = __shfl_sync(kAll, my_first_, owner);
    end_ = __shfl_sync(kAll, my_end_, owner);
    const int64_t request = window_ + static_cast<uint32_t>(owner);

    pages_ = pool.pages;
    table_ = p_.page_table.data + request * p_.page_table.row;
    base_ = reinterpret_cast<uint64_t>(pool.base) + plane * p_.plane_stride + head * p_.head_stride +
            int64_t{slice} * p_.slice_vectors * kVector;
    vectors = min(p_.slice_vectors, p_.vectors - slice * p_.slice_vectors);
    step = step_of(vectors);
    sources_ = p_.sources.data + plane_of_sources * p_.sources.plane + head * p_.sources.head;
    if (p_.destinations.data) {
      destinations_ = p_.destinations.data + plane_of_sources * p_.destinations.plane + head * p_.destinations.head;
      column_ += part * kFreeMoves;
      end_ = min(column_ + kFreeMoves, end_);
    } else {
      shift_ = int64_t{value(p_.bases.data, request * p_.bases.stride)} - begin;
      skip_unmoved();
    }
    look_ahead();
    return column_ < end_;
  }

  // Passes over chunks whose tokens all stay: the sources alone tell.
  __device__ void skip_unmoved() {
    while (column_ < end_) {
      int32_t from[kScan];
#pragma unroll
      for (uint32_t k = 0; k < kScan; ++k) {
        const uint64_t column = uint64_t{column_} + k * kWarp + lane_;
        from[k] = column < end_ ? value(sources_, column * p_.sources.column) : -1;
      }
#pragma unroll
      for (uint32_t k = 0; k < kScan; ++k) {
        const int64_t column = int64_t{column_} + k * kWarp + lane_;
        if (__any_sync(kAll, from[k] >= 0 && from[k] != column + shift_)) {
          column_ += k * kWarp;
          return;
        }
      }
      column_ = end_ - column_ > kScan * kWarp ? column_ + kScan * kWarp : end_;
    }
  }

  // The values of the next chunk are fetched while this one's rows are.
  __device__ void look_ahead() {
    const uint64_t column = uint64_t{column_} + lane_;
    if (column >= end_) return;
    ahead_source_ = value(sources_, column * p_.sources.column);
    if (p_.destinations.data) ahead_destination_ = value(destinations_, column * p_.destinations.column);
  }

  const Parameters& p_;
  const uint32_t lane_;
  // Where the warp is among its items: digits of the item number, and what to add to them.
  uint32_t list_ = 0, step_list_ = 0;
  uint64_t piece_ = 0, step_piece_ = 0, layer_ = 0, step_layer_ = 0, pieces_ = 0;
  // 32 requests, one per lane.
  uint32_t window_ = 0, window_pieces_ = 0;
  uint64_t window_before_ = 0;
  int32_t my_begin_ = 0;
  uint32_t my_first_ = 0, my_end_ = 0, my_pieces_ = 0, my_last_ = 0;
  // The current item.
  uint32_t column_ = 0, end_ = 0;
  int64_t shift_ = 0;  // destination token minus column
  uint64_t base_ = 0;
  const int32_t *sources_ = nullptr, *destinations_ = nullptr, *table_ = nullptr;
  int32_t pages_ = 0, ahead_source_ = 0, ahead_destination_ = 0;
};

// A tile under way: where its vectors go. `vectors` is 0 when there is none.
struct Tile {
  uint64_t destination = 0;
  Place first{0, 0};
  uint32_t vectors = 0, step = 0;
};

template <int kVector>
__global__ void __launch_bounds__(kThreads, kMinBlocks) compact_kernel(const __grid_constant__ Parameters p) {
  using V = typename VectorType<kVector>::type;
  __shared__ alignas(16) V ring[kWarpsPerBlock][kStages][kUnits * kWarp];
  const uint32_t lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  Walk<kVector> walk(p, lane, uint64_t{blockIdx.x} * kWarpsPerBlock + warp, uint64_t{gridDim.x} * kWarpsPerBlock);

  Tile tiles[kStages];  // tiles[k] was started k rounds ago
  int stage = 0, under_way = 0;
  bool more = walk.next();
  Place place{lane / walk.vectors, lane % walk.vectors};
  uint32_t done = 0;  // vectors of the 32 rows that are in earlier tiles
  for (;;) {
#pragma unroll
    for (int k = kStages - 1; k > 0; --k) tiles[k] = tiles[k - 1];
    tiles[0].vectors = 0;
    V* const mine = ring[warp][stage] + lane;
    if (more) {
      tiles[0] = {walk.destination, place, walk.vectors, walk.step};
      ++under_way;
      [[maybe_unused]] V loaded[kUnits];
#pragma unroll
      for (int k = 0; k < kUnits; ++k) {
        const uint64_t row = __shfl_sync(kAll, walk.source, static_cast<int>(place.row % kWarp));
        const uint64_t from = row + uint64_t{place.column} * kVector;
        if (place.row < kWarp && row != 0) {
          if constexpr (kVector >= 4) copy_async<kVector>(mine + k * kWarp, reinterpret_cast<const void*>(from));
          else loaded[k] = *reinterpret_cast<const V*>(from);
        }
        place.advance(walk.vectors, walk.step);
      }
      if constexpr (kVector < 4) {
#pragma unroll
        for (int k = 0; k < kUnits; ++k) mine[k * kWarp] = loaded[k];
      }
      done += kUnits * kWarp;
      if (done >= kWarp * walk.vectors) {
        more = walk.next();
        place = {lane / walk.vectors, lane % walk.vectors};
        done = 0;
      }
    }
    commit_async();
    stage = stage + 1 == kStages ? 0 : stage + 1;
    wait_async<kStages - 1>();
    __syncwarp();
    const Tile& tile = tiles[kStages - 1];
    if (tile.vectors != 0) {
      const V* const ready = ring[warp][stage] + lane;
      Place to = tile.first;
#pragma unroll
      for (int k = 0; k < kUnits; ++k) {
        const uint64_t row = __shfl_sync(kAll, tile.destination, static_cast<int>(to.row % kWarp));
        if (to.row < kWarp && row != 0) *reinterpret_cast<V*>(row + uint64_t{to.column} * kVector) = ready[k * kWarp];
        to.advance(tile.vectors, tile.step);
      }
      --under_way;
    }
    if (!more && under_way == 0) return;
  }
}

// Blocks of a kernel that fill the device.
template <int kVector>
int64_t resident_blocks(const DeviceFacts& facts, int device) {
  static int known[kMaxDevices];
  int& per_multiprocessor = known[device];
  if (per_multiprocessor == 0) {
    const auto kernel = compact_kernel<kVector>;
    cuda_check(
        cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared),
        "cudaFuncSetAttribute");
    int blocks = 0;
    cuda_check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, kThreads, 0),
               "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
    per_multiprocessor = std::max(blocks, 1);
  }
  return int64_t{facts.multiprocessors} * per_multiprocessor;
}

template <int kVector>
void launch(Parameters& p, const Geometry& g, const DeviceFacts& facts, const DeviceScope& scope) {
  const int64_t resident = resident_blocks<kVector>(facts, scope.device);
  const int64_t pieces = p.destinations.data ? (p.total + kFreeMoves - 1) / kFreeMoves + p.requests : p.requests;
  const int64_t whole = p.layers * g.planes * p.heads * pieces;  // lists of whole rows
  const int64_t vectors = g.row_bytes / kVector;
  // Rows are cut when there are too few lists to keep every warp of the device busy.
  const int64_t wanted = (resident * kWarpsPerBlock + whole - 1) / whole;
  const int64_t slices = std::clamp<int64_t>(wanted, 1, std::max<int64_t>(g.row_bytes / kMinSlice, 1));
  const int64_t unit = kMinSlice / kVector;
  const int64_t slice_vectors = slices == 1 ? vectors : ((vectors + slices - 1) / slices + unit - 1) / unit * unit;
  p.vectors = static_cast<uint32_t>(vectors);
  p.slice_vectors = static_cast<uint32_t>(slice_vectors);
  p.slices = static_cast<uint32_t>((vectors + slice_vectors - 1) / slice_vectors);
  p.lists = static_cast<uint32_t>(g.planes * p.heads * p.slices);
  const int64_t warps = whole * p.slices;
  const int64_t blocks = std::min((warps + kWarpsPerBlock - 1) / kWarpsPerBlock, resident * kWaves);
  compact_kernel<kVector><<<static_cast<unsigned>(blocks), kThreads, 0, scope.stream>>>(p);
  cuda_check(cudaGetLastError(), "compact_kernel");
}

// The widest vector in which every row of the pool can be moved.
int vector_bytes(const Pool& pool) {
  const Geometry& g = pool.geometry;
  const uint64_t all =
      reinterpret_cast<uint64_t>(pool.base) |
      static_cast<uint64_t>(g.page_stride | g.plane_stride | g.head_stride | g.token_stride | g.row_bytes | 16);
  return static_cast<int>(all & -all);
}

void run(const Context& ctx, const Moves& m, const DeviceScope& scope) {
  if (m.empty()) return;
  const DeviceFacts& facts = device_facts(ctx, scope.device, reinterpret_cast<const void*>(compact_kernel<16>));
  Parameters p;
  p.page_table = m.page_table;
  p.sources = m.sources;
  p.destinations = m.destinations;
  p.offsets = m.offsets;
  p.bases = m.bases;
  p.layer_map = m.layer_map;
  p.requests = static_cast<int32_t>(m.requests);
  p.source_planes = static_cast<int32_t>(std::min<int64_t>(m.source_planes, INT32_MAX));
  p.total = static_cast<int32_t>(m.total);
  p.heads = static_cast<uint32_t>(m.heads);
  std::vector<bool> launched(m.pools.size());
  for (size_t first = 0; first < m.pools.size(); ++first) {
    const Pool& like = m.pools[first];
    if (launched[first] || like.pages == 0) continue;
    const int vector = vector_bytes(like);
    p.layers = 0;
    for (size_t l = first; l < m.pools.size() && p.layers < kMaxLayers; ++l) {
      const Pool& pool = m.pools[l];
      if (launched[l] || pool.pages == 0 || !(pool.geometry == like.geometry) || vector_bytes(pool) != vector) continue;
      launched[l] = true;
      p.pools[p.layers++] = {pool.base, static_cast<int32_t>(pool.pages), static_cast<int32_t>(l)};
    }
    const Geometry& g = like.geometry;
    p.page_stride = g.page_stride;
    p.plane_stride = g.plane_stride;
    p.head_stride = g.head_stride;
    p.token_stride = g.token_stride;
    p.tokens_per_page = static_cast<uint32_t>(g.tokens_per_page);
    p.tokens = static_cast<int32_t>(m.tokens(g));
    switch (vector) {
      case 16: launch<16>(p, g, facts, scope); break;
      case 8: launch<8>(p, g, facts, scope); break;
      case 4: launch<4>(p, g, facts, scope); break;
      case 2: launch<2>(p, g, facts, scope); break;
      default: launch<1>(p, g, facts, scope);
    }
  }
}

// Debug mode: the values on the host, and the same moves in terms of them.
class HostValues {
 public:
  HostValues(const Moves& m, const DeviceScope& scope) : moves(m), stream_(scope.stream) {
    const auto whole = [](int64_t n) { return std::max<int64_t>(n, 1); };
    moves.page_table = {copy(m.page_table.data, {{m.requests, m.page_table.row}, {m.max_pages, m.page_table.column}}),
                        whole(m.max_pages), 1};
    moves.sources = copy(m.sources);
    if (m.destinations.data) moves.destinations = copy(m.destinations);
    moves.offsets = {copy(m.offsets.data, {{m.requests + 1, m.offsets.stride}}), 1};
    moves.bases = {copy(m.bases.data, {{m.requests, m.bases.stride}}), 1};
    if (m.layer_map.data)
      moves.layer_map = {copy(m.layer_map.data, {{static_cast<int64_t>(m.pools.size()), m.layer_map.stride}}), 1};
  }
  Moves moves;

 private:
  struct Dimension {
    int64_t size, stride;
  };
  Planes copy(const Planes& planes) {
    return {copy(planes.data,
                 {{moves.source_planes, planes.plane}, {moves.heads, planes.head}, {moves.total, planes.column}}),
            moves.heads * moves.total, moves.total, 1};
  }
  const int32_t* copy(const int32_t* device, const std::vector<Dimension>& dimensions) {
    int64_t count = 1, extent = 1;
    for (const Dimension& d : dimensions) {
      count *= d.size;
      extent += (d.size - 1) * d.stride;
    }
    std::vector<int32_t> dense(static_cast<size_t>(count) + 1);  // never without an address
    if (count > 0) {
      std::vector<int32_t> spread(static_cast<size_t>(extent));
      cuda_check(cudaMemcpyAsync(spread.data(), device, spread.size() * 4, cudaMemcpyDeviceToHost, stream_),
                 "cudaMemcpyAsync");
      cuda_check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
      for (int64_t i = 0; i < count; ++i) {
        int64_t rest = i, offset = 0;
        for (size_t d = dimensions.size(); d-- > 0; rest /= dimensions[d].size)
          offset += rest % dimensions[d].size * dimensions[d].stride;
        dense[static_cast<size_t>(i)] = spread[static_cast<size_t>(offset)];
      }
    }
    kept_.push_back(std::move(dense));
    return kept_.back().data();
  }

  cudaStream_t stream_;
  std::vector<std::vector<int32_t>> kept_;
};

void compact_pages_(const TensorList& pools, const Tensor& page_table, const Tensor& sources, const Tensor& offsets,
                    const Tensor& bases, const std::optional<Tensor>& layer_map,
                    const std::optional<Tensor>& destinations) {
  const Context ctx{"compact_pages_"};
  if (pools.empty()) ctx.value_error("pools", "at least one tensor", "none");
  const Tensor first = pools.tensor(0);
  if (!first.is_cuda()) ctx.type_error("pools[0]", "a CUDA tensor", Context::describe_device(first));
  const Moves m = read_moves(ctx, pools, page_table, sources, offsets, bases, layer_map, destinations);
  const DeviceScope scope(first);
  if (debug_mode) check_moves(ctx, HostValues(m, scope).moves);
  run(ctx, m, scope);
}

}  // namespace
}  // namespace kvc::compaction

STABLE_TORCH_LIBRARY_IMPL(KVC_NAMESPACE, CUDA, m) {
  m.impl("compact_pages_", kvc::boxed<&kvc::compaction::compact_pages_>);
}
