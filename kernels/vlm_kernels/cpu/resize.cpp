// Resize an image as Pillow does, byte for byte: two passes of weighted sums in whole numbers.
//
//     sum_k weight_k source_k,   weights scaled by 2^22 and rounded, sums rounded to bytes
//
// Bytes in between the passes too, so their order counts. Pixels are interleaved RGB,
// `[height, width, 3]`. Both passes take four taps at a time (resize_sums.h); the one along rows
// lays four neighbouring pixels of a channel side by side, so that a vector holds them of 16 rows:
//
//     group[x / 4][channel][row] = pixels x .. x + 3         acc[row] += word[row] . weights
//
// What lies between the passes are the rows that the next output needs, never the whole: new
// memory costs more than the sums.
//
// Source of the arithmetic: Pillow, src/libImaging/Resample.c (PRECISION_BITS, clip8).

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <new>
#include <vector>

#include "resize_sums.h"
#include "threads.h"

namespace {

using namespace triptych;

constexpr int CHANNELS = 3;
constexpr int64_t SPARE_BANDS = 8;  // so that rows are moved to the window's start but rarely

// A side of the output: of each its first tap, and how many there are; weights `[size, stride]`.
struct Side {
  int64_t size;
  const int32_t* first;
  const int32_t* count;
  const int32_t* weights;
  int64_t stride;

  int64_t most() const { return *std::max_element(count, count + size); }
};

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

// The pass along rows, 16 of them at a time.
class AlongRows {
 public:
  AlongRows(int64_t width, const Side& side)
      : width_(width), size_(side.size), begins_(side.size + 1), firsts_(side.size) {
    for (int64_t x = 0; x < size_; ++x) {
      const int64_t shift = side.first[x] % TAPS;
      firsts_[x] = side.first[x] / TAPS;
      begins_[x] = weights_.size();
      for (int64_t tap = -shift; tap < side.count[x]; tap += TAPS) {
        weights_.emplace_back(side.weights + x * side.stride, tap, side.count[x]);
      }
    }
    begins_[size_] = weights_.size();
    groups_.resize((width + TAPS - 1) / TAPS * GROUP_BYTES);
  }

  int64_t row_bytes() const { return size_ * CHANNELS; }

  // [num_rows, width, 3] to [num_rows, size, 3]; up to 16 rows.
  void run(const uint8_t* source, int64_t num_rows, uint8_t* out) {
    group(source, num_rows);
    Bytes tile[ROWS] = {};  // of up to 16 bytes of each row, column by column
    for (int64_t i = 0; i < row_bytes(); ++i) {
      const int64_t x = i / CHANNELS;
      const uint8_t* words = &groups_[firsts_[x] * GROUP_BYTES + i % CHANNELS * sizeof(Words)];
      Sum sum;
      for (int64_t four = begins_[x]; four < begins_[x + 1]; ++four, words += GROUP_BYTES) {
        sum.add(load(words), weights_[four]);
      }
      tile[i % ROWS] = clipped(sum.total());
      if (i % ROWS != ROWS - 1 && i != row_bytes() - 1) continue;
      transpose(tile);
      const int64_t begin = i / ROWS * ROWS;
      for (int64_t row = 0; row < num_rows; ++row) {
        std::memcpy(out + row * row_bytes() + begin, &tile[row], i + 1 - begin);
      }
    }
  }

 private:
  static constexpr int64_t GROUP_BYTES = CHANNELS * sizeof(Words);

  // Pixels beyond the end are zero; rows beyond the last are the last.
  void group(const uint8_t* source, int64_t num_rows) {
    const int64_t row_bytes = width_ * CHANNELS;
    const uint8_t* rows[ROWS];
    for (int64_t row = 0; row < ROWS; ++row) {
      rows[row] = source + std::min(row, num_rows - 1) * row_bytes;
    }
    uint8_t* group = groups_.data();
    int64_t at = 0;
    for (; at + ROWS <= row_bytes; at += TAPS * CHANNELS, group += GROUP_BYTES) {
      group_pixels(rows, at, group);
    }
    for (; at < row_bytes; at += TAPS * CHANNELS, group += GROUP_BYTES) {
      uint8_t ends[ROWS][ROWS] = {};
      const uint8_t* padded[ROWS];
      for (int row = 0; row < ROWS; ++row) {
        std::memcpy(ends[row], rows[row] + at, std::min<int64_t>(TAPS * CHANNELS, row_bytes - at));
        padded[row] = ends[row];
      }
      group_pixels(padded, 0, group);
    }
  }

  int64_t width_, size_;
  std::vector<int64_t> begins_, firsts_;
  std::vector<Weights> weights_;
  std::vector<uint8_t> groups_;
};

// [height, row_bytes] to [side.size, row_bytes], row by row.
class AlongColumns {
 public:
  AlongColumns(int64_t row_bytes, const Side& side) : side_(side), row_(row_bytes) {}

  // `source` is the first tap's row of output `y`.
  void run(const uint8_t* source, int64_t y, uint8_t* out) {
    row_.run(source, side_.weights + y * side_.stride, side_.count[y], out);
  }

 private:
  const Side& side_;
  WeightedRows row_;
};

void rows_first(const uint8_t* source, int64_t height, int64_t width, const Side& x, const Side& y,
                uint8_t* out) {
  AlongRows along_rows(width, x);
  const int64_t row_bytes = along_rows.row_bytes();
  AlongColumns along_columns(row_bytes, y);
  const int64_t capacity = y.most() + SPARE_BANDS * ROWS;
  std::vector<uint8_t> window(capacity * row_bytes);  // rows low .. high of what lies between
  int64_t low = 0, high = 0;
  for (int64_t i = 0; i < y.size; ++i, out += row_bytes) {
    const int64_t first = y.first[i];
    while (high < first + y.count[i]) {
      if (high + ROWS > low + capacity) {
        std::memmove(&window[0], &window[(first - low) * row_bytes], (high - first) * row_bytes);
        low = first;
      }
      const int64_t num_rows = std::min<int64_t>(ROWS, height - high);
      along_rows.run(source + high * width * CHANNELS, num_rows, &window[(high - low) * row_bytes]);
      high += num_rows;
    }
    along_columns.run(&window[(first - low) * row_bytes], i, out);
  }
}

void columns_first(const uint8_t* source, int64_t width, const Side& x, const Side& y,
                   uint8_t* out) {
  AlongRows along_rows(width, x);
  const int64_t row_bytes = width * CHANNELS;
  AlongColumns along_columns(row_bytes, y);
  std::vector<uint8_t> band(ROWS * row_bytes);
  for (int64_t top = 0; top < y.size; top += ROWS) {
    const int64_t num_rows = std::min<int64_t>(ROWS, y.size - top);
    for (int64_t row = 0; row < num_rows; ++row) {
      const int64_t i = top + row;
      along_columns.run(source + y.first[i] * row_bytes, i, &band[row * row_bytes]);
    }
    along_rows.run(band.data(), num_rows, out + top * along_rows.row_bytes());
  }
}

}  // namespace

// source [height, width, 3] to out [out_height, out_width, 3]. Of each output column, `x_first` and
// `x_count` are its taps, and `x_weights` is `[out_width, x_stride]`; of each output row likewise.
// Weights are below 1.9 * 2^22. Returns false where there is no memory for what lies between the
// passes: what one image may take is bounded.
TRIPTYCH_EXPORT bool triptych_resize(const uint8_t* source, int64_t height, int64_t width,
                                     uint8_t* out, int64_t out_height, int64_t out_width,
                                     const int32_t* x_first, const int32_t* x_count,
                                     const int32_t* x_weights, int64_t x_stride,
                                     const int32_t* y_first, const int32_t* y_count,
                                     const int32_t* y_weights, int64_t y_stride,
                                     bool is_columns_first) try {
  const Side x = {out_width, x_first, x_count, x_weights, x_stride};
  const Side y = {out_height, y_first, y_count, y_weights, y_stride};
  if (is_columns_first) {
    columns_first(source, width, x, y, out);
  } else {
    rows_first(source, height, width, x, y, out);
  }
  return true;
} catch (const std::bad_alloc&) {
  return false;
}
