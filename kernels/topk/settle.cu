// CUDA side of settle_ties: launches the Triton kernels of settle.py.

#include "topk/kernels.h"

#include "common/launch_compiled.h"

namespace kvc::compiled {
extern const CompiledKernel settle_classify_float, settle_classify_half, settle_classify_bfloat16, settle_emit;
}

namespace kvc::topk {
namespace {

constexpr int64_t kChunk = 8192;       // CHUNK of settle.py
constexpr int64_t kRecord = 8;         // RECORD of settle.py
constexpr int64_t kMaxChunks = 65535;  // of a grid; programs walk over further ones

KernelLoader& classify_kernel(Score dtype) {
  static KernelLoader float32(compiled::settle_classify_float), float16(compiled::settle_classify_half),
      bfloat16(compiled::settle_classify_bfloat16);
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

  const int64_t classes = s.rows * chunks * (kChunk / 16);  // as int32, in front of the records
  const Tensor scratch = new_output(*s.like, {classes + s.rows * chunks * kRecord});
  auto* memory = static_cast<int32_t*>(scratch.data_ptr());
  const dim3 grid(static_cast<unsigned>(s.rows), static_cast<unsigned>(std::min(chunks, kMaxChunks)));
  classify_kernel(s.dtype).launch_triton(ctx, scope.device, grid, scope.stream, s.scores, s.lengths, p.indices, memory,
                                         memory + classes, int32(s.width), s.row_stride, int32(lead), s.k,
                                         int32_t{p.wide ? 2 : 1}, int32(chunks));
  emit.launch_triton(ctx, scope.device, grid, scope.stream, s.lengths, s.bases, memory, memory + classes, s.out,
                     int32(s.width), s.row_stride, int32(lead), s.k, int32(chunks), int32(s.bases != nullptr),
                     int32(vector));
}

}  // namespace kvc::topk
