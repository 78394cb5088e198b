// Attention of few new tokens over cached keys and values: each key and value is read once for all the query heads that
// share it. Softmax runs over blocks of keys with a running maximum (Milakov and Gimelshein 2018), so that no row of
// scores is kept. Included by kernels.cpp alone.
#pragma once
#include "kernels.h"
#include "math.h"

namespace treadle {
namespace {

constexpr int64_t kBlockKeys = 64, kBlockHeads = 4;
constexpr int64_t kMostHeadSize = 512;  // also in attention.py

// The state of one query head: scaled query, weighted sum of values so far, running maximum and sum of weights.
struct Head {
  float query[kMostHeadSize], sum[kMostHeadSize];
  float top, total;
  float weights[kBlockKeys];
};

// The head sizes that most models have are known to the compiler, which then keeps the loops over them in registers.
// Takes keys `first` .. `first + count - 1`, whose rows lie `stride` elements apart, into the state of every head.
template <class T, int64_t kSize>
void attend_block(const CachedAttention& a, Head* heads, int64_t head_count, const T* keys, const T* values,
                  int64_t count, int64_t stride) {
  const int64_t size = kSize != 0 ? kSize : a.size;
  for (int64_t j = 0; j < count; ++j) {
    const T* key = keys + j * stride;
    for (int64_t h = 0; h < head_count; ++h) {
      const float* query = heads[h].query;
      float score = 0.0f;
#pragma omp simd reduction(+ : score)
      for (int64_t i = 0; i < size; ++i) score += query[i] * load(key + i);
      heads[h].weights[j] = a.softcap != 0.0f ? a.softcap * tanh_of(score / a.softcap) : score;
    }
  }
  for (int64_t h = 0; h < head_count; ++h) {
    Head& head = heads[h];
    float top = head.top;
    bool undefined = false;
    for (int64_t j = 0; j < count; ++j) {
      top = head.weights[j] > top ? head.weights[j] : top;
      undefined |= head.weights[j] != head.weights[j];
    }
    if (undefined) top = __builtin_nanf("");
    const float shrink = head.top == top ? 1.0f : exp_of(head.top - top);
    float total = 0.0f;
#pragma omp simd reduction(+ : total)
    for (int64_t j = 0; j < count; ++j) {
      head.weights[j] = exp_of(head.weights[j] - top);
      total += head.weights[j];
    }
    head.top = top;
    head.total = head.total * shrink + total;
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) head.sum[i] *= shrink;
  }
  for (int64_t j = 0; j < count; ++j) {
    const T* value = values + j * stride;
    for (int64_t h = 0; h < head_count; ++h) {
      const float weight = heads[h].weights[j];
      float* sum = heads[h].sum;
#pragma omp simd
      for (int64_t i = 0; i < size; ++i) sum[i] += weight * load(value + i);
    }
  }
}

template <class T, int64_t kSize>
void cached_attention_units(const CachedAttention& a, int64_t begin, int64_t end) {
  const int64_t group = a.heads / a.kv_heads, stride = a.kv_heads * a.size;
  Head heads[kBlockHeads];
  for (int64_t unit = begin; unit < end; ++unit) {
    const auto [token, slot_number, seen] = a.table[unit / a.kv_heads];
    const int64_t kv_head = unit % a.kv_heads;
    const int64_t first = a.window > 0 && seen > a.window ? seen - a.window : 0;
    const int64_t slot = slot_number * a.room * stride + kv_head * a.size;
    const T* keys = static_cast<const T*>(a.keys) + slot;
    const T* values = static_cast<const T*>(a.values) + slot;
    for (int64_t part = 0; part < group; part += kBlockHeads) {
      const int64_t count = group - part < kBlockHeads ? group - part : kBlockHeads;
      const int64_t head = kv_head * group + part;
      for (int64_t h = 0; h < count; ++h) {
        const T* query = row_of<const T>(a.q, token * a.heads + head + h);
        for (int64_t i = 0; i < a.size; ++i) heads[h].query[i] = load(query + i) * a.scale;
        for (int64_t i = 0; i < a.size; ++i) heads[h].sum[i] = 0.0f;
        // A sink is a key of this score whose value is 0.
        heads[h].top = a.sinks != nullptr ? a.sinks[head + h] : -__builtin_inff();
        heads[h].total = a.sinks != nullptr ? 1.0f : 0.0f;
      }
      for (int64_t key = first; key < seen; key += kBlockKeys) {
        const int64_t block = seen - key < kBlockKeys ? seen - key : kBlockKeys;
        attend_block<T, kSize>(a, heads, count, keys + key * stride, values + key * stride, block, stride);
      }
      for (int64_t h = 0; h < count; ++h) {
        T* out = row_of<T>(a.out, token * a.heads + head + h);
        const float scale = 1.0f / heads[h].total;
        for (int64_t i = 0; i < a.size; ++i) store(out + i, heads[h].sum[i] * scale);
      }
    }
  }
}

template <class T>
void cached_attention_of(const CachedAttention& a, int64_t begin, int64_t end) {
  if (a.size == 64) return cached_attention_units<T, 64>(a, begin, end);
  if (a.size == 128) return cached_attention_units<T, 128>(a, begin, end);
  cached_attention_units<T, 0>(a, begin, end);
}

// A unit is a (row of the table, key-value head): the query heads that share the head are done together.
void cached_attention(const CachedAttention& a, int64_t begin, int64_t end) {
  a.type == kFloat32 ? cached_attention_of<float>(a, begin, end) : cached_attention_of<bf16>(a, begin, end);
}

}  // namespace
}  // namespace treadle
