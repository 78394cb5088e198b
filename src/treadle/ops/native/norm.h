// RMS norm, with or without an addition before it, and its gradients. Included by kernels.cpp alone.
#pragma once
#include "kernels.h"
#include "math.h"

namespace treadle {
namespace {

template <class X, class W>
void rms_norm_rows(const RmsNorm& a, int64_t begin, int64_t end) {
  const int64_t width = a.width;
  const W* __restrict weight = static_cast<const W*>(a.weight);
  for (int64_t row = begin; row < end; ++row) {
    const X* x = row_of<const X>(a.x, row);
    X* __restrict out = row_of<X>(a.out, row);
    float squares = 0.0f;
    if (a.residual.data != nullptr) {
      const X* residual = row_of<const X>(a.residual, row);
      X* __restrict total = row_of<X>(a.total, row);
#pragma omp simd reduction(+ : squares)
      for (int64_t i = 0; i < width; ++i) {
        store(total + i, load(x + i) + load(residual + i));
        const float value = load(total + i);
        squares += value * value;
      }
      x = total;
    } else {
#pragma omp simd reduction(+ : squares)
      for (int64_t i = 0; i < width; ++i) {
        const float value = load(x + i);
        squares += value * value;
      }
    }
    const float scale = 1.0f / __builtin_sqrtf(squares / static_cast<float>(width) + a.eps);
    const float offset = a.offset;
    if (offset == 0.0f) {
#pragma omp simd
      for (int64_t i = 0; i < width; ++i) store(out + i, rounded(load(x + i) * scale, x) * load(weight + i));
    } else {
#pragma omp simd
      for (int64_t i = 0; i < width; ++i) store(out + i, load(x + i) * scale * (load(weight + i) + offset));
    }
  }
}

template <class X, class W>
void rms_norm_backward_rows(const RmsNormBackward& a, int64_t begin, int64_t end, float* __restrict grad_weight) {
  const int64_t width = a.width;
  const float offset = a.offset;
  const W* __restrict weight = static_cast<const W*>(a.weight);
  for (int64_t row = begin; row < end; ++row) {
    const X* __restrict x = row_of<const X>(a.x, row);
    const X* __restrict grad = row_of<const X>(a.grad, row);
    X* __restrict grad_x = row_of<X>(a.grad_x, row);
    float squares = 0.0f, product = 0.0f;
#pragma omp simd reduction(+ : squares, product)
    for (int64_t i = 0; i < width; ++i) {
      const float value = load(x + i);
      squares += value * value;
      product += load(grad + i) * (load(weight + i) + offset) * value;
    }
    const float scale = 1.0f / __builtin_sqrtf(squares / static_cast<float>(width) + a.eps);
    const float along = product * scale * scale / static_cast<float>(width);
    const X* __restrict extra = a.extra.data != nullptr ? row_of<const X>(a.extra, row) : nullptr;
    if (extra != nullptr) {
#pragma omp simd
      for (int64_t i = 0; i < width; ++i) {
        const float value = load(x + i), by_output = load(grad + i);
        store(grad_x + i, scale * (by_output * (load(weight + i) + offset) - value * along) + load(extra + i));
        grad_weight[i] += by_output * (value * scale);
      }
    } else {
#pragma omp simd
      for (int64_t i = 0; i < width; ++i) {
        const float value = load(x + i), by_output = load(grad + i);
        store(grad_x + i, scale * (by_output * (load(weight + i) + offset) - value * along));
        grad_weight[i] += by_output * (value * scale);
      }
    }
  }
}

void rms_norm(const RmsNorm& a, int64_t begin, int64_t end) {
  if (a.x_type == kFloat32) {
    a.weight_type == kFloat32 ? rms_norm_rows<float, float>(a, begin, end) : rms_norm_rows<float, bf16>(a, begin, end);
  } else {
    a.weight_type == kFloat32 ? rms_norm_rows<bf16, float>(a, begin, end) : rms_norm_rows<bf16, bf16>(a, begin, end);
  }
}

void rms_norm_backward(const RmsNormBackward& a, int64_t begin, int64_t end, float* grad_weight) {
  const bool wide = a.weight_type == kFloat32;
  if (a.x_type == kFloat32) {
    wide ? rms_norm_backward_rows<float, float>(a, begin, end, grad_weight)
         : rms_norm_backward_rows<float, bf16>(a, begin, end, grad_weight);
  } else {
    wide ? rms_norm_backward_rows<bf16, float>(a, begin, end, grad_weight)
         : rms_norm_backward_rows<bf16, bf16>(a, begin, end, grad_weight);
  }
}

}  // namespace
}  // namespace treadle
