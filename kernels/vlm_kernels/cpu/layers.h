// What Python says of layers and of one step: the structures of layer_weights.py and native_layers.py.
#pragma once

#include <cstdint>

#include "flash_attention.h"
#include "paged_attention.h"

namespace triptych {

// Packed weights of N outputs; without scales they are bfloat16. Of gated ones, N counts both.
struct Linear {
  const void* panels;
  const void* scales;
  const void* offsets;
  const void* bias;
  int64_t num_outputs, num_inputs;
  float x_scale;  // of int8 alone: the scale of calibrated inputs and the code of 0 (InputScale)
  int32_t x_zero;
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

// One packed step. x [T, D] is replaced by what the last layer gives, or where logits are wanted by
// what is of no use.
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

}  // namespace triptych
