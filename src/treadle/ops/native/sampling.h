// Drawing a token from a row of logits in time linear in the vocabulary. Odds are chances relative to the likeliest
// token's, from 0 to 1. Included by kernels.cpp alone.
#pragma once
#include "kernels.h"
#include "math.h"

namespace treadle {
namespace {

// Among odds sorted from the largest down, finds the value at which their running sum (of 1 each, or of the odds
// themselves) first reaches `goal`; `before` becomes the sum over the values larger than it. Non-negative floats are
// ordered as their bit patterns are, so four rounds over the bytes, each with a histogram, find it exactly.
template <bool by_count>
float value_reaching(const float* odds, int64_t count, double goal, double& before) {
  uint32_t prefix = 0;
  before = 0.0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    double sums[256] = {};
    const uint32_t known = shift == 24 ? 0u : ~0u << (shift + 8);
    for (int64_t i = 0; i < count; ++i) {
      const uint32_t bits = bits_of(odds[i]);
      if ((bits & known) == prefix) sums[(bits >> shift) & 255u] += by_count ? 1.0 : static_cast<double>(odds[i]);
    }
    int byte = 255, last = 255;
    for (; byte >= 0; --byte) {
      if (sums[byte] == 0.0) continue;
      last = byte;
      if (before + sums[byte] >= goal) break;
      before += sums[byte];
    }
    if (byte < 0) {
      // Rounding kept the sum below the goal: the smallest value there is.
      byte = last;
      before -= sums[byte];
    }
    prefix |= static_cast<uint32_t>(byte) << shift;
  }
  return float_of(prefix);
}

// The index of the largest logit, the first of equals; the first undefined one where there is one.
template <class T>
int64_t likeliest(const T* logits, int64_t count, float& top) {
  top = -__builtin_inff();
#pragma omp simd reduction(max : top)
  for (int64_t i = 0; i < count; ++i) {
    const float value = load(logits + i);
    top = value > top ? value : top;
  }
  int32_t undefined = 0;
#pragma omp simd reduction(| : undefined)
  for (int64_t i = 0; i < count; ++i) undefined |= load(logits + i) != load(logits + i);
  for (int64_t i = 0; i < count; ++i) {
    const float value = load(logits + i);
    if (undefined ? value != value : value == top) return i;
  }
  return 0;
}

void keep_most_likely(float* odds, int64_t count, int64_t top_k) {
  double before;
  const float least = value_reaching<true>(odds, count, static_cast<double>(top_k), before);
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) odds[i] = select(odds[i] < least, 0.0f, odds[i]);
}

void keep_share(float* odds, int64_t count, float top_p) {
  double total = 0.0, before;
  for (int64_t i = 0; i < count; ++i) total += static_cast<double>(odds[i]);
  const double goal = static_cast<double>(top_p) * total;
  const float least = value_reaching<false>(odds, count, goal, before);
  // Of the tokens with exactly the last value, the first ones stay, as many as the share needs, and at least one.
  bool one = before > 0.0;
  for (int64_t i = 0; i < count; ++i) {
    if (odds[i] < least) {
      odds[i] = 0.0f;
    } else if (odds[i] == least) {
      if (one && before >= goal) {
        odds[i] = 0.0f;
      } else {
        before += static_cast<double>(least);
        one = true;
      }
    }
  }
}

// The first token at which the running sum of the odds passes uniform * total; sums of blocks are kept apart so that
// both passes add in the same order.
int64_t draw(const float* odds, int64_t count, float uniform, int64_t otherwise) {
  constexpr int64_t kBlock = 256;
  const auto block_sum = [=](int64_t begin) {
    const int64_t end = begin + kBlock < count ? begin + kBlock : count;
    double sum = 0.0;
    for (int64_t i = begin; i < end; ++i) sum += static_cast<double>(odds[i]);
    return sum;
  };
  double total = 0.0;
  for (int64_t begin = 0; begin < count; begin += kBlock) total += block_sum(begin);
  if (!(total > 0.0)) return otherwise;
  const double target = static_cast<double>(uniform) * total;
  double reached = 0.0;
  int64_t last = otherwise;
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const double sum = block_sum(begin);
    const int64_t end = begin + kBlock < count ? begin + kBlock : count;
    if (sum > 0.0) {
      double within = reached;
      for (int64_t i = begin; i < end; ++i) {
        if (odds[i] == 0.0f) continue;
        last = i;
        within += static_cast<double>(odds[i]);
        if (within > target) return i;
      }
    }
    reached += sum;
  }
  return last;
}

template <class T>
int64_t sample_row(const Sample& a, int64_t row) {
  const int64_t count = a.vocabulary;
  const T* logits = static_cast<const T*>(a.logits) + row * count;
  float top;
  const int64_t greedy = likeliest(logits, count, top);
  const float temperature = a.temperature[row], min_p = a.min_p[row];
  if (!(temperature > 0.0f)) return greedy;
  float* odds = a.odds + row * count;
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    // The largest becomes 0 before the division, which a tiny temperature could not overflow then.
    const float value = exp_of((load(logits + i) - top) / temperature);
    odds[i] = select(value < min_p, 0.0f, value);
  }
  if (a.top_k[row] > 0 && a.top_k[row] < count) keep_most_likely(odds, count, a.top_k[row]);
  if (a.top_p[row] < 1.0f) keep_share(odds, count, a.top_p[row]);
  return draw(odds, count, a.uniform[row], greedy);
}

void sample(const Sample& a, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row)
    a.tokens[row] = a.type == kFloat32 ? sample_row<float>(a, row) : sample_row<bf16>(a, row);
}

}  // namespace
}  // namespace treadle
