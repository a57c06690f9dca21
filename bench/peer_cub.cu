// cub::DeviceBatchedTopK behind one C function: fp32 scores, int32 indices, ties to the smaller index, no order.

// Its compile-time check does not know that the tier of short rows too runs on a cluster here.
#define CUB_DISABLE_TOPK_UNSUPPORTED_ARCH_ASSERT
#include <cub/device/device_batched_topk.cuh>

#include <cuda/argument>
#include <cuda/iterator>
#include <limits>

namespace {

// CUB sizes a launch by the bounds it is told: a static one per tier, and the row width.
template <int64_t kBound>
cudaError_t run(void* scratch, size_t* bytes, const float* scores, const int32_t* lengths, int32_t* out, int64_t rows,
                int64_t width, int64_t k, cudaStream_t stream) {
  namespace execution = cuda::execution;
  constexpr int32_t kLowest = std::numeric_limits<int32_t>::min();
  const auto keys = cuda::make_strided_iterator(cuda::make_counting_iterator(scores), width);
  const auto values = cuda::make_strided_iterator(cuda::make_counting_iterator(out), k);
  const auto no_keys = cuda::make_constant_iterator(cuda::discard_iterator{});
  const auto indices = cuda::make_constant_iterator(cuda::make_counting_iterator(int32_t{0}));
  const auto sizes = cuda::args::deferred_sequence{lengths, cuda::args::bounds<kLowest, static_cast<int32_t>(kBound)>(),
                                                   cuda::args::bounds(kLowest, static_cast<int32_t>(width))};
  const auto count = cuda::args::immediate{k < width ? k : width, cuda::args::bounds<int64_t{1}, kBound>()};
  const auto required =
      execution::require(execution::determinism::gpu_to_gpu, execution::tie_break::prefer_smaller_index,
                         execution::output_ordering::unsorted);
  const auto environment = cuda::std::execution::env{required, cuda::stream_ref{stream}};
  return cub::DeviceBatchedTopK::MaxPairs(scratch, *bytes, keys, no_keys, indices, values, sizes, count,
                                          cuda::args::immediate{rows}, environment);
}

}  // namespace

// Without `scratch` the bytes it needs go to `*bytes`. Columns behind a short row's winners are not written.
extern "C" int cub_topk(void* scratch, size_t* bytes, const float* scores, const int32_t* lengths, int32_t* out,
                        int64_t rows, int64_t width, int64_t k, cudaStream_t stream) {
  return width <= 8192 ? run<8192>(scratch, bytes, scores, lengths, out, rows, width, k, stream)
                       : run<int64_t{1} << 21>(scratch, bytes, scores, lengths, out, rows, width, k, stream);
}
