// CPU implementation of the top-k ops, over all of PyTorch's threads.

#include <array>
#include <cstring>
#include <numeric>

#include "common/boxing.h"
#include "topk/arguments.h"
#include "topk/key.h"

namespace kvc::topk {
namespace {

constexpr int64_t kStripe = 1 << 15;    // scores of a row that one thread takes at a time, where rows are few
constexpr int kBins = 1 << 11;          // of a digit
constexpr int kShifts[] = {21, 10, 0};  // of the digits of a key; the last one shares a bit with the second

// Scores as fp32, exactly.
struct Float {
  using Storage = float;
  static float load(float value) { return value; }
};
struct BFloat16 {
  using Storage = uint16_t;
  static float load(uint16_t value) {
    const uint32_t bits = static_cast<uint32_t>(value) << 16;
    float result;
    std::memcpy(&result, &bits, 4);
    return result;
  }
};
struct Half {
  using Storage = uint16_t;
  static float load(uint16_t value) {
    // Exponent and mantissa moved into place, then the bias corrected by a multiplication, which normalises subnormals.
    const uint32_t magnitude = (value & 0x7fffu) << 13;
    const uint32_t sign = static_cast<uint32_t>(value & 0x8000u) << 16;
    float result;
    std::memcpy(&result, &magnitude, 4);
    result *= 0x1p112f;
    uint32_t bits;
    std::memcpy(&bits, &result, 4);
    bits |= sign | (magnitude >= 0x0f800000u ? 0x7f800000u | magnitude : 0);  // infinities and NaN stay such
    std::memcpy(&result, &bits, 4);
    return result;
  }
};

// What is known of the scores [first, last) of a row.
struct Stripe {
  int64_t first = 0, last = 0;
  int64_t above = 0, equal = 0;      // scores above the pivot, and equal to it
  std::vector<uint32_t> keys;        // of all scores
  std::vector<uint32_t> candidates;  // keys that agree with the pivot so far, from the second digit on
  std::array<int32_t, kBins> histogram;
};

template <typename Type>
void load_keys(const typename Type::Storage* row, Stripe& stripe) {
  const int64_t count = stripe.last - stripe.first;
  if (static_cast<int64_t>(stripe.keys.size()) < count) stripe.keys.resize(static_cast<size_t>(count));
  const auto* from = row + stripe.first;
  uint32_t* keys = stripe.keys.data();
  for (int64_t i = 0; i < count; ++i) keys[i] = ordered_key(Type::load(from[i]));
}

void count_digits(Stripe& stripe, const uint32_t* keys, int64_t count, int shift) {
  auto& histogram = stripe.histogram;
  histogram.fill(0);
  for (int64_t i = 0; i < count; ++i) ++histogram[keys[i] >> shift & (kBins - 1)];
}

// Leaves those candidates, or at first keys, whose digits from `shift` on are those of the pivot; they are `count`.
void keep_candidates(Stripe& stripe, bool first, uint32_t pivot, int shift, int64_t count) {
  const std::vector<uint32_t>& from = first ? stripe.keys : stripe.candidates;
  const size_t total = first ? static_cast<size_t>(stripe.last - stripe.first) : from.size();
  if (first) stripe.candidates.resize(static_cast<size_t>(count) + 1);  // one to spare: every key is written
  const uint32_t* keys = from.data();
  uint32_t* kept = stripe.candidates.data();
  for (size_t i = 0; i < total; ++i) {
    const uint32_t key = keys[i];
    *kept = key;
    kept += (key ^ pivot) >> shift == 0;
  }
  stripe.candidates.resize(static_cast<size_t>(count));
}

// Where a stripe writes its winners, and how many of its ties are among them.
struct Share {
  int32_t* out;
  int64_t room, ties;
};

// Writes the indices of scores above the pivot and of the first ties, ascending.
void emit(const Stripe& stripe, uint32_t pivot, int32_t base, Share share) {
  constexpr int64_t kGroup = 64;
  auto [out, room, ties] = share;
  const uint32_t start = static_cast<uint32_t>(base) + static_cast<uint32_t>(stripe.first);
  const int64_t total = stripe.last - stripe.first;
  for (int64_t i = 0; i < total && room > 0; i += kGroup) {
    const int64_t count = std::min(kGroup, total - i);
    const uint32_t* keys = stripe.keys.data() + i;
    uint32_t winners[kGroup], equal = 0;
    for (int64_t j = 0; j < count; ++j) {
      winners[j] = keys[j] > pivot;
      equal |= keys[j] == pivot;
    }
    if (equal != 0 && ties > 0)
      for (int64_t j = 0; j < count && ties > 0; ++j)
        if (keys[j] == pivot) winners[j] = 1, --ties;
    uint32_t found[kGroup + 1];
    int64_t n = 0;
    for (int64_t j = 0; j < count; ++j) {
      found[n] = start + static_cast<uint32_t>(i + j);
      n += winners[j];
    }
    n = std::min(n, room);
    std::memcpy(out, found, static_cast<size_t>(n) * sizeof(int32_t));
    out += n;
    room -= n;
  }
}

// Calls `task(i)` for i in [0, count), each on a thread of its own where there are some.
template <typename Task>
void in_parallel(int64_t count, Task&& task) {
  torch::stable::parallel_for(0, count, 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) task(i);
  });
}
template <typename Task>
void in_order(int64_t count, Task&& task) {
  for (int64_t i = 0; i < count; ++i) task(i);
}

int32_t base_of(const Selection& s, int64_t r) { return s.bases ? s.bases[r] : 0; }
int64_t length_of(const Selection& s, int64_t r) { return std::clamp<int64_t>(s.lengths[r], 0, s.width); }
template <typename Type>
const typename Type::Storage* row_of(const Selection& s, int64_t r) {
  return static_cast<const typename Type::Storage*>(s.scores) + r * s.row_stride;
}

// Writes the answer of a row whose pivot and number of ties to keep are known; stripes know what they hold.
template <typename ForEach>
void emit_row(const Selection& s, int64_t r, const std::vector<Stripe>& stripes, uint32_t pivot, int64_t ties,
              ForEach&& for_each) {
  int32_t* out = s.out + r * s.k;
  int64_t room = s.k;  // a wrong provisional answer may leave more winners than that
  std::vector<Share> shares;
  for (const Stripe& stripe : stripes) {
    shares.push_back({out, room, ties});
    const int64_t kept = std::min(stripe.equal, ties), written = std::min(stripe.above + kept, room);
    out += written;
    room -= written;
    ties -= kept;
  }
  for_each(static_cast<int64_t>(stripes.size()), [&](int64_t i) {
    const auto at = static_cast<size_t>(i);
    emit(stripes[at], pivot, base_of(s, r), shares[at]);
  });
  std::fill(out, out + room, -1);
}

void split(std::vector<Stripe>& stripes, int64_t length, int64_t stripe) {
  stripes.resize(static_cast<size_t>(std::max<int64_t>((length + stripe - 1) / stripe, 1)));
  for (size_t i = 0; i < stripes.size(); ++i) {
    stripes[i].first = static_cast<int64_t>(i) * stripe;
    stripes[i].last = std::min(stripes[i].first + stripe, length);
    stripes[i].above = stripes[i].equal = 0;
  }
}

template <typename Type, typename ForEach>
void select_row(const Selection& s, int64_t r, std::vector<Stripe>& stripes, int64_t stripe, ForEach&& for_each) {
  const int64_t length = length_of(s, r);
  split(stripes, length, stripe);
  for_each(static_cast<int64_t>(stripes.size()),
           [&](int64_t i) { load_keys<Type>(row_of<Type>(s, r), stripes[static_cast<size_t>(i)]); });
  if (s.k >= length) {
    for (Stripe& part : stripes) part.above = part.last - part.first;
    emit_row(s, r, stripes, 0, 0, for_each);
    return;
  }
  uint32_t pivot = 0;
  int64_t wanted = s.k;  // among the scores that agree with the pivot so far
  for (size_t level = 0; level < std::size(kShifts); ++level) {
    const int shift = kShifts[level];
    for_each(static_cast<int64_t>(stripes.size()), [&](int64_t i) {
      Stripe& part = stripes[static_cast<size_t>(i)];
      if (level == 0) return count_digits(part, part.keys.data(), part.last - part.first, shift);
      keep_candidates(part, level == 1, pivot, kShifts[level - 1], part.equal);
      count_digits(part, part.candidates.data(), part.equal, shift);
    });
    int digit = kBins;
    int64_t here = 0;
    do {
      wanted -= here;
      --digit;
      here = 0;
      for (const Stripe& part : stripes) here += part.histogram[static_cast<size_t>(digit)];
    } while (here < wanted);
    for (Stripe& part : stripes) {
      part.above += std::accumulate(part.histogram.begin() + digit + 1, part.histogram.end(), int64_t{0});
      part.equal = part.histogram[static_cast<size_t>(digit)];
    }
    pivot |= static_cast<uint32_t>(digit) << shift;
  }
  emit_row(s, r, stripes, pivot, wanted, for_each);
}

// The pivot is the least score of the provisional answer, and that many equal ones are kept as it has.
template <typename Type, typename ForEach>
void settle_row(const Selection& s, const Provisional& p, int64_t r, std::vector<Stripe>& stripes, int64_t stripe,
                ForEach&& for_each) {
  const int64_t length = length_of(s, r);
  const auto* row = row_of<Type>(s, r);
  uint32_t pivot = UINT32_MAX;
  int64_t ties = 0;
  for (int64_t j = r * s.k; j < (r + 1) * s.k; ++j) {
    const int64_t i = p.wide ? static_cast<const int64_t*>(p.indices)[j] : static_cast<const int32_t*>(p.indices)[j];
    if (i < 0 || i >= length) continue;
    const uint32_t key = ordered_key(Type::load(row[i]));
    if (key < pivot) ties = 0;
    pivot = std::min(pivot, key);
    ties += key == pivot;
  }
  split(stripes, length, stripe);
  for_each(static_cast<int64_t>(stripes.size()), [&](int64_t i) {
    Stripe& part = stripes[static_cast<size_t>(i)];
    load_keys<Type>(row, part);
    uint32_t above = 0, equal = 0;
    for (int64_t c = 0; c < part.last - part.first; ++c) {
      above += part.keys[static_cast<size_t>(c)] > pivot;
      equal += part.keys[static_cast<size_t>(c)] == pivot;
    }
    part.above = above;
    part.equal = equal;
  });
  emit_row(s, r, stripes, pivot, ties, for_each);
}

// Rows side by side; or, where they are few and long, the stripes of one row side by side.
template <typename Type>
void run_rows(const Call& call) {
  const Selection& s = call.selection;
  const bool settles = call.provisional.indices != nullptr;
  const auto run = [&](int64_t r, std::vector<Stripe>& stripes, int64_t stripe, auto&& for_each) {
    if (settles) settle_row<Type>(s, call.provisional, r, stripes, stripe, for_each);
    else select_row<Type>(s, r, stripes, stripe, for_each);
  };
  if (s.rows >= torch::stable::get_num_threads() || s.width <= kStripe) {
    torch::stable::parallel_for(0, s.rows, 1, [&](int64_t first, int64_t last) {
      std::vector<Stripe> stripes;
      for (int64_t r = first; r < last; ++r)
        run(r, stripes, s.width + 1, [](int64_t count, auto&& task) { in_order(count, task); });
    });
    return;
  }
  std::vector<Stripe> stripes;
  for (int64_t r = 0; r < s.rows; ++r)
    run(r, stripes, kStripe, [](int64_t count, auto&& task) { in_parallel(count, task); });
}

void run(const Call& call) {
  switch (call.selection.dtype) {
    case Score::kFloat: return run_rows<Float>(call);
    case Score::kHalf: return run_rows<Half>(call);
    case Score::kBFloat16: return run_rows<BFloat16>(call);
  }
}

Tensor radix_topk(Tensor scores, Tensor lengths, int64_t k, std::optional<Tensor> bases) {
  const Context ctx{"radix_topk"};
  ctx.cpu(scores, "scores");
  Call call = read_radix_topk(ctx, scores, lengths, k, bases, Home(scores));
  return new_selection(scores, call, run);
}

void radix_topk_out(Tensor scores, Tensor lengths, int64_t k, std::optional<Tensor> bases, Tensor out) {
  const Context ctx{"radix_topk"};
  ctx.cpu(scores, "scores");
  const Home home(scores);
  Call call = read_radix_topk(ctx, scores, lengths, k, bases, home);
  selection_into(ctx, out, scores, lengths, nullptr, bases, home, call, run);
}

Tensor settle_ties(Tensor scores, Tensor lengths, Tensor provisional, std::optional<Tensor> bases) {
  const Context ctx{"settle_ties"};
  ctx.cpu(scores, "scores");
  Call call = read_settle_ties(ctx, scores, lengths, provisional, bases, Home(scores));
  return new_selection(scores, call, run);
}

void settle_ties_out(Tensor scores, Tensor lengths, Tensor provisional, std::optional<Tensor> bases, Tensor out) {
  const Context ctx{"settle_ties"};
  ctx.cpu(scores, "scores");
  const Home home(scores);
  Call call = read_settle_ties(ctx, scores, lengths, provisional, bases, home);
  selection_into(ctx, out, scores, lengths, &provisional, bases, home, call, run);
}

}  // namespace
}  // namespace kvc::topk

STABLE_TORCH_LIBRARY_IMPL(KVC_NAMESPACE, CPU, m) {
  m.impl("radix_topk", kvc::boxed<&kvc::topk::radix_topk>);
  m.impl("radix_topk.out", kvc::boxed<&kvc::topk::radix_topk_out>);
  m.impl("settle_ties", kvc::boxed<&kvc::topk::settle_ties>);
  m.impl("settle_ties.out", kvc::boxed<&kvc::topk::settle_ties_out>);
}
