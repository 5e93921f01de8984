// Number formats and arithmetic, rounded as CUDA rounds.
#pragma once

inline float __int_as_float(int bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}
inline unsigned __float_as_uint(float value) {
  unsigned bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

namespace emulator {

inline float from_half(uint16_t bits) {
  _Float16 value;
  memcpy(&value, &bits, sizeof value);
  return float(value);
}
inline uint16_t to_half(float value) {
  const _Float16 half = _Float16(value);
  uint16_t bits;
  memcpy(&bits, &half, sizeof bits);
  return bits;
}
inline float from_bfloat16(uint16_t bits) { return __int_as_float(int(unsigned(bits) << 16)); }
inline uint16_t to_bfloat16(float value) {
  const unsigned bits = __float_as_uint(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;  // CUDA's NaN.
  return uint16_t((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

}  // namespace emulator

struct __half {
  uint16_t bits;
};
struct __nv_bfloat16 {
  uint16_t bits;
};
inline float __half2float(__half value) { return emulator::from_half(value.bits); }
inline __half __float2half_rn(float value) { return {emulator::to_half(value)}; }
inline float __bfloat162float(__nv_bfloat16 value) { return emulator::from_bfloat16(value.bits); }
inline __nv_bfloat16 __float2bfloat16_rn(float value) { return {emulator::to_bfloat16(value)}; }

// Built with -ffp-contract=off: each of these rounds once.
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }

template <class A, class B>
inline std::common_type_t<A, B> min(A a, B b) {
  using Common = std::common_type_t<A, B>;
  return Common(b) < Common(a) ? Common(b) : Common(a);
}
template <class A, class B>
inline std::common_type_t<A, B> max(A a, B b) {
  using Common = std::common_type_t<A, B>;
  return Common(a) < Common(b) ? Common(b) : Common(a);
}
