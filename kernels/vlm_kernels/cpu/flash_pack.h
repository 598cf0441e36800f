// Keys and values of one tile, packed for the CPU's products of bfloat16 pairs: of registers of 16
// floats (vdpbf16ps), and of tiles of AMX (tdpbf16ps).
//
//   keys [D / 2][KEYS][2]    a line holds a pair of features of 16 keys
//   values [KEYS / 2][D][2]  a line holds a pair of keys of 16 features
#pragma once

#ifdef TRIPTYCH_AVX512BF16

#include <immintrin.h>

#include "flash_keys.h"

namespace triptych {

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

// The features [d, d + 32) of the j-th row; zeros behind the last row, and behind the last feature.
inline __m512i features_of(const Half* const* rows, int64_t count, int64_t dim, int64_t j, int64_t d) {
  if (j >= count) return _mm512_setzero_si512();
  return _mm512_maskz_loadu_epi16(below(dim - d), rows[j] + d);
}

// `count` rows of `dim` features, as keys of `width`.
inline void pack_keys(const Half* const* rows, int64_t count, int64_t dim, int64_t width, Half* keys) {
  for (int64_t d = 0; d < width; d += 32) {
    const int64_t lines = std::min<int64_t>(16, (width - d) / 2);
    for (int64_t j = 0; j < KEYS; j += 16) {
      __m512i pairs[16];
      for (int i = 0; i < 16; i++) pairs[i] = features_of(rows, count, dim, j + i, d);
      transpose(pairs);
      for (int64_t i = 0; i < lines; i++) {
        _mm512_storeu_si512(keys + ((d / 2 + i) * KEYS + j) * 2, pairs[i]);
      }
    }
  }
}

// The same as values.
inline void pack_values(const Half* const* rows, int64_t count, int64_t dim, int64_t width,
                        Half* values) {
  const __m512i turn = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8,
                                        39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  const __m512i turn_behind = _mm512_add_epi16(turn, _mm512_set1_epi16(16));
  for (int64_t d = 0; d < width; d += 32) {
    for (int64_t j = 0; j < KEYS; j += 2) {
      const __m512i a = features_of(rows, count, dim, j, d);
      const __m512i b = features_of(rows, count, dim, j + 1, d);
      Half* to = values + (j / 2 * width + d) * 2;
      _mm512_storeu_si512(to, _mm512_permutex2var_epi16(a, turn, b));
      if (width - d > 16) _mm512_storeu_si512(to + 32, _mm512_permutex2var_epi16(a, turn_behind, b));
    }
  }
}

inline void pack(const TileRows& rows, int64_t dim, int64_t width, Half* keys, Half* values) {
  pack_keys(rows.keys, rows.count, dim, width, keys);
  pack_values(rows.values, rows.count, dim, width, values);
}

}  // namespace triptych

#endif
