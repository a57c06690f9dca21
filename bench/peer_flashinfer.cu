// FlashInfer's ragged top-k behind one C function: fp32 scores, int32 indices.
#include <cstdint>

#include <flashinfer/math.cuh>

#include <flashinfer/topk.cuh>

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
