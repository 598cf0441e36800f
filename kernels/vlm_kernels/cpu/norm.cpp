// RMSNorm:  y = bf16(x / sqrt(mean(x^2) + eps)) * w      x, y [T, D], w [D]
//     or    y = x / sqrt(mean(x^2) + eps) * (1 + w)      of Gemma, rounded once
//
// The mean is of one row, summed as 16 partial sums in float32, so that it does not depend on other
// rows. Rounding is transformers': to the type of x after the scale, and after the weight.

#include <algorithm>
#include <cmath>

#include "norm.h"
#include "rounding.h"

using namespace triptych;

namespace {

constexpr int LANES = 16;

template <class T>
void norm_row(const T* x, const T* w, T* y, int64_t size, float eps, bool adds_one) {
  float sums[LANES] = {};
  int64_t i = 0;
  for (; i + LANES <= size; i += LANES) {
    for (int j = 0; j < LANES; ++j) {
      const float value = to_float(x[i + j]);
      sums[j] += value * value;
    }
  }
  for (; i < size; ++i) {
    const float value = to_float(x[i]);
    sums[i % LANES] += value * value;
  }
  float sum = 0;
  for (float part : sums) sum += part;
  const float scale = 1.f / std::sqrt(sum / float(size) + eps);
  if (adds_one) {
    for (int64_t j = 0; j < size; ++j) {
      from_float(to_float(x[j]) * scale * (1.f + to_float(w[j])), y + j);
    }
    return;
  }
  for (int64_t j = 0; j < size; ++j) {
    const float scaled = rounded<T>(to_float(x[j]) * scale);
    from_float(scaled * to_float(w[j]), y + j);
  }
}

template <class T>
void rows_of(const NormJob& job, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    norm_row(static_cast<const T*>(job.x) + row * job.x_stride, static_cast<const T*>(job.w),
             static_cast<T*>(job.y) + row * job.size, job.size, job.eps, job.adds_one);
  }
}

}  // namespace

void triptych::norm_rows(const NormJob& job, int64_t begin, int64_t end) {
  job.is_bf16 ? rows_of<Bfloat16>(job, begin, end) : rows_of<float>(job, begin, end);
}

TRIPTYCH_EXPORT void triptych_rms_norm(const void* x, int64_t x_stride, const void* w, void* y,
                                       int64_t rows, int64_t size, float eps, int is_bf16,
                                       int adds_one, int num_threads) {
  const NormJob job{x, x_stride, w, y, size, eps, is_bf16 != 0, adds_one != 0};
  Threads(num_threads).for_each_run(rows, size, [&](int64_t begin, int64_t end) {
    norm_rows(job, begin, end);
  });
}
