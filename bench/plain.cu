// The plainest kernels that move bytes 16 at a time: what kvc's kernels are held against.
#include <cuda_runtime.h>
#include <cstdint>

namespace {

__global__ void store_kernel(uint4* to, int64_t chunks) {
  const uint4 value = make_uint4(threadIdx.x, blockIdx.x, 3, 4);
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < chunks; i += int64_t{gridDim.x} * blockDim.x)
    to[i] = value;
}

template <bool kStore>
__global__ void load_kernel(const uint4* from, uint4* to, int64_t chunks) {
  constexpr int kUnroll = 4;
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  uint4 sum = make_uint4(0, 0, 0, 0);
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < chunks; i += kUnroll * step) {
    uint4 v[kUnroll];
#pragma unroll
    for (int k = 0; k < kUnroll; ++k)
      if (i + k * step < chunks) v[k] = from[i + k * step];
#pragma unroll
    for (int k = 0; k < kUnroll; ++k)
      if (i + k * step < chunks) {
        if (kStore) to[i + k * step] = v[k];
        else sum.x ^= v[k].x ^ v[k].y ^ v[k].z ^ v[k].w;
      }
  }
  if (!kStore && sum.x == 0x5EED5EEDu) to[0] = sum;
}

}  // namespace

extern "C" {

void plain_store(void* to, int64_t bytes, int blocks, cudaStream_t stream) {
  store_kernel<<<blocks, 256, 0, stream>>>(static_cast<uint4*>(to), bytes / 16);
}

void plain_load(const void* from, void* sink, int64_t bytes, int blocks, cudaStream_t stream) {
  load_kernel<false>
      <<<blocks, 256, 0, stream>>>(static_cast<const uint4*>(from), static_cast<uint4*>(sink), bytes / 16);
}

void plain_copy(const void* from, void* to, int64_t bytes, int blocks, cudaStream_t stream) {
  load_kernel<true><<<blocks, 256, 0, stream>>>(static_cast<const uint4*>(from), static_cast<uint4*>(to), bytes / 16);
}
}
