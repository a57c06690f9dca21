// The C++ kernels of top-k against a stable sort, on random rows. Usage: emulate_topk CASES SEED
#include "emulate.h"
#include "topk/resident.cuh"
#include "topk/settle.cuh"
#include "topk/spread.cuh"
#include "topk/stream.cuh"

#include <random>

using namespace kvc::topk;

namespace {

std::mt19937 generator;
int any(int low, int high) { return std::uniform_int_distribution<int>(low, high)(generator); }

float score(int kind, int index) {
  const float x = std::normal_distribution<float>()(generator);
  switch (kind) {
    case 1: return std::round(x * 2);
    case 2: return 1.0f;
    case 3: return any(0, 3) ? 0.0f : any(0, 1) ? -0.0f : x;
    case 4: return any(0, 9) == 0 ? NAN : any(0, 3) ? -INFINITY : any(0, 1) ? INFINITY : x;
    case 5: return -INFINITY;
    case 6: return static_cast<float>(index % 32);
    case 7: return std::round(x * 64) / 64;  // a few are equal
    default: return x;
  }
}

template <typename Score>
Score rounded(float x) {
  if constexpr (std::is_same_v<Score, float>) return x;
  else if constexpr (std::is_same_v<Score, __half>) return __float2half(x);
  else return __float2bfloat16(x);
}

struct Kernel {
  const char* name;
  int threads, most;  // scores that a block takes
  int blocks;         // of a row, at most
  void (*settle)(Settlement);
  void (*select)(Problem);
};

template <typename Score, int kThreads, int kBits, int kRounds, bool kCluster>
void parts(Settlement s) {
  settle_parts<Score, kThreads, kBits, kRounds, kCluster, 1>(s);
}

template <typename Score>
const Kernel kernels[] = {
    {"settle, 256 x 16", 256, 4096, 1, parts<Score, 256, 16, 1, false>, {}},
    {"settle, 256 x 32", 256, 8192, 1, parts<Score, 256, 32, 1, false>, {}},
    {"settle, 512 x 32", 512, 16384, 1, parts<Score, 512, 32, 1, false>, {}},
    {"settle, teams, 256 x 16", 256, 4096, 4, parts<Score, 256, 16, 1, true>, {}},
    {"settle, teams, 256 x 32", 256, 8192, 8, parts<Score, 256, 32, 1, true>, {}},
    {"settle, teams, 512 x 32, 2 rounds", 512, 32768, 8, parts<Score, 512, 32, 2, true>, {}},
    {"settle, stream", 512, 40000, 0, [](Settlement s) { settle_stream<Score, 512, 4, 2>(s); }, {}},
    {"settle, stream that guesses wrong", 64, 4000, 0, [](Settlement s) { settle_stream<Score, 64, 1, 2>(s); }, {}},
    {"select, 512 x 2, direct", 512, 4096, 0, {}, [](Problem p) { resident_select<Score, 512, 2, true, false>(p); }},
    {"select, 256 x 3", 256, 3072, 0, {}, [](Problem p) { resident_select<Score, 256, 3, false, false>(p); }},
    {"select, 512 x 2", 512, 4096, 0, {}, [](Problem p) { resident_select<Score, 512, 2, false, false>(p); }},
    {"select, 512 x 4", 512, 8192, 0, {}, [](Problem p) { resident_select<Score, 512, 4, false, false>(p); }},
    {"select, 1024 x 4", 1024, 16384, 0, {}, [](Problem p) { resident_select<Score, 1024, 4, false, false>(p); }},
    {"select, 512 x 8", 512, 16384, 0, {}, [](Problem p) { resident_select<Score, 512, 8, false, false>(p); }},
    {"select, 512 x 8, waits", 512, 16384, 0, {}, [](Problem p) { resident_select<Score, 512, 8, false, true>(p); }},
    {"select, teams, 1024 x 4", 1024, 16384, 2, {}, [](Problem p) { spread_select<Score, 1024, 4>(p); }},
    {"select, teams, 1024 x 8", 1024, 32768, 2, {}, [](Problem p) { spread_select<Score, 1024, 8>(p); }},
    {"select, stream", 512, 40000, 0, {}, [](Problem p) { stream_row<Score, 512, false>(p); }},
};

// Whether one call on random rows gives the answer and writes nothing else.
template <typename Score>
bool agrees(const Kernel& kernel) {
  const int blocks = std::max(any(kernel.blocks > 1, kernel.blocks), 1), most = kernel.most * blocks - 8;
  const int width = any(0, 2) ? any(1, 600) : any(1, most), rows = any(1, 3);
  const int k = any(0, 3) ? any(1, std::min(width + 5, 300)) : any(1, width + 40);
  const int stride = width + (any(0, 1) ? 0 : any(0, 9)), kind = any(0, 7);
  std::vector<Score> memory(static_cast<size_t>(rows) * stride + 32);
  Score* scores = memory.data() + any(0, 7);
  for (int i = 0; i < (rows - 1) * stride + width; ++i) scores[i] = rounded<Score>(score(kind, i));

  constexpr int32_t kSentinel = 0x7ffffff0;
  const size_t cells = static_cast<size_t>(rows) * k;
  std::vector<int32_t> lengths, bases, expected, named, out(cells + 64, kSentinel);
  for (int row = 0; row < rows; ++row) {
    lengths.push_back(any(0, 3) ? width : any(-1, width + 3));
    bases.push_back(any(0, 1000));
    const auto above = [&](int a, int b) {
      const Score* line = scores + static_cast<size_t>(row) * stride;
      return ordered_key(widen(line[a])) > ordered_key(widen(line[b]));
    };
    std::vector<int32_t> order(static_cast<size_t>(std::clamp(lengths.back(), 0, width)));
    for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int32_t>(i);
    const auto append = [&](std::vector<int32_t>* to, bool ascending) {
      std::stable_sort(order.begin(), order.end(), above);
      std::vector<int32_t> best(order.begin(), order.begin() + std::min<ptrdiff_t>(std::ssize(order), k));
      if (ascending) std::sort(best.begin(), best.end());
      for (int32_t& index : best) index += ascending ? bases.back() : 0;
      best.resize(static_cast<size_t>(k), -1);
      if (!ascending) std::shuffle(best.begin(), best.end(), generator);
      to->insert(to->end(), best.begin(), best.end());
    };
    append(&expected, true);
    std::shuffle(order.begin(), order.end(), generator);  // any choice among ties
    append(&named, false);
  }
  const std::vector<int64_t> named_wide(named.begin(), named.end());
  const bool wide = any(0, 1);
  // Streaming: lists and marks that suffice, and others.
  const int list = 2 * any(1, any(0, 1) ? 50 : 8000), groups = 1024 * any(1, 12);
  const Problem problem{scores, stride, lengths.data(), bases.data(), out.data(), k, width, list, groups};
  const int warps = kernel.threads / 32 * blocks, part = (width + 7 + warps * 32 - 1) / (warps * 32) * 32;
  const Settlement settlement{problem, wide ? static_cast<const void*>(named_wide.data()) : named.data(), wide, part};
  memset(emulate::dynamic_shared, 0xEE, sizeof(emulate::dynamic_shared));
  emulate::run(
      static_cast<unsigned>(rows * blocks), static_cast<unsigned>(kernel.threads),
      [&] { kernel.settle ? kernel.settle(settlement) : kernel.select(problem); }, static_cast<unsigned>(blocks));
  const bool right =
      std::equal(expected.begin(), expected.end(), out.begin()) &&
      std::all_of(out.begin() + static_cast<ptrdiff_t>(cells), out.end(), [](int32_t x) { return x == kSentinel; });
  if (!right)
    printf("%s: %d rows of %d scores of %zu bytes, %d blocks a row, stride %d, k %d, kind %d\n", kernel.name, rows,
           width, sizeof(Score), blocks, stride, k, kind);
  return right;
}

}  // namespace

int main(int, char** arguments) {
  generator.seed(static_cast<unsigned>(atoi(arguments[2])));
  int wrong = 0;
  for (int i = 0; i < atoi(arguments[1]); ++i) {
    const size_t which = static_cast<size_t>(i) % std::size(kernels<float>);
    const int dtype = any(0, 2);
    wrong += !(dtype == 0   ? agrees<float>(kernels<float>[which])
               : dtype == 1 ? agrees<__half>(kernels<__half>[which])
                            : agrees<__nv_bfloat16>(kernels<__nv_bfloat16>[which]));
  }
  printf("%d of %s wrong\n", wrong, arguments[1]);
  return wrong != 0;
}
