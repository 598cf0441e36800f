// The OpenMP runtime of this process, called through the entry points of GNU's, which LLVM's and
// Intel's have too.
#include "threads.h"

#include <climits>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <sched.h>
#endif

namespace {

// Some 20 us: the others are about to arrive, or somebody else has their core. Whoever sleeps then
// leaves them his own.
constexpr int SPINS = 1000;

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
  for (int spins = 0; spins < SPINS; ++spins) {
    if (turn.load(std::memory_order_acquire) != ended) return;
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
  asleep.fetch_add(1);
  while (turn.load() == ended) {
#if defined(__linux__)
    syscall(SYS_futex, &turn, FUTEX_WAIT_PRIVATE, ended, nullptr, nullptr, 0);
#else
    sched_yield();
#endif
  }
  asleep.fetch_sub(1);
}

void triptych::Team::end(uint32_t ended) {
  next.store(0, std::memory_order_relaxed);
  arrived.store(0, std::memory_order_relaxed);
  turn.store(ended + 1);
#if defined(__linux__)
  if (asleep.load() > 0) syscall(SYS_futex, &turn, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
#endif
}

TRIPTYCH_EXPORT void triptych_use_openmp(void* gomp_parallel, void* get_thread_num,
                                         void* get_num_threads) {
  thread_number = reinterpret_cast<int (*)()>(get_thread_num);
  team_size = reinterpret_cast<int (*)()>(get_num_threads);
  parallel = reinterpret_cast<void (*)(void (*)(void*), void*, unsigned, unsigned)>(gomp_parallel);
}
