// Selection from long rows, which are read once.
//
// A sample of the row gives a window (low, high] of scores that almost surely holds the k-th largest: what lies above
// is marked as selected, what lies inside goes to a list, what equals `low` is marked as a tie, so that a plateau of
// equal scores costs no more than other scores. The true counts then say whether the k-th largest was inside. If it was
// not, or if the list was too short, the row is read again with a window that is known to hold it and that shrinks by a
// factor of kBins each time: results never depend on the sample or the list. select.py is the same in CuTe DSL.
#pragma once

#include "topk/select.cuh"

namespace kvc::topk {

// A window of keys: above `high` is selected, (low, high] is open, `low` itself is a tie, if ties are looked for.
struct Window {
  uint32_t low, high;
  bool ties;
  uint32_t reach = kHighestKey;  // few scores, if any, have a higher key
};

constexpr int kSampleGroups = 2;  // per thread
constexpr int kPieceGroups = 4;   // that lie together: 64 bytes of fp32
constexpr int kStep = 4;          // groups a thread takes at a time when it streams

template <int kThreads>
struct StreamShared {
  static constexpr int kBins = 4 * kThreads;
  union {
    uint32_t sums[kBins];  // of the team's histograms; also the sample's
    float4 spill[kStep][kThreads];
    uint16_t stage[kThreads / 32 * kStage];
  };
  uint32_t hist[kBins];
  Control control;
};

// A window that holds the k-th largest of the row unless the sample misleads.
template <typename Score, int kThreads>
__device__ __forceinline__ Window sample_window(const Row<Score>& row, int32_t begin, int32_t end, uint32_t k,
                                                uint32_t* hist, Control& control) {
  using Alone = Team<false>;
  constexpr int kScores = 4 * kSampleGroups, kBins = 4 * kThreads, kWarps = kThreads / 32;
  const uint32_t thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  // Pieces of a row, each somewhere in a stretch of its own, so that periodic rows do not mislead.
  constexpr uint32_t kPieces = kSampleGroups * kThreads / kPieceGroups;
  const uint32_t starts = (row.inner_end - row.inner_begin) / kPieceGroups;
  float x[kScores];
  Group<Score> raw[kSampleGroups];
#pragma unroll
  for (int q = 0; q < kSampleGroups; ++q) {
    const uint32_t piece = q * (kThreads / kPieceGroups) + thread / kPieceGroups;
    uint32_t jitter = (piece + 1) * 0x9e3779b1u;
    jitter = (jitter ^ jitter >> 15) * 0x85ebca6bu;
    const uint32_t start =
        static_cast<uint32_t>((static_cast<uint64_t>(piece << 16 | jitter >> 16) * starts) / (uint64_t{kPieces} << 16));
    raw[q].load(row.at(row.inner_begin + start * kPieceGroups + thread % kPieceGroups));
  }
  // The memory need not idle while the sample is looked at.
  const int32_t ahead = begin + static_cast<int32_t>(thread * (128 / (4 * sizeof(Score))));
  if (ahead < min(end, row.inner_end)) asm volatile("prefetch.global.L2 [%0];" ::"l"(row.at(ahead)));
  clear_bins<kThreads>(hist);
#pragma unroll
  for (int q = 0; q < kSampleGroups; ++q) {
    float four[4];
    raw[q].to(four);
#pragma unroll
    for (int j = 0; j < 4; ++j) x[q * 4 + j] = fmaxf(four[j], -kInfinity);
  }
  float least = kInfinity, most = -kInfinity;
#pragma unroll
  for (int i = 0; i < kScores; ++i)
    if (fabsf(x[i]) < kInfinity) least = fminf(least, x[i]), most = fmaxf(most, x[i]);
  uint32_t low = __reduce_min_sync(kAll, ordered_key(least)), high = __reduce_max_sync(kAll, ordered_key(most));
  if (lane == 0) control.warps[0][warp] = low, control.warps[1][warp] = high;
  __syncthreads();
  low = __reduce_min_sync(kAll, control.warps[0][lane % kWarps]);
  high = __reduce_max_sync(kAll, control.warps[1][lane % kWarps]);
  Linear<kBins> bins(score_of(low), score_of(high));
#pragma unroll
  for (int i = 0; i < kScores; ++i)
    if (x[i] > -kInfinity) atomicAdd(hist + bins.bin_at(bins.place(x[i])), 1);

  // Ranks in the sample, four standard deviations to either side.
  constexpr float kSample = kScores * kThreads;
  const float share = static_cast<float>(k) / static_cast<float>(row.length);
  const float expected = share * kSample, margin = 4.0f * sqrtf(expected * (1.0f - share)) + 4.0f;
  const int32_t upper = static_cast<int32_t>(expected - margin), lower = static_cast<int32_t>(expected + margin) + 1;
  if (thread < 2) control.edge[2 * thread] = kAll, control.edge[2 * thread + 1] = 0;
  __syncthreads();
  const uint32_t ranks[2] = {static_cast<uint32_t>(lower), static_cast<uint32_t>(max(upper, 1))};
  Bin edges[2];
  uint32_t counted;
  find_bins<kThreads, 2>(hist, control, sum_bins<kThreads, Alone>(hist, hist), ranks, edges, counted);
  if (upper > static_cast<int32_t>(counted)) return {kLowestKey, kLowestKey, true};  // -inf is the k-th largest
  const bool open_above = upper < 1, open_below = edges[0].count == 0;
  Window window{kLowestKey, kHighestKey, open_below, high};
  const bool crowded[2] = {edges[0].count > kSmall, edges[1].count > kSmall && !open_above};
  // Any score near the border of the bin will do.
  const float width = (score_of(high) - score_of(low)) * (1.0f / (kBins - 1));
  if (!open_below) window.low = ordered_key(fmaf(edges[0].index - 0.5f, width, score_of(low)));
  if (!open_above) window.high = ordered_key(fmaf(edges[1].index + 0.5f, width, score_of(low)));
  if (!open_above && edges[1].index == kBins - 1) window.high = kHighestKey;
  if (!open_below && edges[0].index == 0) window.low = kLowestKey, window.ties = true;
  if (!(crowded[0] || crowded[1]) && bins.scale > 0.0f && window.low < window.high) return window;

  bins.forget();
  // Bins with many members, as seen on plateaus and where scores are of very unequal sizes: look into them.
  uint32_t bounds[2][2];
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const float border = bins.place_of(edges[e].index);
    float first = kInfinity, last = -kInfinity;
#pragma unroll
    for (int i = 0; i < kScores; ++i)
      if (bins.place(x[i]) == border && x[i] > -kInfinity) first = fminf(first, x[i]), last = fmaxf(last, x[i]);
    bounds[e][0] = __reduce_min_sync(kAll, first <= last ? ordered_key(first) : kAll);
    bounds[e][1] = __reduce_max_sync(kAll, first <= last ? ordered_key(last) : 0);
    if (lane == 0 && bounds[e][0] <= bounds[e][1]) {
      atomicMin(&control.edge[2 * e], bounds[e][0]);
      atomicMax(&control.edge[2 * e + 1], bounds[e][1]);
    }
  }
  __syncthreads();
#pragma unroll
  for (int e = 0; e < 2; ++e) bounds[e][0] = control.edge[2 * e], bounds[e][1] = control.edge[2 * e + 1];
  window = {open_below ? kLowestKey : bounds[0][0], open_above ? kHighestKey : bounds[1][1], true, high};
#pragma unroll 1
  for (int e = 0; e < 2; ++e) {
    if (!crowded[e] || bounds[e][0] == bounds[e][1]) continue;
    const float border = bins.place_of(edges[e].index);
    const auto source = [&](auto&& use) {
#pragma unroll
      for (int i = 0; i < kScores; ++i)
        if (bins.place(x[i]) == border && x[i] > -kInfinity) use(ordered_key(hidden(x[i])));
    };
    const uint32_t rank = (e == 0 ? lower : upper) - edges[e].above;
    const Threshold t = narrow<kThreads, Alone>(source, hist, hist, control, rank, edges[e].count);
    (e == 0 ? window.low : window.high) = t.ties ? t.key : t.key + 1;
  }
  return window;
}

template <typename Score, int kThreads>
struct Streamer {
  const Row<Score>& row;
  StreamShared<kThreads>& shared;
  uint2* list;  // scores (bits) and places within the block's part
  uint8_t* marks;
  uint32_t capacity;

  // Looks at the groups [begin, end) of the row through the window; all threads. Open scores go to the list as far as
  // it reaches, and with `shift` >= 0 their keys into the histogram. kMark: marks are set, that of group `begin` first.
  template <bool kTies, bool kMark>
  __device__ __forceinline__ void stream(int32_t begin, int32_t end, Window window, int shift) const {
    const uint32_t thread = threadIdx.x, lane = thread % 32;
    const float low = score_of(window.low), high = score_of(window.high);
    uint32_t above = 0, equal = 0;

    // All lanes of a warp. Bit 8 * q + j of `open`: score j of this thread's q-th group.
    const auto keep = [&](uint32_t open, uint32_t place, uint32_t distance) {
      const uint32_t found = __reduce_add_sync(kAll, __popc(open));
      if (found == 0) return;
      uint32_t at = 0;
      if (lane == 0) at = atomicAdd(&shared.control.inside, found);
      at = __shfl_sync(kAll, at, 0);
      for (;;) {
        const uint32_t active = __ballot_sync(kAll, open != 0);
        if (active == 0) break;
        if (open != 0) {
          const uint32_t bit = __ffs(open) - 1, q = bit / 8, j = bit % 8;
          open &= open - 1;
          const float score = reinterpret_cast<const float*>(&shared.spill[q][thread])[j];
          const uint32_t entry = at + __popc(active & ((1u << lane) - 1));
          if (entry < capacity) list[entry] = {__float_as_uint(score), place + q * distance + j};
          if (kTies && shift >= 0) atomicAdd(shared.hist + ((ordered_key(score) - window.low - 1) >> shift), 1);
        }
        at += __popc(active);
      }
    };

    const int32_t inner_begin = max(begin, row.inner_begin), inner_end = min(end, row.inner_end);
    // Groups partly outside, at most one at each end of the row.
    if (thread < 32) {
      const int32_t group = thread == 0 ? 0 : row.inner_end;
      const bool partly = thread == 0   ? row.inner_begin == 1
                          : thread == 1 ? row.inner_end < row.groups && row.inner_end >= row.inner_begin
                                        : false;
      uint32_t open = 0;
      if (partly && group >= begin && group < end) {
        uint32_t mark = 0;
        float kept[4] = {};
        for (int j = 0; j < 4; ++j) {
          if (!row.holds(group, j)) continue;
          kept[j] = fmaxf(widen(row.at(group)[j]), -kInfinity);
          if (kept[j] > high) mark |= 1u << j;
          else if (kTies ? kept[j] > low : kept[j] >= low) open |= 1u << j;
          else if (kTies && kept[j] == low) mark |= 16u << j;
        }
        shared.spill[0][thread] = {kept[0], kept[1], kept[2], kept[3]};
        if (kMark) marks[group - begin] = static_cast<uint8_t>(mark);
        above += __popc(mark & kSelected), equal += __popc(mark & kEqual);
      }
      keep(open, (group - begin) * 4, 0);
    }

    const int32_t last = inner_end - 1;
    int32_t group = inner_begin + static_cast<int32_t>(thread);
    const Score* from = row.at(group);
    Group<Score> ahead[kStep];
#pragma unroll
    for (int q = 0; q < kStep; ++q)
      if (group + q * kThreads <= last) ahead[q].load(from + q * kThreads * 4);
    const int32_t warp_first = inner_begin + static_cast<int32_t>(thread - lane);
    for (int32_t first = warp_first; first <= last; first += kStep * kThreads) {
      float selected[2] = {kNoFlags, kNoFlags}, opened[2] = {kNoFlags, kNoFlags};
      const bool full = first + (kStep - 1) * kThreads + 31 <= last;
#pragma unroll
      for (int q = 0; q < kStep; ++q) {
        float x[4];
        ahead[q].to(x);
        if (kTies) {
#pragma unroll
          for (int j = 0; j < 4; ++j) x[j] = fmaxf(x[j], -kInfinity);  // NaN
        }
        shared.spill[q][thread] = {x[0], x[1], x[2], x[3]};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float one = 1 << (q % 2 * 8 + j);
          selected[q / 2] = fmaf(is_greater(x[j], high), one, selected[q / 2]);
          if (kTies) selected[q / 2] = fmaf(is_equal(x[j], low), 16 * one, selected[q / 2]);
          opened[q / 2] = fmaf(kTies ? is_greater(x[j], low) : is_at_least(x[j], low), one, opened[q / 2]);
        }
      }
      uint32_t mark = flags(selected[0], selected[1]), open = flags(opened[0], opened[1]) & ~mark & kSelected;
      from += kStep * kThreads * 4;
      if (full) {
        if (kMark) {
#pragma unroll
          for (int q = 0; q < kStep; ++q) marks[group - begin + q * kThreads] = static_cast<uint8_t>(mark >> 8 * q);
        }
      } else {
        uint32_t valid = 0;
#pragma unroll
        for (int q = 0; q < kStep; ++q) {
          if (group + q * kThreads > last) continue;
          valid |= 0xffu << 8 * q;
          if (kMark) marks[group - begin + q * kThreads] = static_cast<uint8_t>(mark >> 8 * q);
        }
        mark &= valid, open &= valid;
      }
#pragma unroll
      for (int q = 0; q < kStep; ++q)
        if (group + (kStep + q) * kThreads <= last) ahead[q].load(from + q * kThreads * 4);
      above += __popc(mark & kSelected);
      if (kTies) equal += __popc(mark & kEqual);
      keep(open, (group - begin) * 4, kThreads * 4);
      group += kStep * kThreads;
    }
    above = __reduce_add_sync(kAll, above);
    if (lane == 0 && above != 0) atomicAdd(&shared.control.above, above);
    if (kTies) {
      equal = __reduce_add_sync(kAll, equal);
      if (lane == 0 && equal != 0) atomicAdd(&shared.control.equal, equal);
    }
  }
};

template <typename Score, int kThreads, bool kCluster>
__device__ __forceinline__ void stream_row(const Problem& p) {
  using Blocks = Team<kCluster>;
  using Shared = StreamShared<kThreads>;
  constexpr int kBins = 4 * kThreads;
  constexpr int kUnit = 8;
  extern __shared__ __align__(16) uint8_t dynamic[];
  Shared& shared = *reinterpret_cast<Shared*>(dynamic);
  Control& control = shared.control;
  uint8_t* marks = dynamic + (sizeof(Shared) + 15) / 16 * 16;
  uint2* list = reinterpret_cast<uint2*>(marks + p.mark_groups);

  const uint32_t thread = threadIdx.x, lane = thread % 32;
  const uint32_t rank = Blocks::rank(), size = Blocks::size();
  const int64_t row_index = blockIdx.x / size;
  int32_t* out = p.out + row_index * p.k;
  const int32_t length = min(max(__ldg(p.lengths + row_index), 0), p.width);
  const int32_t base = p.bases ? __ldg(p.bases + row_index) : 0;
  if (length <= p.k) return emit_all<kThreads, Blocks>(out, p.k, length, base);
  const uint32_t k = static_cast<uint32_t>(p.k);
  const Row<Score> row(p, row_index, length);

  // This block's groups.
  const int32_t per_block = ((row.groups + static_cast<int32_t>(size) - 1) / static_cast<int32_t>(size) + 15) / 16 * 16;
  const int32_t begin = min(row.groups, static_cast<int32_t>(rank) * per_block),
                end = min(row.groups, begin + per_block);
  const bool marked = per_block <= p.mark_groups;
  const uint32_t words = (end - begin + 3) / 4;

  Window window{kLowestKey, kHighestKey, true};
  clear_bins<kThreads>(shared.hist);
  if (thread == 0) control.above = control.equal = control.inside = control.small_count = 0;
  if (marked && words > 0 && thread < 16 && (words - 1) / 4 * 16 + thread >= end - begin)
    marks[(words - 1) / 4 * 16 + thread] = 0;
  int shift = -1;  // of the histogram of keys, when the stream fills it
  if (row.inner_end - row.inner_begin >= 2 * kSampleGroups * kThreads) {
    window = sample_window<Score, kThreads>(row, begin, end, k, shared.sums, control);
    window = {as_low(window.low), as_high(window.high), window.ties || !marked, window.reach};
  } else {
    shift = bin_shift<kBins>(window.high - window.low);
  }
  __syncthreads();

  const Streamer<Score, kThreads> streamer{row, shared, list, marks, static_cast<uint32_t>(p.list_capacity)};
  uint32_t* const mark_words = reinterpret_cast<uint32_t*>(marks);
  uint32_t* const sums = kCluster ? shared.sums : shared.hist;
  Threshold t{0, 0, false};
  bool settled = false;  // the marks are complete
  for (;;) {
    if (window.ties) {
      if (marked) streamer.template stream<true, true>(begin, end, window, shift);
      else streamer.template stream<true, false>(begin, end, window, shift);
    } else {
      streamer.template stream<false, true>(begin, end, window, -1);
    }
    Blocks::sync();
    uint32_t above = control.above, equal = control.equal, inside = control.inside, most = inside;
    if constexpr (kCluster) {
      const Control& theirs = *Blocks::peer(&control, lane % size);
      above = __reduce_add_sync(kAll, lane < size ? theirs.above : 0);
      equal = __reduce_add_sync(kAll, lane < size ? theirs.equal : 0);
      most = __reduce_max_sync(kAll, theirs.inside);
      inside = __reduce_add_sync(kAll, lane < size ? theirs.inside : 0);
    }
    const bool whole = most <= static_cast<uint32_t>(p.list_capacity);
    const uint32_t entries = control.inside;
    Window next{kLowestKey, kHighestKey, true};
    if (above >= k) {
      next.low = window.high + 1;
    } else if (above + inside >= k) {
      const uint32_t need = k - above;
      if (whole) {
        if (shift >= 0) {
          Blocks::sync();
          clear_bins<kThreads>(shared.hist);
          __syncthreads();
        }
        const Linear<kBins> bins(fmaxf(score_of(window.low), -3e38f),
                                 fminf(score_of(min(window.high, window.reach)), 3e38f));
        for (uint32_t i = thread; i < entries; i += kThreads)
          atomicAdd(shared.hist + bins.bin_at(bins.place(__uint_as_float(list[i].x))), 1);
        Blocks::sync();
        const Bin bin = find_bin<kThreads, Blocks>(shared.hist, sums, control, need);
        const float border = bins.place_of(bin.index);
        if (bin.count <= kSmall && marked) {
          Control& first = *Blocks::peer(&control, 0);
          for (uint32_t i = thread; i < entries; i += kThreads) {
            const uint2 entry = list[i];
            const float place = bins.place(__uint_as_float(entry.x));
            if (place > border) select_mark(mark_words, entry.y);
            if (place == border) {
              const uint32_t at = atomicAdd(&first.small_count, 1);
              first.small_keys[at] = ordered_key(__uint_as_float(entry.x));
              first.small_places[at] = begin * 4 + entry.y;
            }
          }
          Blocks::sync();
          if (kCluster && rank != 0) {
            if (thread < kSmall) {
              control.small_keys[thread] = first.small_keys[thread];
              control.small_places[thread] = first.small_places[thread];
            }
            __syncthreads();
          }
          const uint32_t from = static_cast<uint32_t>(begin) * 4, scores = static_cast<uint32_t>(end - begin) * 4;
          rank_small<kThreads>(control, bin.count, need - bin.above, [&](uint32_t place) {
            if (place - from < scores) select_mark(mark_words, place - from);
          });
          settled = true;
          break;
        }
        const auto source = [&](auto&& use) {
          for (uint32_t i = thread; i < entries; i += kThreads) {
            const float score = __uint_as_float(list[i].x);
            if (bins.place(score) == border) use(ordered_key(score));
          }
        };
        t = narrow<kThreads, Blocks>(source, shared.hist, sums, control, need - bin.above, bin.count);
        break;
      }
      next = {window.low, window.high, true};
      if (!window.ties) {
        next.low = window.low - 1;  // `low` was open
      } else if (shift >= 0) {
        next.low = window.low + 1 + (find_bin<kThreads, Blocks>(shared.hist, sums, control, need).index << shift);
        next.high = min(window.high, next.low + ((1u << shift) - 1));
      }
    } else if (above + inside + equal >= k) {
      t = {window.low, k - above - inside, true};
      if (whole) break;
      next.low = next.high = window.low;
    } else {
      next.high = window.low - 1;
    }
    window = {as_low(next.low), as_high(next.high), true};
    shift = bin_shift<kBins>(window.high - window.low);
    Blocks::sync();  // everybody has read the counts
    clear_bins<kThreads>(shared.hist);
    if (thread == 0) control.above = control.equal = control.inside = 0;
    __syncthreads();
  }

  uint32_t block_above = 0, block_equal = 0;
  if (marked) {
    const uint32_t entries = control.inside;
    if (!settled) {
      if (t.ties && t.key != window.low) {
        for (uint32_t w = thread; w < words; w += kThreads) mark_words[w] &= kSelected;
        __syncthreads();
      }
      for (uint32_t i = thread; i < entries; i += kThreads) {
        const uint2 entry = list[i];
        const uint32_t key = ordered_key(__uint_as_float(entry.x));
        const uint32_t bit = entry.y / 4 % 4 * 8 + entry.y % 4;
        if (key > t.key) atomicOr(mark_words + entry.y / 16, 1u << bit);
        else if (t.ties && key == t.key) atomicOr(mark_words + entry.y / 16, 16u << bit);
      }
    }
    __syncthreads();
    const uint32_t steps = (words + kThreads * kUnit - 1) / (kThreads * kUnit);
    uint32_t warp_above, warp_equal;
    count_marks<kUnit>(mark_words, words, steps, warp_above, warp_equal);
    if constexpr (kCluster) {
      if (thread == 0) control.totals[0] = control.totals[1] = 0;
      __syncthreads();
      if (lane == 0) {
        atomicAdd(&control.totals[0], warp_above);
        atomicAdd(&control.totals[1], warp_equal);
      }
      Blocks::sync();
      if (lane < rank) {
        const Control& theirs = *Blocks::peer(&control, lane);
        block_above = theirs.totals[0], block_equal = theirs.totals[1];
      }
      block_above = __reduce_add_sync(kAll, block_above);
      block_equal = __reduce_add_sync(kAll, block_equal);
      Blocks::arrive();  // no block leaves before its counts were read
    }
    emit<kThreads, kUnit>(mark_words, words, t.quota, block_above, block_equal, out, base - row.head + begin * 4,
                          shared.stage, control, warp_above, warp_equal, steps);
    Blocks::wait();
    return;
  }

  // More scores than marks: count, then mark and write part by part.
  const uint32_t bound = t.ties ? t.key : as_high(t.key);
  const Window final{bound, bound, true};
  Blocks::sync();
  if (thread == 0) control.above = control.equal = 0;
  __syncthreads();
  if (kCluster) {
    streamer.template stream<true, false>(begin, end, final, -1);
    Blocks::sync();
    if (lane < rank) {
      const Control& theirs = *Blocks::peer(&control, lane);
      block_above = theirs.above, block_equal = theirs.equal;
    }
    block_above = __reduce_add_sync(kAll, block_above);
    block_equal = __reduce_add_sync(kAll, block_equal);
    Blocks::sync();
  }
  for (int32_t part = begin; part < end; part += p.mark_groups) {
    const int32_t part_end = min(end, part + p.mark_groups);
    const uint32_t part_words = (part_end - part + 3) / 4;
    __syncthreads();
    if (thread < 16) marks[(part_words - 1) / 4 * 16 + thread] = 0;
    if (thread == 0) control.above = control.equal = 0;
    __syncthreads();
    streamer.template stream<true, true>(part, part_end, final, -1);
    __syncthreads();
    const uint32_t steps = (part_words + kThreads * kUnit - 1) / (kThreads * kUnit);
    uint32_t warp_above, warp_equal;
    const uint32_t* mark_words = reinterpret_cast<const uint32_t*>(marks);
    count_marks<kUnit>(mark_words, part_words, steps, warp_above, warp_equal);
    emit<kThreads, kUnit>(mark_words, part_words, t.quota, block_above, block_equal, out, base - row.head + part * 4,
                          shared.stage, control, warp_above, warp_equal, steps);
    block_above += control.above, block_equal += control.equal;
  }
}

// Where the architecture has no clusters, the kernel with them is empty.
template <typename Score, int kThreads, bool kCluster, int kBlocks>
__global__ void __launch_bounds__(kThreads, kBlocks) streaming_select(const __grid_constant__ Problem p) {
#if __CUDA_ARCH__ >= 900
  stream_row<Score, kThreads, kCluster>(p);
#else
  if constexpr (!kCluster) stream_row<Score, kThreads, false>(p);
#endif
}

}  // namespace kvc::topk
