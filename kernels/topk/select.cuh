// What the kernels of top-k selection share: keys, teams of blocks, bins, marks. Device code, free of torch.
//
// A row belongs to a team: one block, or on sm_90 and later a cluster of them. The kernels (resident.cuh, spread.cuh,
// stream.cuh) differ in how they look at the row. All count its scores in bins to find the k-th largest, and mark what
// is selected, one byte per four scores: the low nibble says "selected", the high one "equal to the k-th largest, of
// which the first few are selected". Counting marks gives every selected score its place in the output, so nothing is
// sorted.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "topk/key.h"

namespace kvc::topk {

constexpr uint32_t kAll = 0xffffffffu;
constexpr float kInfinity = __builtin_huge_valf();
constexpr uint32_t kHighestKey = 0xff800000u;  // of +inf
constexpr int kSmall = 64;                     // members of a bin that are ranked by comparing all pairs

__device__ __forceinline__ float score_of(uint32_t key) {
  return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}
// No score has the key of -0, but a window may end there, and floating-point comparison would take it for 0.
__device__ __forceinline__ uint32_t as_low(uint32_t key) { return key == 0x7fffffffu ? 0x80000000u : key; }
__device__ __forceinline__ uint32_t as_high(uint32_t key) { return key == 0x7fffffffu ? 0x7ffffffeu : key; }

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(__half x) { return __half2float(x); }
__device__ __forceinline__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }

struct Problem {
  const void* scores;
  int64_t row_stride;
  const int32_t* lengths;
  const int32_t* bases;
  int32_t* out;
  int64_t k;
  int32_t width;
  int32_t list_capacity;  // streaming: entries of the list of one block
  int32_t mark_groups;    // streaming: groups of four scores a block has marks for; a multiple of 1024
};

// Four scores in one aligned load.
template <typename Score>
struct Group;
template <>
struct Group<float> {
  float4 raw;
  __device__ __forceinline__ void load(const float* p) { raw = __ldg(reinterpret_cast<const float4*>(p)); }
  __device__ __forceinline__ void to(float (&x)[4]) const { x[0] = raw.x, x[1] = raw.y, x[2] = raw.z, x[3] = raw.w; }
};
template <typename Score>
struct Group16 {
  uint2 raw;
  __device__ __forceinline__ void load(const Score* p) { raw = __ldg(reinterpret_cast<const uint2*>(p)); }
};
template <>
struct Group<__half> : Group16<__half> {
  __device__ __forceinline__ void to(float (&x)[4]) const {
    const float2 a = __half22float2(reinterpret_cast<const __half2&>(raw.x));
    const float2 b = __half22float2(reinterpret_cast<const __half2&>(raw.y));
    x[0] = a.x, x[1] = a.y, x[2] = b.x, x[3] = b.y;
  }
};
template <>
struct Group<__nv_bfloat16> : Group16<__nv_bfloat16> {
  __device__ __forceinline__ void to(float (&x)[4]) const {
    x[0] = __uint_as_float(raw.x << 16), x[1] = __uint_as_float(raw.x & 0xffff0000u);
    x[2] = __uint_as_float(raw.y << 16), x[3] = __uint_as_float(raw.y & 0xffff0000u);
  }
};

// A row cut into groups that lie on multiples of four scores in memory: its first and last group may be partly outside.
template <typename Score>
struct Row {
  const Score* base;  // of group 0
  int32_t head;       // scores of group 0 before the row
  int32_t length, groups;
  int32_t inner_begin, inner_end;  // groups wholly inside

  __device__ __forceinline__ Row(const Problem& p, int64_t row, int32_t length_) {
    const Score* begin = static_cast<const Score*>(p.scores) + row * p.row_stride;
    head = static_cast<int32_t>(reinterpret_cast<uintptr_t>(begin) % (4 * sizeof(Score)) / sizeof(Score));
    base = begin - head;
    length = length_;
    groups = static_cast<int32_t>((static_cast<uint32_t>(head) + length + 3) / 4);
    inner_begin = head > 0;
    inner_end = static_cast<int32_t>((static_cast<uint32_t>(head) + length) / 4);
  }
  __device__ __forceinline__ const Score* at(int32_t group) const { return base + static_cast<int64_t>(group) * 4; }
  __device__ __forceinline__ bool holds(int32_t group, int j) const {
    return static_cast<uint32_t>(group) * 4 + j - head < static_cast<uint32_t>(length);
  }
};

// The blocks that work on one row.
template <bool kCluster>
struct Team {
  static __device__ __forceinline__ uint32_t size() {
    if constexpr (!kCluster) return 1;
#if __CUDA_ARCH__ >= 900
    uint32_t n;
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(n));
    return n;
#endif
    return 1;
  }
  static __device__ __forceinline__ uint32_t rank() {
    if constexpr (!kCluster) return 0;
#if __CUDA_ARCH__ >= 900
    uint32_t r;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
    return r;
#endif
    return 0;
  }
  static __device__ __forceinline__ void arrive() {
#if __CUDA_ARCH__ >= 900
    if constexpr (kCluster) asm volatile("barrier.cluster.arrive.aligned;" ::: "memory");
#endif
  }
  static __device__ __forceinline__ void wait() {
#if __CUDA_ARCH__ >= 900
    if constexpr (kCluster) asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
#endif
  }
  static __device__ __forceinline__ void sync() {
    if constexpr (kCluster) arrive(), wait();
    else __syncthreads();
  }
  // The same shared variable in another block of the team.
  template <typename T>
  static __device__ __forceinline__ T* peer(T* mine, uint32_t rank) {
#if __CUDA_ARCH__ >= 900
    if constexpr (kCluster) {
      uint64_t theirs;
      asm("mapa.u64 %0, %1, %2;" : "=l"(theirs) : "l"(mine), "r"(rank));
      return reinterpret_cast<T*>(theirs);
    }
#endif
    return mine;
  }
};

struct Bin {
  uint32_t index, above, count;  // `above`: members of higher bins
};

struct Control {
  uint32_t above, equal, inside;
  uint32_t small_count;
  uint32_t totals[2];  // selected and equal marks of the block
  uint32_t edge[4];    // lowest and highest key of what is looked at
  uint32_t warps[2][32];
  Bin bins[2];
  uint32_t members;
  uint32_t small_keys[kSmall], small_places[kSmall];
};

// What is known about the k-th largest.
struct Threshold {
  uint32_t key;    // greater keys are selected
  uint32_t quota;  // as many of the equal ones, from the left
  bool ties;       // whether equal ones count at all
};

__device__ __forceinline__ uint32_t inclusive_sum(uint32_t value, uint32_t lane) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const uint32_t other = __shfl_up_sync(kAll, value, step);
    if (lane >= step) value += other;
  }
  return value;
}

// Bins of equal width between two scores; what lies outside falls into the first or the last. The map is monotonic
// whatever rounding does, which is all that is asked of it. A bin is known by its number plus 2^23, as a float.
template <int kBins>
struct Linear {
  float scale, shift;
  __device__ __forceinline__ Linear(float low, float high) {
    scale = 1.0f / (high - low);
    if (!(scale < __builtin_huge_valf() && scale > 0.0f)) scale = 0.0f;
    shift = -low * scale;
    if (!(fabsf(shift) < __builtin_huge_valf())) scale = shift = 0.0f;
  }
  __device__ __forceinline__ float place(float x) const {
    return fmaf(__saturatef(fmaf(x, scale, shift)), kBins - 1, 8388608.0f);
  }
  // Keeps the compiler from holding places for a second use: computing them again is cheaper than the registers.
  __device__ __forceinline__ void forget() { asm volatile("" : "+f"(scale), "+f"(shift)); }
  static __device__ __forceinline__ float place_of(uint32_t bin) { return __uint_as_float(0x4b000000u + bin); }
  static __device__ __forceinline__ uint32_t bin_at(float place) { return __float_as_uint(place) - 0x4b000000u; }
};

// Shift that brings a span of keys into `kBins` bins.
template <int kBins>
__device__ __forceinline__ int bin_shift(uint32_t span) {
  constexpr int kBits = 31 - __builtin_clz(kBins);
  return max(0, 32 - __clz(span) - kBits);
}

// Bins are searched from the top one down, four a thread.
template <int kThreads>
__device__ __forceinline__ constexpr uint32_t first_bin(uint32_t thread) {
  return 4 * kThreads - 4 - 4 * thread;
}

// The bin of the rank-th largest, 1 <= rank, for up to two ranks; a rank past all members gives count 0. `own`: members
// of this thread's bins. One warp searches, which leaves the issue slots to other blocks. Three barriers.
template <int kThreads, int kRanks>
__device__ __forceinline__ void find_bins(const uint32_t* hist, Control& control, uint32_t own,
                                          const uint32_t (&ranks)[kRanks], Bin (&found)[kRanks], uint32_t& total) {
  constexpr int kWarps = kThreads / 32;
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  own = __reduce_add_sync(kAll, own);
  if (lane == 0) control.warps[0][warp] = own;
  __syncthreads();
  if (warp < kRanks) {
    const uint32_t rank = warp == 0 ? ranks[0] : ranks[kRanks - 1];
    const uint32_t before = inclusive_sum(lane < kWarps ? control.warps[0][lane] : 0, lane);
    const uint32_t reached = __ballot_sync(kAll, before >= rank);
    Bin bin{0, 0, 0};
    if (reached != 0) {
      const int part = __ffs(reached) - 1;
      uint32_t above = __shfl_sync(kAll, before, (part + 31) % 32);
      if (part == 0) above = 0;
      const uint32_t first = first_bin<kThreads>(part * 32 + lane);
      const uint4 bins = *reinterpret_cast<const uint4*>(hist + first);
      const uint32_t sum = bins.x + bins.y + bins.z + bins.w;
      const uint32_t through = inclusive_sum(sum, lane);
      const int owner = __ffs(__ballot_sync(kAll, above + through >= rank)) - 1;
      above += through - sum;
      bin = {first + 3, above, bins.w};
      if (bin.above + bin.count < rank) bin = {bin.index - 1, bin.above + bin.count, bins.z};
      if (bin.above + bin.count < rank) bin = {bin.index - 1, bin.above + bin.count, bins.y};
      if (bin.above + bin.count < rank) bin = {bin.index - 1, bin.above + bin.count, bins.x};
      if (lane == owner) control.bins[warp] = bin;
    } else if (lane == 0) {
      control.bins[warp] = bin;
    }
    if (threadIdx.x == 31) control.members = before;
  }
  __syncthreads();
#pragma unroll
  for (int r = 0; r < kRanks; ++r) found[r] = control.bins[r];
  total = control.members;
}

template <int kThreads>
__device__ __forceinline__ void clear_bins(uint32_t* hist) {
  reinterpret_cast<uint4*>(hist)[threadIdx.x] = uint4{0, 0, 0, 0};
}

// A team's histogram in `sums` of each block; returns the members of this thread's four bins.
template <int kThreads, class Team>
__device__ __forceinline__ uint32_t sum_bins(uint32_t* hist, uint32_t* sums) {
  const uint32_t first = first_bin<kThreads>(threadIdx.x);
  uint4 own = *reinterpret_cast<const uint4*>(hist + first);
  if (hist == sums) return own.x + own.y + own.z + own.w;
  const uint32_t size = Team::size(), rank = Team::rank();
#pragma unroll 8
  for (uint32_t r = 1; r < size; ++r) {
    const uint32_t other_rank = rank + r < size ? rank + r : rank + r - size;
    const uint4 other = *reinterpret_cast<const uint4*>(Team::peer(hist + first, other_rank));
    own.x += other.x, own.y += other.y, own.z += other.z, own.w += other.w;
  }
  *reinterpret_cast<uint4*>(sums + first) = own;
  return own.x + own.y + own.z + own.w;
}

template <int kThreads, class Team>
__device__ __forceinline__ Bin find_bin(uint32_t* hist, uint32_t* sums, Control& control, uint32_t rank) {
  const uint32_t ranks[1] = {rank};
  Bin bins[1];
  uint32_t total;
  find_bins<kThreads, 1>(sums, control, sum_bins<kThreads, Team>(hist, sums), ranks, bins, total);
  return bins[0];
}

// The lowest and highest key a team's threads hold, in control.edge of each block; `edge` was set to {kAll, 0} and
// synchronised upon. Ends in a barrier of the team.
template <class Team>
__device__ __forceinline__ void find_edges(uint32_t& low, uint32_t& high, Control& control) {
  low = __reduce_min_sync(kAll, low);
  high = __reduce_max_sync(kAll, high);
  const uint32_t lane = threadIdx.x % 32, size = Team::size();
  if (lane == 0 && low <= high) {
    atomicMin(&control.edge[0], low);
    atomicMax(&control.edge[1], high);
  }
  Team::sync();
  const Control& theirs = *Team::peer(&control, lane % size);
  low = __reduce_min_sync(kAll, theirs.edge[0]);
  high = __reduce_max_sync(kAll, theirs.edge[1]);
}

// The rank-th largest of the keys of `source` for which `member` holds at first, by rounds of counting in an ever
// smaller range. For bins with more members than can be ranked in one go: plateaus, or scores of very unequal sizes.
template <int kThreads, class Team, class Source>
__device__ __forceinline__ Threshold narrow(Source&& source, uint32_t* hist, uint32_t* sums, Control& control,
                                            uint32_t rank, uint32_t count) {
  uint32_t low = 0, high = kAll;
  for (;;) {
    Team::sync();
    if (threadIdx.x == 0) control.edge[0] = kAll, control.edge[1] = 0;
    clear_bins<kThreads>(hist);
    __syncthreads();
    uint32_t least = kAll, most = 0;
    source([&](uint32_t key) {
      if (key >= low && key <= high) least = min(least, key), most = max(most, key);
    });
    find_edges<Team>(least, most, control);
    if (least == most) return {least, rank, true};
    if (rank == count) return {least - 1, 0, false};
    low = least, high = most;
    const int shift = bin_shift<4 * kThreads>(high - low);
    source([&](uint32_t key) {
      if (key >= low && key <= high) atomicAdd(hist + ((key - low) >> shift), 1);
    });
    Team::sync();
    const Bin bin = find_bin<kThreads, Team>(hist, sums, control, rank);
    rank -= bin.above;
    count = bin.count;
    low += bin.index << shift;
    high = min(high, low + ((1u << shift) - 1));
  }
}

// Of `count` small members, selects those with the `need` highest keys, lower places first among equals.
template <int kThreads, class Select>
__device__ __forceinline__ void rank_small(const Control& control, uint32_t count, uint32_t need, Select&& select) {
  const uint32_t lane = threadIdx.x % 32;
  for (uint32_t i = threadIdx.x / 32; i < count; i += kThreads / 32) {
    const uint32_t key = control.small_keys[i], place = control.small_places[i];
    uint32_t better = 0;
#pragma unroll
    for (uint32_t first = 0; first < kSmall; first += 32) {
      const uint32_t j = first + lane;
      const uint32_t other = j < count ? control.small_keys[j] : 0, where = control.small_places[j];
      better += __popc(__ballot_sync(kAll, other > key || (other == key && where < place)));
    }
    if (better < need && lane == 0) select(place);
  }
}

__device__ __forceinline__ void select_mark(uint32_t* mark_words, uint32_t place) {
  atomicOr(mark_words + place / 16, 1u << (place / 4 % 4 * 8 + place % 4));
}

// Rows that are selected whole.
template <int kThreads, class Team>
__device__ __forceinline__ void emit_all(int32_t* out, int64_t k, int32_t length, int32_t base) {
  for (int64_t i = Team::rank() * kThreads + threadIdx.x; i < k; i += Team::size() * kThreads)
    out[i] = i < length ? base + static_cast<int32_t>(i) : -1;
}

constexpr uint32_t kSelected = 0x0f0f0f0fu, kEqual = 0xf0f0f0f0u;

// The low nibbles of four bytes, side by side.
__device__ __forceinline__ uint32_t pack_nibbles(uint32_t x) {
  x = (x | x >> 4) & 0x00ff00ffu;
  return (x | x >> 8) & 0xffffu;
}

// For lanes whose masks have many bits: all lanes take the bits of one mask, or of two of 16, at a time instead of each
// its own one by one. `first` bits come before a lane's mask; calls put(bits before, lane of the mask, bit).
template <int kBits>
constexpr uint32_t kMany = kBits == 16 ? 13 : 24;  // what half of all bits set seldom reaches
template <int kBits, typename Put>
__device__ __forceinline__ void each_bit_abreast(uint32_t mask, uint32_t first, Put&& put) {
  static_assert(kBits == 16 || kBits == 32);
  constexpr uint32_t kMasks = 32 / kBits;
  const uint32_t lane = threadIdx.x % 32;
#pragma unroll 4
  for (uint32_t from = 0; from < 32; from += kMasks) {
    uint32_t bits = __shfl_sync(kAll, mask, from);
    if (kMasks == 2) bits |= __shfl_sync(kAll, mask, from + 1) << 16;
    const uint32_t before = __shfl_sync(kAll, first, from) + __popc(bits & ((1u << lane) - 1));
    if (bits >> lane & 1) put(before, from + lane / kBits, lane % kBits);
  }
}

constexpr uint32_t kStage = 1024;  // indices a warp collects before it writes them

// Counts of the marks of this warp's part of `words`, in emit()'s division. Marks are zero up to a multiple of 16
// bytes.
template <int kUnit>
__device__ __forceinline__ void count_marks(const uint32_t* marks, uint32_t words, uint32_t steps, uint32_t& above,
                                            uint32_t& equal) {
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32_t begin = warp * steps * (8 * kUnit), end = min(begin + steps * (8 * kUnit), (words + 3) / 4);
  above = equal = 0;
  for (uint32_t i = begin + lane; i < end; i += 32) {
    const uint4 w = reinterpret_cast<const uint4*>(marks)[i];
    above += __popc((w.x & kSelected) | (w.y & kSelected) << 4) + __popc((w.z & kSelected) | (w.w & kSelected) << 4);
    equal += __popc((w.x & kEqual) | (w.y & kEqual) >> 4) + __popc((w.z & kEqual) | (w.w & kEqual) >> 4);
  }
  above = __reduce_add_sync(kAll, above);
  equal = __reduce_add_sync(kAll, equal);
}

// Writes the indices of the marked scores. A lane takes kUnit words of marks (16 scores each) at a time; a warp
// collects what it found in `stage`, so that it writes whole lines. `place` and `ties` are the numbers of selected and
// of equal scores before those of this block. One barrier.
template <int kThreads, int kUnit, uint32_t kStageSize = kStage>
__device__ __forceinline__ void emit(const uint32_t* marks, uint32_t words, uint32_t quota, uint32_t place,
                                     uint32_t ties, int32_t* out, int32_t first_index, uint16_t* stage,
                                     Control& control, uint32_t warp_above, uint32_t warp_equal, uint32_t steps) {
  constexpr uint32_t kWarps = kThreads / 32;
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (lane == 0) control.warps[0][warp] = warp_above, control.warps[1][warp] = warp_equal;
  __syncthreads();
  const bool before = lane < kWarps && lane < warp;
  place += __reduce_add_sync(kAll, before ? control.warps[0][lane] : 0);
  ties += __reduce_add_sync(kAll, before ? control.warps[1][lane] : 0);
  stage += warp * kStageSize;
  for (uint32_t step = 0; step < steps; ++step) {
    const uint32_t first_word = (warp * steps + step) * (32 * kUnit), word = first_word + lane * kUnit;
    if (first_word >= words) break;
    uint32_t marked[kUnit];
    uint32_t counts = 0;
#pragma unroll
    for (int u = 0; u < kUnit; ++u) {
      marked[u] = word + u < words ? marks[word + u] : 0;
      counts += __popc(marked[u] & kSelected) | __popc(marked[u] & kEqual) << 16;
    }
    const uint32_t through = inclusive_sum(counts, lane), total = __shfl_sync(kAll, through, 31);
    const uint32_t ties_after = ties + (total >> 16);
    const uint32_t count = (total & 0xffff) + min(ties_after, quota) - min(ties, quota);
    uint32_t tie = ties + ((through - counts) >> 16);
    uint32_t at = ((through - counts) & 0xffff) + min(tie, quota) - min(ties, quota);
    int32_t* to = out + place + min(ties, quota);
    const int32_t index = first_index + static_cast<int32_t>(first_word * 16);
    const bool staged = count <= kStageSize;
    uint32_t bits[(kUnit + 1) / 2] = {};
#pragma unroll
    for (int u = 0; u < kUnit; ++u) {
      uint32_t equal = marked[u] & kEqual;
      if (equal != 0) {
        const uint32_t found = __popc(equal);
        if (tie >= quota) {
          equal = 0;
        } else if (tie + found > quota) {  // once a row
          uint32_t rest = equal;
          for (uint32_t n = quota - tie; n != 0; --n) rest &= rest - 1;
          equal ^= rest;
        }
        tie += found;
      }
      bits[u / 2] |= pack_nibbles((marked[u] & kSelected) | equal >> 4) << u % 2 * 16;
    }
    const auto put = [&](uint32_t position, uint32_t offset) {
      if (staged) stage[position] = static_cast<uint16_t>(offset);
      else to[position] = index + static_cast<int32_t>(offset);
    };
    const uint32_t offset = lane * kUnit * 16;
    uint32_t next[(kUnit + 1) / 2], rest = 0;  // several masks at a time, which do not wait for each other
    constexpr int kMask = kUnit == 1 ? 16 : 32;
    uint32_t most = 0;
#pragma unroll
    for (int u = 0; u < (kUnit + 1) / 2; ++u) {
      const uint32_t own = __popc(bits[u]);
      next[u] = at, at += own, rest |= bits[u], most = max(most, own);
    }
    const bool many = __reduce_max_sync(kAll, most) > kMany<kMask>;
    if (many) {
#pragma unroll
      for (int u = 0; u < (kUnit + 1) / 2; ++u)
        each_bit_abreast<kMask>(bits[u], next[u], [&](uint32_t before, uint32_t of, uint32_t bit) {
          to[before] = index + static_cast<int32_t>(of * kUnit * 16 + u * 32 + bit);
        });
      rest = 0;
    }
    while (rest != 0) {
      rest = 0;
#pragma unroll
      for (int u = 0; u < (kUnit + 1) / 2; ++u) {
        if (bits[u] != 0) put(next[u]++, offset + u * 32 + __ffs(bits[u]) - 1);
        bits[u] &= bits[u] - 1;
        rest |= bits[u];
      }
    }
    if (staged && !many) {
      __syncwarp();
      for (uint32_t i = lane; i < count; i += 32) to[i] = index + stage[i];
      __syncwarp();
    }
    place += total & 0xffff;
    ties = ties_after;
  }
}

// The marks of a row of at most kGroups groups a thread: thread t has those of the groups q * kThreads + t. Writes from
// registers, which takes less time than emit() but more of the memory system: for blocks that have it for themselves.
template <int kThreads, int kGroups>
struct GroupMarks {
  static constexpr uint32_t kWarps = kThreads / 32, kCounts = kGroups * kWarps;
  uint32_t marks[kGroups];
  uint32_t before[kGroups];  // selected ones of lower lanes, equal ones in the upper half

  // Leaves what each warp has in `counts`, to be synchronised upon.
  __device__ __forceinline__ void count(uint32_t (&counts)[kCounts]) {
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (uint32_t q = 0; q < kGroups; ++q) {
      const uint32_t own = __popc(marks[q] & kSelected) | __popc(marks[q] & kEqual) << 16;
      const uint32_t through = inclusive_sum(own, lane);
      before[q] = through - own;
      if (lane == 31) counts[q * kWarps + warp] = through;
    }
  }
  // Writes the indices of the marked scores, `quota` of the equal ones; returns how many they are.
  __device__ __forceinline__ uint32_t emit(const uint32_t (&counts)[kCounts], uint32_t quota, int32_t* out,
                                           int32_t first_index) const {
    constexpr uint32_t kEach = (kCounts + 31) / 32;  // counts of a lane
    static_assert(kWarps % kEach == 0);
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    uint32_t sum = 0, earlier = 0;  // in this lane, before the count of this warp
#pragma unroll
    for (uint32_t i = 0; i < kEach; ++i) {
      if (i == warp % kEach) earlier = sum;
      sum += lane * kEach + i < kCounts ? counts[lane * kEach + i] : 0;
    }
    const uint32_t through = inclusive_sum(sum, lane), total = __shfl_sync(kAll, through, 31);
    earlier += through - sum;
#pragma unroll
    for (uint32_t q = 0; q < kGroups; ++q) {
      const uint32_t begin = __shfl_sync(kAll, earlier, (q * kWarps + warp) / kEach) + before[q];
      if (marks[q] == 0) continue;
      uint32_t place = begin & 0xffff, tie = begin >> 16;
      const int32_t index = first_index + static_cast<int32_t>((q * kThreads + threadIdx.x) * 4);
#pragma unroll
      for (uint32_t j = 0; j < 4; ++j) {
        const uint32_t selected = marks[q] >> j & 1, equal = marks[q] >> (j + 4) & 1;
        if (selected || (equal && tie < quota)) out[place + min(tie, quota)] = index + static_cast<int32_t>(j);
        place += selected, tie += equal;
      }
    }
    return (total & 0xffff) + min(total >> 16, quota);
  }
};

// Keeps the compiler from computing ahead what is seldom needed.
__device__ __forceinline__ float hidden(float x) {
  asm volatile("" : "+f"(x));
  return x;
}
// 1.0 or 0.0, in one instruction.
__device__ __forceinline__ float is_greater(float a, float b) {
  float r;
  asm("set.gt.f32.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}
__device__ __forceinline__ float is_at_least(float a, float b) {
  float r;
  asm("set.ge.f32.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}
__device__ __forceinline__ float is_equal(float a, float b) {
  float r;
  asm("set.eq.f32.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}
// Flags are gathered as the bits of a sum, where there are more units to add than to shift and to select: a sum that
// starts as 2^23 holds 23 of them.
constexpr float kNoFlags = 8388608.0f;
__device__ __forceinline__ uint32_t flags(float low, float high) {  // 16 of each
  return __byte_perm(__float_as_uint(low), __float_as_uint(high), 0x5410);
}

}  // namespace kvc::topk
