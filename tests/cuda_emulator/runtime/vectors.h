// CUDA's vector types, as far as kernels use them. Alignment is CUDA's: a misaligned access is
// trapped in the `ub` mode.
#pragma once

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  constexpr dim3(unsigned a = 1, unsigned b = 1, unsigned c = 1) : x(a), y(b), z(c) {}
};
struct uint3 {
  unsigned x, y, z;
};

#define EMULATOR_VECTORS(SCALAR, NAME)                        \
  struct alignas(2 * sizeof(SCALAR)) NAME##2 {                \
    SCALAR x, y;                                              \
  };                                                          \
  struct alignas(4 * sizeof(SCALAR)) NAME##4 {                \
    SCALAR x, y, z, w;                                        \
  };                                                          \
  inline NAME##2 make_##NAME##2(SCALAR x, SCALAR y) {         \
    return {x, y};                                            \
  }                                                           \
  inline NAME##4 make_##NAME##4(SCALAR x, SCALAR y, SCALAR z, \
                                SCALAR w) {                   \
    return {x, y, z, w};                                      \
  }
EMULATOR_VECTORS(float, float)
EMULATOR_VECTORS(int, int)
EMULATOR_VECTORS(unsigned, uint)
#undef EMULATOR_VECTORS
