// The order of scores as the order of integers.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define KVC_TOPK_FUNCTION __host__ __device__ __forceinline__
#else
#define KVC_TOPK_FUNCTION inline
#endif

namespace kvc::topk {

constexpr uint32_t kLowestKey = 0x007fffffu;  // of -inf: no score has a lower one

// Keys compare like scores: -0 equals +0, NaN equals -inf.
KVC_TOPK_FUNCTION uint32_t ordered_key(float score) {
  const float value = score + 0.0f;  // turns -0 into +0
  uint32_t bits;
  memcpy(&bits, &value, 4);
  const uint32_t key = bits ^ (static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) | 0x80000000u);
  return score == score ? key : kLowestKey;
}

}  // namespace kvc::topk
