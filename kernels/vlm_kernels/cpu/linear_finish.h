// What follows a product, 16 outputs at a time on AVX-512 (linear.h): bias, residual, activations.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "linear.h"

namespace triptych {

inline __m512 widen(__m256i x) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}
inline __m256i narrow(__m512 x) { return (__m256i)_mm512_cvtneps_pbh(x); }
inline __m512 rounded(__m512 x) { return widen(narrow(x)); }

// exp(x) to 1e-7 relative: 2^n e^f, |f| <= ln 2 / 2, by the polynomial of vectors.h.
inline __m512 exp_ps(__m512 x) {
  x = _mm512_max_ps(_mm512_min_ps(x, _mm512_set1_ps(88.f)), _mm512_set1_ps(-88.f));
  const __m512 t = _mm512_mul_ps(x, _mm512_set1_ps(1.44269504088896341f));
  const __m512 n = _mm512_roundscale_ps(t, 0);
  __m512 f = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  f = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), f);
  __m512 p = _mm512_set1_ps(1.9875691500e-4f);
  for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f,
                  5.0000001201e-1f}) {
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(c));
  }
  p = _mm512_add_ps(_mm512_fmadd_ps(p, _mm512_mul_ps(f, f), f), _mm512_set1_ps(1.f));
  return _mm512_scalef_ps(p, n);
}

// numerator / (1 + exp(-x))
inline __m512 over_sigmoid(__m512 numerator, __m512 x) {
  const __m512 e = exp_ps(_mm512_sub_ps(_mm512_setzero_ps(), x));
  return _mm512_div_ps(numerator, _mm512_add_ps(_mm512_set1_ps(1.f), e));
}

inline __m512 silu(__m512 x) { return over_sigmoid(x, x); }

// GELU as CLIP and Qwen2-VL have it; x is rounded already.
inline __m512 quick_gelu(__m512 x) {
  const __m512 inner = rounded(_mm512_mul_ps(x, _mm512_set1_ps(1.702f)));
  return _mm512_mul_ps(x, rounded(over_sigmoid(_mm512_set1_ps(1.f), inner)));
}

// GELU by tanh: x * sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3)), rounded once.
inline __m512 gelu(__m512 x) {
  const __m512 cube = _mm512_mul_ps(_mm512_mul_ps(x, x), x);
  const __m512 inner = _mm512_fmadd_ps(cube, _mm512_set1_ps(0.044715f), x);
  return over_sigmoid(x, _mm512_mul_ps(inner, _mm512_set1_ps(1.5957691216f)));
}

inline __mmask16 first(int count) {
  return count >= 16 ? __mmask16(0xffff) : count <= 0 ? __mmask16(0) : __mmask16((1u << count) - 1);
}

// What 16 sums of one row become, of the outputs from `n`, of which `mask` exist.
inline __m512 finished(const Job& job, int row, int n, __m512 sum, __mmask16 mask) {
  if (job.bias) sum = _mm512_add_ps(sum, widen(_mm256_maskz_loadu_epi16(mask, job.bias + n)));
  switch (job.epilogue) {
    case RESIDUAL: {
      const uint16_t* at = job.residual + row * job.residual_stride + n;
      return _mm512_add_ps(rounded(sum), widen(_mm256_maskz_loadu_epi16(mask, at)));
    }
    case QUICK_GELU: return quick_gelu(rounded(sum));
    case GELU: return gelu(rounded(sum));
    default: return sum;
  }
}

// A panel of a gated layer: 16 gates and the 16 values that they open.
inline void finish_gated(const Job& job, int row, int panel, __m512 gate, __m512 value) {
  const int n = panel * (PANEL / 2);
  if (job.bias) {
    const uint16_t* at = job.bias + panel * PANEL;
    gate = _mm512_add_ps(gate, widen(_mm256_loadu_si256((const __m256i*)at)));
    value = _mm512_add_ps(value, widen(_mm256_loadu_si256((const __m256i*)(at + PANEL / 2))));
  }
  gate = rounded(gate);
  gate = rounded(job.epilogue == GATED_BY_SILU ? silu(gate) : gelu(gate));
  const __m512 opened = _mm512_mul_ps(gate, rounded(value));
  _mm256_mask_storeu_epi16(job.y + row * job.y_stride + n, first(job.n / 2 - n), narrow(opened));
}

// Both halves of a panel's 32 outputs of one row.
inline void finish_panel(const Job& job, int row, int panel, __m512 left, __m512 right) {
  if (is_gated(job.epilogue)) return finish_gated(job, row, panel, left, right);
  const int n = panel * PANEL;
  const __mmask16 of_left = first(job.n - n), of_right = first(job.n - n - PANEL / 2);
  left = finished(job, row, n, left, of_left);
  right = finished(job, row, n + PANEL / 2, right, of_right);
  uint16_t* y = job.y + row * job.y_stride + n;
  if (of_right == 0xffff) {  // a whole line at once, as a rule
    return _mm512_storeu_si512(y, (__m512i)_mm512_cvtne2ps_pbh(right, left));
  }
  _mm256_mask_storeu_epi16(y, of_left, narrow(left));
  _mm256_mask_storeu_epi16(y + PANEL / 2, of_right, narrow(right));
}

}  // namespace triptych
