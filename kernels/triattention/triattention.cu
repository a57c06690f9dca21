// CUDA side of the TriAttention ops: takes the scorer of score_cute.h where it serves, else prepares and launches the
// Triton kernels of triattention.py.

#include <cstring>

#include "common/boxing.h"
#include "common/launch_compiled.h"
#include "triattention/arguments.h"
#include "triattention/score_cute.h"

namespace kvc::compiled {
extern const CompiledKernel mean_phase, triattention_moments, triattention_reduce;
extern const CompiledKernel triattention_bf16_32, triattention_bf16_64, triattention_bf16_128, triattention_bf16_any;
extern const CompiledKernel triattention_fp16_32, triattention_fp16_64, triattention_fp16_128, triattention_fp16_any;
extern const CompiledKernel triattention_fp32_32, triattention_fp32_64, triattention_fp32_128, triattention_fp32_any;
extern const CompiledKernel triattention_e4m3_32, triattention_e4m3_64, triattention_e4m3_128, triattention_e4m3_any;
}  // namespace kvc::compiled

namespace kvc::triattention {
namespace {

constexpr int64_t kAlignment = 128;  // of columns, in tokens: ALIGNMENT of triattention.py
constexpr int64_t kPiecesPerMultiprocessor = 24;
constexpr int64_t kMaxTokens = INT32_MAX - 1024;  // which the last tile of a request may pass
constexpr int kPoolFields = 5;                    // POOL_FIELDS of triattention.py
constexpr int kMaxLayers = 64;                    // a launch of prepare_kernel carries the pools of
constexpr int kThreads = 256;
constexpr int kWarpSize = 32;

constexpr int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t b) { return divide_up(a, b) * b; }
int32_t int32(int64_t value) { return static_cast<int32_t>(value); }

struct Preparation {
  int64_t pools[kMaxLayers][kPoolFields];
  int32_t first_layer, layer_count;  // of `pools`
  int32_t requests, layers, q_heads, bands;
  int64_t tokens;  // that the page table can name
  int32_t wanted_pieces, pieces;
  const int32_t *prompt_lengths, *source_lengths;
  const float *mean_cos, *mean_sin, *freq_scale_sq, *q_mean_real, *q_mean_imag, *q_norm_excess;
  int64_t* pool_table;
  int4* piece_table;  // request or -1, first token, end, token of column 0
  int32_t* first_pieces;
  float* coefficients;
};

template <typename T>
__device__ T block_sum(T value, T* shared) {
  for (int step = kWarpSize / 2; step > 0; step /= 2) value += __shfl_xor_sync(0xFFFFFFFFu, value, step);
  __syncthreads();
  if (threadIdx.x % kWarpSize == 0) shared[threadIdx.x / kWarpSize] = value;
  __syncthreads();
  value = 0;
  for (int warp = 0; warp < kThreads / kWarpSize; ++warp) value += shared[warp];
  return value;
}

// Tokens to score of a request, from the start of its columns on.
struct Span {
  int64_t base, first, last;
  __device__ Span(const Preparation& p, int r) {
    first = max(int64_t{p.prompt_lengths[r]}, int64_t{0});
    last = max(first, min(int64_t{p.source_lengths[r]}, p.tokens));
    base = first / kAlignment * kAlignment;
  }
  __device__ int64_t length() const { return last > first ? last - base : 0; }
};

// Cuts the requests into about `wanted_pieces` pieces of equal length, whatever lengths the device holds: a multiple of
// kAlignment so long that there are never more than `pieces`.
__device__ void plan_pieces(const Preparation& p) {
  __shared__ int64_t sums[kThreads / kWarpSize];
  __shared__ int32_t counts[kThreads];
  int64_t mine = 0;
  for (int r = static_cast<int>(threadIdx.x); r < p.requests; r += kThreads) mine += Span(p, r).length();
  const int64_t total = block_sum(mine, sums);
  const int64_t share = (total + p.wanted_pieces - 1) / p.wanted_pieces;
  const int64_t length = max((share + kAlignment - 1) / kAlignment, int64_t{1}) * kAlignment;
  int32_t before = 0;
  for (int first = 0; first < p.requests; first += kThreads) {
    const int r = first + static_cast<int>(threadIdx.x);
    const Span span = r < p.requests ? Span(p, r) : Span(p, first);
    const int32_t count = r < p.requests ? static_cast<int32_t>((span.length() + length - 1) / length) : 0;
    __syncthreads();
    counts[threadIdx.x] = count;
    for (int step = 1; step < kThreads; step *= 2) {
      __syncthreads();
      const int32_t add = static_cast<int>(threadIdx.x) >= step ? counts[static_cast<int>(threadIdx.x) - step] : 0;
      __syncthreads();
      counts[threadIdx.x] += add;
    }
    __syncthreads();
    if (r < p.requests) p.first_pieces[r] = before + counts[threadIdx.x] - count;
    before += counts[kThreads - 1];
  }
  if (threadIdx.x == 0) p.first_pieces[p.requests] = before;
  __threadfence_block();
  __syncthreads();
  const volatile int32_t* const starts = p.first_pieces;
  for (int32_t q = static_cast<int32_t>(threadIdx.x); q < p.pieces; q += kThreads) {
    int4 piece = make_int4(-1, 0, 0, 0);
    if (q < before) {
      int32_t low = 0, high = p.requests;  // the last request that starts at or before q
      while (high - low > 1) {
        const int32_t middle = low + (high - low) / 2;
        if (starts[middle] <= q) low = middle;
        else high = middle;
      }
      const Span span(p, low);
      const int64_t begin = span.base + (q - starts[low]) * length;
      piece = make_int4(low, static_cast<int>(max(begin, span.first)), static_cast<int>(min(begin + length, span.last)),
                        static_cast<int>(span.base));
    }
    p.piece_table[q] = piece;
  }
}

// Block 0 plans and uploads the pools; the others fold the statistics of queries with the phases of requests.
__global__ void __launch_bounds__(kThreads) prepare_kernel(const __grid_constant__ Preparation p) {
  if (blockIdx.x == 0) {
    for (int i = static_cast<int>(threadIdx.x); i < p.layer_count * kPoolFields; i += kThreads)
      p.pool_table[p.first_layer * kPoolFields + i] = p.pools[i / kPoolFields][i % kPoolFields];
    if (p.first_layer == 0) plan_pieces(p);
    return;
  }
  const int64_t statistics = int64_t{p.layers} * p.q_heads * p.bands;
  const int64_t step = int64_t{gridDim.x - 1} * kThreads;
  for (int64_t i = int64_t{blockIdx.x - 1} * kThreads + threadIdx.x; i < statistics; i += step) {
    const int64_t row = i / p.bands;
    const int f = static_cast<int>(i - row * p.bands);
    const float scale = p.freq_scale_sq[f], real = p.q_mean_real[i], imag = p.q_mean_imag[i];
    const float excess = scale * p.q_norm_excess[i];
    for (int r = static_cast<int>(blockIdx.y); r < p.requests; r += static_cast<int>(gridDim.y)) {
      const float cosine = p.mean_cos[int64_t{r} * p.bands + f], sine = p.mean_sin[int64_t{r} * p.bands + f];
      float* const to = p.coefficients + ((int64_t{r} * p.layers * p.q_heads + row) * 3) * p.bands + f;
      to[0] = scale * (real * cosine - imag * sine);
      to[p.bands] = scale * (real * sine + imag * cosine);
      to[2 * p.bands] = excess;
    }
  }
}

// One allocation for everything, cut into parts that each begin at a multiple of 256 bytes.
class Scratch {
 public:
  int64_t add(int64_t bytes) {
    const int64_t at = bytes_;
    bytes_ += round_up(bytes, 256);
    return at;
  }
  void allocate(const Tensor& like) {
    memory_ = new_output(like, {bytes_}, ScalarType::Byte);
    base_ = static_cast<uint8_t*>(memory_->data_ptr());
  }
  template <typename T>
  T* at(int64_t part) const {
    return reinterpret_cast<T*>(base_ + part);
  }

 private:
  int64_t bytes_ = 0;
  std::optional<Tensor> memory_;
  uint8_t* base_ = nullptr;
};

int64_t item_bytes(ScalarType dtype) {
  return dtype == ScalarType::Float ? 4 : dtype == ScalarType::Float8_e4m3fn ? 1 : 2;
}

// Whether both halves of every key begin at a multiple of 16 bytes.
bool is_aligned(const Scoring& s) {
  const int64_t item = item_bytes(s.key_dtype);
  int64_t all = s.bands * item;
  for (const Pool& pool : s.pools)
    all |= reinterpret_cast<int64_t>(pool.base) | item * (pool.page_stride | pool.head_stride | pool.token_stride);
  return all % 16 == 0;
}

KernelLoader& scorer_for(const Scoring& s) {
  using namespace compiled;
  static KernelLoader loaders[4][4] = {{KernelLoader(triattention_bf16_32), KernelLoader(triattention_bf16_64),
                                        KernelLoader(triattention_bf16_128), KernelLoader(triattention_bf16_any)},
                                       {KernelLoader(triattention_fp16_32), KernelLoader(triattention_fp16_64),
                                        KernelLoader(triattention_fp16_128), KernelLoader(triattention_fp16_any)},
                                       {KernelLoader(triattention_fp32_32), KernelLoader(triattention_fp32_64),
                                        KernelLoader(triattention_fp32_128), KernelLoader(triattention_fp32_any)},
                                       {KernelLoader(triattention_e4m3_32), KernelLoader(triattention_e4m3_64),
                                        KernelLoader(triattention_e4m3_128), KernelLoader(triattention_e4m3_any)}};
  const int dtype = s.key_dtype == ScalarType::BFloat16 ? 0
                    : s.key_dtype == ScalarType::Half   ? 1
                    : s.key_dtype == ScalarType::Float  ? 2
                                                        : 3;
  return loaders[dtype][!is_aligned(s) ? 3 : s.bands <= 32 ? 0 : s.bands <= 64 ? 1 : 2];
}

void prepare(const Scoring& s, Preparation& p, const DeviceFacts& facts, cudaStream_t stream) {
  for (int64_t first = 0; first < s.layers(); first += kMaxLayers) {
    p.first_layer = int32(first);
    p.layer_count = int32(std::min<int64_t>(s.layers() - first, kMaxLayers));
    for (int l = 0; l < p.layer_count; ++l) {
      const Pool& pool = s.pools[static_cast<size_t>(first + l)];
      const int64_t fields[kPoolFields] = {reinterpret_cast<int64_t>(pool.base), pool.pages, pool.page_stride,
                                           pool.head_stride, pool.token_stride};
      std::copy(std::begin(fields), std::end(fields), p.pools[l]);
    }
    dim3 grid(1);
    if (first == 0) {
      const int64_t across = divide_up(s.layers() * s.q_heads * s.bands, kThreads);
      const int64_t resident = int64_t{facts.multiprocessors} * 8;
      grid.x = static_cast<unsigned>(std::min(across, resident) + 1);
      grid.y = static_cast<unsigned>(std::clamp<int64_t>(resident / grid.x, 1, s.requests));
    }
    prepare_kernel<<<grid, kThreads, 0, stream>>>(p);
    cuda_check(cudaGetLastError(), "prepare_kernel");
  }
}

void score_with_triton(const Context& ctx, const Scoring& s, const Tensor& like, const Rows& out,
                       const DeviceScope& scope) {
  const DeviceFacts& facts = device_facts(ctx, scope.device, reinterpret_cast<const void*>(prepare_kernel));
  const int64_t groups = s.layers() * s.kv_heads, rows = s.score_rows(), all_heads = s.layers() * s.q_heads;
  const int64_t tokens = std::min(s.tokens(), kMaxTokens);
  const int64_t columns = round_up(std::min(s.width, tokens) + kAlignment - 1, kAlignment);
  const int64_t wanted = std::max<int64_t>(facts.multiprocessors * kPiecesPerMultiprocessor / groups, 1);
  const int64_t pieces = wanted + s.requests;
  constexpr int64_t kColumnBlock = 32, kMomentBlock = 64;  // BLOCK_C of reduce, BLOCK_R of moments
  const int64_t column_blocks = divide_up(s.width + kAlignment - 1, kColumnBlock);
  const int64_t moment_blocks = divide_up(rows, kMomentBlock);
  const auto check_grid = [&](int64_t blocks) {
    if (blocks > INT32_MAX) ctx.value_error("the work of a call", "at most 2^31 - 1 thread blocks", blocks);
  };
  check_grid(pieces * groups);
  check_grid(s.requests * s.rows() * column_blocks);
  check_grid(s.requests * moment_blocks);

  Scratch scratch;
  const int64_t pool_part = scratch.add(s.layers() * kPoolFields * 8);
  const int64_t piece_part = scratch.add(pieces * 16);
  const int64_t first_part = scratch.add((s.requests + 1) * 4);
  const int64_t coefficient_part = scratch.add(s.requests * all_heads * 3 * s.bands * 4);
  const int64_t moment_part = scratch.add(s.normalize ? pieces * 3 * rows * 4 : 0);
  const int64_t normal_part = scratch.add(s.normalize ? s.requests * 2 * rows * 4 : 0);
  const int64_t score_part = scratch.add(s.requests * rows * columns * 4);
  scratch.allocate(like);

  Preparation p;
  p.requests = int32(s.requests);
  p.layers = int32(s.layers());
  p.q_heads = int32(s.q_heads);
  p.bands = int32(s.bands);
  p.tokens = tokens;
  p.wanted_pieces = int32(wanted);
  p.pieces = int32(pieces);
  p.prompt_lengths = s.prompt_lengths;
  p.source_lengths = s.source_lengths;
  p.mean_cos = s.mean_cos;
  p.mean_sin = s.mean_sin;
  p.freq_scale_sq = s.freq_scale_sq;
  p.q_mean_real = s.q_mean_real;
  p.q_mean_imag = s.q_mean_imag;
  p.q_norm_excess = s.q_norm_excess;
  p.pool_table = scratch.at<int64_t>(pool_part);
  p.piece_table = scratch.at<int4>(piece_part);
  p.first_pieces = scratch.at<int32_t>(first_part);
  p.coefficients = scratch.at<float>(coefficient_part);
  prepare(s, p, facts, scope.stream);

  float* const scores = scratch.at<float>(score_part);
  float* const moments = scratch.at<float>(moment_part);
  float* const normals = scratch.at<float>(normal_part);
  const int32_t normalize = s.normalize ? 1 : 0;
  scorer_for(s).launch_triton(ctx, scope.device, dim3(static_cast<unsigned>(pieces * groups)), scope.stream,
                              p.pool_table, p.piece_table, p.coefficients, s.page_table, s.prompt_lengths, scores,
                              moments, s.page_table_stride, columns, p.layers, int32(s.kv_heads), int32(s.group()),
                              p.bands, int32(s.tokens_per_page), int32(s.width), normalize);
  if (s.normalize) {
    static KernelLoader merge(compiled::triattention_moments);
    merge.launch_triton(ctx, scope.device, dim3(static_cast<unsigned>(s.requests * moment_blocks)), scope.stream,
                        moments, p.first_pieces, normals, int32(rows), int32(moment_blocks));
  }
  static KernelLoader reduce(compiled::triattention_reduce);
  const bool per_head = s.mode == Mode::kPerHead;
  const int64_t plane_rows = rows / s.layers();
  const int64_t inner = s.mode == Mode::kUnion ? rows : plane_rows / s.kv_heads;
  reduce.launch_triton(ctx, scope.device, dim3(static_cast<unsigned>(s.requests * s.rows() * column_blocks)),
                       scope.stream, scores, normals, s.prompt_lengths, s.source_lengths, out.data, out.request,
                       out.row, out.column, columns, tokens, int32(rows), int32(inner),
                       int32(per_head ? s.layers() : 1), int32(plane_rows), int32(s.rows()), int32(s.width),
                       int32(column_blocks), normalize);
}

template <typename T>
std::vector<T> to_host(const T* device, int64_t count, cudaStream_t stream) {
  std::vector<T> host(static_cast<size_t>(count) + 1);  // never without an address
  if (count > 0)
    cuda_check(
        cudaMemcpyAsync(host.data(), device, static_cast<size_t>(count) * sizeof(T), cudaMemcpyDeviceToHost, stream),
        "cudaMemcpyAsync");
  cuda_check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  return host;
}

void check_on_host(const Context& ctx, const Scoring& s, cudaStream_t stream) {
  Scoring host = s;
  const std::vector<int32_t> prompts = to_host(s.prompt_lengths, s.requests, stream);
  const std::vector<int32_t> sources = to_host(s.source_lengths, s.requests, stream);
  const int64_t entries = s.requests == 0 ? 0 : (s.requests - 1) * s.page_table_stride + s.max_pages;
  const std::vector<int32_t> table = to_host(s.page_table, entries, stream);
  host.prompt_lengths = prompts.data();
  host.source_lengths = sources.data();
  host.page_table = table.data();
  check_scoring(ctx, host);
}

// For comparisons: the scorer of other GPUs, whatever the GPU.
bool only_triton() {
  static const bool wanted = [] {
    const char* scorer = std::getenv("KVC_TRIATTENTION_SCORER");
    return scorer != nullptr && std::strcmp(scorer, "triton") == 0;
  }();
  return wanted;
}

void score(const Context& ctx, const Scoring& s, const Tensor& like, const Rows& out, const DeviceScope& scope) {
  if (debug_mode) check_on_host(ctx, s, scope.stream);
  if (s.empty()) return;
  if (!only_triton() && launch_cute_scorer(ctx, s, like, out, scope)) return;
  score_with_triton(ctx, s, like, out, scope);
}

void mean_phase_rows(const Context& ctx, const PhaseArguments& p, const Rows& cosine, const Rows& sine,
                     const DeviceScope& scope) {
  if (p.requests == 0 || p.bands == 0) return;
  static KernelLoader kernel(compiled::mean_phase);
  constexpr int64_t kBandBlock = 16;  // BLOCK_F of mean_phase
  const int64_t blocks = divide_up(p.bands, kBandBlock);
  if (p.requests * blocks > INT32_MAX)
    ctx.value_error("the work of a call", "at most 2^31 - 1 thread blocks", p.requests * blocks);
  kernel.launch_triton(ctx, scope.device, dim3(static_cast<unsigned>(p.requests * blocks)), scope.stream, p.positions,
                       p.omega, p.offsets, cosine.data, sine.data, int32(p.wide_positions ? 2 : 1), int32(p.bands),
                       int32(p.offset_count), int32(blocks), cosine.request, cosine.column, sine.request, sine.column);
}

void check_cuda(const Context& ctx, const Tensor& tensor, const char* argument) {
  if (!tensor.is_cuda()) ctx.type_error(argument, "a CUDA tensor", Context::describe_device(tensor));
}

std::tuple<Tensor, Tensor> mean_phase(const Tensor& positions, const Tensor& omega, const Tensor& offsets) {
  const Context ctx{"mean_phase"};
  check_cuda(ctx, positions, "positions");
  const DeviceScope scope(positions);
  const PhaseArguments p = read_phase(ctx, positions, omega, offsets);
  Tensor cosine = new_output(omega, {p.requests, p.bands}, ScalarType::Float),
         sine = new_output(omega, {p.requests, p.bands}, ScalarType::Float);
  mean_phase_rows(ctx, p, rows_of(cosine), rows_of(sine), scope);
  return {cosine, sine};
}

void mean_phase_out(const Tensor& positions, const Tensor& omega, const Tensor& offsets, const Tensor& cos,
                    const Tensor& sin) {
  const Context ctx{"mean_phase"};
  check_cuda(ctx, positions, "positions");
  const DeviceScope scope(positions);
  const PhaseArguments p = read_phase(ctx, positions, omega, offsets);
  const auto [cosine, sine] = read_phase_outputs(ctx, p, positions, omega, offsets, cos, sin);
  mean_phase_rows(ctx, p, cosine, sine, scope);
}

Tensor triattention_score(const TensorList& key_pools, const Tensor& page_table, const Tensor& prompt_lengths,
                          const Tensor& source_lengths, const Tensor& mean_cos, const Tensor& mean_sin,
                          const Tensor& q_mean_real, const Tensor& q_mean_imag, const Tensor& q_norm_excess,
                          const Tensor& freq_scale_sq, const std::string& mode, bool normalize, int64_t width) {
  const Context ctx{"triattention_score"};
  if (key_pools.empty()) ctx.value_error("key_pools", "at least one tensor", "none");
  const Tensor first = key_pools.tensor(0);
  check_cuda(ctx, first, "key_pools[0]");
  const DeviceScope scope(first);
  const Scoring s = read_scoring(ctx, key_pools, page_table, prompt_lengths, source_lengths, mean_cos, mean_sin,
                                 q_mean_real, q_mean_imag, q_norm_excess, freq_scale_sq, mode, normalize, width);
  Tensor out = new_output(mean_cos, s.sizes(), ScalarType::Float);
  score(ctx, s, mean_cos, rows_of(out), scope);
  return out;
}

void triattention_score_out(const TensorList& key_pools, const Tensor& page_table, const Tensor& prompt_lengths,
                            const Tensor& source_lengths, const Tensor& mean_cos, const Tensor& mean_sin,
                            const Tensor& q_mean_real, const Tensor& q_mean_imag, const Tensor& q_norm_excess,
                            const Tensor& freq_scale_sq, const std::string& mode, bool normalize, int64_t width,
                            const Tensor& out) {
  const Context ctx{"triattention_score"};
  if (key_pools.empty()) ctx.value_error("key_pools", "at least one tensor", "none");
  const Tensor first = key_pools.tensor(0);
  check_cuda(ctx, first, "key_pools[0]");
  const DeviceScope scope(first);
  const Scoring s = read_scoring(ctx, key_pools, page_table, prompt_lengths, source_lengths, mean_cos, mean_sin,
                                 q_mean_real, q_mean_imag, q_norm_excess, freq_scale_sq, mode, normalize, width);
  const Rows rows = read_score_output(ctx, s, key_pools,
                                      {{"page_table", page_table},
                                       {"prompt_lengths", prompt_lengths},
                                       {"source_lengths", source_lengths},
                                       {"mean_cos", mean_cos},
                                       {"mean_sin", mean_sin},
                                       {"q_mean_real", q_mean_real},
                                       {"q_mean_imag", q_mean_imag},
                                       {"q_norm_excess", q_norm_excess},
                                       {"freq_scale_sq", freq_scale_sq}},
                                      out);
  score(ctx, s, mean_cos, rows, scope);
}

}  // namespace
}  // namespace kvc::triattention

STABLE_TORCH_LIBRARY_IMPL(KVC_NAMESPACE, CUDA, m) {
  m.impl("mean_phase", kvc::boxed<&kvc::triattention::mean_phase>);
  m.impl("mean_phase.out", kvc::boxed<&kvc::triattention::mean_phase_out>);
  m.impl("triattention_score", kvc::boxed<&kvc::triattention::triattention_score>);
  m.impl("triattention_score.out", kvc::boxed<&kvc::triattention::triattention_score_out>);
}
