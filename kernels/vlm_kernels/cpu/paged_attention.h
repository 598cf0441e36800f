// Attention of decoding rows over KV blocks (paged_attention.cpp).
#pragma once

#include <atomic>
#include <vector>

#include "paged_rows.h"
#include "threads.h"

namespace triptych {

// What one thread takes, how much is left of each (row, head), and what parts add up to; laid out
// once for a step, before threads begin, and left for the next layer as it was found.
struct DecodeWork {
  struct Part {
    int64_t row, part, num_parts;
  };
  std::vector<Part> parts;
  std::vector<std::atomic<int>> left;
  std::vector<float> sums;

  void lay_out(const Step& step);
};

void attend_decode(const Step& step, const Layer& layer, DecodeWork& work, Threads& threads);

}  // namespace triptych
