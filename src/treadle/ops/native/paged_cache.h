// How a paged cache holds its elements, and writing to it; the layout is told in paged.h. Included by paged_kernels.cpp.
#pragma once
#include "lanes.h"
#include "paged.h"

namespace treadle {
namespace {

// How elements are kept, by the type of cache. `half` says which half of a byte holds the element.
struct Float32Cache {
  using Element = float;
  static constexpr int kBits = 0;
  static Lanes lanes(const float* p, bool) { return load_lanes(p); }
  static float element(const float* p, bool) { return *p; }
};

struct BFloat16Cache {
  using Element = bf16;
  static constexpr int kBits = 0;
  static Lanes lanes(const bf16* p, bool) { return load_lanes(p); }
  static float element(const bf16* p, bool) { return load(p); }
};

struct Int8Cache {
  using Element = uint8_t;
  static constexpr int kBits = 8;
  static constexpr float kMostCode = 255.0f, kZeroStep = 1.0f;
  static Lanes lanes(const uint8_t* p, bool) { return converted(integers(p)); }
  static float element(const uint8_t* p, bool) { return *p; }
};

struct Int4Cache {
  using Element = uint8_t;
  static constexpr int kBits = 4;
  static constexpr float kMostCode = 15.0f, kZeroStep = 0.0625f;
  static Lanes lanes(const uint8_t* p, bool high) {
    const Integers bytes = integers(p);
    return converted(high ? bytes >> 4 : bytes & 15);
  }
  static float element(const uint8_t* p, bool high) { return high ? *p >> 4 : *p & 15; }
};

// The numbers of a record. `half`: from this element on they are in the high halves of the bytes.
template <class Cache>
struct Record {
  explicit Record(int64_t head_size) : size(head_size) {
    if (Cache::kBits == 4) {
      const int64_t wanted = size / kGroupSize > 1 ? size / kGroupSize : 1;
      group = (size + wanted - 1) / wanted;
      group += group & 1;
      groups = (size + group - 1) / group;
      half = codes = size / 2;
    } else {
      group = half = codes = size;
      groups = 1;
    }
    elements = Cache::kBits == 0 ? size : codes + 2 * groups;
  }
  int64_t end_of(int64_t g) const { return (g + 1) * group < size ? (g + 1) * group : size; }
  bool high(int64_t i) const { return Cache::kBits == 4 && i >= half; }
  int64_t place(int64_t i) const { return high(i) ? i - half : i; }

  int64_t size, codes, group, groups, half, elements;
};

constexpr int32_t kScaleBias = 856, kNanScale = 255, kMostScale = 254;

inline float scale_of(uint8_t byte) {
  return byte == kNanScale ? __builtin_nanf("") : float_of(static_cast<uint32_t>(byte + kScaleBias) << 20);
}

// The least scale that is no less than `value`; 255 where there is none.
inline int32_t scale_above(float value) {
  const int32_t bits = static_cast<int32_t>(bits_of(value));
  const int32_t code = ((bits + (1 << 20) - 1) >> 20) - kScaleBias;
  return value <= scale_of(kMostScale) ? (code < 0 ? 0 : code) : kNanScale;
}

inline void butterflies(const float* __restrict from, float* __restrict to, int64_t half) {
  for (int64_t i = 0; i < half; ++i) {
    const float a = from[i], b = from[i + half];
    to[2 * i] = a + b;
    to[2 * i + 1] = a - b;
  }
}

// Turns a head in place; the matrix is its own inverse. Each stage adds and subtracts what the highest bit of the index
// tells apart and makes that bit the lowest, so that all stages are alike (Pease 1968) and the order is the old one after
// the last.
inline void turn(float* x, int64_t size) {
  const int64_t span = size & -size;
  const float scale = 1.0f / __builtin_sqrtf(static_cast<float>(span));
  float other[kMostHeadSize];
  for (int64_t begin = 0; begin < size; begin += span) {
    float *from = x + begin, *to = other;
    for (int64_t step = 1; step < span; step *= 2) {
      butterflies(from, to, span / 2);
      float* const swapped = from;
      from = to;
      to = swapped;
    }
    for (int64_t i = 0; i < span; ++i) x[begin + i] = from[i] * scale;
  }
}

inline float clamped(float value, float most) {
  value = select(value > 0.0f, value, 0.0f);
  return select(value < most, value, most);
}

inline float nearest(float value) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23; values here are small
  return (value + kRound) - kRound;
}

// The codes of one group and, in `scale` and `zero`, its bytes. 4 bits are dear: of three scales (the range's own and
// two that cut a little off) and three zero points (which end is cut), the pair with the least squared error is taken.
template <class Cache>
void quantize_group(const float* x, int64_t count, uint8_t* codes, uint8_t* scale, uint8_t* zero) {
  constexpr float kMost = Cache::kMostCode, kStep = Cache::kZeroStep;
  float low = 0.0f, high = 0.0f;
  bool undefined = false;
  for (int64_t i = 0; i < count; ++i) {
    low = x[i] < low ? x[i] : low;
    high = x[i] > high ? x[i] : high;
    undefined |= x[i] != x[i];
  }
  const int32_t first = undefined ? kNanScale : scale_above((high - low) / kMost);
  float best = __builtin_inff(), best_zero = 0.0f;
  int32_t best_scale = first;
  const int32_t scales = Cache::kBits == 4 && first != kNanScale ? 3 : 1, ends = Cache::kBits == 4 ? 3 : 1;
  for (int32_t s = 0; s < scales && s <= first; ++s) {
    const float size = scale_of(static_cast<uint8_t>(first - s)), inverse = 1.0f / size;
    const float spare = (high - low) - kMost * size;  // negative: the codes reach further than the values
    for (int32_t e = 0; e < ends; ++e) {
      const float start = low + spare * (ends == 1 ? 0.5f : 0.5f * static_cast<float>(e));
      const float offset = nearest(clamped(-start * inverse, kMost) * (1.0f / kStep)) * kStep;
      float error = 0.0f;
#pragma omp simd reduction(+ : error)
      for (int64_t i = 0; i < count; ++i) {
        const float off = x[i] - (nearest(clamped(x[i] * inverse + offset, kMost)) - offset) * size;
        error += off * off;
      }
      if (error < best) best = error, best_scale = first - s, best_zero = offset;
    }
  }
  const float inverse = 1.0f / scale_of(static_cast<uint8_t>(best_scale));
  for (int64_t i = 0; i < count; ++i)
    codes[i] = static_cast<uint8_t>(nearest(clamped(x[i] * inverse + best_zero, kMost)));
  *scale = static_cast<uint8_t>(best_scale);
  *zero = static_cast<uint8_t>(nearest(best_zero * (1.0f / kStep)));
}

// The record of one head; `x` is changed.
template <class Cache>
void make_record(const Record<Cache>& r, float* x, typename Cache::Element* record) {
  if constexpr (Cache::kBits == 0) {
    for (int64_t i = 0; i < r.size; ++i) store(record + i, x[i]);
  } else {
    uint8_t codes[kMostHeadSize];
    turn(x, r.size);
    for (int64_t g = 0; g < r.groups; ++g)
      quantize_group<Cache>(x + g * r.group, r.end_of(g) - g * r.group, codes + g * r.group, record + r.codes + g,
                            record + r.codes + r.groups + g);
    for (int64_t i = 0; i < r.codes; ++i)
      record[i] = static_cast<uint8_t>(Cache::kBits == 4 ? codes[i] | codes[i + r.half] << 4 : codes[i]);
  }
}

template <class Cache, class T>
void write_tokens(const PagedWrite& a, int64_t begin, int64_t end) {
  using Element = typename Cache::Element;
  const Record<Cache> r(a.cache.size);
  const int64_t size = a.cache.block_size;
  float x[kMostHeadSize];
  Element record[kMostHeadSize + 2 * kMostGroups];
  for (int64_t token = begin; token < end; ++token) {
    const int64_t block = a.rows[token] / size, entry = a.rows[token] % size;
    for (int64_t head = 0; head < a.cache.kv_heads; ++head) {
      const int64_t start = (block * a.cache.kv_heads + head) * size * r.elements;
      const T* key = row_of<const T>(a.key, token * a.cache.kv_heads + head);
      for (int64_t i = 0; i < r.size; ++i) x[i] = load(key + i);
      make_record<Cache>(r, x, record);
      Element* keys = static_cast<Element*>(a.cache.keys) + start + entry;
      for (int64_t i = 0; i < r.elements; ++i) keys[i * size] = record[i];
      const T* value = row_of<const T>(a.value, token * a.cache.kv_heads + head);
      for (int64_t i = 0; i < r.size; ++i) x[i] = load(value + i);
      make_record<Cache>(r, x, static_cast<Element*>(a.cache.values) + start + entry * r.elements);
    }
  }
}

// Calls `function` with the cache's type as its template argument.
template <class Function>
void with_cache(CacheType type, Function&& function) {
  switch (type) {
    case kCacheFloat32: return function(Float32Cache{});
    case kCacheBFloat16: return function(BFloat16Cache{});
    case kCacheInt8: return function(Int8Cache{});
    case kCacheInt4: return function(Int4Cache{});
  }
}

void paged_write(const PagedWrite& a, int64_t begin, int64_t end) {
  with_cache(a.cache.type, [&](auto cache) {
    using Cache = decltype(cache);
    a.type == kFloat32 ? write_tokens<Cache, float>(a, begin, end) : write_tokens<Cache, bf16>(a, begin, end);
  });
}

}  // namespace
}  // namespace treadle
