// Copies memory and digests it on the way: each byte is read once, and what was written is what the
// digest is of, though others may write to the source meanwhile.
//
//   source ─▶ registers ─┬─▶ target, past the cache
//                        └─▶ a KiB on the stack ─▶ XXH3-128
//
// One core waits for memory most of the time. Four pages are fetched side by side, ahead of the copy:
// the processor itself follows each, and has more lines under way than from one. Stores past the cache
// spare it from reading the target's lines first, which is a third of all that would cross the bus.
#include <algorithm>

#include "threads.h"
#include "xxh3.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

using triptych::Xxh3;

constexpr int64_t LINE = 64, STEP = 1024, PAGE = 4096, NUM_PAGES = 4;
constexpr int64_t WINDOW = NUM_PAGES * PAGE;

// From the source to both of the others.
inline void copy_line(char* kept, char* to, const char* from) {
#if defined(__AVX512F__)
  const __m512i x = _mm512_loadu_si512(from);
  _mm512_storeu_si512(kept, x);
  _mm512_stream_si512(reinterpret_cast<__m512i*>(to), x);
#elif defined(__x86_64__)
  for (int i = 0; i < LINE; i += 16) {
    const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(kept + i), x);
    _mm_stream_si128(reinterpret_cast<__m128i*>(to + i), x);
  }
#else
  std::memcpy(kept, from, LINE);
  std::memcpy(to, kept, LINE);
#endif
}

// Fetch a sixteenth of the next window while a sixteenth of this one is copied.
inline void fetch_ahead(const char* from, int64_t at, int64_t size) {
  const int64_t begin = at % WINDOW / NUM_PAGES, next = at - at % WINDOW + WINDOW;
  for (int64_t line = begin; line < begin + STEP / NUM_PAGES; line += LINE) {
    for (int64_t page = next; page < next + WINDOW; page += PAGE) {
      if (page + line < size) __builtin_prefetch(from + page + line);
    }
  }
}

class CopyDigest {
 public:
  // Only digested.
  void add(const char* from, int64_t size) {
    for (int64_t at = 0; at < size; at += STEP) {
      const int64_t count = std::min(STEP, size - at);
      std::memcpy(room(), from + at, count);
      came(count);
    }
  }

  void copy(char* to, const char* from, int64_t size) {
    const int64_t odd = std::min<int64_t>(size, -reinterpret_cast<uintptr_t>(to) % LINE);
    copy_some(to, from, odd);  // what goes past the cache is whole lines
    to += odd, from += odd, size -= odd;
    int64_t at = 0;
    for (; at + STEP <= size; at += STEP) {
      fetch_ahead(from, at, size);
      for (int64_t i = 0; i < STEP; i += LINE) {
        copy_line(room() + i, to + at + i, from + at + i);
      }
      came(STEP);
    }
    copy_some(to + at, from + at, size - at);
  }

  void finish(unsigned char* digest) {
    digest_.finish(room() - Xxh3::STRIPE, total_, digest);
  }

 private:
  // At most a step.
  void copy_some(char* to, const char* from, int64_t size) {
    std::memcpy(room(), from, size);
    std::memcpy(to, room(), size);
    came(size);
  }

  // the last stripe that was digested | what came since, at least a byte | room for a step
  char* room() { return kept_ + Xxh3::STRIPE + waiting_; }

  void came(int64_t count) {
    total_ += count, waiting_ += count;
    const int64_t stripes = waiting_ > 0 ? (waiting_ - 1) / Xxh3::STRIPE : 0;
    digest_.add(kept_ + Xxh3::STRIPE, stripes);
    waiting_ -= stripes * Xxh3::STRIPE;
    std::memmove(kept_, kept_ + stripes * Xxh3::STRIPE, Xxh3::STRIPE + waiting_);
  }

  alignas(64) char kept_[2 * Xxh3::STRIPE + STEP] = {};
  int64_t waiting_ = 0;
  uint64_t total_ = 0;
  Xxh3 digest_;
};

}  // namespace

struct Move {
  char* to;
  const char* from;
  int64_t size;
};

// Makes all moves, which do not overlap. `digest` is XXH3-128 of the head and of all that was moved,
// in order, most significant byte first; together they have more than 240 bytes.
TRIPTYCH_EXPORT bool triptych_copy_digest(const Move* moves, int64_t num_moves, const char* head,
                                          int64_t head_bytes, unsigned char* digest) {
  CopyDigest copied;
  copied.add(head, head_bytes);
  for (int64_t i = 0; i < num_moves; ++i) copied.copy(moves[i].to, moves[i].from, moves[i].size);
#if defined(__x86_64__)
  _mm_sfence();  // whoever is told of the copy finds it
#endif
  copied.finish(digest);
  return true;
}
