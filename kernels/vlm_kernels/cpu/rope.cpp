// Rotary positions, in place:  x = x * cos + rotate(x) * sin,  rotate((a, b)) = (-b, a)
//
//   x [T, heads, D] with strides, a and b its halves      cos, sin [T, D]
//
// cos and sin are those of each token, so plain and multi-axis positions are the same here. Rounding
// is transformers': both products to the type of the tables, their sum to the type of x.

#include <algorithm>
#include <cstdint>

#include "rounding.h"
#include "threads.h"

using namespace triptych;

namespace {

constexpr int64_t GRAIN = 1 << 15;  // elements that are worth a thread

template <class T, class Table>
void rotate_head(T* x, const Table* cos, const Table* sin, int64_t half) {
  T* const y = x + half;
  for (int64_t i = 0; i < half; ++i) {
    const float a = to_float(x[i]), b = to_float(y[i]);
    const float a_cos = rounded<Table>(a * to_float(cos[i]));
    const float b_sin = rounded<Table>(b * to_float(sin[i]));
    const float b_cos = rounded<Table>(b * to_float(cos[half + i]));
    const float a_sin = rounded<Table>(a * to_float(sin[half + i]));
    from_float(a_cos - b_sin, x + i);
    from_float(b_cos + a_sin, y + i);
  }
}

template <class T, class Table>
void rotate(T* x, int64_t token_stride, int64_t head_stride, const Table* cos, const Table* sin,
            int64_t tokens, int64_t heads, int64_t head_dim, int num_threads) {
  const int64_t per_item = std::max<int64_t>(1, GRAIN / (heads * head_dim));
  parallel_for(num_threads, (tokens + per_item - 1) / per_item, [&](std::ptrdiff_t item) {
    const int64_t end = std::min(tokens, (item + 1) * per_item);
    for (int64_t t = item * per_item; t < end; ++t) {
      for (int64_t h = 0; h < heads; ++h) {
        rotate_head(x + t * token_stride + h * head_stride, cos + t * head_dim, sin + t * head_dim,
                    head_dim / 2);
      }
    }
  });
}

}  // namespace

TRIPTYCH_EXPORT void triptych_rope(void* x, int64_t token_stride, int64_t head_stride,
                                   const void* cos, const void* sin, int64_t tokens, int64_t heads,
                                   int64_t head_dim, int is_bf16, int has_bf16_tables, int num_threads) {
  if (has_bf16_tables) {
    rotate(static_cast<Bfloat16*>(x), token_stride, head_stride, static_cast<const Bfloat16*>(cos),
           static_cast<const Bfloat16*>(sin), tokens, heads, head_dim, num_threads);
  } else if (is_bf16) {
    rotate(static_cast<Bfloat16*>(x), token_stride, head_stride, static_cast<const float*>(cos),
           static_cast<const float*>(sin), tokens, heads, head_dim, num_threads);
  } else {
    rotate(static_cast<float*>(x), token_stride, head_stride, static_cast<const float*>(cos),
           static_cast<const float*>(sin), tokens, heads, head_dim, num_threads);
  }
}
