// Linear layers in bfloat16:  y = x W^T + b,  then what usually follows, in the same pass (linear.h).
//
// W is packed as [N / 32][K / 2][32][2]: one line of 64 bytes holds a pair of inputs of 16 outputs,
// which is what vdpbf16ps multiplies. N is padded with zeros to whole panels; K is even.
//
// Sums are float32, in one order: a row's result does not depend on the rows beside it, nor on the
// number of threads. The tiles are those of linear_tiles.h.

#include "linear.h"

#ifdef TRIPTYCH_AVX512BF16

#ifdef TRIPTYCH_AMX
#include "linear_amx.h"
#else
#include "linear_tiles.h"
#endif

namespace {

struct Bfloat16Dot {
  using Sum = __m512;

#ifdef TRIPTYCH_AMX
  template <int sums, int x, int w>
  static void add() { triptych::multiply_bfloat16<sums, x, w>(); }
#else
  static Sum add(Sum sum, __m512i x, __m512i line) {
    return _mm512_dpbf16_ps(sum, (__m512bh)line, (__m512bh)x);
  }
#endif

  // Sums are what they stand for.
  struct Outputs {
    Outputs(const triptych::Job&, int) {}
    __m512 left(int, Sum sum) const { return sum; }
    __m512 right(int, Sum sum) const { return sum; }
  };
};

}  // namespace

void triptych::linear_bf16(Job job, const void* x, int64_t x_stride, int k, Threads& threads) {
  job.x = static_cast<const uint8_t*>(x);
  job.x_stride = x_stride * 2;
  job.steps = k / 2;
  multiply<Bfloat16Dot>(job, threads);
}

TRIPTYCH_EXPORT int triptych_has_linear_bf16() { return 1; }

TRIPTYCH_EXPORT bool triptych_linear_bf16(const void* x, int64_t x_stride, const void* w,
                                          const void* bias, const void* residual,
                                          int64_t residual_stride, void* y, int64_t y_stride, int m,
                                          int n, int k, int epilogue, int num_threads) try {
  triptych::Job job =
      triptych::job_of(bias, residual, residual_stride, y, y_stride, m, n, epilogue);
  job.w = static_cast<const uint8_t*>(w);
  triptych::Threads threads(num_threads);
  triptych::linear_bf16(job, x, x_stride, k, threads);
  return true;
} catch (const std::bad_alloc&) {
  return false;
}

#else

TRIPTYCH_EXPORT int triptych_has_linear_bf16() { return 0; }

TRIPTYCH_EXPORT bool triptych_linear_bf16(const void*, int64_t, const void*, const void*,
                                          const void*, int64_t, void*, int64_t, int, int, int, int,
                                          int) { return true; }

#endif
