// The types that KV is kept in, and how rows of them lie in a piece of a block.
//
//   float32, bfloat16   [P, D]                     values
//   int8                [P, D] then [P] float32    value = integer * scale of its row
//
//   of two kinds        wide: [P, D] of its type       narrow: as int8, of R * P rows
//
// A piece is one block's keys, or values, of one layer and head. `kv_rows.py` defines all of it.
#pragma once

#include <cstdint>
#include <cstring>

#include "bfloat16.h"

namespace triptych {

enum KVType : int64_t {
  KV_FLOAT = 0,
  KV_BFLOAT16 = 1,
  KV_INT8 = 2,
  KV_MIXED_BFLOAT16 = 3,  // wide blocks of bfloat16, narrow ones of int8
  KV_MIXED_FLOAT = 4
};

template <class KV>
constexpr bool HAS_SCALES = sizeof(KV) == 1;

// Elements of one piece.
template <class KV>
inline int64_t piece_size(int64_t block_size, int64_t head_dim) {
  return block_size * (head_dim + (HAS_SCALES<KV> ? int64_t(sizeof(float)) : 0));
}

// The scale of a slot's row; a piece may begin at any byte.
inline float scale_of(const int8_t* piece, int64_t block_size, int64_t head_dim, int64_t slot) {
  float scale;
  std::memcpy(&scale, piece + block_size * head_dim + slot * sizeof(float), sizeof(scale));
  return scale;
}

// An entry of a block table, where blocks have two kinds; `mixed_blocks.py` defines it. All blocks
// have the bytes of R * P rows of int8 with their scales, R being the size of a wide element.
template <class Wide>
struct MixedEntry {
  static constexpr int64_t R = sizeof(Wide);
  int64_t block, part;
  bool is_narrow;

  explicit MixedEntry(uint64_t entry)
      : block(entry / (2 * R)), part(entry % R), is_narrow(entry / R % 2 != 0) {}

  // Bytes of one piece.
  static int64_t piece_bytes(int64_t block_size, int64_t head_dim) {
    return piece_size<int8_t>(R * block_size, head_dim);
  }

  // Writes the values of `count` rows from an offset on, those of int8 rounded to Wide.
  void read_rows(const char* piece, int64_t offset, int64_t count, int64_t block_size,
                 int64_t head_dim, Wide* to) const {
    if (!is_narrow) {
      const Wide* rows = reinterpret_cast<const Wide*>(piece) + offset * head_dim;
      std::memcpy(to, rows, count * head_dim * sizeof(Wide));
      return;
    }
    const int8_t* codes = reinterpret_cast<const int8_t*>(piece);
    for (int64_t slot = part * block_size + offset; count > 0; count--, slot++) {
      const float scale = scale_of(codes, R * block_size, head_dim, slot);
      const int8_t* row = codes + slot * head_dim;
      for (int64_t d = 0; d < head_dim; d++) from_float(static_cast<float>(row[d]) * scale, to++);
    }
  }
};

}  // namespace triptych
