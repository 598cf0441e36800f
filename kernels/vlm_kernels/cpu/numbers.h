// bfloat16 and float32 behind one set of names, for kernels that compute in float32.
//
//     widen(x)        to float32
//     narrow<T>(x)    to T, to nearest, ties to even
//     rounded<T>(x)   float32, as T would hold it
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

// A product that is rounded before it is added stays one: no fused multiply-add behind our back.
#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#elif defined(__GNUC__)
#pragma GCC optimize("fp-contract=off")
#endif

namespace triptych {

using bf16 = uint16_t;

inline float widen(float x) { return x; }

inline float widen(bf16 x) {
  const uint32_t bits = uint32_t(x) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

template <class T>
inline T narrow(float x) {
  if constexpr (std::is_same_v<T, float>) {
    return x;
  } else {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    const uint32_t nearest = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return bf16(x == x ? nearest : 0x7fc0);
  }
}

template <class T>
inline float rounded(float x) {
  return widen(narrow<T>(x));
}

}  // namespace triptych
