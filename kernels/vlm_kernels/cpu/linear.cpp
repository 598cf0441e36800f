// Linear layers in bfloat16:  y = x W^T + b,  then what usually follows, in the same pass.
//
//   x [M, K]   W [N, K]   b [N]   r, y [M, N]
//
//   plain      y = x W^T + b
//   residual   y = r + bf16(x W^T + b)
//   quick      y = z * bf16(sigmoid(bf16(1.702 z))),   z = bf16(x W^T + b)
//   gated      y = bf16(silu(g)) * u,   g, u = x G^T, x U^T;   y [M, N / 2]
//
// W is packed in panels of 32 outputs, [N / 32][K / 2][32][2]: one line of 64 bytes holds a pair of
// inputs of 16 outputs, which is what vdpbf16ps multiplies. Of gated layers a panel holds 16 rows of
// G, then the same 16 of U. N is padded with zeros to whole panels; K is even.
//
//   few rows    a panel is read once, whole lines, a few KiB ahead of the product; every row's sums
//               stay in registers
//   many rows   a panel stays in the core's own cache while all rows pass by it
//
// Every output is one float32 sum over k in ascending order, whatever M is: a row's result does not
// depend on the rows beside it, nor on the number of threads. Rounding is transformers': bf16 after
// the product, after SiLU, and after each sum or product of two tensors.

#include <cstdint>

#include "threads.h"

#ifdef TRIPTYCH_AVX512BF16

#include <immintrin.h>

#include <algorithm>
#include <cstring>

namespace {

using bf16 = uint16_t;

constexpr int PANEL = 32;               // outputs of a panel
constexpr int AHEAD = 4096;             // bytes that few rows are prefetched ahead
constexpr int FEW_ROWS = 16;            // up to so many, reading W takes longest
constexpr int MOST_ROWS = 14;           // 14 x 2 sums, and 2 lines of W, in 32 registers
constexpr int TILE_ROWS = 12;           // when rows are many: x comes out of the cache, too
constexpr int MOST_PANELS = 4;          // of one item of work
constexpr int BLOCK_BYTES = 512 << 10;  // of x that pass by a panel: half of a core's own cache

enum Epilogue : int { PLAIN = 0, RESIDUAL = 1, GATED = 2, QUICK_GELU = 3 };

struct Job {
  const bf16* x;
  int64_t x_stride;
  const bf16* w;
  const bf16* bias;      // may be null
  const bf16* residual;  // [M, residual_stride], of RESIDUAL alone
  int64_t residual_stride;
  bf16* y;
  int64_t y_stride;
  int m, n, k;
  Epilogue epilogue;
};

inline __m512 widen(__m256i x) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}
inline __m256i narrow(__m512 x) { return (__m256i)_mm512_cvtneps_pbh(x); }
inline __m512 rounded(__m512 x) { return widen(narrow(x)); }

// exp(x) to 1e-7 relative: 2^n * 2^f with a polynomial of degree 6 in f.
inline __m512 exp_ps(__m512 x) {
  x = _mm512_max_ps(_mm512_min_ps(x, _mm512_set1_ps(88.f)), _mm512_set1_ps(-88.f));
  const __m512 t = _mm512_mul_ps(x, _mm512_set1_ps(1.44269504088896341f));
  const __m512 n = _mm512_roundscale_ps(t, 0);
  __m512 f = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  f = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), f);
  __m512 p = _mm512_set1_ps(1.9875691500e-4f);
  for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f,
                  5.0000001201e-1f}) {
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(c));
  }
  p = _mm512_add_ps(_mm512_fmadd_ps(p, _mm512_mul_ps(f, f), f), _mm512_set1_ps(1.f));
  return _mm512_scalef_ps(p, n);
}

// numerator / (1 + exp(-x))
inline __m512 over_sigmoid(__m512 numerator, __m512 x) {
  const __m512 e = exp_ps(_mm512_sub_ps(_mm512_setzero_ps(), x));
  return _mm512_div_ps(numerator, _mm512_add_ps(_mm512_set1_ps(1.f), e));
}

inline __m512 silu(__m512 x) { return over_sigmoid(x, x); }

// GELU as CLIP and Qwen2-VL have it; x is rounded already.
inline __m512 quick_gelu(__m512 x) {
  const __m512 inner = rounded(_mm512_mul_ps(x, _mm512_set1_ps(1.702f)));
  return _mm512_mul_ps(x, rounded(over_sigmoid(_mm512_set1_ps(1.f), inner)));
}

inline __mmask16 first(int count) {
  return count >= 16 ? __mmask16(0xffff) : count <= 0 ? __mmask16(0) : __mmask16((1u << count) - 1);
}

// 16 outputs of one row, from column `n`, of which `mask` exist.
inline void finish(const Job& job, int row, int n, __m512 sum, __mmask16 mask) {
  if (job.bias) sum = _mm512_add_ps(sum, widen(_mm256_maskz_loadu_epi16(mask, job.bias + n)));
  if (job.epilogue == RESIDUAL) {
    const bf16* at = job.residual + row * job.residual_stride + n;
    sum = _mm512_add_ps(rounded(sum), widen(_mm256_maskz_loadu_epi16(mask, at)));
  }
  if (job.epilogue == QUICK_GELU) sum = quick_gelu(rounded(sum));
  _mm256_mask_storeu_epi16(job.y + row * job.y_stride + n, mask, narrow(sum));
}

// A panel of a gated layer: 16 gates and the 16 values that they open.
inline void finish_gated(const Job& job, int row, int panel, __m512 gate, __m512 value) {
  const int n = panel * (PANEL / 2);
  const __m512 opened = _mm512_mul_ps(rounded(silu(rounded(gate))), rounded(value));
  _mm256_mask_storeu_epi16(job.y + row * job.y_stride + n, first(job.n / 2 - n), narrow(opened));
}

// `Rows` rows from `row` by `Panels` panels from `panel`.
template <int Rows, int Panels, bool Ahead>
void tile(const Job& job, int row, int panel) {
  __m512 sums[Rows][Panels * 2];
  for (auto& of_row : sums)
    for (auto& sum : of_row) sum = _mm512_setzero_ps();
  const int64_t panel_size = int64_t(job.k) * PANEL;
  const bf16* w = job.w + panel * panel_size;
  const bf16* x = job.x + row * job.x_stride;
  for (int k = 0; k < job.k; k += 2) {
    __m512bh lines[Panels * 2];
#pragma GCC unroll 4
    for (int j = 0; j < Panels * 2; ++j) {
      const bf16* line = w + (j / 2) * panel_size + int64_t(k) * PANEL + (j % 2) * 32;
      if (Ahead) _mm_prefetch(reinterpret_cast<const char*>(line) + AHEAD, _MM_HINT_T0);
      lines[j] = (__m512bh)_mm512_loadu_si512(line);
    }
#pragma GCC unroll 14
    for (int i = 0; i < Rows; ++i) {
      int pair;
      std::memcpy(&pair, x + i * job.x_stride + k, 4);
      const __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 4
      for (int j = 0; j < Panels * 2; ++j) sums[i][j] = _mm512_dpbf16_ps(sums[i][j], lines[j], both);
    }
  }
  for (int i = 0; i < Rows; ++i) {
    for (int p = 0; p < Panels; ++p) {
      if (job.epilogue == GATED) {
        finish_gated(job, row + i, panel + p, sums[i][p * 2], sums[i][p * 2 + 1]);
        continue;
      }
      for (int half = 0; half < 2; ++half) {
        const int n = (panel + p) * PANEL + half * 16;
        if (n < job.n) finish(job, row + i, n, sums[i][p * 2 + half], first(job.n - n));
      }
    }
  }
}

template <int Panels, bool Ahead>
void rows_of(const Job& job, int row, int num_rows, int panel) {
  switch (num_rows) {
#define TRIPTYCH_ROWS(R) \
  case R: return tile<R, Panels, Ahead>(job, row, panel);
    TRIPTYCH_ROWS(1) TRIPTYCH_ROWS(2) TRIPTYCH_ROWS(3) TRIPTYCH_ROWS(4) TRIPTYCH_ROWS(5)
    TRIPTYCH_ROWS(6)
  }
  if constexpr (Panels == 1) {
    switch (num_rows) {
      TRIPTYCH_ROWS(7) TRIPTYCH_ROWS(8) TRIPTYCH_ROWS(9) TRIPTYCH_ROWS(10) TRIPTYCH_ROWS(11)
      TRIPTYCH_ROWS(12) TRIPTYCH_ROWS(13) TRIPTYCH_ROWS(14)
#undef TRIPTYCH_ROWS
    }
  }
}

void few_rows(const Job& job, int begin, int end) {
  if (job.m <= 6) {
    int panel = begin;
    for (; panel + 1 < end; panel += 2) rows_of<2, true>(job, 0, job.m, panel);
    if (panel < end) rows_of<1, true>(job, 0, job.m, panel);
    return;
  }
  for (int panel = begin; panel < end; ++panel) {
    if (job.m <= MOST_ROWS) {
      rows_of<1, true>(job, 0, job.m, panel);
    } else {
      const int half = (job.m + 1) / 2;
      rows_of<1, true>(job, 0, half, panel);
      rows_of<1, false>(job, half, job.m - half, panel);
    }
  }
}

void many_rows(const Job& job, int begin, int end) {
  const int fitting = BLOCK_BYTES / (job.k * int(sizeof(bf16))) / TILE_ROWS * TILE_ROWS;
  const int block = std::max(TILE_ROWS, fitting);
  for (int first_row = 0; first_row < job.m; first_row += block) {
    const int end_row = std::min(first_row + block, job.m);
    for (int panel = begin; panel < end; ++panel) {
      for (int row = first_row; row < end_row; row += TILE_ROWS) {
        rows_of<1, false>(job, row, std::min(TILE_ROWS, end_row - row), panel);
      }
    }
  }
}

}  // namespace

TRIPTYCH_EXPORT int triptych_has_linear_bf16() { return 1; }

TRIPTYCH_EXPORT void triptych_linear_bf16(const void* x, int64_t x_stride, const void* w,
                                          const void* bias, const void* residual,
                                          int64_t residual_stride, void* y, int64_t y_stride, int m,
                                          int n, int k, int epilogue, int num_threads) {
  const Job job{static_cast<const bf16*>(x),
                x_stride,
                static_cast<const bf16*>(w),
                static_cast<const bf16*>(bias),
                static_cast<const bf16*>(residual),
                residual_stride,
                static_cast<bf16*>(y),
                y_stride,
                m,
                n,
                k,
                static_cast<Epilogue>(epilogue)};
  const int num_panels = (n + PANEL - 1) / PANEL;
  const int share = num_panels / (4 * num_threads) / 2 * 2;
  const int per_item = std::max(2, std::min(MOST_PANELS, share));
  triptych::parallel_for(num_threads, (num_panels + per_item - 1) / per_item, [&](std::ptrdiff_t i) {
    const int begin = int(i) * per_item, end = std::min(begin + per_item, num_panels);
    m <= FEW_ROWS ? few_rows(job, begin, end) : many_rows(job, begin, end);
  });
}

#else

TRIPTYCH_EXPORT int triptych_has_linear_bf16() { return 0; }

TRIPTYCH_EXPORT void triptych_linear_bf16(const void*, int64_t, const void*, const void*,
                                          const void*, int64_t, void*, int64_t, int, int, int, int,
                                          int) {}

#endif
