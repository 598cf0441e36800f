// Products with packed panels on tiles of AMX, for both types of weights: linear.cpp, linear_int8.cpp.
//
//   tile   16 rows of x by 64 bytes, or 64 bytes of K by 16 outputs: a panel is two tiles wide, and
//          its lines lie as tiles read them; x of more than 16 rows as in linear_rows.h
//   quad   four tiles of sums: 32 rows by a panel, or, of up to 16 rows, 16 by two panels
//   slice  as much of a panel as stays in the core's innermost cache while all rows pass by it
//
// Between slices, sums lie in memory. Rows pass by a slice without displacing it.
//
// A store of a tile that comes after some 2,000 cycles without one takes 850 cycles longer (measured
// on Sapphire Rapids), so one is stored now and then for nothing.
//
// The rows of one quad are finished behind the products of the next, which run on meanwhile. Between
// single products it takes longer (measured likewise).
//
// Every output is one sum over K in ascending order, 64 bytes at a time, whatever the rows are.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>

#include "linear.h"
#include "linear_finish.h"
#include "linear_rows.h"
#include "threads.h"
#include "tiles.h"

namespace triptych {

constexpr int LINE = 64;              // bytes
constexpr int STEP_BYTES = 2 * LINE;  // of a panel; of a row it is 4
constexpr int TILE_STEPS = TILE_BYTES / 4;
constexpr int TILE_LINES = TILE_STEPS * STEP_BYTES;  // bytes of a panel, by one tile of x
constexpr int SLICE = 16;                            // of these
constexpr int AWAKE = 8;                             // products of quads between two stores
constexpr int AHEAD = 4096;                          // bytes of W that few rows fetch ahead
constexpr int MOST_QUADS = 16;                       // of one item of work
constexpr int MOST_PANELS = 8;                       // likewise
constexpr int BLOCK_BYTES = 1 << 20;  // of x that pass by a panel: half of a core's own cache

// Sums of one quad.
using Quad = uint8_t[4][TILE_ROWS][TILE_BYTES];

// What a thread works in, kept from product to product.
struct Room {
  TiledRows rows;
  alignas(64) Quad sums[MOST_QUADS];
  alignas(64) uint8_t scratch[TILE_ROWS][TILE_BYTES];
};

inline Room& room_of_thread() {
  static thread_local std::unique_ptr<Room> room(new Room);
  return *room;
}

// What one thread does: some rows by some panels, which it takes one after the other.
template <class Dot>
class Item {
 public:
  Item(const Job& job, int first_row, int end_row, Room& room)
      : job_(job), room_(room), sums_(room.sums), first_row_(first_row),
        num_rows_(end_row - first_row), num_tiles_(job.steps / TILE_STEPS),
        num_slices_(std::max(1, (num_tiles_ + SLICE - 1) / SLICE)) {}

  void multiply(int begin, int end) {
    const bool has_few = !reads_tiles(job_.m);
    TileShapes shapes;
    for (int tile = 0; has_few && tile < 5; tile++) shapes.set(tile, num_rows_, TILE_BYTES);
    const Tiles tiles(shapes);
    for (int panel = begin; panel < end; panel += has_few ? 2 : 1) {
      has_few ? multiply_few(panel, std::min(2, end - panel)) : multiply_many(panel);
    }
    finish();
  }

 private:
  // A quad whose sums are whole, of these panels, and whose rows are to be finished; of none, there
  // is nothing to finish.
  struct Whole {
    int quad = 0, panel = 0, num_panels = 0;
  };

  // The last inputs, fewer than a tile has, with zeros behind them.
  struct Rest {
    alignas(64) uint8_t x[TILE_ROWS][TILE_BYTES] = {};
    alignas(64) uint8_t lines[2][TILE_LINES] = {};
  };

  const uint8_t* x_of(int row) const { return job_.x + (first_row_ + row) * job_.x_stride; }
  const uint8_t* w_of(int panel) const { return job_.w + panel * panel_bytes(); }
  int64_t panel_bytes() const { return int64_t(job_.steps) * STEP_BYTES; }
  int rest() const { return job_.steps % TILE_STEPS; }  // steps behind the last whole tile

  int num_quads() const { return (num_rows_ + QUAD_ROWS - 1) / QUAD_ROWS; }

  // Up to 16 rows: W is read as fast as it comes.
  void multiply_few(int panel, int num_panels) {
    const uint8_t *const x = x_of(0), *const w = w_of(panel);
    const int64_t next = num_panels > 1 ? panel_bytes() : 0;
    clear();
    for (int k = 0; k < num_tiles_; ++k) {
      const uint8_t* lines = w + int64_t(k) * TILE_LINES;
      for (int i = 0; i < TILE_LINES; i += LINE) {
        fetch<_MM_HINT_T0>(lines + AHEAD + i);
        if (num_panels > 1) fetch<_MM_HINT_T0>(lines + next + AHEAD + i);
      }
      add_wide(x + k * TILE_BYTES, job_.x_stride, lines, next);
    }
    if (rest() != 0) {
      Rest last;
      for (int i = 0; i < num_rows_; ++i) {
        std::memcpy(last.x[i], x + i * job_.x_stride + num_tiles_ * TILE_BYTES, rest() * 4);
      }
      for (int i = 0; i < num_panels; ++i) take_lines(w + i * next, last.lines[i]);
      add_wide(last.x[0], TILE_BYTES, last.lines[0], num_panels > 1 ? TILE_LINES : 0);
    }
    store_whole(0, panel, num_panels);
  }

  // More rows: while they pass by a slice, the next one comes, from the next panel behind the last.
  void multiply_many(int panel) {
    const uint8_t* const w = w_of(panel);
    const int fetched = (TILE_LINES / LINE + num_quads() - 1) / num_quads();  // lines a tile
    Rest last;
    if (rest() != 0) take_lines(w, last.lines[0]);
    for (int slice = 0; slice < num_slices_; ++slice) {
      const int begin = num_tiles_ * slice / num_slices_, end = num_tiles_ * (slice + 1) / num_slices_;
      const uint8_t* ahead = w + int64_t(end) * TILE_LINES;
      for (int quad = 0; quad < num_quads(); ++quad) {
        slice == 0 ? clear() : load(sums_[quad]);
        const uint8_t* const x = room_.rows.quad(quad);
        for (int k = begin; k < end; ++k) {
          for (int i = 0; i < fetched; ++i, ahead += LINE) fetch<_MM_HINT_T1>(ahead);
          add_tall(x + k * QUAD_BYTES, w + int64_t(k) * TILE_LINES);
          if ((k - begin) % AWAKE == AWAKE - 1) store_tile<0>(room_.scratch, LINE);
        }
        if (slice + 1 < num_slices_) {
          if (whole_.quad == quad) finish();
          store(sums_[quad]);
          continue;
        }
        if (rest() != 0) add_tall(x + num_tiles_ * QUAD_BYTES, last.lines[0]);
        store_whole(quad, panel, 1);
      }
    }
  }

  void take_lines(const uint8_t* panel, uint8_t* to) const {
    std::memcpy(to, panel + int64_t(num_tiles_) * TILE_LINES, rest() * STEP_BYTES);
  }

  template <_mm_hint hint>
  static void fetch(const uint8_t* line) {
    _mm_prefetch(reinterpret_cast<const char*>(line), hint);
  }

  // Tiles 0 to 3 are sums, 4 and 5 x, 6 and 7 W.
  static void clear() { zero_tile<0>(), zero_tile<1>(), zero_tile<2>(), zero_tile<3>(); }
  static void load(const Quad& sums) {
    load_tile<0>(sums[0], LINE), load_tile<1>(sums[1], LINE);
    load_tile<2>(sums[2], LINE), load_tile<3>(sums[3], LINE);
  }
  static void store(Quad& sums) {
    store_tile<0>(sums[0], LINE), store_tile<1>(sums[1], LINE);
    store_tile<2>(sums[2], LINE), store_tile<3>(sums[3], LINE);
  }

  static void add_tall(const uint8_t* x, const uint8_t* w) {
    load_tile<6>(w, STEP_BYTES), stream_tile<4>(x, TILE_BYTES);
    Dot::template add<0, 4, 6>();
    load_tile<7>(w + LINE, STEP_BYTES);
    Dot::template add<1, 4, 7>();
    stream_tile<5>(x + TILE_ROWS * TILE_BYTES, TILE_BYTES);
    Dot::template add<2, 5, 6>();
    Dot::template add<3, 5, 7>();
  }

  // `next` is the distance to the second panel, 0 if there is none.
  static void add_wide(const uint8_t* x, int64_t stride, const uint8_t* w, int64_t next) {
    load_tile<4>(x, stride), load_tile<6>(w, STEP_BYTES);
    Dot::template add<0, 4, 6>();
    load_tile<7>(w + LINE, STEP_BYTES);
    Dot::template add<1, 4, 7>();
    if (next == 0) return;
    load_tile<6>(w + next, STEP_BYTES);
    Dot::template add<2, 4, 6>();
    load_tile<7>(w + next + LINE, STEP_BYTES);
    Dot::template add<3, 4, 7>();
  }

  void store_whole(int quad, int panel, int num_panels) {
    finish();
    store(sums_[quad]);
    whole_ = {quad, panel, num_panels};
  }

  // The rows of the quad that is whole, if there is one.
  void finish() {
    for (int i = 0; i < whole_.num_panels; ++i) {
      for_epilogue(job_.epilogue, [&](auto epilogue) {
        finish_panel<epilogue>(whole_.panel + i, 2 * i);
      });
    }
    whole_.num_panels = 0;
  }

  template <Epilogue epilogue>
  void finish_panel(int panel, int tile) {
    const int begin = whole_.quad * QUAD_ROWS, count = std::min(QUAD_ROWS, num_rows_ - begin);
    const PanelEnd end(job_, panel, first_row_ + begin);
    const typename Dot::Outputs outputs(job_, panel);
    for (int i = 0; i < count; ++i) {
      if (i == TILE_ROWS) tile = 2;
      const auto* sums = reinterpret_cast<const typename Dot::Sum*>(sums_[whole_.quad][tile]);
      const int row = first_row_ + begin + i, line = i % TILE_ROWS;
      const __m512 left = outputs.left(row, sums[line]);
      end.template row<epilogue>(i, left, outputs.right(row, sums[TILE_ROWS + line]));
    }
  }

  const Job& job_;
  Room& room_;
  Quad* const sums_;
  const int first_row_, num_rows_, num_tiles_, num_slices_;
  Whole whole_;
};

// Items of one block of rows follow each other: its x stays in the core's own cache, while W comes
// ahead of its use.
template <class Dot>
void multiply(const Job& job, Threads& threads) {
  const int num_panels = (job.n + PANEL - 1) / PANEL;
  const int per_item = panels_of_item(num_panels, threads, MOST_PANELS);
  const int num_quads = (job.m + QUAD_ROWS - 1) / QUAD_ROWS;
  const int fitting = BLOCK_BYTES / (job.steps * 4) / QUAD_ROWS;
  const int per_block = std::max(1, std::min(MOST_QUADS, fitting));
  const int num_blocks = (num_quads + per_block - 1) / per_block;
  const int of_block = (num_panels + per_item - 1) / per_item;  // items
  threads.for_each(of_block * num_blocks, [&, taken = -1](std::ptrdiff_t i) mutable {
    const int begin = int(i) % of_block * per_item, block = int(i) / of_block;
    const auto row_of = [&](int b) { return std::min(job.m, num_quads * b / num_blocks * QUAD_ROWS); };
    Room& room = room_of_thread();
    if (taken != block && reads_tiles(job.m)) {
      room.rows.take(job, row_of(block), row_of(block + 1));
      taken = block;
    }
    Item<Dot> item(job, row_of(block), row_of(block + 1), room);
    item.multiply(begin, std::min(begin + per_item, num_panels));
  });
}

}  // namespace triptych
