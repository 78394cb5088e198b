// Gated activations and their gradients. Included by kernels.cpp alone.
#pragma once
#include "kernels.h"
#include "math.h"

namespace treadle {
namespace {

constexpr float kTanhScale = 0.797884561f, kTanhCubic = 0.044715f, kBellScale = 0.398942280f;

// The activation's value and slope at x.
template <Activation kind>
inline void activate(float x, float& value, float& slope) {
  if constexpr (kind == kSilu) {
    float rest;
    const float share = logistic(x, rest);
    value = x * share;
    slope = share * (1.0f + x * rest);
  } else if constexpr (kind == kGelu) {
    const float bell = exp_of(-0.5f * x * x);
    const float share = normal_below(x, bell);
    value = x * share;
    slope = share + x * bell * kBellScale;
  } else if constexpr (kind == kGeluTanh) {
    // (1 + tanh u) / 2 is the logistic function of 2u.
    const float square = x * x;
    float rest;
    const float share = logistic(2.0f * kTanhScale * x * (1.0f + kTanhCubic * square), rest);
    value = x * share;
    slope = share + x * share * rest * (2.0f * kTanhScale * (1.0f + 3.0f * kTanhCubic * square));
  } else if constexpr (kind == kRelu) {
    value = select(x <= 0.0f, 0.0f, x);
    slope = select(x > 0.0f, 1.0f, 0.0f);
  } else {
    const float positive = select(x <= 0.0f, 0.0f, x);
    value = positive * positive;
    slope = 2.0f * positive;
  }
}

template <class T, Activation kind>
void gated_rows(const GatedActivation& a, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const T* __restrict gate = row_of<const T>(a.gate, row);
    const T* __restrict up = row_of<const T>(a.up, row);
    T* __restrict out = row_of<T>(a.out, row);
#pragma omp simd
    for (int64_t i = 0; i < a.width; ++i) {
      float value, slope;
      activate<kind>(load(gate + i), value, slope);
      store(out + i, value * load(up + i));
    }
  }
}

template <class T, Activation kind>
void gated_backward_rows(const GatedActivation& a, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const T* __restrict gate = row_of<const T>(a.gate, row);
    const T* __restrict up = row_of<const T>(a.up, row);
    const T* __restrict grad = row_of<const T>(a.grad, row);
    T* __restrict grad_gate = row_of<T>(a.grad_gate, row);
    T* __restrict grad_up = row_of<T>(a.grad_up, row);
#pragma omp simd
    for (int64_t i = 0; i < a.width; ++i) {
      float value, slope;
      activate<kind>(load(gate + i), value, slope);
      const float by_output = load(grad + i);
      store(grad_gate + i, by_output * load(up + i) * slope);
      store(grad_up + i, by_output * value);
    }
  }
}

// Calls function<T, kind> for the type and activation that `a` names.
#define TREADLE_BY_KIND(function, T)                             \
  switch (a.kind) {                                              \
    case kSilu: return function<T, kSilu>(a, begin, end);        \
    case kGelu: return function<T, kGelu>(a, begin, end);        \
    case kGeluTanh: return function<T, kGeluTanh>(a, begin, end); \
    case kRelu: return function<T, kRelu>(a, begin, end);        \
    case kRelu2: return function<T, kRelu2>(a, begin, end);      \
  }

void gated_activation(const GatedActivation& a, int64_t begin, int64_t end) {
  if (a.type == kFloat32) {
    TREADLE_BY_KIND(gated_rows, float)
  } else {
    TREADLE_BY_KIND(gated_rows, bf16)
  }
}

void gated_activation_backward(const GatedActivation& a, int64_t begin, int64_t end) {
  if (a.type == kFloat32) {
    TREADLE_BY_KIND(gated_backward_rows, float)
  } else {
    TREADLE_BY_KIND(gated_backward_rows, bf16)
  }
}

}  // namespace
}  // namespace treadle
