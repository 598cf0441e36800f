// RMSNorm:    y = bf16(x / sqrt(mean(x^2) + eps)) * w      x, y [T, D], w, b [D]
//     or      y = x / sqrt(mean(x^2) + eps) * (1 + w)      of Gemma, rounded once
// LayerNorm:  y = (x - m) / sqrt(mean((x - m)^2) + eps) * w + b,   m = mean(x),   rounded once
//
// A mean is of one row, summed as 16 partial sums in float32, so that it does not depend on other
// rows. Rounding is transformers': of RMSNorm to the type of x after the scale, and after the weight.

#include <algorithm>
#include <cmath>

#include "norm.h"
#include "rounding.h"

using namespace triptych;

namespace {

constexpr int LANES = 16;

// The mean of what `of` makes of each value.
template <class T, class Of>
float mean_of(const T* x, int64_t size, Of of) {
  float sums[LANES] = {};
  int64_t i = 0;
  for (; i + LANES <= size; i += LANES) {
    for (int j = 0; j < LANES; ++j) sums[j] += of(to_float(x[i + j]));
  }
  for (; i < size; ++i) sums[i % LANES] += of(to_float(x[i]));
  float sum = 0;
  for (float part : sums) sum += part;
  return sum / float(size);
}

template <class T>
void rms_norm_row(const T* x, const T* w, T* y, int64_t size, float eps, bool adds_one) {
  const float square = mean_of(x, size, [](float value) { return value * value; });
  const float scale = 1.f / std::sqrt(square + eps);
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
void layer_norm_row(const T* x, const T* w, const T* bias, T* y, int64_t size, float eps) {
  const float mean = mean_of(x, size, [](float value) { return value; });
  const float square = mean_of(x, size, [=](float value) { return (value - mean) * (value - mean); });
  const float scale = 1.f / std::sqrt(square + eps);
  for (int64_t j = 0; j < size; ++j) {
    from_float((to_float(x[j]) - mean) * scale * to_float(w[j]) + to_float(bias[j]), y + j);
  }
}

template <class T>
void rows_of(const NormJob& job, int64_t begin, int64_t end) {
  const T *w = static_cast<const T*>(job.w), *bias = static_cast<const T*>(job.bias);
  for (int64_t row = begin; row < end; ++row) {
    const T* x = static_cast<const T*>(job.x) + row * job.x_stride;
    T* y = static_cast<T*>(job.y) + row * job.size;
    if (bias != nullptr) {
      layer_norm_row(x, w, bias, y, job.size, job.eps);
    } else {
      rms_norm_row(x, w, y, job.size, job.eps, job.adds_one);
    }
  }
}

void norm_all(const NormJob& job, int64_t rows, int num_threads) {
  Threads(num_threads).for_each_run(rows, job.size, [&](int64_t begin, int64_t end) {
    norm_rows(job, begin, end);
  });
}

}  // namespace

void triptych::norm_rows(const NormJob& job, int64_t begin, int64_t end) {
  job.is_bf16 ? rows_of<Bfloat16>(job, begin, end) : rows_of<float>(job, begin, end);
}

TRIPTYCH_EXPORT bool triptych_rms_norm(const void* x, int64_t x_stride, const void* w, void* y,
                                       int64_t rows, int64_t size, float eps, int is_bf16,
                                       int adds_one, int num_threads) try {
  norm_all({x, x_stride, w, nullptr, y, size, eps, is_bf16 != 0, adds_one != 0}, rows, num_threads);
  return true;
} catch (const std::bad_alloc&) {
  return false;
}

TRIPTYCH_EXPORT bool triptych_layer_norm(const void* x, int64_t x_stride, const void* w,
                                         const void* bias, void* y, int64_t rows, int64_t size,
                                         float eps, int is_bf16, int num_threads) try {
  norm_all({x, x_stride, w, bias, y, size, eps, is_bf16 != 0, false}, rows, num_threads);
  return true;
} catch (const std::bad_alloc&) {
  return false;
}
