// Vectors of floats as wide as the variant's registers, out of the types that KV is kept in.
//
// Plain C++ over the compiler's vector types, so that one kernel text serves every variant; only
// the sum across a register is written once per instruction set.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#include "bfloat16.h"

namespace triptych {

#if defined(__AVX512F__)
constexpr int WIDTH = 16;
constexpr int NUM_REGISTERS = 32;
#elif defined(__AVX2__)
constexpr int WIDTH = 8;
constexpr int NUM_REGISTERS = 16;
#else
constexpr int WIDTH = 4;
constexpr int NUM_REGISTERS = 16;
#endif

typedef float Floats __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t Bits __attribute__((vector_size(4 * WIDTH)));
typedef float Four __attribute__((vector_size(16)));

inline Floats broadcast(float x) { return Floats{} + x; }

inline Floats load(const float* from) {
  Floats x;
  std::memcpy(&x, from, sizeof(x));
  return x;
}

inline void store(float* to, Floats x) { std::memcpy(to, &x, sizeof(x)); }

inline void store_four(float* to, Four x) { std::memcpy(to, &x, sizeof(x)); }

// 2 * WIDTH values in two registers. Which value lies where is the type's own, `place`: floats and
// int8 lie one after the other; of bfloat16, even ones lie in `a` and odd ones in `b`, which takes
// a shift and a mask, and no shuffle.
struct Pair {
  Floats a, b;
};

constexpr int PAIR = 2 * WIDTH;

inline Pair load_pair(const float* from) { return {load(from), load(from + WIDTH)}; }

inline Pair load_pair(const Bfloat16* from) {
  Bits bits;
  std::memcpy(&bits, from, sizeof(bits));
  const Bits even = bits << 16, odd = bits & 0xffff0000u;
  Pair pair;
  std::memcpy(&pair.a, &even, sizeof(even));
  std::memcpy(&pair.b, &odd, sizeof(odd));
  return pair;
}

inline Pair load_pair(const int8_t* from) {
  typedef int8_t Bytes __attribute__((vector_size(WIDTH)));
  Bytes a, b;
  std::memcpy(&a, from, sizeof(a));
  std::memcpy(&b, from + WIDTH, sizeof(b));
  return {__builtin_convertvector(a, Floats), __builtin_convertvector(b, Floats)};
}

// The first `count` values; the others are zero and not read.
template <class T>
inline Pair load_pair(const T* from, int count) {
  if (count >= PAIR) return load_pair(from);
  T padded[PAIR] = {};
  std::memcpy(padded, from, count * sizeof(T));
  return load_pair(padded);
}

// Index in the 2 * WIDTH floats of a stored pair of its i-th value.
template <class T>
inline int place(int i) {
  return sizeof(T) == 2 ? (i % 2) * WIDTH + i / 2 : i;
}

#if defined(__AVX512F__)
inline Floats low_of(Floats a, Floats b) {
  return (Floats)_mm512_unpacklo_ps((__m512)a, (__m512)b);
}
inline Floats high_of(Floats a, Floats b) {
  return (Floats)_mm512_unpackhi_ps((__m512)a, (__m512)b);
}
inline Floats low_pairs_of(Floats a, Floats b) {
  return (Floats)_mm512_unpacklo_pd((__m512d)a, (__m512d)b);
}
inline Floats high_pairs_of(Floats a, Floats b) {
  return (Floats)_mm512_unpackhi_pd((__m512d)a, (__m512d)b);
}
#elif defined(__AVX2__)
inline Floats low_of(Floats a, Floats b) {
  return (Floats)_mm256_unpacklo_ps((__m256)a, (__m256)b);
}
inline Floats high_of(Floats a, Floats b) {
  return (Floats)_mm256_unpackhi_ps((__m256)a, (__m256)b);
}
inline Floats low_pairs_of(Floats a, Floats b) {
  return (Floats)_mm256_unpacklo_pd((__m256d)a, (__m256d)b);
}
inline Floats high_pairs_of(Floats a, Floats b) {
  return (Floats)_mm256_unpackhi_pd((__m256d)a, (__m256d)b);
}
#endif

// Of each of four registers what `fold` makes of its lanes, all four in one tree: lane after lane
// would be a chain of steps that wait for each other, as long as a register is wide.
template <class Fold>
inline Four fold_four(const Floats x[4], Fold fold) {
#if defined(__AVX512F__) || defined(__AVX2__)
  const Floats ab = fold(low_of(x[0], x[1]), high_of(x[0], x[1]));
  const Floats cd = fold(low_of(x[2], x[3]), high_of(x[2], x[3]));
  const Floats abcd = fold(low_pairs_of(ab, cd), high_pairs_of(ab, cd));
#if defined(__AVX512F__)
  const __m512 all = (__m512)abcd;
  const __m256 half = fold(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
#else
  const __m256 half = (__m256)abcd;
#endif
  return (Four)fold(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
#else
  Four out;
  for (int i = 0; i < 4; i++) {
    float folded = x[i][0];
    for (int lane = 1; lane < WIDTH; lane++) folded = fold(folded, x[i][lane]);
    out[i] = folded;
  }
  return out;
#endif
}

inline Four sum_four(const Floats x[4]) {
  return fold_four(x, [](auto a, auto b) { return a + b; });
}

// NaN is not counted.
inline Four largest_of_four(const Floats x[4]) {
  return fold_four(x, [](auto a, auto b) { return b > a ? b : a; });
}

inline float largest(Floats x) {
  float y = x[0];
  for (int lane = 1; lane < WIDTH; lane++) y = x[lane] > y ? x[lane] : y;
  return y;
}

inline float sum(Floats x) {
  float y = 0;
  for (int lane = 0; lane < WIDTH; lane++) y += x[lane];
  return y;
}

// e^x for x <= 0, to 2 units in the last place; 0 below -87, NaN of NaN.
//
//   e^x = 2^n e^r,  n = round(x / ln 2),  |r| <= ln 2 / 2,  e^r by a polynomial of degree 7
//
// Its coefficients, and ln 2 in two parts, are those of expf in Cephes (S. Moshier).
template <class V>
inline V exp_of_negative(V x) {
  typedef uint32_t Ints __attribute__((vector_size(sizeof(V))));
  const V shift = V{} + 12582912.f;  // 1.5 * 2^23: adding it rounds to an integer
  const V biased = x * 1.44269504f + shift;
  const V n = biased - shift;
  const V r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  V p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.f;
  Ints power;
  std::memcpy(&power, &biased, sizeof(power));
  power = (power << 23) + (127u << 23);  // the integer's low bits move to the exponent
  V scale;
  std::memcpy(&scale, &power, sizeof(scale));
  return x < -87.f ? V{} : p * scale;
}

}  // namespace triptych
