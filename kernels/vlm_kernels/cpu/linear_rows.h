// Rows of x as tiles of AMX read them:  linear_amx.h.
//
//   [quads][tiles][32 rows][64 bytes]
//
// A quad is 32 rows, a tile 64 bytes of each. What one product after the other reads lies in the
// order of reading: rows that lie far apart come from the core's own cache at half the speed. Who
// makes x may write it so at once; of other x, each thread packs the rows it works on.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "linear.h"
#include "lines.h"

namespace triptych {

constexpr int PIECE = 64;                      // bytes of a row in one tile
constexpr int QUAD_BYTES = QUAD_ROWS * PIECE;  // of one tile of each row
constexpr int RUN_TILES = 4;                   // of a row, packed before the next row
constexpr int MOST_UNTILED = 16;               // rows that a product reads as they lie

// Whether a product of so many rows reads them tiled.
inline bool reads_tiles(int64_t num_rows) {
#ifdef TRIPTYCH_AMX
  return num_rows > MOST_UNTILED;
#else
  return num_rows < 0;
#endif
}

inline int64_t tiles_of(int64_t num_bytes) { return (num_bytes + PIECE - 1) / PIECE; }

// Tiles begin .. end of one row, which has `num_bytes`, to their places; zeros follow the last byte.
inline void tile_row(const uint8_t* from, int64_t num_bytes, int64_t begin, int64_t end,
                     uint8_t* tiled, int64_t row) {
  const int64_t quad_bytes = tiles_of(num_bytes) * QUAD_BYTES;
  uint8_t* to = tiled + row / QUAD_ROWS * quad_bytes + row % QUAD_ROWS * PIECE;
  const int64_t whole = std::min(end, num_bytes / PIECE);
  for (int64_t k = begin; k < whole; ++k) {
    std::memcpy(to + k * QUAD_BYTES, from + k * PIECE, PIECE);
  }
  if (whole == end) return;
  const int64_t rest = num_bytes % PIECE;
  std::memcpy(to + whole * QUAD_BYTES, from + whole * PIECE, rest);
  std::memset(to + whole * QUAD_BYTES + rest, 0, PIECE - rest);
}

// One row, as `write(values)` gives it.
template <class T, class Write>
void write_tiled(T* tiled, int64_t row, int64_t num_values, Write&& write) {
  static thread_local Lines<T> values;
  if (values.size() < size_t(num_values)) values.resize(num_values);
  write(values.data());
  const int64_t num_bytes = num_values * sizeof(T);
  tile_row(reinterpret_cast<const uint8_t*>(values.data()), num_bytes, 0, tiles_of(num_bytes),
           reinterpret_cast<uint8_t*>(tiled), row);
}

// The rows that one thread multiplies; memory for them is kept from product to product.
class TiledRows {
 public:
  // Rows begin .. end of a job, of which `begin` is the first of a quad.
  void take(const Job& job, int begin, int end) {
    const int64_t num_tiles = tiles_of(int64_t(job.steps) * 4);
    quad_bytes_ = num_tiles * QUAD_BYTES;
    if (job.x_is_tiled) {
      rows_ = job.x + begin / QUAD_ROWS * quad_bytes_;
      return;
    }
    const size_t size = in_quads(end - begin) / QUAD_ROWS * quad_bytes_;
    if (memory_.size() < size) memory_.resize(size);
    rows_ = memory_.data();
    for (int row = begin; row < end; row += QUAD_ROWS) {
      const int end_of_quad = std::min(row + QUAD_ROWS, end);
      for (int64_t k = 0; k < num_tiles; k += RUN_TILES) {
        for (int i = row; i < end_of_quad; ++i) {
          tile_row(job.x + i * job.x_stride, int64_t(job.steps) * 4, k,
                   std::min(k + RUN_TILES, num_tiles), memory_.data(), i - begin);
        }
      }
    }
  }

  // The first tile of 32 rows; the next one follows QUAD_BYTES behind it. Behind the last row there
  // is anything.
  const uint8_t* quad(int i) const { return rows_ + i * quad_bytes_; }

 private:
  Lines<uint8_t> memory_;
  const uint8_t* rows_ = nullptr;
  int64_t quad_bytes_ = 0;
};

}  // namespace triptych
