// Rotary positions, in place:  x = x * cos + rotate(x) * sin,  rotate((a, b)) = (-b, a)
//
//   x [T, heads, D] with strides, a and b its halves      cos, sin [T, D]
//
// cos and sin are those of each token, so plain and multi-axis positions are the same here. Rounding
// is transformers': both products to the type of the tables, their sum to the type of x.

#include "rope.h"
#include "rounding.h"

using namespace triptych;

namespace {

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
void tokens_of(const RopeJob& job, int64_t begin, int64_t end) {
  const Table *cos = static_cast<const Table*>(job.cos), *sin = static_cast<const Table*>(job.sin);
  for (int64_t t = begin; t < end; ++t) {
    for (int64_t h = 0; h < job.heads; ++h) {
      T* x = static_cast<T*>(job.x) + t * job.token_stride + h * job.head_stride;
      rotate_head(x, cos + t * job.head_dim, sin + t * job.head_dim, job.head_dim / 2);
    }
  }
}

}  // namespace

void triptych::rope_tokens(const RopeJob& job, int64_t begin, int64_t end) {
  if (job.has_bf16_tables) return tokens_of<Bfloat16, Bfloat16>(job, begin, end);
  job.is_bf16 ? tokens_of<Bfloat16, float>(job, begin, end) : tokens_of<float, float>(job, begin, end);
}

TRIPTYCH_EXPORT bool triptych_rope(void* x, int64_t token_stride, int64_t head_stride,
                                   const void* cos, const void* sin, int64_t tokens, int64_t heads,
                                   int64_t head_dim, int is_bf16, int has_bf16_tables,
                                   int num_threads) try {
  const RopeJob job{x,     token_stride, head_stride,  cos,
                    sin,   heads,        head_dim,     is_bf16 != 0,
                    has_bf16_tables != 0};
  Threads(num_threads).for_each_run(tokens, heads * head_dim, [&](int64_t begin, int64_t end) {
    rope_tokens(job, begin, end);
  });
  return true;
} catch (const std::bad_alloc&) {
  return false;
}
