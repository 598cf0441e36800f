// Where the queries and keys of packed segments lie, and their rows in bfloat16.
//
// A segment's keys are rows of two tensors, one after the other, or slots of KV blocks. Of a cache
// of another type than bfloat16, a tile's rows are rounded to it.
#pragma once

#ifdef TRIPTYCH_AVX512BF16

#include <algorithm>
#include <vector>

#include "kv_types.h"

namespace triptych {

using Half = uint16_t;

constexpr int KEYS = 64;  // of one tile

// `SegmentsStep` in flash_attention.py; the same for all layers of one window.
struct Segments {
  const int64_t* tokens;       // [S] where the first query lies among the packed tokens
  const int64_t* num_queries;  // [S]
  const int64_t* num_keys;     // [S]
  const int64_t* key_start;    // [S] where the first key lies in k and v; not of blocks
  const int32_t* block_table;  // [S, table_width]; null where keys are no blocks
  const int32_t* first;        // [T] each query sees the keys [first, end) of its segment
  const int32_t* end;          // [T]
  int64_t num_segments, table_width;
  int64_t num_layers, num_kv_heads, num_groups, head_dim, block_size;
  int64_t kv_type, num_threads;
};

// Of one layer. q: [T, H * G, D], k and v: [K, H, D], by strides; out: like q, contiguous. Of
// blocks, k is the cache.
struct Tensors {
  const Half* q;
  int64_t q_token, q_head;
  const void* k;
  int64_t k_token, k_head;
  const Half* v;
  int64_t v_token, v_head;
  Bfloat16* out;
  int64_t layer;
  float scale, softcap;  // a cap of 0 is none
};

// The rows of one tile of keys and values; `count` of them are there.
class TileRows {
 public:
  const Half *keys[KEYS], *values[KEYS];
  int64_t count;

  TileRows(const Segments& step, const Tensors& at, int64_t segment, int64_t head, int64_t tile)
      : count(std::min<int64_t>(KEYS, step.num_keys[segment] - tile * KEYS)) {
    if (step.block_table == nullptr) {
      const int64_t start = step.key_start[segment] + tile * KEYS;
      for (int64_t j = 0; j < count; j++) {
        keys[j] = static_cast<const Half*>(at.k) + (start + j) * at.k_token + head * at.k_head;
        values[j] = at.v + (start + j) * at.v_token + head * at.v_head;
      }
      return;
    }
    switch (step.kv_type) {
      case KV_FLOAT: find<float>(step, at, segment, head, tile); break;
      case KV_BFLOAT16: find<Bfloat16>(step, at, segment, head, tile); break;
      case KV_MIXED_FLOAT: find_mixed<float, Int8Rows>(step, at, segment, head, tile); break;
      case KV_MIXED_BFLOAT16: find_mixed<Bfloat16, Int8Rows>(step, at, segment, head, tile); break;
      case KV_GROUPED_FLOAT: find_mixed<float, Int4Groups>(step, at, segment, head, tile); break;
      case KV_GROUPED_BFLOAT16:
        find_mixed<Bfloat16, Int4Groups>(step, at, segment, head, tile);
        break;
      default: find<int8_t>(step, at, segment, head, tile);
    }
  }

 private:
  template <class KV>
  void find(const Segments& step, const Tensors& at, int64_t segment, int64_t head, int64_t tile) {
    const int64_t size = piece_size<KV>(step.block_size, step.head_dim);
    const int64_t heads = step.num_kv_heads, block_elements = step.num_layers * 2 * heads * size;
    const int32_t* table = step.block_table + segment * step.table_width;
    static thread_local std::vector<Half> rounded;
    if constexpr (sizeof(KV) != sizeof(Half)) rounded.resize(2 * KEYS * step.head_dim);
    Half* room = rounded.data();
    for (int64_t j = 0; j < count; j++) {
      const int64_t position = tile * KEYS + j, slot = position % step.block_size;
      const KV* key = static_cast<const KV*>(at.k) +
                      table[position / step.block_size] * block_elements +
                      (at.layer * 2 * heads + head) * size;
      for (int kv = 0; kv < 2; kv++) {
        const KV* piece = key + kv * heads * size;
        const KV* row = piece + slot * step.head_dim;
        const Half** to = kv == 0 ? keys : values;
        if constexpr (sizeof(KV) == sizeof(Half)) {
          to[j] = reinterpret_cast<const Half*>(row);
        } else {
          round_row(row, piece, slot, step, room);
          to[j] = room;
          room += step.head_dim;
        }
      }
    }
  }

  // Of blocks of two kinds, all rows are copied: read as Wide, then rounded.
  template <class Wide, template <class> class Narrow>
  void find_mixed(const Segments& step, const Tensors& at, int64_t segment, int64_t head,
                  int64_t tile) {
    const int64_t dim = step.head_dim, heads = step.num_kv_heads;
    const int64_t size = Narrow<Wide>::piece_bytes(step.block_size, dim);
    const int32_t* table = step.block_table + segment * step.table_width;
    static thread_local std::vector<Half> rounded;
    static thread_local std::vector<Wide> read;
    rounded.resize(2 * KEYS * dim), read.resize(dim);
    Half* room = rounded.data();
    for (int64_t j = 0; j < count; j++) {
      const int64_t position = tile * KEYS + j;
      const MixedEntry<Wide, Narrow<Wide>> entry(table[position / step.block_size]);
      const char* key = static_cast<const char*>(at.k) +
                        ((entry.block * step.num_layers + at.layer) * 2 * heads + head) * size;
      for (int kv = 0; kv < 2; kv++, room += dim) {
        entry.read_rows(key + kv * heads * size, kv == 0, position % step.block_size, 1,
                        step.block_size, dim, read.data());
        for (int64_t d = 0; d < dim; d++) {
          Bfloat16 value;
          from_float(to_float(read[d]), &value);
          room[d] = value.bits;
        }
        (kv == 0 ? keys : values)[j] = room;
      }
    }
  }

  template <class KV>
  static void round_row(const KV* row, const KV* piece, int64_t slot, const Segments& step,
                        Half* to) {
    float scale = 1;
    if constexpr (HAS_SCALES<KV>) scale = scale_of(piece, step.block_size, step.head_dim, slot);
    (void)piece, (void)slot;
    for (int64_t d = 0; d < step.head_dim; d++) {
      Bfloat16 value;
      from_float(static_cast<float>(row[d]) * scale, &value);
      to[d] = value.bits;
    }
  }
};

}  // namespace triptych

#endif
