// Runs CUDA C++ kernels on a CPU, for what a machine without a GPU can show of them: a thread is a fiber, barriers and
// warp-wide instructions switch between fibers. No proof of the GPU: a race shows only if the order of warps, which is
// random here, brings it out. emulate.py takes the inline PTX out of the sources.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <type_traits>
#include <vector>

#undef __shared__
#define __shared__ static
#undef __launch_bounds__
#define __launch_bounds__(...)
#define __grid_constant__
#define __noinline__
#define __isGlobal(pointer) true
#define __builtin_assume(condition)

namespace emulate {

struct Fiber {
  ucontext_t context;
  std::vector<char> stack;
  bool done;
  uint64_t arrived_in;  // turn of the cluster's barrier
};

// What the lanes of a warp bring to an instruction, and what they brought to the last one.
struct Warp {
  uint32_t in[32], out[32];
  int arrived = 0;
  uint64_t turn = 0;
};

// Where fibers meet.
struct Barrier {
  unsigned arrived = 0;
  uint64_t turn = 0;
};

constexpr unsigned kMostShared = 1 << 18, kMostCluster = 8;
alignas(64) inline uint8_t dynamic_shared[kMostCluster][kMostShared];  // of each block of a cluster
inline std::vector<Fiber> fibers;                                      // of a cluster
inline std::vector<Warp> warps;
inline std::vector<Barrier> barriers;  // of each block
inline Barrier cluster_barrier;
inline ucontext_t scheduler;
inline std::function<void()> kernel;
inline unsigned thread, first_block, threads, blocks, cluster;
inline uint64_t progress;

inline void yield() { swapcontext(&fibers[thread].context, &scheduler); }

inline const uint32_t (&exchange(uint32_t value))[32] {
  Warp& warp = warps[thread / 32];
  const uint64_t mine = warp.turn;
  warp.in[thread % 32] = value;
  ++progress;
  if (++warp.arrived == 32) {
    std::copy(warp.in, warp.in + 32, warp.out);
    warp.arrived = 0;
    ++warp.turn;
  } else {
    while (warp.turn == mine) yield();
  }
  return warp.out;
}

inline uint64_t arrive(Barrier& barrier, unsigned expected) {
  const uint64_t mine = barrier.turn;
  ++progress;
  if (++barrier.arrived == expected) barrier.arrived = 0, ++barrier.turn;
  return mine;
}
inline void wait(const Barrier& barrier, uint64_t mine) {
  while (barrier.turn == mine) yield();
}

inline unsigned rank() { return thread / threads; }
inline void barrier() {
  Barrier& mine = barriers[rank()];
  wait(mine, arrive(mine, threads));
}
inline void arrive_in_cluster() { fibers[thread].arrived_in = arrive(cluster_barrier, cluster * threads); }
inline void wait_for_cluster() { wait(cluster_barrier, fibers[thread].arrived_in); }
inline uint8_t* shared() { return dynamic_shared[rank()]; }
// The same place in the dynamic shared memory of another block.
template <typename T>
T* peer(T* mine, unsigned other) {
  return reinterpret_cast<T*>(reinterpret_cast<uint8_t*>(mine) - shared() + dynamic_shared[other]);
}
// A message to another block, which waits until all it expects are there.
template <typename T>
void send(T* to, uint64_t* bytes_expected, unsigned other, T value) {
  *peer(to, other) = value;
  *peer(bytes_expected, other) -= sizeof(T);
  ++progress;
}

inline void start() {
  kernel();
  fibers[thread].done = true;
  ++progress;
  while (true) yield();
}

inline void run_cluster(unsigned count) {
  barriers.assign(cluster, {});
  cluster_barrier = {};
  warps.assign(count / 32, {});
  fibers.resize(count);
  for (Fiber& fiber : fibers) {
    fiber.done = false;
    fiber.stack.resize(128 << 10);
    getcontext(&fiber.context);
    fiber.context.uc_stack = {fiber.stack.data(), 0, fiber.stack.size()};
    makecontext(&fiber.context, start, 0);
  }
  for (unsigned left = count; left > 0;) {
    const uint64_t before = progress;
    const unsigned first = static_cast<unsigned>(rand()) % (count / 32) * 32;
    for (unsigned i = 0; i < count; ++i) {
      thread = (first + i) % count;
      if (fibers[thread].done) continue;
      swapcontext(&scheduler, &fibers[thread].context);
      left -= fibers[thread].done;
    }
    if (progress == before && left > 0) {
      printf("%u threads wait for ever\n", left);
      exit(2);
    }
  }
}

// A grid, one cluster after the other.
inline void run(unsigned block_count, unsigned thread_count, std::function<void()> body, unsigned cluster_size = 1) {
  blocks = block_count, threads = thread_count, cluster = cluster_size, kernel = std::move(body);
  for (first_block = 0; first_block < blocks; first_block += cluster) run_cluster(cluster * threads);
}

// PTX's: a selector's high bit spreads the sign of the byte.
inline uint32_t prmt(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t both = a | static_cast<uint64_t>(b) << 32;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t which = selector >> 4 * i & 15, byte = static_cast<uint32_t>(both >> (which & 7) * 8 & 0xff);
    result |= (which < 8 ? byte : byte < 128 ? 0 : 0xff) << 8 * i;
  }
  return result;
}

struct Index {
  unsigned x;
};

}  // namespace emulate

#define threadIdx (emulate::Index{emulate::thread % emulate::threads})
#define blockIdx (emulate::Index{emulate::first_block + emulate::rank()})
#define blockDim (emulate::Index{emulate::threads})
#define gridDim (emulate::Index{emulate::blocks})
#define __syncthreads() emulate::barrier()
#define __syncwarp() emulate::exchange(0)

inline uint32_t __reduce_add_sync(uint32_t, uint32_t value) {
  uint32_t sum = 0;
  for (const uint32_t x : emulate::exchange(value)) sum += x;
  return sum;
}
inline uint32_t __reduce_min_sync(uint32_t, uint32_t value) {
  const auto& all = emulate::exchange(value);
  return *std::min_element(all, all + 32);
}
inline uint32_t __reduce_max_sync(uint32_t, uint32_t value) {
  const auto& all = emulate::exchange(value);
  return *std::max_element(all, all + 32);
}
inline uint32_t __shfl_sync(uint32_t, uint32_t value, int lane) { return emulate::exchange(value)[lane & 31]; }
inline uint32_t __shfl_up_sync(uint32_t, uint32_t value, unsigned delta) {
  const auto& all = emulate::exchange(value);
  const unsigned lane = emulate::thread % 32;
  return lane >= delta ? all[lane - delta] : value;
}
inline uint32_t __ballot_sync(uint32_t, bool value) {
  uint32_t bits = 0, lane = 0;
  for (const uint32_t x : emulate::exchange(value)) bits |= x << lane++;
  return bits;
}

template <typename To, typename From>
To as(From value) {
  To result;
  memcpy(&result, &value, sizeof(To));
  return result;
}
inline float __uint_as_float(uint32_t x) { return as<float>(x); }
inline float __int_as_float(int32_t x) { return as<float>(x); }
inline uint32_t __float_as_uint(float x) { return as<uint32_t>(x); }
inline float __saturatef(float x) { return x > 0 ? std::min(x, 1.0f) : 0.0f; }
inline int __popc(uint32_t x) { return __builtin_popcount(x); }
inline int __ffs(uint32_t x) { return __builtin_ffs(static_cast<int>(x)); }
inline int __clz(uint32_t x) { return x != 0 ? __builtin_clz(x) : 32; }
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
  return emulate::prmt(a, b, selector & 0x7777);
}
inline size_t __cvta_generic_to_shared(const void* p) { return reinterpret_cast<size_t>(p); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline __half2 __hfma2(__half2 a, __half2 b, __half2 c) {
  const auto fma = [](__half x, __half y, __half z) {
    return __double2half(static_cast<double>(__half2float(x)) * __half2float(y) + __half2float(z));
  };
  return {fma(a.x, b.x, c.x), fma(a.y, b.y, c.y)};
}
inline __nv_bfloat162 __hfma2(__nv_bfloat162 a, __nv_bfloat162 b, __nv_bfloat162 c) {
  const auto fma = [](__nv_bfloat16 x, __nv_bfloat16 y, __nv_bfloat16 z) {
    return __double2bfloat16(static_cast<double>(__bfloat162float(x)) * __bfloat162float(y) + __bfloat162float(z));
  };
  return {fma(a.x, b.x, c.x), fma(a.y, b.y, c.y)};
}
template <typename T>
T __ldg(const T* p) {
  return *p;
}
template <typename T>
void __stcs(T* p, T value) {
  *p = value;
}
template <typename A, typename B>
std::common_type_t<A, B> min(A a, B b) {
  return std::min<std::common_type_t<A, B>>(a, b);
}
template <typename A, typename B>
std::common_type_t<A, B> max(A a, B b) {
  return std::max<std::common_type_t<A, B>>(a, b);
}

// Fibers do not interrupt each other.
template <typename T, typename V, typename Join>
T exchange_with(T* p, V value, Join&& join) {
  const T before = *p;
  *p = join(before, static_cast<T>(value));
  return before;
}
template <typename T, typename V>
T atomicAdd(T* p, V value) {
  return exchange_with(p, value, [](T a, T b) { return a + b; });
}
template <typename T, typename V>
T atomicMin(T* p, V value) {
  return exchange_with(p, value, [](T a, T b) { return std::min(a, b); });
}
template <typename T, typename V>
T atomicMax(T* p, V value) {
  return exchange_with(p, value, [](T a, T b) { return std::max(a, b); });
}
template <typename T, typename V>
T atomicOr(T* p, V value) {
  return exchange_with(p, value, [](T a, T b) { return a | b; });
}
