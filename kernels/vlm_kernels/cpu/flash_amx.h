// Rows of queries attend to packed keys by tiles of AMX, in turns of BLOCK rows and KEYS keys.
//
//   turn n:   scores = Q K^T    tiles
//             weights           AVX-512, in place of the scores; totals
//             sums += W V       tiles
//
// Both work at once: a row gets its weights, then tiles of the sums of turn n - 1 or of the scores of
// turn n + 1 are multiplied, and so on.
//
// What a row's scores are measured by, its maximum, is that of the first tile in which it sees a key.
// It moves only where weights would outgrow GREAT; what was added up before is then brought to the
// new one by a factor. A row decides that by its own scores.
#pragma once

#ifdef TRIPTYCH_AMX

#include <algorithm>

#include "flash_exponents.h"
#include "flash_pack.h"
#include "lines.h"
#include "tile_products.h"

namespace triptych {

constexpr int BLOCK = PRODUCT_ROWS;
constexpr int ROWS = 4 * BLOCK;
constexpr int FEATURES = 32;  // a tile's, of which rows and keys have a multiple
constexpr float GREAT = 256;  // of what a lane adds to its total in one turn

// 2^x to 1e-4, which the rounding of weights to bfloat16 hides; 0 of -inf. By the polynomial of its
// degree whose greatest error on [0, 1) is least: a floor is part of the instruction that scales.
inline __m512 power_of(__m512 x) {
  const __m512 f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF);
  __m512 p = _mm512_fmadd_ps(_mm512_set1_ps(7.80245226e-2f), f, _mm512_set1_ps(2.26067155e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.95833540e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(9.99925219e-1f));
  return _mm512_scalef_ps(p, x);
}

// The keys [first, end) of a tile.
struct Seen {
  int64_t first, end;

  bool is_any() const { return first < end; }

  __mmask16 of(int j) const {  // those of 16 from 16 j
    return static_cast<__mmask16>(below(end - j * 16) & ~below(first - j * 16));
  }
};

// The largest of a row's exponents; nothing where it sees no key.
inline float greatest(const float* scores, float scale, Seen seen) {
  __m512 most = _mm512_set1_ps(NOTHING);
  for (int j = 0; j < KEYS / 16; j++) {
    const __m512 x = _mm512_mul_ps(_mm512_load_ps(scores + j * 16), _mm512_set1_ps(scale));
    most = _mm512_mask_max_ps(most, seen.of(j), most, x);
  }
  return _mm512_reduce_max_ps(most);
}

// Weights of one row, 2^(scale s + minus), which may take the place of its scores; returns what they
// add to its 16 totals.
template <bool is_whole>
inline __m512 weigh(const float* scores, float scale, float minus, Seen seen, Half* weights) {
  __m512 w[KEYS / 16];
  for (int j = 0; j < KEYS / 16; j++) {
    __m512 x = _mm512_fmadd_ps(_mm512_load_ps(scores + j * 16), _mm512_set1_ps(scale),
                               _mm512_set1_ps(minus));
    if (!is_whole) x = _mm512_mask_mov_ps(_mm512_set1_ps(NOTHING), seen.of(j), x);
    w[j] = power_of(x);
  }
  for (int j = 0; j < KEYS / 16; j += 2) {
    _mm512_store_si512(weights + j * 16, (__m512i)_mm512_cvtne2ps_pbh(w[j + 1], w[j]));
  }
  __m512 sum = _mm512_add_ps(w[0], w[1]);
  for (int j = 2; j < KEYS / 16; j += 2) sum = _mm512_add_ps(sum, _mm512_add_ps(w[j], w[j + 1]));
  return sum;
}

// Queries of one segment and KV head; row r is query begin + r / G of head r % G.
class Rows {
 public:
  // Queries [begin, end), to the segment's packed keys and values.
  void attend(const Segments& step, const Tensors& at, int64_t head, int64_t begin, int64_t end,
              const Half* keys, const Half* values, int64_t width) {
    keys_ = keys, values_ = values, width_ = width;
    exponents_ = {at.scale * LOG2_E, at.softcap * LOG2_E};
    scale_ = exponents_.cap > 0 ? 1.f : exponents_.scale;
    load(step, at, head, begin, end);
    plan();
    const Tiles tiles;
    multiply(scores_of(turns_.front(), scores_at(0)));
    for (size_t n = 0; n < turns_.size(); n++) run(n);
    multiply(sums_of(turns_.back(), scores_at(turns_.size() - 1)));
    finish(step, at, head, begin);
  }

 private:
  // A block of rows and a tile of keys.
  struct Turn {
    int64_t row, tile, count;
    bool is_first, is_whole;  // of its block's turns; every row sees every key
  };

  float* scores_at(size_t n) { return &scores_[n % 2 * BLOCK * KEYS]; }

  Seen seen_by(int64_t row, int64_t tile) const {
    return {first_[row] - tile * KEYS, std::min<int64_t>(KEYS, end_[row] - tile * KEYS)};
  }

  Product scores_of(const Turn& turn, float* scores) const {
    return {&q_[turn.row * width_], keys_ + turn.tile * KEYS * width_, scores, width_ * 2, KEYS * 4,
            KEYS * 4, KEYS / 16, width_, false};
  }

  Product sums_of(const Turn& turn, const float* scores) {
    return {reinterpret_cast<const Half*>(scores), values_ + turn.tile * KEYS * width_,
            &sums_[turn.row * width_], KEYS * 4, width_ * 4, width_ * 4, width_ / 16, KEYS,
            !turn.is_first};
  }

  void load(const Segments& step, const Tensors& at, int64_t head, int64_t begin, int64_t end);
  void plan();
  void run(size_t n);
  void cap(float* scores) const;
  template <bool is_whole>
  void weigh_rows(size_t n);
  void raise(const Turn& turn, Half* weights);
  void finish(const Segments& step, const Tensors& at, int64_t head, int64_t begin);

  int64_t width_, used_;
  float scale_;
  Exponents exponents_;
  const Half *keys_, *values_;
  Lines<Half> q_;
  Lines<float> scores_;           // [3][BLOCK][KEYS] of two turns; the third is for `raise`
  Lines<float> sums_;             // [rows][width]
  Lines<float> totals_, before_;  // [rows][16], and [BLOCK][16] before a turn
  Lines<float> minus_;            // the maxima, negative; infinite until a key is seen
  std::vector<int64_t> first_, end_;
  std::vector<Turn> turns_;
};

inline void Rows::load(const Segments& step, const Tensors& at, int64_t head, int64_t begin,
                       int64_t end) {
  const int64_t groups = step.num_groups, dim = step.head_dim;
  used_ = (end - begin) * groups;
  const int64_t rows = (used_ + BLOCK - 1) / BLOCK * BLOCK;
  q_.resize(rows * width_), sums_.resize(rows * width_);
  scores_.resize(3 * BLOCK * KEYS), before_.resize(BLOCK * 16);
  totals_.assign(rows * 16, 0.f), minus_.assign(rows, -NOTHING);
  first_.resize(rows), end_.resize(rows);
  int64_t r = 0;
  for (int64_t token = begin; token < end; token++) {
    for (int64_t group = 0; group < groups; group++, r++) {
      const Half* q = at.q + token * at.q_token + (head * groups + group) * at.q_head;
      for (int64_t d = 0; d < width_; d += 32) {
        _mm512_store_si512(&q_[r * width_ + d], _mm512_maskz_loadu_epi16(below(dim - d), q + d));
      }
      first_[r] = step.first[token], end_[r] = step.end[token];
    }
  }
}

inline void Rows::plan() {
  turns_.clear();
  for (int64_t row = 0; row < used_; row += BLOCK) {
    const int64_t count = std::min<int64_t>(BLOCK, used_ - row);
    int64_t least = first_[row], last = least, nearest = end_[row], most = nearest;
    for (int64_t r = row; r < row + count; r++) {
      least = std::min(least, first_[r]), last = std::max(last, first_[r]);
      nearest = std::min(nearest, end_[r]), most = std::max(most, end_[r]);
    }
    for (int64_t tile = least / KEYS; tile * KEYS < most; tile++) {
      const bool is_whole = last <= tile * KEYS && nearest >= (tile + 1) * KEYS;
      turns_.push_back({row, tile, count, tile == least / KEYS, is_whole});
    }
  }
}

inline void Rows::cap(float* scores) const {
  if (!(exponents_.cap > 0)) return;
  for (int64_t j = 0; j < BLOCK * KEYS; j += 16) {
    _mm512_store_ps(scores + j, exponents_.of(_mm512_load_ps(scores + j)));
  }
}

inline void Rows::run(size_t n) {
  const Turn& turn = turns_[n];
  float *scores = scores_at(n), *minus = &minus_[turn.row];
  cap(scores);
  for (int64_t j = 0; j < turn.count; j += 16) {
    const __m512 nothing = _mm512_set1_ps(-NOTHING);
    __mmask16 open = _mm512_mask_cmp_ps_mask(static_cast<__mmask16>(below(turn.count - j)),
                                             _mm512_load_ps(minus + j), nothing, _CMP_EQ_OQ);
    for (; open != 0; open &= open - 1) {
      const int64_t i = j + __builtin_ctz(open);
      minus[i] = -greatest(scores + i * KEYS, scale_, seen_by(turn.row + i, turn.tile));
    }
  }
  turn.is_whole ? weigh_rows<true>(n) : weigh_rows<false>(n);
}

template <bool is_whole>
void Rows::weigh_rows(size_t n) {
  const Turn& turn = turns_[n];
  const bool has_last = n > 0, has_next = n + 1 < turns_.size();
  const Product last = has_last ? sums_of(turns_[n - 1], scores_at(n + 1)) : Product{};
  const Product next = has_next ? scores_of(turns_[n + 1], scores_at(n + 1)) : Product{};
  const int64_t count = turn.count, products = last.count() + next.count();
  const int64_t share = products > 0 ? (count << 16) / products + 1 : 0;  // rows for each, in 2^-16
  const float *minus = &minus_[turn.row], scale = scale_;
  float *scores = scores_at(n), *totals = &totals_[turn.row * 16], *before = &before_[0];
  __m512 most = _mm512_setzero_ps();
  int64_t i = 0, due = 0;
  const auto weigh_until = [&](int64_t end) {
    for (; i < end; i++) {
      Seen seen{0, KEYS};
      if (!is_whole) seen = seen_by(turn.row + i, turn.tile);
      float* row = scores + i * KEYS;
      const __m512 sum = weigh<is_whole>(row, scale, minus[i], seen, reinterpret_cast<Half*>(row));
      const __m512 total = _mm512_load_ps(totals + i * 16);
      _mm512_store_ps(before + i * 16, total);
      _mm512_store_ps(totals + i * 16, _mm512_add_ps(total, sum));
      most = _mm512_max_ps(sum, most);  // a sum that is not a number is passed over
    }
  };
  const auto weigh_due = [&] { weigh_until(std::min(count, (due += share) >> 16)); };
  if (has_last) multiply(last, weigh_due);
  if (has_next) multiply(next, weigh_due);
  weigh_until(count);
  if (_mm512_cmp_ps_mask(most, _mm512_set1_ps(GREAT), _CMP_GT_OQ)) {
    raise(turn, reinterpret_cast<Half*>(scores));
  }
}

// Some rows have outgrown their maxima: they get new ones, and weights again. Their scores are gone,
// and multiplied once more.
inline __attribute__((noinline)) void Rows::raise(const Turn& turn, Half* weights) {
  float* scores = &scores_[2 * BLOCK * KEYS];
  multiply(scores_of(turn, scores));
  cap(scores);
  for (int64_t i = 0; i < turn.count; i++) {
    const int64_t r = turn.row + i;
    const Seen seen = seen_by(r, turn.tile);
    const float *row = scores + i * KEYS, was = minus_[r];
    Half* to = weights + i * KEYS * 2;
    __m512 sum = weigh<false>(row, scale_, was, seen, to);
    if (!_mm512_cmp_ps_mask(sum, _mm512_set1_ps(GREAT), _CMP_GT_OQ)) continue;
    minus_[r] = -greatest(row, scale_, seen);
    const __m512 factor = exp2_of(_mm512_set1_ps(minus_[r] - was));
    for (float* s = &sums_[r * width_]; s < &sums_[r * width_] + width_; s += 16) {
      _mm512_store_ps(s, _mm512_mul_ps(_mm512_load_ps(s), factor));
    }
    sum = weigh<false>(row, scale_, minus_[r], seen, to);
    _mm512_store_ps(&totals_[r * 16], _mm512_fmadd_ps(_mm512_load_ps(&before_[i * 16]), factor, sum));
  }
}

inline void Rows::finish(const Segments& step, const Tensors& at, int64_t head, int64_t begin) {
  const int64_t groups = step.num_groups, dim = step.head_dim;
  Bfloat16* out = at.out + (begin * step.num_kv_heads + head) * groups * dim;
  for (int64_t r = 0; r < used_;) {
    for (int64_t group = 0; group < groups; group++, r++) {
      const __m512 share = _mm512_set1_ps(1 / _mm512_reduce_add_ps(_mm512_load_ps(&totals_[r * 16])));
      for (int64_t d = 0; d < dim; d += 32) {
        const float* sums = &sums_[r * width_ + d];
        const __m512 low = _mm512_mul_ps(_mm512_load_ps(sums), share);
        const __m512 high = _mm512_mul_ps(_mm512_load_ps(sums + 16), share);
        _mm512_mask_storeu_epi16(out + group * dim + d, below(dim - d),
                                 (__m512i)_mm512_cvtne2ps_pbh(high, low));
      }
    }
    out += step.num_kv_heads * groups * dim;
  }
}

}  // namespace triptych

#endif
