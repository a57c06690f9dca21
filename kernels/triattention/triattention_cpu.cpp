// CPU implementation of the TriAttention ops, over all of PyTorch's threads.

#include <cmath>
#include <cstring>
#include <limits>
#include <memory>

#include "common/boxing.h"
#include "kvc/nvfp4.h"
#include "triattention/arguments.h"

// One binary serves every x86-64; the loader picks the widest vector unit the machine has.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define KVC_TARGET_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define KVC_TARGET_CLONES
#endif

namespace kvc::triattention {
namespace {

constexpr float kLowest = -std::numeric_limits<float>::infinity();
constexpr int64_t kChunk = 1024;  // tokens of a task
constexpr int64_t kTile = 32;     // tokens converted at a time
constexpr int64_t kLanes = 16;    // partial sums of a dot product: every token adds up in the same order
constexpr int64_t kMaxBands = 128;
constexpr int64_t kStripe = 4096;  // columns of a result that one task writes

void mean_phase_rows(const PhaseArguments& p, const Rows& cosine, const Rows& sine) {
  torch::stable::parallel_for(0, p.requests * p.bands, 16, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const int64_t r = i / p.bands, f = i % p.bands;
      const int64_t position = p.wide_positions ? static_cast<const int64_t*>(p.positions)[r]
                                                : int64_t{static_cast<const int32_t*>(p.positions)[r]};
      double cos_sum = 0, sin_sum = 0;
      for (int64_t o = 0; o < p.offset_count; ++o) {
        const auto at = static_cast<int64_t>(static_cast<uint64_t>(position) + static_cast<uint64_t>(p.offsets[o]));
        const double angle = static_cast<double>(at) * double{p.omega[f]};
        cos_sum += std::cos(angle);
        sin_sum += std::sin(angle);
      }
      const auto count = static_cast<double>(p.offset_count);
      cosine.data[r * cosine.request + f * cosine.column] = static_cast<float>(cos_sum / count);
      sine.data[r * sine.request + f * sine.column] = static_cast<float>(sin_sum / count);
    }
  });
}

// Keys as floats, bands padded with zeros to whole lanes.
struct Tile {
  alignas(64) float real[kTile][kMaxBands];
  alignas(64) float imag[kTile][kMaxBands];
  alignas(64) float norm[kTile][kMaxBands];
};

template <DType kType>
KVC_HOST_DEVICE void load_keys(const void* const* keys, int64_t tokens, int64_t bands, Tile& tile) {
  using E = Element<kType>;
  for (int64_t t = 0; t < tokens; ++t) {
    const auto* key = static_cast<const typename E::Bits*>(keys[t]);
    if (key == nullptr) continue;
    for (int64_t f = 0; f < bands; ++f) tile.real[t][f] = E::to_float(key[f]);
    for (int64_t f = 0; f < bands; ++f) tile.imag[t][f] = E::to_float(key[bands + f]);
    for (int64_t f = 0; f < bands; ++f) {
      const float real = tile.real[t][f], imag = tile.imag[t][f];
      const float most = std::fabs(real) > std::fabs(imag) ? std::fabs(real) : std::fabs(imag);
      const bool huge = most > 0x1p60f;  // whose square is no float
      const float down = huge ? 0x1p-64f : 1.0f, up = huge ? 0x1p64f : 1.0f;
      tile.norm[t][f] = std::sqrt(real * down * (real * down) + imag * down * (imag * down)) * up;
    }
  }
}

// `coefficients` are a, b and c of a head, kMaxBands each. Scores that are not finite, or have no key, are -inf.
KVC_TARGET_CLONES void score_tile(ScalarType dtype, const void* const* keys, int64_t tokens, int64_t bands,
                                  const float* coefficients, int64_t heads, Tile& tile, float* scores,
                                  int64_t scores_stride) {
  switch (dtype) {
    case ScalarType::BFloat16: load_keys<DType::kBFloat16>(keys, tokens, bands, tile); break;
    case ScalarType::Half: load_keys<DType::kFloat16>(keys, tokens, bands, tile); break;
    case ScalarType::Float: load_keys<DType::kFloat32>(keys, tokens, bands, tile); break;
    default: load_keys<DType::kFloat8E4M3>(keys, tokens, bands, tile);
  }
  const int64_t padded = (bands + kLanes - 1) / kLanes * kLanes;
  for (int64_t h = 0; h < heads; ++h) {
    const float *a = coefficients + 3 * h * kMaxBands, *b = a + kMaxBands, *c = b + kMaxBands;
    for (int64_t t = 0; t < tokens; ++t) {
      const float *real = tile.real[t], *imag = tile.imag[t], *norm = tile.norm[t];
      alignas(64) float sums[kLanes] = {};
      for (int64_t f = 0; f < padded; f += kLanes)
        for (int64_t i = 0; i < kLanes; ++i)
          sums[i] += a[f + i] * real[f + i] + b[f + i] * imag[f + i] + c[f + i] * norm[f + i];
      for (int64_t half = kLanes / 2; half > 0; half /= 2)
        for (int64_t i = 0; i < half; ++i) sums[i] += sums[i + half];
      scores[h * scores_stride + t] = keys[t] != nullptr && std::isfinite(sums[0]) ? sums[0] : kLowest;
    }
  }
}

struct Moments {
  int64_t count = 0;
  double mean = 0, m2 = 0;  // m2: the sum of squared deviations

  // About a score of the row itself, so that equal scores deviate by exactly 0.
  Moments(const float* scores, int64_t size) {
    const float* const end = scores + size;
    const float* const first = std::find_if(scores, end, [](float s) { return s != kLowest; });
    if (first == end) return;
    const double shift = *first;
    double sum = 0;
    for (const float* s = first; s < end; ++s)
      if (*s != kLowest) sum += *s - shift, ++count;
    const double off = sum / static_cast<double>(count);
    for (const float* s = first; s < end; ++s)
      if (*s != kLowest) m2 += (*s - shift - off) * (*s - shift - off);
    mean = shift + off;
  }
  Moments() = default;

  // Chan, Golub and LeVeque's formula for two samples.
  void add(const Moments& other) {
    if (other.count == 0) return;
    const auto na = static_cast<double>(count), nb = static_cast<double>(other.count);
    const double delta = other.mean - mean;
    mean = count == 0 ? other.mean : mean + delta * (nb / (na + nb));
    m2 += other.m2 + (count == 0 ? 0 : delta * delta * (na * nb / (na + nb)));
    count += other.count;
  }
};

struct Chunk {
  int64_t request, begin, end;  // tokens
};

struct Scratch {
  float* scores = nullptr;  // [requests, score rows, columns]: the first `columns` tokens of each request
  int64_t columns = 0;
  std::vector<Chunk> chunks;
  std::vector<Range> ranges;
  std::vector<Moments> moments;  // [chunks, layers, query heads]
};

std::vector<float> fold_coefficients(const Scoring& s, int64_t r, int64_t layer, int64_t kv_head) {
  const int64_t group = s.group();
  std::vector<float> folded(static_cast<size_t>(group * 3 * kMaxBands));
  for (int64_t j = 0; j < group; ++j)
    for (int64_t f = 0; f < s.bands; ++f) {
      const int64_t q = (layer * s.q_heads + kv_head * group + j) * s.bands + f, phase = r * s.bands + f;
      const double cosine = s.mean_cos[phase], sine = s.mean_sin[phase], scale = s.freq_scale_sq[f];
      const double real = s.q_mean_real[q], imag = s.q_mean_imag[q];
      float* const a = folded.data() + 3 * j * kMaxBands + f;
      a[0] = static_cast<float>(scale * (real * cosine - imag * sine));
      a[kMaxBands] = static_cast<float>(scale * (real * sine + imag * cosine));
      a[2 * kMaxBands] = static_cast<float>(scale * s.q_norm_excess[q]);
    }
  return folded;
}

void score_chunk(const Scoring& s, int64_t index, int64_t layer, int64_t kv_head, Scratch& scratch) {
  const Chunk& chunk = scratch.chunks[static_cast<size_t>(index)];
  const Range& range = scratch.ranges[static_cast<size_t>(chunk.request)];
  const Pool& pool = s.pools[static_cast<size_t>(layer)];
  const int64_t group = s.group(), size = chunk.end - chunk.begin;
  const int64_t item = s.key_dtype == ScalarType::Float ? 4 : s.key_dtype == ScalarType::Float8_e4m3fn ? 1 : 2;
  const int32_t* const table = s.page_table + chunk.request * s.page_table_stride;
  const std::vector<float> coefficients = fold_coefficients(s, chunk.request, layer, kv_head);
  std::vector<float> scores(static_cast<size_t>(group * size));
  const auto tile = std::make_unique<Tile>();
  std::memset(tile.get(), 0, sizeof(Tile));
  for (int64_t begin = chunk.begin; begin < chunk.end; begin += kTile) {
    const int64_t tokens = std::min(kTile, chunk.end - begin);
    const void* keys[kTile];
    for (int64_t i = 0; i < tokens; ++i) {
      const int64_t token = begin + i, page = table[token / s.tokens_per_page];
      keys[i] = page < 0 || page >= pool.pages ? nullptr
                                               : static_cast<const uint8_t*>(pool.base) +
                                                     item * (page * pool.page_stride + kv_head * pool.head_stride +
                                                             token % s.tokens_per_page * pool.token_stride);
    }
    score_tile(s.key_dtype, keys, tokens, s.bands, coefficients.data(), group, *tile,
               scores.data() + (begin - chunk.begin), size);
  }
  const int64_t column = chunk.begin - range.first, stored = std::min(size, range.stored - column);
  if (s.normalize) {
    const int64_t row = layer * s.q_heads + kv_head * group;
    for (int64_t j = 0; j < group; ++j) {
      const float* const from = scores.data() + j * size;
      scratch.moments[static_cast<size_t>(index * s.layers() * s.q_heads + row + j)] = Moments(from, size);
      if (stored > 0)
        std::copy_n(from, stored,
                    scratch.scores + (chunk.request * s.score_rows() + row + j) * scratch.columns + column);
    }
    return;
  }
  float* const to =
      scratch.scores + (chunk.request * s.score_rows() + layer * s.kv_heads + kv_head) * scratch.columns + column;
  for (int64_t i = 0; i < stored; ++i) {
    to[i] = scores[static_cast<size_t>(i)];
    for (int64_t j = 1; j < group; ++j) to[i] = std::max(to[i], scores[static_cast<size_t>(j * size + i)]);
  }
}

struct Normal {
  float mean = 0, inverse_deviation = 1;
};

// Mean and deviation of every row of raw scores, in the order of the chunks.
std::vector<Normal> merge_moments(const Scoring& s, const Scratch& scratch) {
  const int64_t rows = s.layers() * s.q_heads;
  std::vector<Normal> normals(static_cast<size_t>(s.requests * rows));
  std::vector<Moments> merged(normals.size());
  for (size_t c = 0; c < scratch.chunks.size(); ++c)
    for (int64_t row = 0; row < rows; ++row)
      merged[static_cast<size_t>(scratch.chunks[c].request * rows + row)].add(
          scratch.moments[c * static_cast<size_t>(rows) + static_cast<size_t>(row)]);
  for (size_t i = 0; i < merged.size(); ++i) {
    if (merged[i].count == 0) continue;
    const double deviation = std::sqrt(merged[i].m2 / static_cast<double>(merged[i].count));
    normals[i] = {static_cast<float>(merged[i].mean), static_cast<float>(1 / std::max(deviation, 1e-6))};
  }
  return normals;
}

KVC_TARGET_CLONES void fold_maximum(const float* scores, Normal normal, int64_t size, float* best) {
  for (int64_t i = 0; i < size; ++i) {
    const float z = (scores[i] - normal.mean) * normal.inverse_deviation;
    best[i] = z > best[i] ? z : best[i];
  }
}

// Columns [low, high) of one row of the result: the mean over `planes` of the maximum over `inner` rows of scores.
void reduce_row(const Scoring& s, const Scratch& scratch, const std::vector<Normal>& normals, int64_t r, int64_t row,
                int64_t low, int64_t high, const Rows& out) {
  const Range& range = scratch.ranges[static_cast<size_t>(r)];
  const int64_t rows = s.score_rows(), heads = rows / s.layers();
  const int64_t planes = s.mode == Mode::kPerHead ? s.layers() : 1;
  const int64_t inner = s.mode == Mode::kUnion ? rows : heads / s.kv_heads;
  const int64_t shift = range.first - range.prompt;  // a column is token `prompt` + column
  const int64_t first = std::clamp(shift, low, high), last = std::clamp(shift + range.stored, first, high);
  float* const to = out.data + r * out.request + row * out.row;
  for (int64_t j = low; j < first; ++j) to[j * out.column] = kLowest;
  for (int64_t j = last; j < high; ++j) to[j * out.column] = kLowest;
  const int64_t size = last - first;
  if (size == 0) return;
  std::vector<float> best(static_cast<size_t>(size)), sum(static_cast<size_t>(size));
  for (int64_t plane = 0; plane < planes; ++plane) {
    std::fill(best.begin(), best.end(), kLowest);
    for (int64_t i = 0; i < inner; ++i) {
      const int64_t from = r * rows + plane * heads + row * inner + i;
      const Normal normal = s.normalize ? normals[static_cast<size_t>(from)] : Normal{};
      fold_maximum(scratch.scores + from * scratch.columns + (first - shift), normal, size, best.data());
    }
    for (int64_t i = 0; i < size; ++i) sum[static_cast<size_t>(i)] += best[static_cast<size_t>(i)];
  }
  for (int64_t i = 0; i < size; ++i)
    to[(first + i) * out.column] = sum[static_cast<size_t>(i)] / static_cast<float>(planes);
}

void score(const Context& ctx, const Scoring& s, const Tensor& like, const Rows& out) {
  if (debug_mode) check_scoring(ctx, s);
  if (s.empty()) return;
  Scratch scratch;
  for (int64_t r = 0; r < s.requests; ++r) {
    const Range range = range_of(s, s.prompt_lengths[r], s.source_lengths[r]);
    scratch.ranges.push_back(range);
    scratch.columns = std::max(scratch.columns, range.stored);
    const int64_t end = s.normalize ? range.last : range.first + range.stored;
    for (int64_t begin = range.first; begin < end; begin += kChunk)
      scratch.chunks.push_back({r, begin, std::min(begin + kChunk, end)});
  }
  const Tensor scores = new_output(like, {s.requests, s.score_rows(), scratch.columns}, ScalarType::Float);
  scratch.scores = static_cast<float*>(scores.data_ptr());
  const int64_t groups = s.layers() * s.kv_heads, chunks = static_cast<int64_t>(scratch.chunks.size());
  if (s.normalize) scratch.moments.resize(static_cast<size_t>(chunks * s.layers() * s.q_heads));
  torch::stable::parallel_for(0, chunks * groups, 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) score_chunk(s, i / groups, i % groups / s.kv_heads, i % s.kv_heads, scratch);
  });
  const std::vector<Normal> normals = s.normalize ? merge_moments(s, scratch) : std::vector<Normal>{};
  const int64_t stripes = (s.width + kStripe - 1) / kStripe;
  torch::stable::parallel_for(0, s.requests * s.rows() * stripes, 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const int64_t low = i % stripes * kStripe, row = i / stripes % s.rows();
      reduce_row(s, scratch, normals, i / stripes / s.rows(), row, low, std::min(low + kStripe, s.width), out);
    }
  });
}

std::tuple<Tensor, Tensor> mean_phase(const Tensor& positions, const Tensor& omega, const Tensor& offsets) {
  const Context ctx{"mean_phase"};
  ctx.cpu(positions, "positions");
  const PhaseArguments p = read_phase(ctx, positions, omega, offsets);
  Tensor cosine = new_output(omega, {p.requests, p.bands}, ScalarType::Float),
         sine = new_output(omega, {p.requests, p.bands}, ScalarType::Float);
  mean_phase_rows(p, rows_of(cosine), rows_of(sine));
  return {cosine, sine};
}

void mean_phase_out(const Tensor& positions, const Tensor& omega, const Tensor& offsets, const Tensor& cos,
                    const Tensor& sin) {
  const Context ctx{"mean_phase"};
  ctx.cpu(positions, "positions");
  const PhaseArguments p = read_phase(ctx, positions, omega, offsets);
  const auto [cosine, sine] = read_phase_outputs(ctx, p, positions, omega, offsets, cos, sin);
  mean_phase_rows(p, cosine, sine);
}

Tensor triattention_score(const TensorList& key_pools, const Tensor& page_table, const Tensor& prompt_lengths,
                          const Tensor& source_lengths, const Tensor& mean_cos, const Tensor& mean_sin,
                          const Tensor& q_mean_real, const Tensor& q_mean_imag, const Tensor& q_norm_excess,
                          const Tensor& freq_scale_sq, const std::string& mode, bool normalize, int64_t width) {
  const Context ctx{"triattention_score"};
  if (!key_pools.empty()) ctx.cpu(key_pools.tensor(0), "key_pools[0]");
  const Scoring s = read_scoring(ctx, key_pools, page_table, prompt_lengths, source_lengths, mean_cos, mean_sin,
                                 q_mean_real, q_mean_imag, q_norm_excess, freq_scale_sq, mode, normalize, width);
  Tensor out = new_output(mean_cos, s.sizes(), ScalarType::Float);
  score(ctx, s, mean_cos, rows_of(out));
  return out;
}

void triattention_score_out(const TensorList& key_pools, const Tensor& page_table, const Tensor& prompt_lengths,
                            const Tensor& source_lengths, const Tensor& mean_cos, const Tensor& mean_sin,
                            const Tensor& q_mean_real, const Tensor& q_mean_imag, const Tensor& q_norm_excess,
                            const Tensor& freq_scale_sq, const std::string& mode, bool normalize, int64_t width,
                            const Tensor& out) {
  const Context ctx{"triattention_score"};
  if (!key_pools.empty()) ctx.cpu(key_pools.tensor(0), "key_pools[0]");
  const Scoring s = read_scoring(ctx, key_pools, page_table, prompt_lengths, source_lengths, mean_cos, mean_sin,
                                 q_mean_real, q_mean_imag, q_norm_excess, freq_scale_sq, mode, normalize, width);
  const Rows rows = read_score_output(ctx, s, key_pools,
                                      {{"page_table", page_table},
                                       {"prompt_lengths", prompt_lengths},
                                       {"source_lengths", source_lengths},
                                       {"mean_cos", mean_cos},
                                       {"mean_sin", mean_sin},
                                       {"q_mean_real", q_mean_real},
                                       {"q_mean_imag", q_mean_imag},
                                       {"q_norm_excess", q_norm_excess},
                                       {"freq_scale_sq", freq_scale_sq}},
                                      out);
  score(ctx, s, mean_cos, rows);
}

}  // namespace
}  // namespace kvc::triattention

STABLE_TORCH_LIBRARY_IMPL(KVC_NAMESPACE, CPU, m) {
  m.impl("mean_phase", kvc::boxed<&kvc::triattention::mean_phase>);
  m.impl("mean_phase.out", kvc::boxed<&kvc::triattention::mean_phase_out>);
  m.impl("triattention_score", kvc::boxed<&kvc::triattention::triattention_score>);
  m.impl("triattention_score.out", kvc::boxed<&kvc::triattention::triattention_score_out>);
}
