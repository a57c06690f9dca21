// CUDA side of settle_ties: launches the Triton kernels of settle.py.

#include "topk/kernels.h"

#include "common/launch_compiled.h"

namespace kvc::compiled {
extern const CompiledKernel settle_pivot_float, settle_pivot_half, settle_pivot_bfloat16, settle_classify_float,
    settle_classify_half, settle_classify_bfloat16, settle_emit;
}

namespace kvc::topk {
namespace {

constexpr int64_t kChunk = 8192, kParts = 8;  // CHUNK and PARTS of settle.py
constexpr int64_t kPartColumns = 2048;        // provisional columns that a part is worth having for
constexpr int64_t kBusy = 128;                // programs from which on more of them do not help
constexpr int64_t kMaxPrograms = INT32_MAX;   // of a grid; programs walk over further chunks

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

}  // namespace

void settle(const Context& ctx, const Selection& s, const Provisional& p, const DeviceScope& scope) {
  static KernelLoader emit(compiled::settle_emit);
  const auto int32 = [](int64_t value) { return static_cast<int32_t>(value); };
  const int64_t item = s.dtype == Score::kFloat ? 4 : 2, vector = 16 / item;
  const auto address = reinterpret_cast<uintptr_t>(s.scores);
  const int64_t lead = static_cast<int64_t>(address / static_cast<uintptr_t>(item)) % vector;
  const bool aligned = lead == 0 && s.row_stride % vector == 0;
  const int64_t chunks = std::max<int64_t>((s.width + (aligned ? 0 : vector - 1) + kChunk - 1) / kChunk, 1);
  const int64_t wanted = std::min((s.k + kPartColumns - 1) / kPartColumns, (kBusy + s.rows - 1) / s.rows);
  const int64_t parts = std::clamp<int64_t>(wanted, 1, kParts), share = (s.k + parts - 1) / parts;

  const int64_t all = s.rows * chunks, of_classes = all * (kChunk / 16), of_leasts = s.rows * kParts * 2;
  const Tensor scratch = new_output(*s.like, {of_classes + of_leasts + all});
  auto* classes = static_cast<int32_t*>(scratch.data_ptr());
  int32_t *leasts = classes + of_classes, *counts = leasts + of_leasts;
  const dim3 grid(static_cast<unsigned>(std::min(all, kMaxPrograms)));
  kernels(s.dtype).pivot.launch_triton(
      ctx, scope.device, dim3(static_cast<unsigned>(s.rows), static_cast<unsigned>(parts)), scope.stream, s.scores,
      s.lengths, p.indices, leasts, int32(s.width), s.row_stride, s.k, share, int32_t{p.wide ? 2 : 1});
  kernels(s.dtype).classify.launch_triton(ctx, scope.device, grid, scope.stream, s.scores, s.lengths, leasts, classes,
                                          counts, int32(s.rows), int32(s.width), s.row_stride, int32(lead),
                                          int32(parts), int32(chunks));
  emit.launch_triton(ctx, scope.device, grid, scope.stream, s.lengths, s.bases, leasts, classes, counts, s.out,
                     int32(s.rows), int32(s.width), s.row_stride, int32(lead), s.k, int32(parts), int32(chunks),
                     int32(s.bases != nullptr), int32(vector));
}

}  // namespace kvc::topk
