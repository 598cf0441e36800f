// The OpenMP runtime of this process, called through the entry points of GNU's, which LLVM's and
// Intel's have too.
#include "threads.h"

#include <sched.h>

namespace {

constexpr int SPINS = 4000;  // some 50 us: the others are about to arrive, unless somebody has their core

void (*parallel)(void (*)(void*), void*, unsigned, unsigned) = nullptr;
int (*thread_number)() = nullptr;
int (*team_size)() = nullptr;

struct Region {
  void (*body)(void*, int, int);
  void* data;
};

}  // namespace

void triptych::run_team(int num_threads, void (*body)(void*, int, int), void* data) {
  if (num_threads <= 1 || parallel == nullptr) return body(data, 0, 1);
  Region region{body, data};
  parallel(
      [](void* given) {
        const Region* region = static_cast<const Region*>(given);
        region->body(region->data, thread_number(), team_size());
      },
      &region, static_cast<unsigned>(num_threads), 0);
}

void triptych::Team::await_end(uint32_t ended) {
  for (int spins = 0; turn.load(std::memory_order_acquire) == ended; ++spins) {
    if (spins < SPINS) {
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
    } else {
      sched_yield();
    }
  }
}

TRIPTYCH_EXPORT void triptych_use_openmp(void* gomp_parallel, void* get_thread_num,
                                         void* get_num_threads) {
  thread_number = reinterpret_cast<int (*)()>(get_thread_num);
  team_size = reinterpret_cast<int (*)()>(get_num_threads);
  parallel = reinterpret_cast<void (*)(void (*)(void*), void*, unsigned, unsigned)>(gomp_parallel);
}
