// CUDA side of settle_ties: launches the Triton kernels of settle.py.

#include "topk/kernels.h"

#include "common/launch_compiled.h"

namespace kvc::compiled {
extern const CompiledKernel settle_mark, settle_classify_float, settle_classify_half, settle_classify_bfloat16,
    settle_emit;
}

namespace kvc::topk {
namespace {

constexpr int64_t kChunk = 8192;                                 // CHUNK of settle.py
constexpr int64_t kWords = kChunk / 32, kClasses = kChunk / 16;  // int32 of a chunk
constexpr int64_t kStatistics = 8;                               // STATISTICS of settle.py
constexpr int64_t kAlign = 256;                                  // int32 between the parts of the scratch memory
constexpr int64_t kMaxChunks = 65535;                            // of a grid; programs walk over further ones

KernelLoader& classify_kernel(Score dtype) {
  static KernelLoader float32(compiled::settle_classify_float), float16(compiled::settle_classify_half),
      bfloat16(compiled::settle_classify_bfloat16);
  return dtype == Score::kFloat ? float32 : dtype == Score::kHalf ? float16 : bfloat16;
}
}  // namespace

void settle(const Context& ctx, const Selection& s, const Provisional& p, const DeviceScope& scope) {
  static KernelLoader mark(compiled::settle_mark), emit(compiled::settle_emit);
  const int64_t item = s.dtype == Score::kFloat ? 4 : 2, vector = 16 / item;
  const int64_t lead =
      static_cast<int64_t>(reinterpret_cast<uintptr_t>(s.scores) / static_cast<uintptr_t>(item)) % vector;
  const bool aligned = lead == 0 && s.row_stride % vector == 0;
  const int64_t chunks = std::max<int64_t>((s.width + (aligned ? 0 : vector - 1) + kChunk - 1) / kChunk, 1);
  const int64_t records = (s.rows * chunks * kStatistics + kAlign - 1) / kAlign * kAlign;
  const Tensor scratch = new_output(*s.like, {records + s.rows * chunks * (kWords + kClasses)});
  auto* statistics = static_cast<int32_t*>(scratch.data_ptr());
  int32_t* words = statistics + records;
  int32_t* classes = words + s.rows * chunks * kWords;

  const auto int32 = [](int64_t value) { return static_cast<int32_t>(value); };
  const int32_t step = p.wide ? 2 : 1;
  // Whether a kernel of its own reads the provisional answer, or the programs of each chunk read all of it.
  const bool marked = chunks > 1 && 2 * chunks * s.k > s.width;
  const dim3 rows(static_cast<unsigned>(s.rows)), all(rows.x, static_cast<unsigned>(std::min(chunks, kMaxChunks)));
  if (marked)
    mark.launch_triton(ctx, scope.device, rows, scope.stream, s.lengths, p.indices, words, int32(s.width), s.row_stride,
                       int32(lead), s.k, step, int32(chunks * kWords), int32(vector));
  classify_kernel(s.dtype).launch_triton(ctx, scope.device, all, scope.stream, s.scores, s.lengths, p.indices, words,
                                         classes, statistics, int32(s.width), s.row_stride, int32(lead), s.k, step,
                                         int32(chunks), int32(marked));
  emit.launch_triton(ctx, scope.device, all, scope.stream, s.lengths, s.bases, classes, statistics, s.out,
                     int32(s.width), s.row_stride, int32(lead), s.k, int32(chunks), int32(s.bases != nullptr),
                     int32(vector));
}

}  // namespace kvc::topk
