// The OpenMP runtime of this process, called through the entry points of GNU's, which LLVM's and
// Intel's have too.
#include "threads.h"

namespace {

void (*parallel)(void (*)(void*), void*, unsigned, unsigned) = nullptr;
int (*thread_number)() = nullptr;
int (*team_size)() = nullptr;

struct Team {
  void (*body)(void*, int, int);
  void* data;
};

}  // namespace

void triptych::run_team(int num_threads, void (*body)(void*, int, int), void* data) {
  if (num_threads <= 1 || parallel == nullptr) return body(data, 0, 1);
  Team team{body, data};
  parallel(
      [](void* given) {
        const Team* team = static_cast<const Team*>(given);
        team->body(team->data, thread_number(), team_size());
      },
      &team, static_cast<unsigned>(num_threads), 0);
}

TRIPTYCH_EXPORT void triptych_use_openmp(void* gomp_parallel, void* get_thread_num,
                                         void* get_num_threads) {
  thread_number = reinterpret_cast<int (*)()>(get_thread_num);
  team_size = reinterpret_cast<int (*)()>(get_num_threads);
  parallel = reinterpret_cast<void (*)(void (*)(void*), void*, unsigned, unsigned)>(gomp_parallel);
}
