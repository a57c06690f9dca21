// Copies from global to shared memory that a thread starts and later waits for (cp.async).
#pragma once

#include <cstdint>

namespace kvc {

// Of 16 bytes, past the L1 cache, or of 4 or 8.
template <int kBytes = 16>
__device__ __forceinline__ void copy_async(void* shared, const void* from) {
  const auto to = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  if constexpr (kBytes == 16) asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
  else asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(kBytes) : "memory");
}

__device__ __forceinline__ void commit_async() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int kPending>
__device__ __forceinline__ void wait_async() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Also for copies that no group was made of.
__device__ __forceinline__ void wait_all_async() { asm volatile("cp.async.wait_all;" ::: "memory"); }

}  // namespace kvc
