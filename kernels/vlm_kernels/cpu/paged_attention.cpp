// Paged decode attention: one query token per row attends over the KV blocks of its sequence.
//
//   o = sum_j w_j v_j / sum_j w_j,   w_j = exp(scale * q . k_j - m),   m = max_j scale * q . k_j
//
// over the positions j in [first, end) that the row sees. In pieces: what one piece adds up, with
// the maximum that it had seen, is brought to the maximum of all by a factor exp(m_piece - m).
//
//   part   PART positions of one row and one KV head: what one thread takes; the last of a
//          (row, head) adds its parts up. Where parts begin depends on the row alone, so that a
//          sequence gets the same bits in every batch and on any number of threads.
//   tile   TILE positions: scores, softmax and weighted sum, while its K and V lie in the
//          innermost cache and the next tile is on its way there
//
// A row of K is multiplied by the queries of up to HEADS heads that share it, register by register,
// and summed across; a row of V is added to as many sums, weighted. All sums are float32, weights
// too.
//
// What limits it is memory: each element of K and V is read once and used HEADS times. The machine
// itself fetches ahead inside 4 KiB; `__builtin_prefetch` carries it over from block to block, which
// doubles the speed. A part has no tile before its first: that one is asked for at once.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include "paged_rows.h"
#include "threads.h"
#include "vectors.h"

using namespace triptych;

namespace {

constexpr int PART = 1024;
constexpr int TILE = 32;
constexpr int HEADS = NUM_REGISTERS == 32 ? 4 : 2;  // 4 keys * HEADS sums fill half the registers
constexpr float NOTHING = -std::numeric_limits<float>::infinity();

int64_t padded(int64_t head_dim) { return (head_dim + PAIR - 1) / PAIR * PAIR; }

int64_t first_seen(const Step& step, int64_t row) {
  const int64_t all = step.num_kv[row];
  return step.window > 0 && all > step.window ? all - step.window : 0;
}

int64_t count_parts(const Step& step, int64_t row) {
  return (step.num_kv[row] - first_seen(step, row) + PART - 1) / PART;
}

// What a part adds up for each of the G heads: sums [G, padded D], in pairs; totals; maxima.
struct Sums {
  float *weighted, *total, *maximum;

  Sums(float* memory, const Step& step)
      : weighted(memory),
        total(memory + step.num_groups * padded(step.head_dim)),
        maximum(total + step.num_groups) {}

  static int64_t size(const Step& step) {
    return (step.num_groups * (padded(step.head_dim) + 2) + 15) / 16 * 16;
  }
};

// Scores of 4 positions for `heads` queries: out[h][0..3] = q_h . k.
template <int heads, class KV>
inline void scores_of_four(const float* q, const KV* const* keys, const KV* const* next,
                           int64_t head_dim, float (*out)[TILE]) {
  Floats sums[heads][4] = {};
  for (int64_t d = 0; d < head_dim; d += PAIR) {
    Pair k[4];
    for (int i = 0; i < 4; i++) {
      k[i] = load_pair(keys[i] + d, static_cast<int>(head_dim - d));
      __builtin_prefetch(next[i] + d);
    }
    for (int h = 0; h < heads; h++) {
      const float* of = q + h * padded(head_dim) + d;
      const Floats a = load(of), b = load(of + WIDTH);
      for (int i = 0; i < 4; i++) sums[h][i] = sums[h][i] + k[i].a * a;
      for (int i = 0; i < 4; i++) sums[h][i] = sums[h][i] + k[i].b * b;
    }
  }
  for (int h = 0; h < heads; h++) sum_four(sums[h], out[h]);
}

// Turns scores into weights; brings the sums so far to the new maximum.
inline float softmax(float* scores, int count, float scale, float* maximum, float* total) {
  for (int i = count; i < TILE; i++) scores[i] = NOTHING;  // unused memory may hold anything
  Floats most = broadcast(NOTHING);
  for (int i = 0; i < TILE; i += WIDTH) {
    const Floats s = load(scores + i) * scale;
    store(scores + i, s);
    most = s > most ? s : most;
  }
  const float now = std::max(*maximum, largest(most));
  const float factor = *maximum == now ? 1.f : std::exp(*maximum - now);
  Floats added = {};
  for (int i = 0; i < TILE; i += WIDTH) {
    const Floats w = exp_of_negative(load(scores + i) - now);
    store(scores + i, w);
    added = added + w;
  }
  *total = *total * factor + sum(added);
  *maximum = now;
  return factor;
}

// sums[h] = sums[h] * factor[h] + sum_i weights[h][i] * v_i for `columns` registers of V.
template <int heads, int columns, class KV>
inline void add_values(const float (*weights)[TILE], const float* factors, const KV* const* values,
                       const KV* const* next, int count, int64_t behind, int64_t d,
                       int64_t head_dim, float* sums) {
  Pair added[heads][columns];
  for (int h = 0; h < heads; h++) {
    for (int c = 0; c < columns; c++) {
      const float* of = sums + h * padded(head_dim) + d + c * PAIR;
      added[h][c] = {load(of) * factors[h], load(of + WIDTH) * factors[h]};
    }
  }
  for (int i = 0; i < count; i++) {
    Pair v[columns];
    for (int c = 0; c < columns; c++) {
      const int64_t at = d + c * PAIR;
      v[c] = load_pair(values[i] + behind + at, static_cast<int>(head_dim - at));
      __builtin_prefetch(next[i] + behind + at);
    }
    for (int h = 0; h < heads; h++) {
      const Floats w = broadcast(weights[h][i]);
      for (int c = 0; c < columns; c++) {
        added[h][c].a = added[h][c].a + w * v[c].a;
        added[h][c].b = added[h][c].b + w * v[c].b;
      }
    }
  }
  for (int h = 0; h < heads; h++) {
    for (int c = 0; c < columns; c++) {
      float* of = sums + h * padded(head_dim) + d + c * PAIR;
      store(of, added[h][c].a);
      store(of + WIDTH, added[h][c].b);
    }
  }
}

// One tile for `heads` heads.
template <int heads, class KV>
void attend(const float* q, const KV* const* rows, const KV* const* next, int count,
            int64_t behind, int64_t head_dim, float scale, float* sums, float* totals,
            float* maxima) {
  alignas(64) float weights[heads][TILE];
  float factors[heads];
  for (int i = 0; i < count; i += 4) {
    scores_of_four<heads>(q, rows + i, next + i, head_dim,
                          reinterpret_cast<float(*)[TILE]>(&weights[0][i]));
  }
  for (int h = 0; h < heads; h++) {
    factors[h] = softmax(weights[h], count, scale, maxima + h, totals + h);
  }
  constexpr int columns = NUM_REGISTERS == 16 || heads > 2 ? 2 : 4;
  int64_t d = 0;
  for (; d + (columns - 1) * PAIR < head_dim; d += columns * PAIR) {
    add_values<heads, columns>(weights, factors, rows, next, count, behind, d, head_dim, sums);
  }
  for (; d < head_dim; d += PAIR) {
    add_values<heads, 1>(weights, factors, rows, next, count, behind, d, head_dim, sums);
  }
}

// Asks for a tile that no other came before.
template <class KV>
void prefetch(const KV* const* rows, int64_t behind, int64_t head_dim) {
  for (const int64_t of : {int64_t(0), behind}) {
    for (int i = 0; i < TILE; i++) {
      for (int64_t d = 0; d < head_dim; d += PAIR) __builtin_prefetch(rows[i] + of + d);
    }
  }
}

// The positions [begin, end) of one row and KV head. q: [G, padded D] in pairs.
template <class KV>
void add_part(const Step& step, const Layer& layer, int64_t row, int64_t head, int64_t begin,
              int64_t end, const float* q, Sums sums) {
  const int64_t dim = step.head_dim, behind = step.num_kv_heads * step.block_size * dim;
  std::fill(sums.weighted, sums.total, 0.f);
  std::fill(sums.total, sums.maximum, 0.f);
  std::fill(sums.maximum, sums.maximum + step.num_groups, NOTHING);
  const Rows<KV> places(step, row, head, layer.layer);
  const KV* rows[2][TILE];
  places.find(begin, std::min(begin + TILE, end), rows[0], TILE);
  prefetch(rows[0], behind, dim);
  for (int64_t at = begin, turn = 0; at < end; at += TILE, turn ^= 1) {
    const int count = static_cast<int>(std::min<int64_t>(TILE, end - at));
    const bool is_last = at + TILE >= end;
    if (!is_last) places.find(at + TILE, std::min(at + 2 * TILE, end), rows[turn ^ 1], TILE);
    const KV* const* next = rows[is_last ? turn : turn ^ 1];
    for (int64_t g = 0; g < step.num_groups;) {
      const auto of = [&](auto heads) {
        attend<heads.value>(q + g * padded(dim), rows[turn], next, count, behind, dim, layer.scale,
                            sums.weighted + g * padded(dim), sums.total + g, sums.maximum + g);
        g += heads.value;
      };
      switch (std::min<int64_t>(HEADS, step.num_groups - g)) {
        case 1: of(std::integral_constant<int, 1>()); break;
        case 2: of(std::integral_constant<int, 2>()); break;
        case 3: of(std::integral_constant<int, 3>()); break;
        default: of(std::integral_constant<int, HEADS>());
      }
    }
  }
}

// Adds up the parts of one row and KV head, in their order, and writes the answer of its heads.
template <class Q, class KV>
void finish(const Step& step, const Layer& layer, int64_t row, int64_t head, const float* memory,
            int64_t num_parts) {
  const int64_t dim = step.head_dim, groups = step.num_groups;
  Q* out = static_cast<Q*>(layer.out) +
           (step.tokens[row] * step.num_kv_heads + head) * groups * dim;
  alignas(64) float pair[PAIR];
  for (int64_t g = 0; g < groups; g++) {
    float maximum = NOTHING, total = 0;
    const auto of = [&](int64_t part) {
      return Sums(const_cast<float*>(memory) + part * Sums::size(step), step);
    };
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
      for (int i = 0; i < count; i++) from_float(pair[place<KV>(i)], out + g * dim + d + i);
    }
  }
}

template <class Q, class KV>
void run(const Step& step, const Layer& layer) {
  struct Work {
    int64_t row, part, num_parts;
  };
  static thread_local std::vector<Work> work;
  static thread_local std::vector<float> memory;
  static thread_local std::vector<std::atomic<int>> unfinished;
  work.clear();
  for (int64_t row = 0; row < step.num_rows; row++) {
    const int64_t num_parts = count_parts(step, row);
    for (int64_t p = 0; p < num_parts; p++) work.push_back({row, p, num_parts});
  }
  const int64_t heads = step.num_kv_heads, size = Sums::size(step), dim = step.head_dim;
  memory.resize(work.size() * heads * size);
  unfinished = std::vector<std::atomic<int>>(step.num_rows * heads);
  for (const Work& w : work) {
    if (w.part == 0) {
      for (int64_t h = 0; h < heads; h++) unfinished[w.row * heads + h] = int(w.num_parts);
    }
  }
  const Work* const all = work.data();
  float* const sums = memory.data();
  std::atomic<int>* const left = unfinished.data();
  const int64_t num_work = static_cast<int64_t>(work.size());
  parallel_for(static_cast<int>(step.num_threads), num_work * heads, [&](std::ptrdiff_t i) {
    // of one head after the other, so that parts of a row lie side by side in `sums`
    const int64_t head = i / num_work;
    const Work w = all[i % num_work];
    static thread_local std::vector<float> q;
    q.assign(step.num_groups * padded(dim), 0.f);
    for (int64_t g = 0; g < step.num_groups; g++) {
      const Q* from = static_cast<const Q*>(layer.q) + step.tokens[w.row] * layer.token_stride +
                      (head * step.num_groups + g) * layer.head_stride;
      for (int64_t d = 0; d < dim; d++) {
        q[g * padded(dim) + d / PAIR * PAIR + place<KV>(int(d % PAIR))] = to_float(from[d]);
      }
    }
    const int64_t begin = first_seen(step, w.row) + w.part * PART;
    const int64_t end = std::min<int64_t>(begin + PART, step.num_kv[w.row]);
    add_part<KV>(step, layer, w.row, head, begin, end, q.data(), Sums(sums + i * size, step));
    if (left[w.row * heads + head].fetch_sub(1, std::memory_order_acq_rel) == 1) {
      finish<Q, KV>(step, layer, w.row, head, sums + (i - w.part) * size, w.num_parts);
    }
  });
}

}  // namespace

TRIPTYCH_EXPORT void triptych_paged_attention(const Step* step, const void* q, int64_t token_stride,
                                              int64_t head_stride, void* out, int64_t layer,
                                              float scale) {
  const Layer of{q, token_stride, head_stride, out, layer, scale};
  if (step->q_is_bf16) {
    step->kv_is_bf16 ? run<Bfloat16, Bfloat16>(*step, of) : run<Bfloat16, float>(*step, of);
  } else {
    step->kv_is_bf16 ? run<float, Bfloat16>(*step, of) : run<float, float>(*step, of);
  }
}
