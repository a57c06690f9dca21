// The page kernels against the CPU's loops, on random layouts. Usage: emulate_pages CASES SEED
#include "emulate.h"
#include "nvfp4/launch.cu"

#include <random>

namespace kvc {

int multiprocessors = 1;  // of the GPU that common/device.h pretends to be

}  // namespace kvc

using namespace kvc;
using namespace kvc::nvfp4;

namespace {

std::mt19937 generator;
int any(int low, int high) { return std::uniform_int_distribution<int>(low, high)(generator); }

// `whole`: what a kernel of its own encodes, as long as it is little.
BufferSpec any_buffer(bool many, const DType* whole) {
  BufferSpec b;
  b.dtype = static_cast<DType>(any(0, 3));
  if (whole != nullptr) {
    b.dtype = *whole;
    b.rows = 16 * any(1, many ? 1 : 4);
    b.row_elements = b.quantized_elements = 16 * any(1, 9);
    return b;
  }
  b.rows = any(1, many ? 6 : 70);
  b.row_elements = 16 * any(1, 9);
  if (any(0, 4) == 0) {
    b.transform = Transform::kCopy;
    b.nbytes = any(1, 9000);
    return b;
  }
  const int groups = static_cast<int>(b.row_elements / 16), start = any(0, 1) ? 0 : any(0, groups - 1);
  const int quantized = any(0, 1) ? groups - start : any(1, groups - start);
  b.quantized_start = 16 * start;
  b.quantized_elements = 16 * quantized;
  if (any(0, 2) == 0) {
    const int first = any(0, quantized - 1);
    b.residual_start = b.quantized_start + 16 * first;
    b.residual_elements = 16 * any(1, quantized - first);
  }
  b.global_scale = any(0, 3) ? 1.0f : 0.3f;
  return b;
}

std::vector<BufferSpec> any_buffers(int64_t* slot_bytes) {
  const int count = any(0, 9) == 0 ? any(20, 220) : any(1, 6), layers = any(1, std::min(count, 4));
  const bool alike = any(0, 1), whole = any(0, 2) == 0;
  const auto dtype = static_cast<DType>(any(0, 3));
  std::vector<BufferSpec> buffers;
  *slot_bytes = 0;
  for (int i = 0; i < count; ++i) {
    const int64_t layer = i == 0 ? 0 : std::min<int64_t>(buffers.back().layer + any(0, 1), layers - 1);
    BufferSpec b = alike && i > 0 ? buffers.back() : any_buffer(count > 6, whole ? &dtype : nullptr);
    b.layer = layer;
    b.offset = *slot_bytes;
    *slot_bytes += (b.hot_bytes() + 15) / 16 * 16 + 16 * any(0, 1);
    buffers.push_back(b);
  }
  return buffers;
}

struct Pool {
  void* base;
  int64_t slot_stride;
};

// Memory that begins on 16 bytes, and a copy of it.
struct Bytes {
  explicit Bytes(int64_t size) : all(static_cast<size_t>(size) + 16) {
    for (uint8_t& byte : all) byte = static_cast<uint8_t>(any(0, 255));
    copy = all;
  }
  uint8_t* begin() { return all.data() + (16 - reinterpret_cast<uintptr_t>(all.data()) % 16) % 16; }
  uint8_t* of_copy() { return copy.data() + (begin() - all.data()); }
  std::vector<uint8_t> all, copy;
};

// Whether one call changes what the CPU's loops change.
bool agrees() {
  multiprocessors = any(0, 2) ? 1 : any(1, 8);
  int64_t slot_bytes;
  const PagePlan plan = plan_pages(any_buffers(&slot_bytes));
  const int hot_slots = any(1, 6), cold_slots = any(1, 6), pages = any(1, std::min(hot_slots, cold_slots));
  const int64_t hot_stride = slot_bytes + 16 * any(0, 3);
  const int64_t cold_stride = plan.cold_page_bytes + (any(0, 2) ? 0 : any(0, 40)), shift = any(0, 1) ? 0 : any(0, 15);
  const bool encode = any(0, 1), host_cold = any(0, 3) == 0, host_pairs = any(0, 1);
  Bytes hot(hot_slots * hot_stride), cold(cold_slots * cold_stride + shift);

  const int destinations = encode ? cold_slots : hot_slots, sources = encode ? hot_slots : cold_slots;
  std::vector<int32_t> order(static_cast<size_t>(destinations)), pairs;
  for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int32_t>(i);
  std::shuffle(order.begin(), order.end(), generator);
  for (int i = 0; i < pages; ++i) pairs.insert(pairs.end(), {order[static_cast<size_t>(i)], any(0, sources - 1)});

  PageWork work;
  work.pages = pages;
  work.hot_slots = hot_slots;
  work.cold_slots = cold_slots;
  work.pairs = pairs.data();
  PageWork expected = work;
  const auto placed = [&](uint8_t* at_hot, uint8_t* at_cold) {
    return placed_segments(plan, at_cold, cold_stride, [&](int64_t) { return Pool{at_hot, hot_stride}; });
  };
  expected.segments = placed(hot.of_copy(), cold.of_copy() + shift);
  const int64_t tiles = number_tiles(&expected.segments);
  move_tiles(expected, tiles, 0, tiles * pages, encode);

  std::vector<int32_t> given = pairs;
  if (!host_pairs && any(0, 1)) {  // pairs of the device may be out of range
    given.insert(given.begin() + 2 * any(0, pages), {any(0, 1) ? -1 : destinations, 0});
    ++work.pages;
  }
  work.pairs = given.data();
  work.segments = placed(hot.begin(), cold.begin() + shift);
  std::vector<uint4> scratch(static_cast<size_t>(page_scratch_bytes(work, host_pairs) / 16 + 1));
  launch_pages("emulated", encode, work, host_pairs, host_cold, any(0, 2) ? 0 : any(1, 3),
               reinterpret_cast<uint8_t*>(scratch.data()), 0, nullptr);
  const bool right = hot.all == hot.copy && cold.all == cold.copy;
  if (!right)
    printf("encode %d, host memory %d, %zu segments, %d pages, pairs on the host %d, shift %d\n", encode, host_cold,
           plan.segments.size(), pages, host_pairs, static_cast<int>(shift));
  return right;
}

}  // namespace

int main(int, char** arguments) {
  generator.seed(static_cast<unsigned>(atoi(arguments[2])));
  int wrong = 0;
  for (int i = 0; i < atoi(arguments[1]); ++i) wrong += !agrees();
  printf("%d of %s wrong\n", wrong, arguments[1]);
  return wrong != 0;
}
