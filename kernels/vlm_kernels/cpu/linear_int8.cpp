// Linear layers on int8 weights and int8 activations:  y = x W^T + b, and what follows (linear.h).
//
//   W_nk = s_n q_nk             |q| <= 127, s_n of each output, made once
//   x_mk ~ a_m p_mk             |p| <= 127, a_m = max_k |x_mk| / 127 of each row, made here
//   y_mn = a_m s_n sum_k p q    the sum is of integers, exact and below 2^31
//
// A calibrated layer has one scale a for all rows, and a zero z (InputScale):  x_mk ~ a (c_mk - z),
// 0 <= c <= 255. Rows are read once, without a pass for the largest value; larger values are clipped.
//
// Reference: LLM.int8() (arXiv 2208.07339) without its outliers, as vLLM and OpenVINO compute W8A8.
//
// W is packed as [N / 32][K / 4][32][4]: one line of 64 bytes holds four inputs of 16 outputs. Codes
// of x are p + 128, as vpdpbusd wants one factor unsigned; z sum_k q takes away what the code of 0
// adds, where w_offset[n] = 128 sum_k q. N and K are padded with zeros.
//
// Sums are the same integers in every variant and order, so rows, threads and CPUs change nothing
// but the last bit of an activation.

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "linear.h"
#include "linear_rows.h"
#include "rounding.h"

using namespace triptych;

#ifdef TRIPTYCH_AVX512BF16

#ifdef TRIPTYCH_AMX
#include "linear_amx.h"
#else
#include "linear_tiles.h"
#endif

namespace {

struct Int8Dot {
  // not __m512i: GCC keeps an array of those on the stack, where their lanes are cast
  typedef int32_t Sum __attribute__((vector_size(LINE)));

#ifdef TRIPTYCH_AMX
  template <int sums, int x, int w>
  static void add() { multiply_int8<sums, x, w>(); }
#else
  static Sum add(Sum sum, __m512i x, __m512i line) {
    return (Sum)_mm512_dpbusd_epi32((__m512i)sum, x, line);
  }
#endif

  // What sums of codes stand for: of the outputs of one panel.
  struct Outputs {
    Outputs(const Job& job, int panel)
        : offsets(job.w_offset + panel * PANEL),
          scales(job.w_scale + panel * PANEL),
          rows(job.x_scale),
          zero(_mm512_set1_epi32(job.x_zero)) {}

    __m512 left(int row, Sum sum) const { return value(row, sum, 0); }
    __m512 right(int row, Sum sum) const { return value(row, sum, PANEL / 2); }

   private:
    __m512 value(int row, Sum sum, int column) const {
      const __m512i codes = _mm512_srai_epi32(_mm512_loadu_si512(offsets + column), 7);
      const __m512i exact = _mm512_sub_epi32((__m512i)sum, _mm512_mullo_epi32(codes, zero));
      const __m512 scale = _mm512_mul_ps(_mm512_set1_ps(rows[row]), _mm512_loadu_ps(scales + column));
      return _mm512_mul_ps(_mm512_cvtepi32_ps(exact), scale);
    }

    const int32_t* offsets;
    const float *scales, *rows;
    __m512i zero;
  };
};

void product(const Job& job, Threads& threads) { multiply<Int8Dot>(job, threads); }

}  // namespace

#else

#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace {

// The integer sums of one row with one panel.
void sum_panel(const uint8_t* codes, const int8_t* w, int steps, const int32_t* offset, int zero,
               int32_t sums[PANEL]) {
#ifdef __AVX2__
  // |p| * (q with the sign of p), p = c - 128: pairs stay within 2 * 128 * 127 < 2^15, so nothing
  // saturates
  __m256i all[4] = {};
  const __m256i ones = _mm256_set1_epi16(1);
  for (int step = 0; step < steps; ++step) {
    int four;
    std::memcpy(&four, codes + step * 4, 4);
    const __m256i p = _mm256_set1_epi32(four ^ int(0x80808080));
    const __m256i size = _mm256_abs_epi8(p);
    for (int j = 0; j < 4; ++j) {
      const __m256i line = _mm256_loadu_si256((const __m256i*)(w + step * 128 + j * 32));
      const __m256i pairs = _mm256_maddubs_epi16(size, _mm256_sign_epi8(line, p));
      all[j] = _mm256_add_epi32(all[j], _mm256_madd_epi16(pairs, ones));
    }
  }
  for (int j = 0; j < 4; ++j) _mm256_storeu_si256((__m256i*)(sums + j * 8), all[j]);
  for (int n = 0; n < PANEL; ++n) sums[n] += (offset[n] >> 7) * (128 - zero);
#else
  for (int n = 0; n < PANEL; ++n) sums[n] = -(offset[n] >> 7) * zero;
  for (int step = 0; step < steps; ++step) {
    for (int n = 0; n < PANEL; ++n) {
      const uint8_t* p = codes + step * 4;
      const int8_t* q = w + (step * PANEL + n) * 4;
      sums[n] += p[0] * q[0] + p[1] * q[1] + p[2] * q[2] + p[3] * q[3];
    }
  }
#endif
}

inline float sigmoid(float x) { return 1.f / (1.f + std::exp(-x)); }
inline float gelu(float x) {
  return x * sigmoid(1.5957691216f * (x + 0.044715f * x * x * x));
}
inline float bf16(float x) { return rounded<Bfloat16>(x); }
inline float at(const uint16_t* values, int64_t i) { return to_float(Bfloat16{values[i]}); }

inline void put(const Job& job, int row, int column, float value) {
  Bfloat16 y;
  from_float(value, &y);
  job.y[row * job.y_stride + column] = y.bits;
}

void finish_panel(const Job& job, int row, int panel, const float sums[PANEL]) {
  if (is_gated(job.epilogue)) {
    for (int i = 0, n = panel * (PANEL / 2); i < PANEL / 2 && n < job.n / 2; ++i, ++n) {
      const int column = panel * PANEL + i;
      const float gate = bf16(job.bias ? sums[i] + at(job.bias, column) : sums[i]);
      const float up = sums[i + PANEL / 2];
      const float value = bf16(job.bias ? up + at(job.bias, column + PANEL / 2) : up);
      const bool by_silu = job.epilogue == GATED_BY_SILU;
      const float opened = bf16(by_silu ? gate * sigmoid(gate) : gelu(gate));
      put(job, row, n, opened * value);
    }
    return;
  }
  for (int i = 0, n = panel * PANEL; i < PANEL && n < job.n; ++i, ++n) {
    const float z = bf16(job.bias ? sums[i] + at(job.bias, n) : sums[i]);
    switch (job.epilogue) {
      case RESIDUAL: put(job, row, n, z + at(job.residual, row * job.residual_stride + n)); break;
      case QUICK_GELU: put(job, row, n, z * bf16(sigmoid(bf16(1.702f * z)))); break;
      case GELU: put(job, row, n, gelu(z)); break;
      default: put(job, row, n, z);
    }
  }
}

void product(const Job& job, Threads& threads) {
  const int num_panels = (job.n + PANEL - 1) / PANEL;
  threads.for_each(num_panels, [&](std::ptrdiff_t panel) {
    const auto* w = reinterpret_cast<const int8_t*>(job.w) + panel * job.steps * PANEL * 4;
    for (int row = 0; row < job.m; ++row) {
      int32_t sums[PANEL];
      float values[PANEL];
      sum_panel(job.x + row * job.x_stride, w, job.steps, job.w_offset + panel * PANEL, job.x_zero,
                sums);
      for (int n = 0; n < PANEL; ++n) {
        const float scale = job.x_scale[row] * job.w_scale[panel * PANEL + n];
        values[n] = float(sums[n]) * scale;
      }
      finish_panel(job, row, int(panel), values);
    }
  });
}

}  // namespace

#endif

namespace {

constexpr float LEAST = 1e-30f;     // a row of nothing but less than this is zero
constexpr uint16_t INFINITE = 0x7f80;
constexpr float ROUNDS = 12582912.f;  // 1.5 * 2^23: the last byte of a sum with it is an integer
constexpr int SYMMETRIC = 128;        // the code of 0 where codes are of either sign

// The row has NaN or infinity, so its scale is NaN, and so are its results.
void spoil(int64_t padded, uint8_t* codes, float* scale) {
  *scale = std::numeric_limits<float>::quiet_NaN();
  std::fill(codes, codes + padded, uint8_t(SYMMETRIC));
}

inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

// Codes of one row by its largest value.
void quantise_row(const uint16_t* x, int64_t size, int64_t padded, uint8_t* codes, float* scale) {
  uint16_t most = 0;  // bits without the sign are in the order of the sizes, NaN above all
  for (int64_t i = 0; i < size; ++i) most = std::max<uint16_t>(most, x[i] & 0x7fff);
  if (most >= INFINITE) return spoil(padded, codes, scale);
  const float largest = std::max(to_float(Bfloat16{most}), LEAST);
  *scale = largest / 127.f;
  const float inverse = 127.f / largest;
  for (int64_t i = 0; i < size; ++i) {
    codes[i] = uint8_t(bits_of(to_float(Bfloat16{x[i]}) * inverse + ROUNDS)) ^ 0x80;
  }
  std::fill(codes + size, codes + padded, uint8_t(SYMMETRIC));
}

// Codes of one row by a scale that is known, in one pass; values beyond the codes are clipped.
void clip_row(const uint16_t* x, int64_t size, int64_t padded, InputScale input, uint8_t* codes,
              float* scale) {
  const float inverse = 1.f / input.scale;
  const float least = float((input.zero == SYMMETRIC ? 1 : 0) - input.zero);
  const float largest = float(255 - input.zero);
  uint16_t most = 0;
  for (int64_t i = 0; i < size; ++i) {
    most = std::max<uint16_t>(most, x[i] & 0x7fff);
    float level = to_float(Bfloat16{x[i]}) * inverse;
    level = level < largest ? level : largest;
    level = level > least ? level : least;
    codes[i] = uint8_t(bits_of(level + ROUNDS) + uint32_t(input.zero));
  }
  if (most >= INFINITE) return spoil(padded, codes, scale);
  *scale = input.scale;
  std::fill(codes + size, codes + padded, uint8_t(SYMMETRIC));
}

}  // namespace

void triptych::linear_int8(Job job, const void* x, int64_t x_stride, int k, InputScale input,
                           Codes& codes, Threads& threads) {
  const bool is_known = input.scale > 0;
  job.x_zero = is_known ? input.zero : SYMMETRIC;
  job.steps = (k + 3) / 4;
  job.x_stride = int64_t(job.steps) * 4;
  job.x_is_tiled = reads_tiles(job.m);
  uint8_t* const all = codes.codes.data();
  threads.for_each_run(job.m, k, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const auto quantise = [&](uint8_t* to) {
        const auto* from = static_cast<const uint16_t*>(x) + row * x_stride;
        float* const scale = codes.scales.data() + row;
        if (is_known) {
          clip_row(from, k, job.x_stride, input, to, scale);
        } else {
          quantise_row(from, k, job.x_stride, to, scale);
        }
      };
      if (job.x_is_tiled) {
        write_tiled(all, row, job.x_stride, quantise);
      } else {
        quantise(all + row * job.x_stride);
      }
    }
  });
  job.x = codes.codes.data();
  job.x_scale = codes.scales.data();
  product(job, threads);
}

TRIPTYCH_EXPORT bool triptych_linear_int8(const void* x, int64_t x_stride, const void* w,
                                          const void* w_scale, const void* w_offset,
                                          float x_scale, int x_zero, const void* bias,
                                          const void* residual,
                                          int64_t residual_stride, void* y, int64_t y_stride, int m,
                                          int n, int k, int epilogue, int num_threads) try {
  static thread_local Codes codes;
  codes.make_room(m, k);
  Job job = job_of(bias, residual, residual_stride, y, y_stride, m, n, epilogue);
  job.w = static_cast<const uint8_t*>(w);
  job.w_scale = static_cast<const float*>(w_scale);
  job.w_offset = static_cast<const int32_t*>(w_offset);
  Threads threads(num_threads);
  linear_int8(job, x, x_stride, k, {x_scale, x_zero}, codes, threads);
  return true;
} catch (const std::bad_alloc&) {
  return false;
}
