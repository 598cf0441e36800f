// Where the KV of decoding rows lies.
//
// The cache is [N, L, 2, H, piece], a piece being [P, D] and what kv_types.h puts behind: of one
// head, a block's keys are one piece of memory and its values another.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "kv_types.h"

namespace triptych {

// One step's rows; the same for all layers of one window. `Step` in decode_attention.py.
struct Step {
  const int32_t* block_table;  // [num_rows, table_width]
  const int32_t* num_kv;       // [num_rows] positions, the row's own among them
  const int64_t* tokens;       // [num_rows] where in q and out
  const void* cache;
  int64_t num_rows, table_width, window;  // a window of 0 sees all
  int64_t num_layers, num_kv_heads, num_groups, head_dim, block_size;
  int64_t q_is_bf16, kv_type, num_threads;
};

// Of one layer. q: [T, H * G, D] by strides, the inner one is 1; out: the same, contiguous.
struct Layer {
  const void* q;
  int64_t token_stride, head_stride;
  void* out;
  int64_t layer;
  float scale, softcap;  // a cap of 0 is none
};

constexpr int TILE = 32;

// Positions that are computed together. Behind `count` the last one is repeated.
template <class KV>
struct Tile {
  int count;
  const KV* keys[TILE];  // a position's value lies `behind` its key, the same distance for all
  float key_scales[TILE], value_scales[TILE];  // of int8 alone
};

// The tiles of one row and KV head.
template <class KV>
class Rows {
 public:
  Rows(const Step& step, int64_t row, int64_t head, int64_t layer)
      : table_(step.block_table + row * step.table_width),
        block_size_(step.block_size),
        head_dim_(step.head_dim),
        piece_(piece_size<KV>(block_size_, head_dim_)),
        block_(step.num_layers * 2 * step.num_kv_heads * piece_),
        behind_(step.num_kv_heads * piece_),
        base_(static_cast<const KV*>(step.cache) +
              (layer * 2 * step.num_kv_heads + head) * piece_) {}

  // Elements from a key to its value.
  int64_t behind() const { return behind_; }

  // Finds [begin, end), at most TILE positions and at least one.
  void find(int64_t begin, int64_t end, Tile<KV>* tile) const {
    int64_t block = begin / block_size_, offset = begin % block_size_;
    int i = 0;
    for (int64_t left = end - begin; left > 0; block++, offset = 0) {
      const KV* piece = base_ + table_[block] * block_;
      const int64_t here = std::min(left, block_size_ - offset);
      for (int64_t j = 0; j < here; j++, i++) {
        tile->keys[i] = piece + (offset + j) * head_dim_;
        if constexpr (HAS_SCALES<KV>) {
          tile->key_scales[i] = scale_of(piece, block_size_, head_dim_, offset + j);
          tile->value_scales[i] = scale_of(piece + behind_, block_size_, head_dim_, offset + j);
        }
      }
      left -= here;
    }
    tile->count = i;
    for (; i < TILE; i++) {
      tile->keys[i] = tile->keys[i - 1];
      if constexpr (HAS_SCALES<KV>) {
        tile->key_scales[i] = tile->key_scales[i - 1];
        tile->value_scales[i] = tile->value_scales[i - 1];
      }
    }
  }

 private:
  const int32_t* table_;
  int64_t block_size_, head_dim_, piece_, block_, behind_;
  const KV* base_;
};

// The same over blocks of two kinds. Rows are copied to memory of this thread, narrow ones as values:
// one type of product then serves a tile of both.
template <class Wide, class Narrow>
class MixedRows {
 public:
  MixedRows(const Step& step, int64_t row, int64_t head, int64_t layer)
      : table_(step.block_table + row * step.table_width),
        block_size_(step.block_size),
        head_dim_(step.head_dim),
        piece_(Narrow::piece_bytes(block_size_, head_dim_)),
        block_(step.num_layers * 2 * step.num_kv_heads * piece_),
        behind_(step.num_kv_heads * piece_),
        base_(static_cast<const char*>(step.cache) +
              (layer * 2 * step.num_kv_heads + head) * piece_),
        copies_(memory()) {
    copies_.resize(2 * 2 * TILE * head_dim_);  // keys and values of two tiles
  }

  int64_t behind() const { return TILE * head_dim_; }

  // As `Rows::find`. The rows of a tile stay until the second call after it.
  void find(int64_t begin, int64_t end, Tile<Wide>* tile) {
    Wide* to = copies_.data() + turn_ * 2 * TILE * head_dim_;
    turn_ ^= 1;
    int64_t at = begin / block_size_, offset = begin % block_size_;
    int i = 0;
    for (int64_t left = end - begin; left > 0; at++, offset = 0) {
      const MixedEntry<Wide, Narrow> entry(table_[at]);
      const char* piece = base_ + entry.block * block_;
      const int64_t here = std::min(left, block_size_ - offset);
      entry.read_rows(piece, true, offset, here, block_size_, head_dim_, to);
      entry.read_rows(piece + behind_, false, offset, here, block_size_, head_dim_, to + behind());
      for (int64_t j = 0; j < here; j++, to += head_dim_) tile->keys[i++] = to;
      left -= here;
    }
    tile->count = i;
    for (; i < TILE; i++) tile->keys[i] = tile->keys[i - 1];
  }

 private:
  static std::vector<Wide>& memory() {
    static thread_local std::vector<Wide> copies;
    return copies;
  }

  const int32_t* table_;
  int64_t block_size_, head_dim_, piece_, block_, behind_;
  const char* base_;
  std::vector<Wide>& copies_;
  int turn_ = 0;
};

}  // namespace triptych
