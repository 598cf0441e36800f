// Work in threads, on the OpenMP runtime that torch runs on.
//
// A second runtime would bring a second set of threads, and the two would take the cores from each
// other. So nothing here is compiled with -fopenmp: native.py hands over the entry points of the
// runtime that is in the process already. Without one, the calling thread does all the work.
#pragma once

#include <atomic>
#include <cstddef>

namespace triptych {

// Runs body(data, thread, num_threads) on up to num_threads threads, the caller among them.
void run_team(int num_threads, void (*body)(void*, int, int), void* data);

// body(thread, num_threads) on each thread.
template <class Body>
void on_threads(int num_threads, Body&& body) {
  run_team(
      num_threads,
      [](void* data, int thread, int count) { (*static_cast<Body*>(data))(thread, count); }, &body);
}

// body(i) for each i below count; whoever is free takes the next.
template <class Body>
void parallel_for(int num_threads, std::ptrdiff_t count, Body&& body) {
  if (num_threads > count) num_threads = static_cast<int>(count);
  std::atomic<std::ptrdiff_t> next{0};
  on_threads(num_threads, [&](int, int) {
    for (std::ptrdiff_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) body(i);
  });
}

}  // namespace triptych

#define TRIPTYCH_EXPORT extern "C" __attribute__((visibility("default")))
