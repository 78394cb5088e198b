// Softmax cross-entropy over rows of logits, and its gradient in their place. Included by kernels.cpp alone.
#pragma once
#include "kernels.h"
#include "math.h"

namespace treadle {
namespace {

template <class T, bool has_softcap>
void cross_entropy_rows(const CrossEntropy& a, int64_t begin, int64_t end) {
  const int64_t vocabulary = a.vocabulary;
  const float softcap = a.softcap, inverse = has_softcap ? 1.0f / a.softcap : 0.0f;
  const auto capped = [=](float value) { return has_softcap ? softcap * tanh_of(value * inverse) : value; };
  for (int64_t row = begin; row < end; ++row) {
    T* __restrict logits = static_cast<T*>(a.logits) + row * vocabulary;
    float top = load(logits);
#pragma omp simd reduction(max : top)
    for (int64_t i = 0; i < vocabulary; ++i) {
      const float value = load(logits + i);
      top = value > top ? value : top;
    }
    top = capped(top);
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < vocabulary; ++i) sum += exp_of(capped(load(logits + i)) - top);
    const float total = top + __builtin_logf(sum);
    const float at_target = capped(load(logits + a.targets[row]));
    a.losses[row] = total - at_target;
    if (!a.with_gradients) continue;
    const float weight = a.weights[row];
    const float share = at_target * inverse;
    const float target_grad = weight * (exp_of(at_target - total) - 1.0f) * (1.0f - share * share);
#pragma omp simd
    for (int64_t i = 0; i < vocabulary; ++i) {
      const float value = capped(load(logits + i)), part = value * inverse;
      store(logits + i, weight * exp_of(value - total) * (1.0f - part * part));
    }
    store(logits + a.targets[row], target_grad);
  }
}

void cross_entropy(const CrossEntropy& a, int64_t begin, int64_t end) {
  if (a.type == kFloat32) {
    a.softcap != 0.0f ? cross_entropy_rows<float, true>(a, begin, end) : cross_entropy_rows<float, false>(a, begin, end);
  } else {
    a.softcap != 0.0f ? cross_entropy_rows<bf16, true>(a, begin, end) : cross_entropy_rows<bf16, false>(a, begin, end);
  }
}

}  // namespace
}  // namespace treadle
