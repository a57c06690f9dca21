// CUDA selection: a block per row, four passes of eight bits that find the pivot, and one that writes in order.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "topk/key.h"
#include "topk/kernels.h"

namespace kvc::topk {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;

__device__ __forceinline__ uint32_t load_key(const float* row, int64_t i) { return ordered_key(row[i]); }
__device__ __forceinline__ uint32_t load_key(const __half* row, int64_t i) { return ordered_key(__half2float(row[i])); }
__device__ __forceinline__ uint32_t load_key(const __nv_bfloat16* row, int64_t i) {
  return ordered_key(__bfloat162float(row[i]));
}

struct Pivot {
  uint32_t key;
  int64_t ties;  // scores equal to it that are kept
};

// The digit of the pivot at `shift`, by thread 0; `wanted` becomes what is left for that digit's bucket.
__device__ Pivot next_digit(const int32_t* histogram, Pivot pivot, int shift) {
  int digit = 255;
  while (histogram[digit] < pivot.ties) pivot.ties -= histogram[digit--];
  pivot.key |= static_cast<uint32_t>(digit) << shift;
  return pivot;
}

template <typename T>
__device__ Pivot find_pivot(const T* row, int64_t length, int64_t k) {
  __shared__ int32_t histogram[256];
  __shared__ Pivot shared;
  Pivot pivot{0, k};
  for (int shift = 24; shift >= 0; shift -= 8) {
    for (int i = threadIdx.x; i < 256; i += kThreads) histogram[i] = 0;
    __syncthreads();
    const uint64_t mask = ~uint64_t{0} << (shift + 8);
    for (int64_t i = threadIdx.x; i < length; i += kThreads) {
      const uint32_t key = load_key(row, i);
      if (((key ^ pivot.key) & mask) == 0) atomicAdd(&histogram[key >> shift & 255], 1);
    }
    __syncthreads();
    if (threadIdx.x == 0) shared = next_digit(histogram, pivot, shift);
    __syncthreads();
    pivot = shared;
  }
  return pivot;
}

template <typename T>
__global__ void __launch_bounds__(kThreads) select_kernel(Selection s) {
  __shared__ int32_t above_of[kWarps], equal_of[kWarps];
  const int warp = threadIdx.x / 32;
  const uint32_t below = (1u << threadIdx.x % 32) - 1;
  for (int64_t r = blockIdx.x; r < s.rows; r += gridDim.x) {
    const T* row = static_cast<const T*>(s.scores) + r * s.row_stride;
    int32_t* out = s.out + r * s.k;
    const int32_t base = s.bases ? s.bases[r] : 0;
    const int64_t length = max(int64_t{0}, min(int64_t{s.lengths[r]}, s.width));
    const Pivot pivot = s.k < length ? find_pivot(row, length, s.k) : Pivot{0, 0};
    int64_t above_before = 0, equal_before = 0;
    for (int64_t first = 0; first < length; first += kThreads) {
      const int64_t i = first + threadIdx.x;
      const uint32_t key = i < length ? load_key(row, i) : 0;
      const bool above = i < length && key > pivot.key, equal = i < length && key == pivot.key;
      const uint32_t above_here = __ballot_sync(~0u, above), equal_here = __ballot_sync(~0u, equal);
      if (threadIdx.x % 32 == 0) {
        above_of[warp] = __popc(above_here);
        equal_of[warp] = __popc(equal_here);
      }
      __syncthreads();
      int64_t at = above_before + __popc(above_here & below), ties = equal_before + __popc(equal_here & below);
      for (int w = 0; w < kWarps; ++w) {
        at += w < warp ? above_of[w] : 0;
        ties += w < warp ? equal_of[w] : 0;
        above_before += above_of[w];
        equal_before += equal_of[w];
      }
      if (above || (equal && ties < pivot.ties)) out[at + min(ties, pivot.ties)] = base + static_cast<int32_t>(i);
      __syncthreads();
    }
    for (int64_t i = above_before + min(equal_before, pivot.ties) + threadIdx.x; i < s.k; i += kThreads) out[i] = -1;
  }
}

template <typename T>
void launch(const Context& ctx, const Selection& s, const DeviceScope& scope) {
  const DeviceFacts& facts = device_facts(ctx, scope.device, reinterpret_cast<const void*>(&select_kernel<T>));
  const int64_t blocks = std::min<int64_t>(s.rows, 4 * facts.multiprocessors);
  select_kernel<T><<<static_cast<unsigned>(blocks), kThreads, 0, scope.stream>>>(s);
  cuda_check(cudaGetLastError(), "select_kernel");
}

}  // namespace

void select(const Context& ctx, const Selection& s, const DeviceScope& scope) {
  switch (s.dtype) {
    case Score::kFloat: return launch<float>(ctx, s, scope);
    case Score::kHalf: return launch<__half>(ctx, s, scope);
    case Score::kBFloat16: return launch<__nv_bfloat16>(ctx, s, scope);
  }
}

}  // namespace kvc::topk
