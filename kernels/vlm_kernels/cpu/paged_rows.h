// Where the KV of decoding rows lies.
//
// The cache is [N, L, 2, H, P * D], inner order [P, D]: of one head, a block's keys are one piece of
// memory and its values another.
#pragma once

#include <algorithm>
#include <cstdint>

namespace triptych {

// One step's rows; the same for all layers of one window. `_Step` in decode_attention.py.
struct Step {
  const int32_t* block_table;  // [num_rows, table_width]
  const int32_t* num_kv;       // [num_rows] positions, the row's own among them
  const int64_t* tokens;       // [num_rows] where in q and out
  const void* cache;
  int64_t num_rows, table_width, window;  // a window of 0 sees all
  int64_t num_layers, num_kv_heads, num_groups, head_dim, block_size;
  int64_t q_is_bf16, kv_is_bf16, num_threads;
};

// Of one layer. q: [T, H * G, D] by strides, the inner one is 1; out: the same, contiguous.
struct Layer {
  const void* q;
  int64_t token_stride, head_stride;
  void* out;
  int64_t layer;
  float scale;
};

// Where the keys of a tile lie, one pointer per position.
template <class KV>
class Rows {
 public:
  Rows(const Step& step, int64_t row, int64_t head, int64_t layer)
      : table_(step.block_table + row * step.table_width),
        block_size_(step.block_size),
        head_dim_(step.head_dim),
        head_(block_size_ * head_dim_),
        block_(step.num_layers * 2 * step.num_kv_heads * head_),
        base_(static_cast<const KV*>(step.cache) + (layer * 2 * step.num_kv_heads + head) * head_) {
  }

  // Pointers of [begin, end), at most `size`; the last is repeated up to so many.
  void find(int64_t begin, int64_t end, const KV** rows, int size) const {
    int64_t block = begin / block_size_, offset = begin % block_size_;
    int i = 0;
    for (int64_t left = end - begin; left > 0; block++, offset = 0) {
      const KV* at = base_ + table_[block] * block_ + offset * head_dim_;
      const int64_t here = std::min(left, block_size_ - offset);
      for (int64_t j = 0; j < here; j++) rows[i++] = at + j * head_dim_;
      left -= here;
    }
    for (; i < size; i++) rows[i] = rows[i - 1];
  }

 private:
  const int32_t* table_;
  int64_t block_size_, head_dim_, head_, block_;
  const KV* base_;
};

}  // namespace triptych
