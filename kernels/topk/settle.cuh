// Settling ties in one look at a row, without scratch memory: settle_ties of rows that a block has marks for.
//
// The names of the provisional answer become marks, as in select.cuh. The pivot is the least named score; what is
// wanted are the named scores above it, and of those equal to it, named or not, as many as were named, lowest index
// first. A row that fits the registers of its block is looked at twice there. A longer one streams past once: which
// scores equal the pivot must be known before the pivot is, so the least of some named scores guesses it. If it was
// wrong, no score without a name is as high as the pivot, most often, and the names are the answer; else the row is
// read again. Of fp32 scores, which are all alike or seldom equal, the first ones of the row will do for a guess. Of
// others a few are equal: named ones are gathered from everywhere.
#pragma once

#include "topk/select.cuh"

namespace kvc::topk {

struct Settlement {
  Problem problem;
  const void* provisional;  // [rows, k]
  bool wide;                // of int64, else of int32
};

// Dynamic shared memory: a byte of marks for each group of four scores, up to a multiple of 16 bytes. kStreams: rows of
// any length, else of at most kThreads * kGroups groups. kDirect: see GroupMarks, which streams never use.
template <typename Score, int kThreads, int kGroups, bool kStreams, bool kDirect, int kBlocks>
__global__ void __launch_bounds__(kThreads, kBlocks) settle_marks(const __grid_constant__ Settlement s) {
  static_assert(!(kStreams && kDirect));
  constexpr bool kGather = kStreams && sizeof(Score) < 4;
  constexpr int kWarps = kThreads / 32, kUnit = kStreams ? 2 : 1;
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
  // A short row is on its way before its length is known.
  const Row<Score> row(p, row_index, kStreams ? min(max(given, 0), p.width) : p.width);
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
  const int32_t length = min(max(given, 0), p.width);
  const Row<Score> used(p, row_index, length);
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
      for (int j = 0; j < 4; ++j) x[j] = used.holds(group, j) ? fmaxf(widen(row.at(group)[j]), -kInfinity) : none;
    }
    if (!kStreams && group >= used.inner_end) {
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (!used.holds(group, j)) x[j] = none;
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

  float x[kGroups][4];
  if (!kGather) {
#pragma unroll
    for (int q = 0; q < kGroups; ++q) {
      const uint32_t named = group_of(q) < row.groups ? marks[group_of(q)] : 0;
      if (group_of(q) < row.groups) look(group_of(q), ahead[q], x[q]);
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (named >> j & 1) least = fminf(least, x[q][j]);
    }
  }
  uint32_t pivot = least_of_block();  // a key; a guess, if the row streams
  bool others = true;                 // whether scores without a name may equal the pivot
  if constexpr (kDirect) {
    using Marks = GroupMarks<kThreads, kGroups>;
    __shared__ uint32_t counts[Marks::kCounts];
    Marks mine;
    uint32_t quota = 0;
#pragma unroll
    for (int q = 0; q < kGroups; ++q) {
      const bool there = group_of(q) < row.groups;
      const uint32_t named = there ? marks[group_of(q)] : 0, equal = there ? equals(x[q], score_of(pivot)) : 0;
      quota += __popc(named & equal >> 4);
      mine.marks[q] = (named & ~(equal >> 4)) | equal;
    }
    mine.count(counts);
    quota = __reduce_add_sync(kAll, quota);
    if (lane == 0) control.warps[1][warp] = quota;
    __syncthreads();
    quota = __reduce_add_sync(kAll, lane < kWarps ? control.warps[1][lane] : 0);
    const uint32_t selected = mine.emit(counts, quota, out, base - row.head);
    for (int64_t i = selected + thread; i < p.k; i += kThreads) out[i] = -1;
    return;
  }
  if constexpr (!kStreams) {
#pragma unroll
    for (int q = 0; q < kGroups; ++q)
      if (group_of(q) < row.groups) marks[group_of(q)] |= static_cast<uint8_t>(equals(x[q], score_of(pivot)));
  } else {
    for (bool again = false;; again = true) {
      const float border = score_of(pivot);
      float most = -kInfinity;  // without a name
      least = kInfinity;
      for (int32_t first = 0; first < row.groups; first += kStep) {
#pragma unroll
        for (int q = 0; q < kGroups; ++q) {
          const int32_t group = first + group_of(q);
          if (group < row.groups) {
            float four[4];
            look(group, ahead[q], four);
            const uint32_t named = marks[group] & kSelected;
            marks[group] = static_cast<uint8_t>(named | equals(four, border));
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
      if (again) break;
      const uint32_t low = __reduce_min_sync(kAll, ordered_key(least)),
                     high = __reduce_max_sync(kAll, ordered_key(most));
      if (lane == 0) atomicMin(&control.edge[0], low), atomicMax(&control.edge[1], high);
      __syncthreads();
      if (control.edge[0] == pivot) break;
      pivot = control.edge[0];
      others = control.edge[1] >= pivot;
      if (!others) break;
      load_ahead();
    }
  }
  __syncthreads();

  // From "named" and "equal" to "selected" and "tie", in emit()'s division.
  __shared__ uint16_t stage[kWarps * kStageSize];
  const uint32_t steps = (words + kThreads * kUnit - 1) / (kThreads * kUnit);
  const uint32_t first_word = warp * steps * (8 * kUnit),
                 last_word = min(first_word + steps * (8 * kUnit), (words + 3) / 4);
  uint32_t above = 0, equal = 0, quota = 0;
  for (uint32_t i = first_word + lane; i < last_word; i += 32) {
    const uint4 four = reinterpret_cast<const uint4*>(marks)[i];
    uint32_t w[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int u = 0; u < 4; ++u) {
      const uint32_t named = w[u] & kSelected, tie = w[u] >> 4 & kSelected;
      const uint32_t selected = named & ~tie, ties = others ? tie : tie & named;
      quota += __popc(tie & named), above += __popc(selected), equal += __popc(ties);
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
