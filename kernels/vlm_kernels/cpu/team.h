// Threads that the parts of a kernel run on, kept between kernels.
//
//     run(num_threads, num_items, work)      work(i) once for each i, on any thread, in any order
//
// A decode step is hundreds of kernels of some ten microseconds: a helper that has just worked spins
// for the next kernel before it sleeps, because waking it costs as much as the kernel. Items are
// taken one by one, so that a thread that the system holds up leaves its share to the others; what an
// item computes must not depend on who computes it.
//
// One kernel at a time has the helpers. Another that comes meanwhile runs on its caller alone.

#pragma once

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <thread>

namespace triptych {

class Team {
 public:
  // Never destroyed: helpers may sleep in it while the process ends.
  static Team& shared() {
    static Team* team = new Team;
    return *team;
  }

  template <typename Work>
  void run(int num_threads, int num_items, const Work& work) {
    const int num_helpers = std::min({num_threads - 1, num_items - 1, kMostHelpers});
    std::unique_lock<std::mutex> lock(busy_, std::defer_lock);
    if (num_helpers < 1 || !lock.try_lock()) {
      for (int i = 0; i < num_items; ++i) work(i);
      return;
    }
    start_helpers(num_helpers);
    work_ = &work;
    call_ = [](const void* closure, int i) { (*static_cast<const Work*>(closure))(i); };
    num_items_ = num_items;
    next_.store(0, std::memory_order_relaxed);
    working_.store(num_helpers_, std::memory_order_relaxed);
    turn_.fetch_add(1, std::memory_order_release);
    if (sleeping_.load(std::memory_order_seq_cst) > 0) turn_.notify_all();
    take_items();
    while (working_.load(std::memory_order_acquire) > 0) pause();
  }

 private:
  static constexpr int kMostHelpers = 255;
  static constexpr int kSpins = 20'000;  // some 100 microseconds

  static void pause() { __builtin_ia32_pause(); }

  void take_items() {
    for (int i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < num_items_;) call_(work_, i);
  }

  // Also after a fork, which copies everything but threads.
  void start_helpers(int wanted) {
    if (owner_ != getpid()) {
      owner_ = getpid();
      num_helpers_ = 0;
      sleeping_.store(0);
    }
    for (; num_helpers_ < wanted; ++num_helpers_) {
      const unsigned seen = turn_.load(std::memory_order_relaxed);
      std::thread([this, seen] { help(seen); }).detach();
    }
  }

  void help(unsigned seen) {
    for (;;) {
      for (int spin = 0; turn_.load(std::memory_order_acquire) == seen && spin < kSpins; ++spin) {
        pause();
      }
      if (turn_.load(std::memory_order_acquire) == seen) {
        sleeping_.fetch_add(1, std::memory_order_seq_cst);
        turn_.wait(seen, std::memory_order_seq_cst);
        sleeping_.fetch_sub(1, std::memory_order_seq_cst);
      }
      ++seen;
      take_items();
      working_.fetch_sub(1, std::memory_order_release);
    }
  }

  std::mutex busy_;
  pid_t owner_ = getpid();
  int num_helpers_ = 0;
  const void* work_ = nullptr;
  void (*call_)(const void*, int) = nullptr;
  int num_items_ = 0;
  alignas(64) std::atomic<unsigned> turn_{0};
  alignas(64) std::atomic<int> next_{0};
  alignas(64) std::atomic<int> working_{0};
  alignas(64) std::atomic<int> sleeping_{0};
};

}  // namespace triptych
