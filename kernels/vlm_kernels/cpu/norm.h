// RMSNorm or LayerNorm of some rows (norm.cpp).
#pragma once

#include <cstdint>

#include "threads.h"

namespace triptych {

// x, y [T, size] of bfloat16 or float32; y may be x.
struct NormJob {
  const void* x;
  int64_t x_stride;
  const void* w;
  const void* bias;  // of a LayerNorm; null: an RMSNorm
  void* y;
  int64_t size;
  float eps;
  bool is_bf16, adds_one;
};

void norm_rows(const NormJob& job, int64_t begin, int64_t end);

}  // namespace triptych
