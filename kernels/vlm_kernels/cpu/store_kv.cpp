// Store KV: the rows k_t and v_t of each new token go to the token's slot, head by head, rounded to
// the cache's type.
//
// The cache is [N, L, 2, H, P * D], inner order [P, D]: a row is D elements in both places. A row of
// int8 has its scale behind all rows of its piece (kv_types.h):
//
//   scale = max |x| / 127      integer = round(x * (127 / max |x|)), ties to even
//
#include <algorithm>
#include <cmath>

#include "rounding.h"
#include "store_kv.h"

using namespace triptych;

namespace {

template <class From, class To>
inline void write_row(const From* from, To* piece, int64_t slot, const StoreJob& t) {
  To* to = piece + slot * t.head_dim;
  if constexpr (sizeof(From) == sizeof(To)) {
    std::memcpy(to, from, t.head_dim * sizeof(To));
  } else {
    for (int64_t d = 0; d < t.head_dim; d++) from_float(to_float(from[d]), to + d);
  }
}

template <class From>
inline void write_row(const From* from, int8_t* piece, int64_t slot, const StoreJob& t) {
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

template <class From, class To>
void tokens_of(const StoreJob& t, int64_t begin, int64_t end) {
  const int64_t size = piece_size<To>(t.block_size, t.head_dim);
  for (int64_t token = begin; token < end; token++) {
    const int64_t block = t.slots[token] / t.block_size, offset = t.slots[token] % t.block_size;
    To* of_layer = static_cast<To*>(t.cache) +
                   (block * t.num_layers + t.layer) * 2 * t.num_kv_heads * size;
    for (int kv = 0; kv < 2; kv++) {
      const Strided& rows = kv == 0 ? t.keys : t.values;
      const From* from = static_cast<const From*>(rows.at) + token * rows.token_stride;
      for (int64_t h = 0; h < t.num_kv_heads; h++) {
        To* piece = of_layer + (kv * t.num_kv_heads + h) * size;
        write_row(from + h * rows.head_stride, piece, offset, t);
      }
    }
  }
}

// Into blocks of two kinds: each row as its block's kind says. The first row of a group writes all
// of it: the caller checks that its rows follow each other.
template <class From, class Wide, class Narrow>
void mixed_tokens_of(const StoreJob& t, int64_t begin, int64_t end) {
  const int64_t size = Narrow::piece_bytes(t.block_size, t.head_dim);
  StoreJob narrow = t;
  narrow.block_size *= Narrow::R;
  for (int64_t token = begin; token < end; token++) {
    const MixedEntry<Wide, Narrow> entry(t.slots[token] / t.block_size);
    const int64_t offset = t.slots[token] % t.block_size;
    if (Narrow::GROUPED && entry.is_narrow && (entry.part > 0 || offset > 0)) continue;
    char* of_layer = static_cast<char*>(t.cache) +
                     (entry.block * t.num_layers + t.layer) * 2 * t.num_kv_heads * size;
    for (int kv = 0; kv < 2; kv++) {
      const Strided& rows = kv == 0 ? t.keys : t.values;
      const From* from = static_cast<const From*>(rows.at) + token * rows.token_stride;
      for (int64_t h = 0; h < t.num_kv_heads; h++) {
        char* piece = of_layer + (kv * t.num_kv_heads + h) * size;
        const From* row = from + h * rows.head_stride;
        if (Narrow::GROUPED && entry.is_narrow) {
          kv == 0 ? write_int4_keys(row, rows.token_stride, piece, t.head_dim)
                  : write_int4_values(row, rows.token_stride, piece, t.head_dim);
        } else if (entry.is_narrow) {
          write_row(row, reinterpret_cast<int8_t*>(piece), entry.part * t.block_size + offset,
                    narrow);
        } else {
          write_row(row, reinterpret_cast<Wide*>(piece), offset, t);
        }
      }
    }
  }
}

template <class From>
void tokens_of(const StoreJob& t, int64_t begin, int64_t end) {
  switch (t.cache_type) {
    case KV_FLOAT: return tokens_of<From, float>(t, begin, end);
    case KV_BFLOAT16: return tokens_of<From, Bfloat16>(t, begin, end);
    case KV_MIXED_FLOAT: return mixed_tokens_of<From, float, Int8Rows<float>>(t, begin, end);
    case KV_MIXED_BFLOAT16:
      return mixed_tokens_of<From, Bfloat16, Int8Rows<Bfloat16>>(t, begin, end);
    case KV_GROUPED_FLOAT: return mixed_tokens_of<From, float, Int4Groups<float>>(t, begin, end);
    case KV_GROUPED_BFLOAT16:
      return mixed_tokens_of<From, Bfloat16, Int4Groups<Bfloat16>>(t, begin, end);
    default: return tokens_of<From, int8_t>(t, begin, end);
  }
}

}  // namespace

void triptych::store_tokens(const StoreJob& job, int64_t begin, int64_t end) {
  job.is_bf16 ? tokens_of<Bfloat16>(job, begin, end) : tokens_of<float>(job, begin, end);
}

TRIPTYCH_EXPORT bool triptych_store_kv(const void* k, int64_t k_token, int64_t k_head,
                                       const void* v, int64_t v_token, int64_t v_head,
                                       int64_t is_bf16, void* cache, int64_t cache_type,
                                       const int64_t* slots, int64_t num_tokens,
                                       int64_t num_layers, int64_t num_kv_heads, int64_t head_dim,
                                       int64_t block_size, int64_t layer, int64_t num_threads) try {
  const StoreJob job{{k, k_token, k_head}, {v, v_token, v_head}, is_bf16 != 0, cache, cache_type,
                     slots, num_layers, num_kv_heads, head_dim, block_size, layer};
  Threads(static_cast<int>(num_threads))
      .for_each_run(num_tokens, 2 * num_kv_heads * head_dim,
                    [&](int64_t begin, int64_t end) { store_tokens(job, begin, end); });
  return true;
} catch (const std::bad_alloc&) {
  return false;
}
