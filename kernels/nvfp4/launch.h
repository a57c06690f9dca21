// The page moves behind every entrance, without torch: what one call moves, and the functions that move it on a CPU and
// on a GPU. The ops (nvfp4_cpu.cpp, nvfp4.cu) and the C++ codec (codec.cpp) turn their arguments into a PageWork.
#pragma once

#include <cstdint>
#include <vector>

#include "kvc/pages.h"

namespace kvc::nvfp4 {

// Work of one call: `pages` times the segments of a page, not yet cut into tiles. A missing pair list means slot i to
// slot i.
struct PageWork {
  std::vector<Segment> segments;
  int64_t pages = 0;
  const int32_t* pairs = nullptr;  // (dst, src)
  int64_t pair_stride[2] = {2, 1};
  int64_t hot_slots = 0;
  int64_t cold_slots = 0;
};

// A layout worked out: segments whose pointers are still offsets into a pool or a cold page.
struct PagePlan {
  int64_t cold_page_bytes = 0;
  std::vector<Segment> segments;
  std::vector<int64_t> segment_pools;
};

inline PagePlan plan_pages(const std::vector<BufferSpec>& buffers) {
  PagePlan plan;
  std::vector<ColdPlacement> placements;
  plan.cold_page_bytes = place(buffers, &placements);
  const auto offset = [](int64_t bytes) { return reinterpret_cast<uint8_t*>(bytes); };
  for (size_t i = 0; i < buffers.size(); ++i) {
    const BufferSpec& b = buffers[i];
    const ColdPlacement& p = placements[i];
    append_segments(b, offset(b.offset), 0, b.row_bytes(),
                    {offset(p.data), 0, offset(p.scales), 0, offset(p.lossless), 0}, &plan.segments);
    plan.segments.back().padding = offset(p.padding);
    plan.segments.back().padding_bytes = static_cast<uint8_t>(p.padding_bytes);
    plan.segment_pools.resize(plan.segments.size(), b.pool);
  }
  return plan;
}

// The segments of a plan at their addresses. `pool_of` gives an object with `base` and `slot_stride` for a pool index.
template <typename PoolOf>
std::vector<Segment> placed_segments(const PagePlan& plan, uint8_t* cold, int64_t cold_stride, PoolOf&& pool_of) {
  std::vector<Segment> segments = plan.segments;
  const auto absolute = [](uint8_t* base, uint8_t* offset) { return base + reinterpret_cast<intptr_t>(offset); };
  for (size_t i = 0; i < segments.size(); ++i) {
    Segment& s = segments[i];
    const auto& pool = pool_of(plan.segment_pools[i]);
    s.hot = absolute(static_cast<uint8_t*>(pool.base), s.hot);
    s.hot_stride = pool.slot_stride;
    s.data = absolute(cold, s.data);
    s.scales = absolute(cold, s.scales);
    s.padding = absolute(cold, s.padding);
    s.data_stride = s.scales_stride = cold_stride;
  }
  return segments;
}

// CPU: moves tiles [first, last) of all pages, numbered through, after number_tiles has cut the segments.
void move_tiles(const PageWork& work, int64_t tiles_per_page, int64_t first, int64_t last, bool encode);

// GPU: device memory a launch needs for what does not fit into the kernel's parameters, 0 for most.
int64_t page_scratch_bytes(const PageWork& work, bool host_pairs);

// GPU: enqueues the whole of `work` on `stream` (a cudaStream_t) of `device`, which is current. `scratch` may be null
// where page_scratch_bytes is 0. Throws std::runtime_error.
void launch_pages(const char* op, bool encode, PageWork work, bool host_pairs, bool host_cold, int64_t max_ctas,
                  uint8_t* scratch, int device, void* stream);

}  // namespace kvc::nvfp4
