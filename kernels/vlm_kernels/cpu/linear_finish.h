// What follows a product, 16 outputs at a time on AVX-512 (linear.h): bias, residual, activations.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <type_traits>

#include "linear.h"

namespace triptych {

inline __m512 widen(__m256i x) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}
inline __m256i narrow(__m512 x) { return (__m256i)_mm512_cvtneps_pbh(x); }
inline __m512 rounded(__m512 x) { return widen(narrow(x)); }

// numerator / (1 + exp(-x)), to 3e-6 of its value: exp(-x) = 2^(n + f), n an integer, by the
// polynomial of degree 4 whose greatest relative error for 2^f, 0 <= f < 1, is least. Below -86 the
// quotient stays as it is there, some 1e-38 of the numerator.
inline __m512 over_sigmoid(__m512 numerator, __m512 x) {
  __m512 t = _mm512_mul_ps(x, _mm512_set1_ps(-1.44269504f));
  t = _mm512_min_ps(_mm512_set1_ps(125.f), t);  // NaN stays
  const __m512 f = _mm512_reduce_ps(t, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  __m512 p = _mm512_set1_ps(1.35341678e-2f);
  for (float c : {5.20114601e-2f, 2.41442755e-1f, 6.93003833e-1f, 1.00000262f}) {
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(c));
  }
  const __m512 below = _mm512_add_ps(_mm512_set1_ps(1.f), _mm512_scalef_ps(p, t));  // n is in t
  const __m512 near = _mm512_rcp14_ps(below);  // one step of Newton's from 1 / below
  const __m512 inverse = _mm512_mul_ps(near, _mm512_fnmadd_ps(near, below, _mm512_set1_ps(2.f)));
  return _mm512_mul_ps(numerator, inverse);
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

// What becomes of the sums of one panel, row by row from a first one. Where y is tiled, 32 outputs
// are the 64 bytes of a row in one tile, and the rows belong to one quad.
class PanelEnd {
 public:
  PanelEnd(const Job& job, int panel, int first_row)
      : has_bias_(job.bias != nullptr), y_stride_(job.y_is_tiled ? PANEL : job.y_stride),
        residual_stride_(job.residual_stride) {
    const int n = panel * PANEL;
    const bool gated = is_gated(job.epilogue);
    const int column = gated ? n / 2 : n;
    y_ = job.y_is_tiled ? tiled(job, first_row, column) : job.y + first_row * y_stride_ + column;
    if (job.residual) residual_ = job.residual + first_row * residual_stride_ + n;
    left_ = gated ? first((job.n - n) / 2) : first(job.n - n);
    right_ = gated ? 0 : first(job.n - n - PANEL / 2);
    if (!has_bias_) return;
    left_bias_ = read(job.bias + n, gated ? 0xffff : left_);  // gated ones are padded, as panels are
    right_bias_ = read(job.bias + n + PANEL / 2, gated ? 0xffff : right_);
  }

  template <Epilogue epilogue>
  void row(int i, __m512 left, __m512 right) const {
    if (has_bias_) {
      left = _mm512_add_ps(left, left_bias_);
      right = _mm512_add_ps(right, right_bias_);
    }
    uint16_t* y = y_ + i * y_stride_;
    if constexpr (is_gated(epilogue)) {
      left = rounded(left);
      left = rounded(epilogue == GATED_BY_SILU ? silu(left) : gelu(left));
      return _mm256_mask_storeu_epi16(y, left_, narrow(_mm512_mul_ps(left, rounded(right))));
    }
    if constexpr (epilogue == RESIDUAL) {
      const uint16_t* at = residual_ + i * residual_stride_;
      left = _mm512_add_ps(rounded(left), read(at, left_));
      right = _mm512_add_ps(rounded(right), read(at + PANEL / 2, right_));
    }
    if constexpr (epilogue == QUICK_GELU) {
      left = quick_gelu(rounded(left)), right = quick_gelu(rounded(right));
    }
    if constexpr (epilogue == GELU) left = gelu(rounded(left)), right = gelu(rounded(right));
    if (right_ == 0xffff) {  // a whole line at once, as a rule
      return _mm512_storeu_si512(y, (__m512i)_mm512_cvtne2ps_pbh(right, left));
    }
    _mm256_mask_storeu_epi16(y, left_, narrow(left));
    _mm256_mask_storeu_epi16(y + PANEL / 2, right_, narrow(right));
  }

 private:
  static __m512 read(const uint16_t* from, __mmask16 mask) {
    return widen(_mm256_maskz_loadu_epi16(mask, from));
  }

  // Where the row of a tiled y has this column.
  static uint16_t* tiled(const Job& job, int row, int column) {
    const int num_columns = is_gated(job.epilogue) ? job.n / 2 : job.n;
    const int64_t quad = int64_t(row) / QUAD_ROWS * num_columns * QUAD_ROWS;
    const int64_t tile = column / PANEL * PANEL * QUAD_ROWS;
    return job.y + quad + tile + row % QUAD_ROWS * PANEL + column % PANEL;
  }

  const bool has_bias_;
  const int64_t y_stride_, residual_stride_;
  uint16_t* y_;
  const uint16_t* residual_ = nullptr;
  __mmask16 left_, right_;  // the outputs that exist
  __m512 left_bias_, right_bias_;
};

// body(a constant that is `epilogue`): so that what it does for each row has no choices.
template <class Body>
void for_epilogue(Epilogue epilogue, Body&& body) {
  switch (epilogue) {
    case PLAIN: return body(std::integral_constant<Epilogue, PLAIN>());
    case RESIDUAL: return body(std::integral_constant<Epilogue, RESIDUAL>());
    case QUICK_GELU: return body(std::integral_constant<Epilogue, QUICK_GELU>());
    case GELU: return body(std::integral_constant<Epilogue, GELU>());
    case GATED_BY_SILU: return body(std::integral_constant<Epilogue, GATED_BY_SILU>());
    case GATED_BY_GELU: return body(std::integral_constant<Epilogue, GATED_BY_GELU>());
  }
}

}  // namespace triptych
