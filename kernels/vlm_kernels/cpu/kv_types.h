// The types that KV is kept in, and how rows of them lie in a piece of a block.
//
//   float32, bfloat16   [P, D]                     values
//   int8                [P, D] then [P] float32    value = integer * scale of its row
//
// A piece is one block's keys, or values, of one layer and head. `kv_rows.py` defines all of it.
#pragma once

#include <cstdint>
#include <cstring>

#include "bfloat16.h"

namespace triptych {

enum KVType : int64_t { KV_FLOAT = 0, KV_BFLOAT16 = 1, KV_INT8 = 2 };

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

}  // namespace triptych
