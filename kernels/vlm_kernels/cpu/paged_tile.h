// What one tile adds to the sums of the heads that share it: scores, softmax, weighted values.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "paged_products.h"

namespace triptych {

constexpr int HEADS = NUM_REGISTERS == 32 ? 4 : 2;  // 4 keys * HEADS sums fill half the registers
constexpr float NOTHING = -std::numeric_limits<float>::infinity();

// What positions add up to for each of the G heads: sums [G, padded D], as the products place
// them; totals; maxima.
struct Sums {
  float *weighted, *total, *maximum;

  Sums(float* memory, int64_t num_groups, int64_t head_dim)
      : weighted(memory),
        total(memory + num_groups * padded(head_dim)),
        maximum(total + num_groups) {}

  static int64_t size(int64_t num_groups, int64_t head_dim) {
    return (num_groups * (padded(head_dim) + 2) + 15) / 16 * 16;
  }
};

// cap * tanh(s / cap)
inline Floats soft_cap(Floats s, float cap) {
  const Floats x = s / cap, size = x < 0 ? -x : x;
  const Floats e = exp_of_negative(size * -2.f);
  const Floats y = (1.f - e) / (1.f + e);
  return (x < 0 ? -y : y) * cap;
}

// Turns the products of q and k into weights of the values, and adds these to the totals; `factors`
// bring the sums so far to the new maxima. What is across registers is done for all heads at once:
// head by head, the steps of it would be waited for one after the other.
template <int heads, class KV>
inline void softmax(float (*scores)[TILE], const Tile<KV>& tile, const float* scales, float cap,
                    float* maxima, float* totals, float* factors) {
  static_assert(heads <= 4 && 4 <= WIDTH, "one fold, one register of factors");
  Floats most[4] = {};
  for (int h = 0; h < heads; h++) {
    for (int i = 0; i < TILE; i += WIDTH) {
      Floats s = load(scores[h] + i) * scales[h];
      if constexpr (HAS_SCALES<KV>) s = s * load(tile.key_scales + i);
      store(scores[h] + i, cap > 0 ? soft_cap(s, cap) : s);
    }
    for (int i = tile.count; i < TILE; i++) scores[h][i] = NOTHING;  // memory may hold anything
    most[h] = broadcast(maxima[h]);
    for (int i = 0; i < TILE; i += WIDTH) {
      const Floats s = load(scores[h] + i);
      most[h] = s > most[h] ? s : most[h];
    }
  }
  Four was = {};
  for (int h = 0; h < heads; h++) was[h] = maxima[h];
  const Four now = largest_of_four(most);
  const Four change = was == now ? Four{} + 1.f : exp_of_negative(was - now);
  Floats added[4] = {};
  for (int h = 0; h < heads; h++) {
    for (int i = 0; i < TILE; i += WIDTH) {
      const Floats w = exp_of_negative(load(scores[h] + i) - now[h]);
      added[h] = added[h] + w;
      if constexpr (HAS_SCALES<KV>) {
        store(scores[h] + i, w * load(tile.value_scales + i));
      } else {
        store(scores[h] + i, w);
      }
    }
  }
  const Four sums = sum_four(added);
  for (int h = 0; h < heads; h++) {
    factors[h] = change[h];
    totals[h] = totals[h] * change[h] + sums[h];
    maxima[h] = now[h];
  }
}

// How all tiles of a part are computed.
struct Way {
  int64_t head_dim, behind;
  float scale, softcap;
};

// One tile for `heads` heads; `lacks` are the factors of their q.
template <class Products, int heads>
void attend(const Way& way, const typename Products::Query* q, const float* lacks,
            const Tile<typename Products::KV>& tile, const Tile<typename Products::KV>& next,
            float* sums, float* totals, float* maxima) {
  alignas(64) float scores[heads][TILE];
  typename Products::Weights weights[heads];
  float scales[heads], factors[heads], units[heads];
  for (int i = 0; i < tile.count; i += 4) {
    Products::template scores<heads>(q, tile.keys + i, next.keys + i, way.head_dim,
                                     reinterpret_cast<float(*)[TILE]>(&scores[0][i]));
  }
  for (int h = 0; h < heads; h++) scales[h] = way.scale * lacks[h];
  softmax<heads>(scores, tile, scales, way.softcap, maxima, totals, factors);
  for (int h = 0; h < heads; h++) units[h] = Products::weigh(scores[h], weights + h);
  constexpr int columns = NUM_REGISTERS == 16 || heads > 2 ? 2 : 4;
  int64_t d = 0;
  for (; d + (columns - 1) * PAIR < way.head_dim; d += columns * PAIR) {
    Products::template add<heads, columns>(weights, units, factors, tile.keys, next.keys,
                                           tile.count, way.behind, d, way.head_dim, sums);
  }
  for (; d < way.head_dim; d += PAIR) {
    Products::template add<heads, 1>(weights, units, factors, tile.keys, next.keys, tile.count,
                                     way.behind, d, way.head_dim, sums);
  }
}

// One tile for all G heads.
template <class Products>
void attend_all(const Way& way, int64_t num_groups, const typename Products::Query* q,
                const float* lacks, const Tile<typename Products::KV>& tile,
                const Tile<typename Products::KV>& next, Sums sums) {
  for (int64_t g = 0; g < num_groups;) {
    const auto of = [&](auto heads) {
      const int64_t at = g * padded(way.head_dim);
      attend<Products, heads.value>(way, q + at, lacks + g, tile, next, sums.weighted + at,
                                    sums.total + g, sums.maximum + g);
      g += heads.value;
    };
    switch (std::min<int64_t>(HEADS, num_groups - g)) {
      case 1: of(std::integral_constant<int, 1>()); break;
      case 2: of(std::integral_constant<int, 2>()); break;
      case 3: of(std::integral_constant<int, 3>()); break;
      default: of(std::integral_constant<int, HEADS>());
    }
  }
}

}  // namespace triptych
