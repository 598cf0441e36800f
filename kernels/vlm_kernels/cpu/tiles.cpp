// Whether this process may use what the library was compiled for: tiles of AMX are 8 KiB of state a
// thread, which Linux gives only to processes that ask (Documentation/arch/x86/xstate.rst).
#include "threads.h"

#ifdef TRIPTYCH_AMX

#include <sys/syscall.h>
#include <unistd.h>

namespace {

constexpr int ASK = 0x1023;     // ARCH_REQ_XCOMP_PERM
constexpr int TILE_STATE = 18;  // XTILEDATA

}  // namespace

TRIPTYCH_EXPORT int triptych_ask_for_tiles() {
  return syscall(SYS_arch_prctl, ASK, TILE_STATE) == 0;
}

#endif
