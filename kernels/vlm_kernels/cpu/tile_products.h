// Products of 32 rows of bfloat16 by tiles of AMX, with room for other work between them.
//
//   c [32][16 * columns] = a [32][depth] . b, or c += a . b;   b [depth / 2][16 * columns][2], pairs
#pragma once

#ifdef TRIPTYCH_AMX

#include "bfloat16.h"
#include "tiles.h"

namespace triptych {

constexpr int PRODUCT_ROWS = 2 * TILE_ROWS;

struct Product {
  const uint16_t *a, *b;
  float* c;
  int64_t a_row, b_row, c_row;  // bytes from row to row
  int64_t columns, depth;       // in 16, a multiple of 2; a multiple of 32
  bool adds;

  int64_t count() const { return columns * depth / 16; }  // of products of two tiles
};

// 16 columns, in the tiles c and c + 1; each tile of b is loaded once for both. b comes from the
// second cache and is not kept in the first, which a and c need for themselves.
template <int c, class Between>
inline __attribute__((always_inline)) void multiply_column(const Product& of, int64_t column,
                                                           Between&& between) {
  float* to = of.c + column * 16;
  if (of.adds) {
    load_tile<c>(to, of.c_row), load_tile<c + 1>(to + 4 * of.c_row, of.c_row);
  } else {
    zero_tile<c>(), zero_tile<c + 1>();
  }
  const uint16_t *a = of.a, *b = of.b + column * 32;
  for (int64_t d = 0; d < of.depth; d += 32, a += 32, b += 8 * of.b_row) {
    load_tile<4>(a, of.a_row), stream_tile<6>(b, of.b_row);
    multiply_bfloat16<c, 4, 6>();
    between();
    load_tile<5>(a + 8 * of.a_row, of.a_row);
    multiply_bfloat16<c + 1, 5, 6>();
    between();
  }
}

template <int c>
inline __attribute__((always_inline)) void store_column(const Product& of, int64_t column) {
  float* to = of.c + column * 16;
  store_tile<c>(to, of.c_row), store_tile<c + 1>(to + 4 * of.c_row, of.c_row);
}

// Calls between() after each product of two tiles, which takes 16 cycles: a processor looks ahead a few
// hundred instructions, so that other work overlaps with products only where both alternate in small
// portions. A column is stored after the next is multiplied: a store that waits for its products holds
// up all that follows.
template <class Between>
inline __attribute__((always_inline)) void multiply(const Product& of, Between&& between) {
  for (int64_t column = 0; column < of.columns; column += 2) {
    multiply_column<0>(of, column, between);
    if (column > 0) store_column<2>(of, column - 1);
    multiply_column<2>(of, column + 1, between);
    store_column<0>(of, column);
  }
  store_column<2>(of, of.columns - 1);
}

inline void multiply(const Product& of) {
  multiply(of, [] {});
}

}  // namespace triptych

#endif
