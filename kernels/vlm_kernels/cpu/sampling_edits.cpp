// Biases and penalties, as vlm_kernels/sampling_edits.py defines them:
//
//   x = l + b      y = x / r if x > 0 else x * r      z = y - float(n * f + p)
//
// In float32, rounded after each operation, but for the sum of both penalties.
#include "rounding.h"  // before all functions

#include "sampling.h"

using namespace triptych;

void triptych::edit_logits(const EditedTokens& given, const Edit& edit, int64_t vocabulary,
                           Scratch& scratch) {
  float* x = scratch.logits.data();
  const auto has = [vocabulary](int64_t id) { return id >= 0 && id < vocabulary; };
  for (int64_t i = edit.biases; i < edit.biases_end; i++) {
    if (has(given.bias_ids[i])) x[given.bias_ids[i]] += given.bias_values[i];
  }
  const int32_t* ids = given.token_ids;
  if (edit.repetition != 1) {
    // all are read before any is written: a token that comes twice is divided once
    const float penalty = float(edit.repetition);
    scratch.before.clear();
    for (int64_t i = edit.tokens; i < edit.tokens_end; i++) {
      scratch.before.push_back(has(ids[i]) ? x[ids[i]] : 0.f);
    }
    for (int64_t i = edit.tokens; i < edit.tokens_end; i++) {
      const float before = scratch.before[i - edit.tokens];
      if (has(ids[i])) x[ids[i]] = before > 0 ? before / penalty : before * penalty;
    }
  }
  if (edit.frequency == 0 && edit.presence == 0) return;
  scratch.counts.resize(vocabulary);
  for (int64_t i = edit.answer; i < edit.tokens_end; i++) {
    if (has(ids[i])) scratch.counts[ids[i]]++;
  }
  for (int64_t i = edit.answer; i < edit.tokens_end; i++) {
    if (!has(ids[i]) || scratch.counts[ids[i]] == 0) continue;
    x[ids[i]] -= float(scratch.counts[ids[i]] * edit.frequency + edit.presence);
    scratch.counts[ids[i]] = 0;
  }
}
