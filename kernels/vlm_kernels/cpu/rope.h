// Rotary positions of some tokens (rope.cpp).
#pragma once

#include <cstdint>

#include "threads.h"

namespace triptych {

// x [T, heads, D] by strides, the inner one is 1; cos, sin [T, D], of the type of x or float32.
struct RopeJob {
  void* x;
  int64_t token_stride, head_stride;
  const void *cos, *sin;
  int64_t heads, head_dim;
  bool is_bf16, has_bf16_tables;
};

void rope_tokens(const RopeJob& job, int64_t begin, int64_t end);

}  // namespace triptych
