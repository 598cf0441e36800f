// New rows of KV on their way into slots (store_kv.cpp).
#pragma once

#include <cstdint>

#include "kv_types.h"
#include "threads.h"

namespace triptych {

// Rows [T, H, D] by strides; the inner one is 1.
struct Strided {
  const void* at;
  int64_t token_stride, head_stride;
};

struct StoreJob {
  Strided keys, values;
  bool is_bf16;
  void* cache;  // [N, L, 2, H, piece]
  int64_t cache_type;
  const int64_t* slots;  // [T]
  int64_t num_layers, num_kv_heads, head_dim, block_size, layer;
};

void store_tokens(const StoreJob& job, int64_t begin, int64_t end);

}  // namespace triptych
