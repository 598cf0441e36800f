// Store KV: the rows k_t and v_t of each new token go to the token's slot, head by head, rounded to
// the cache's type.
//
// The cache is [N, L, 2, H, P * D], inner order [P, D]: a row is one piece of D elements in both
// places. Few tokens are written by the calling thread: waking the others takes longer.
#include <algorithm>

#include "threads.h"
#include "vectors.h"

using namespace triptych;

namespace {

constexpr int64_t ROWS_PER_THREAD = 512;

struct Target {
  void* cache;
  const int64_t* slots;
  int64_t num_tokens, num_layers, num_kv_heads, head_dim, block_size, layer;
};

template <class From, class To>
inline void copy_row(const From* from, To* to, int64_t count) {
  if constexpr (sizeof(From) == sizeof(To)) {
    std::memcpy(to, from, count * sizeof(To));
  } else {
    for (int64_t d = 0; d < count; d++) from_float(to_float(from[d]), to + d);
  }
}

// keys and values: [T, H, D] by strides {token, head}; the inner one is 1.
template <class From, class To>
void run(const Target& t, const void* const rows[2], const int64_t strides[2][2], int num_threads) {
  const int64_t head = t.block_size * t.head_dim;
  const int64_t per_thread = ROWS_PER_THREAD / t.num_kv_heads + 1;
  const int64_t pieces = (t.num_tokens + per_thread - 1) / per_thread;
  parallel_for(num_threads, pieces, [&](std::ptrdiff_t piece) {
    const int64_t end = std::min(t.num_tokens, (piece + 1) * per_thread);
    for (int64_t token = piece * per_thread; token < end; token++) {
      const int64_t block = t.slots[token] / t.block_size, offset = t.slots[token] % t.block_size;
      To* to = static_cast<To*>(t.cache) +
               (block * t.num_layers + t.layer) * 2 * t.num_kv_heads * head + offset * t.head_dim;
      for (int kv = 0; kv < 2; kv++) {
        const From* from = static_cast<const From*>(rows[kv]) + token * strides[kv][0];
        for (int64_t h = 0; h < t.num_kv_heads; h++) {
          copy_row(from + h * strides[kv][1], to + (kv * t.num_kv_heads + h) * head, t.head_dim);
        }
      }
    }
  });
}

}  // namespace

TRIPTYCH_EXPORT void triptych_store_kv(const void* k, int64_t k_token, int64_t k_head,
                                       const void* v, int64_t v_token, int64_t v_head,
                                       int64_t is_bf16, void* cache, int64_t cache_is_bf16,
                                       const int64_t* slots, int64_t num_tokens,
                                       int64_t num_layers, int64_t num_kv_heads, int64_t head_dim,
                                       int64_t block_size, int64_t layer, int64_t num_threads) {
  const Target target{cache,    slots,      num_tokens, num_layers, num_kv_heads,
                      head_dim, block_size, layer};
  const void* const rows[2] = {k, v};
  const int64_t strides[2][2] = {{k_token, k_head}, {v_token, v_head}};
  const int threads = static_cast<int>(num_threads);
  if (is_bf16) {
    cache_is_bf16 ? run<Bfloat16, Bfloat16>(target, rows, strides, threads)
                  : run<Bfloat16, float>(target, rows, strides, threads);
  } else {
    cache_is_bf16 ? run<float, Bfloat16>(target, rows, strides, threads)
                  : run<float, float>(target, rows, strides, threads);
  }
}
