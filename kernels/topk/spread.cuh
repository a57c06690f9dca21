// Selection from few rows that a cluster of blocks keeps in registers, as a block does in resident.cuh: its blocks add
// up their histograms and exchange what they hold of the k-th largest's bin, with three barriers of the cluster.
#pragma once

#include "topk/select.cuh"

namespace kvc::topk {

template <int kThreads, int kGroups>
struct SpreadShared {
  static constexpr int kBins = 4 * kThreads;
  static constexpr uint32_t kStageSize = 512;  // scores that a warp writes the indices of at a time
  union {
    struct {
      alignas(16) uint32_t hist[kBins], sums[kBins];
    };
    uint16_t stage[kThreads / 32 * kStageSize];
  };
  alignas(16) uint32_t marks[kThreads * kGroups / 4];
  Control control, merged;  // `merged`: the small members of all blocks
};

template <typename Score, int kThreads, int kGroups>
__device__ __forceinline__ void spread_row(const Problem& p) {
  using Blocks = Team<true>;
  using Shared = SpreadShared<kThreads, kGroups>;
  constexpr int kBins = 4 * kThreads;
  constexpr int kRanged = 2;  // groups a thread that give the range
  constexpr uint32_t kWords = kThreads * kGroups / 4;
  constexpr int kUnit = kWords <= kThreads ? 1 : 2;
  constexpr uint32_t kSteps = (kWords + kThreads * kUnit - 1) / (kThreads * kUnit);
  extern __shared__ __align__(16) uint8_t dynamic[];
  Shared& shared = *reinterpret_cast<Shared*>(dynamic);
  Control &control = shared.control, &merged = shared.merged;
  uint32_t *const hist = shared.hist, *const sums = shared.sums, *const marks = shared.marks;
  uint8_t* const mark_bytes = reinterpret_cast<uint8_t*>(marks);
  const uint32_t thread = threadIdx.x, lane = thread % 32;
  const uint32_t rank = Blocks::rank(), size = Blocks::size();
  const int64_t row_index = blockIdx.x / size;
  int32_t* out = p.out + row_index * p.k;
  const int32_t length = min(max(__ldg(p.lengths + row_index), 0), p.width);
  const int32_t base = p.bases ? __ldg(p.bases + row_index) : 0;
  if (length <= p.k) return emit_all<kThreads, Blocks>(out, p.k, length, base);

  const Row<Score> row(p, row_index, length);
  const int32_t blocks = static_cast<int32_t>(size);
  const int32_t share = ((row.groups + blocks - 1) / blocks + 31) / 32 * 32;
  const int32_t begin = min(row.groups, static_cast<int32_t>(rank) * share), end = min(row.groups, begin + share);
  const int32_t own = begin + static_cast<int32_t>(thread);  // this thread's first group
  Group<Score> raw[kGroups];
#pragma unroll
  for (int q = 0; q < kGroups; ++q) {
    const int32_t group = own + q * kThreads;
    if (group >= row.inner_begin && group < min(end, row.inner_end)) raw[q].load(row.at(group));
  }
  const auto skips = [&](int q) { return q * kThreads >= end - begin; };
  const uint32_t k = static_cast<uint32_t>(p.k);
  if (thread == 0) {
    control.small_count = control.totals[0] = control.totals[1] = merged.members = 0;
    control.edge[0] = control.edge[2] = kAll, control.edge[1] = 0;
  }
  clear_bins<kThreads>(hist);
  __syncthreads();

  float x[kGroups][4];  // -inf where there is no score
#pragma unroll
  for (int q = 0; q < kGroups; ++q) {
    const int32_t group = own + q * kThreads;
    if (group >= row.inner_begin && group < min(end, row.inner_end)) {
      raw[q].to(x[q]);
#pragma unroll
      for (int j = 0; j < 4; ++j) x[q][j] = fmaxf(x[q][j], -kInfinity);  // NaN too
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j)
        x[q][j] = group < end && row.holds(group, j) ? fmaxf(widen(row.at(group)[j]), -kInfinity) : -kInfinity;
    }
  }
  float least = kInfinity, most = -kInfinity;
#pragma unroll
  for (int q = 0; q < kRanged; ++q)
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (fabsf(x[q][j]) < kInfinity) least = fminf(least, x[q][j]), most = fmaxf(most, x[q][j]);
  uint32_t low = ordered_key(least), high = ordered_key(most);
  find_edges<Blocks>(low, high, control);
  Linear<kBins> bins(score_of(low), score_of(high));
#pragma unroll
  for (int q = 0; q < kGroups; ++q) {
    if (skips(q)) continue;
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (x[q][j] > -kInfinity) atomicAdd(hist + bins.bin_at(bins.place(x[q][j])), 1);
  }
  Blocks::sync();
  const uint32_t ranks[1] = {k};
  Bin bins_found[1];
  uint32_t counted;
  find_bins<kThreads, 1>(sums, control, sum_bins<kThreads, Blocks>(hist, sums), ranks, bins_found, counted);
  bins.forget();
  const Bin bin = bins_found[0];
  Threshold t{kLowestKey, k - counted, true};  // if -inf is the k-th largest

  uint32_t block_above = 0, block_equal = 0;  // of the blocks before this one
  if (k <= counted && bin.count <= kSmall) {
    const float border = bins.place_of(bin.index);
    uint32_t selected = 0;
#pragma unroll
    for (int q = 0; q < kGroups; ++q) {
      if (skips(q)) {
        mark_bytes[q * kThreads + thread] = 0;
        continue;
      }
      float above = kNoFlags, members = kNoFlags;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float place = bins.place(x[q][j]);
        above = fmaf(is_greater(place, border), 1 << j, above);
        members = fmaf(is_equal(place, border), 1 << j, members);
      }
      mark_bytes[q * kThreads + thread] = static_cast<uint8_t>(__float_as_uint(above));
      selected += __popc(__float_as_uint(above) & 15);
      const uint32_t open = __float_as_uint(members) & 15;
      if (open != 0) {
#pragma unroll
        for (int j = 0; j < 4; ++j)
          if ((open >> j & 1) && x[q][j] > -kInfinity) {
            const uint32_t at = atomicAdd(&control.small_count, 1);
            control.small_keys[at] = ordered_key(x[q][j]);
            control.small_places[at] = (own + q * kThreads) * 4 + j;
          }
      }
    }
    selected = __reduce_add_sync(kAll, selected);
    if (lane == 0 && selected != 0) atomicAdd(&control.totals[0], selected);
    Blocks::sync();
    const uint32_t from_rank = thread / kSmall, slot = thread % kSmall;
    uint32_t key = 0, place = 0;
    if (from_rank < size) {
      const Control& theirs = *Blocks::peer(&control, from_rank);
      key = theirs.small_keys[slot], place = theirs.small_places[slot];
    }
    const Control& theirs = *Blocks::peer(&control, lane % size);
    const uint32_t count = lane < size ? theirs.small_count : 0;
    block_above = __reduce_add_sync(kAll, lane < rank ? theirs.totals[0] : 0);
    Blocks::arrive();  // no block leaves before it was read
    const uint32_t first = inclusive_sum(count, lane) - count;
    const uint32_t at = __shfl_sync(kAll, first, from_rank % 32) + slot;
    if (slot < __shfl_sync(kAll, count, from_rank % 32) && from_rank < size)
      merged.small_keys[at] = key, merged.small_places[at] = place;
    __syncthreads();
    const uint32_t from = static_cast<uint32_t>(begin) * 4, scores = static_cast<uint32_t>(end - begin) * 4;
    rank_small<kThreads>(merged, bin.count, k - bin.above, [&](uint32_t place) {
      if (place - from < scores) select_mark(marks, place - from);
      else if (place < from) atomicAdd(&merged.members, 1);
    });
    __syncthreads();
    block_above += merged.members;
    t.quota = 0;
  } else {
    // Most often a plateau that few higher scores share the bin with: guess that its lowest is the k-th largest.
    bool marked = false;
    if (k <= counted) {
      const float border = bins.place_of(bin.index);
      float first = kInfinity;
      bins.forget();
#pragma unroll
      for (int q = 0; q < kGroups; ++q)
#pragma unroll
        for (int j = 0; j < 4; ++j)
          if (bins.place(x[q][j]) == border && x[q][j] > -kInfinity) first = fminf(first, x[q][j]);
      const uint32_t key = __reduce_min_sync(kAll, ordered_key(first));
      if (lane == 0) atomicMin(&control.edge[2], key);
      Blocks::sync();
      t.key = __reduce_min_sync(kAll, Blocks::peer(&control, lane % size)->edge[2]);
    }
    for (;;) {
      const float border = score_of(as_high(t.key));
      uint32_t above = 0, equal = 0;
#pragma unroll
      for (int q = 0; q < kGroups; ++q) {
        float mark = kNoFlags;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          mark = fmaf(is_greater(x[q][j], border), 1 << j, mark);
          mark = fmaf(is_equal(x[q][j], border), 16 << j, mark);
        }
        uint32_t byte = __float_as_uint(mark) & 0xff;
        const int32_t group = own + q * kThreads;
        if (group >= end) byte = 0;
        if (group == 0) byte &= ~((1u << row.head) - 1) << 4 | 15;  // -inf before the row is no tie
        mark_bytes[q * kThreads + thread] = static_cast<uint8_t>(byte);
        above += __popc(byte & 0x0f), equal += __popc(byte & 0xf0);
      }
      above = __reduce_add_sync(kAll, above), equal = __reduce_add_sync(kAll, equal);
      if (lane == 0) atomicAdd(&control.totals[0], above), atomicAdd(&control.totals[1], equal);
      Blocks::sync();
      const Control& theirs = *Blocks::peer(&control, lane % size);
      above = theirs.totals[0], equal = theirs.totals[1];
      block_above = __reduce_add_sync(kAll, lane < rank ? above : 0);
      block_equal = __reduce_add_sync(kAll, lane < rank ? equal : 0);
      if (marked || k > counted) break;
      const uint32_t higher = bin.above + bin.count - __reduce_add_sync(kAll, lane < size ? equal : 0);
      t.quota = k - higher;
      if (k > higher) break;
      marked = true;
      bins.forget();
      const float place = bins.place_of(bin.index);
      const auto source = [&](auto&& use) {
#pragma unroll
        for (int q = 0; q < kGroups; ++q)
#pragma unroll
          for (int j = 0; j < 4; ++j)
            if (bins.place(x[q][j]) == place && x[q][j] > -kInfinity) use(ordered_key(hidden(x[q][j])));
      };
      t = narrow<kThreads, Blocks>(source, hist, sums, control, k - bin.above, bin.count);
      if (thread == 0) control.totals[0] = control.totals[1] = 0;  // which all have read before narrow()'s barriers
      __syncthreads();
    }
    Blocks::arrive();
  }
  uint32_t above, equal;
  count_marks<kUnit>(marks, kWords, kSteps, above, equal);
  emit<kThreads, kUnit, Shared::kStageSize>(marks, kWords, t.quota, block_above, block_equal, out,
                                            base - row.head + begin * 4, shared.stage, control, above, equal, kSteps);
  Blocks::wait();
}

template <typename Score, int kThreads, int kGroups>
__global__ void __launch_bounds__(kThreads, 1024 / kThreads) spread_select(const __grid_constant__ Problem p) {
#if __CUDA_ARCH__ >= 900  // empty elsewhere
  spread_row<Score, kThreads, kGroups>(p);
#endif
}

}  // namespace kvc::topk
