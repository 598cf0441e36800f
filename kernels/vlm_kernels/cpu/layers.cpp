// Layers in one call, on threads that stay together. All of a decoder's, and the head:
//
//   x ─▶ norm ─▶ q, k, v ─▶ (norms) rope, store ─▶ attention over KV blocks ─▶ o ─▶ (norm) + x
//   x ─▶ norm ─▶ act(gate) * up ─▶ down ─▶ (norm) + x                      (...) of Gemma 3 alone
//   x of some tokens ─▶ norm ─▶ logits
//
// where the last layer computes what is behind attention for those tokens alone; or some of a vision
// tower's, which have no cache:
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
#include "layers.h"
#include "linear.h"
#include "linear_rows.h"
#include "norm.h"
#include "paged_attention.h"
#include "rope.h"
#include "store_kv.h"

using namespace triptych;

namespace {

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
      : in_(in), kinds_(kinds), memory_(memory), threads_(threads), num_rows_(in.num_tokens),
        x_(static_cast<uint16_t*>(in.x)), narrow_(memory.narrow.data()), wide_(memory.wide.data()) {}

  void run(const Weights& w, int64_t layer) {
    place(w, layer);
    attend(w, layer);
    transform(w);
  }

  // The last layer and the head, for the tokens whose logits are wanted.
  void finish(const Weights& w, int64_t layer, const Output& out) {
    place(w, layer);
    if (out.num_rows == 0) return;
    attend(w, layer);
    keep(out);
    transform(w);
    for_tokens(in_.width, [&](int64_t begin, int64_t end) {
      normalise(out.norm, x_, in_.width, narrow_, in_.width, begin, end);
    });
    multiply(product(out.head, PLAIN, static_cast<uint16_t*>(out.logits)), out.head, narrow_, false);
  }

 private:
  template <class Body>
  void for_tokens(int64_t elements, Body&& body) {
    threads_.for_each_run(num_rows_, elements, body);
  }

  // q, k and v of all tokens.
  void place(const Weights& w, int64_t layer) {
    norm_all(w.attention_norm, w.qkv);
    multiply(product(w.qkv, PLAIN, wide_), w.qkv, narrow_, takes_tiles(w.qkv));
    place_heads(w, layer);
  }

  // What is behind attention.
  void transform(const Weights& w) {
    add(w.o, w.o_norm, narrow_, false, wide_);
    norm_all(w.mlp_norm, w.up);
    Job up = product(w.up, static_cast<Epilogue>(w.activated), wide_);
    up.y_is_tiled = takes_tiles(w.down);
    multiply(up, w.up, narrow_, takes_tiles(w.up));
    add(w.down, w.down_norm, wide_, up.y_is_tiled, narrow_);
  }

  // From here on there are these tokens alone: the first rows of x, and of attention's answers.
  void keep(const Output& out) {
    const int64_t heads = in_.num_heads * in_.head_dim, width = in_.width, both = heads + width;
    threads_.for_each_run(out.num_rows, both, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        std::copy_n(narrow_ + out.rows[i] * heads, heads, wide_ + i * both);
        std::copy_n(x_ + out.rows[i] * width, width, wide_ + i * both + heads);
      }
    });
    num_rows_ = out.num_rows;
    for_tokens(both, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        std::copy_n(wide_ + i * both, heads, narrow_ + i * heads);
        std::copy_n(wide_ + i * both + heads, width, x_ + i * width);
      }
    });
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

  // Whether all rows may lie tiled for this product; int8 makes codes of them first.
  bool takes_tiles(const Linear& w) const {
    return reads_tiles(num_rows_) && w.scales == nullptr && w.num_inputs % PANEL == 0;
  }

  // All rows by these weights.
  Job product(const Linear& w, Epilogue epilogue, uint16_t* y) const {
    const int64_t columns = is_gated(epilogue) ? w.num_outputs / 2 : w.num_outputs;
    Job job = job_of(w.bias, nullptr, columns, y, columns, int(num_rows_), int(w.num_outputs),
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
    linear_int8(job, x, k, k, {w.x_scale, w.x_zero}, memory_.codes, threads_);
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
    // the first row of a group reads the others, which another thread may rotate
    const bool store_later = in_.cache != nullptr && is_grouped(in_.cache_type);
    for_tokens(stride, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; w.q_norm.weight != nullptr && t < end; ++t) {
        normalise(w.q_norm, q + t * stride, dim, q + t * stride, dim, 0, heads);
        normalise(w.k_norm, k + t * stride, dim, k + t * stride, dim, 0, kv_heads);
      }
      if (kind.cos != nullptr) rope_tokens(rotation, begin, end);
      if (in_.cache != nullptr && !store_later) store_tokens(store, begin, end);
    });
    if (!store_later) return;
    for_tokens(stride, [&](int64_t begin, int64_t end) { store_tokens(store, begin, end); });
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
  int64_t num_rows_;  // at hand: all tokens, until some are kept
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
  if (out != nullptr) {
    wide = std::max(wide, heads + in.width);
    if (out->head.scales != nullptr) inputs = out->head.num_inputs;
  }
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
TRIPTYCH_EXPORT bool triptych_layers(const Input* in, const Weights* layers, int64_t num_layers,
                                     const Kind* kinds, int64_t num_kinds, const Output* out) try {
  static thread_local Memory memory;
  make_room(*in, layers, num_layers, kinds, num_kinds, out, memory);
  Memory& of_caller = memory;
  in_team(static_cast<int>(in->num_threads), [&](Threads& threads) {
    Layers all(*in, kinds, of_caller, threads);
    const int64_t last = num_layers - 1;
    for (int64_t i = 0; i < last; ++i) all.run(layers[i], i);
    if (out == nullptr) return all.run(layers[last], last);
    all.finish(layers[last], last, *out);
  });
  return true;
} catch (const std::bad_alloc&) {
  return false;
}

#endif
