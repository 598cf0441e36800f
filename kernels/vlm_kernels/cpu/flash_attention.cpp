// Dense attention in bfloat16:  o_q = sum_j w_qj v_j / sum_j w_qj,  w_qj = exp(scale * q . k_j - m_q)
//
//   q, o [S, H, G, Q, D]   k, v [S, H, K, D]   by strides, the inner one is 1
//
// The G query heads of a KV head share its keys; causal queries are the last Q of the K positions.
// The scores are never whole in memory: keys pass by in tiles, and what was added up so far is
// brought to each new maximum m_q by a factor (flash attention).
//
//   pack     keys and values of each (s, h), once, as vdpbf16ps reads them: a line holds a pair of
//            features of 16 keys, or a pair of keys of 16 features
//   attend   ROWS rows of one (s, h), a row being a query of a head: per tile of KEYS keys their
//            scores, weights, sums; matrix products of BLOCK rows at a time, sums in registers
//
// Scores and sums are float32; weights are rounded to bfloat16 for their product with V, which is
// where transformers' `sdpa` rounds, while its `eager` rounds scores as well. A row's answer depends
// on its own keys alone: not on the rows beside it, the chunk that it is in, or the threads.
#include "threads.h"

#ifdef TRIPTYCH_AVX512BF16

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include "vectors.h"

using namespace triptych;

namespace {

constexpr int KEYS = 64;
constexpr int BLOCK = 6;  // 6 rows * 4 registers of sums, 4 of keys, in 32
constexpr int ROWS = 8 * BLOCK;
constexpr float NOTHING = -std::numeric_limits<float>::infinity();

using Half = uint16_t;

struct View {
  const Half* at;
  int64_t s, h, g, row;  // strides; g is 0 where there is none
};

struct Job {
  View q, k, v, out;
  int64_t num_seqs, num_heads, num_groups, num_queries, num_keys, head_dim;
  float scale;
  bool causal;

  int64_t width() const { return (head_dim + 15) / 16 * 16; }  // zeros behind the head size
  int64_t tiles() const { return (num_keys + KEYS - 1) / KEYS; }
  int64_t tile_size() const { return KEYS * width(); }
  int64_t queries_of_item() const { return std::max<int64_t>(1, ROWS / num_groups); }
  int64_t rows() const { return (queries_of_item() * num_groups + BLOCK - 1) / BLOCK * BLOCK; }
};

// One tile of one (s, h). keys [D / 2][KEYS][2], values [KEYS / 2][D][2]; zeros behind the end.
void pack(const Job& job, int64_t seq, int64_t head, int64_t tile, Half* keys, Half* values) {
  const int64_t width = job.width(), dim = job.head_dim;
  const int64_t count = std::min<int64_t>(KEYS, job.num_keys - tile * KEYS);
  if (count < KEYS || dim < width) {
    std::fill(keys, keys + job.tile_size(), Half(0));
    std::fill(values, values + job.tile_size(), Half(0));
  }
  for (int64_t j = 0; j < count; j++) {
    const int64_t key = tile * KEYS + j;
    const Half* k = job.k.at + seq * job.k.s + head * job.k.h + key * job.k.row;
    const Half* v = job.v.at + seq * job.v.s + head * job.v.h + key * job.v.row;
    for (int64_t d = 0; d + 1 < dim; d += 2) {
      std::memcpy(keys + (d / 2 * KEYS + j) * 2, k + d, 2 * sizeof(Half));
    }
    if (dim % 2) keys[(dim / 2 * KEYS + j) * 2] = k[dim - 1];
    Half* to = values + j / 2 * width * 2 + j % 2;
    for (int64_t d = 0; d < dim; d++) to[d * 2] = v[d];
  }
}

inline __m512bh line(const Half* at) { return (__m512bh)_mm512_loadu_si512(at); }

inline __m512bh pair_of(const Half* at) {
  int both;
  std::memcpy(&both, at, sizeof(both));
  return (__m512bh)_mm512_set1_epi32(both);
}

// BLOCK rows by KEYS keys: scores[i][j] = q_i . k_j
void multiply_keys(const Half* q, const Half* keys, int64_t width, float* scores) {
  __m512 sums[BLOCK][4];
  for (auto& of_row : sums)
    for (auto& sum : of_row) sum = _mm512_setzero_ps();
  for (int64_t d = 0; d < width; d += 2) {
    __m512bh k[4];
    for (int j = 0; j < 4; j++) k[j] = line(keys + (d / 2 * KEYS + j * 16) * 2);
    for (int i = 0; i < BLOCK; i++) {
      const __m512bh both = pair_of(q + i * width + d);
      for (int j = 0; j < 4; j++) sums[i][j] = _mm512_dpbf16_ps(sums[i][j], k[j], both);
    }
  }
  for (int i = 0; i < BLOCK; i++)
    for (int j = 0; j < 4; j++) _mm512_storeu_ps(scores + i * KEYS + j * 16, sums[i][j]);
}

// BLOCK rows by 16 * columns features: sums[i] = sums[i] * factor[i] + sum_j weights[i][j] v_j
template <int columns>
void multiply_values(const Half* weights, const Half* values, int64_t width, const float* factors,
                     float* to) {
  __m512 sums[BLOCK][columns];
  for (int i = 0; i < BLOCK; i++) {
    for (int c = 0; c < columns; c++) {
      sums[i][c] = _mm512_mul_ps(_mm512_loadu_ps(to + i * width + c * 16),
                                 _mm512_set1_ps(factors[i]));
    }
  }
  for (int64_t j = 0; j < KEYS; j += 2) {
    __m512bh v[columns];
    for (int c = 0; c < columns; c++) v[c] = line(values + (j / 2 * width + c * 16) * 2);
    for (int i = 0; i < BLOCK; i++) {
      const __m512bh both = pair_of(weights + i * KEYS + j);
      for (int c = 0; c < columns; c++) sums[i][c] = _mm512_dpbf16_ps(sums[i][c], v[c], both);
    }
  }
  for (int i = 0; i < BLOCK; i++)
    for (int c = 0; c < columns; c++) _mm512_storeu_ps(to + i * width + c * 16, sums[i][c]);
}

// Turns `count` scores of a row into weights. Returns the factor of what was summed before.
float softmax(const float* scores, int64_t count, float scale, float* maximum, float* total,
              Half* weights) {
  if (count <= 0) {
    std::fill(weights, weights + KEYS, Half(0));
    return 1.f;
  }
  __m512 s[4], most = _mm512_set1_ps(NOTHING);
  for (int j = 0; j < 4; j++) {
    const int64_t left = count - j * 16;
    const __mmask16 seen = left >= 16 ? 0xffff : left <= 0 ? 0 : (1u << left) - 1;
    s[j] = _mm512_mask_mul_ps(_mm512_set1_ps(NOTHING), seen, _mm512_loadu_ps(scores + j * 16),
                              _mm512_set1_ps(scale));
    most = _mm512_max_ps(most, s[j]);
  }
  const float now = std::max(*maximum, _mm512_reduce_max_ps(most));
  const float factor = *maximum == now ? 1.f : std::exp(*maximum - now);
  __m512 added = _mm512_setzero_ps();
  for (int j = 0; j < 4; j++) {
    s[j] = (__m512)exp_of_negative((Floats)s[j] - now);
    added = _mm512_add_ps(added, s[j]);
  }
  for (int j = 0; j < 2; j++) {
    _mm512_storeu_si512(weights + j * 32, (__m512i)_mm512_cvtne2ps_pbh(s[2 * j + 1], s[2 * j]));
  }
  *total = *total * factor + _mm512_reduce_add_ps(added);
  *maximum = now;
  return factor;
}

// What one thread works in; all rows are there, those that have no query hold zeros.
struct Scratch {
  std::vector<Half> q, weights;
  std::vector<float> scores, sums, maxima, totals, factors;

  void clear(int64_t rows, int64_t width) {
    q.assign(rows * width, 0);
    weights.assign(rows * KEYS, 0);
    scores.resize(rows * KEYS);
    sums.assign(rows * width, 0.f);
    maxima.assign(rows, NOTHING);
    totals.assign(rows, 0.f);
    factors.assign(rows, 1.f);
  }
};

// Queries [begin, end) of all heads of one (s, h); row r is query begin + r / G of head r % G.
void attend(const Job& job, int64_t seq, int64_t head, int64_t begin, int64_t end,
            const Half* keys, const Half* values) {
  static thread_local Scratch work;
  const int64_t width = job.width(), rows = job.rows(), groups = job.num_groups;
  const int64_t used = (end - begin) * groups, blocks = (used + BLOCK - 1) / BLOCK;
  const int64_t before = job.causal ? job.num_keys - job.num_queries : 0;
  const auto place = [&](const View& view, int64_t r) {
    return view.at + seq * view.s + head * view.h + r % groups * view.g +
           (begin + r / groups) * view.row;
  };
  work.clear(rows, width);
  for (int64_t r = 0; r < used; r++) {
    std::memcpy(&work.q[r * width], place(job.q, r), job.head_dim * sizeof(Half));
  }
  const int64_t num_keys = job.causal ? before + end : job.num_keys;
  for (int64_t first = 0, tile = 0; first < num_keys; first += KEYS, tile++) {
    const Half *k = keys + tile * job.tile_size(), *v = values + tile * job.tile_size();
    for (int64_t b = 0; b < blocks; b++) {
      const int64_t row = b * BLOCK, last = std::min(row + BLOCK, used) - 1;
      if (job.causal && before + begin + last / groups < first) continue;  // none sees this tile
      multiply_keys(&work.q[row * width], k, width, &work.scores[row * KEYS]);
      for (int64_t r = row; r <= last; r++) {
        const int64_t seen = job.causal ? before + begin + r / groups + 1 : job.num_keys;
        work.factors[r] = softmax(&work.scores[r * KEYS], std::min<int64_t>(KEYS, seen - first),
                                  job.scale, &work.maxima[r], &work.totals[r],
                                  &work.weights[r * KEYS]);
      }
      for (int64_t d = 0; d < width;) {
        const auto of = [&](auto columns) {
          multiply_values<columns.value>(&work.weights[row * KEYS], v + d * 2, width,
                                         &work.factors[row], &work.sums[row * width + d]);
          d += columns.value * 16;
        };
        switch (std::min<int64_t>(4, (width - d) / 16)) {
          case 1: of(std::integral_constant<int, 1>()); break;
          case 2: of(std::integral_constant<int, 2>()); break;
          case 3: of(std::integral_constant<int, 3>()); break;
          default: of(std::integral_constant<int, 4>());
        }
      }
    }
  }
  for (int64_t r = 0; r < used; r++) {
    Bfloat16* out = (Bfloat16*)place(job.out, r);
    for (int64_t d = 0; d < job.head_dim; d++) {
      from_float(work.sums[r * width + d] / work.totals[r], out + d);
    }
  }
}

}  // namespace

// strides: of q, k, v and out, each {s, h, g, row}
TRIPTYCH_EXPORT void triptych_flash_attention(const void* q, const void* k, const void* v,
                                              void* out, const int64_t* strides,
                                              const int64_t* shape, float scale, int64_t causal,
                                              int64_t num_threads) {
  const auto view = [&](const void* at, int i) {
    const int64_t* of = strides + i * 4;
    return View{static_cast<const Half*>(at), of[0], of[1], of[2], of[3]};
  };
  const Job job{view(q, 0), view(k, 1), view(v, 2), view(out, 3), shape[0], shape[1], shape[2],
                shape[3],   shape[4],   shape[5],   scale,        causal != 0};
  const int64_t pairs = job.num_seqs * job.num_heads, tiles = job.tiles();
  const int64_t size = tiles * job.tile_size();
  static thread_local std::vector<Half> packed;
  packed.resize(2 * pairs * size);
  Half *const keys = packed.data(), *const values = keys + pairs * size;
  const int threads = static_cast<int>(num_threads);
  parallel_for(threads, pairs * tiles, [&](std::ptrdiff_t i) {
    const int64_t of = i / tiles, tile = i % tiles, at = of * size + tile * job.tile_size();
    pack(job, of / job.num_heads, of % job.num_heads, tile, keys + at, values + at);
  });
  const int64_t step = job.queries_of_item(), items = (job.num_queries + step - 1) / step;
  parallel_for(threads, pairs * items, [&](std::ptrdiff_t i) {
    // the last queries see most keys: they are begun first, so that no thread ends late
    const int64_t of = i % pairs, item = items - 1 - i / pairs;
    attend(job, of / job.num_heads, of % job.num_heads, item * step,
           std::min((item + 1) * step, job.num_queries), keys + of * size, values + of * size);
  });
}

#endif
