// Work in threads, on the OpenMP runtime that torch runs on.
//
// A second runtime would bring a second set of threads, and the two would take the cores from each
// other. So nothing here is compiled with -fopenmp: native.py hands over the entry points of the
// runtime that is in the process already. Without one, the calling thread does all the work.
//
//   parallel_for(n, count, body)   one loop: n threads are woken for it
//   Threads(n).for_each(...)       likewise, for a kernel that is also part of a longer work
//   in_team(n, body)               many loops: n threads are woken once, each runs body(threads), and
//                                  they meet at the end of each loop
//
// If a piece of work finds no memory, its thread does no more of this loop, and a team none of the
// loops behind it, whose inputs may not be there. When all threads are back, the caller gets
// std::bad_alloc; the exported function returns false, and Python raises MemoryError (native.py). In
// a team, memory is taken inside loops alone: nobody waits for a member that left between two.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <new>

namespace triptych {

// Runs body(data, thread, num_threads) on up to num_threads threads, the caller among them.
void run_team(int num_threads, void (*body)(void*, int, int), void* data);

// body(thread, num_threads) on each thread. No exception crosses the runtime of the threads: it ends
// the process there.
template <class Body>
void on_threads(int num_threads, Body&& body) {
  struct Work {
    Body& body;
    std::atomic<bool> failed{false};
  } work{body};
  run_team(
      num_threads,
      [](void* data, int thread, int count) {
        Work& work = *static_cast<Work*>(data);
        try {
          work.body(thread, count);
        } catch (...) {  // only memory can be missing
          work.failed.store(true, std::memory_order_relaxed);
        }
      },
      &work);
  if (work.failed.load()) throw std::bad_alloc();
}

// body(i) for each i below count; whoever is free takes the next. Each thread has a copy of `body`.
template <class Body>
void parallel_for(int num_threads, std::ptrdiff_t count, const Body& of_all) {
  if (num_threads > count) num_threads = static_cast<int>(count);
  std::atomic<std::ptrdiff_t> next{0};
  on_threads(num_threads, [&](int, int) {
    Body body = of_all;
    for (std::ptrdiff_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) body(i);
  });
}

// What the members of a team share; each on a line of its own.
struct Team {
  alignas(64) std::atomic<std::ptrdiff_t> next{0};  // item of this loop
  alignas(64) std::atomic<int> arrived{0};          // at its end
  alignas(64) std::atomic<uint32_t> turn{0};        // loops that have ended
  std::atomic<int> asleep{0};                       // members that wait for the next turn
  std::atomic<bool> failed{false};                  // a piece of work found no memory

  // Returns when `turn` is no longer this one.
  void await_end(uint32_t turn);

  // The last to arrive lets the others go on.
  void end(uint32_t turn);
};

// Who does the items of a loop.
class Threads {
 public:
  // Up to `count`, woken for each loop.
  explicit Threads(int count) : count_(count) {}

  // A member of a team: all of them come to the same loops in the same order.
  Threads(Team* team, int count) : count_(count), team_(team) {}

  int count() const { return count_; }

  // body(i) for each i below count, all of them done on return. Each thread has a copy of `body`.
  template <class Body>
  void for_each(std::ptrdiff_t count, const Body& of_all) {
    if (team_ == nullptr) return parallel_for(count_, count, of_all);
    const uint32_t turn = team_->turn.load(std::memory_order_acquire);
    if (!team_->failed.load(std::memory_order_relaxed)) take(count, of_all);
    if (team_->arrived.fetch_add(1, std::memory_order_acq_rel) + 1 < count_) {
      return team_->await_end(turn);
    }
    team_->end(turn);
  }

  // body(begin, end) for runs of `count` rows; a row is `elements` of simple work.
  template <class Body>
  void for_each_run(int64_t count, int64_t elements, Body&& body) {
    const int64_t worth = team_ ? 1 << 10 : 1 << 15;  // elements that pay for another thread
    const int64_t least = worth / std::max<int64_t>(elements, 1);
    const int64_t rows = std::max({int64_t(1), least, count / (8 * count_)});  // some for each thread
    for_each((count + rows - 1) / rows, [&](std::ptrdiff_t i) {
      body(i * rows, std::min(count, (i + 1) * rows));
    });
  }

 private:
  // A member's share of a loop.
  template <class Body>
  void take(std::ptrdiff_t count, const Body& of_all) {
    try {
      Body body = of_all;
      for (std::ptrdiff_t i; (i = team_->next.fetch_add(1, std::memory_order_relaxed)) < count;) {
        body(i);
      }
    } catch (...) {  // only memory can be missing
      team_->failed.store(true, std::memory_order_relaxed);
    }
  }

  int count_;
  Team* team_ = nullptr;
};

// body(threads) on each of up to num_threads threads, which stay together until all have returned.
template <class Body>
void in_team(int num_threads, Body&& body) {
  Team team;
  on_threads(num_threads, [&](int, int count) {
    Threads threads(&team, count);
    body(threads);
  });
  if (team.failed.load()) throw std::bad_alloc();
}

}  // namespace triptych

// A kernel that Python calls returns false if it did not get the memory that it needs.
#define TRIPTYCH_EXPORT extern "C" __attribute__((visibility("default")))
