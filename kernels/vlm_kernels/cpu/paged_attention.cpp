// Paged decode attention: one query token per row attends over the KV blocks of its sequence.
//
//   o = sum_j w_j v_j / sum_j w_j,   w_j = exp(s_j - m),   m = max_j s_j,   s_j = scale * q . k_j
//
// over the positions j in [first, end) that the row sees; with a soft cap c, s_j is c tanh(s_j / c).
// In pieces: what one piece adds up, with the maximum that it had seen, is brought to the maximum of
// all by a factor exp(m_piece - m).
//
//   part   PART positions of one row and one KV head: what one thread takes; the last of a
//          (row, head) adds its parts up. Where parts begin depends on the row alone, so that a
//          sequence gets the same bits in every batch and on any number of threads.
//   tile   TILE positions: scores, softmax and weighted sum (paged_tile.h), while its K and V lie in
//          the innermost cache and the next tile is on its way there
//
// A row of K is multiplied by the queries of up to HEADS heads that share it, register by register,
// and summed across; a row of V is added to as many sums, weighted (paged_products.h, paged_dots.h).
// All sums are float32.
//
// What limits it is memory: each element of K and V is read once and used HEADS times. The machine
// itself fetches ahead inside 4 KiB; `__builtin_prefetch` carries it over from block to block, which
// doubles the speed. A part has no tile before its first: that one is asked for at once.
#include "paged_attention.h"

#include "paged_dots.h"
#include "paged_tile.h"

using namespace triptych;

namespace {

constexpr int PART = 1024;

int64_t first_seen(const Step& step, int64_t row) {
  const int64_t all = step.num_kv[row];
  return step.window > 0 && all > step.window ? all - step.window : 0;
}

int64_t count_parts(const Step& step, int64_t row) {
  return (step.num_kv[row] - first_seen(step, row) + PART - 1) / PART;
}

int64_t sums_size(const Step& step) { return Sums::size(step.num_groups, step.head_dim); }

Sums sums_at(const Step& step, float* memory) {
  return Sums(memory, step.num_groups, step.head_dim);
}

// Asks for a tile that no other came before.
template <class KV>
void prefetch(const Tile<KV>& tile, int64_t behind, int64_t head_dim) {
  constexpr int64_t line = 64 / sizeof(KV);
  for (const int64_t of : {int64_t(0), behind}) {
    for (int i = 0; i < tile.count; i++) {
      for (int64_t d = 0; d < head_dim; d += line) __builtin_prefetch(tile.keys[i] + of + d);
    }
  }
}

// The queries of one row and KV head, as the products read them: q [G, padded D], and factors.
template <class Products, class Q>
struct Queries {
  std::vector<typename Products::Query> q;
  std::vector<float> lacks;

  void prepare(const Step& step, const Layer& layer, int64_t row, int64_t head) {
    q.resize(step.num_groups * padded(step.head_dim));
    lacks.resize(step.num_groups);
    for (int64_t g = 0; g < step.num_groups; g++) {
      const Q* from = static_cast<const Q*>(layer.q) + step.tokens[row] * layer.token_stride +
                      (head * step.num_groups + g) * layer.head_stride;
      lacks[g] = Products::prepare(from, step.head_dim, q.data() + g * padded(step.head_dim));
    }
  }
};

// The positions [begin, end) of one row and KV head.
template <class Products, class Q, class Found>
void add_part(const Step& step, const Layer& layer, int64_t row, int64_t head, int64_t begin,
              int64_t end, const Queries<Products, Q>& queries, Sums sums) {
  using KV = typename Products::KV;
  std::fill(sums.weighted, sums.total, 0.f);
  std::fill(sums.total, sums.maximum, 0.f);
  std::fill(sums.maximum, sums.maximum + step.num_groups, NOTHING);
  Found rows(step, row, head, layer.layer);
  const Way way{step.head_dim, rows.behind(), layer.scale, layer.softcap};
  Tile<KV> tiles[2];
  rows.find(begin, std::min(begin + TILE, end), &tiles[0]);
  prefetch(tiles[0], rows.behind(), step.head_dim);
  for (int64_t at = begin, turn = 0; at < end; at += TILE, turn ^= 1) {
    const bool is_last = at + TILE >= end;
    if (!is_last) rows.find(at + TILE, std::min(at + 2 * TILE, end), &tiles[turn ^ 1]);
    attend_all<Products>(way, step.num_groups, queries.q.data(), queries.lacks.data(), tiles[turn],
                         tiles[is_last ? turn : turn ^ 1], sums);
  }
}

// Adds up the parts of one row and KV head, in their order, and writes the answer of its heads.
template <class Products, class Q>
void finish(const Step& step, const Layer& layer, int64_t row, int64_t head, float* memory,
            int64_t num_parts) {
  const int64_t dim = step.head_dim, groups = step.num_groups;
  Q* out = static_cast<Q*>(layer.out) +
           (step.tokens[row] * step.num_kv_heads + head) * groups * dim;
  alignas(64) float pair[PAIR];
  const auto of = [&](int64_t part) { return sums_at(step, memory + part * sums_size(step)); };
  for (int64_t g = 0; g < groups; g++) {
    float maximum = NOTHING, total = 0;
    for (int64_t p = 0; p < num_parts; p++) maximum = std::max(maximum, of(p).maximum[g]);
    const auto factor = [&](int64_t p) {
      return of(p).maximum[g] == maximum ? 1.f : std::exp(of(p).maximum[g] - maximum);
    };
    for (int64_t p = 0; p < num_parts; p++) total += of(p).total[g] * factor(p);
    for (int64_t d = 0; d < dim; d += PAIR) {
      Floats a = {}, b = {};
      for (int64_t p = 0; p < num_parts; p++) {
        const float* from = of(p).weighted + g * padded(dim) + d;
        a = a + load(from) * factor(p), b = b + load(from + WIDTH) * factor(p);
      }
      store(pair, a / total), store(pair + WIDTH, b / total);
      const int count = static_cast<int>(std::min<int64_t>(PAIR, dim - d));
      for (int i = 0; i < count; i++) from_float(pair[Products::place(i)], out + g * dim + d + i);
    }
  }
}

template <class Q, class Products, class Found = Rows<typename Products::KV>>
void run(const Step& step, const Layer& layer, DecodeWork& work, Threads& threads) {
  const int64_t num_parts = static_cast<int64_t>(work.parts.size());
  float* const sums = work.sums.data();
  threads.for_each(num_parts * step.num_kv_heads, [&](std::ptrdiff_t i) {
    // of one head after the other, so that parts of a row lie side by side in `sums`
    const int64_t head = i / num_parts;
    const DecodeWork::Part of = work.parts[i % num_parts];
    static thread_local Queries<Products, Q> queries;
    queries.prepare(step, layer, of.row, head);
    const int64_t begin = first_seen(step, of.row) + of.part * PART;
    const int64_t end = std::min<int64_t>(begin + PART, step.num_kv[of.row]);
    add_part<Products, Q, Found>(step, layer, of.row, head, begin, end, queries,
                          sums_at(step, sums + i * sums_size(step)));
    std::atomic<int>& left = work.left[of.row * step.num_kv_heads + head];
    if (left.fetch_sub(1, std::memory_order_acq_rel) == 1) {
      float* first = sums + (i - of.part) * sums_size(step);
      finish<Products, Q>(step, layer, of.row, head, first, of.num_parts);
      left.store(static_cast<int>(of.num_parts), std::memory_order_relaxed);  // of the next layer
    }
  });
}

template <class Q>
void run_for(const Step& step, const Layer& layer, DecodeWork& work, Threads& threads) {
  switch (step.kv_type) {
    case KV_FLOAT: return run<Q, FloatProducts<float>>(step, layer, work, threads);
    case KV_BFLOAT16: return run<Q, OfBfloat16<Q>>(step, layer, work, threads);
    case KV_MIXED_FLOAT:
      return run<Q, FloatProducts<float>, MixedRows<float, Int8Rows<float>>>(step, layer, work,
                                                                             threads);
    case KV_MIXED_BFLOAT16:
      return run<Q, OfBfloat16<Q>, MixedRows<Bfloat16, Int8Rows<Bfloat16>>>(step, layer, work,
                                                                            threads);
    case KV_GROUPED_FLOAT:
      return run<Q, FloatProducts<float>, MixedRows<float, Int4Groups<float>>>(step, layer, work,
                                                                               threads);
    case KV_GROUPED_BFLOAT16:
      return run<Q, OfBfloat16<Q>, MixedRows<Bfloat16, Int4Groups<Bfloat16>>>(step, layer, work,
                                                                              threads);
    default: return run<Q, OfInt8>(step, layer, work, threads);
  }
}

}  // namespace

void DecodeWork::lay_out(const Step& step) {
  parts.clear();
  left = std::vector<std::atomic<int>>(step.num_rows * step.num_kv_heads);
  for (int64_t row = 0; row < step.num_rows; row++) {
    const int64_t num_parts = count_parts(step, row);
    for (int64_t p = 0; p < num_parts; p++) parts.push_back({row, p, num_parts});
    for (int64_t h = 0; h < step.num_kv_heads; h++) {
      left[row * step.num_kv_heads + h] = static_cast<int>(num_parts);
    }
  }
  sums.resize(parts.size() * step.num_kv_heads * sums_size(step));
}

void triptych::attend_decode(const Step& step, const Layer& layer, DecodeWork& work,
                             Threads& threads) {
  step.q_is_bf16 ? run_for<Bfloat16>(step, layer, work, threads)
                 : run_for<float>(step, layer, work, threads);
}

TRIPTYCH_EXPORT bool triptych_paged_attention(const Step* step, const void* q, int64_t token_stride,
                                              int64_t head_stride, void* out, int64_t layer,
                                              float scale, float softcap) try {
  static thread_local DecodeWork work;
  work.lay_out(*step);
  Threads threads(static_cast<int>(step->num_threads));
  attend_decode(*step, {q, token_stride, head_stride, out, layer, scale, softcap}, work, threads);
  return true;
} catch (const std::bad_alloc&) {
  return false;
}
