// Launches the scorer of score.py: a small kernel hands it the pools, and per_head averages its rows over the layers.

#include "triattention/score_cute.h"

#include <memory>

#include "common/launch_compiled.h"

// kernels() of score.py.
#define KVC_SIZES(row, dtype, key)                                                                                    \
  row(dtype, key, 64, 4) row(dtype, key, 64, 8) row(dtype, key, 96, 4) row(dtype, key, 96, 8) row(dtype, key, 128, 4) \
      row(dtype, key, 128, 8) row(dtype, key, 256, 4) row(dtype, key, 256, 8)
#define KVC_SCORERS(row) KVC_SIZES(row, BFloat16, bf16) KVC_SIZES(row, Half, fp16) KVC_SIZES(row, Float8_e4m3fn, e4m3)

namespace kvc::compiled {
// Absent from a build for none of score.py's architectures.
#define KVC_DECLARE(dtype, key, head_dim, heads) \
  extern const CompiledKernel triattention_score_##key##_##head_dim##_##heads __attribute__((weak));
KVC_SCORERS(KVC_DECLARE)
#undef KVC_DECLARE
}  // namespace kvc::compiled

namespace kvc::triattention {
namespace {

constexpr int kThreads = 256;
constexpr int kMaxLayers = 96;  // a launch of stage_kernel carries the pools of; parameters stay below 4 KiB
constexpr int kPoolFields = 5;  // read by score.py
constexpr int64_t kMaxBlocks = INT32_MAX, kMaxTokens = INT32_MAX / 2;
constexpr int64_t kHeader = 1024;  // HEADER of score.py
constexpr int64_t kMaxCluster = 8;
constexpr int64_t kAlignment = 16;  // of rows of keys and of statistics
// Of a multiprocessor's 228 KiB: more would take L1 cache that the keys under way need (measured: a third slower).
constexpr int64_t kSharedOfMultiprocessor = 164 << 10;
constexpr int64_t kSharedReserve = 1 << 10;  // that each block costs beside its own
constexpr int64_t kLeastTokens = 512;        // of a block: its start costs as much as scoring some hundred

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
int32_t int32(int64_t value) { return static_cast<int32_t>(value); }

struct Scorer {
  ScalarType dtype;
  int64_t head_dim, heads;  // scored at a time
  std::unique_ptr<KernelLoader> kernel;
};

const std::vector<Scorer>& scorers() {
  static const std::vector<Scorer> known = [] {
    std::vector<Scorer> found;
#define KVC_ADD(dtype, key, head_dim, heads)                                 \
  if (&compiled::triattention_score_##key##_##head_dim##_##heads != nullptr) \
    found.push_back({ScalarType::dtype, head_dim, heads,                     \
                     std::make_unique<KernelLoader>(compiled::triattention_score_##key##_##head_dim##_##heads)});
    KVC_SCORERS(KVC_ADD)
#undef KVC_ADD
    return found;
  }();
  return known;
}

struct Stage {
  int64_t pools[kMaxLayers][kPoolFields];  // address; stride of page, head and token in bytes; pages
  int64_t* table;
  int32_t first_layer, layers;  // of `pools`
  Rows empty;                   // becomes -inf, unless `data` is null
  int64_t requests, width;
};
static_assert(sizeof(Stage) <= 4096);

__global__ void __launch_bounds__(kThreads) stage_kernel(const __grid_constant__ Stage stage) {
  if (blockIdx.x == 0)
    for (int i = static_cast<int>(threadIdx.x); i < stage.layers * kPoolFields; i += kThreads)
      stage.table[stage.first_layer * kPoolFields + i] = stage.pools[i / kPoolFields][i % kPoolFields];
  if (stage.empty.data == nullptr) return;
  const int64_t step = int64_t{gridDim.x} * kThreads;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < stage.requests * stage.width; i += step)
    stage.empty.data[i / stage.width * stage.empty.request + i % stage.width * stage.empty.column] = -INFINITY;
}

// rows [requests, layers, heads, width] -> out [requests, heads, width].
__global__ void __launch_bounds__(kThreads)
    mean_kernel(const float* rows, Rows out, int64_t requests, int64_t layers, int64_t heads, int64_t width) {
  const int64_t step = int64_t{gridDim.x} * kThreads;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < requests * heads * width; i += step) {
    const int64_t column = i % width, head = i / width % heads, request = i / width / heads;
    const float* row = rows + (request * layers * heads + head) * width + column;
    float sum = 0;
#pragma unroll 8
    for (int64_t l = 0; l < layers; ++l) sum += __ldcs(row + l * heads * width);
    out.data[request * out.request + head * out.row + column * out.column] = sum / static_cast<float>(layers);
  }
}

unsigned blocks_for(int64_t items, const DeviceFacts& facts) {
  return static_cast<unsigned>(std::clamp<int64_t>(divide_up(items, kThreads), 1, int64_t{16} * facts.multiprocessors));
}

int64_t address(const void* data) { return reinterpret_cast<int64_t>(data); }
bool aligned(const void* data) { return address(data) % kAlignment == 0; }

// least_blocks of score.py: what its registers allow.
int64_t resident_blocks(const Scorer& scorer) { return scorer.head_dim > 128 ? 2 : scorer.heads > 4 ? 3 : 4; }

// The smallest kernel that takes a KV head's whole group at once, or else the one that takes the most.
const Scorer* choose(const Scoring& s, const DeviceFacts& facts) {
  const Scorer* best = nullptr;
  for (const Scorer& scorer : scorers()) {
    if (scorer.dtype != s.key_dtype || scorer.head_dim != 2 * s.bands) continue;
    if (!scorer.kernel->supports(facts.major, facts.minor)) continue;
    if (best == nullptr || best->heads < s.group()) best = &scorer;
  }
  return best;
}

bool fits(const Scoring& s, int64_t item) {
  for (const Pool& pool : s.pools) {
    if (pool.pages < 1 || !aligned(pool.base)) return false;
    for (const int64_t stride : {pool.page_stride, pool.head_stride, pool.token_stride})
      if (stride * item % kAlignment != 0) return false;
  }
  for (const float* values : {s.mean_cos, s.mean_sin, s.freq_scale_sq, s.q_mean_real, s.q_mean_imag, s.q_norm_excess})
    if (!aligned(values)) return false;
  return true;
}

// t / divisor is t * factor >> shift for every t < 2^31.
struct Division {
  uint32_t factor;
  int32_t shift = 31;
  explicit Division(int64_t divisor) {
    while ((int64_t{1} << (shift - 31)) < divisor) ++shift;
    const uint64_t d = static_cast<uint64_t>(divisor);
    // 2^shift / d, rounded up; 2^shift may be 2^62 at most.
    factor = static_cast<uint32_t>(((uint64_t{1} << shift) + d - 1) / d);
  }
};

}  // namespace

bool launch_cute_scorer(const Context& ctx, const Scoring& s, const Tensor& like, const Rows& out,
                        const DeviceScope& scope) {
  const DeviceFacts& facts = device_facts(ctx, scope.device, reinterpret_cast<const void*>(stage_kernel));
  const int64_t item = s.key_dtype == ScalarType::Float8_e4m3fn ? 1 : 2;
  const Scorer* scorer = choose(s, facts);
  if (scorer == nullptr || !fits(s, item)) return false;
  const int64_t units = s.requests * s.layers() * s.kv_heads;
  if (units > kMaxBlocks / kMaxCluster || s.tokens() > kMaxTokens || s.width > kMaxTokens) return false;

  // A cluster shares a row: so few rows use the whole GPU, and of a long one each block keeps fewer scores.
  const int64_t tile = 16 * std::max<int64_t>(1, 128 / (s.bands * item)), score_bytes = 4 * scorer->heads;
  const int64_t resident = resident_blocks(*scorer), places = resident * facts.multiprocessors;
  const int64_t shared = kSharedOfMultiprocessor / resident - kSharedReserve - kHeader;
  const int64_t most_near = shared / score_bytes / tile * tile;  // scores beside those of the other resident blocks
  const int64_t columns = std::min(s.width, s.tokens());         // that can have a score
  const auto capacity_of = [&](int64_t cluster) { return divide_up(divide_up(columns, cluster), tile) * tile; };
  int64_t cluster = 1;
  while (cluster < kMaxCluster &&
         (capacity_of(cluster) > most_near || (2 * units * cluster <= places && columns > cluster * kLeastTokens)))
    cluster *= 2;
  const int64_t capacity = capacity_of(cluster), near = std::min(capacity, most_near);

  const bool one_row = s.mode == Mode::kUnion, mean = s.mode == Mode::kPerHead;
  const int64_t table_bytes = s.layers() * kPoolFields * 8;
  const int64_t row_bytes = mean ? units * s.width * 4 : 0;
  const int64_t spill_bytes = units * cluster * (capacity - near) * score_bytes;
  const int64_t rows_at = divide_up(table_bytes, 256) * 256, spill_at = rows_at + divide_up(row_bytes, 256) * 256;
  const Tensor scratch = new_output(like, {spill_at + spill_bytes}, ScalarType::Byte);
  uint8_t* const memory = static_cast<uint8_t*>(scratch.data_ptr());
  float* const row_memory = reinterpret_cast<float*>(memory + rows_at);
  const Rows rows = mean ? Rows{row_memory, s.layers() * s.kv_heads * s.width, s.width, 1}
                         : Rows{out.data, out.request, one_row ? 0 : out.row, out.column};

  Stage stage{};
  stage.table = reinterpret_cast<int64_t*>(memory);
  stage.requests = s.requests;
  stage.width = s.width;
  for (int64_t first = 0; first < s.layers(); first += kMaxLayers) {
    stage.first_layer = int32(first);
    stage.layers = int32(std::min<int64_t>(s.layers() - first, kMaxLayers));
    for (int32_t i = 0; i < stage.layers; ++i) {
      const Pool& pool = s.pools[static_cast<size_t>(first + i)];
      const int64_t fields[kPoolFields] = {address(pool.base), pool.page_stride * item, pool.head_stride * item,
                                           pool.token_stride * item, pool.pages};
      std::copy_n(fields, kPoolFields, stage.pools[i]);
    }
    stage.empty = one_row && first == 0 ? out : Rows{};
    const int64_t items = stage.empty.data == nullptr ? 1 : s.requests * s.width;
    stage_kernel<<<blocks_for(items, facts), kThreads, 0, scope.stream>>>(stage);
    cuda_check(cudaGetLastError(), "stage_kernel");
  }

  const Division pages(s.tokens_per_page);
  LaunchShape shape{dim3(static_cast<unsigned>(units * cluster))};
  shape.dynamic_shared = static_cast<int>(kHeader + near * score_bytes);
  shape.cluster = static_cast<int>(cluster);
  scorer->kernel->launch(
      ctx, scope.device, shape, scope.stream, address(stage.table), address(s.page_table), s.page_table_stride * 4,
      address(s.prompt_lengths), address(s.source_lengths), address(s.mean_cos), address(s.mean_sin),
      address(s.q_mean_real), address(s.q_mean_imag), address(s.q_norm_excess), address(s.freq_scale_sq),
      address(rows.data), rows.request * 4, rows.row * 4, rows.column * 4, address(memory + spill_at),
      int32(s.layers()), int32(s.kv_heads), int32(s.group()), int32(s.tokens_per_page), pages.factor, pages.shift,
      int32(s.tokens()), int32(s.width), int32(capacity), int32(near), int32(s.normalize), int32(one_row));

  if (mean) {
    mean_kernel<<<blocks_for(s.requests * s.kv_heads * s.width, facts), kThreads, 0, scope.stream>>>(
        row_memory, out, s.requests, s.layers(), s.kv_heads, s.width);
    cuda_check(cudaGetLastError(), "mean_kernel");
  }
  return true;
}

}  // namespace kvc::triattention
