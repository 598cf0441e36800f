// Attention of packed segments in bfloat16:
//
//   o_t = sum_j w_tj v_j / sum_j w_tj,   w_tj = exp(s_tj - m_t),   s_tj = scale * q_t . k_j
//
// over the keys [first_t, end_t) of t's segment: all of an image's window, a prompt's past, as far
// as a sliding window reaches, up to the end of a span; with a soft cap c, s is c tanh(s / c).
//
//   q, o [T, H * G, D]     keys and values [K, H, D], or slots of KV blocks (flash_keys.h)
//
// The G query heads of a KV head share its keys. The scores are never whole in memory: keys pass by
// in tiles, and what was added up so far is brought to a new maximum m_t by a factor (flash
// attention).
//
//   pack     keys and values of each (segment, head), once, as products of pairs read them
//            (flash_pack.h): by the thread that attends to them, or where threads share a head,
//            before
//   attend   ROWS rows of one (segment, head), a row being a query of a head: per tile of KEYS keys
//            their scores, weights, sums, BLOCK rows at a time; by tiles of AMX (flash_amx.h), or by
//            registers (flash_tile.h)
//
// Scores and sums are float32; weights are rounded to bfloat16 for their product with V, which is
// where transformers' `sdpa` rounds, while its `eager` rounds scores as well. A row's answer depends
// on its own keys alone: not on the rows beside it, the chunk that it is in, or the threads.
#include "flash_attention.h"

#ifdef TRIPTYCH_AVX512BF16

#ifdef TRIPTYCH_AMX
#include "flash_amx.h"
#else
#include "flash_tile.h"
#endif

using namespace triptych;

namespace {

constexpr int64_t MOST_PACKED = int64_t(32) << 20;  // elements, of segments that are packed at once

// Sizes that follow from a head's.
struct Sizes {
  int64_t dim, width, tile;  // zeros fill the features up to the width

  explicit Sizes(int64_t head_dim)
      : dim(head_dim), width((head_dim + FEATURES - 1) / FEATURES * FEATURES), tile(KEYS * width) {}
};

int64_t count_tiles(const Segments& step, int64_t segment) {
  return (step.num_keys[segment] + KEYS - 1) / KEYS;
}

int64_t queries_at_once(const Segments& step) {
  return std::max<int64_t>(1, ROWS / step.num_groups);
}

// How many of the segments [begin, end) and their heads, counted from the last, are shared: as much
// as the threads need to end together, whatever they are at when all the others have been taken.
int64_t count_shared(const Segments& step, int64_t begin, int64_t end, int64_t heads, int threads) {
  if (threads == 1) return 0;
  const auto work = [&](int64_t s) { return step.num_queries[s] * step.num_keys[s]; };
  int64_t most = 0, count = 0;
  for (int64_t s = begin; s < end; s++) most = std::max(most, work(s));
  for (int64_t left = most * threads, s = end - 1; s >= begin && left > 0; s--) {
    for (int64_t h = 0; h < heads && left > 0; h++) left -= work(s), count++;
  }
  return count;
}

// What is to be packed and attended of the segments [begin, end) and the KV heads [head, end_head).
void lay_out(const Segments& step, int64_t begin, int64_t end, int64_t head, int64_t end_head,
             int threads, FlashWork& work) {
  const Sizes size(step.head_dim);
  const int64_t queries = queries_at_once(step);
  work.whole.clear(), work.tiles.clear(), work.items.clear();
  const int64_t heads = end_head - head;
  int64_t whole = (end - begin) * heads - count_shared(step, begin, end, heads, threads);
  int64_t used = 0;
  for (int64_t s = begin; s < end; s++) {
    for (int64_t h = head; h < end_head; h++) {
      if (whole-- > 0) {
        work.whole.push_back({s, h, 0, step.num_queries[s], 0});
        continue;
      }
      const int64_t count = count_tiles(step, s);
      for (int64_t t = 0; t < count; t++) work.tiles.push_back({s, h, t, t + 1, used + t * size.tile});
      for (int64_t from = 0; from < step.num_queries[s]; from += queries) {
        work.items.push_back({s, h, from, std::min(from + queries, step.num_queries[s]), used});
      }
      used += count * size.tile;
    }
  }
  // the last queries of a head see most keys: they are begun first, so that no thread ends late
  std::stable_sort(work.items.begin(), work.items.end(), [](const auto& a, const auto& b) {
    return a.packed != b.packed ? a.packed < b.packed : a.from > b.from;
  });
  work.packed.resize(2 * used);
}

void attend(const Segments& step, const Tensors& at, const FlashWork::Piece& p, const Half* keys,
            const Half* values) {
  static thread_local Rows rows;
  const int64_t first = step.tokens[p.segment], width = Sizes(step.head_dim).width;
  rows.attend(step, at, p.head, first + p.from, first + p.to, keys, values, width);
}

// All queries of a segment and head. What is packed stays in this core's cache.
void attend_whole(const Segments& step, const Tensors& at, const FlashWork::Piece& p) {
  static thread_local Lines<Half> packed;
  const Sizes size(step.head_dim);
  const int64_t count = count_tiles(step, p.segment), queries = queries_at_once(step);
  if (static_cast<int64_t>(packed.size()) < 2 * count * size.tile) packed.resize(2 * count * size.tile);
  Half *const keys = packed.data(), *const values = keys + count * size.tile;
  for (int64_t t = 0; t < count; t++) {
    const TileRows rows(step, at, p.segment, p.head, t);
    pack(rows, size.dim, size.width, keys + t * size.tile, values + t * size.tile);
  }
  for (int64_t from = 0; from < p.to; from += queries) {
    attend(step, at, {p.segment, p.head, from, std::min(from + queries, p.to), 0}, keys, values);
  }
  if (static_cast<int64_t>(packed.size()) > MOST_PACKED) packed = {};  // not kept for the next one
}

// The segments [begin, end) and the KV heads [head, end_head): packs the keys that are shared, then
// attends.
void run(const Segments& step, const Tensors& at, int64_t begin, int64_t end, int64_t head,
         int64_t end_head, FlashWork& work, Threads& threads) {
  const Sizes size(step.head_dim);
  threads.for_each(1, [&](std::ptrdiff_t) {
    lay_out(step, begin, end, head, end_head, threads.count(), work);
  });
  Half *const keys = work.packed.data(), *const values = keys + work.packed.size() / 2;
  threads.for_each(work.tiles.size(), [&](std::ptrdiff_t i) {
    const FlashWork::Piece& p = work.tiles[i];
    const TileRows rows(step, at, p.segment, p.head, p.from);
    pack(rows, size.dim, size.width, keys + p.packed, values + p.packed);
  });
  const std::ptrdiff_t whole = work.whole.size();
  threads.for_each(whole + work.items.size(), [&](std::ptrdiff_t i) {
    if (i < whole) return attend_whole(step, at, work.whole[i]);
    const FlashWork::Piece& p = work.items[i - whole];
    attend(step, at, p, keys + p.packed, values + p.packed);
  });
}

}  // namespace

void triptych::attend_segments(const Segments& step, const Tensors& tensors, FlashWork& work,
                               Threads& threads) {
  const int64_t of_tile = step.num_kv_heads * Sizes(step.head_dim).tile;
  for (int64_t begin = 0, end = 0; begin < step.num_segments; begin = end) {
    int64_t elements = 0;
    do {
      elements += 2 * count_tiles(step, end++) * of_tile;
    } while (end < step.num_segments &&
             elements + 2 * count_tiles(step, end) * of_tile <= MOST_PACKED);
    // one segment may have more than that: then as many of its heads at a time, at least one
    const int64_t of_head = std::max<int64_t>(1, elements / step.num_kv_heads);
    const int64_t heads = std::clamp<int64_t>(MOST_PACKED / of_head, 1, step.num_kv_heads);
    for (int64_t head = 0; head < step.num_kv_heads; head += heads) {
      const int64_t end_head = std::min(head + heads, step.num_kv_heads);
      run(step, tensors, begin, end, head, end_head, work, threads);
    }
  }
}

TRIPTYCH_EXPORT bool triptych_flash_attention(const Segments* step, const Tensors* tensors) try {
  static thread_local FlashWork work;
  Threads threads(static_cast<int>(step->num_threads));
  attend_segments(*step, *tensors, work, threads);
  return true;
} catch (const std::bad_alloc&) {
  return false;
}

#endif
