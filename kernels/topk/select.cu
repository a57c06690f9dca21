// Which kernel selects, by shape alone, and the launches.

#include <algorithm>
#include <cmath>

#include "common/launch_compiled.h"
#include "topk/kernels.h"
#include "topk/resident.cuh"
#include "topk/spread.cuh"
#include "topk/stream.cuh"

namespace kvc::compiled {
extern const CompiledKernel streaming_select_float, streaming_select_half, streaming_select_bfloat16;
}

namespace kvc::topk {
namespace {

constexpr int kStreamThreads = 512;       // THREADS of select.py
constexpr int64_t kStreamFixed = 41984;   // MARKS_AT of select.py: shared memory before the marks
constexpr int64_t kMarkGroups = 65536;    // most groups a block keeps marks of
constexpr int64_t kLeastList = 24 << 10;  // bytes of shared memory that marks leave to the list
constexpr int64_t kPart = 131072;         // scores of a row a block of a cluster takes, about
constexpr int64_t kLeastPart = 32768;     // it takes no fewer, to have more blocks than multiprocessors
constexpr int kMaxCluster = 8;
constexpr int kSpread = 2;  // blocks that keep a row together
constexpr int kSpreadThreads = 1024;
static_assert(sizeof(StreamShared<kStreamThreads>) <= kStreamFixed);

template <typename Score>
const Limits& limits(int device) {
  static Limits known[kMaxDevices];
  static std::once_flag read[kMaxDevices];
  std::call_once(read[device], [&] {
    known[device] =
        read_limits(device, {reinterpret_cast<const void*>(&streaming_select<Score, kStreamThreads, false, 2>),
                             reinterpret_cast<const void*>(&streaming_select<Score, kStreamThreads, true, 2>)});
  });
  return known[device];
}

// Blocks that share a row: enough to fill the GPU, and so many that two fit a multiprocessor.
int cluster_size(const Selection& s, int multiprocessors) {
  int size = 1;
  while (size < kMaxCluster && 2 * size * s.rows <= INT32_MAX &&
         (s.width > kPart * size || (2 * size * s.rows <= multiprocessors && s.width >= 2 * kLeastPart * size)))
    size *= 2;
  return size;
}

// Entries of a block's list: what the window of a sample lets through but for odds of one in ten thousand.
int64_t list_entries(const Selection& s, int cluster) {
  constexpr double kSample = 4.0 * kSampleGroups * kStreamThreads;
  const double share = std::min(1.0, static_cast<double>(s.k) / static_cast<double>(s.width));
  const double expected = share * kSample, margin = 4.0 * std::sqrt(expected * (1.0 - share)) + 5.0;
  const double open = std::min(kSample, expected + margin) - std::max(0.0, expected - margin);
  const double entries = (open + 4.0 * std::sqrt(open)) / kSample * static_cast<double>(s.width) / cluster;
  return static_cast<int64_t>(cluster > 1 ? 1.05 * entries : entries) + 128;
}

// How a streaming kernel is to be launched.
struct Plan {
  int cluster;
  int64_t part, mark_groups, entries, shared;

  Plan(const Selection& s, int cluster_, int64_t most_shared) : cluster(cluster_) {
    const int64_t groups = (s.width + 3) / 4 + 1;
    part = ((groups + cluster - 1) / cluster + 15) / 16 * 16;
    const int64_t most_marks = std::min(kMarkGroups, (most_shared - kStreamFixed - kLeastList) / 1024 * 1024);
    mark_groups = std::min((part + 1023) / 1024 * 1024, most_marks);
    entries = std::min(list_entries(s, cluster), (most_shared - kStreamFixed - mark_groups) / 8) / 2 * 2;
    shared = kStreamFixed + mark_groups + 8 * entries;
  }
  bool keeps_all_marks() const { return part <= mark_groups; }
};

template <typename Score>
void stream(const Context& ctx, const Selection& s, const DeviceScope& scope, const DeviceFacts& facts, Problem problem,
            const CompiledKernel& compiled) {
  static KernelLoader loader(compiled);
  const Limits& limit = limits<Score>(scope.device);
  Plan plan(s, cluster_size(s, facts.multiprocessors), limit.shared);
  const bool supported = loader.supports(facts.major, facts.minor) && !as_on("sm_80") && !as_on("sm_120");
  const bool precompiled = supported && plan.keeps_all_marks();
  if (!precompiled && !limit.clusters) plan = Plan(s, 1, limit.shared);
  problem.mark_groups = static_cast<int32_t>(plan.mark_groups);
  problem.list_capacity = static_cast<int32_t>(plan.entries);
  const dim3 grid(static_cast<unsigned>(s.rows * plan.cluster));
  if (precompiled) {
    const LaunchShape shape{grid, static_cast<int>(plan.shared), plan.cluster};
    const int32_t* bases = s.bases ? s.bases : s.lengths;
    return loader.launch(ctx, scope.device, shape, scope.stream, s.scores, s.row_stride, s.lengths, bases,
                         static_cast<int32_t>(s.bases != nullptr), s.out, s.k, problem.width, problem.list_capacity,
                         problem.mark_groups);
  }
  const auto kernel = limit.clusters ? streaming_select<Score, kStreamThreads, true, 2>
                                     : streaming_select<Score, kStreamThreads, false, 2>;
  launch(kernel, "streaming_select", problem, s.rows * plan.cluster, kStreamThreads, plan.shared, scope.stream,
         plan.cluster);
}

template <typename Score, int kThreads, int kGroups, bool kDirect = false, bool kWaits = false>
void keep_resident(const Selection& s, const DeviceScope& scope, const Problem& problem) {
  launch(resident_select<Score, kThreads, kGroups, kDirect, kWaits>, "resident_select", problem, s.rows, kThreads, 0,
         scope.stream);
}

// Two blocks, each with a multiprocessor for itself, keep a row.
template <typename Score, int kGroups>
void keep_spread(const Selection& s, const DeviceScope& scope, const Problem& problem) {
  constexpr int64_t kShared = sizeof(SpreadShared<kSpreadThreads, kGroups>);
  static_assert(kShared <= 48 << 10);
  launch(spread_select<Score, kSpreadThreads, kGroups>, "spread_select", problem, s.rows * kSpread, kSpreadThreads,
         kShared, scope.stream, kSpread);
}

template <typename Score>
void select(const Context& ctx, const Selection& s, const DeviceScope& scope, const CompiledKernel& compiled) {
  const void* probe = reinterpret_cast<const void*>(&resident_select<Score, 256, 3, false, false>);
  const DeviceFacts& facts = device_facts(ctx, scope.device, probe);
  const Problem problem{s.scores, s.row_stride, s.lengths, s.bases, s.out, s.k, static_cast<int32_t>(s.width), 0, 0};
  const int64_t scores = s.width + slack_of<Score>(s);
  const bool few = s.rows <= facts.multiprocessors;  // a block has a multiprocessor for itself
  if (scores <= 512 * 2 * 4 && few) return keep_resident<Score, 512, 2, true>(s, scope, problem);
  if (scores <= 256 * 3 * 4) return keep_resident<Score, 256, 3>(s, scope, problem);
  if (scores <= 512 * 2 * 4) return keep_resident<Score, 512, 2>(s, scope, problem);
  if (scores <= 512 * 4 * 4) return keep_resident<Score, 512, 4>(s, scope, problem);
  if (scores <= 1024 * 4 * 4 && few) return keep_resident<Score, 1024, 4>(s, scope, problem);
  // Where all blocks start at once they may wait for the lengths; later ones had better read meanwhile.
  if (scores <= 512 * 8 * 4 && s.rows <= 2 * facts.multiprocessors)
    return keep_resident<Score, 512, 8, false, true>(s, scope, problem);
  if (scores <= 512 * 8 * 4) return keep_resident<Score, 512, 8>(s, scope, problem);
  if (kSpread * s.rows <= facts.multiprocessors && limits<Score>(scope.device).clusters) {
    if (scores <= kSpread * kSpreadThreads * 4 * 4) return keep_spread<Score, 4>(s, scope, problem);
    if (scores <= kSpread * kSpreadThreads * 8 * 4) return keep_spread<Score, 8>(s, scope, problem);
  }
  stream<Score>(ctx, s, scope, facts, problem, compiled);
}

}  // namespace

void select(const Context& ctx, const Selection& s, const DeviceScope& scope) {
  switch (s.dtype) {
    case Score::kFloat: return select<float>(ctx, s, scope, compiled::streaming_select_float);
    case Score::kHalf: return select<__half>(ctx, s, scope, compiled::streaming_select_half);
    case Score::kBFloat16: return select<__nv_bfloat16>(ctx, s, scope, compiled::streaming_select_bfloat16);
  }
}

}  // namespace kvc::topk
