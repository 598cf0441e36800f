// bfloat16 and float32 behind one set of names, for kernels that compute in float32.
//
//     to_float(x)         to float32
//     from_float(x, &y)   to the type of y, to nearest, ties to even; NaN stays NaN
#pragma once

#include <cstdint>
#include <cstring>

namespace triptych {

// The upper half of a float: its sign, its exponent, 7 bits of its fraction.
struct Bfloat16 {
  uint16_t bits;
};

inline float to_float(float x) { return x; }

inline float to_float(Bfloat16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float y;
  std::memcpy(&y, &bits, sizeof(y));
  return y;
}

inline void from_float(float x, float* y) { *y = x; }

inline void from_float(float x, Bfloat16* y) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  const uint32_t nearest = bits + 0x7fff + ((bits >> 16) & 1);
  y->bits = static_cast<uint16_t>((x == x ? nearest : bits | 0x400000) >> 16);
}

}  // namespace triptych
