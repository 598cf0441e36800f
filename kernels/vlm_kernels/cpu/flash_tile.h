// Rows of queries attend to packed keys by registers: BLOCK rows at a time, their sums in registers
// (vdpbf16ps). flash_amx.h does the same by tiles.
#pragma once

#if defined(TRIPTYCH_AVX512BF16) && !defined(TRIPTYCH_AMX)

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "flash_exponents.h"
#include "flash_pack.h"

namespace triptych {

constexpr int BLOCK = 6;  // 6 rows * 4 registers of sums, 4 of keys, in 32
constexpr int ROWS = 8 * BLOCK;
constexpr int FEATURES = 16;  // a register's pairs, of which rows and keys have a multiple

inline __m512bh line(const Half* at) { return (__m512bh)_mm512_loadu_si512(at); }

inline __m512bh pair_of(const Half* at) {
  int both;
  std::memcpy(&both, at, sizeof(both));
  return (__m512bh)_mm512_set1_epi32(both);
}

// BLOCK rows by KEYS keys: scores[i][j] = q_i . k_j, rows of scores `stride` apart
inline void multiply_keys(const Half* q, const Half* keys, int64_t width, float* scores,
                          int64_t stride) {
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
    for (int j = 0; j < 4; j++) _mm512_storeu_ps(scores + i * stride + j * 16, sums[i][j]);
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

// Queries of one segment and KV head; row r is query begin + r / G of head r % G.
class Rows {
 public:
  // Queries [begin, end), to the segment's packed keys and values.
  void attend(const Segments& step, const Tensors& at, int64_t head, int64_t begin, int64_t end,
              const Half* keys, const Half* values, int64_t width) {
    const int64_t groups = step.num_groups, used = (end - begin) * groups;
    const int64_t rows = (used + BLOCK - 1) / BLOCK * BLOCK;
    width_ = width;
    clear(rows);
    for (int64_t r = 0; r < used; r++) {
      const int64_t token = begin + r / groups;
      const Half* q = at.q + token * at.q_token + (head * groups + r % groups) * at.q_head;
      std::memcpy(&q_[r * width], q, step.head_dim * sizeof(Half));
      first_[r] = step.first[token];
      end_[r] = step.end[token];
    }
    const int64_t least = *std::min_element(first_.begin(), first_.begin() + used);
    const int64_t most = *std::max_element(end_.begin(), end_.begin() + used);
    const Exponents exponents{at.scale * LOG2_E, at.softcap * LOG2_E};
    for (int64_t tile = least / KEYS; tile * KEYS < most; tile++) {
      for (int64_t row = 0; row < rows; row += BLOCK) {
        if (!is_seen(row, tile)) continue;
        const int64_t of_tile = tile * KEYS * width;
        attend_tile(row, tile * KEYS, exponents, keys + of_tile, values + of_tile);
      }
    }
    for (int64_t r = 0; r < used; r++) {
      const int64_t token = begin + r / groups, head_of = head * groups + r % groups;
      Bfloat16* out = at.out + (token * step.num_kv_heads * groups + head_of) * step.head_dim;
      const float total = _mm512_reduce_add_ps(_mm512_loadu_ps(&totals_[r * 16]));
      for (int64_t d = 0; d < step.head_dim; d++) from_float(sums_[r * width + d] / total, out + d);
    }
  }

 private:
  // All rows are there; those that have no query hold zeros.
  void clear(int64_t rows) {
    q_.assign(rows * width_, 0);
    weights_.assign(rows * KEYS, 0);
    scores_.resize(rows * KEYS);
    sums_.assign(rows * width_, 0.f);
    maxima_.assign(rows, NOTHING);
    totals_.assign(rows * 16, 0.f);
    factors_.assign(rows, 1.f);
    first_.assign(rows, 0);
    end_.assign(rows, 0);
  }

  // Whether one of the rows [row, row + BLOCK) sees a key of the tile.
  bool is_seen(int64_t row, int64_t tile) const {
    bool is_seen = false;
    for (int64_t r = row; r < row + BLOCK; r++) {
      is_seen |= first_[r] < (tile + 1) * KEYS && end_[r] > tile * KEYS;
    }
    return is_seen;
  }

  // Adds one tile to the rows [row, row + BLOCK).
  void attend_tile(int64_t row, int64_t position, const Exponents& exponents, const Half* keys,
                   const Half* values) {
    multiply_keys(&q_[row * width_], keys, width_, &scores_[row * KEYS], KEYS);
    const RowsSoFar rows{&first_[row], &end_[row], &maxima_[row], &totals_[row * 16],
                         &factors_[row]};
    softmax(&scores_[row * KEYS], position, rows, exponents, &weights_[row * KEYS]);
    for (int64_t d = 0; d < width_;) {
      const auto of = [&](auto columns) {
        multiply_values<columns.value>(&weights_[row * KEYS], values + d * 2, width_, &factors_[row],
                                       &sums_[row * width_ + d]);
        d += columns.value * 16;
      };
      const int64_t left = (width_ - d) / 16, turns = (left + 3) / 4;
      switch ((left + turns - 1) / turns) {  // 5 are 3 and 2: one register alone would wait for itself
        case 1: of(std::integral_constant<int, 1>()); break;
        case 2: of(std::integral_constant<int, 2>()); break;
        case 3: of(std::integral_constant<int, 3>()); break;
        default: of(std::integral_constant<int, 4>());
      }
    }
  }

  int64_t width_;
  std::vector<Half> q_, weights_;
  std::vector<float> scores_, sums_, maxima_, totals_, factors_;
  std::vector<int64_t> first_, end_;
};

}  // namespace triptych

#endif
