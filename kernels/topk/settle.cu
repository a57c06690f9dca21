// CUDA side of settle_ties: which kernel of settle.cuh settles, by shape and device alone, or else the Triton
// kernels of settle.py, which take rows of any length.

#include "topk/kernels.h"

#include "common/launch_compiled.h"
#include "topk/settle.cuh"

namespace kvc::compiled {
extern const CompiledKernel settle_pivot_float, settle_pivot_half, settle_pivot_bfloat16, settle_classify_float,
    settle_classify_half, settle_classify_bfloat16, settle_emit;
}

namespace kvc::topk {
namespace {

constexpr int64_t kChunk = 4096, kTile = 2 * kChunk, kParts = 8;  // CHUNK, TILE and PARTS of settle.py
constexpr int64_t kPartColumns = 256;                             // provisional columns that a part is worth having for
constexpr int64_t kBusy = 256;                                    // programs from which on more of them do not help
constexpr int64_t kMaxChunks = 1 << 17;  // of a launch, which bounds the scratch memory: a kibibyte each

struct Kernels {
  KernelLoader pivot, classify;
};

Kernels& kernels(Score dtype) {
  static Kernels float32{KernelLoader(compiled::settle_pivot_float), KernelLoader(compiled::settle_classify_float)};
  static Kernels float16{KernelLoader(compiled::settle_pivot_half), KernelLoader(compiled::settle_classify_half)};
  static Kernels bfloat16{KernelLoader(compiled::settle_pivot_bfloat16),
                          KernelLoader(compiled::settle_classify_bfloat16)};
  return dtype == Score::kFloat ? float32 : dtype == Score::kHalf ? float16 : bfloat16;
}

void settle_rows(const Context& ctx, const Selection& s, const Provisional& p, int64_t tiles,
                 const DeviceScope& scope) {
  static KernelLoader emit(compiled::settle_emit);
  const auto int32 = [](int64_t value) { return static_cast<int32_t>(value); };
  const auto grid = [](int64_t x, int64_t y) { return dim3(static_cast<unsigned>(x), static_cast<unsigned>(y)); };
  const int64_t item = s.dtype == Score::kFloat ? 4 : 2, vector = 16 / item;
  const auto lead = static_cast<int64_t>(reinterpret_cast<uintptr_t>(s.scores) / static_cast<uintptr_t>(item)) % vector;
  const int64_t wanted = std::min((s.k + kPartColumns - 1) / kPartColumns, (kBusy + s.rows - 1) / s.rows);
  const int64_t parts = std::clamp<int64_t>(wanted, 1, kParts), share = (s.k + parts - 1) / parts;

  const int64_t chunks = tiles * (kTile / kChunk), all = s.rows * chunks;
  const int64_t of_classes = all * (kChunk / 16), of_leasts = s.rows * kParts * 2;
  const Tensor scratch = new_output(*s.like, {of_classes + of_leasts + all});
  auto* classes = static_cast<int32_t*>(scratch.data_ptr());
  int32_t *leasts = classes + of_classes, *counts = leasts + of_leasts;
  kernels(s.dtype).pivot.launch_triton(ctx, scope.device, grid(s.rows, parts), scope.stream, s.scores, s.lengths,
                                       p.indices, leasts, int32(s.width), s.row_stride, s.k, share,
                                       int32_t{p.wide ? 2 : 1});
  kernels(s.dtype).classify.launch_triton(ctx, scope.device, grid(all, 1), scope.stream, s.scores, s.lengths, leasts,
                                          classes, counts, int32(s.width), s.row_stride, int32(lead), int32(parts),
                                          int32(chunks));
  emit.launch_triton(ctx, scope.device, grid(s.rows * tiles, 1), scope.stream, s.lengths, s.bases, leasts, classes,
                     counts, s.out, int32(s.width), s.row_stride, int32(lead), s.k, int32(parts), int32(chunks),
                     int32(s.bases != nullptr), int32(vector));
}

void settle_with_triton(const Context& ctx, const Selection& s, const Provisional& p, const DeviceScope& scope) {
  const int64_t item = s.dtype == Score::kFloat ? 4 : 2, index = p.wide ? 8 : 4;
  // Most scores between a row and the boundary that its positions count from.
  const bool aligned = reinterpret_cast<uintptr_t>(s.scores) % 16 == 0 && s.row_stride * item % 16 == 0;
  const int64_t slack = aligned ? 0 : 16 / item - 1;
  const int64_t tiles = std::max<int64_t>((s.width + slack + kTile - 1) / kTile, 1);
  const int64_t most = std::max<int64_t>(kMaxChunks / (tiles * (kTile / kChunk)), 1);
  for (int64_t first = 0; first < s.rows; first += most) {
    Selection some = s;
    some.rows = std::min(most, s.rows - first);
    some.scores = static_cast<const uint8_t*>(s.scores) + first * s.row_stride * item;
    some.lengths += first;
    if (s.bases) some.bases += first;
    some.out += first * s.k;
    settle_rows(ctx, some, {static_cast<const uint8_t*>(p.indices) + first * s.k * index, p.wide}, tiles, scope);
  }
}

constexpr int kStreamThreads = 512;  // of settle_stream

template <typename Score>
const auto settle_long = &settle_stream<Score, kStreamThreads, 4, 2>;

// How settle_parts is compiled and launched.
template <typename Score>
struct Shape {
  void (*kernel)(Settlement);
  int threads, team;  // blocks of a row
  int bits, rounds, told;

  template <int kThreads, int kBits, int kRounds, bool kCluster, int kBlocks>
  static Shape of(int team) {
    constexpr int kWarps = kThreads / 32 * (kCluster ? kMaxTeam : 1);
    return {settle_parts<Score, kThreads, kBits, kRounds, kCluster, kBlocks>,
            kThreads,
            team,
            kBits,
            kRounds,
            static_cast<int>(sizeof(Told<kWarps>))};
  }
  int64_t warps() const { return threads / 32 * team; }
  int64_t most_scores() const { return warps() * 32 * bits * rounds; }
  // How many of a row's scores a warp takes.
  int64_t part(int64_t scores) const { return (scores + warps() * 32 - 1) / (warps() * 32) * 32; }
  int64_t shared(int64_t scores) const {
    const int64_t of_warp = team > 1 ? int64_t{32} * bits : part(scores);
    return told + (threads / 32 * of_warp + 256) * static_cast<int64_t>(sizeof(Score));  // up to 256 are read beyond
  }
};

// A block a row, by the scores they take.
template <typename Score>
const Shape<Score> shapes[] = {
    Shape<Score>::template of<256, 16, 1, false, 4>(1),
    Shape<Score>::template of<256, 32, 1, false, 4>(1),
    Shape<Score>::template of<512, 32, 1, false, 3>(1),
};
// Teams of blocks.
template <typename Score>
const Shape<Score> team_shapes[] = {
    Shape<Score>::template of<256, 16, 1, true, 4>(4),
    Shape<Score>::template of<256, 32, 1, true, 3>(8),
    Shape<Score>::template of<512, 32, 2, true, 2>(8),
};

template <typename Score>
const Limits& limits(int device) {
  static Limits known[kMaxDevices];
  static std::once_flag read[kMaxDevices];
  std::call_once(read[device], [&] {
    std::vector<const void*> kernels{reinterpret_cast<const void*>(settle_long<Score>)};
    for (const auto& shape : shapes<Score>) kernels.push_back(reinterpret_cast<const void*>(shape.kernel));
    for (const auto& shape : team_shapes<Score>) kernels.push_back(reinterpret_cast<const void*>(shape.kernel));
    known[device] = read_limits(device, kernels);
  });
  return known[device];
}

// Whether a kernel of settle.cuh was launched.
template <typename Score>
bool settle_with_cpp(const Context& ctx, const Selection& s, const Provisional& p, const DeviceScope& scope) {
  const DeviceFacts& facts = device_facts(ctx, scope.device, reinterpret_cast<const void*>(settle_long<Score>));
  const Limits& limit = limits<Score>(scope.device);
  const Problem problem{s.scores, s.row_stride, s.lengths, s.bases, s.out, s.k, static_cast<int32_t>(s.width), 0, 0};
  const bool few = s.rows <= facts.multiprocessors;  // a block has a multiprocessor for itself
  if (s.k <= INT32_MAX / 2) {
    const int64_t scores = s.width + slack_of<Score>(s, 16);
    const auto run = [&](const Shape<Score>& shape) {
      if (scores > shape.most_scores() || shape.shared(scores) > limit.shared || shape.team * s.rows > INT32_MAX)
        return false;
      const Settlement settlement{problem, p.indices, p.wide, static_cast<int32_t>(shape.part(scores))};
      launch(shape.kernel, "settle_parts", settlement, s.rows * shape.team, shape.threads, shape.shared(scores),
             scope.stream, shape.team);
      return true;
    };
    const auto& [small_team, team, long_team] = team_shapes<Score>;
    const bool costly = sizeof(Score) < 4 || 8 * s.k > s.width;  // for a stream: guesses wrong, or marks many names
    if (run(shapes<Score>[0]) || run(shapes<Score>[1])) return true;
    if (limit.clusters && small_team.team * s.rows <= facts.multiprocessors && run(small_team)) return true;
    if (run(shapes<Score>[2])) return true;
    if (limit.clusters && (few || costly) && run(team)) return true;
    if (limit.clusters && few && run(long_team)) return true;
  }
  // A row for itself keeps no multiprocessor busy: the Triton kernels share few long rows among many programs.
  const int64_t marks = ((s.width + slack_of<Score>(s) + 3) / 4 + 15) / 16 * 16;
  if (few || marks > limit.shared) return false;
  const Settlement settlement{problem, p.indices, p.wide, 0};
  launch(settle_long<Score>, "settle_stream", settlement, s.rows, kStreamThreads, marks, scope.stream);
  return true;
}

}  // namespace

void settle(const Context& ctx, const Selection& s, const Provisional& p, const DeviceScope& scope) {
  const auto launched = [&] {
    switch (s.dtype) {
      case Score::kFloat: return settle_with_cpp<float>(ctx, s, p, scope);
      case Score::kHalf: return settle_with_cpp<__half>(ctx, s, p, scope);
      case Score::kBFloat16: return settle_with_cpp<__nv_bfloat16>(ctx, s, p, scope);
    }
    return false;
  };
  if (!launched()) settle_with_triton(ctx, s, p, scope);
}

}  // namespace kvc::topk
