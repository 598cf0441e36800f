// The two products of a tile, q . k and w . v, for each type of KV, in float32 arithmetic.
//
// One shape for all of them, so that paged_tile.h is written once:
//
//   Query                        q of one head as the products read it: `padded(D)` elements
//   prepare(from, D, q)          fills it; returns the factor that its scores lack
//   scores(q, keys, ...)         q_h . k of four positions and `heads` heads
//   Weights                      TILE weights of one head as the products read them
//   weigh(w, weights)            fills them; returns the factor that their sums lack
//   add(weights, keys, ...)      sums = sums * factor + w . v for `columns` registers of V
//   place(i)                     where the i-th of PAIR features lies in the sums
//
// `FloatProducts` are for every variant. paged_dots.h has those of AVX512-BF16.
#pragma once

#include "paged_rows.h"
#include "vectors.h"

namespace triptych {

inline int64_t padded(int64_t head_dim) { return (head_dim + PAIR - 1) / PAIR * PAIR; }

template <class Given>
struct FloatProducts {
  using KV = Given;
  using Query = float;
  struct Weights {
    alignas(64) float of[TILE];
  };

  static int place(int i) { return triptych::place<KV>(i); }

  template <class Q>
  static float prepare(const Q* from, int64_t head_dim, Query* q) {
    std::fill(q, q + padded(head_dim), 0.f);
    for (int64_t d = 0; d < head_dim; d++) {
      q[d / PAIR * PAIR + place(int(d % PAIR))] = to_float(from[d]);
    }
    return 1.f;
  }

  template <int heads>
  static void scores(const Query* q, const KV* const* keys, const KV* const* next,
                     int64_t head_dim, float (*out)[TILE]) {
    Floats sums[heads][4] = {};
    for (int64_t d = 0; d < head_dim; d += PAIR) {
      Pair k[4];
      for (int i = 0; i < 4; i++) {
        k[i] = load_pair(keys[i] + d, static_cast<int>(head_dim - d));
        __builtin_prefetch(next[i] + d);
      }
      for (int h = 0; h < heads; h++) {
        const float* of = q + h * padded(head_dim) + d;
        const Floats a = load(of), b = load(of + WIDTH);
        for (int i = 0; i < 4; i++) sums[h][i] = sums[h][i] + k[i].a * a;
        for (int i = 0; i < 4; i++) sums[h][i] = sums[h][i] + k[i].b * b;
      }
    }
    for (int h = 0; h < heads; h++) store_four(out[h], sum_four(sums[h]));
  }

  static float weigh(const float* w, Weights* weights) {
    std::memcpy(weights->of, w, sizeof(weights->of));
    return 1.f;
  }

  template <int heads, int columns>
  static void add(const Weights* weights, const float*, const float* factors,
                  const KV* const* keys, const KV* const* next, int count, int64_t behind,
                  int64_t d, int64_t head_dim, float* sums) {
    Pair added[heads][columns];
    for (int h = 0; h < heads; h++) {
      for (int c = 0; c < columns; c++) {
        const float* of = sums + h * padded(head_dim) + d + c * PAIR;
        added[h][c] = {load(of) * factors[h], load(of + WIDTH) * factors[h]};
      }
    }
    for (int i = 0; i < count; i++) {
      Pair v[columns];
      for (int c = 0; c < columns; c++) {
        const int64_t at = d + c * PAIR;
        v[c] = load_pair(keys[i] + behind + at, static_cast<int>(head_dim - at));
        __builtin_prefetch(next[i] + behind + at);
      }
      for (int h = 0; h < heads; h++) {
        const Floats w = broadcast(weights[h].of[i]);
        for (int c = 0; c < columns; c++) {
          added[h][c].a = added[h][c].a + w * v[c].a;
          added[h][c].b = added[h][c].b + w * v[c].b;
        }
      }
    }
    for (int h = 0; h < heads; h++) {
      for (int c = 0; c < columns; c++) {
        float* of = sums + h * padded(head_dim) + d + c * PAIR;
        store(of, added[h][c].a);
        store(of + WIDTH, added[h][c].b);
      }
    }
  }
};

}  // namespace triptych
