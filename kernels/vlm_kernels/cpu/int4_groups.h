// Blocks of 32 tokens in 4 bits; `int4_groups.py` defines them.
//
//   codes [32, D / 2]         of a token: channel d in the low half of byte d, d + D / 2 in the high
//   keys                      scales [D], minima [D]              of the block's tokens, by channel
//   values                    scales [32, C], minima [32, C]      of up to 32 channels of a token
//
// Scales and minima are bfloat16, and a value is code * scale + minimum.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "bfloat16.h"

namespace triptych {

constexpr int64_t GROUP = 32;

// Groups of a token's channels.
inline int64_t channel_groups(int64_t head_dim) { return (head_dim + GROUP - 1) / GROUP; }

inline int64_t int4_piece_bytes(int64_t head_dim) {
  return GROUP * (head_dim / 2 + 2 * int64_t(sizeof(Bfloat16)) * channel_groups(head_dim));
}

// A piece's scales; `count` minima follow as many scales.
inline const Bfloat16* int4_scales(const char* piece, int64_t head_dim) {
  return reinterpret_cast<const Bfloat16*>(piece + GROUP * (head_dim / 2));
}

// Calls body(begin, end, byte, shift) for runs of channels in one group and one half of the bytes.
template <class Body>
inline void for_channel_runs(int64_t head_dim, Body&& body) {
  const int64_t half = head_dim / 2;
  for (int64_t begin = 0, end; begin < head_dim; begin = end) {
    const bool is_low = begin < half;
    end = std::min((begin / GROUP + 1) * GROUP, is_low ? half : head_dim);
    body(begin, end, is_low ? begin : begin - half, is_low ? 0 : 4);
  }
}

// Writes the values of one token's row, rounded to Wide.
template <class Wide>
inline void read_int4_row(const char* piece, bool is_key, int64_t token, int64_t head_dim,
                          Wide* to) {
  const int64_t half = head_dim / 2, groups = channel_groups(head_dim);
  const uint8_t* codes = reinterpret_cast<const uint8_t*>(piece) + token * half;
  const Bfloat16* scales = int4_scales(piece, head_dim);
  if (is_key) {
    const Bfloat16* minima = scales + head_dim;
    for (int64_t d = 0; d < half; d++) {
      from_float(float(codes[d] & 15) * to_float(scales[d]) + to_float(minima[d]), to + d);
    }
    scales += half, minima += half, to += half;
    for (int64_t d = 0; d < half; d++) {
      from_float(float(codes[d] >> 4) * to_float(scales[d]) + to_float(minima[d]), to + d);
    }
    return;
  }
  const Bfloat16* minima = scales + GROUP * groups + token * groups;
  scales += token * groups;
  for_channel_runs(head_dim, [&](int64_t begin, int64_t end, int64_t byte, int shift) {
    const float scale = to_float(scales[begin / GROUP]), low = to_float(minima[begin / GROUP]);
    for (int64_t i = 0; i < end - begin; i++) {
      from_float(float(codes[byte + i] >> shift & 15) * scale + low, to + begin + i);
    }
  });
}

// The range of some numbers; `bad` is NaN if one of them is not finite.
struct Int4Range {
  float low = INFINITY, high = -INFINITY, bad = 0;

  void add(float x) {
    low = std::min(low, x), high = std::max(high, x), bad += x - x;
  }

  // Writes scale and minimum; the range is then that of the stored numbers.
  void store(Bfloat16* scale, Bfloat16* minimum) {
    from_float((high - low) / 15.f + bad, scale);
    from_float(low, minimum);
    const float given = 1.f / to_float(*scale);
    factor = given < INFINITY ? given : 0.f;  // 0 of NaN, too
    low = to_float(*minimum);
  }

  uint8_t code(float x) const {
    if (!(factor > 0)) return 0;
    return static_cast<uint8_t>(std::min(std::max(std::nearbyint((x - low) * factor), 0.f), 15.f));
  }

  float factor = 0;
};

// Writes the keys of 32 tokens, `stride` elements apart.
template <class From>
void write_int4_keys(const From* from, int64_t stride, char* piece, int64_t head_dim) {
  static thread_local std::vector<Int4Range> ranges;
  ranges.assign(head_dim, Int4Range());
  for (int64_t t = 0; t < GROUP; t++) {
    for (int64_t d = 0; d < head_dim; d++) ranges[d].add(to_float(from[t * stride + d]));
  }
  Bfloat16* scales = const_cast<Bfloat16*>(int4_scales(piece, head_dim));
  for (int64_t d = 0; d < head_dim; d++) ranges[d].store(scales + d, scales + head_dim + d);
  const int64_t half = head_dim / 2;
  for (int64_t t = 0; t < GROUP; t++) {
    const From* row = from + t * stride;
    for (int64_t d = 0; d < half; d++) {
      const int low = ranges[d].code(to_float(row[d]));
      const int high = ranges[half + d].code(to_float(row[half + d]));
      piece[t * half + d] = static_cast<char>(low | high << 4);
    }
  }
}

// Writes the values of 32 tokens, `stride` elements apart.
template <class From>
void write_int4_values(const From* from, int64_t stride, char* piece, int64_t head_dim) {
  const int64_t half = head_dim / 2, groups = channel_groups(head_dim);
  Bfloat16* scales = const_cast<Bfloat16*>(int4_scales(piece, head_dim));
  static thread_local std::vector<Int4Range> ranges;
  for (int64_t t = 0; t < GROUP; t++) {
    const From* row = from + t * stride;
    ranges.assign(groups, Int4Range());
    for (int64_t d = 0; d < head_dim; d++) ranges[d / GROUP].add(to_float(row[d]));
    for (int64_t g = 0; g < groups; g++) {
      ranges[g].store(scales + t * groups + g, scales + (GROUP + t) * groups + g);
    }
    for (int64_t d = 0; d < half; d++) {
      const int low = ranges[d / GROUP].code(to_float(row[d]));
      const int high = ranges[(half + d) / GROUP].code(to_float(row[half + d]));
      piece[t * half + d] = static_cast<char>(low | high << 4);
    }
  }
}

}  // namespace triptych
