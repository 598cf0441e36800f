// The attention that each token receives from the queries of its segment, over all heads:
//
//   a_j = 1 / (H n) sum_h sum_i w_ij / sum_k w_ik,   w_ij = exp(s_ij - max_k s_ik),   s_ij = scale q_i . k_j
//
//   q, k [T, H, D] by strides      a [T] float32      segment c has the n tokens [cu_c, cu_(c + 1))
//
//   pack     keys of a (segment, head), as products read them: by each thread that receives for it
//   receive  queries of one (segment, head) in at most CHUNKS chunks; ROWS queries at a time:
//            their scores with all keys, weights in their place, sums by key
//   add      what chunks and heads received, in their order
//
// Products of bfloat16 pairs are exact, and sums are float32. What a token receives depends on its own
// segment alone: not on the segments beside it, or on the threads.
#include <algorithm>
#include <limits>
#include <vector>

#include "lines.h"
#include "threads.h"
#include "vectors.h"

#if defined(TRIPTYCH_AMX)
#include "flash_pack.h"
#include "tile_products.h"
#elif defined(TRIPTYCH_AVX512BF16)
#include "flash_tile.h"
#endif

using namespace triptych;

namespace {

constexpr int64_t CHUNKS = 8, LEAST_OF_CHUNK = 128;  // queries

int64_t in_whole(int64_t count, int64_t of) { return (count + of - 1) / of * of; }

struct Job {
  const void *q, *k;
  int64_t q_token, q_head, k_token, k_head;
  float scale;  // positive
  int64_t num_heads, head_dim;
};

// Queries [from, to) of the segment [begin, end), and where in `parts` its keys have their sums.
struct Chunk {
  int64_t begin, end, head, from, to, part;
};

// Products in float32, of any type.
template <class T>
struct FloatProducts {
  using Element = float;
  struct Scope {};
  static constexpr int ROWS = NUM_REGISTERS == 32 ? 6 : 4;
  static constexpr int VECTORS = NUM_REGISTERS == 32 ? 4 : 2, COLUMNS = VECTORS * WIDTH;

  static int64_t width_of(int64_t dim) { return dim; }

  // [D][COLUMNS] of up to COLUMNS keys; zeros behind the last.
  static void pack(const T* keys, int64_t stride, int64_t count, int64_t dim, float* to) {
    std::fill_n(to, dim * COLUMNS, 0.f);
    for (int64_t j = 0; j < count; j++)
      for (int64_t d = 0; d < dim; d++) to[d * COLUMNS + j] = to_float(keys[j * stride + d]);
  }

  static void load_row(const T* from, int64_t dim, float* to) {
    for (int64_t d = 0; d < dim; d++) to[d] = to_float(from[d]);
  }

  // ROWS queries by COLUMNS keys.
  static void multiply(const float* q, const float* keys, int64_t width, float* scores,
                       int64_t stride) {
    Floats sums[ROWS][VECTORS] = {};
    for (int64_t d = 0; d < width; d++) {
      Floats k[VECTORS];
      for (int v = 0; v < VECTORS; v++) k[v] = load(keys + d * COLUMNS + v * WIDTH);
      for (int i = 0; i < ROWS; i++)
        for (int v = 0; v < VECTORS; v++) sums[i][v] += k[v] * q[i * width + d];
    }
    for (int i = 0; i < ROWS; i++)
      for (int v = 0; v < VECTORS; v++) store(scores + i * stride + v * WIDTH, sums[i][v]);
  }
};

#ifdef TRIPTYCH_AVX512BF16

// Products of pairs of bfloat16, by tiles or registers.
struct HalfProducts {
  using Element = Half;
#ifdef TRIPTYCH_AMX
  using Scope = Tiles;
  static constexpr int ROWS = PRODUCT_ROWS, WHOLE = 32;
#else
  struct Scope {};
  static constexpr int ROWS = BLOCK, WHOLE = FEATURES;
#endif
  static constexpr int COLUMNS = KEYS;

  static int64_t width_of(int64_t dim) { return in_whole(dim, WHOLE); }

  static void pack(const Bfloat16* keys, int64_t stride, int64_t count, int64_t dim, Half* to) {
    const Half* rows[KEYS];
    for (int64_t j = 0; j < count; j++) rows[j] = reinterpret_cast<const Half*>(keys + j * stride);
    pack_keys(rows, count, dim, width_of(dim), to);
  }

  static void load_row(const Bfloat16* from, int64_t dim, Half* to) {
    std::memcpy(to, from, dim * sizeof(Half));
  }

  static void multiply(const Half* q, const Half* keys, int64_t width, float* scores, int64_t stride) {
#ifdef TRIPTYCH_AMX
    triptych::multiply({q, keys, scores, width * 2, KEYS * 4, stride * 4, KEYS / 16, width, false});
#else
    multiply_keys(q, keys, width, scores, stride);
#endif
  }
};

#else

using HalfProducts = FloatProducts<Bfloat16>;

#endif

// One thread's view: what it has packed, and what it computes with.
template <class T, class Products>
class Receiver {
 public:
  Receiver(const Job& job, float* parts) : job_(job), parts_(parts) {}

  void receive(const Chunk& chunk) {
    prepare(chunk);
    const T* q = static_cast<const T*>(job_.q) + chunk.head * job_.q_head;
    const typename Products::Scope scope{};
    (void)scope;
    for (int64_t row = chunk.from; row < chunk.to; row += Products::ROWS) {
      const int64_t count = std::min<int64_t>(Products::ROWS, chunk.to - row);
      for (int64_t i = 0; i < count; i++) {
        Products::load_row(q + (row + i) * job_.q_token, job_.head_dim, &q_[i * width_]);
      }
      for (int64_t j = 0; j < whole_; j += Products::COLUMNS) {
        Products::multiply(q_.data(), &keys_[j * width_], width_, &scores_[j], stride_);
      }
      for (int64_t i = 0; i < count; i++) shares_[i] = weigh(&scores_[i * stride_]);
      add(count);
    }
    std::copy_n(sums_.begin(), size_, parts_ + chunk.part);
  }

 private:
  void prepare(const Chunk& chunk) {
    const bool is_packed = chunk.begin == begin_ && chunk.head == head_;
    begin_ = chunk.begin, head_ = chunk.head, size_ = chunk.end - chunk.begin;
    width_ = Products::width_of(job_.head_dim);
    whole_ = in_whole(size_, Products::COLUMNS);
    stride_ = whole_ + 16;  // rows a page apart would take each other's place in the first cache
    q_.assign(Products::ROWS * width_, 0);
    scores_.resize(Products::ROWS * stride_);
    sums_.assign(whole_, 0.f);
    if (is_packed) return;
    keys_.resize(whole_ * width_);
    const T* k = static_cast<const T*>(job_.k) + begin_ * job_.k_token + head_ * job_.k_head;
    for (int64_t j = 0; j < size_; j += Products::COLUMNS) {
      Products::pack(k + j * job_.k_token, job_.k_token,
                     std::min<int64_t>(Products::COLUMNS, size_ - j), job_.head_dim,
                     &keys_[j * width_]);
    }
  }

  // Turns a row's scores into weights, those behind the last key into 0; returns 1 / their sum.
  float weigh(float* row) const {
    std::fill(row + size_, row + whole_, -std::numeric_limits<float>::infinity());
    Floats most = load(row);
    for (int64_t j = WIDTH; j < whole_; j += WIDTH) {
      const Floats x = load(row + j);
      most = x > most ? x : most;
    }
    const Floats scale = broadcast(job_.scale), top = broadcast(largest(most) * job_.scale);
    Floats total = {};
    for (int64_t j = 0; j < whole_; j += WIDTH) {
      const Floats weight = exp_of_negative(load(row + j) * scale - top);
      store(row + j, weight);
      total += weight;
    }
    return 1.f / sum(total);
  }

  void add(int64_t count) {
    for (int64_t j = 0; j < whole_; j += WIDTH) {
      Floats received = load(&sums_[j]);
      for (int64_t i = 0; i < count; i++) received += load(&scores_[i * stride_ + j]) * shares_[i];
      store(&sums_[j], received);
    }
  }

  const Job& job_;
  float* parts_;
  int64_t begin_ = -1, head_ = -1, size_ = 0, width_ = 0, whole_ = 0, stride_ = 0;
  float shares_[Products::ROWS] = {};  // 1 over the sum of each row's weights
  Lines<typename Products::Element> q_, keys_;
  Lines<float> scores_, sums_;
};

// The chunks of all segments and heads, those of one head one after another.
std::vector<Chunk> chunks_of(const int64_t* edges, int64_t num_segments, int64_t num_heads) {
  std::vector<Chunk> chunks;
  int64_t part = 0;
  for (int64_t c = 0; c < num_segments; c++) {
    const int64_t begin = edges[c], end = edges[c + 1], size = end - begin;
    const int64_t least = in_whole((size + CHUNKS - 1) / CHUNKS, LEAST_OF_CHUNK);
    for (int64_t head = 0; head < num_heads; head++) {
      for (int64_t from = begin; from < end; from += least, part += size) {
        chunks.push_back({begin, end, head, from, std::min(from + least, end), part});
      }
    }
  }
  return chunks;
}

template <class T, class Products>
void receive_all(const Job& job, const std::vector<Chunk>& chunks, float* parts, int num_threads) {
  Receiver<T, Products> all(job, parts);
  parallel_for(num_threads, chunks.size(), [receiver = all, &chunks](std::ptrdiff_t i) mutable {
    receiver.receive(chunks[i]);
  });
}

}  // namespace

// Writes a_j of all tokens in segments. `edges` rise from 0, and have one more than `num_segments`.
TRIPTYCH_EXPORT bool triptych_received_attention(
    const void* q, int64_t q_token, int64_t q_head, const void* k, int64_t k_token, int64_t k_head,
    const int64_t* edges, int64_t num_segments, int64_t num_heads, int64_t head_dim, float scale,
    int is_bf16, float* out, int num_threads) try {
  const Job job{q, k, q_token, q_head, k_token, k_head, scale, num_heads, head_dim};
  const std::vector<Chunk> chunks = chunks_of(edges, num_segments, num_heads);
  if (chunks.empty()) return true;
  Lines<float> parts(chunks.back().part + chunks.back().end - chunks.back().begin);
  if (is_bf16) {
    receive_all<Bfloat16, HalfProducts>(job, chunks, parts.data(), num_threads);
  } else {
    receive_all<float, FloatProducts<float>>(job, chunks, parts.data(), num_threads);
  }
  std::fill(out + edges[0], out + edges[num_segments], 0.f);
  for (const Chunk& chunk : chunks) {
    const int64_t size = chunk.end - chunk.begin;
    const float share = 1.f / (static_cast<float>(num_heads) * static_cast<float>(size));
    for (int64_t j = 0; j < size; j++) out[chunk.begin + j] += share * parts[chunk.part + j];
  }
  return true;
} catch (const std::bad_alloc&) {
  return false;
}
