// From an image's bytes to the patches that a vision tower reads, normalised by a table.
//
//     [row / m, m, y, column / m, m, x, c]  ->  [row / m, column / m, m, m, c, t, y, x]
//
// Rows are patches, those of one merged token after each other; columns are (channel, time, y, x),
// and each time shows the same image.

#include <cstdint>
#include <cstring>

#include "threads.h"

namespace {

constexpr int64_t CHANNELS = 3;
constexpr int64_t BYTES = 256;

}  // namespace

// source [rows * patch, columns * patch, 3] and table [3, 256] to out
// [rows * columns, 3, times, patch, patch]; rows and columns are multiples of merge.
TRIPTYCH_EXPORT void triptych_patches(const uint8_t* source, int64_t rows, int64_t columns,
                                      int64_t patch, int64_t merge, int64_t times,
                                      const float* table, float* out) {
  const int64_t row_bytes = columns * patch * CHANNELS, plane = patch * patch;
  for (int64_t i = 0; i < rows * columns; ++i) {
    const int64_t token = i / (merge * merge), inside = i % (merge * merge);
    const int64_t row = token / (columns / merge) * merge + inside / merge;
    const int64_t column = token % (columns / merge) * merge + inside % merge;
    const uint8_t* corner = source + row * patch * row_bytes + column * patch * CHANNELS;
    for (int64_t channel = 0; channel < CHANNELS; ++channel) {
      const float* values = table + channel * BYTES;
      float* first = out;
      for (int64_t y = 0; y < patch; ++y) {
        const uint8_t* pixels = corner + y * row_bytes + channel;
        for (int64_t x = 0; x < patch; ++x) *out++ = values[pixels[x * CHANNELS]];
      }
      for (int64_t time = 1; time < times; ++time, out += plane) {
        std::memcpy(out, first, plane * sizeof(float));
      }
    }
  }
}
