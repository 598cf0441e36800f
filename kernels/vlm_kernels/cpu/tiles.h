// Tiles of AMX: eight registers of up to 16 rows of 64 bytes each, and the products of two of them.
//
//   C [16][16] floats += A [16][32] bfloat16 . B [32][16] bfloat16, which lies as [16][16][2]
//   C [16][16] int32  += A [16][64] uint8    . B [64][16] int8,     which lies as [16][16][4]
//
// What a kernel does with tiles stands between the two ends of a `Tiles`: it says how large each is,
// and clears them, since others (oneDNN) work in the same threads and say it for themselves.
//
//   const Tiles tiles(shapes);
//   load_tile<6>(a, stride), load_tile<7>(b, stride), zero_tile<0>();
//   multiply_bfloat16<0, 6, 7>();
//   store_tile<0>(c, stride);
//
// Numbers of tiles are part of an instruction, hence the templates. A load sees what was stored
// before it in the program's order, and a store is seen by what reads after it: the instructions say
// to the compiler that they touch memory, which the compiler's own intrinsics do not all do.
#pragma once

#ifdef TRIPTYCH_AMX

#include <cstdint>

namespace triptych {

constexpr int NUM_TILES = 8, TILE_ROWS = 16, TILE_BYTES = 64;  // of a row

// How large each tile is, as LDTILECFG reads it; 16 rows of 64 bytes unless one says otherwise.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};

  constexpr TileShapes() {
    for (int tile = 0; tile < NUM_TILES; tile++) set(tile, TILE_ROWS, TILE_BYTES);
  }

  constexpr void set(int tile, int num_rows, int num_bytes) {
    rows[tile] = static_cast<uint8_t>(num_rows);
    bytes[tile] = static_cast<uint16_t>(num_bytes);
  }
};

// The tiles of this thread, from its construction to its end.
class Tiles {
 public:
  explicit Tiles(const TileShapes& shapes = TileShapes()) {
    asm volatile("ldtilecfg %0" ::"m"(shapes) : "memory");
  }
  ~Tiles() { asm volatile("tilerelease" ::: "memory"); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
};

// `stride` in bytes from row to row.
template <int tile>
inline void load_tile(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(tile) : "memory");
}

// The same of what is read once: it does not take the place of what the first cache holds.
template <int tile>
inline void stream_tile(const void* from, int64_t stride) {
  asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(tile) : "memory");
}

template <int tile>
inline void store_tile(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(tile) : "memory");
}

template <int tile>
inline void zero_tile() {
  asm volatile("tilezero %%tmm%c0" ::"i"(tile));
}

template <int c, int a, int b>
inline void multiply_bfloat16() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(c), "i"(a), "i"(b));
}

template <int c, int a, int b>
inline void multiply_int8() {
  asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(c), "i"(a), "i"(b));
}

}  // namespace triptych

#endif
