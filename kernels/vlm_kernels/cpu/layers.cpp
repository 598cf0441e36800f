// Layers in one call, on threads that stay together. All of a decoder's, and the head:
//
//   x ─▶ norm ─▶ q, k, v ─▶ (norms) rope, store ─▶ attention over KV blocks ─▶ o ─▶ (norm) + x
//   x ─▶ norm ─▶ act(gate) * up ─▶ down ─▶ (norm) + x                      (...) of Gemma 3 alone
//   x of some tokens ─▶ norm ─▶ logits
//
// or some of a vision tower's, which have no cache:
//
//   x ─▶ norm ─▶ q, k, v ─▶ (rope) ─▶ attention inside segments ─▶ o ─▶ + x
//   x ─▶ norm ─▶ act(up), or act(gate) * up ─▶ down ─▶ + x
//
// The kernels are those of their own files, in the same order and with the same rounding: what comes
// out is, bit for bit, what one call for each gives. What is saved is the waking of threads, some
// 200 times a step, and what Python does between two kernels: as much, for the few rows of a decode
// step, as half of its products.
//
// In between, two buffers hold everything:
//
//   narrow [T, max(D, heads)]          normed x, then answers of attention; normed x, then `down`
//   wide   [T, max(D, q + k + v, N)]   q, k and v, then `o`; then what `down` multiplies
//
// What a product multiplies lies there as it reads it, in tiles where it takes those (linear_rows.h),
// but for answers of attention.
#include "threads.h"

#ifdef TRIPTYCH_AVX512BF16

#include <algorithm>
#include <vector>

#include "bfloat16.h"
#include "flash_attention.h"
#include "linear.h"
#include "linear_rows.h"
#include "norm.h"
#include "paged_attention.h"
#include "rope.h"
#include "store_kv.h"

using namespace triptych;

namespace {

// The structures are those of layer_weights.py and native_layers.py.

// Packed weights of N outputs; without scales they are bfloat16. Of gated ones, N counts both.
struct Linear {
  const void* panels;
  const void* scales;
  const void* offsets;
  const void* bias;
  int64_t num_outputs, num_inputs;
};

struct Norm {
  const void* weight;  // null: there is none
  const void* bias;    // of a LayerNorm
  float eps;
  int32_t adds_one;
};

struct Weights {
  Linear qkv, o, up, down;
  Norm attention_norm, q_norm, k_norm, o_norm, mlp_norm, down_norm;
  int64_t kind, activated;  // which of the step's kinds; the epilogue of `up`
  float scale;
};

// What layers of one kind share: positions and what their tokens see. Any part may be null.
struct Kind {
  const void *cos, *sin;  // [T, D]
  const Step* rows;
  const Segments* chunks;
};

// One packed step. x [T, D] is replaced by what the last layer gives.
struct Input {
  void* x;
  void* cache;  // null: tokens see each other, in segments
  const int64_t* slots;
  int64_t num_tokens, width, num_heads, num_kv_heads, head_dim;
  int64_t num_layers, block_size, cache_type, has_bf16_tables, num_threads;
};

// What comes behind the layers: logits [R, V] of the tokens in `rows`.
struct Output {
  Norm norm;
  Linear head;
  const int64_t* rows;
  int64_t num_rows;
  void* logits;
};

// Memory of the thread that calls, kept from step to step.
struct Memory {
  Lines<uint16_t> narrow, wide;
  std::vector<DecodeWork> rows;  // of each kind
  FlashWork chunks;
  Codes codes;
};

// One member's view of the step.
class Layers {
 public:
  Layers(const Input& in, const Kind* kinds, Memory& memory, Threads& threads)
      : in_(in), kinds_(kinds), memory_(memory), threads_(threads),
        x_(static_cast<uint16_t*>(in.x)), narrow_(memory.narrow.data()), wide_(memory.wide.data()) {}

  void run(const Weights& w, int64_t layer) {
    norm_all(w.attention_norm, w.qkv);
    multiply(product(w.qkv, PLAIN, wide_), w.qkv, narrow_, takes_tiles(w.qkv));
    place_heads(w, layer);
    attend(w, layer);
    add(w.o, w.o_norm, narrow_, false, wide_);
    norm_all(w.mlp_norm, w.up);
    Job up = product(w.up, static_cast<Epilogue>(w.activated), wide_);
    up.y_is_tiled = takes_tiles(w.down);
    multiply(up, w.up, narrow_, takes_tiles(w.up));
    add(w.down, w.down_norm, wide_, up.y_is_tiled, narrow_);
  }

  void finish(const Output& out) {
    threads_.for_each_run(out.num_rows, in_.width, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        normalise(out.norm, x_ + out.rows[i] * in_.width, 0, narrow_ + i * in_.width, in_.width, 0, 1);
      }
    });
    Job logits = product(out.head, PLAIN, static_cast<uint16_t*>(out.logits));
    logits.m = static_cast<int>(out.num_rows);
    multiply(logits, out.head, narrow_, false);
  }

 private:
  template <class Body>
  void for_tokens(int64_t elements, Body&& body) {
    threads_.for_each_run(in_.num_tokens, elements, body);
  }

  // The norm of rows that lie `stride` apart, of `size` elements each.
  static void normalise(const Norm& norm, const uint16_t* x, int64_t stride, uint16_t* y,
                        int64_t size, int64_t begin, int64_t end) {
    norm_rows({x, stride, norm.weight, norm.bias, y, size, norm.eps, true, norm.adds_one != 0}, begin,
              end);
  }

  // Normed x, as the product that comes next reads it.
  void norm_all(const Norm& norm, const Linear& next) {
    const int64_t width = in_.width;
    for_tokens(width, [&](int64_t begin, int64_t end) {
      if (!takes_tiles(next)) return normalise(norm, x_, width, narrow_, width, begin, end);
      for (int64_t t = begin; t < end; ++t) {
        write_tiled(narrow_, t, width, [&](uint16_t* row) {
          normalise(norm, x_ + t * width, 0, row, width, 0, 1);
        });
      }
    });
  }

  // Whether all tokens may lie tiled for this product; int8 makes codes of them first.
  bool takes_tiles(const Linear& w) const {
    return reads_tiles(in_.num_tokens) && w.scales == nullptr && w.num_inputs % PANEL == 0;
  }

  // All tokens by these weights.
  Job product(const Linear& w, Epilogue epilogue, uint16_t* y) const {
    const int64_t columns = is_gated(epilogue) ? w.num_outputs / 2 : w.num_outputs;
    Job job = job_of(w.bias, nullptr, columns, y, columns, int(in_.num_tokens), int(w.num_outputs),
                     epilogue);
    job.w = static_cast<const uint8_t*>(w.panels);
    job.w_scale = static_cast<const float*>(w.scales);
    job.w_offset = static_cast<const int32_t*>(w.offsets);
    return job;
  }

  void multiply(Job job, const Linear& w, const uint16_t* x, bool x_is_tiled) {
    const int k = static_cast<int>(w.num_inputs);
    job.x_is_tiled = x_is_tiled;
    if (w.scales == nullptr) return linear_bf16(job, x, k, k, threads_);
    linear_int8(job, x, k, k, memory_.codes, threads_);
  }

  // x += product, which lies in `between` if a norm comes before the sum.
  void add(const Linear& w, const Norm& norm, const uint16_t* from, bool is_tiled,
           uint16_t* between) {
    if (norm.weight == nullptr) {
      Job job = product(w, RESIDUAL, x_);
      job.residual = x_;
      return multiply(job, w, from, is_tiled);
    }
    multiply(product(w, PLAIN, between), w, from, is_tiled);
    for_tokens(in_.width, [&](int64_t begin, int64_t end) {
      normalise(norm, between, in_.width, between, in_.width, begin, end);
      for (int64_t i = begin * in_.width; i < end * in_.width; ++i) {
        Bfloat16 sum;
        from_float(to_float(Bfloat16{x_[i]}) + to_float(Bfloat16{between[i]}), &sum);
        x_[i] = sum.bits;
      }
    });
  }

  // Norms and positions of q and k; k and v to their slots, if there are any.
  void place_heads(const Weights& w, int64_t layer) {
    const int64_t dim = in_.head_dim, heads = in_.num_heads, kv_heads = in_.num_kv_heads;
    const int64_t stride = (heads + 2 * kv_heads) * dim;
    uint16_t *const q = wide_, *const k = q + heads * dim, *const v = k + kv_heads * dim;
    const Kind& kind = kinds_[w.kind];
    const RopeJob rotation{q, stride, dim, kind.cos, kind.sin, heads + kv_heads, dim, true,
                           in_.has_bf16_tables != 0};
    const StoreJob store{{k, stride, dim}, {v, stride, dim}, true, in_.cache, in_.cache_type,
                         in_.slots, in_.num_layers, kv_heads, dim, in_.block_size, layer};
    for_tokens(stride, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; w.q_norm.weight != nullptr && t < end; ++t) {
        normalise(w.q_norm, q + t * stride, dim, q + t * stride, dim, 0, heads);
        normalise(w.k_norm, k + t * stride, dim, k + t * stride, dim, 0, kv_heads);
      }
      if (kind.cos != nullptr) rope_tokens(rotation, begin, end);
      if (in_.cache != nullptr) store_tokens(store, begin, end);
    });
  }

  void attend(const Weights& w, int64_t layer) {
    const Kind& kind = kinds_[w.kind];
    const int64_t dim = in_.head_dim, stride = (in_.num_heads + 2 * in_.num_kv_heads) * dim;
    if (kind.rows != nullptr) {
      attend_decode(*kind.rows, {wide_, stride, dim, narrow_, layer, w.scale, 0},
                    memory_.rows[w.kind], threads_);
    }
    if (kind.chunks != nullptr) {
      Tensors tensors{};
      tensors.q = wide_, tensors.q_token = stride, tensors.q_head = dim;
      tensors.k = in_.cache, tensors.layer = layer, tensors.scale = w.scale;
      if (in_.cache == nullptr) {
        const uint16_t* const k = wide_ + in_.num_heads * dim;
        tensors.k = k, tensors.k_token = stride, tensors.k_head = dim;
        tensors.v = k + in_.num_kv_heads * dim, tensors.v_token = stride, tensors.v_head = dim;
      }
      tensors.out = reinterpret_cast<Bfloat16*>(narrow_);
      attend_segments(*kind.chunks, tensors, memory_.chunks, threads_);
    }
  }

  const Input& in_;
  const Kind* kinds_;
  Memory& memory_;
  Threads& threads_;
  uint16_t *const x_, *const narrow_, *const wide_;
};

// Rows, of which there is room for whole quads.
void grow(Lines<uint16_t>& memory, int64_t num_rows, int64_t width) {
  const size_t size = in_quads(num_rows) * width;
  if (memory.size() < size) memory.resize(size);
}

// What a step needs at most, but for packed chunks: one member makes room for them, alone.
void make_room(const Input& in, const Weights* layers, int64_t num_layers, const Kind* kinds,
               int64_t num_kinds, const Output* out, Memory& memory) {
  const int64_t heads = in.num_heads * in.head_dim;
  int64_t wide = std::max(in.width, heads + 2 * in.num_kv_heads * in.head_dim), inputs = 0;
  if (out != nullptr && out->head.scales != nullptr) inputs = out->head.num_inputs;
  for (int64_t i = 0; i < num_layers; ++i) {
    const Weights& w = layers[i];
    wide = std::max(wide, w.down.num_inputs);
    for (const Linear* of : {&w.qkv, &w.o, &w.up, &w.down}) {
      if (of->scales != nullptr) inputs = std::max(inputs, of->num_inputs);
    }
  }
  grow(memory.narrow, in.num_tokens, std::max(in.width, heads));
  grow(memory.wide, in.num_tokens, wide);
  memory.codes.make_room(in.num_tokens, inputs);
  memory.rows.resize(std::max<size_t>(memory.rows.size(), num_kinds));
  for (int64_t i = 0; i < num_kinds; ++i) {
    if (kinds[i].rows != nullptr) memory.rows[i].lay_out(*kinds[i].rows);
  }
}

}  // namespace

// `out` is null where hidden states are what is wanted. The rows of `out` are no more than tokens.
TRIPTYCH_EXPORT void triptych_layers(const Input* in, const Weights* layers, int64_t num_layers,
                                     const Kind* kinds, int64_t num_kinds, const Output* out) {
  static thread_local Memory memory;
  make_room(*in, layers, num_layers, kinds, num_kinds, out, memory);
  Memory& of_caller = memory;
  in_team(static_cast<int>(in->num_threads), [&](Threads& threads) {
    Layers all(*in, kinds, of_caller, threads);
    for (int64_t i = 0; i < num_layers; ++i) all.run(layers[i], i);
    if (out != nullptr) all.finish(*out);
  });
}

#endif
