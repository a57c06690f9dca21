// The plainest kernels that move bytes 16 at a time: what kvc's kernels are held against.
#include <cuda_runtime.h>
#include <cstdint>
#include <vector>

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

// `pages` copies of `bytes` in one call: from row from_rows[i] of `from` to row i of `to`. On no default stream.
int plain_batch(const void* from, const int64_t* from_rows, void* to, int64_t bytes, int64_t pages,
                cudaStream_t stream) {
#if CUDART_VERSION >= 13000
  std::vector<const void*> sources(pages), targets(pages);
  const std::vector<size_t> sizes(pages, bytes);
  for (int64_t i = 0; i < pages; ++i) {
    sources[i] = static_cast<const char*>(from) + from_rows[i] * bytes;
    targets[i] = static_cast<char*>(to) + i * bytes;
  }
  cudaMemcpyAttributes attributes = {};
  attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
  size_t first = 0;
  return cudaMemcpyBatchAsync(targets.data(), sources.data(), sizes.data(), pages, &attributes, &first, 1, stream);
#else
  return cudaErrorNotSupported;
#endif
}

void plain_copy(const void* from, void* to, int64_t bytes, int blocks, cudaStream_t stream) {
  load_kernel<true><<<blocks, 256, 0, stream>>>(static_cast<const uint4*>(from), static_cast<uint4*>(to), bytes / 16);
}
}
