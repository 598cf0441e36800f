// Resize a picture as Pillow does, byte for byte: two passes of weighted sums in whole numbers.
//
//     sum_k weight_k source_k,   weights scaled by 2^22 and rounded, sums rounded to bytes
//
// Bytes in between the passes too, so their order counts. Pixels are interleaved RGB,
// `[height, width, 3]`. The pass along rows takes 16 of them at a time and lays four neighbouring
// pixels of a channel side by side, so that one word holds four taps of a row, a vector 16 rows:
//
//     group[x / 4][channel][row] = pixels x .. x + 3         acc[row] += word[row] . weights
//
// Source of the arithmetic: Pillow, src/libImaging/Resample.c (PRECISION_BITS, clip8).

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <new>
#include <vector>

#include "threads.h"

namespace {

constexpr int BITS = 22;
constexpr int32_t HALF = 1 << (BITS - 1);
constexpr int ROWS = 16;
constexpr int TAPS = 4;
constexpr int CHANNELS = 3;

typedef int32_t Words __attribute__((vector_size(4 * ROWS)));
typedef uint8_t Bytes __attribute__((vector_size(ROWS)));

inline uint8_t clipped(int32_t sum) {
  return static_cast<uint8_t>(std::min(std::max(sum >> BITS, 0), 255));
}

inline Bytes clipped(Words sum) {
  const Words byte = sum >> BITS;
  const Words positive = byte > 0 ? byte : Words{};
  return __builtin_convertvector(positive < 255 ? positive : Words{} + 255, Bytes);
}

// tile[i][j] to tile[j][i], 16 x 16.
inline void transpose(Bytes* tile) {
  const Bytes low = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23};
  const Bytes high = low + 8;
  for (int round = 0; round < 4; ++round) {
    Bytes mixed[ROWS];
    for (int i = 0; i < ROWS / 2; ++i) {
      mixed[2 * i] = __builtin_shuffle(tile[i], tile[i + ROWS / 2], low);
      mixed[2 * i + 1] = __builtin_shuffle(tile[i], tile[i + ROWS / 2], high);
    }
    std::memcpy(tile, mixed, sizeof mixed);
  }
}

// One output of 16 rows: `stride` weights in whole groups of four.
inline Words weighted(const uint8_t* group, int64_t group_bytes, const int32_t* weight,
                      int64_t stride) {
  Words sum = {};
  for (int64_t tap = 0; tap < stride; tap += TAPS, weight += TAPS, group += group_bytes) {
    Words taps;
    std::memcpy(&taps, group, sizeof taps);
    sum += (taps & 255) * weight[0] + ((taps >> 8) & 255) * weight[1];
    sum += ((taps >> 16) & 255) * weight[2] + ((taps >> 24) & 255) * weight[3];
  }
  return sum;
}

// Of up to 16 rows: group[x / 4][channel][row][tap]. Pixels beyond the end are zero.
void group_rows(const uint8_t* rows, int64_t width, int64_t num_rows, uint8_t* groups) {
  const Bytes by_channel = {0, 3, 6, 9, 1, 4, 7, 10, 2, 5, 8, 11, 12, 13, 14, 15};
  const int64_t row_bytes = width * CHANNELS, piece = TAPS * CHANNELS;
  for (int64_t row = 0; row < num_rows; ++row, rows += row_bytes) {
    uint8_t* word = groups + row * TAPS;
    for (int64_t start = 0; start < row_bytes; start += piece) {
      Bytes pixels = {};
      if (start + ROWS <= row_bytes) {
        std::memcpy(&pixels, rows + start, sizeof pixels);
      } else {
        std::memcpy(&pixels, rows + start, std::min(piece, row_bytes - start));
      }
      const Bytes sorted = __builtin_shuffle(pixels, by_channel);
      uint32_t taps[ROWS / TAPS];
      std::memcpy(taps, &sorted, sizeof taps);
      for (int channel = 0; channel < CHANNELS; ++channel, word += ROWS * TAPS) {
        std::memcpy(word, &taps[channel], TAPS);
      }
    }
  }
}

// A side of the output: `[size, stride]` weights, and where each output's taps begin.
struct Side {
  int64_t size;
  const int32_t* first;
  const int32_t* count;
  const int32_t* weights;
  int64_t stride;
};

// [height, width, 3] to [height, side.size, 3]; first taps and stride are multiples of 4.
void along_rows(const uint8_t* source, int64_t height, int64_t width, const Side& side,
                uint8_t* out) {
  const int64_t num_groups = side.stride / TAPS, row_bytes = side.size * CHANNELS;
  const int64_t group_bytes = CHANNELS * ROWS * TAPS;
  // no tap with a weight lies beyond the picture, but the last groups may
  std::vector<uint8_t> groups(((width + TAPS - 1) / TAPS + num_groups) * group_bytes);
  for (int64_t top = 0; top < height; top += ROWS) {
    const int64_t num_rows = std::min<int64_t>(ROWS, height - top);
    group_rows(source + top * width * CHANNELS, width, num_rows, groups.data());
    Bytes tile[ROWS] = {};  // of up to 16 bytes of each row, column by column
    for (int64_t i = 0; i < row_bytes; ++i) {
      const int64_t x = i / CHANNELS;
      const int64_t first = side.first[x] / TAPS * CHANNELS + i % CHANNELS;
      const uint8_t* group = groups.data() + first * ROWS * TAPS;
      const int32_t* weight = side.weights + x * side.stride;
      tile[i % ROWS] = clipped(HALF + weighted(group, group_bytes, weight, side.stride));
      if (i % ROWS != ROWS - 1 && i != row_bytes - 1) continue;
      transpose(tile);
      const int64_t begin = i / ROWS * ROWS;
      uint8_t* corner = out + top * row_bytes + begin;
      for (int64_t row = 0; row < num_rows; ++row) {
        std::memcpy(corner + row * row_bytes, &tile[row], i + 1 - begin);
      }
    }
  }
}

// [height, width, 3] to [side.size, width, 3].
void along_columns(const uint8_t* source, int64_t width, const Side& side, uint8_t* out) {
  const int64_t row_bytes = width * CHANNELS;
  std::vector<int32_t> sums(row_bytes);
  for (int64_t y = 0; y < side.size; ++y, out += row_bytes) {
    std::fill(sums.begin(), sums.end(), HALF);
    for (int64_t tap = 0; tap < side.count[y]; ++tap) {
      const uint8_t* row = source + (side.first[y] + tap) * row_bytes;
      const int32_t weight = side.weights[y * side.stride + tap];
      for (int64_t i = 0; i < row_bytes; ++i) sums[i] += row[i] * weight;
    }
    for (int64_t i = 0; i < row_bytes; ++i) out[i] = clipped(sums[i]);
  }
}

}  // namespace

// source [height, width, 3] to out [out_height, out_width, 3]. Of each output column, `x_first` is
// the first tap, a multiple of 4, and `x_weights` `[out_width, x_stride]` are in whole groups of
// four, 0 where there is no tap; of each output row, `y_first` and `y_count` are its taps, and
// `y_weights` is `[out_height, y_stride]`. Returns false where there is no memory for what lies
// between the passes: what one picture may take is bounded.
TRIPTYCH_EXPORT bool triptych_resize(const uint8_t* source, int64_t height, int64_t width,
                                     uint8_t* out, int64_t out_height, int64_t out_width,
                                     const int32_t* x_first, const int32_t* x_weights,
                                     int64_t x_stride, const int32_t* y_first,
                                     const int32_t* y_count, const int32_t* y_weights,
                                     int64_t y_stride, bool columns_first) try {
  const Side x = {out_width, x_first, nullptr, x_weights, x_stride};
  const Side y = {out_height, y_first, y_count, y_weights, y_stride};
  if (columns_first) {
    std::vector<uint8_t> between(out_height * width * CHANNELS);
    along_columns(source, width, y, between.data());
    along_rows(between.data(), out_height, width, x, out);
  } else {
    std::vector<uint8_t> between(height * out_width * CHANNELS);
    along_rows(source, height, width, x, between.data());
    along_columns(between.data(), out_width, y, out);
  }
  return true;
} catch (const std::bad_alloc&) {
  return false;
}
