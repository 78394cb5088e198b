// Rotary position embedding. Included by kernels.cpp alone.
#pragma once
#include "kernels.h"
#include "math.h"

namespace treadle {
namespace {

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

void rope(const Rope& a, int64_t begin, int64_t end) {
  a.type == kFloat32 ? rope_rows<float>(a, begin, end) : rope_rows<bf16>(a, begin, end);
}

}  // namespace
}  // namespace treadle
