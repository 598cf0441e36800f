// Rounding after each operation, as transformers' modules do; included before all functions.
//
//     rounded<T>(x)   float32, as T would hold it
#pragma once

// A product that is rounded before it is added stays one: no fused multiply-add behind our back.
#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#elif defined(__GNUC__)
#pragma GCC optimize("fp-contract=off")
#endif

#include "bfloat16.h"

namespace triptych {

template <class T>
inline float rounded(float x) {
  T y;
  from_float(x, &y);
  return to_float(y);
}

}  // namespace triptych
