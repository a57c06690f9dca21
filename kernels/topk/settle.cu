// CUDA side of settle_ties: launches a kernel of settle.cuh for short rows and for many of them, else the Triton
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

template <typename Score>
const Limits& limits(int device) {
  static Limits known[kMaxDevices];
  static std::once_flag read[kMaxDevices];
  std::call_once(read[device], [&] {
    const auto kernel = &settle_marks<Score, 512, 4, true, false, 2>;
    known[device] = read_limits(device, {reinterpret_cast<const void*>(kernel)});
  });
  return known[device];
}

// Whether a kernel of settle.cuh was launched.
template <typename Score>
bool settle_with_marks(const Context& ctx, const Selection& s, const Provisional& p, const DeviceScope& scope) {
  const void* probe = reinterpret_cast<const void*>(&settle_marks<Score, 256, 4, false, false, 4>);
  const DeviceFacts& facts = device_facts(ctx, scope.device, probe);
  const Problem problem{s.scores, s.row_stride, s.lengths, s.bases, s.out, s.k, static_cast<int32_t>(s.width), 0, 0};
  const int64_t scores = s.width + slack_of<Score>(s), marks = ((scores + 3) / 4 + 15) / 16 * 16;
  const auto run = [&](void (*kernel)(Settlement), int threads) {
    launch(kernel, "settle_marks", Settlement{problem, p.indices, p.wide}, s.rows, threads, marks, scope.stream);
    return true;
  };
  const bool few = s.rows <= facts.multiprocessors;  // a block has a multiprocessor for itself
  if (scores <= 256 * 4 * 4 && few) return run(settle_marks<Score, 256, 4, false, true, 4>, 256);
  if (scores <= 256 * 4 * 4) return run(settle_marks<Score, 256, 4, false, false, 4>, 256);
  if (scores <= 512 * 4 * 4) return run(settle_marks<Score, 512, 4, false, false, 2>, 512);
  if (scores <= 512 * 8 * 4) return run(settle_marks<Score, 512, 8, false, false, 2>, 512);
  // A row for itself keeps no multiprocessor busy: the Triton kernels share few long rows among many programs.
  if (few || marks > limits<Score>(scope.device).shared) return false;
  return run(settle_marks<Score, 512, 4, true, false, 2>, 512);
}

}  // namespace

void settle(const Context& ctx, const Selection& s, const Provisional& p, const DeviceScope& scope) {
  const auto launched = [&] {
    switch (s.dtype) {
      case Score::kFloat: return settle_with_marks<float>(ctx, s, p, scope);
      case Score::kHalf: return settle_with_marks<__half>(ctx, s, p, scope);
      case Score::kBFloat16: return settle_with_marks<__nv_bfloat16>(ctx, s, p, scope);
    }
    return false;
  };
  if (!launched()) settle_with_triton(ctx, s, p, scope);
}

}  // namespace kvc::topk
