// NVFP4 numerics: sixteen values share one E4M3 scale, each is stored as E2M1 (4 bits).
//
// The same lines serve the CPU op, the CUDA kernels and C++ users. Every operation is IEEE fp32, round to nearest
// even, and gives the same bytes everywhere, also when the host flushes denormals. Torch-free, C++17.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#define KVC_HOST_DEVICE __host__ __device__ __forceinline__
#elif defined(__GNUC__)
#define KVC_HOST_DEVICE inline __attribute__((always_inline))
#else
#define KVC_HOST_DEVICE inline
#endif

#if defined(__FP_FAST_FMAF) && !defined(__CUDACC__) && !defined(KVC_FP_CONTRACT_OFF)
#error "kvc/nvfp4.h: compile with -ffp-contract=off -DKVC_FP_CONTRACT_OFF, a fused multiply-add changes bytes"
#endif

// The E2M1 conversion instruction exists only for the family and architecture specific targets of sm_100 and sm_120.
#if defined(__CUDA_ARCH__) && (defined(__CUDA_ARCH_SPECIFIC__) || defined(__CUDA_ARCH_FAMILY_SPECIFIC__)) && \
    __CUDA_ARCH__ >= 1000
#define KVC_HARDWARE_E2M1 1
#else
#define KVC_HARDWARE_E2M1 0
#endif

namespace kvc {

enum class DType : uint8_t { kFloat16 = 0, kBFloat16 = 1, kFloat32 = 2, kFloat8E4M3 = 3 };

KVC_HOST_DEVICE constexpr int itemsize(DType dtype) {
  return dtype == DType::kFloat32 ? 4 : dtype == DType::kFloat8E4M3 ? 1 : 2;
}

KVC_HOST_DEVICE float bits_to_float(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
#endif
}

KVC_HOST_DEVICE uint32_t float_to_bits(float value) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(value);
#else
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
#endif
}

// Single IEEE roundings: nvcc would otherwise contract a product and a sum into one FMA.
KVC_HOST_DEVICE float mul_rn(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

KVC_HOST_DEVICE float add_rn(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fadd_rn(a, b);
#else
  return a + b;
#endif
}

KVC_HOST_DEVICE float div_rn(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}

KVC_HOST_DEVICE float min_magnitude(float a, float b) { return a < b ? a : b; }

// Element conversions. `to_float` is exact; `from_float` rounds once, to nearest even, and saturates finite values.
template <DType kType>
struct Element;

template <>
struct Element<DType::kFloat32> {
  using Bits = uint32_t;
  static constexpr Bits kNaN = 0x7FC00000u;
  static KVC_HOST_DEVICE float to_float(Bits bits) { return bits_to_float(bits); }
  static KVC_HOST_DEVICE Bits from_float(float value) { return float_to_bits(value); }
};

template <>
struct Element<DType::kBFloat16> {
  using Bits = uint16_t;
  static constexpr Bits kNaN = 0x7FC0u;
  static KVC_HOST_DEVICE float to_float(Bits bits) { return bits_to_float(uint32_t{bits} << 16); }
  static KVC_HOST_DEVICE Bits from_float(float value) {
    const uint32_t bits = float_to_bits(value);
    const uint32_t magnitude = bits & 0x7FFFFFFFu;
    const uint32_t rounded = (magnitude + 0x7FFFu + ((magnitude >> 16) & 1u)) >> 16;
    return static_cast<Bits>(((bits >> 16) & 0x8000u) | (rounded < 0x7F7Fu ? rounded : 0x7F7Fu));
  }
};

// A 16- or 8-bit minifloat with `kMantissa` mantissa bits and exponent bias `kBias`, magnitude only.
template <int kMantissa, int kBias>
struct MiniFloat {
  static constexpr int kShift = 23 - kMantissa;
  static constexpr uint32_t kMinNormal = static_cast<uint32_t>(128 - kBias) << 23;  // fp32 bits of 2^(1 - bias)

  static KVC_HOST_DEVICE float decode(uint32_t magnitude) {
    // A subnormal is built as (1.m - 1) * 2^(1 - bias): no fp32 denormal appears on the way.
    const float normal = bits_to_float((magnitude << kShift) + (static_cast<uint32_t>(127 - kBias) << 23));
    const float subnormal = add_rn(bits_to_float(kMinNormal | (magnitude << kShift)), -bits_to_float(kMinNormal));
    return (magnitude >> kMantissa) != 0 ? normal : subnormal;
  }

  static KVC_HOST_DEVICE uint32_t encode(float magnitude) {
    const uint32_t bits = float_to_bits(magnitude);
    const uint32_t normal = ((bits + ((1u << (kShift - 1)) - 1u) + ((bits >> kShift) & 1u)) >> kShift) -
                            (static_cast<uint32_t>(127 - kBias) << kMantissa);
    // Adding a power of two whose ulp is the subnormal step rounds to that step, nearest even.
    const float anchor = bits_to_float(static_cast<uint32_t>(128 - kBias + 23 - kMantissa) << 23);
    const uint32_t subnormal = float_to_bits(add_rn(magnitude, anchor)) & ((2u << kMantissa) - 1u);
    return bits < kMinNormal ? subnormal : normal;
  }
};

template <>
struct Element<DType::kFloat16> {
  using Bits = uint16_t;
  static constexpr Bits kNaN = 0x7E00u;
  static KVC_HOST_DEVICE float to_float(Bits bits) {
#if defined(__CUDA_ARCH__)
    return __half2float(__ushort_as_half(bits));
#else
    const uint32_t magnitude = bits & 0x7FFFu;
    const uint32_t finite = float_to_bits(MiniFloat<10, 15>::decode(magnitude));
    const uint32_t value = magnitude >= 0x7C00u ? (0x7F800000u | (magnitude << 13)) : finite;
    return bits_to_float(value | (static_cast<uint32_t>(bits & 0x8000u) << 16));
#endif
  }
  static KVC_HOST_DEVICE Bits from_float(float value) {
    const uint32_t bits = float_to_bits(value);
    const float magnitude = min_magnitude(bits_to_float(bits & 0x7FFFFFFFu), 65504.0f);
#if defined(__CUDA_ARCH__)
    return static_cast<Bits>(__half_as_ushort(__float2half_rn(magnitude)) | ((bits >> 16) & 0x8000u));
#else
    return static_cast<Bits>(MiniFloat<10, 15>::encode(magnitude) | ((bits >> 16) & 0x8000u));
#endif
  }
};

template <>
struct Element<DType::kFloat8E4M3> {
  using Bits = uint8_t;
  static constexpr Bits kNaN = 0x7Fu;
  // The byte 0x7F (or 0xFF) is NaN; e4m3 has no infinity.
  static KVC_HOST_DEVICE float to_float(Bits bits) {
    const uint32_t magnitude = bits & 0x7Fu;
    const uint32_t value = magnitude == 0x7Fu ? 0x7FC00000u : float_to_bits(MiniFloat<3, 7>::decode(magnitude));
    return bits_to_float(value | (static_cast<uint32_t>(bits & 0x80u) << 24));
  }
  static KVC_HOST_DEVICE uint32_t from_magnitude(float magnitude) {
    const float clamped = min_magnitude(magnitude, 448.0f);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    return __nv_cvt_float_to_fp8(clamped, __NV_SATFINITE, __NV_E4M3);
#else
    return MiniFloat<3, 7>::encode(clamped);
#endif
  }
  static KVC_HOST_DEVICE Bits from_float(float value) {
    const uint32_t bits = float_to_bits(value);
    return static_cast<Bits>(from_magnitude(bits_to_float(bits & 0x7FFFFFFFu)) | ((bits >> 24) & 0x80u));
  }
};

namespace nvfp4 {

constexpr int kGroupSize = 16;       // elements that share one block scale
constexpr int kGroupBytes = 8;       // packed E2M1 bytes of a group
constexpr uint8_t kNaNScale = 0x7F;  // marks a group that held NaN or infinity
constexpr uint32_t kInfinityBits = 0x7F800000u;

// The second-level scale, applied on decode, and its correctly rounded reciprocal.
struct GlobalScale {
  float decode;
  float encode;
};

KVC_HOST_DEVICE GlobalScale global_scale(float decode) { return {decode, div_rn(1.0f, decode)}; }

struct BlockScale {
  uint32_t code;  // E4M3 byte
  float decode;   // d = s * G
  float encode;   // r = 1 / d, or 0 when the scale is 0
};

// `amax` is finite.
KVC_HOST_DEVICE BlockScale block_scale(float amax, GlobalScale global) {
  using E4M3 = Element<DType::kFloat8E4M3>;
  const uint32_t code = E4M3::from_magnitude(mul_rn(div_rn(amax, 6.0f), global.encode));
  const float decode = mul_rn(E4M3::to_float(static_cast<uint8_t>(code)), global.decode);
  return {code, decode, code != 0 ? div_rn(1.0f, decode) : 0.0f};
}

// Nearest E2M1 code of y >= 0, ties to the even code, saturating at 6. `y` is a multiple of 2^-16 where it is below 8.
//
// 2y, y + 2 and y/2 + 4 continue the three linear pieces of "value -> code", which is concave, so their minimum is the
// exact real-valued code and one rounding to an integer finishes: no branch, no table.
KVC_HOST_DEVICE uint32_t e2m1_code(float y) {
  const float code =
      min_magnitude(min_magnitude(add_rn(y, y), add_rn(y, 2.0f)), min_magnitude(add_rn(mul_rn(y, 0.5f), 4.0f), 7.0f));
  return float_to_bits(add_rn(code, 8388608.0f)) & 7u;
}

// |x| * r snapped to a multiple of 2^-16, which removes the rounding error of r before the tie decision.
KVC_HOST_DEVICE float scaled_magnitude(float x, float encode) {
  const float y = mul_rn(bits_to_float(float_to_bits(x) & 0x7FFFFFFFu), encode);
  return add_rn(add_rn(y, 192.0f), -192.0f);
}

KVC_HOST_DEVICE uint32_t encode_element(float x, float encode) {
  return e2m1_code(scaled_magnitude(x, encode)) | ((float_to_bits(x) >> 28) & 8u);
}

// The value of an E2M1 code with its sign in bit 3.
KVC_HOST_DEVICE float e2m1_value(uint32_t nibble) {
  const uint32_t code = nibble & 7u;
  const float normal = bits_to_float((code << 22) + (126u << 23));
  const float value = code < 2u ? 0.5f * static_cast<float>(static_cast<int32_t>(code)) : normal;
  return bits_to_float(float_to_bits(value) | ((nibble & 8u) << 28));
}

KVC_HOST_DEVICE float decode_scale(uint32_t code) {
  return Element<DType::kFloat8E4M3>::to_float(static_cast<uint8_t>(code));
}

KVC_HOST_DEVICE bool is_nan_scale(uint32_t code) { return (code & 0x7Fu) == 0x7Fu; }

struct Group {
  uint64_t data;  // element i in bits 4i .. 4i+3
  uint32_t scale;
};

// Packs sixteen finite values; `amax` is their largest magnitude.
KVC_HOST_DEVICE Group encode_finite(const float (&x)[kGroupSize], const BlockScale& scale) {
  uint32_t words[2] = {0, 0};
#if KVC_HARDWARE_E2M1
#pragma unroll
  for (int pair = 0; pair < 8; ++pair) {
    // The sign of x must survive a magnitude that snaps to zero.
    const float low = copysignf(scaled_magnitude(x[2 * pair], scale.encode), x[2 * pair]);
    const float high = copysignf(scaled_magnitude(x[2 * pair + 1], scale.encode), x[2 * pair + 1]);
    uint32_t byte;
    asm("{ .reg .b8 packed; cvt.rn.satfinite.e2m1x2.f32 packed, %1, %2; cvt.u32.u8 %0, packed; }"
        : "=r"(byte)
        : "f"(high), "f"(low));
    words[pair / 4] |= byte << (8 * (pair % 4));
  }
#elif defined(__CUDA_ARCH__)
#pragma unroll
  for (int i = 0; i < kGroupSize; ++i) words[i / 8] |= encode_element(x[i], scale.encode) << (4 * (i % 8));
#else
  uint8_t codes[kGroupSize];
  for (int i = 0; i < kGroupSize; ++i) codes[i] = static_cast<uint8_t>(encode_element(x[i], scale.encode));
  for (int half = 0; half < 2; ++half) {
    uint64_t v;
    std::memcpy(&v, codes + 8 * half, sizeof v);
    v = (v | (v >> 4)) & 0x00FF00FF00FF00FFull;
    v = (v | (v >> 8)) & 0x0000FFFF0000FFFFull;
    words[half] = static_cast<uint32_t>(v | (v >> 16));
  }
#endif
  const uint64_t data = words[0] | (static_cast<uint64_t>(words[1]) << 32);
  return {scale.code != 0 ? data : 0, scale.code};
}

// Largest magnitude of a group of sixteen as fp32 bits; NaN and infinity compare above every finite value.
KVC_HOST_DEVICE uint32_t amax_bits(const float* x) {
  uint32_t amax = 0;
#if defined(__CUDA_ARCH__)
#pragma unroll
#elif defined(__GNUC__) && !defined(__clang__) && !defined(__CUDACC__)
#pragma GCC unroll 1  // unrolled, it would not be vectorised
#endif
  for (int i = 0; i < kGroupSize; ++i) {
    const uint32_t magnitude = float_to_bits(x[i]) & 0x7FFFFFFFu;
    amax = amax > magnitude ? amax : magnitude;
  }
  return amax;
}

KVC_HOST_DEVICE Group encode_group(const float (&x)[kGroupSize], GlobalScale global) {
  const uint32_t amax = amax_bits(x);
  if (amax >= kInfinityBits) return {0, kNaNScale};
  return encode_finite(x, block_scale(bits_to_float(amax), global));
}

struct ResidualGroup {
  Group main;
  Group residual;
};

// Two components (2FP4): what the first one misses is encoded again with a scale of its own.
KVC_HOST_DEVICE ResidualGroup encode_residual_group(const float (&x)[kGroupSize], GlobalScale global) {
  const uint32_t amax = amax_bits(x);
  if (amax >= kInfinityBits) return {{0, kNaNScale}, {0, kNaNScale}};
  const BlockScale scale = block_scale(bits_to_float(amax), global);
  const Group main = encode_finite(x, scale);
  float error[kGroupSize];
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
  for (int i = 0; i < kGroupSize; ++i) {
    const float q = e2m1_value(static_cast<uint32_t>(main.data >> (4 * i)) & 15u);
    error[i] = add_rn(x[i], -mul_rn(q, scale.decode));
  }
  return {main, encode_group(error, global)};
}

// fp32 value of an element before its one rounding to the destination; the scales are not NaN.
KVC_HOST_DEVICE float decode_element(uint32_t nibble, float scale, float global) {
  return mul_rn(mul_rn(e2m1_value(nibble), scale), global);
}

KVC_HOST_DEVICE float decode_residual_element(uint32_t main, float main_scale, uint32_t residual, float residual_scale,
                                              float global) {
  return mul_rn(add_rn(mul_rn(e2m1_value(main), main_scale), mul_rn(e2m1_value(residual), residual_scale)), global);
}

}  // namespace nvfp4
}  // namespace kvc
