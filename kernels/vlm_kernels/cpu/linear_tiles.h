// Products with packed panels on AVX-512, for any type whose dot product takes 4 bytes of a row and
// a line of 64 bytes, 4 for each of 16 outputs:  linear.cpp (bfloat16), linear_int8.cpp.
//
//   panel   32 outputs: [steps][2][16][4 bytes], a step being 4 bytes of a row, two lines of W
//   tile    Rows x Panels: every sum in a register, over all steps
//
//   few rows    a panel is read once, whole lines, a few KiB ahead of the product
//   up to 56    tiles share a panel; each fetches its part of the next one meanwhile
//   many rows   likewise: a panel stays in the core's own cache while rows pass by it
//
// Every output is one sum over the steps in ascending order, whatever the number of rows.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "linear.h"
#include "linear_finish.h"
#include "threads.h"

namespace triptych {

constexpr int LINE = 64;                // bytes
constexpr int AHEAD = 4096;             // bytes that few rows are prefetched ahead
constexpr int FEW_ROWS = 56;            // up to so many, reading W takes time worth hiding
constexpr int MOST_ROWS = 14;           // 14 x 2 sums, and 2 lines of W, in 32 registers
constexpr int TILE_ROWS = 12;           // when rows are many: x comes out of the cache, too
constexpr int MOST_PANELS = 4;          // of one item of work
constexpr int BLOCK_BYTES = 512 << 10;  // of x that pass by a panel: half of a core's own cache

// What a tile fetches while it multiplies: its own lines ahead, or those of a slice.
enum class Fetch { AHEAD, SLICE };

// What is needed next: from `at` on, `step` bytes for each step of a tile.
struct Slice {
  const uint8_t* at = nullptr;
  int64_t step = 0;
};

// `Rows` rows from `row` by `Panels` panels from `panel`; Dot adds to sums and makes them floats.
template <class Dot, int Rows, int Panels, Fetch Fetched>
void tile(const Job& job, int row, int panel, Slice slice) {
  typename Dot::Sum sums[Rows][Panels * 2];
  for (auto& of_row : sums)
    for (auto& sum : of_row) sum = typename Dot::Sum{};
  const int64_t panel_bytes = int64_t(job.steps) * 2 * LINE;
  const uint8_t* w = job.w + panel * panel_bytes;
  const uint8_t* x = job.x + row * job.x_stride;
  for (int step = 0; step < job.steps; ++step) {
    __m512i lines[Panels * 2];
    if (Fetched == Fetch::SLICE) {
      _mm_prefetch(reinterpret_cast<const char*>(slice.at), _MM_HINT_T1);
      slice.at += slice.step;
    }
#pragma GCC unroll 4
    for (int j = 0; j < Panels * 2; ++j) {
      const uint8_t* line = w + (j / 2) * panel_bytes + (int64_t(step) * 2 + j % 2) * LINE;
      if (Fetched == Fetch::AHEAD) {
        _mm_prefetch(reinterpret_cast<const char*>(line) + AHEAD, _MM_HINT_T0);
      }
      lines[j] = _mm512_loadu_si512(line);
    }
#pragma GCC unroll 14
    for (int i = 0; i < Rows; ++i) {
      int four_bytes;
      std::memcpy(&four_bytes, x + i * job.x_stride + step * 4, 4);
      const __m512i all = _mm512_set1_epi32(four_bytes);
#pragma GCC unroll 4
      for (int j = 0; j < Panels * 2; ++j) sums[i][j] = Dot::add(sums[i][j], all, lines[j]);
    }
  }
  for_epilogue(job.epilogue, [&](auto epilogue) {
    for (int p = 0; p < Panels; ++p) {
      const PanelEnd end(job, panel + p, row);
      const typename Dot::Outputs outputs(job, panel + p);
      for (int i = 0; i < Rows; ++i) {
        const __m512 left = outputs.left(row + i, sums[i][p * 2]);
        end.template row<epilogue>(i, left, outputs.right(row + i, sums[i][p * 2 + 1]));
      }
    }
  });
}

template <class Dot, int Panels, Fetch Fetched>
void rows_of(const Job& job, int row, int num_rows, int panel, Slice slice = {}) {
  switch (num_rows) {
#define TRIPTYCH_ROWS(R) \
  case R: return tile<Dot, R, Panels, Fetched>(job, row, panel, slice);
    TRIPTYCH_ROWS(1) TRIPTYCH_ROWS(2) TRIPTYCH_ROWS(3) TRIPTYCH_ROWS(4) TRIPTYCH_ROWS(5)
    TRIPTYCH_ROWS(6)
  }
  if constexpr (Panels == 1) {
    switch (num_rows) {
      TRIPTYCH_ROWS(7) TRIPTYCH_ROWS(8) TRIPTYCH_ROWS(9) TRIPTYCH_ROWS(10) TRIPTYCH_ROWS(11)
      TRIPTYCH_ROWS(12) TRIPTYCH_ROWS(13) TRIPTYCH_ROWS(14)
#undef TRIPTYCH_ROWS
    }
  }
}

// Some panels by some rows: each panel by `num_tiles` tiles, of which each fetches its part of the
// next panel; the last panel is followed by `after`.
template <class Dot>
void share_panels(const Job& job, int first_row, int end_row, int num_tiles, int begin, int end,
                  int after) {
  const int64_t panel_bytes = int64_t(job.steps) * 2 * LINE;
  const int64_t step = (2 * LINE + num_tiles - 1) / num_tiles, rows = end_row - first_row;
  for (int panel = begin; panel < end; ++panel) {
    Slice slice{job.w + (panel + 1 < end ? panel + 1 : after) * panel_bytes, step};
    for (int i = 0; i < num_tiles; ++i) {
      const int row = first_row + int(rows * i / num_tiles);
      const int count = first_row + int(rows * (i + 1) / num_tiles) - row;
      rows_of<Dot, 1, Fetch::SLICE>(job, row, count, panel, slice);
      slice.at += step * job.steps;
    }
  }
}

// Rows of one tile, or of half of one by two panels: they are over before a slice would be there.
template <class Dot>
void one_tile(const Job& job, int begin, int end) {
  int panel = begin;
  if (job.m <= 6) {
    for (; panel + 1 < end; panel += 2) rows_of<Dot, 2, Fetch::AHEAD>(job, 0, job.m, panel);
  }
  for (; panel < end; ++panel) rows_of<Dot, 1, Fetch::AHEAD>(job, 0, job.m, panel);
}

// An item is some panels by all rows, if these are few, else by as many as stay in the core's cache.
template <class Dot>
void multiply(const Job& job, Threads& threads) {
  const int num_panels = (job.n + PANEL - 1) / PANEL;
  const int per_item = panels_of_item(num_panels, threads, MOST_PANELS);
  const int most = job.m <= FEW_ROWS ? MOST_ROWS : TILE_ROWS;
  const int num_tiles = (job.m + most - 1) / most;
  const int fitting = std::max(1, BLOCK_BYTES / (job.steps * 4) / TILE_ROWS);  // tiles
  const int num_blocks = job.m <= FEW_ROWS ? 1 : (num_tiles + fitting - 1) / fitting;
  const int num_items = (num_panels + per_item - 1) / per_item * num_blocks;
  threads.for_each(num_items, [&](std::ptrdiff_t i) {
    const int begin = int(i) / num_blocks * per_item, block = int(i) % num_blocks;
    const int end = std::min(begin + per_item, num_panels);
    if (num_tiles <= 1) return one_tile<Dot>(job, begin, end);
    // by then the others have taken one each
    const int later = int(i) + threads.count();
    const int after = later < num_items ? later / num_blocks * per_item : begin;
    const int first_tile = int(int64_t(num_tiles) * block / num_blocks);
    const int end_tile = int(int64_t(num_tiles) * (block + 1) / num_blocks);
    const auto row_of = [&](int tile) { return int(int64_t(job.m) * tile / num_tiles); };
    share_panels<Dot>(job, row_of(first_tile), row_of(end_tile), end_tile - first_tile, begin, end,
                      after);
  });
}

}  // namespace triptych
