// Selection from rows that a block keeps in registers: a histogram over the range of the scores finds the bin of the
// k-th largest, whose few members are ranked.
#pragma once

#include "topk/select.cuh"

namespace kvc::topk {

// kDirect: see GroupMarks. kWaits: the length of the row comes first, so that nothing past it is read; else the whole
// row is on its way before its length is known.
template <typename Score, int kThreads, int kGroups, bool kDirect, bool kWaits>
__global__ void __launch_bounds__(kThreads, 1024 / kThreads) resident_select(const __grid_constant__ Problem p) {
  using Alone = Team<false>;
  constexpr int kBins = 4 * kThreads, kWarps = kThreads / 32;
  constexpr int kRanged = kGroups < 2 ? kGroups : 2;  // groups a thread that give the range
  constexpr uint32_t kWords = kThreads * kGroups / 4;
  constexpr int kUnit = kWords <= kThreads ? 1 : 2;
  constexpr uint32_t kSteps = (kWords + kThreads * kUnit - 1) / (kThreads * kUnit);
  constexpr uint32_t kStageSize = kDirect ? 0 : 512 * kUnit;  // scores that a warp writes the indices of at a time
  using Marks = GroupMarks<kThreads, kGroups>;
  __shared__ union {
    alignas(16) uint32_t hist[kBins];
    uint16_t stage[kWarps * kStageSize + 1];
    uint32_t counts[Marks::kCounts];
  } scratch;
  __shared__ alignas(16) uint32_t marks[kWords];
  __shared__ Control control;
  uint32_t* const hist = scratch.hist;
  const uint32_t thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int64_t row_index = blockIdx.x;
  int32_t* out = p.out + row_index * p.k;
  const int32_t given = __ldg(p.lengths + row_index);
  const int32_t base = p.bases ? __ldg(p.bases + row_index) : 0;

  const Row<Score> row(p, row_index, kWaits ? min(max(given, 0), p.width) : p.width);
  Group<Score> raw[kGroups];
#pragma unroll
  for (int q = 0; q < kGroups; ++q) {
    const int32_t group = q * kThreads + thread;
    if (group >= row.inner_begin && group < row.inner_end) raw[q].load(row.at(group));
  }
  const int32_t length = min(max(given, 0), p.width);
  // Of a row that ends in the first half of the groups, the second half.
  const auto skips = [&](int q) { return kWaits && q >= kGroups / 2 && row.groups <= kGroups / 2 * kThreads; };
  if (length <= p.k) return emit_all<kThreads, Alone>(out, p.k, length, base);
  const uint32_t k = static_cast<uint32_t>(p.k);
  if (thread == 0) control.small_count = control.equal = 0, control.edge[0] = kAll;
  clear_bins<kThreads>(hist);

  float x[kGroups][4];  // -inf where there is no score
  const int32_t whole = (row.head + length) / 4;
#pragma unroll
  for (int q = 0; q < kGroups; ++q) {
    const int32_t group = q * kThreads + thread;
    if (skips(q)) {
#pragma unroll
      for (int j = 0; j < 4; ++j) x[q][j] = -kInfinity;
      continue;
    }
    if (group >= row.inner_begin && group < row.inner_end) {
      raw[q].to(x[q]);
#pragma unroll
      for (int j = 0; j < 4; ++j) x[q][j] = fmaxf(x[q][j], -kInfinity);  // NaN too
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j)
        x[q][j] = row.holds(group, j) ? fmaxf(widen(row.at(group)[j]), -kInfinity) : -kInfinity;
    }
    if (!kWaits && group >= whole) {
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (group * 4 + j >= row.head + length) x[q][j] = -kInfinity;
    }
  }
  float least = kInfinity, most = -kInfinity;
#pragma unroll
  for (int q = 0; q < kRanged; ++q)
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (fabsf(x[q][j]) < kInfinity) least = fminf(least, x[q][j]), most = fmaxf(most, x[q][j]);
  uint32_t low = __reduce_min_sync(kAll, ordered_key(least)), high = __reduce_max_sync(kAll, ordered_key(most));
  if (lane == 0) control.warps[0][warp] = low, control.warps[1][warp] = high;
  __syncthreads();
  low = __reduce_min_sync(kAll, control.warps[0][lane % kWarps]);
  high = __reduce_max_sync(kAll, control.warps[1][lane % kWarps]);
  Linear<kBins> bins(score_of(low), score_of(high));
#pragma unroll
  for (int q = 0; q < kGroups; ++q) {
    if (skips(q)) continue;
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (x[q][j] > -kInfinity) atomicAdd(hist + bins.bin_at(bins.place(x[q][j])), 1);
  }
  __syncthreads();
  const uint32_t ranks[1] = {k};
  Bin bins_found[1];
  uint32_t counted;
  find_bins<kThreads, 1>(hist, control, sum_bins<kThreads, Alone>(hist, hist), ranks, bins_found, counted);
  bins.forget();
  const Bin bin = bins_found[0];
  Threshold t{kLowestKey, k - counted, true};  // if -inf is the k-th largest

  uint8_t* const mark_bytes = reinterpret_cast<uint8_t*>(marks);
  if (k <= counted && bin.count <= kSmall) {
    const float border = bins.place_of(bin.index);
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
      const uint32_t open = __float_as_uint(members) & 15;
      if (open != 0) {
#pragma unroll
        for (int j = 0; j < 4; ++j)
          if ((open >> j & 1) && x[q][j] > -kInfinity) {
            const uint32_t at = atomicAdd(&control.small_count, 1);
            control.small_keys[at] = ordered_key(x[q][j]);
            control.small_places[at] = (q * kThreads + thread) * 4 + j;
          }
      }
    }
    __syncthreads();
    rank_small<kThreads>(control, bin.count, k - bin.above, [&](uint32_t place) { select_mark(marks, place); });
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
      if (lane == 0) atomicMin(&control.edge[0], key);
      __syncthreads();
      t.key = control.edge[0];
    }
    for (;;) {
      const float border = score_of(as_high(t.key));
      uint32_t equal = 0;
#pragma unroll
      for (int q = 0; q < kGroups; ++q) {
        float mark = kNoFlags;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          mark = fmaf(is_greater(x[q][j], border), 1 << j, mark);
          mark = fmaf(is_equal(x[q][j], border), 16 << j, mark);
        }
        uint32_t byte = __float_as_uint(mark);
        if (q == 0 && thread == 0) byte &= ~((1u << row.head) - 1) << 4 | 15;  // -inf before the row is no tie
        mark_bytes[q * kThreads + thread] = static_cast<uint8_t>(byte);
        equal += __popc(byte & 0xf0);
      }
      if (marked || k > counted) break;
      equal = __reduce_add_sync(kAll, equal);
      if (lane == 0) atomicAdd(&control.equal, equal);
      __syncthreads();
      const uint32_t higher = bin.above + bin.count - control.equal;
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
      t = narrow<kThreads, Alone>(source, hist, hist, control, k - bin.above, bin.count);
    }
  }
  __syncthreads();
  if constexpr (kDirect) {
    Marks mine;
#pragma unroll
    for (int q = 0; q < kGroups; ++q) mine.marks[q] = mark_bytes[q * kThreads + thread];
    mine.count(scratch.counts);
    __syncthreads();
    mine.emit(scratch.counts, t.quota, out, base - row.head);
  } else {
    uint32_t above, equal;
    count_marks<kUnit>(marks, kWords, kSteps, above, equal);
    emit<kThreads, kUnit, kStageSize>(marks, kWords, t.quota, 0, 0, out, base - row.head, scratch.stage, control, above,
                                      equal, kSteps);
  }
}

}  // namespace kvc::topk
