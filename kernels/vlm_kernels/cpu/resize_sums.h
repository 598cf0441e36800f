// Sums of four taps at a time: bytes times weights of 24 bits, for `resize.cpp`.
//
// With AVX-512 VNNI, one instruction adds four products of a byte and a signed byte to each sum. So
// weights are split into three digits to the base 256 which are signed themselves, each has a sum
// of its own, and those are put together at the end:
//
//     weight = d0 + 256 d1 + 65536 d2,   -128 <= d < 128       sum = s0 + 256 s1 + 65536 s2
//
// Elsewhere a weight is multiplied as it is. All sums are exact, so both give the same.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define TRIPTYCH_DIGITS
#include <immintrin.h>
#endif

namespace triptych {

constexpr int BITS = 22;
constexpr int32_t HALF = 1 << (BITS - 1);
constexpr int ROWS = 16;
constexpr int TAPS = 4;

typedef int32_t Words __attribute__((vector_size(4 * ROWS)));
typedef uint8_t Bytes __attribute__((vector_size(ROWS)));

inline Words load(const uint8_t* from) {
  Words words;
  std::memcpy(&words, from, sizeof words);
  return words;
}

inline Bytes clipped(Words sum) {
  const Words byte = sum >> BITS;
  const Words positive = byte > 0 ? byte : Words{};
  return __builtin_convertvector(positive < 255 ? positive : Words{} + 255, Bytes);
}

#if defined(TRIPTYCH_DIGITS)

constexpr int DIGITS = 3;

// Of four taps.
struct Weights {
  int32_t digits[DIGITS];

  // Those from `tap` on of `count`; what lies outside is 0.
  Weights(const int32_t* weights, int64_t tap, int64_t count) {
    int8_t bytes[DIGITS][TAPS] = {};
    for (int i = 0; i < TAPS; ++i, ++tap) {
      int32_t rest = 0 <= tap && tap < count ? weights[tap] : 0;
      for (int digit = 0; digit < DIGITS; ++digit) {
        bytes[digit][i] = static_cast<int8_t>(rest);
        rest = (rest - bytes[digit][i]) / 256;
      }
    }
    std::memcpy(digits, bytes, sizeof digits);
  }
};

class Sum {
 public:
  void add(Words taps, const Weights& weights) {
    low_ = added(low_, taps, weights.digits[0]);
    middle_ = added(middle_, taps, weights.digits[1]);
    high_ = added(high_, taps, weights.digits[2]);
  }

  Words total() const {
    const __m512i more =
        _mm512_add_epi32(_mm512_slli_epi32(middle_, 8), _mm512_slli_epi32(high_, 16));
    return (Words)_mm512_add_epi32(_mm512_add_epi32(low_, more), _mm512_set1_epi32(HALF));
  }

 private:
  static __m512i added(__m512i sum, Words taps, int32_t digits) {
    return _mm512_dpbusd_epi32(sum, (__m512i)taps, _mm512_set1_epi32(digits));
  }

  __m512i low_ = {}, middle_ = {}, high_ = {};
};

// Four pixels of 16 rows, RGB after RGB, from byte `at` on: to [channel][row][pixel]. Reads 16.
inline void group_pixels(const uint8_t* const rows[ROWS], int64_t at, uint8_t* group) {
  const __m512i by_channel = _mm512_broadcast_i32x4(
      _mm_setr_epi8(0, 3, 6, 9, 1, 4, 7, 10, 2, 5, 8, 11, 12, 13, 14, 15));
  __m512i of[4];  // every fourth row, one in each quarter
  for (int i = 0; i < 4; ++i) {
    const auto row = [&](int j) {
      return _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[i + 4 * j] + at));
    };
    __m512i four = _mm512_castsi128_si512(row(0));
    four = _mm512_inserti32x4(four, row(1), 1);
    four = _mm512_inserti32x4(four, row(2), 2);
    four = _mm512_inserti32x4(four, row(3), 3);
    of[i] = _mm512_shuffle_epi8(four, by_channel);
  }
  const __m512i low_a = _mm512_unpacklo_epi32(of[0], of[1]);
  const __m512i low_b = _mm512_unpacklo_epi32(of[2], of[3]);
  const __m512i high_a = _mm512_unpackhi_epi32(of[0], of[1]);
  const __m512i high_b = _mm512_unpackhi_epi32(of[2], of[3]);
  _mm512_storeu_si512(group, _mm512_unpacklo_epi64(low_a, low_b));
  _mm512_storeu_si512(group + 64, _mm512_unpackhi_epi64(low_a, low_b));
  _mm512_storeu_si512(group + 128, _mm512_unpacklo_epi64(high_a, high_b));
}

// Sums of whole rows of bytes, one under the other.
class WeightedRows {
 public:
  explicit WeightedRows(int64_t row_bytes) : row_bytes_(row_bytes) {}

  // `count` rows from `source` on, to one.
  void run(const uint8_t* source, const int32_t* weights, int64_t count, uint8_t* out) {
    weights_.clear();
    for (int64_t tap = 0; tap < count; tap += TAPS) weights_.emplace_back(weights, tap, count);
    const uint8_t* last = source + (count - 1) * row_bytes_;
    for (int64_t at = 0; at < row_bytes_; at += sizeof(Words)) {
      const int64_t left = row_bytes_ - at;
      const __mmask64 mask = left < 64 ? (1ull << left) - 1 : ~0ull;
      Sum sums[4];
      const uint8_t* row = source;
      for (const Weights& four : weights_) {
        __m512i taps[TAPS];
        for (int i = 0; i < TAPS; ++i, row += row_bytes_) {
          taps[i] = _mm512_maskz_loadu_epi8(mask, std::min(row, last) + at);
        }
        const __m512i low_a = _mm512_unpacklo_epi8(taps[0], taps[1]);
        const __m512i low_b = _mm512_unpacklo_epi8(taps[2], taps[3]);
        const __m512i high_a = _mm512_unpackhi_epi8(taps[0], taps[1]);
        const __m512i high_b = _mm512_unpackhi_epi8(taps[2], taps[3]);
        sums[0].add((Words)_mm512_unpacklo_epi16(low_a, low_b), four);
        sums[1].add((Words)_mm512_unpackhi_epi16(low_a, low_b), four);
        sums[2].add((Words)_mm512_unpacklo_epi16(high_a, high_b), four);
        sums[3].add((Words)_mm512_unpackhi_epi16(high_a, high_b), four);
      }
      __m512i bytes[4];
      for (int i = 0; i < 4; ++i) bytes[i] = _mm512_srai_epi32((__m512i)sums[i].total(), BITS);
      const __m512i low = _mm512_packs_epi32(bytes[0], bytes[1]);
      const __m512i high = _mm512_packs_epi32(bytes[2], bytes[3]);
      _mm512_mask_storeu_epi8(out + at, mask, _mm512_packus_epi16(low, high));
    }
  }

 private:
  int64_t row_bytes_;
  std::vector<Weights> weights_;
};

#else

// Of four taps.
struct Weights {
  int32_t taps[TAPS] = {};

  // Those from `tap` on of `count`; what lies outside is 0.
  Weights(const int32_t* weights, int64_t tap, int64_t count) {
    for (int i = 0; i < TAPS; ++i, ++tap) taps[i] = 0 <= tap && tap < count ? weights[tap] : 0;
  }
};

class Sum {
 public:
  void add(Words taps, const Weights& weights) {
    sum_ += (taps & 255) * weights.taps[0] + ((taps >> 8) & 255) * weights.taps[1];
    sum_ += ((taps >> 16) & 255) * weights.taps[2] + ((taps >> 24) & 255) * weights.taps[3];
  }

  Words total() const { return sum_; }

 private:
  Words sum_ = Words{} + HALF;
};

// Four pixels of 16 rows, RGB after RGB, from byte `at` on: to [channel][row][pixel]. Reads 16.
inline void group_pixels(const uint8_t* const rows[ROWS], int64_t at, uint8_t* group) {
  const Bytes by_channel = {0, 3, 6, 9, 1, 4, 7, 10, 2, 5, 8, 11, 12, 13, 14, 15};
  for (int row = 0; row < ROWS; ++row, group += TAPS) {
    Bytes pixels;
    std::memcpy(&pixels, rows[row] + at, sizeof pixels);
    const Bytes sorted = __builtin_shuffle(pixels, by_channel);
    uint32_t words[ROWS / TAPS];
    std::memcpy(words, &sorted, sizeof words);
    for (int channel = 0; channel < 3; ++channel) {
      std::memcpy(group + channel * sizeof(Words), &words[channel], TAPS);
    }
  }
}

// Sums of whole rows of bytes, one under the other.
class WeightedRows {
 public:
  explicit WeightedRows(int64_t row_bytes) : sums_(row_bytes) {}

  // `count` rows from `source` on, to one.
  void run(const uint8_t* source, const int32_t* weights, int64_t count, uint8_t* out) {
    const int64_t row_bytes = sums_.size();
    std::fill(sums_.begin(), sums_.end(), HALF);
    for (int64_t tap = 0; tap < count; ++tap, source += row_bytes) {
      const int32_t weight = weights[tap];
      for (int64_t i = 0; i < row_bytes; ++i) sums_[i] += source[i] * weight;
    }
    for (int64_t i = 0; i < row_bytes; ++i) {
      out[i] = static_cast<uint8_t>(std::min(std::max(sums_[i] >> BITS, 0), 255));
    }
  }

 private:
  std::vector<int32_t> sums_;
};

#endif

}  // namespace triptych
