// What edits of logits ask for, as sampling_edits.py lays it out, and the memory that one thread works in.
#pragma once

#include <cstdint>
#include <vector>

#include "vectors.h"

namespace triptych {

// Ranges of the arrays of all edits.
struct Edit {
  int64_t biases, biases_end;
  int64_t tokens, answer, tokens_end;  // the prompt, then the answer
  double frequency, presence;
  double repetition;
};

struct EditedTokens {
  const Edit* edits;
  const int32_t* token_ids;
  const int64_t* bias_ids;
  const float* bias_values;
};

// A row is padded with minus infinity to whole vectors.
struct Scratch {
  std::vector<float> logits, weights;
  std::vector<double> block_sums;
  std::vector<uint64_t> keys;
  std::vector<float> before;    // logits ahead of a repetition penalty
  std::vector<int32_t> counts;  // of each token; 0 between rows
};

constexpr int HALF = WIDTH / 2;
constexpr int64_t BLOCK = 512;  // weights that are summed as one

typedef float HalfFloats __attribute__((vector_size(4 * HALF)));
typedef double Doubles __attribute__((vector_size(8 * HALF)));

inline int64_t padded(int64_t size) { return (size + WIDTH - 1) / WIDTH * WIDTH; }

// Bit i is set where x[i] > than.
inline uint32_t lanes_above(Floats x, float than) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(than), _CMP_GT_OQ);
#elif defined(__AVX2__)
  return _mm256_movemask_ps(_mm256_cmp_ps((__m256)x, _mm256_set1_ps(than), _CMP_GT_OQ));
#else
  uint32_t bits = 0;
  for (int lane = 0; lane < WIDTH; lane++) bits |= uint32_t(x[lane] > than) << lane;
  return bits;
#endif
}

// Changes the logits of a row as its edit says (sampling_edits.cpp).
void edit_logits(const EditedTokens& given, const Edit& edit, int64_t vocabulary, Scratch& scratch);

}  // namespace triptych
