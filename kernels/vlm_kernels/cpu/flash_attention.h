// Attention of packed segments (flash_attention.cpp).
#pragma once

#ifdef TRIPTYCH_AVX512BF16

#include <vector>

#include "flash_keys.h"
#include "lines.h"
#include "threads.h"

namespace triptych {

// What is packed and attended at once; the memory is kept from layer to layer.
struct FlashWork {
  struct Piece {
    int64_t segment, head, from, to, packed;  // a tile, or queries
  };
  std::vector<Piece> whole, tiles, items;  // heads of one thread each; tiles and queries of others
  Lines<Half> packed;                      // of these
};

void attend_segments(const Segments& step, const Tensors& tensors, FlashWork& work,
                     Threads& threads);

}  // namespace triptych

#endif
