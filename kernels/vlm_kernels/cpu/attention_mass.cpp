// The attention that the tokens of one sequence receive from its last rows, over all heads:
//
//   a_j = sum_h sum_t w_tj / sum_k w_tk,   w_tj = exp(s_tj - max_k s_tk),   s_tj = scale q_t . k_j
//
// over the positions j <= n - T + t that row t sees.
//
//   q [T, H * G, D] by strides      keys of one layer in the blocks of the sequence, n positions
//
//   receive   one query head: HEADS rows at a time, their scores with all keys, weights in their
//             place, sums by key
//   add       what the heads received, in their order
//
// Products and sums are those of paged_products.h and paged_dots.h: sums are float32, and the result
// is the same on any number of threads.
#include <vector>

#include "lines.h"
#include "paged_dots.h"
#include "paged_tile.h"
#include "threads.h"

using namespace triptych;

namespace {

// One thread's view: what it computes with.
template <class Q, class Products>
class Observer {
  using KV = typename Products::KV;

 public:
  Observer(const Step& step, const Layer& layer, int64_t num_rows, float* parts, int64_t stride)
      : step_(step), layer_(layer), num_rows_(num_rows), parts_(parts), stride_(stride) {}

  void receive(int64_t head) {
    scores_.resize(HEADS * stride_);
    q_.assign(HEADS * padded(step_.head_dim), typename Products::Query(0));
    const Rows<KV> keys(step_, 0, head / step_.num_groups, layer_.layer);
    float* const sums = parts_ + head * stride_;
    std::fill_n(sums, stride_, 0.f);
    for (int64_t row = 0; row < num_rows_; row += HEADS) {
      const int64_t count = std::min<int64_t>(HEADS, num_rows_ - row);
      for (int64_t i = 0; i < count; i++) prepare(head, row + i, i);
      score(keys, seen_by(row + count - 1));
      for (int64_t i = 0; i < count; i++) shares_[i] = weigh(&scores_[i * stride_], seen_by(row + i));
      for (int64_t j = 0; j < stride_; j += WIDTH) {
        Floats received = load(sums + j);
        for (int64_t i = 0; i < count; i++) received += load(&scores_[i * stride_ + j]) * shares_[i];
        store(sums + j, received);
      }
    }
  }

 private:
  int64_t seen_by(int64_t row) const { return step_.num_kv[0] - num_rows_ + row + 1; }

  void prepare(int64_t head, int64_t row, int64_t i) {
    const Q* from = static_cast<const Q*>(layer_.q) + row * layer_.token_stride +
                    head * layer_.head_stride;
    lacks_[i] = layer_.scale *
                Products::prepare(from, step_.head_dim, q_.data() + i * padded(step_.head_dim));
  }

  // The scores of HEADS rows with the positions [0, end).
  void score(const Rows<KV>& keys, int64_t end) {
    Tile<KV> tile;
    alignas(64) float scores[HEADS][TILE];
    for (int64_t at = 0; at < end; at += TILE) {
      keys.find(at, std::min(at + TILE, end), &tile);
      for (int i = 0; i < tile.count; i += 4) {
        Products::template scores<HEADS>(q_.data(), tile.keys + i, tile.keys + i, step_.head_dim,
                                         reinterpret_cast<float(*)[TILE]>(&scores[0][i]));
      }
      for (int h = 0; h < HEADS; h++) {
        for (int i = 0; i < tile.count; i++) {
          float s = scores[h][i] * lacks_[h];
          if constexpr (HAS_SCALES<KV>) s *= tile.key_scales[i];
          scores_[h * stride_ + at + i] = s;
        }
      }
    }
  }

  // Turns a row's scores into weights, those behind `seen` into 0; returns 1 / their sum.
  float weigh(float* row, int64_t seen) const {
    std::fill(row + seen, row + stride_, NOTHING);
    Floats most = load(row);
    for (int64_t j = WIDTH; j < stride_; j += WIDTH) {
      const Floats x = load(row + j);
      most = x > most ? x : most;
    }
    const Floats top = broadcast(largest(most));
    Floats total = {};
    for (int64_t j = 0; j < stride_; j += WIDTH) {
      const Floats weight = exp_of_negative(load(row + j) - top);
      store(row + j, weight);
      total += weight;
    }
    return 1.f / sum(total);
  }

  const Step& step_;
  const Layer& layer_;
  int64_t num_rows_;
  float* parts_;
  int64_t stride_;
  float lacks_[HEADS] = {}, shares_[HEADS] = {};
  Lines<typename Products::Query> q_;
  Lines<float> scores_;
};

template <class Q, class Products>
void run(const Step& step, const Layer& layer, int64_t num_rows) {
  const int64_t num_kv = step.num_kv[0], num_heads = step.num_kv_heads * step.num_groups;
  const int64_t stride = (num_kv + TILE - 1) / TILE * TILE;
  Lines<float> parts(num_heads * stride);
  Observer<Q, Products> all(step, layer, num_rows, parts.data(), stride);
  parallel_for(static_cast<int>(step.num_threads), num_heads,
               [observer = all](std::ptrdiff_t head) mutable { observer.receive(head); });
  float* const out = static_cast<float*>(layer.out);
  std::fill_n(out, num_kv, 0.f);
  for (int64_t head = 0; head < num_heads; head++) {
    for (int64_t j = 0; j < num_kv; j++) out[j] += parts[head * stride + j];
  }
}

template <class Q>
void run_for(const Step& step, const Layer& layer, int64_t num_rows) {
  switch (step.kv_type) {
    case KV_FLOAT: return run<Q, FloatProducts<float>>(step, layer, num_rows);
    case KV_BFLOAT16: return run<Q, OfBfloat16<Q>>(step, layer, num_rows);
    default: return run<Q, OfInt8>(step, layer, num_rows);
  }
}

}  // namespace

// Writes a_j of all positions of the step's one row: out [n] float32. q has `num_rows` rows.
TRIPTYCH_EXPORT bool triptych_attention_mass(const Step* step, const void* q, int64_t token_stride,
                                             int64_t head_stride, int64_t num_rows, float* out,
                                             int64_t layer, float scale) try {
  const Layer of{q, token_stride, head_stride, out, layer, scale, 0.f};
  if (step->q_is_bf16) {
    run_for<Bfloat16>(*step, of, num_rows);
  } else {
    run_for<float>(*step, of, num_rows);
  }
  return true;
} catch (const std::bad_alloc&) {
  return false;
}
