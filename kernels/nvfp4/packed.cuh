// NVFP4 of 16- and 8-bit elements with global scale 1, two elements an instruction.
//
// With G = 1 every midpoint times the block scale has at most 8 significant bits and is exact in fp16 and bf16, so
// comparing |x| with the midpoints gives the rounding of the real quotient: the bytes of kvc/nvfp4.h without scaling
// a value. Two half-words of a register hold elements j and j + 4, which lets one shift serve both nibbles.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "kvc/nvfp4.h"

namespace kvc::nvfp4 {

template <typename Vec>
__device__ __forceinline__ uint32_t vec_bits(Vec v) {
  return *reinterpret_cast<uint32_t*>(&v);
}

template <typename Vec>
__device__ __forceinline__ Vec from_bits(uint32_t bits) {
  return *reinterpret_cast<Vec*>(&bits);
}

// Constants that differ between the two 16-bit formats.
template <typename Vec>
struct Packed;

template <>
struct Packed<__half2> {
  static constexpr uint32_t kInfinity = 0x7C00;
  static constexpr uint32_t kNaN = 0x7E007E00;
  static constexpr uint32_t kCodeShift = 9;    // an E2M1 code at this bit is the value times 2^-14
  static constexpr uint32_t kScaleShift = 7;   // an E4M3 code at this bit is the scale times 2^-8
  static constexpr float kIntegerAnchor = 1024.0f;
  static __device__ __forceinline__ __half2 all(float v) { return __float2half2_rn(v); }
  static __device__ __forceinline__ __half2 code_unit() { return all(16384.0f); }
  static __device__ __forceinline__ __half2 scale_unit() { return all(256.0f); }
  static __device__ __forceinline__ float to_float(uint32_t bits) {
    return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
  }
  // 1.0 where the comparison holds, else 0.
  static __device__ __forceinline__ __half2 ge(__half2 a, __half2 b) { return __hge2(a, b); }
  static __device__ __forceinline__ __half2 gt(__half2 a, __half2 b) { return __hgt2(a, b); }
};

template <>
struct Packed<__nv_bfloat162> {
  static constexpr uint32_t kInfinity = 0x7F80;
  static constexpr uint32_t kNaN = 0x7FC07FC0;
  static constexpr uint32_t kCodeShift = 6;    // times 2^-126
  static constexpr uint32_t kScaleShift = 4;   // times 2^-120
  static constexpr float kIntegerAnchor = 128.0f;
  static __device__ __forceinline__ __nv_bfloat162 all(float v) { return __float2bfloat162_rn(v); }
  static __device__ __forceinline__ __nv_bfloat162 code_unit() { return all(0x1p126f); }
  static __device__ __forceinline__ __nv_bfloat162 scale_unit() { return all(0x1p120f); }
  static __device__ __forceinline__ float to_float(uint32_t bits) { return __uint_as_float(bits << 16); }
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  // No packed bf16 comparison before sm_90; finite magnitudes order like their 15-bit patterns, so a subtraction
  // that cannot borrow across halves leaves the answer in bit 15.
  static __device__ __forceinline__ uint32_t ge_bits(uint32_t a, uint32_t b) {
    return __byte_perm((a | 0x80008000u) - b, 0, 0xBB99);
  }
  static __device__ __forceinline__ __nv_bfloat162 ge(__nv_bfloat162 a, __nv_bfloat162 b) {
    return from_bits<__nv_bfloat162>(ge_bits(vec_bits(a), vec_bits(b)) & 0x3F803F80u);
  }
  static __device__ __forceinline__ __nv_bfloat162 gt(__nv_bfloat162 a, __nv_bfloat162 b) {
    return from_bits<__nv_bfloat162>(~ge_bits(vec_bits(b), vec_bits(a)) & 0x3F803F80u);
  }
#else
  static __device__ __forceinline__ __nv_bfloat162 ge(__nv_bfloat162 a, __nv_bfloat162 b) { return __hge2(a, b); }
  static __device__ __forceinline__ __nv_bfloat162 gt(__nv_bfloat162 a, __nv_bfloat162 b) { return __hgt2(a, b); }
#endif
};

// Splits 8 elements into pairs (j, j + 4).
__device__ __forceinline__ void split_words(const uint4& w, uint32_t (&pairs)[4]) {
  pairs[0] = __byte_perm(w.x, w.z, 0x5410);
  pairs[1] = __byte_perm(w.x, w.z, 0x7632);
  pairs[2] = __byte_perm(w.y, w.w, 0x5410);
  pairs[3] = __byte_perm(w.y, w.w, 0x7632);
}

__device__ __forceinline__ void split_bytes(uint32_t low, uint32_t high, uint32_t (&pairs)[4]) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const auto two = static_cast<__nv_fp8x2_storage_t>(__byte_perm(low, high, 0x40 + 0x11 * j));
    const __half2_raw half = __nv_cvt_fp8x2_to_halfraw2(two, __NV_E4M3);
    pairs[j] = half.x | (static_cast<uint32_t>(half.y) << 16);
  }
}

__device__ __forceinline__ uint4 join_words(const uint32_t (&pairs)[4]) {
  return {__byte_perm(pairs[0], pairs[1], 0x5410), __byte_perm(pairs[2], pairs[3], 0x5410),
          __byte_perm(pairs[0], pairs[1], 0x7632), __byte_perm(pairs[2], pairs[3], 0x7632)};
}

// pairs[half][j] holds elements 8 * half + j and 8 * half + j + 4.
template <typename Vec>
__device__ __forceinline__ Group encode_pairs(const uint32_t (&pairs)[2][4]) {
  using P = Packed<Vec>;
  Vec largest = __habs2(from_bits<Vec>(pairs[0][0]));
#pragma unroll
  for (int i = 1; i < 8; ++i) largest = __hmax2_nan(largest, __habs2(from_bits<Vec>(pairs[i / 4][i % 4])));
  const uint32_t amax = max(vec_bits(largest) & 0x7FFFu, (vec_bits(largest) >> 16) & 0x7FFFu);
  // amax has at most 11 significant bits: times 1/6 decides every E4M3 tie as the exact quotient does.
  const uint32_t scale_code = Element<DType::kFloat8E4M3>::from_magnitude(__fmul_rn(P::to_float(amax), 1.0f / 6.0f));
  const Vec s = __hmul2(from_bits<Vec>((scale_code << P::kScaleShift) * 0x00010001u), P::scale_unit());

  // Three comparisons find the code bit by bit. The midpoints 0.25 0.75 1.25 1.75 2.5 3.5 5 alternate > and >=,
  // which is ties to even; the later ones are selected by arithmetic on the earlier answers.
  const Vec at_1_75 = __hmul2(s, P::all(1.75f)), at_0_75 = __hmul2(s, P::all(0.75f)), to_3_5 = __hmul2(s, P::all(2.75f));
  const Vec at_0_25 = __hmul2(s, P::all(0.25f)), to_2_5 = __hmul2(s, P::all(2.25f)), half_s3 = __hmul2(s, P::all(1.5f));
  uint32_t words[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    Vec codes[4];
    uint32_t signs = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const Vec a = __habs2(from_bits<Vec>(pairs[half][j]));
      const Vec bit2 = P::ge(a, at_1_75);
      const Vec bit1 = P::ge(a, __hfma2(bit2, to_3_5, at_0_75));
      const Vec bit0 = P::gt(a, __hfma2(bit1, __hfma2(bit2, half_s3, s), __hfma2(bit2, to_2_5, at_0_25)));
      codes[j] = __hfma2(bit2, P::all(4.0f), __hfma2(bit1, P::all(2.0f), bit0));
      signs |= (pairs[half][j] >> (12 - 4 * j)) & (0x00080008u << (4 * j));
    }
    // Adding the anchor leaves the two codes of a half-word as an integer in its low byte.
    const Vec low = __hadd2(__hfma2(codes[1], P::all(16.0f), codes[0]), P::all(P::kIntegerAnchor));
    const Vec high = __hadd2(__hfma2(codes[3], P::all(16.0f), codes[2]), P::all(P::kIntegerAnchor));
    words[half] = __byte_perm(vec_bits(low), vec_bits(high), 0x6240) | signs;
  }
  const bool finite = amax < P::kInfinity;
  const bool empty = !finite || scale_code == 0;
  const uint64_t data = words[0] | (static_cast<uint64_t>(words[1]) << 32);
  return {empty ? 0 : data, finite ? scale_code : kNaNScale};
}

// Eight codes times their scale, as pairs (j, j + 4): exact in both formats.
template <typename Vec>
__device__ __forceinline__ void decode_pairs(uint32_t word, uint32_t scale_code, uint32_t (&pairs)[4]) {
  using P = Packed<Vec>;
  const uint32_t scale_bits = ((scale_code & 0x7Fu) << P::kScaleShift) | ((scale_code & 0x80u) << 8);
  const Vec s = __hmul2(from_bits<Vec>(scale_bits * 0x00010001u), P::scale_unit());
  const bool nan = is_nan_scale(scale_code);
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const uint32_t code = (4 * j > static_cast<int>(P::kCodeShift) ? word >> (4 * j - P::kCodeShift) : word << (P::kCodeShift - 4 * j)) &
                          (0x00070007u << P::kCodeShift);
    const uint32_t sign = (word << (12 - 4 * j)) & 0x80008000u;
    const Vec v = __hmul2(__hmul2(from_bits<Vec>(code | sign), P::code_unit()), s);
    pairs[j] = nan ? P::kNaN : vec_bits(v);
  }
}

__device__ __forceinline__ void encode_fp8_pairs(const uint32_t (&pairs)[4], uint32_t& low, uint32_t& high) {
  uint32_t r[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const __half2_raw half = {static_cast<unsigned short>(pairs[j]), static_cast<unsigned short>(pairs[j] >> 16)};
    r[j] = __nv_cvt_halfraw2_to_fp8x2(half, __NV_SATFINITE, __NV_E4M3);
  }
  const uint32_t a = r[0] | (r[1] << 16), b = r[2] | (r[3] << 16);
  low = __byte_perm(a, b, 0x6420);
  high = __byte_perm(a, b, 0x7531);
}

}  // namespace kvc::nvfp4
