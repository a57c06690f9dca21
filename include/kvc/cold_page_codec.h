// The cold-page codec as a C++ engine calls it: pages of a KV cache to fixed-size blocks and back, without torch.
//
// A *hot* page is spread over the pools of its group, slot i of every pool being page i. A *cold* page is one block of
// `queryColdPageBytes` bytes; page j lies at `cold_base + j * queryColdPageBytes`. The codec owns neither. Its bytes
// are those of cold page format version 1, whoever wrote them: this codec, torch.ops.kvc.encode_pages_ or a CPU.
#pragma once

#include <cstdint>
#include <memory>

namespace kvc {

// Slots of one page's move. Encode: dst is cold, src is hot. Decode: dst is hot, src is cold.
struct alignas(8) PageIndexPair {
  int32_t dst;
  int32_t src;
};
static_assert(sizeof(PageIndexPair) == 8, "read by kernels as two int32");

// Where `encode` and `decode` read page index pairs. kBadLocation: a layer group the codec does not know.
enum class PageIndexLocation : int32_t { kBadLocation = -1, kHost = 0, kDevice = 1 };

enum class HotTransform : int32_t { kNvfp4 = 0, kCopy = 1 };
enum class HotElement : int32_t { kFloat16 = 0, kBFloat16 = 1, kFloat32 = 2, kFloat8E4M3 = 3 };

// One run of bytes of a hot page's slot. What comes after `nbytes` is read for kNvfp4 alone: `nbytes` are then
// `rows` rows of `row_elements` elements, of which [quantized_start, + quantized_elements) becomes NVFP4 and
// [residual_start, + residual_elements) inside it two components. Numbers of elements are multiples of 16, and so are
// the addresses of kNvfp4 buffers.
struct HotBuffer {
  int64_t layer = 0;   // in ascending order; a layer's buffers become one record of the cold page
  int64_t pool = 0;    // index into the group's pools
  int64_t offset = 0;  // first byte, from the start of a slot
  int64_t nbytes = 0;
  HotTransform transform = HotTransform::kCopy;
  HotElement element = HotElement::kBFloat16;
  int64_t rows = 0;
  int64_t row_elements = 0;
  int64_t quantized_start = 0;
  int64_t quantized_elements = 0;
  int64_t residual_start = 0;
  int64_t residual_elements = 0;
  float global_scale = 1.0f;  // multiplier applied on decode
};

// Layers whose pages live and move together (a life cycle), identified by `id` >= 0 across all groups.
struct LayerGroup {
  int32_t id = -1;
  const HotBuffer* buffers = nullptr;
  int64_t num_buffers = 0;
};

struct HotPool {
  void* base = nullptr;  // slot 0, host or device memory
  int64_t slots = 0;
  int64_t slot_bytes = 0;   // that belong to the slot
  int64_t slot_stride = 0;  // bytes from one slot to the next
};

// Pools that share their slot numbers, and the layer groups whose pages take these slots.
struct HotPoolGroup {
  const HotPool* pools = nullptr;
  int32_t num_pools = 0;
  const LayerGroup* layer_groups = nullptr;
  int32_t num_layer_groups = 0;
};

class ColdPageCodec {
 public:
  virtual ~ColdPageCodec() = default;
  ColdPageCodec() = default;
  ColdPageCodec(const ColdPageCodec&) = delete;
  ColdPageCodec& operator=(const ColdPageCodec&) = delete;

  // Binds the codec to all hot pool groups; called once, before all else, and not beside another call. What the
  // arguments point to is read during the call. False rejects the whole configuration.
  virtual bool configure(const HotPoolGroup* groups, int32_t num_groups) noexcept = 0;

  // Size of every cold page of a layer group, 0 for one that is not known.
  virtual int64_t queryColdPageBytes(int32_t layer_group) const noexcept = 0;

  // The smallest id among the layer groups whose pages may be moved in one call under that id; -1 for one that is not
  // known.
  virtual int32_t getBatchingLayerGroupId(int32_t layer_group) const noexcept { return layer_group; }

  virtual PageIndexLocation queryPageIndexLocation(int32_t layer_group) const noexcept = 0;

  // Enqueue `count` moves on `stream` (a cudaStream_t; ignored beside host pools, whose pages are moved before the call
  // returns) and never synchronise. True: submitted. Pairs on the host are read before the call returns, pairs on the
  // device until the stream's work ends. `cold_base` is device memory or pinned host memory beside device pools.
  // No destination may repeat. May be called by several threads.
  virtual bool encode(int32_t layer_group, void* cold_base, const PageIndexPair* pairs, int64_t count,
                      void* stream) noexcept = 0;
  virtual bool decode(int32_t layer_group, const void* cold_base, const PageIndexPair* pairs, int64_t count,
                      void* stream) noexcept = 0;

  // Why the last call of this thread failed; valid until its next call.
  virtual const char* lastError() const noexcept { return ""; }
};

enum class ColdPageFormat : int32_t {
  kLossless = 0,  // every buffer is copied, whatever its transform
  kNvfp4 = 1,     // every buffer as its transform says
};

// The name of the capsule in which Python hands out a `ColdPageCodec*`; the codec lives as long as its capsule.
inline constexpr char kColdPageCodecCapsule[] = "kvc.ColdPageCodec";

}  // namespace kvc

// Defined by libkvc_codec.so (host pools) and libkvc_codec_cuda.so (host or CUDA pools), both in the package's `lib`
// folder: link with one of them, or load it and look the symbol up. `max_ctas` limits the thread blocks of a move, 0
// leaves them to the kernel. Null when there is no memory or an argument is out of range.
extern "C" kvc::ColdPageCodec* kvc_create_cold_page_codec(kvc::ColdPageFormat format, int64_t max_ctas) noexcept;

namespace kvc {

inline std::unique_ptr<ColdPageCodec> make_cold_page_codec(ColdPageFormat format, int64_t max_ctas = 0) {
  return std::unique_ptr<ColdPageCodec>(kvc_create_cold_page_codec(format, max_ctas));
}

}  // namespace kvc
