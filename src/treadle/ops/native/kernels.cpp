// The kernels, compiled once for each instruction set (TREADLE_VARIANT names it; the compiler's flags allow it).
// Loops are plain and the compiler vectorizes them. All arithmetic is float32, rounded once when it is stored.
#include "kernels.h"

#include "math.h"

#ifndef TREADLE_VARIANT
#define TREADLE_VARIANT baseline
#endif
#define TREADLE_TEXT_OF(name) #name
#define TREADLE_TEXT(name) TREADLE_TEXT_OF(name)

namespace treadle {
namespace {

template <class T>
inline T* row_of(const Rows& rows, int64_t row) {
  return static_cast<T*>(rows.data) + (row / rows.group) * rows.outer + (row % rows.group) * rows.inner;
}

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

template <class T>
void rope_rows(const Rope& a, int64_t begin, int64_t end) {
  const int64_t pairs = a.pairs;
  const float direction = a.inverse ? -1.0f : 1.0f;
  for (int64_t row = begin; row < end; ++row) {
    const T* __restrict x = row_of<const T>(a.x, row);
    T* __restrict out = row_of<T>(a.out, row);
    const float* __restrict cos = a.cos + row / a.heads * pairs;
    const float* __restrict sin = a.sin + row / a.heads * pairs;
    if (a.interleaved) {
#pragma omp simd
      for (int64_t i = 0; i < pairs; ++i) {
        const float first = load(x + 2 * i), second = load(x + 2 * i + 1), turn = direction * sin[i];
        store(out + 2 * i, first * cos[i] - second * turn);
        store(out + 2 * i + 1, second * cos[i] + first * turn);
      }
    } else {
#pragma omp simd
      for (int64_t i = 0; i < pairs; ++i) {
        const float first = load(x + i), second = load(x + pairs + i), turn = direction * sin[i];
        store(out + i, first * cos[i] - second * turn);
        store(out + pairs + i, second * cos[i] + first * turn);
      }
    }
    for (int64_t i = 2 * pairs; i < a.width; ++i) out[i] = x[i];
  }
}

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

void rope(const Rope& a, int64_t begin, int64_t end) {
  a.type == kFloat32 ? rope_rows<float>(a, begin, end) : rope_rows<bf16>(a, begin, end);
}

void cross_entropy(const CrossEntropy& a, int64_t begin, int64_t end) {
  if (a.type == kFloat32) {
    a.softcap != 0.0f ? cross_entropy_rows<float, true>(a, begin, end) : cross_entropy_rows<float, false>(a, begin, end);
  } else {
    a.softcap != 0.0f ? cross_entropy_rows<bf16, true>(a, begin, end) : cross_entropy_rows<bf16, false>(a, begin, end);
  }
}

}  // namespace

namespace TREADLE_VARIANT {
extern const Kernels kernels;
const Kernels kernels = {TREADLE_TEXT(TREADLE_VARIANT),
                         rms_norm,
                         rms_norm_backward,
                         gated_activation,
                         gated_activation_backward,
                         rope,
                         cross_entropy};
}  // namespace TREADLE_VARIANT

}  // namespace treadle
