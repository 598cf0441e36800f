// The best of a row, and how far down its nucleus goes.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>

#include "sampling.h"

namespace triptych {

// A value and where it stands as one number: more is better, of equal values the first is.
inline uint64_t key_of(float value, int64_t at) {
  uint32_t bits;
  value += 0.f;  // the zero below zero becomes zero
  std::memcpy(&bits, &value, sizeof(bits));
  bits = bits >> 31 ? ~bits : bits | 0x80000000u;  // order of floats is order of these
  return uint64_t(bits) << 32 | uint32_t(~at);
}

inline int64_t place_of(uint64_t key) { return uint32_t(~key); }

inline float value_of(uint64_t key) {
  const uint32_t bits = uint32_t(key >> 32);
  const uint32_t given = bits >> 31 ? bits & 0x7fffffffu : ~bits;
  float value;
  std::memcpy(&value, &given, sizeof(value));
  return value;
}

// Leaves the best `count` keys of x in front, in no order, and the worst of them behind the others.
//
// What is not above the worst of those held is passed by, whole vectors at a time; when twice as
// many are held as asked for, half of them go. So a value costs the same in any order of values.
inline void hold_best(const float* x, int64_t size, size_t count, std::vector<uint64_t>& keys) {
  keys.clear();
  const size_t most = 2 * count + WIDTH;
  keys.reserve(most + WIDTH);
  const auto cut = [&] {
    std::nth_element(keys.begin(), keys.begin() + (count - 1), keys.end(), std::greater<>());
    keys.resize(count);
  };
  float worst = -INFINITY;
  for (int64_t i = 0; i < size; i += WIDTH) {
    uint32_t lanes = lanes_above(load(x + i), worst);
    for (; lanes != 0; lanes &= lanes - 1) {
      const int64_t at = i + __builtin_ctz(lanes);
      keys.push_back(key_of(x[at], at));
    }
    if (keys.size() < most) continue;
    cut();
    worst = value_of(keys.back());
  }
  if (keys.size() > count) cut();
}

// The k-th best value, k at least 1 and at most the size of the row.
inline float best_at(const float* x, int64_t size, int64_t k, std::vector<uint64_t>& keys) {
  hold_best(x, size, k, keys);
  return value_of(*std::min_element(keys.begin(), keys.end()));
}

// The largest v with  sum of weights above v < limit <= sum of weights from v on: the smallest
// weight of the nucleus. Weights are whole numbers, so their sums are exact in any order.
inline float least_in_nucleus(const float* weights, int64_t size, double limit,
                              std::vector<uint64_t>& keys) {
  constexpr size_t FEW = 64;
  hold_best(weights, size, FEW, keys);
  std::sort(keys.begin(), keys.end(), std::greater<>());
  double above = 0;
  for (const uint64_t key : keys) {
    above += value_of(key);
    if (above >= limit) return value_of(key);
  }
  // digit by digit of the float's bits, whose order is that of the weights
  constexpr int DIGITS[3] = {11, 10, 10};
  uint32_t found = 0;
  int below = 31;
  above = 0;
  for (const int digits : DIGITS) {
    double sums[1 << 11] = {};
    const int shift = below - digits;
    for (int64_t i = 0; i < size; i++) {
      uint32_t bits;
      std::memcpy(&bits, weights + i, sizeof(bits));
      if (bits >> below == found) sums[bits >> shift & ((1 << digits) - 1)] += weights[i];
    }
    int digit = (1 << digits) - 1;
    for (; digit > 0 && above + sums[digit] < limit; digit--) above += sums[digit];
    found = found << digits | digit;
    below = shift;
  }
  float least;
  std::memcpy(&least, &found, sizeof(least));
  return least;
}

}  // namespace triptych
