// RMSNorm:  y = bf16(x / sqrt(mean(x^2) + eps)) * w      x, y [T, D], w [D]
//     or    y = x / sqrt(mean(x^2) + eps) * (1 + w)      of Gemma, rounded once
//
// The mean is of one row, summed as 16 partial sums in float32, so that it does not depend on other
// rows. Rounding is transformers': to the type of x after the scale, and after the weight.

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "rounding.h"
#include "threads.h"

using namespace triptych;

namespace {

constexpr int LANES = 16;
constexpr int64_t GRAIN = 1 << 15;  // elements that are worth a thread

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
void norm(const T* x, int64_t x_stride, const T* w, T* y, int64_t rows, int64_t size, float eps,
          bool adds_one, int num_threads) {
  const int64_t per_item = std::max<int64_t>(1, GRAIN / size);
  parallel_for(num_threads, (rows + per_item - 1) / per_item, [&](std::ptrdiff_t item) {
    const int64_t end = std::min(rows, (item + 1) * per_item);
    for (int64_t row = item * per_item; row < end; ++row) {
      norm_row(x + row * x_stride, w, y + row * size, size, eps, adds_one);
    }
  });
}

}  // namespace

TRIPTYCH_EXPORT void triptych_rms_norm(const void* x, int64_t x_stride, const void* w, void* y,
                                       int64_t rows, int64_t size, float eps, int is_bf16,
                                       int adds_one, int num_threads) {
  if (is_bf16) {
    norm(static_cast<const Bfloat16*>(x), x_stride, static_cast<const Bfloat16*>(w),
         static_cast<Bfloat16*>(y), rows, size, eps, adds_one != 0, num_threads);
  } else {
    norm(static_cast<const float*>(x), x_stride, static_cast<const float*>(w),
         static_cast<float*>(y), rows, size, eps, adds_one != 0, num_threads);
  }
}
