// The processor's own peak of products of bfloat16 or float32 values, summed in float32: operations
// per second of the calling thread, operands in registers, nothing read from memory.
//
// Each kind keeps enough independent sums in flight to cover the latency of its instruction, as far
// as there are registers: two multipliers of 6 cycles, as Zen 5 has them, do 0.92 of their peak with
// 12 sums, and all of it from 16 on.
#include <chrono>
#include <cstdint>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace {

constexpr long kSteps = 20000;
#if defined(__AVX512F__)
constexpr int kSums = 24;  // of 32 registers
#else
constexpr int kSums = 12;  // of 16
#endif

// Fills the sums with values that the compiler takes for different: equal ones become one chain.
template <typename Vector>
inline void differ(Vector (&sums)[kSums]) {
#pragma GCC unroll 24
  for (int k = 0; k < kSums; ++k) {
    sums[k] = Vector{};
    asm volatile("" : "+v"(sums[k]));
  }
}

template <typename Vector>
inline void keep(Vector (&sums)[kSums]) {
#pragma GCC unroll 24
  for (int k = 0; k < kSums; ++k) asm volatile("" : : "v"(sums[k]));
}

#if defined(__AMX_BF16__) && defined(__AMX_TILE__)
struct alignas(64) TileConfig {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t columns[16] = {};
  uint8_t rows[16] = {};
};

double amx_bfloat16() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  if (syscall(SYS_arch_prctl, kRequestPermission, kTileData) != 0) return 0;
  TileConfig config;
  for (int tile = 0; tile < 8; ++tile) {
    config.columns[tile] = 64;
    config.rows[tile] = 16;
  }
  // The intrinsic of GCC reads 8 of the 64 bytes: without this, it drops the stores of the others.
  asm volatile("" : : "r"(&config) : "memory");
  _tile_loadconfig(&config);
  for (long i = 0; i < kSteps; ++i) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_release();
  return 4.0 * kSteps * 2 * 16 * 16 * 32;
}
#endif

#if defined(__AVX512BF16__)
double avx512_bfloat16() {
  __m512 sums[kSums];
  differ(sums);
  __m512i bits = _mm512_set1_epi16(0x3f80);
  asm volatile("" : "+v"(bits));
  const __m512bh one = (__m512bh)bits;
  for (long i = 0; i < kSteps; ++i)
#pragma GCC unroll 24
    for (int k = 0; k < kSums; ++k) sums[k] = _mm512_dpbf16_ps(sums[k], one, one);
  keep(sums);
  return static_cast<double>(kSums) * kSteps * 64;
}
#endif

#if defined(__AVX512F__)
double avx512_float32() {
  __m512 sums[kSums], one = _mm512_set1_ps(1);
  differ(sums);
  asm volatile("" : "+v"(one));
  for (long i = 0; i < kSteps; ++i)
#pragma GCC unroll 24
    for (int k = 0; k < kSums; ++k) sums[k] = _mm512_fmadd_ps(one, one, sums[k]);
  keep(sums);
  return static_cast<double>(kSums) * kSteps * 32;
}
#elif defined(__FMA__)
double avx2_float32() {
  __m256 sums[kSums], one = _mm256_set1_ps(1);
  differ(sums);
  asm volatile("" : "+v"(one));
  for (long i = 0; i < kSteps; ++i)
#pragma GCC unroll 24
    for (int k = 0; k < kSums; ++k) sums[k] = _mm256_fmadd_ps(one, one, sums[k]);
  keep(sums);
  return static_cast<double>(kSums) * kSteps * 16;
}
#endif

using Run = double (*)();  // operations done; 0 if the system refuses the instructions

const Run kKinds[] = {
#if defined(__AMX_BF16__) && defined(__AMX_TILE__)
    amx_bfloat16,
#endif
#if defined(__AVX512BF16__)
    avx512_bfloat16,
#endif
#if defined(__AVX512F__)
    avx512_float32,
#elif defined(__FMA__)
    avx2_float32,
#endif
};

}  // namespace

extern "C" int num_kinds() { return sizeof(kKinds) / sizeof(Run); }

// Operations per second of this thread, measured for at least `seconds`.
extern "C" double operations_per_second(int kind, double seconds) {
  using Clock = std::chrono::steady_clock;
  const auto began = Clock::now();
  double operations = 0, passed = 0;
  do {
    operations += kKinds[kind]();
    passed = std::chrono::duration<double>(Clock::now() - began).count();
  } while (passed < seconds);
  return operations / passed;
}
