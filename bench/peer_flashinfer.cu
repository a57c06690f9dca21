// FlashInfer behind C functions: its ragged top-k of fp32 scores, and its NVFP4 cache of BF16 heads of 128.
#include <cstdint>

#include <flashinfer/math.cuh>

#include <flashinfer/page.cuh>
#include <flashinfer/topk.cuh>

#include <dequantization.cuh>

// `states` are zeroed bytes, as many as their Python package takes. deterministic: in a fixed order, ties to the
// smaller index; else any order and any choice among ties.
extern "C" int flashinfer_topk(float* scores, int32_t* lengths, const int32_t* bases, int32_t* out, void* states,
                               int64_t rows, int64_t width, int64_t k, int deterministic, cudaStream_t stream) {
  using namespace flashinfer::sampling;
  return TopKRaggedTransformDispatch<float, int32_t>(scores, out, bases, lengths, nullptr, static_cast<uint32_t>(rows),
                                                     static_cast<uint32_t>(k), static_cast<uint32_t>(width),
                                                     static_cast<RadixRowState*>(states), deterministic != 0,
                                                     deterministic ? TopKTieBreak::Small : TopKTieBreak::None, stream);
}

// Keys and values [tokens, heads, 128] into pages [pages, heads, page_size, 64] of a cache and their scales [.., 8].
// One request owns all pages: `indptr` is {0, pages}, `requests` holds zeros.
extern "C" int flashinfer_append(void* keys, void* values, int32_t* requests, int32_t* positions, uint8_t* key_cache,
                                 uint8_t* value_cache, uint8_t* key_scales, uint8_t* value_scales, int32_t* pages,
                                 int32_t* indptr, int32_t* last_page_length, int64_t tokens, int64_t heads,
                                 int64_t page_size, cudaStream_t stream) {
  constexpr size_t kDim = 128, kPacked = kDim / 2, kScales = kDim / 16;
  const flashinfer::paged_kv_t<uint8_t, int32_t> cache(heads, page_size, kPacked, 1, flashinfer::QKVLayout::kHND,
                                                       key_cache, value_cache, pages, indptr, last_page_length);
  const size_t page = heads * page_size * kScales, head = page_size * kScales;
  return flashinfer::NVFP4QuantizeAppendPagedKVCache(
      cache, static_cast<nv_bfloat16*>(keys), static_cast<nv_bfloat16*>(values), requests, positions,
      static_cast<uint32_t>(tokens), heads * kDim, kDim, heads * kDim, kDim, key_scales, value_scales, page, kScales,
      head, page, kScales, head, 1.0f, 1.0f, stream);
}

// Rows of 64 bytes and 8 scales to 128 BF16, as its Python function launches it.
extern "C" int flashinfer_dequantize(const uint8_t* data, const uint8_t* scales, const float* global_scale, void* out,
                                     int64_t rows, cudaStream_t stream) {
  constexpr int kDim = 128;
  nvfp4_dequant_vectorized_kernel<__nv_bfloat16><<<rows, 128, sizeof(float) + kDim / NVFP4_BLOCK_SIZE, stream>>>(
      data, scales, global_scale, static_cast<__nv_bfloat16*>(out), static_cast<int>(rows), kDim);
  return cudaGetLastError();
}
