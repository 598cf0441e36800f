// The types that KV is kept in, and how rows of them lie in a piece of a block.
//
//   float32, bfloat16   [P, D]                     values
//   int8                [P, D] then [P] float32    value = integer * scale of its row
//
//   of two kinds        wide: [P, D] of its type       narrow: as int8, of R * P rows, or a group
//                                                      of 32 rows in 4 bits (int4_groups.h)
//
// A piece is one block's keys, or values, of one layer and head. `kv_rows.py` defines all of it.
#pragma once

#include <cstdint>
#include <cstring>

#include "bfloat16.h"
#include "int4_groups.h"

namespace triptych {

enum KVType : int64_t {
  KV_FLOAT = 0,
  KV_BFLOAT16 = 1,
  KV_INT8 = 2,
  KV_MIXED_BFLOAT16 = 3,  // wide blocks of bfloat16, narrow ones of int8
  KV_MIXED_FLOAT = 4,
  KV_GROUPED_BFLOAT16 = 5,  // the same with narrow blocks in 4 bits
  KV_GROUPED_FLOAT = 6
};

// Whether a narrow block is written as one, when all its rows are there.
inline bool is_grouped(int64_t type) {
  return type == KV_GROUPED_BFLOAT16 || type == KV_GROUPED_FLOAT;
}

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

// The narrow blocks of a cache with two kinds, which have R times the rows of a wide one.
template <class Wide>
struct Int8Rows {
  static constexpr bool GROUPED = false;
  static constexpr int64_t R = sizeof(Wide);

  // Bytes of one piece.
  static int64_t piece_bytes(int64_t block_size, int64_t head_dim) {
    return piece_size<int8_t>(R * block_size, head_dim);
  }

  static void read_row(const char* piece, bool, int64_t slot, int64_t block_size, int64_t head_dim,
                       Wide* to) {
    const int8_t* codes = reinterpret_cast<const int8_t*>(piece);
    const float scale = scale_of(codes, R * block_size, head_dim, slot);
    const int8_t* row = codes + slot * head_dim;
    for (int64_t d = 0; d < head_dim; d++) from_float(static_cast<float>(row[d]) * scale, to++);
  }
};

template <class Wide>
struct Int4Groups {
  static constexpr bool GROUPED = true;
  static constexpr int64_t R = 2 * sizeof(Wide);

  static int64_t piece_bytes(int64_t, int64_t head_dim) { return int4_piece_bytes(head_dim); }

  static void read_row(const char* piece, bool is_key, int64_t slot, int64_t, int64_t head_dim,
                       Wide* to) {
    read_int4_row(piece, is_key, slot, head_dim, to);
  }
};

// An entry of a block table, where blocks have two kinds; `mixed_blocks.py` defines it. All blocks
// have the same bytes.
template <class Wide, class Narrow>
struct MixedEntry {
  static constexpr int64_t R = Narrow::R;
  int64_t block, part;
  bool is_narrow;

  explicit MixedEntry(uint64_t entry)
      : block(entry / (2 * R)), part(entry % R), is_narrow(entry / R % 2 != 0) {}

  // Writes the values of `count` rows from an offset on, those of narrow blocks rounded to Wide.
  void read_rows(const char* piece, bool is_key, int64_t offset, int64_t count, int64_t block_size,
                 int64_t head_dim, Wide* to) const {
    if (!is_narrow) {
      const Wide* rows = reinterpret_cast<const Wide*>(piece) + offset * head_dim;
      std::memcpy(to, rows, count * head_dim * sizeof(Wide));
      return;
    }
    for (int64_t slot = part * block_size + offset; count > 0; count--, slot++, to += head_dim) {
      Narrow::read_row(piece, is_key, slot, block_size, head_dim, to);
    }
  }
};

}  // namespace triptych
