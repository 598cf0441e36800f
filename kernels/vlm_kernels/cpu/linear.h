// What a product with packed weights is asked for; the same for every type of weights.
//
//   x [M, K]   W [N, K]   b [N]   r, y [M, N]
//
//   plain       y = x W^T + b
//   residual    y = r + bf16(x W^T + b)
//   quick GELU  y = z * bf16(sigmoid(bf16(1.702 z))),   z = bf16(x W^T + b)
//   GELU        y = gelu(z), approximated by tanh
//   gated       y = bf16(silu(g)) * u   or   bf16(gelu(g)) * u,   g, u = x G^T, x U^T;   y [M, N / 2]
//
// W is packed in panels of 32 outputs. Of gated layers a panel holds 16 rows of G, then the same 16
// of U. Rounding is transformers': bf16 after the product, after an activation, and after each sum
// or product of two tensors.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "lines.h"
#include "threads.h"

namespace triptych {

constexpr int PANEL = 32;      // outputs of a panel
constexpr int QUAD_ROWS = 32;  // of x and y that lie together, where they are tiled (linear_rows.h)

// As in packed_linear.py.
enum Epilogue : int {
  PLAIN = 0,
  RESIDUAL = 1,
  QUICK_GELU = 2,
  GELU = 3,
  GATED_BY_SILU = 4,
  GATED_BY_GELU = 5,
};

constexpr bool is_gated(Epilogue epilogue) { return epilogue >= GATED_BY_SILU; }

struct Job {
  const uint8_t* x;         // rows of bfloat16, or of int8 codes
  int64_t x_stride;         // bytes
  const float* x_scale;     // [M], of codes alone
  int x_zero;               // the code of 0
  const uint8_t* w;         // panels
  const float* w_scale;     // [panels * 32], of int8 alone
  const int32_t* w_offset;  // likewise: what the codes' zero adds to each sum
  const uint16_t* bias;     // bfloat16 as are y and the residual; may be null; of gated
                            // weights [panels * 32], in the order of panels
  const uint16_t* residual;
  int64_t residual_stride;
  uint16_t* y;
  int64_t y_stride;
  int m, n;
  int steps;  // of 4 bytes, over K
  Epilogue epilogue;
  bool x_is_tiled, y_is_tiled;  // as linear_rows.h lays rows out; y has whole panels then
};

// A job as Python's call gives it; the caller adds W and its scales.
inline Job job_of(const void* bias, const void* residual, int64_t residual_stride, void* y,
                  int64_t y_stride, int m, int n, int epilogue) {
  Job job{};
  job.bias = static_cast<const uint16_t*>(bias);
  job.residual = static_cast<const uint16_t*>(residual);
  job.residual_stride = residual_stride;
  job.y = static_cast<uint16_t*>(y);
  job.y_stride = y_stride;
  job.m = m;
  job.n = n;
  job.epilogue = static_cast<Epilogue>(epilogue);
  return job;
}

// Panels of one item of work, in pairs: few enough that no thread waits long for the last.
inline int panels_of_item(int num_panels, const Threads& threads, int most) {
  const int share = num_panels / (4 * threads.count()) / 2 * 2;
  return std::max(2, std::min(most, share));
}

// The rows of the quads that hold so many.
inline int64_t in_quads(int64_t num_rows) {
  return (num_rows + QUAD_ROWS - 1) / QUAD_ROWS * QUAD_ROWS;
}

// Room for the codes of activations; kept from product to product.
struct Codes {
  Lines<uint8_t> codes;
  std::vector<float> scales;

  // For m rows of k, tiled or not; before threads begin.
  void make_room(int64_t m, int64_t k) {
    const size_t size = in_quads(m) * ((k + 63) / 64 * 64);
    if (codes.size() < size) codes.resize(size);
    if (scales.size() < size_t(m)) scales.resize(m);
  }
};

// How a calibrated layer's x becomes codes:  x ~ scale (code - zero). Scale 0: each row has its own.
struct InputScale {
  float scale;
  int32_t zero;
};

// Of a job without x: rows of bfloat16, k of them each, x_stride apart. The first needs AVX512-BF16.
void linear_bf16(Job job, const void* x, int64_t x_stride, int k, Threads& threads);
void linear_int8(Job job, const void* x, int64_t x_stride, int k, InputScale input, Codes& codes,
                 Threads& threads);

}  // namespace triptych
