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

// PTX prmt in its default mode: unlike __byte_perm it honours bit 3 of a selector nibble, which repeats the top bit of
// the chosen byte in all eight.
__device__ __forceinline__ uint32_t permute(uint32_t a, uint32_t b, uint32_t selector) {
  uint32_t result;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(selector));
  return result;
}

// 1.0 in each half where the comparison holds, else 0.
__device__ __forceinline__ __half2 packed_ge(__half2 a, __half2 b) { return __hge2(a, b); }
__device__ __forceinline__ __half2 packed_gt(__half2 a, __half2 b) { return __hgt2(a, b); }
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
// No packed bf16 comparison before sm_90; finite magnitudes order like their 15-bit patterns, so a subtraction that
// cannot borrow across halves leaves the answer in bit 15.
__device__ __forceinline__ uint32_t ge_mask(__nv_bfloat162 a, __nv_bfloat162 b) {
  return permute((vec_bits(a) | 0x80008000u) - vec_bits(b), 0, 0xBB99);
}
__device__ __forceinline__ __nv_bfloat162 packed_ge(__nv_bfloat162 a, __nv_bfloat162 b) {
  return from_bits<__nv_bfloat162>(ge_mask(a, b) & 0x3F803F80u);
}
__device__ __forceinline__ __nv_bfloat162 packed_gt(__nv_bfloat162 a, __nv_bfloat162 b) {
  return from_bits<__nv_bfloat162>(~ge_mask(b, a) & 0x3F803F80u);
}
#else
__device__ __forceinline__ __nv_bfloat162 packed_ge(__nv_bfloat162 a, __nv_bfloat162 b) { return __hge2(a, b); }
__device__ __forceinline__ __nv_bfloat162 packed_gt(__nv_bfloat162 a, __nv_bfloat162 b) { return __hgt2(a, b); }
#endif

__device__ __forceinline__ uint32_t both_halves(uint32_t bits) { return bits * 0x00010001u; }

// How pairs of an element type are computed with. `kUnit` is what a pair's value must be multiplied by.
template <DType kType>
struct Packed;

struct PackedHalf {
  using Vec = __half2;
  static constexpr float kIntegerAnchor = 1024.0f;
  static __device__ __forceinline__ Vec all(float v) { return __float2half2_rn(v); }
  static __device__ __forceinline__ float value(uint32_t bits) {
    return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
  }
  // An E2M1 code at bit 9 is its value times 2^-14.
  static constexpr uint32_t kCodeShift = 9;
  static __device__ __forceinline__ Vec code_unit() { return all(16384.0f); }
};

template <>
struct Packed<DType::kFloat16> : PackedHalf {
  static constexpr uint32_t kInfinity = 0x7C00;  // smallest magnitude that is not a number to quantize
  static constexpr float kUnit = 1.0f;
  static constexpr bool kExactError = true;  // x - q * s always fits the format
  static __device__ __forceinline__ Vec scale(uint32_t code) {
    return __hmul2(from_bits<Vec>(both_halves(code << 7)), all(256.0f));
  }
};

// E4M3 bytes become fp16 by bits alone: an exponent bit wider, so values and scales come out times 2^-8.
template <>
struct Packed<DType::kFloat8E4M3> : PackedHalf {
  static constexpr uint32_t kInfinity = 0x3F80;  // where the NaN byte ends up
  static constexpr float kUnit = 256.0f;
  static constexpr bool kExactError = true;
  static __device__ __forceinline__ Vec scale(uint32_t code) { return from_bits<Vec>(both_halves(code << 7)); }
};

template <>
struct Packed<DType::kBFloat16> {
  using Vec = __nv_bfloat162;
  static constexpr uint32_t kInfinity = 0x7F80;
  static constexpr float kUnit = 1.0f;
  static constexpr bool kExactError = false;  // not beyond the largest scale: 2^20 - 2688 needs more than 8 bits
  static constexpr float kIntegerAnchor = 128.0f;
  static __device__ __forceinline__ Vec all(float v) { return __float2bfloat162_rn(v); }
  static __device__ __forceinline__ float value(uint32_t bits) { return __uint_as_float(bits << 16); }
  static constexpr uint32_t kCodeShift = 6;  // times 2^-126
  static __device__ __forceinline__ Vec code_unit() { return all(0x1p126f); }
  static __device__ __forceinline__ Vec scale(uint32_t code) {
    return __hmul2(from_bits<Vec>(both_halves(code << 4)), all(0x1p120f));
  }
};

// Splits 8 elements into pairs (j, j + 4).
__device__ __forceinline__ void split_words(const uint4& w, uint32_t (&pairs)[4]) {
  pairs[0] = permute(w.x, w.z, 0x5410);
  pairs[1] = permute(w.x, w.z, 0x7632);
  pairs[2] = permute(w.y, w.w, 0x5410);
  pairs[3] = permute(w.y, w.w, 0x7632);
}

__device__ __forceinline__ void split_bytes(uint32_t low, uint32_t high, uint32_t (&pairs)[4]) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const uint32_t x = permute(low, high, ((4 + j) << 12) + (j << 4));  // bytes j into the upper byte of each half
    pairs[j] = (x & 0x80008000u) | ((x >> 1) & 0x3F803F80u);
  }
}

__device__ __forceinline__ uint4 join_words(const uint32_t (&pairs)[4]) {
  return {permute(pairs[0], pairs[1], 0x5410), permute(pairs[2], pairs[3], 0x5410), permute(pairs[0], pairs[1], 0x7632),
          permute(pairs[2], pairs[3], 0x7632)};
}

// Sixteen elements: magnitudes[half][j] holds |x| of elements 8 * half + j and 8 * half + j + 4, signs[half] has bit
// 4i + 3 set where element 8 * half + i is negative.
struct PackedGroup {
  uint32_t magnitudes[2][4];
  uint32_t signs[2];
};

// Sign bits from bytes of all ones and all zeros.
__device__ __forceinline__ uint32_t join_signs(uint32_t even, uint32_t odd) {
  return (even & 0x08080808u) | (odd & 0x80808080u);
}

template <typename P>
__device__ __forceinline__ PackedGroup from_pairs(const uint32_t (&pairs)[2][4]) {
  PackedGroup g;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int j = 0; j < 4; ++j) g.magnitudes[half][j] = vec_bits(__habs2(from_bits<typename P::Vec>(pairs[half][j])));
    g.signs[half] =
        join_signs(permute(pairs[half][0], pairs[half][2], 0xFBD9), permute(pairs[half][1], pairs[half][3], 0xFBD9));
  }
  return g;
}

__device__ __forceinline__ PackedGroup from_e4m3(const uint4& v) {
  PackedGroup g;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t low = half ? v.z : v.x, high = half ? v.w : v.y;
    const uint32_t a = low & 0x7F7F7F7Fu, b = high & 0x7F7F7F7Fu;
#pragma unroll
    for (int j = 0; j < 4; ++j)  // bytes j of both words, zero-extended, moved to where fp16 keeps them
      g.magnitudes[half][j] = permute(a, b, 0xC480 + 0x1111 * j) * 128u;
    g.signs[half] = join_signs(permute(low, high, 0xECA8), permute(low, high, 0xFDB9));
  }
  return g;
}

template <typename P>
__device__ __forceinline__ Group encode_packed(const PackedGroup& g) {
  using Vec = typename P::Vec;
  Vec largest = from_bits<Vec>(g.magnitudes[0][0]);
#pragma unroll
  for (int i = 1; i < 8; ++i) largest = __hmax2_nan(largest, from_bits<Vec>(g.magnitudes[i / 4][i % 4]));
  const uint32_t amax = max(vec_bits(largest) & 0xFFFFu, vec_bits(largest) >> 16);
  // amax has at most 11 significant bits: times 1/6 decides every E4M3 tie as the exact quotient does.
  const uint32_t scale_code = Element<DType::kFloat8E4M3>::from_magnitude(__fmul_rn(P::value(amax), P::kUnit / 6.0f));
  const Vec s = P::scale(scale_code);

  // Three comparisons find the code bit by bit. The midpoints 0.25 0.75 1.25 1.75 2.5 3.5 5 alternate > and >=,
  // which is ties to even; the later ones are selected by arithmetic on the earlier answers.
  const Vec at_1_75 = __hmul2(s, P::all(1.75f)), at_0_75 = __hmul2(s, P::all(0.75f)),
            to_3_5 = __hmul2(s, P::all(2.75f));
  const Vec at_0_25 = __hmul2(s, P::all(0.25f)), to_2_5 = __hmul2(s, P::all(2.25f)), wider = __hmul2(s, P::all(1.5f));
  const bool finite = amax < P::kInfinity;
  const bool keep = finite && scale_code != 0;
  uint32_t words[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    Vec codes[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const Vec a = from_bits<Vec>(g.magnitudes[half][j]);
      const Vec bit2 = packed_ge(a, at_1_75);
      const Vec bit1 = packed_ge(a, __hfma2(bit2, to_3_5, at_0_75));
      const Vec bit0 = packed_gt(a, __hfma2(bit1, __hfma2(bit2, wider, s), __hfma2(bit2, to_2_5, at_0_25)));
      codes[j] = __hfma2(bit2, P::all(4.0f), __hfma2(bit1, P::all(2.0f), bit0));
    }
    // Adding the anchor leaves the two codes of a half-word as an integer in its low byte.
    const Vec low = __hadd2(__hfma2(codes[1], P::all(16.0f), codes[0]), P::all(P::kIntegerAnchor));
    const Vec high = __hadd2(__hfma2(codes[3], P::all(16.0f), codes[2]), P::all(P::kIntegerAnchor));
    words[half] = keep ? permute(vec_bits(low), vec_bits(high), 0x6240) | g.signs[half] : 0;
  }
  return {words[0] | (static_cast<uint64_t>(words[1]) << 32), finite ? scale_code : kNaNScale};
}

// Eight codes times a scale as pairs (j, j + 4): exact in both formats.
template <typename P>
__device__ __forceinline__ void decode_pairs(uint32_t word, typename P::Vec scale, uint32_t (&pairs)[4]) {
  using Vec = typename P::Vec;
  constexpr int kShift = static_cast<int>(P::kCodeShift);
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const uint32_t code =
        (4 * j > kShift ? word >> (4 * j - kShift) : word << (kShift - 4 * j)) & (0x00070007u << kShift);
    const uint32_t sign = (word << (12 - 4 * j)) & 0x80008000u;
    pairs[j] = vec_bits(__hmul2(__hmul2(from_bits<Vec>(code | sign), P::code_unit()), scale));
  }
}

// A scale byte of any sign; NaN bytes are the caller's.
template <typename P>
__device__ __forceinline__ typename P::Vec signed_scale(uint32_t code) {
  return from_bits<typename P::Vec>(vec_bits(P::scale(code & 0x7Fu)) | both_halves((code & 0x80u) << 8));
}

// The second component of a group whose first is known; false where x - q * s may not fit the packed format.
//
// x and q * s lie within a factor of two of each other wherever q is not 0 (Sterbenz), so their difference is exact;
// only below the largest scale may x be further away.
template <typename P>
__device__ __forceinline__ bool encode_residual_pairs(const uint32_t (&pairs)[2][4], const Group& main,
                                                      Group* residual) {
  using Vec = typename P::Vec;
  if (main.scale == kNaNScale) {
    *residual = {0, kNaNScale};
    return true;
  }
  if (!P::kExactError && main.scale == kNaNScale - 1) return false;
  const Vec scale = P::scale(main.scale);
  uint32_t errors[2][4];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    decode_pairs<P>(static_cast<uint32_t>(main.data >> (32 * half)), scale, errors[half]);
#pragma unroll
    for (int j = 0; j < 4; ++j)
      errors[half][j] = vec_bits(__hsub2(from_bits<Vec>(pairs[half][j]), from_bits<Vec>(errors[half][j])));
  }
  *residual = encode_packed<P>(from_pairs<P>(errors));
  return true;
}

// Pairs (j, j + 4) of fp16 or fp32 values as eight E4M3 bytes.
__device__ __forceinline__ uint2 join_bytes(const uint32_t (&r)[4]) {
  const uint32_t a = r[0] | (r[1] << 16), b = r[2] | (r[3] << 16);
  return {permute(a, b, 0x6420), permute(a, b, 0x7531)};
}

__device__ __forceinline__ uint2 round_to_bytes(const uint32_t (&pairs)[4]) {
  uint32_t r[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const __half2_raw half = {static_cast<unsigned short>(pairs[j]), static_cast<unsigned short>(pairs[j] >> 16)};
    r[j] = __nv_cvt_halfraw2_to_fp8x2(half, __NV_SATFINITE, __NV_E4M3);
  }
  return join_bytes(r);
}

// Eight exact products as fp32 pairs (j, j + 4), from their packed form.
__device__ __forceinline__ void widen(const uint32_t (&pairs)[4], float2 (&wide)[4]) {
#pragma unroll
  for (int j = 0; j < 4; ++j) wide[j] = __half22float2(from_bits<__half2>(pairs[j]));
}

// fp32 pairs (j, j + 4) rounded to the hot type: eight elements, in the first 8 * itemsize bytes of `out`.
template <DType kType>
__device__ __forceinline__ void round_pairs(const float2 (&v)[4], uint4 (&out)[2]) {
  uint32_t r[4];
  if constexpr (kType == DType::kFloat32) {
    out[0] = {__float_as_uint(v[0].x), __float_as_uint(v[1].x), __float_as_uint(v[2].x), __float_as_uint(v[3].x)};
    out[1] = {__float_as_uint(v[0].y), __float_as_uint(v[1].y), __float_as_uint(v[2].y), __float_as_uint(v[3].y)};
  }
#pragma unroll
  for (int j = 0; j < (kType == DType::kFloat32 ? 0 : 4); ++j) {
    if constexpr (kType == DType::kFloat8E4M3) {
      r[j] = __nv_cvt_float2_to_fp8x2(v[j], __NV_SATFINITE, __NV_E4M3);
    } else if constexpr (kType == DType::kBFloat16) {
      r[j] = vec_bits(__float22bfloat162_rn(v[j]));  // at most 2688 * 2 * 2^100: never infinite
    } else {
      const auto clamp = [](float f) { return fminf(fmaxf(f, -65504.0f), 65504.0f); };
      r[j] = vec_bits(__floats2half2_rn(clamp(v[j].x), clamp(v[j].y)));
    }
  }
  if constexpr (kType == DType::kFloat8E4M3) {
    const uint2 bytes = join_bytes(r);
    out[0].x = bytes.x;
    out[0].y = bytes.y;
  } else if constexpr (kType != DType::kFloat32) {
    out[0] = join_words(r);
  }
}

__device__ __forceinline__ uint4 replace_if(bool nan, uint32_t bits, const uint4& v) {
  return nan ? uint4{bits, bits, bits, bits} : v;
}

template <DType kType>
constexpr uint32_t kNaNWord = Element<kType>::kNaN * (kType == DType::kFloat32      ? 1u
                                                      : kType == DType::kFloat8E4M3 ? 0x01010101u
                                                                                    : 0x00010001u);

// Sixteen bytes of hot elements by way of fp32: fl(fl(q * s [+ q2 * s2]) * G), where the products are exact.
template <DType kType, typename Products>
__device__ __forceinline__ uint4 decode_wide(uint64_t main, uint64_t rest, float global, Products&& products) {
  uint4 out[2];
#pragma unroll
  for (int half = 0; half < (kType == DType::kFloat8E4M3 ? 2 : 1); ++half) {
    float2 v[4];
    products(static_cast<uint32_t>(main >> (32 * half)), static_cast<uint32_t>(rest >> (32 * half)), v);
#pragma unroll
    for (int j = 0; j < 4; ++j) v[j] = {__fmul_rn(v[j].x, global), __fmul_rn(v[j].y, global)};
    if constexpr (kType == DType::kFloat8E4M3) {
      uint4 part[2];
      round_pairs<kType>(v, part);
      if (half == 0) out[0] = {part[0].x, part[0].y, 0, 0};
      else out[0].z = part[0].x, out[0].w = part[0].y;
    } else {
      round_pairs<kType>(v, out);
    }
  }
  return out[0];
}

// Sixteen bytes of hot elements from their nibbles (element 0 lowest). `unit` says that the global scale is 1.
template <DType kType>
__device__ __forceinline__ uint4 decode_chunk(uint64_t nibbles, uint32_t scale_code, bool unit, float global) {
  const bool nan = is_nan_scale(scale_code);
  const auto low = static_cast<uint32_t>(nibbles), high = static_cast<uint32_t>(nibbles >> 32);
  uint32_t pairs[4];
  if constexpr (kType == DType::kFloat16 || kType == DType::kBFloat16) {
    if (unit) {
      using P = Packed<kType>;
      decode_pairs<P>(low, signed_scale<P>(scale_code), pairs);
      return replace_if(nan, kNaNWord<kType>, join_words(pairs));
    }
  }
  using P = Packed<DType::kFloat16>;
  const __half2 scale = signed_scale<P>(scale_code);
  if constexpr (kType == DType::kFloat8E4M3) {
    if (unit) {
      decode_pairs<P>(low, scale, pairs);
      const uint2 first = round_to_bytes(pairs);
      decode_pairs<P>(high, scale, pairs);
      const uint2 second = round_to_bytes(pairs);
      return replace_if(nan, kNaNWord<kType>, uint4{first.x, first.y, second.x, second.y});
    }
  }
  return replace_if(nan, kNaNWord<kType>,
                    decode_wide<kType>(nibbles, 0, global, [&](uint32_t word, uint32_t, float2(&v)[4]) {
                      decode_pairs<P>(word, scale, pairs);
                      widen(pairs, v);
                    }));
}

// The same for two components. A packed addition of 16-bit elements rounds once, which with G = 1 is all there is.
template <DType kType>
__device__ __forceinline__ uint4 decode_residual_chunk(uint64_t main, uint32_t main_code, uint64_t rest,
                                                       uint32_t rest_code, float global) {
  const bool nan = is_nan_scale(main_code) || is_nan_scale(rest_code);
  uint32_t a[4], b[4];
  if constexpr (kType == DType::kFloat16 || kType == DType::kBFloat16) {
    if (global == 1.0f) {
      using P = Packed<kType>;
      decode_pairs<P>(static_cast<uint32_t>(main), signed_scale<P>(main_code), a);
      decode_pairs<P>(static_cast<uint32_t>(rest), signed_scale<P>(rest_code), b);
#pragma unroll
      for (int j = 0; j < 4; ++j)
        a[j] = vec_bits(__hadd2(from_bits<typename P::Vec>(a[j]), from_bits<typename P::Vec>(b[j])));
      return replace_if(nan, kNaNWord<kType>, join_words(a));
    }
  }
  using P = Packed<DType::kFloat16>;
  return replace_if(nan, kNaNWord<kType>,
                    decode_wide<kType>(main, rest, global, [&](uint32_t one, uint32_t two, float2(&v)[4]) {
                      float2 second[4];
                      decode_pairs<P>(one, signed_scale<P>(main_code), a);
                      decode_pairs<P>(two, signed_scale<P>(rest_code), b);
                      widen(a, v);
                      widen(b, second);
#pragma unroll
                      for (int j = 0; j < 4; ++j)
                        v[j] = {__fadd_rn(v[j].x, second[j].x), __fadd_rn(v[j].y, second[j].y)};
                    }));
}

}  // namespace kvc::nvfp4
