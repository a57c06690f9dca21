// Settling ties in one look at a row: the pivot is the least named score; what is wanted are the scores above it, and
// of those equal to it, named or not, as many as were named, lowest index first.
#pragma once

#include "common/async.cuh"
#include "topk/select.cuh"

namespace kvc::topk {

struct Settlement {
  Problem problem;
  const void* provisional;  // [rows, k]
  bool wide;                // of int64, else of int32
  int32_t part;             // settle_parts: scores of a warp, a multiple of 32
};

constexpr int kMaxTeam = 8;  // blocks that settle a row together

// What the warps of a team tell all of them, in the order of the row.
template <int kWarps>
struct Told {
  uint64_t complete[2];
  uint2 named[kWarps];  // the least key, and how many
  uint2 found[kWarps];  // scores above the pivot, and those equal to it
};

// Messages from warp to block in a cluster. Unlike the cluster's barrier they do not wait for loads under way.
struct Mail {
  static __device__ __forceinline__ uint32_t address(const void* shared) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  }
  static __device__ __forceinline__ void create(uint64_t* complete) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(address(complete)) : "memory");
#endif
  }
  // What is to come; some of it may have come.
  static __device__ __forceinline__ void expect(uint64_t* complete, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address(complete)), "r"(bytes)
                 : "memory");
#endif
  }
  // All threads of a block say that it may be sent to, and wait for the others.
  static __device__ __forceinline__ void open() {
#if __CUDA_ARCH__ >= 900
    __syncwarp();  // thread 0 has been elsewhere
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
  }
  static __device__ __forceinline__ void wait_for_others() { Team<true>::wait(); }
  static __device__ __forceinline__ void send(uint2* to, uint64_t* complete, uint32_t rank, uint2 value) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{\n.reg .b32 to, complete;\n"
        "mapa.shared::cluster.u32 to, %0, %2;\nmapa.shared::cluster.u32 complete, %1, %2;\n"
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [to], {%3, %4}, [complete];\n}" ::"r"(
            address(to)),
        "r"(address(complete)), "r"(rank), "r"(value.x), "r"(value.y)
        : "memory");
#endif
  }
  static __device__ __forceinline__ void wait(uint64_t* complete) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{\n.reg .pred done;\nagain:\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], 0;\n@!done bra again;\n}" ::"r"(
            address(complete))
        : "memory");
#endif
  }
};

// Rows that pass through shared memory, each warp on a part of its own: kRounds times 32 * kBits scores. A block finds
// the named scores of its row there. The blocks of a cluster share the names and look their scores up before they load
// the row, since each other's loads would keep them waiting. Dynamic shared memory: Told, then the scores.
template <typename Score, int kThreads, int kBits, int kRounds, bool kCluster, int kBlocks>
__global__ void __launch_bounds__(kThreads, kBlocks) settle_parts(const __grid_constant__ Settlement s) {
  static_assert(kCluster || kRounds == 1);
  constexpr int32_t kWarps = kThreads / 32, kVector = 16 / sizeof(Score), kStage = 32 * kBits;
  constexpr int kNames = 8, kBatch = 4;  // that a thread takes at a time
  using Mine = Told<(kCluster ? kMaxTeam : 1) * kWarps>;
  extern __shared__ __align__(16) uint8_t shared[];
  Mine& told = *reinterpret_cast<Mine*>(shared);

  const Problem& p = s.problem;
  const auto size = static_cast<int32_t>(Team<kCluster>::size()), rank = static_cast<int32_t>(Team<kCluster>::rank());
  const int32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, me = rank * kWarps + warp;
  if constexpr (kCluster) {
    if (threadIdx.x == 0)
      for (uint64_t& complete : told.complete) Mail::create(&complete);
    Mail::open();
  }
  const int64_t row_index = blockIdx.x / static_cast<uint32_t>(size);
  int32_t* out = p.out + row_index * p.k;
  const int32_t given = __ldg(p.lengths + row_index);
  const int32_t base = p.bases ? __ldg(p.bases + row_index) : 0;
  const int32_t thread = me * 32 + lane, threads = size * kThreads, k = static_cast<int32_t>(p.k);

  int32_t names[kNames];
  const int32_t* words = static_cast<const int32_t*>(s.provisional) + ((row_index * k + thread) << int{s.wide});
  int32_t left = k - thread;
  const auto load_names = [&] {
    if (s.wide) {
#pragma unroll
      for (int i = 0; i < kNames; ++i) {
        int2 name{-1, -1};
        if (i * threads < left) name = __ldg(reinterpret_cast<const int2*>(words) + i * threads);
        names[i] = name.y == 0 ? name.x : -1;
      }
    } else {
#pragma unroll
      for (int i = 0; i < kNames; ++i) names[i] = i * threads < left ? __ldg(words + i * threads) : -1;
    }
  };
  load_names();

  // Positions count from the 16-byte boundary at or before the row.
  const Score* const begin = static_cast<const Score*>(p.scores) + row_index * p.row_stride;
  const int32_t head = static_cast<int32_t>(reinterpret_cast<uintptr_t>(begin) % 16 / sizeof(Score));
  const Score* const from = begin - head;
  const int32_t first = me * s.part, last = first + s.part;
  Score* const scores = reinterpret_cast<Score*>(shared + sizeof(Mine));
  Score* const mine = scores + warp * (kCluster ? kStage : s.part);
  const auto load = [&](int32_t round, int32_t length) {
    const int32_t at = first + round * kStage, stop = min(at + kStage, last), end = head + length;
    const int32_t inner = end / kVector * kVector;
#pragma unroll 4
    for (int32_t i = max(at, head > 0 ? kVector : 0) + lane * kVector; i < min(stop, inner); i += 32 * kVector)
      copy_async(mine + (i - at), from + i);
    // What shares its 16 bytes with others.
    const int32_t edge = lane < kVector ? lane : inner - kVector + lane;
    if (lane < 2 * kVector && edge >= max(at, head) && edge < min(stop, end) && (edge >= inner || head > 0))
      mine[edge - at] = from[edge];
  };
  if constexpr (!kCluster) {
    load(0, p.width);  // before the length is known
    wait_all_async();
    __syncthreads();
  }
  const int32_t length = min(max(given, 0), p.width);

  float least = kInfinity;
  uint32_t named = 0;
  for (int32_t rest = k;;) {
    Score x[kNames] = {};
    uint32_t there = 0;
#pragma unroll
    for (int b = 0; b < kNames; b += kBatch) {
      if (b * threads >= rest) continue;
#pragma unroll
      for (int i = b; i < b + kBatch; ++i) {
        const bool counts = static_cast<uint32_t>(names[i]) < static_cast<uint32_t>(length);
        x[i] = (kCluster ? from : scores)[head + (counts ? names[i] : 0)];
        there |= uint32_t{counts} << i;
      }
    }
    if (kCluster && rest == k) {
      __syncthreads();  // no warp's row gets ahead of another's named scores
      load(0, length);
    }
#pragma unroll
    for (int i = 0; i < kNames; ++i)
      if (there >> i & 1) least = fminf(least, fmaxf(widen(x[i]), -kInfinity));
    named += __popc(there);
    const int32_t step = kNames * threads;
    if ((rest -= step) <= 0) break;
    words += step << int{s.wide}, left -= step;
    load_names();
  }
  const auto tell = [&](uint2* all, uint64_t* complete, uint2 value) {
    if constexpr (kCluster) {
      if (lane < size) Mail::send(all + me, complete, lane, value);
      Mail::wait(complete);
      __syncwarp();  // before a lane writes where another has read
    } else {
      if (lane == 0) all[me] = value;
      __syncthreads();
    }
  };
  uint32_t key = __reduce_min_sync(kAll, ordered_key(least));
  named = __reduce_add_sync(kAll, named);
  if constexpr (kCluster) {
    Mail::wait_for_others();
    if (threadIdx.x == 0)
      for (uint64_t& complete : told.complete) Mail::expect(&complete, size * kWarps * sizeof(uint2));
    __syncwarp();
  }
  tell(told.named, &told.complete[0], uint2{key, named});
  named = 0;
  for (int32_t i = lane; i < size * kWarps; i += 32) key = min(key, told.named[i].x), named += told.named[i].y;
  key = __reduce_min_sync(kAll, key), named = __reduce_add_sync(kAll, named);

  // Lane by lane, kBits scores each: which are above the pivot, and in `ties` which equal it.
  const float pivot = score_of(key);
  uint32_t above[kRounds], ties[kRounds], more = 0, equal = 0;
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    wait_all_async();
    __syncwarp();
    const int32_t at = first + round * kStage, stop = min(at + kStage, last);
    const Score* const stage = mine + lane;
    uint32_t higher = 0, reached = 0;
#pragma unroll
    for (int chunk = 0; chunk < kBits; chunk += 8) {
      if (at + chunk * 32 >= stop) break;
#pragma unroll
      for (int c = chunk; c < chunk + 8; ++c) {
        const float x = widen(stage[c * 32]);
        const uint32_t greater = __ballot_sync(kAll, x > pivot), as_great = __ballot_sync(kAll, x >= pivot);
        if (lane / (32 / kBits) == c) higher = greater, reached = as_great;
      }
    }
    if (kRounds > 1) {
      __syncwarp();
      load(round + 1, length);
    }
    const int32_t place = at + lane * kBits, inside = min(max(min(head + length, stop) - place, 0), kBits);
    uint32_t valid = inside == 32 ? kAll : (1u << inside) - 1;
    if (place == 0) valid = valid >> head << head;
    const int shift = lane * kBits % 32;
    above[round] = higher >> shift & valid;
    // NaN compares with nothing, and counts as -inf.
    ties[round] = (pivot == -kInfinity ? kAll : reached >> shift) & valid & ~above[round];
    more += __popc(above[round]), equal += __popc(ties[round]);
  }
  more = __reduce_add_sync(kAll, more), equal = __reduce_add_sync(kAll, equal);
  tell(told.found, &told.complete[1], uint2{more, equal});
  uint32_t all_more = 0, all_equal = 0, place = 0, ties_before = 0;
  for (int32_t i = lane; i < size * kWarps; i += 32) {
    const uint2 found = told.found[i];
    all_more += found.x, all_equal += found.y;
    if (i < me) place += found.x, ties_before += found.y;
  }
  all_more = __reduce_add_sync(kAll, all_more), all_equal = __reduce_add_sync(kAll, all_equal);
  place = __reduce_add_sync(kAll, place), ties_before = __reduce_add_sync(kAll, ties_before);

  const uint32_t quota = named - min(named, all_more), keep = quota - min(ties_before, quota);
  place += min(ties_before, quota);
  uint32_t earlier = 0;  // ties of this warp
  uint16_t* const stage = reinterpret_cast<uint16_t*>(mine);
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    if (keep < equal) {  // not all ties of this warp
      const uint32_t own = __popc(ties[round]), through = inclusive_sum(own, lane), before = earlier + through - own;
      const uint32_t room = keep - min(keep, before), cut = __ballot_sync(kAll, room > 0 && room < own);
      if (room == 0) ties[round] = 0;
      if (cut != 0) {  // one lane keeps some of its ties: each lane looks at one of its bits
        const int cut_lane = __ffs(cut) - 1;
        const uint32_t bits = __shfl_sync(kAll, ties[round], cut_lane), fit = __shfl_sync(kAll, room, cut_lane);
        const uint32_t kept = __ballot_sync(kAll, (bits >> lane & 1) && __popc(bits & ((1u << lane) - 1)) < fit);
        if (lane == cut_lane) ties[round] = kept;
      }
      earlier += __shfl_sync(kAll, through, 31);
    }
    uint32_t selected = above[round] | ties[round];
    const uint32_t count = __popc(selected), through = inclusive_sum(count, lane);
    const uint32_t total = __shfl_sync(kAll, through, 31);
    const int32_t index = base - head + first + round * kStage;
    if (__reduce_max_sync(kAll, count) > kMany<kBits>) {
      each_bit_abreast<kBits>(selected, place + through - count, [&](uint32_t at, uint32_t of, uint32_t bit) {
        if (at < static_cast<uint32_t>(k)) out[at] = index + static_cast<int32_t>(of * kBits + bit);
      });
    } else {
      for (uint32_t at = through - count; selected != 0; selected &= selected - 1)
        stage[at++] = static_cast<uint16_t>(lane * kBits + __ffs(selected) - 1);
      __syncwarp();
      for (uint32_t i = lane; i < total && place + i < static_cast<uint32_t>(k); i += 32)
        out[place + i] = index + stage[i];
      __syncwarp();
    }
    place += total;
  }
#pragma unroll 1
  for (int64_t i = int64_t{all_more + min(quota, all_equal)} + thread; i < k; i += threads) out[i] = -1;
}

// Long rows, a block for each. The names become marks, as in select.cuh. The row streams past once: which scores equal
// the pivot must be known before the pivot is, so the least of some named scores guesses it. If it was wrong, no score
// without a name is as high as the pivot, most often, and the names are the answer; else all read the groups again of
// those threads that met the pivot. Of fp32 scores, which are all alike or seldom equal, the first ones of the row will
// do for a guess. Of others a few are equal: named ones are gathered from everywhere. Dynamic shared memory: a byte of
// marks for each group of four scores, up to a multiple of 16 bytes.
template <typename Score, int kThreads, int kGroups, int kBlocks>
__global__ void __launch_bounds__(kThreads, kBlocks) settle_stream(const __grid_constant__ Settlement s) {
  constexpr bool kGather = sizeof(Score) < 4;
  constexpr int kWarps = kThreads / 32, kUnit = 2;
  constexpr uint32_t kStageSize = 512 * kUnit;  // scores that a warp writes the indices of at a time
  constexpr int32_t kStep = kThreads * kGroups;
  constexpr int kNames = 8;  // that a thread takes at a time
  extern __shared__ __align__(16) uint8_t marks[];
  uint32_t* const mark_words = reinterpret_cast<uint32_t*>(marks);
  __shared__ Control control;

  const Problem& p = s.problem;
  const uint32_t thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int64_t row_index = blockIdx.x;
  int32_t* out = p.out + row_index * p.k;
  const int32_t given = __ldg(p.lengths + row_index);
  const int32_t base = p.bases ? __ldg(p.bases + row_index) : 0;
  const int32_t length = min(max(given, 0), p.width);
  const Row<Score> row(p, row_index, length);
  const auto group_of = [&](int q) { return q * kThreads + static_cast<int32_t>(thread); };
  Group<Score> ahead[kGroups];
  const auto load_ahead = [&] {
#pragma unroll
    for (int q = 0; q < kGroups; ++q)
      if (group_of(q) >= row.inner_begin && group_of(q) < row.inner_end) ahead[q].load(row.at(group_of(q)));
  };
  load_ahead();
  const auto name_at = [&](int64_t column) {
    const int64_t at = row_index * p.k + column;
    if (!s.wide) return __ldg(static_cast<const int32_t*>(s.provisional) + at);
    const int2 name = __ldg(static_cast<const int2*>(s.provisional) + at);
    return name.y == 0 ? name.x : -1;
  };
  const auto load_names = [&](int64_t first, int32_t (&names)[kNames]) {
#pragma unroll
    for (int i = 0; i < kNames; ++i) {
      const int64_t column = first + group_of(i);
      names[i] = column < p.k ? name_at(column) : -1;
    }
  };
  int32_t names[kNames];
  load_names(0, names);
  const uint32_t words = (row.groups + 3) / 4;
  for (uint32_t i = thread; i < (words + 3) / 4; i += kThreads) reinterpret_cast<uint4*>(marks)[i] = uint4{0, 0, 0, 0};
  if (thread == 0) control.above = control.equal = control.inside = 0, control.edge[0] = kAll, control.edge[1] = 0;
  __syncthreads();

  float least = kInfinity;
  if (kGather) {
    const int32_t name = name_at(p.k <= kThreads ? min(int64_t{thread}, p.k - 1) : thread * (p.k / kThreads));
    if (name >= 0 && name < length) least = fmaxf(widen(row.at(0)[row.head + name]), -kInfinity);
  }
  for (int64_t first = kNames * kThreads;; first += kNames * kThreads) {
    int32_t next[kNames];
    if (first < p.k) load_names(first, next);
#pragma unroll
    for (int i = 0; i < kNames; ++i)
      if (names[i] >= 0 && names[i] < length) select_mark(mark_words, static_cast<uint32_t>(names[i]) + row.head);
    if (first >= p.k) break;
#pragma unroll
    for (int i = 0; i < kNames; ++i) names[i] = next[i];
  }
  __syncthreads();

  // Four scores: NaN where there is none, else no NaN.
  const auto look = [&](int32_t group, const Group<Score>& raw, float (&x)[4]) {
    const float none = __int_as_float(0x7fffffff);
    if (group >= row.inner_begin && group < row.inner_end) {
      raw.to(x);
#pragma unroll
      for (int j = 0; j < 4; ++j) x[j] = fmaxf(x[j], -kInfinity);
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) x[j] = row.holds(group, j) ? fmaxf(widen(row.at(group)[j]), -kInfinity) : none;
    }
  };
  const auto equals = [&](const float (&x)[4], float value) {
    float sum = kNoFlags;
#pragma unroll
    for (int j = 0; j < 4; ++j) sum = fmaf(is_equal(x[j], value), 16 << j, sum);
    return __float_as_uint(sum) & 0xf0;  // and nothing of the exponent
  };
  const auto least_of_block = [&] {
    const uint32_t key = __reduce_min_sync(kAll, ordered_key(least));
    if (lane == 0) control.warps[0][warp] = key;
    __syncthreads();
    return __reduce_min_sync(kAll, control.warps[0][lane % kWarps]);
  };

  if (!kGather) {
#pragma unroll
    for (int q = 0; q < kGroups; ++q) {
      float x[4];
      const uint32_t named = group_of(q) < row.groups ? marks[group_of(q)] : 0;
      if (group_of(q) < row.groups) look(group_of(q), ahead[q], x);
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (named >> j & 1) least = fminf(least, x[j]);
    }
  }
  const uint32_t guess = least_of_block();  // a key, of the pivot maybe
  float most = -kInfinity;                  // without a name
  least = kInfinity;
  for (int32_t first = 0; first < row.groups; first += kStep) {
#pragma unroll
    for (int q = 0; q < kGroups; ++q) {
      const int32_t group = first + group_of(q);
      if (group < row.groups) {
        float four[4];
        look(group, ahead[q], four);
        const uint32_t named = marks[group] & kSelected;
        marks[group] = static_cast<uint8_t>(named | equals(four, score_of(guess)));
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const bool has_name = named >> j & 1;
          least = fminf(least, has_name ? four[j] : kInfinity);
          most = fmaxf(most, has_name ? -kInfinity : four[j]);
        }
      }
      const int32_t next = group + kStep;
      if (next >= row.inner_begin && next < row.inner_end) ahead[q].load(row.at(next));
    }
  }
  const uint32_t low = ordered_key(least), high = ordered_key(most);
  const uint32_t low_of_warp = __reduce_min_sync(kAll, low), high_of_warp = __reduce_max_sync(kAll, high);
  if (lane == 0) atomicMin(&control.edge[0], low_of_warp), atomicMax(&control.edge[1], high_of_warp);
  __syncthreads();
  const uint32_t pivot = control.edge[0];
  const bool guessed = guess == pivot, others = control.edge[1] >= pivot;  // which may equal it
  // Whose marks of equal scores count. Without others they do not matter.
  const bool met = guessed || (others && (low == pivot || high >= pivot));
  const uint32_t those = __ballot_sync(kAll, met);
  if (lane == 0) control.warps[0][warp] = those;
  __syncthreads();
  __shared__ uint16_t stage[kWarps * kStageSize];
  if (!guessed && others) {
    const uint32_t own = lane < kWarps ? __popc(control.warps[0][lane]) : 0, through = inclusive_sum(own, lane);
    const auto count = static_cast<int32_t>(__shfl_sync(kAll, through, 31));
    const uint32_t before = __shfl_sync(kAll, through - own, warp);
    if (met) stage[before + __popc(those & ((1u << lane) - 1))] = static_cast<uint16_t>(thread);
    __syncthreads();
    const int32_t items = (row.groups + kThreads - 1) / kThreads * count;
    for (int32_t first = 0; first < items; first += kStep) {
      int32_t group[kGroups];
#pragma unroll
      for (int q = 0; q < kGroups; ++q) {
        const int32_t item = first + group_of(q);
        group[q] = item < items ? item / count * kThreads + stage[item % count] : row.groups;
        if (group[q] >= row.inner_begin && group[q] < row.inner_end) ahead[q].load(row.at(group[q]));
      }
#pragma unroll
      for (int q = 0; q < kGroups; ++q) {
        if (group[q] >= row.groups) continue;
        float four[4];
        look(group[q], ahead[q], four);
        marks[group[q]] = static_cast<uint8_t>((marks[group[q]] & kSelected) | equals(four, score_of(pivot)));
      }
    }
    __syncthreads();
  }

  // From "named" and "equal" to "selected" and "tie", in emit()'s division.
  const uint32_t steps = (words + kThreads * kUnit - 1) / (kThreads * kUnit);
  const uint32_t first_word = warp * steps * (8 * kUnit),
                 last_word = min(first_word + steps * (8 * kUnit), (words + 3) / 4);
  uint32_t above = 0, equal = 0, quota = 0;
  for (uint32_t i = first_word + lane; i < last_word; i += 32) {
    const uint4 four = reinterpret_cast<const uint4*>(marks)[i];
    uint32_t w[4] = {four.x, four.y, four.z, four.w};
    const uint32_t of_threads = control.warps[0][i / 2 % kWarps] >> i % 2 * 16;
#pragma unroll
    for (int u = 0; u < 4; ++u) {
      const uint32_t count = ((of_threads >> 4 * u & 15) * 0x204081u & 0x01010101u) * 15;  // nibbles, as of w
      const uint32_t named = w[u] & kSelected, ties = w[u] >> 4 & count, selected = named & ~ties;
      quota += __popc(ties & named), above += __popc(selected), equal += __popc(ties);
      w[u] = selected | ties << 4;
    }
    reinterpret_cast<uint4*>(marks)[i] = uint4{w[0], w[1], w[2], w[3]};
  }
  above = __reduce_add_sync(kAll, above), equal = __reduce_add_sync(kAll, equal);
  quota = __reduce_add_sync(kAll, quota);
  if (lane == 0) {
    atomicAdd(&control.above, above);
    atomicAdd(&control.equal, equal);
    atomicAdd(&control.inside, quota);
  }
  __syncthreads();
  quota = control.inside;
  const uint32_t selected = control.above + min(quota, control.equal);
  emit<kThreads, kUnit, kStageSize>(mark_words, words, quota, 0, 0, out, base - row.head, stage, control, above, equal,
                                    steps);
  for (int64_t i = selected + thread; i < p.k; i += kThreads) out[i] = -1;
}

}  // namespace kvc::topk
