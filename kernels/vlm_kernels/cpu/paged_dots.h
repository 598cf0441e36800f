// The products of a tile by the dot products of AVX512: two neighbours at once, no conversion.
//
//            q . k                                  w . v
//   bf16     vdpbf16ps, 32 features at once         vdpbf16ps, two positions of 16 features
//   int8     vpdpwssd, likewise                     vpdpwssd, likewise
//
// Both widen or interleave whole registers and nothing else: rows keep their plain order in the
// cache. Of bfloat16, weights are rounded to bfloat16, as transformers' `sdpa` does. Of int8, q and
// weights are whole numbers of 16 bits in units of their largest: far finer than the 8 bits of KV.
// int32 holds all sums: of q . k up to 2 * 127 * 32767 * D / 32, of w . v up to 127 * 32767 * TILE.
#pragma once

#include <type_traits>

#include "paged_products.h"

#ifdef TRIPTYCH_AVX512BF16

#include <immintrin.h>

#include <cmath>

namespace triptych {

constexpr float UNITS = 32767.f;

// The `which`-th half of the features of two positions, in turn: [a0 b0 a1 b1 ...], lane by lane.
template <int which>
inline __m512i interleave(__m512i a, __m512i b) {
  return which == 0 ? _mm512_unpacklo_epi16(a, b) : _mm512_unpackhi_epi16(a, b);
}

// What both have in common; `Dots` loads 32 features, and multiplies and adds up pairs of them.
template <class Dots, class Given>
struct PairProducts {
  using KV = Given;
  using Query = int16_t;
  using Sum = typename Dots::Sum;
  struct Weights {
    alignas(64) int pairs[TILE / 2];
  };

  static int place(int i) { return i % 8 < 4 ? i / 8 * 4 + i % 4 : WIDTH + i / 8 * 4 + i % 4; }

  template <class Q>
  static float prepare(const Q* from, int64_t head_dim, Query* q) {
    std::fill(q, q + padded(head_dim), Query(0));
    return Dots::prepare(from, head_dim, q);
  }

  template <int heads>
  static void scores(const Query* q, const KV* const* keys, const KV* const* next,
                     int64_t head_dim, float (*out)[TILE]) {
    Sum sums[heads][4] = {};
    for (int64_t d = 0; d < head_dim; d += PAIR) {
      __m512i k[4];
      for (int i = 0; i < 4; i++) {
        k[i] = Dots::load(keys[i] + d, head_dim - d);
        __builtin_prefetch(next[i] + d);
      }
      for (int h = 0; h < heads; h++) {
        const __m512i a = _mm512_loadu_si512(q + h * padded(head_dim) + d);
        for (int i = 0; i < 4; i++) sums[h][i] = Dots::dot(sums[h][i], k[i], a);
      }
    }
    for (int h = 0; h < heads; h++) {
      Floats four[4];
      for (int i = 0; i < 4; i++) four[i] = Dots::to_floats(sums[h][i]);
      store_four(out[h], sum_four(four));
    }
  }

  static float weigh(const float* w, Weights* weights) { return Dots::weigh(w, weights->pairs); }

  template <int heads, int columns>
  static void add(const Weights* weights, const float* units, const float* factors,
                  const KV* const* keys, const KV* const* next, int count, int64_t behind,
                  int64_t d, int64_t head_dim, float* sums) {
    Sum low[heads][columns] = {}, high[heads][columns] = {};
    for (int i = 0; i < count; i += 2) {
      for (int c = 0; c < columns; c++) {
        const int64_t at = d + c * PAIR;
        const __m512i a = Dots::load(keys[i] + behind + at, head_dim - at);
        const __m512i b = Dots::load(keys[i + 1] + behind + at, head_dim - at);
        __builtin_prefetch(next[i] + behind + at);
        __builtin_prefetch(next[i + 1] + behind + at);
        const __m512i first = interleave<0>(a, b), second = interleave<1>(a, b);
        for (int h = 0; h < heads; h++) {
          const __m512i w = _mm512_set1_epi32(weights[h].pairs[i / 2]);
          low[h][c] = Dots::dot(low[h][c], first, w);
          high[h][c] = Dots::dot(high[h][c], second, w);
        }
      }
    }
    for (int h = 0; h < heads; h++) {
      for (int c = 0; c < columns; c++) {
        float* of = sums + h * padded(head_dim) + d + c * PAIR;
        store(of, load(of) * factors[h] + Dots::to_floats(low[h][c]) * units[h]);
        store(of + WIDTH, load(of + WIDTH) * factors[h] + Dots::to_floats(high[h][c]) * units[h]);
      }
    }
  }
};

struct Bfloat16Dots {
  typedef __m512 Sum;

  static float prepare(const Bfloat16* from, int64_t head_dim, int16_t* q) {
    std::memcpy(q, from, head_dim * sizeof(Bfloat16));
    return 1.f;
  }

  static __m512i load(const Bfloat16* from, int64_t left) {
    if (left >= PAIR) return _mm512_loadu_si512(from);
    return _mm512_maskz_loadu_epi16((1u << left) - 1, from);
  }

  static Sum dot(Sum sum, __m512i a, __m512i b) {
    return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
  }

  static Floats to_floats(Sum sum) { return (Floats)sum; }

  static float weigh(const float* w, int* pairs) {
    const __m512 low = _mm512_loadu_ps(w), high = _mm512_loadu_ps(w + WIDTH);
    _mm512_store_si512(pairs, (__m512i)_mm512_cvtne2ps_pbh(high, low));
    return 1.f;
  }
};

struct Int8Dots {
  typedef __m512i Sum;

  template <class Q>
  static float prepare(const Q* from, int64_t head_dim, int16_t* q) {
    float most = 0, sum = 0;
    for (int64_t d = 0; d < head_dim; d++) {
      most = std::max(most, std::fabs(to_float(from[d])));
      sum += to_float(from[d]);
    }
    const float factor = UNITS / most, unit = most / UNITS + 0 * sum;  // NaN where q is not finite
    if (!(factor < INFINITY && unit > 0)) return unit;                 // too small: q stays zero
    for (int64_t d = 0; d < head_dim; d++) {
      q[d] = static_cast<int16_t>(std::nearbyint(to_float(from[d]) * factor));
    }
    return unit;
  }

  static __m512i load(const int8_t* from, int64_t left) {
    const __m256i bytes =
        left >= PAIR ? _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))
                     : _mm256_maskz_loadu_epi8((1u << left) - 1, from);
    return _mm512_cvtepi8_epi16(bytes);
  }

  static Sum dot(Sum sum, __m512i a, __m512i b) { return _mm512_dpwssd_epi32(sum, a, b); }

  static Floats to_floats(Sum sum) { return (Floats)_mm512_cvtepi32_ps(sum); }

  static float weigh(const float* w, int* pairs) {
    const __m512 low = _mm512_loadu_ps(w), high = _mm512_loadu_ps(w + WIDTH);
    const float most = _mm512_reduce_max_ps(_mm512_max_ps(low, high));
    const float sum = _mm512_reduce_add_ps(_mm512_add_ps(low, high));
    const __m512 factor = _mm512_set1_ps(most > 0 ? UNITS / most : 0.f);
    const __m256i a = _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(_mm512_mul_ps(low, factor)));
    const __m256i b = _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(_mm512_mul_ps(high, factor)));
    _mm512_store_si512(pairs, _mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1));
    return most / UNITS + 0 * sum;  // NaN where a weight is not finite
  }
};

using Bfloat16Products = PairProducts<Bfloat16Dots, Bfloat16>;
using Int8Products = PairProducts<Int8Dots, int8_t>;

}  // namespace triptych

#endif

namespace triptych {

// Products of rows of a cache, in bfloat16 or int8, with queries of type Q.
#ifdef TRIPTYCH_AVX512BF16
template <class Q>
using OfBfloat16 = typename std::conditional<std::is_same<Q, Bfloat16>::value, Bfloat16Products,
                                             FloatProducts<Bfloat16>>::type;
using OfInt8 = Int8Products;
#else
template <class Q>
using OfBfloat16 = FloatProducts<Bfloat16>;
using OfInt8 = FloatProducts<int8_t>;
#endif

}  // namespace triptych
