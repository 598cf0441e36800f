// Store KV: the rows k_t and v_t of each new token go to the token's slot, head by head, rounded to
// the cache's type.
//
// The cache is [N, L, 2, H, P * D], inner order [P, D]: a row is D elements in both places. A row of
// int8 has its scale behind all rows of its piece (kv_types.h):
//
//   scale = max |x| / 127      integer = round(x * (127 / max |x|)), ties to even
//
// Few tokens are written by the calling thread: waking the others takes longer.
#include <algorithm>
#include <cmath>

#include "kv_types.h"
#include "rounding.h"
#include "threads.h"

using namespace triptych;

namespace {

constexpr int64_t ROWS_PER_THREAD = 512;

struct Target {
  void* cache;
  const int64_t* slots;
  int64_t num_tokens, num_layers, num_kv_heads, head_dim, block_size, layer;
};

template <class From, class To>
inline void write_row(const From* from, To* piece, int64_t slot, const Target& t) {
  To* to = piece + slot * t.head_dim;
  if constexpr (sizeof(From) == sizeof(To)) {
    std::memcpy(to, from, t.head_dim * sizeof(To));
  } else {
    for (int64_t d = 0; d < t.head_dim; d++) from_float(to_float(from[d]), to + d);
  }
}

template <class From>
inline void write_row(const From* from, int8_t* piece, int64_t slot, const Target& t) {
  float most = 0;
  bool is_number = true;
  for (int64_t d = 0; d < t.head_dim; d++) {
    const float x = std::fabs(to_float(from[d]));
    is_number &= x == x;
    most = std::max(most, x);
  }
  if (!is_number) most = NAN;
  const float given = 127.f / most, factor = given < INFINITY ? given : 0.f;  // 0 of NaN, too
  int8_t* to = piece + slot * t.head_dim;
  for (int64_t d = 0; d < t.head_dim; d++) {
    to[d] = factor > 0 ? static_cast<int8_t>(std::nearbyint(to_float(from[d]) * factor)) : 0;
  }
  const float scale = most / 127.f;
  std::memcpy(piece + t.block_size * t.head_dim + slot * sizeof(float), &scale, sizeof(scale));
}

// keys and values: [T, H, D] by strides {token, head}; the inner one is 1.
template <class From, class To>
void run(const Target& t, const void* const rows[2], const int64_t strides[2][2], int num_threads) {
  const int64_t size = piece_size<To>(t.block_size, t.head_dim);
  const int64_t per_thread = ROWS_PER_THREAD / t.num_kv_heads + 1;
  const int64_t pieces = (t.num_tokens + per_thread - 1) / per_thread;
  parallel_for(num_threads, pieces, [&](std::ptrdiff_t piece) {
    const int64_t end = std::min(t.num_tokens, (piece + 1) * per_thread);
    for (int64_t token = piece * per_thread; token < end; token++) {
      const int64_t block = t.slots[token] / t.block_size, offset = t.slots[token] % t.block_size;
      To* of_layer = static_cast<To*>(t.cache) +
                     (block * t.num_layers + t.layer) * 2 * t.num_kv_heads * size;
      for (int kv = 0; kv < 2; kv++) {
        const From* from = static_cast<const From*>(rows[kv]) + token * strides[kv][0];
        for (int64_t h = 0; h < t.num_kv_heads; h++) {
          To* piece = of_layer + (kv * t.num_kv_heads + h) * size;
          write_row(from + h * strides[kv][1], piece, offset, t);
        }
      }
    }
  });
}

}  // namespace

TRIPTYCH_EXPORT void triptych_store_kv(const void* k, int64_t k_token, int64_t k_head,
                                       const void* v, int64_t v_token, int64_t v_head,
                                       int64_t is_bf16, void* cache, int64_t cache_type,
                                       const int64_t* slots, int64_t num_tokens,
                                       int64_t num_layers, int64_t num_kv_heads, int64_t head_dim,
                                       int64_t block_size, int64_t layer, int64_t num_threads) {
  const Target target{cache,    slots,      num_tokens, num_layers, num_kv_heads,
                      head_dim, block_size, layer};
  const void* const rows[2] = {k, v};
  const int64_t strides[2][2] = {{k_token, k_head}, {v_token, v_head}};
  const int threads = static_cast<int>(num_threads);
  const auto of = [&](auto from) {
    using From = decltype(from);
    switch (cache_type) {
      case KV_FLOAT: return run<From, float>(target, rows, strides, threads);
      case KV_BFLOAT16: return run<From, Bfloat16>(target, rows, strides, threads);
      default: return run<From, int8_t>(target, rows, strides, threads);
    }
  };
  is_bf16 ? of(Bfloat16()) : of(float());
}
