// One tile of keys in flash attention: packed for the CPU's products of bfloat16 pairs, multiplied
// by BLOCK rows of queries at a time, sums in registers.
//
//   keys [D / 2][KEYS][2]    a line holds a pair of features of 16 keys
//   values [KEYS / 2][D][2]  a line holds a pair of keys of 16 features
#pragma once

#ifdef TRIPTYCH_AVX512BF16

#include <immintrin.h>

#include <cmath>
#include <limits>

#include "flash_keys.h"

namespace triptych {

constexpr int BLOCK = 6;  // 6 rows * 4 registers of sums, 4 of keys, in 32
constexpr float NOTHING = -std::numeric_limits<float>::infinity();

inline __mmask32 below(int64_t count) {
  return count >= 32 ? 0xffffffffu : count <= 0 ? 0u : (1u << count) - 1;
}

// Turns 16 rows of 16 pairs into 16 rows of pairs: r[i] holds the i-th pair of each row.
inline void transpose(__m512i r[16]) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {  // r[i + c], lane l: pair 4 l + c of four rows
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int c = 0; c < 4; c++) {  // lanes of four registers, turned in the same way
    const __m512i even = _mm512_shuffle_i32x4(r[c], r[4 + c], 0x88);
    const __m512i odd = _mm512_shuffle_i32x4(r[c], r[4 + c], 0xdd);
    const __m512i even_behind = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0x88);
    const __m512i odd_behind = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0xdd);
    t[c] = _mm512_shuffle_i32x4(even, even_behind, 0x88);
    t[4 + c] = _mm512_shuffle_i32x4(odd, odd_behind, 0x88);
    t[8 + c] = _mm512_shuffle_i32x4(even, even_behind, 0xdd);
    t[12 + c] = _mm512_shuffle_i32x4(odd, odd_behind, 0xdd);
  }
  for (int i = 0; i < 16; i++) r[i] = t[i];
}

// Zeros stand behind the last key and, up to `width`, behind the last feature.
inline void pack(const TileRows& rows, int64_t dim, int64_t width, Half* keys, Half* values) {
  const auto load = [&](const Half* const* of, int64_t j, int64_t d) {
    if (j >= rows.count) return _mm512_setzero_si512();
    return _mm512_maskz_loadu_epi16(below(dim - d), of[j] + d);
  };
  const __m512i turn = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8,
                                        39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  const __m512i turn_behind = _mm512_add_epi16(turn, _mm512_set1_epi16(16));
  for (int64_t d = 0; d < width; d += 32) {
    const int64_t lines = std::min<int64_t>(16, (width - d) / 2);
    for (int64_t j = 0; j < KEYS; j += 16) {
      __m512i pairs[16];
      for (int i = 0; i < 16; i++) pairs[i] = load(rows.keys, j + i, d);
      transpose(pairs);
      for (int64_t i = 0; i < lines; i++) {
        _mm512_storeu_si512(keys + ((d / 2 + i) * KEYS + j) * 2, pairs[i]);
      }
    }
    for (int64_t j = 0; j < KEYS; j += 2) {
      const __m512i a = load(rows.values, j, d), b = load(rows.values, j + 1, d);
      Half* to = values + (j / 2 * width + d) * 2;
      _mm512_storeu_si512(to, _mm512_permutex2var_epi16(a, turn, b));
      if (lines > 8) _mm512_storeu_si512(to + 32, _mm512_permutex2var_epi16(a, turn_behind, b));
    }
  }
}

inline __m512bh line(const Half* at) { return (__m512bh)_mm512_loadu_si512(at); }

inline __m512bh pair_of(const Half* at) {
  int both;
  std::memcpy(&both, at, sizeof(both));
  return (__m512bh)_mm512_set1_epi32(both);
}

// BLOCK rows by KEYS keys: scores[i][j] = q_i . k_j
inline void multiply_keys(const Half* q, const Half* keys, int64_t width, float* scores) {
  __m512 sums[BLOCK][4];
  for (auto& of_row : sums)
    for (auto& sum : of_row) sum = _mm512_setzero_ps();
  for (int64_t d = 0; d < width; d += 2) {
    __m512bh k[4];
    for (int j = 0; j < 4; j++) k[j] = line(keys + (d / 2 * KEYS + j * 16) * 2);
    for (int i = 0; i < BLOCK; i++) {
      const __m512bh both = pair_of(q + i * width + d);
      for (int j = 0; j < 4; j++) sums[i][j] = _mm512_dpbf16_ps(sums[i][j], k[j], both);
    }
  }
  for (int i = 0; i < BLOCK; i++)
    for (int j = 0; j < 4; j++) _mm512_storeu_ps(scores + i * KEYS + j * 16, sums[i][j]);
}

// BLOCK rows by 16 * columns features: sums[i] = sums[i] * factor[i] + sum_j weights[i][j] v_j
template <int columns>
void multiply_values(const Half* weights, const Half* values, int64_t width, const float* factors,
                     float* to) {
  __m512 sums[BLOCK][columns];
  for (int i = 0; i < BLOCK; i++) {
    for (int c = 0; c < columns; c++) {
      sums[i][c] = _mm512_mul_ps(_mm512_loadu_ps(to + i * width + c * 16),
                                 _mm512_set1_ps(factors[i]));
    }
  }
  for (int64_t j = 0; j < KEYS; j += 2) {
    __m512bh v[columns];
    for (int c = 0; c < columns; c++) v[c] = line(values + (j / 2 * width + c * 16) * 2);
    for (int i = 0; i < BLOCK; i++) {
      const __m512bh both = pair_of(weights + i * KEYS + j);
      for (int c = 0; c < columns; c++) sums[i][c] = _mm512_dpbf16_ps(sums[i][c], v[c], both);
    }
  }
  for (int i = 0; i < BLOCK; i++)
    for (int c = 0; c < columns; c++) _mm512_storeu_ps(to + i * width + c * 16, sums[i][c]);
}

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

// The scores of a row as exponents of 2, in their place; those of keys that it does not see are
// nothing. Returns the largest.
inline float to_exponents(float* scores, int64_t first, int64_t end, const Exponents& exponents) {
  __m512 s[4];
  for (int j = 0; j < 4; j++) s[j] = exponents.of(_mm512_loadu_ps(scores + j * 16));
  if (first > 0 || end < KEYS) {
    for (int j = 0; j < 4; j++) {
      const auto seen = static_cast<__mmask16>(below(end - j * 16) & ~below(first - j * 16));
      s[j] = _mm512_mask_mov_ps(_mm512_set1_ps(NOTHING), seen, s[j]);
    }
  }
  for (int j = 0; j < 4; j++) _mm512_storeu_ps(scores + j * 16, s[j]);
  return _mm512_reduce_max_ps(
      _mm512_max_ps(_mm512_max_ps(s[0], s[1]), _mm512_max_ps(s[2], s[3])));
}

// A row's exponents as weights; returns what they add to 16 totals.
inline __m512 to_weights(const float* exponents, float maximum, Half* weights) {
  __m512 w[4];
  for (int j = 0; j < 4; j++) {
    const __m512 x = _mm512_loadu_ps(exponents + j * 16);
    w[j] = weight_of(_mm512_sub_ps(x, _mm512_set1_ps(maximum)));
  }
  for (int j = 0; j < 2; j++) {
    _mm512_storeu_si512(weights + j * 32, (__m512i)_mm512_cvtne2ps_pbh(w[2 * j + 1], w[2 * j]));
  }
  return _mm512_add_ps(_mm512_add_ps(w[0], w[1]), _mm512_add_ps(w[2], w[3]));
}

// What BLOCK rows of queries see, and what they have added up so far.
struct RowsSoFar {
  const int64_t *first, *end;        // each sees the keys [first, end) of its segment
  float *maxima, *totals, *factors;  // totals in 16 parts each; factors of what was summed before
};

// Turns the scores of BLOCK rows with the KEYS keys from `position` into weights. The factors of all
// rows are one exponential.
inline void softmax(float* scores, int64_t position, const RowsSoFar& rows,
                    const Exponents& exponents, Half* weights) {
  alignas(64) float before[16] = {}, now[16] = {};
  int64_t from[BLOCK], to[BLOCK];
  for (int i = 0; i < BLOCK; i++) {
    from[i] = rows.first[i] - position;
    to[i] = std::min<int64_t>(KEYS, rows.end[i] - position);
    before[i] = now[i] = rows.maxima[i];
    if (from[i] >= to[i]) continue;
    now[i] = std::max(now[i], to_exponents(scores + i * KEYS, from[i], to[i], exponents));
    rows.maxima[i] = now[i];
  }
  const __m512 was = _mm512_load_ps(before), is = _mm512_load_ps(now);
  const __mmask16 is_other = _mm512_cmp_ps_mask(was, is, _CMP_NEQ_UQ);
  const __m512 all = _mm512_mask_mov_ps(_mm512_set1_ps(1.f), is_other,
                                        exp2_of(_mm512_sub_ps(was, is)));
  _mm512_mask_storeu_ps(rows.factors, (1u << BLOCK) - 1, all);
  for (int i = 0; i < BLOCK; i++) {
    if (from[i] >= to[i]) {
      std::fill(weights + i * KEYS, weights + (i + 1) * KEYS, Half(0));
      continue;
    }
    const __m512 added = to_weights(scores + i * KEYS, now[i], weights + i * KEYS);
    float* totals = rows.totals + i * 16;
    const __m512 summed = _mm512_mul_ps(_mm512_loadu_ps(totals), _mm512_set1_ps(rows.factors[i]));
    _mm512_storeu_ps(totals, _mm512_add_ps(summed, added));
  }
}

}  // namespace triptych

#endif
