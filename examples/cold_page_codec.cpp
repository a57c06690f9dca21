// A C++ engine's side of the cold-page codec: pages leave their pools as blobs and come back into other slots. It needs
// the header and one of the two codec libraries of the installed package, K:
//
//   K=$(python -c 'import kvc; print(kvc.__path__[0])')
//   g++ -std=c++17 -I$K/include examples/cold_page_codec.cpp -L$K/lib -lkvc_codec -Wl,-rpath,$K/lib -o cold_page_codec
//   nvcc -std=c++17 -x cu -I$K/include examples/cold_page_codec.cpp -L$K/lib -lkvc_codec_cuda -Xlinker -rpath=$K/lib
//   ...
//
// The first keeps everything in host memory, the second has its pools on the GPU and the cold pages in pinned host
// memory. With a folder as argument the hot and the cold bytes are written there.

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "kvc/cold_page_codec.h"

#if defined(__CUDACC__)
#include <cuda_runtime.h>
#endif

namespace {

constexpr int64_t kLayers = 3, kHeads = 2, kTokens = 16, kHeadDim = 64, kRotary = 32;
constexpr int64_t kSlots = 12, kIndexBytes = 100, kPages = 5;
constexpr int64_t kRows = kHeads * kTokens, kBufferBytes = kRows * kHeadDim * 2;
constexpr int32_t kKeys = 0, kValues = 1, kIndex = 2;  // pools of a layer

[[noreturn]] void fail(const std::string& what) {
  std::fprintf(stderr, "cold_page_codec: %s\n", what.c_str());
  std::exit(1);
}

// Memory of the pools and memory of the cold pages: both plain here, device and pinned host memory under nvcc.
struct Memory {
  explicit Memory(size_t bytes, bool pool) : bytes(bytes), pool(pool) {
#if defined(__CUDACC__)
    if ((pool ? cudaMalloc(&data, bytes) : cudaMallocHost(&data, bytes)) != cudaSuccess) fail("no memory");
#else
    data = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
    if (data == nullptr) fail("no memory");
#endif
  }
  ~Memory() {
#if defined(__CUDACC__)
    (void)(pool ? cudaFree(data) : cudaFreeHost(data));
#else
    std::free(data);
#endif
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  void put(const std::vector<uint8_t>& from) {
#if defined(__CUDACC__)
    if (cudaMemcpy(data, from.data(), bytes, cudaMemcpyDefault) != cudaSuccess) fail("copy");
#else
    std::memcpy(data, from.data(), bytes);
#endif
  }
  std::vector<uint8_t> get() const {
    std::vector<uint8_t> to(bytes);
#if defined(__CUDACC__)
    if (cudaMemcpy(to.data(), data, bytes, cudaMemcpyDefault) != cudaSuccess) fail("copy");
#else
    std::memcpy(to.data(), data, bytes);
#endif
    return to;
  }

  void* data = nullptr;
  size_t bytes;
  bool pool;
};

// The engine's description of what it caches: K with a lossless rotary part, V, and a side buffer that is copied.
std::vector<kvc::HotBuffer> describe_layers(int64_t first_layer) {
  std::vector<kvc::HotBuffer> buffers;
  for (int64_t layer = 0; layer < kLayers; ++layer) {
    kvc::HotBuffer key;
    key.layer = first_layer + layer;
    key.pool = 3 * layer + kKeys;
    key.nbytes = kBufferBytes;
    key.transform = kvc::HotTransform::kNvfp4;
    key.element = kvc::HotElement::kBFloat16;
    key.rows = kRows;
    key.row_elements = kHeadDim;
    key.quantized_start = kRotary;
    key.quantized_elements = kHeadDim - kRotary;
    kvc::HotBuffer value = key;
    value.pool = 3 * layer + kValues;
    value.quantized_start = 0;
    value.quantized_elements = kHeadDim;
    value.global_scale = 0.5f;
    kvc::HotBuffer index;
    index.layer = key.layer;
    index.pool = 3 * layer + kIndex;
    index.nbytes = kIndexBytes;
    buffers.insert(buffers.end(), {key, value, index});
  }
  return buffers;
}

float from_bf16(const uint8_t* bytes) {
  const uint32_t bits = static_cast<uint32_t>(bytes[0]) << 16 | static_cast<uint32_t>(bytes[1]) << 24;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

std::vector<uint8_t> random_bf16(size_t bytes, std::mt19937* random) {
  std::normal_distribution<float> normal;
  std::vector<uint8_t> out(bytes);
  for (size_t i = 0; i + 1 < bytes; i += 2) {
    const float value = normal(*random);
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    out[i] = static_cast<uint8_t>(bits >> 16);
    out[i + 1] = static_cast<uint8_t>(bits >> 24);
  }
  return out;
}

void save(const std::string& path, const std::vector<uint8_t>& bytes) {
  std::ofstream file(path, std::ios::binary);
  file.write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
  if (!file) fail("cannot write " + path);
}

}  // namespace

int main(int argc, char** argv) {
  const std::string folder = argc > 1 ? argv[1] : "";
  std::mt19937 random(7);
  void* stream = nullptr;
#if defined(__CUDACC__)
  cudaStream_t created;
  if (cudaStreamCreateWithFlags(&created, cudaStreamNonBlocking) != cudaSuccess) fail("no stream");
  stream = created;
#endif

  std::vector<std::unique_ptr<Memory>> memory;
  std::vector<std::vector<uint8_t>> original;
  std::vector<kvc::HotPool> pools;
  for (int64_t i = 0; i < 3 * kLayers; ++i) {
    const int64_t bytes = i % 3 == kIndex ? kIndexBytes : kBufferBytes;
    memory.push_back(std::make_unique<Memory>(static_cast<size_t>(kSlots * bytes), true));
    original.push_back(random_bf16(memory.back()->bytes, &random));
    pools.push_back({memory.back()->data, kSlots, bytes, bytes});
    if (!folder.empty()) save(folder + "/pool" + std::to_string(i) + ".bin", original.back());
  }
  // Two life cycles whose pages look the same and share their slots: the codec says that one call may move both.
  const std::vector<kvc::HotBuffer> some = describe_layers(0), others = describe_layers(kLayers);
  const kvc::LayerGroup layer_groups[] = {{4, some.data(), static_cast<int64_t>(some.size())},
                                          {2, others.data(), static_cast<int64_t>(others.size())}};
  const kvc::HotPoolGroup group{pools.data(), static_cast<int32_t>(pools.size()), layer_groups, 2};
  const kvc::PageIndexPair out[kPages] = {{3, 11}, {0, 2}, {4, 0}, {1, 7}, {2, 5}};   // (cold, hot)
  const kvc::PageIndexPair back[kPages] = {{1, 3}, {10, 0}, {3, 4}, {8, 1}, {4, 2}};  // (hot, cold)

  for (const auto format : {kvc::ColdPageFormat::kLossless, kvc::ColdPageFormat::kNvfp4}) {
    const bool lossless = format == kvc::ColdPageFormat::kLossless;
    const std::unique_ptr<kvc::ColdPageCodec> codec = kvc::make_cold_page_codec(format);
    if (codec == nullptr) fail("no codec");
    if (!codec->configure(&group, 1)) fail(codec->lastError());
    if (codec->getBatchingLayerGroupId(4) != 2) fail("equal layer groups are not recognised");
    if (codec->queryPageIndexLocation(2) != kvc::PageIndexLocation::kHost) fail("pairs are expected elsewhere");

    for (size_t i = 0; i < memory.size(); ++i) memory[i]->put(original[i]);
    const auto page_bytes = static_cast<size_t>(codec->queryColdPageBytes(2));
    Memory cold(kPages * page_bytes, false);
    if (!codec->encode(2, cold.data, out, kPages, stream)) fail(codec->lastError());
    if (!codec->decode(2, cold.data, back, kPages, stream)) fail(codec->lastError());
#if defined(__CUDACC__)
    if (cudaStreamSynchronize(created) != cudaSuccess) fail("the moves failed");
#endif

    double error = 0, norm = 0;
    for (size_t i = 0; i < memory.size(); ++i) {
      const std::vector<uint8_t> now = memory[i]->get();
      const auto bytes = static_cast<size_t>(pools[i].slot_bytes);
      for (int p = 0; p < kPages; ++p) {
        int from = 0;
        while (out[from].dst != back[p].src) ++from;
        const uint8_t* before = original[i].data() + static_cast<size_t>(out[from].src) * bytes;
        const uint8_t* after = now.data() + static_cast<size_t>(back[p].dst) * bytes;
        if ((lossless || i % 3 == kIndex) && std::memcmp(before, after, bytes) != 0) fail("bytes have changed");
        for (size_t b = 0; i % 3 != kIndex && b < bytes; b += 2) {
          const double x = from_bf16(before + b), d = from_bf16(after + b) - x;
          error += d * d, norm += x * x;
        }
      }
    }
    const double relative = std::sqrt(error / norm);
    if (relative > (lossless ? 0.0 : 0.12)) fail("the error is " + std::to_string(relative));
    std::printf("%s: %zu bytes a page, relative error %.4f\n", lossless ? "lossless" : "NVFP4", page_bytes, relative);
    if (!folder.empty()) save(folder + (lossless ? "/lossless.bin" : "/nvfp4.bin"), cold.get());
  }
  return 0;
}
