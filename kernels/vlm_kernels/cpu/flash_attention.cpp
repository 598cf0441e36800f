// Attention of packed segments in bfloat16:
//
//   o_t = sum_j w_tj v_j / sum_j w_tj,   w_tj = exp(s_tj - m_t),   s_tj = scale * q_t . k_j
//
// over the keys [first_t, end_t) of t's segment: all of a picture's window, a prompt's past, as far
// as a sliding window reaches, up to the end of a span; with a soft cap c, s is c tanh(s / c).
//
//   q, o [T, H * G, D]     keys and values [K, H, D], or slots of KV blocks (flash_keys.h)
//
// The G query heads of a KV head share its keys. The scores are never whole in memory: keys pass by
// in tiles, and what was added up so far is brought to each new maximum m_t by a factor (flash
// attention).
//
//   pack     keys and values of each (segment, head), once, as vdpbf16ps reads them
//   attend   ROWS rows of one (segment, head), a row being a query of a head: per tile of KEYS keys
//            their scores, weights, sums; BLOCK rows at a time (flash_tile.h)
//
// Scores and sums are float32; weights are rounded to bfloat16 for their product with V, which is
// where transformers' `sdpa` rounds, while its `eager` rounds scores as well. A row's answer depends
// on its own keys alone: not on the rows beside it, the chunk that it is in, or the threads.
#include "flash_attention.h"

#ifdef TRIPTYCH_AVX512BF16

#include "flash_tile.h"

using namespace triptych;

namespace {

constexpr int ROWS = 8 * BLOCK;
constexpr int64_t MOST_PACKED = int64_t(32) << 20;  // elements, of segments that are packed at once
constexpr float LOG2_E = 1.44269504f;

// Sizes that follow from a head's.
struct Sizes {
  int64_t dim, width, tile;  // zeros fill the features up to the width

  explicit Sizes(int64_t head_dim)
      : dim(head_dim), width((head_dim + 15) / 16 * 16), tile(KEYS * width) {}
};

int64_t count_tiles(const Segments& step, int64_t segment) {
  return (step.num_keys[segment] + KEYS - 1) / KEYS;
}

// What one thread works in; all rows are there, those that have no query hold zeros.
struct Scratch {
  std::vector<Half> q, weights;
  std::vector<float> scores, sums, maxima, totals, factors;
  std::vector<int64_t> first, end;

  void clear(int64_t rows, int64_t width) {
    q.assign(rows * width, 0);
    weights.assign(rows * KEYS, 0);
    scores.resize(rows * KEYS);
    sums.assign(rows * width, 0.f);
    maxima.assign(rows, NOTHING);
    totals.assign(rows * 16, 0.f);
    factors.assign(rows, 1.f);
    first.assign(rows, 0);
    end.assign(rows, 0);
  }
};

// Adds one tile to the rows [row, row + BLOCK) of a scratch.
void attend_tile(Scratch& work, int64_t row, int64_t position, const Exponents& exponents,
                 const Half* keys, const Half* values, const Sizes& size) {
  multiply_keys(&work.q[row * size.width], keys, size.width, &work.scores[row * KEYS]);
  const RowsSoFar rows{&work.first[row], &work.end[row], &work.maxima[row], &work.totals[row * 16],
                       &work.factors[row]};
  softmax(&work.scores[row * KEYS], position, rows, exponents, &work.weights[row * KEYS]);
  for (int64_t d = 0; d < size.width;) {
    const auto of = [&](auto columns) {
      multiply_values<columns.value>(&work.weights[row * KEYS], values + d * 2, size.width,
                                     &work.factors[row], &work.sums[row * size.width + d]);
      d += columns.value * 16;
    };
    const int64_t left = (size.width - d) / 16, turns = (left + 3) / 4;
    switch ((left + turns - 1) / turns) {  // 5 are 3 and 2: one register alone would wait for itself
      case 1: of(std::integral_constant<int, 1>()); break;
      case 2: of(std::integral_constant<int, 2>()); break;
      case 3: of(std::integral_constant<int, 3>()); break;
      default: of(std::integral_constant<int, 4>());
    }
  }
}

// Queries [begin, end) of one segment and KV head; row r is query begin + r / G of head r % G.
void attend(const Segments& step, const Tensors& at, int64_t head, int64_t begin, int64_t end,
            const Half* keys, const Half* values) {
  static thread_local Scratch work;
  const Sizes size(step.head_dim);
  const int64_t groups = step.num_groups, used = (end - begin) * groups;
  const int64_t rows = (used + BLOCK - 1) / BLOCK * BLOCK;
  work.clear(rows, size.width);
  for (int64_t r = 0; r < used; r++) {
    const int64_t token = begin + r / groups;
    const Half* q = at.q + token * at.q_token + (head * groups + r % groups) * at.q_head;
    std::memcpy(&work.q[r * size.width], q, size.dim * sizeof(Half));
    work.first[r] = step.first[token];
    work.end[r] = step.end[token];
  }
  const int64_t least = *std::min_element(work.first.begin(), work.first.begin() + used);
  const int64_t most = *std::max_element(work.end.begin(), work.end.begin() + used);
  const Exponents exponents{at.scale * LOG2_E, at.softcap * LOG2_E};
  for (int64_t tile = least / KEYS; tile * KEYS < most; tile++) {
    for (int64_t row = 0; row < rows; row += BLOCK) {
      bool is_seen = false;
      for (int64_t r = row; r < row + BLOCK; r++) {
        is_seen |= work.first[r] < (tile + 1) * KEYS && work.end[r] > tile * KEYS;
      }
      if (!is_seen) continue;
      attend_tile(work, row, tile * KEYS, exponents, keys + tile * size.tile,
                  values + tile * size.tile, size);
    }
  }
  for (int64_t r = 0; r < used; r++) {
    const int64_t token = begin + r / groups, head_of = head * groups + r % groups;
    Bfloat16* out = at.out + (token * step.num_kv_heads * groups + head_of) * size.dim;
    const float total = _mm512_reduce_add_ps(_mm512_loadu_ps(&work.totals[r * 16]));
    for (int64_t d = 0; d < size.dim; d++) from_float(work.sums[r * size.width + d] / total, out + d);
  }
}

// What is to be packed and attended of the segments [begin, end).
void lay_out(const Segments& step, int64_t begin, int64_t end, FlashWork& work) {
  const Sizes size(step.head_dim);
  const int64_t queries = std::max<int64_t>(1, ROWS / step.num_groups);
  work.tiles.clear();
  work.items.clear();
  int64_t used = 0;
  for (int64_t s = begin; s < end; s++) {
    for (int64_t h = 0; h < step.num_kv_heads; h++) {
      const int64_t count = count_tiles(step, s);
      for (int64_t t = 0; t < count; t++) work.tiles.push_back({s, h, t, t + 1, used + t * size.tile});
      for (int64_t from = 0; from < step.num_queries[s]; from += queries) {
        work.items.push_back({s, h, from, std::min(from + queries, step.num_queries[s]), used});
      }
      used += count * size.tile;
    }
  }
  // the last queries see most keys: they are begun first, so that no thread ends late
  std::stable_sort(work.items.begin(), work.items.end(),
                   [](const auto& a, const auto& b) { return a.from > b.from; });
  work.packed.resize(2 * used);
}

// The segments [begin, end): packs all of their keys, then attends.
void run(const Segments& step, const Tensors& at, int64_t begin, int64_t end, FlashWork& work,
         Threads& threads) {
  const Sizes size(step.head_dim);
  threads.for_each(1, [&](std::ptrdiff_t) { lay_out(step, begin, end, work); });
  Half *const keys = work.packed.data(), *const values = keys + work.packed.size() / 2;
  threads.for_each(work.tiles.size(), [&](std::ptrdiff_t i) {
    const FlashWork::Piece& p = work.tiles[i];
    const TileRows rows(step, at, p.segment, p.head, p.from);
    pack(rows, size.dim, size.width, keys + p.packed, values + p.packed);
  });
  threads.for_each(work.items.size(), [&](std::ptrdiff_t i) {
    const FlashWork::Piece& p = work.items[i];
    const int64_t first = step.tokens[p.segment];
    attend(step, at, p.head, first + p.from, first + p.to, keys + p.packed, values + p.packed);
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
    run(step, tensors, begin, end, work, threads);
  }
}

TRIPTYCH_EXPORT void triptych_flash_attention(const Segments* step, const Tensors* tensors) {
  static thread_local FlashWork work;
  Threads threads(static_cast<int>(step->num_threads));
  attend_segments(*step, *tensors, work, threads);
}

#endif
