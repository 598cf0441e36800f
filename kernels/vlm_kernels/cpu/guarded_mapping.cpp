// Mapped files that others may shrink: a page that its file has lost reads as zeros, and is told.
//
//   SIGBUS ─▶ no page, inside a mapping of ours? ── yes ─▶ mark it, put zeros there; the access goes on
//                                                └─ no ──▶ whoever handled the signal before
//
// Whoever used a mapping asks `is_whole` afterwards, and takes nothing that it gave where it is not.
// The handler reads a table and calls mmap: neither allocates or locks, in whichever thread it runs.
// Who installs a handler later than the first mapping is asked first.
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>

#include "threads.h"

namespace {

constexpr int MAX_MAPPINGS = 1024;

struct Mapping {
  std::atomic<bool> is_taken{false};
  std::atomic<bool> is_whole{true};
  std::atomic<char*> begin{nullptr};  // null: nothing is mapped
  std::atomic<int64_t> size{0};
};

Mapping mappings[MAX_MAPPINGS];
int64_t page_bytes;
struct sigaction before;

// Zeros from a page on to the end of its mapping: all of it is void now. False where `at` is of none.
bool put_zeros(char* at) {
  for (Mapping& mapping : mappings) {
    char* const begin = mapping.begin.load();
    const int64_t size = mapping.size.load();
    if (begin == nullptr || at < begin || at - begin >= size) continue;
    if (mapping.begin.load() != begin) continue;  // unmapped meanwhile: the size is of another one
    mapping.is_whole.store(false);
    const int64_t kept = (at - begin) / page_bytes * page_bytes;
    const int flags = MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    return mmap(begin + kept, size - kept, PROT_READ | PROT_WRITE, flags, -1, 0) != MAP_FAILED;
  }
  return false;
}

void on_bus_error(int number, siginfo_t* info, void* context) {
  const int error = errno;
  const bool is_ours = info->si_code == BUS_ADRERR && put_zeros(static_cast<char*>(info->si_addr));
  errno = error;
  if (is_ours) return;
  if (before.sa_flags & SA_SIGINFO) return before.sa_sigaction(number, info, context);
  const bool was_sent = info->si_code <= 0;
  if (before.sa_handler == SIG_IGN && was_sent) return;
  if (before.sa_handler != SIG_IGN && before.sa_handler != SIG_DFL) return before.sa_handler(number);
  sigaction(number, &before, nullptr);  // a fault comes again when we return
  if (was_sent) raise(number);
}

bool install() {
  page_bytes = sysconf(_SC_PAGESIZE);
  struct sigaction action {};
  action.sa_sigaction = on_bus_error;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  return sigaction(SIGBUS, nullptr, &before) == 0 && sigaction(SIGBUS, &action, nullptr) == 0;
}

}  // namespace

// Maps the first `size` bytes of a file; its number, and where it lies in `*address`. -1 where that
// cannot be had; errno says why.
TRIPTYCH_EXPORT int triptych_map(int file, int64_t size, bool is_written, void** address) {
  static const bool is_installed = install();
  errno = ENOTSUP;
  if (!is_installed) return -1;
  errno = EMFILE;
  for (int i = 0; i < MAX_MAPPINGS; ++i) {
    if (mappings[i].is_taken.exchange(true)) continue;
    const int access = is_written ? PROT_READ | PROT_WRITE : PROT_READ;
    void* found = mmap(nullptr, size, access, MAP_SHARED, file, 0);
    if (found == MAP_FAILED) {
      mappings[i].is_taken.store(false);
      return -1;
    }
    mappings[i].is_whole.store(true);
    mappings[i].size.store(size);
    mappings[i].begin.store(static_cast<char*>(found));
    *address = found;
    return i;
  }
  return -1;
}

// Whether no page was missing so far.
TRIPTYCH_EXPORT bool triptych_is_whole(int mapping) { return mappings[mapping].is_whole.load(); }

// Nobody uses it any more.
TRIPTYCH_EXPORT void triptych_unmap(int mapping) {
  Mapping& ours = mappings[mapping];
  char* const begin = ours.begin.exchange(nullptr);
  munmap(begin, ours.size.load());
  ours.is_taken.store(false);
}
