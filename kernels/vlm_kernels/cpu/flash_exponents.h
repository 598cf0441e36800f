// How scores become weights: powers of 2.
#pragma once

#ifdef TRIPTYCH_AVX512BF16

#include <immintrin.h>

#include <limits>

namespace triptych {

constexpr float LOG2_E = 1.44269504f;
constexpr float NOTHING = -std::numeric_limits<float>::infinity();

// 2^x by a polynomial p(f) of 2^f on |f| <= 1/2, x = n + f, n an integer; 0 below -150, NaN of NaN.
template <int terms>
inline __m512 exp2_by(const float (&coefficients)[terms], __m512 x) {
  x = _mm512_max_ps(_mm512_set1_ps(-200.f), x);
  const __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 f = _mm512_sub_ps(x, n);
  __m512 p = _mm512_set1_ps(coefficients[0]);
  for (int i = 1; i < terms; i++) p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(coefficients[i]));
  return _mm512_scalef_ps(p, n);
}

// To 3e-6 of its value: the series of e^(f ln 2).
inline __m512 exp2_of(__m512 x) {
  static constexpr float series[] = {1.33335581e-3f, 9.61812911e-3f, 5.55041087e-2f,
                                     2.40226507e-1f, 6.93147181e-1f, 1.f};
  return exp2_by(series, x);
}

// To 1e-4, which the rounding of weights to bfloat16 hides: of its degree the polynomial whose greatest
// error is least.
inline __m512 weight_of(__m512 x) {
  static constexpr float least[] = {5.517166e-2f, 2.4261112e-1f, 6.9326099e-1f, 9.9992807e-1f};
  return exp2_by(least, x);
}

// How scores become exponents of 2: s * scale, or where there is a cap, c tanh(s / c) of that.
struct Exponents {
  float scale, cap;  // both times log2(e)

  __m512 of(__m512 s) const {
    s = _mm512_mul_ps(s, _mm512_set1_ps(scale));
    if (!(cap > 0)) return s;
    const __m512 x = _mm512_div_ps(s, _mm512_set1_ps(cap));  // 1 - e / 1 + e, e = exp(-2 |x|)
    const __m512 e = exp2_of(_mm512_mul_ps(_mm512_abs_ps(x), _mm512_set1_ps(-2.88539008f)));
    const __m512 one = _mm512_set1_ps(1.f);
    const __m512 y = _mm512_div_ps(_mm512_sub_ps(one, e), _mm512_add_ps(one, e));
    const __mmask16 is_negative = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_LT_OQ);
    const __m512 turned = _mm512_mask_sub_ps(y, is_negative, _mm512_setzero_ps(), y);
    return _mm512_mul_ps(turned, _mm512_set1_ps(cap));
  }
};

}  // namespace triptych

#endif
