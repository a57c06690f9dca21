// The two cold-page codecs behind include/kvc/cold_page_codec.h.

#include "nvfp4/codec.h"

#include <algorithm>
#include <exception>
#include <map>
#include <new>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <tuple>
#include <utility>

namespace kvc::nvfp4 {
namespace {

// Host threads pay off from about this many tiles (of 4 KiB) each.
constexpr int64_t kTilesPerThread = 128;
// Destinations are checked against a bitmap up to this slot number, by sorting beyond it.
constexpr int32_t kBitmapSlots = 1 << 24;

thread_local std::string last_error;

class HostMover final : public PageMover {
 public:
  void move(PageWork work, bool encode, const void*, void*) const override {
    const int64_t tiles_per_page = number_tiles(&work.segments);
    const int64_t total = work.pages * tiles_per_page;
    const int64_t most = std::max<int64_t>(1, std::thread::hardware_concurrency());
    const int64_t shares = std::clamp<int64_t>(total / kTilesPerThread, 1, most);
    const auto share = [&](int64_t i) {
      move_tiles(work, tiles_per_page, total * i / shares, total * (i + 1) / shares, encode);
    };
    std::vector<std::thread> threads;
    threads.reserve(static_cast<size_t>(shares));
    int64_t started = 0;
    try {
      for (; started + 1 < shares; ++started) threads.emplace_back(share, started);
    } catch (const std::system_error&) {  // no more threads: the rest is done here
    }
    for (int64_t i = started; i < shares; ++i) share(i);
    for (std::thread& t : threads) t.join();
  }
};

struct Group {
  int64_t pool_group = 0;
  std::vector<BufferSpec> buffers;  // layers counted from 0
  int32_t batching_id = -1;
  int64_t hot_slots = 0;
  PagePlan plan;
};

bool same(const BufferSpec& a, const BufferSpec& b) {
  const auto key = [](const BufferSpec& s) {
    return std::tuple(s.layer, s.pool, s.offset, s.transform, s.dtype, s.rows, s.row_elements, s.quantized_start,
                      s.quantized_elements, s.residual_start, s.residual_elements, s.nbytes, s.global_scale);
  };
  return key(a) == key(b);
}

BufferSpec spec_of(const HotBuffer& buffer, bool lossless) {
  BufferSpec b;
  b.layer = buffer.layer;
  b.pool = buffer.pool;
  b.offset = buffer.offset;
  b.nbytes = buffer.nbytes;
  b.transform = lossless ? Transform::kCopy : static_cast<Transform>(buffer.transform);
  if (b.transform == Transform::kCopy) return b;
  const auto element = static_cast<int32_t>(buffer.element);
  b.dtype = static_cast<DType>(element >= 0 && element <= 3 ? element : 255);
  b.rows = buffer.rows;
  b.row_elements = buffer.row_elements;
  b.quantized_start = buffer.quantized_start;
  b.quantized_elements = buffer.quantized_elements;
  b.residual_start = buffer.residual_elements ? buffer.residual_start : buffer.quantized_start;
  b.residual_elements = buffer.residual_elements;
  b.global_scale = buffer.global_scale;
  return b;
}

[[noreturn]] void refuse(const std::string& argument, const std::string& expected, const std::string& got) {
  throw std::invalid_argument("kvc.ColdPageCodec: " + argument + " must be " + expected + ", got " + got);
}

std::string text(int64_t value) { return std::to_string(value); }

class PageCodec final : public ColdPageCodec {
 public:
  PageCodec(bool lossless, int64_t max_ctas) : lossless_(lossless), max_ctas_(max_ctas) {}

  bool configure(const HotPoolGroup* groups, int32_t num_groups) noexcept override {
    return guarded([&] {
      if (mover_ != nullptr || !groups_.empty()) throw std::logic_error("kvc.ColdPageCodec: configured already");
      if (groups == nullptr || num_groups < 1) refuse("groups", "at least one pool group", text(num_groups));
      std::vector<std::vector<HotPool>> pools;
      std::map<int32_t, Group> known;
      std::vector<HotPool> all;
      for (int32_t g = 0; g < num_groups; ++g) {
        pools.push_back(read_pools(groups[g], g));
        all.insert(all.end(), pools.back().begin(), pools.back().end());
        read_layer_groups(groups[g], g, pools.back(), &known);
      }
      if (known.empty()) refuse("groups", "at least one layer group", "none");
      mover_ = make_mover(all, max_ctas_);
      pools_ = std::move(pools);
      groups_ = std::move(known);
    });
  }

  int64_t queryColdPageBytes(int32_t layer_group) const noexcept override {
    const Group* group = find(layer_group);
    return group ? group->plan.cold_page_bytes : 0;
  }

  int32_t getBatchingLayerGroupId(int32_t layer_group) const noexcept override {
    const Group* group = find(layer_group);
    return group ? group->batching_id : -1;
  }

  PageIndexLocation queryPageIndexLocation(int32_t layer_group) const noexcept override {
    return find(layer_group) ? PageIndexLocation::kHost : PageIndexLocation::kBadLocation;
  }

  bool encode(int32_t layer_group, void* cold_base, const PageIndexPair* pairs, int64_t count,
              void* stream) noexcept override {
    return move(layer_group, cold_base, pairs, count, stream, true);
  }

  bool decode(int32_t layer_group, const void* cold_base, const PageIndexPair* pairs, int64_t count,
              void* stream) noexcept override {
    return move(layer_group, const_cast<void*>(cold_base), pairs, count, stream, false);
  }

  const char* lastError() const noexcept override { return last_error.c_str(); }

 private:
  template <typename Body>
  bool guarded(Body&& body) const noexcept {
    try {
      last_error.clear();
      body();
      return true;
    } catch (const std::exception& error) {
      try {
        last_error = error.what();
      } catch (...) {  // no memory for the text
      }
    } catch (...) {
    }
    return false;
  }

  const Group* find(int32_t id) const noexcept {
    const auto found = groups_.find(id);
    return found == groups_.end() ? nullptr : &found->second;
  }

  static std::vector<HotPool> read_pools(const HotPoolGroup& group, int32_t index) {
    const std::string where = "groups[" + text(index) + "].pools";
    if (group.pools == nullptr || group.num_pools < 1) refuse(where, "at least one pool", text(group.num_pools));
    std::vector<HotPool> pools(group.pools, group.pools + group.num_pools);
    for (const HotPool& p : pools) {
      if (p.base == nullptr) refuse(where, "memory", "a null base");
      if (p.slots < 1 || p.slots > INT32_MAX) refuse(where, "1 to 2^31 - 1 slots", text(p.slots));
      if (p.slot_bytes < 1 || p.slot_bytes > kMaxExtent) refuse(where, "slots of 1 to 2^46 bytes", text(p.slot_bytes));
      if (p.slot_stride < p.slot_bytes || p.slot_stride > kMaxExtent)
        refuse(where, "slots that do not overlap", "a stride of " + text(p.slot_stride));
    }
    return pools;
  }

  void read_layer_groups(const HotPoolGroup& pool_group, int32_t index, const std::vector<HotPool>& pools,
                         std::map<int32_t, Group>* known) const {
    if (pool_group.layer_groups == nullptr && pool_group.num_layer_groups > 0)
      refuse("groups[" + text(index) + "].layer_groups", "an array", "null");
    for (int32_t i = 0; i < pool_group.num_layer_groups; ++i) {
      const LayerGroup& from = pool_group.layer_groups[i];
      const std::string where = "layer group " + text(from.id);
      if (from.id < 0 || known->count(from.id)) refuse(where, "an id >= 0 that is used once", text(from.id));
      if (from.buffers == nullptr || from.num_buffers < 1) refuse(where, "at least one buffer", text(from.num_buffers));
      Group group;
      group.pool_group = index;
      group.hot_slots = INT32_MAX;
      int64_t layer = -1, chunks = 0;
      for (int64_t k = 0; k < from.num_buffers; ++k) {
        BufferSpec b = spec_of(from.buffers[k], lossless_);
        check_buffer(where + ", buffer " + text(k), b, from.buffers[k], pools);
        if (k > 0 && from.buffers[k - 1].layer > b.layer) refuse(where, "in ascending layer order", text(b.layer));
        if ((chunks += b.hot_bytes() / 16) >= kMaxGroups)
          refuse(where, "a hot page below 2^35 bytes", text(chunks * 16));
        layer += k == 0 || from.buffers[k - 1].layer != b.layer;
        b.layer = layer;
        group.hot_slots = std::min(group.hot_slots, pools[static_cast<size_t>(b.pool)].slots);
        group.buffers.push_back(b);
      }
      check_disjoint(where, group.buffers);
      group.plan = plan_pages(group.buffers);
      group.batching_id = from.id;
      for (auto& [id, other] : *known) {
        const bool equal = other.pool_group == group.pool_group && other.buffers.size() == group.buffers.size() &&
                           std::equal(other.buffers.begin(), other.buffers.end(), group.buffers.begin(), same);
        if (!equal) continue;
        group.batching_id = other.batching_id = std::min(other.batching_id, group.batching_id);
      }
      known->emplace(from.id, std::move(group));
    }
  }

  static void check_buffer(const std::string& where, const BufferSpec& b, const HotBuffer& given,
                           const std::vector<HotPool>& pools) {
    const std::string wrong = check(b);
    if (!wrong.empty()) {
      const size_t comma = wrong.rfind(", got ");
      refuse(where, wrong.substr(0, comma), wrong.substr(comma + 6));
    }
    if (b.pool >= static_cast<int64_t>(pools.size()))
      refuse(where, "of a pool below " + text(static_cast<int64_t>(pools.size())), text(b.pool));
    if (given.nbytes != b.hot_bytes()) refuse(where, "of " + text(b.hot_bytes()) + " bytes", text(given.nbytes));
    const HotPool& pool = pools[static_cast<size_t>(b.pool)];
    if (b.offset + b.hot_bytes() > pool.slot_bytes)
      refuse(where, "inside a slot of " + text(pool.slot_bytes) + " bytes",
             "an end at " + text(b.offset + b.hot_bytes()));
    if (b.transform == Transform::kNvfp4 &&
        (reinterpret_cast<uintptr_t>(pool.base) % 16 != 0 || (pool.slots > 1 && pool.slot_stride % 16 != 0)))
      refuse(where, "in a pool whose address and slot stride are multiples of 16", text(pool.slot_stride));
  }

  static void check_disjoint(const std::string& where, const std::vector<BufferSpec>& buffers) {
    std::vector<std::tuple<int64_t, int64_t, int64_t>> spans;
    for (const BufferSpec& b : buffers) spans.emplace_back(b.pool, b.offset, b.offset + b.hot_bytes());
    std::sort(spans.begin(), spans.end());
    for (size_t i = 1; i < spans.size(); ++i)
      if (std::get<0>(spans[i]) == std::get<0>(spans[i - 1]) && std::get<1>(spans[i]) < std::get<2>(spans[i - 1]))
        refuse(where, "free of overlapping buffers", "two at byte " + text(std::get<1>(spans[i])));
  }

  // Host pairs: slots in range and no destination twice.
  static void check_pairs(const PageIndexPair* pairs, int64_t count, int64_t hot_slots, bool encode) {
    int32_t largest = 0;
    for (int64_t i = 0; i < count; ++i) {
      const auto [dst, src] = pairs[i];
      const int32_t hot = encode ? src : dst, cold = encode ? dst : src;
      if (hot < 0 || hot >= hot_slots)
        refuse("pairs[" + text(i) + "]", "a hot slot in [0, " + text(hot_slots) + ")", text(hot));
      if (cold < 0) refuse("pairs[" + text(i) + "]", "a cold slot >= 0", text(cold));
      largest = std::max(largest, dst);
    }
    const auto repeated = [](int32_t slot) {
      refuse("pairs", "free of repeated destinations", "slot " + text(slot) + " again");
    };
    if (largest < kBitmapSlots) {
      std::vector<bool> seen(static_cast<size_t>(largest) + 1);
      for (int64_t i = 0; i < count; ++i) {
        if (seen[static_cast<size_t>(pairs[i].dst)]) repeated(pairs[i].dst);
        seen[static_cast<size_t>(pairs[i].dst)] = true;
      }
      return;
    }
    std::vector<int32_t> sorted;
    for (int64_t i = 0; i < count; ++i) sorted.push_back(pairs[i].dst);
    std::sort(sorted.begin(), sorted.end());
    const auto twice = std::adjacent_find(sorted.begin(), sorted.end());
    if (twice != sorted.end()) repeated(*twice);
  }

  bool move(int32_t layer_group, void* cold, const PageIndexPair* pairs, int64_t count, void* stream,
            bool encode) const noexcept {
    return guarded([&] {
      const Group* group = find(layer_group);
      if (group == nullptr) refuse("layer_group", "a configured one", text(layer_group));
      if (count < 0) refuse("count", ">= 0", text(count));
      if (count == 0) return;
      if (cold == nullptr) refuse("cold_base", "memory", "null");
      if (pairs == nullptr) refuse("pairs", "an array", "null");
      check_pairs(pairs, count, group->hot_slots, encode);
      const std::vector<HotPool>& pools = pools_[static_cast<size_t>(group->pool_group)];
      PageWork work;
      work.segments =
          placed_segments(group->plan, mover_->address(cold), group->plan.cold_page_bytes,
                          [&pools](int64_t pool) -> const HotPool& { return pools[static_cast<size_t>(pool)]; });
      work.pages = count;
      work.pairs = &pairs->dst;
      work.hot_slots = group->hot_slots;
      work.cold_slots = INT64_MAX;  // the caller's
      mover_->move(std::move(work), encode, cold, stream);
    });
  }

  const bool lossless_;
  const int64_t max_ctas_;
  std::unique_ptr<PageMover> mover_;
  std::vector<std::vector<HotPool>> pools_;  // of each pool group
  std::map<int32_t, Group> groups_;
};

}  // namespace

std::unique_ptr<PageMover> make_host_mover() { return std::make_unique<HostMover>(); }

}  // namespace kvc::nvfp4

__attribute__((visibility("default"))) kvc::ColdPageCodec* kvc_create_cold_page_codec(kvc::ColdPageFormat format,
                                                                                      int64_t max_ctas) noexcept {
  const bool lossless = format == kvc::ColdPageFormat::kLossless;
  if ((!lossless && format != kvc::ColdPageFormat::kNvfp4) || max_ctas < 0) return nullptr;
  return new (std::nothrow) kvc::nvfp4::PageCodec(lossless, max_ctas);
}
