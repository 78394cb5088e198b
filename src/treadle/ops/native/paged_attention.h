// Attention of new tokens over a paged cache, read as it is stored: each key and value once for all the query heads that
// share it. Softmax runs over spans of keys with a running maximum (Milakov and Gimelshein 2018), so that no row of
// scores is kept. Spans begin at multiples of kSpan and every step is done for each (row, head) by itself, so that a
// result depends on nothing else in the batch. Included by paged_kernels.cpp alone.
#pragma once
#include "paged_cache.h"

namespace treadle {
namespace {

constexpr int64_t kSpan = 64;
constexpr int64_t kHeadsAtOnce = 4;

// The state of one query head of one row.
struct PagedHead {
  float query[kMostHeadSize];       // scaled, and turned for a quantized cache
  float query_sums[kMostGroups];
  float sum[kMostHeadSize];         // of weighted values: codes alone in a quantized cache
  float zero[kMostGroups];          // what their zero points come to
  float weights[kSpan], scaled[kSpan];  // scores, then weights; weights times the scales of a group of values
  float top, total;
  int64_t first, seen;              // which entries it sees
  int64_t low, high;                // which of those are in the current span
};

// The entries of a span: where each one's block is.
template <class Cache>
struct Span {
  const typename Cache::Element* values[kSpan];
  float scales[kSpan], zeros[kSpan];  // of one group of values
};

template <class Element>
Lanes load_some(const Element* p, int64_t count, bool high, Lanes (*lanes)(const Element*, bool)) {
  Element some[kLanes] = {};
  for (int64_t i = 0; i < count; ++i) some[i] = p[i];
  return lanes(some, high);
}

// The scores of `count` keys (kLanes, or fewer with kSome) that lie side by side from `key` on, for some heads.
template <class Cache, int kHeads, bool kSome>
void score_keys(const Record<Cache>& r, const typename Cache::Element* key, int64_t stride, int64_t count,
                PagedHead* const* heads, int64_t place) {
  using Element = typename Cache::Element;
  const auto element = [&](int64_t i) {
    const Element* p = key + r.place(i) * stride;
    if constexpr (kSome) return load_some<Element>(p, count, r.high(i), Cache::lanes);
    return Cache::lanes(p, r.high(i));
  };
  Lanes scores[kHeads] = {};
  for (int64_t g = 0; g < r.groups; ++g) {
    // Two sums, so that an addition need not wait for the one before.
    Lanes even[kHeads] = {}, odd[kHeads] = {};
    int64_t i = g * r.group;
    const int64_t end = r.end_of(g);
    for (; i + 1 < end; i += 2) {
      const Lanes first = element(i), second = element(i + 1);
      for (int h = 0; h < kHeads; ++h) {
        even[h] += heads[h]->query[i] * first;
        odd[h] += heads[h]->query[i + 1] * second;
      }
    }
    if (i < end) {
      const Lanes last = element(i);
      for (int h = 0; h < kHeads; ++h) even[h] += heads[h]->query[i] * last;
    }
    if constexpr (Cache::kBits == 0) {
      for (int h = 0; h < kHeads; ++h) scores[h] = even[h] + odd[h];
    } else {
      uint8_t scale_bytes[kLanes] = {}, zero_bytes[kLanes] = {};
      const int64_t known = kSome ? count : kLanes;
      for (int64_t j = 0; j < known; ++j) {
        scale_bytes[j] = key[(r.codes + g) * stride + j];
        zero_bytes[j] = key[(r.codes + r.groups + g) * stride + j];
      }
      const Integers codes = integers(scale_bytes);
      // A code of 255 becomes a NaN: every bit of the exponent is set.
      const Lanes scales = as_lanes(((codes + kScaleBias) << 20) | ((codes == kNanScale) & 0x7fc00000));
      const Lanes zeros = converted(integers(zero_bytes)) * Cache::kZeroStep;
      for (int h = 0; h < kHeads; ++h) scores[h] += scales * ((even[h] + odd[h]) - zeros * heads[h]->query_sums[g]);
    }
  }
  for (int h = 0; h < kHeads; ++h) {
    if (kSome) {
      for (int64_t j = 0; j < count; ++j) heads[h]->weights[place + j] = scores[h][j];
    } else {
      store_lanes(heads[h]->weights + place, scores[h]);
    }
  }
}

// Adds elements begin .. end-1, all of one group and one half, of the values of a span to some heads' sums.
template <class Cache, int kHeads, int kVectors>
int64_t add_values(const Record<Cache>& r, const Span<Cache>& span, int64_t begin, int64_t end, int64_t low, int64_t high,
                   PagedHead* const* heads, const float* const* weights) {
  const bool half = r.high(begin);
  for (; begin + kVectors * kLanes <= end; begin += kVectors * kLanes) {
    Lanes sums[kHeads][kVectors];
    for (int h = 0; h < kHeads; ++h)
      for (int v = 0; v < kVectors; ++v) sums[h][v] = load_lanes(heads[h]->sum + begin + v * kLanes);
    const int64_t place = r.place(begin);
    for (int64_t j = low; j < high; ++j) {
      Lanes values[kVectors];
      for (int v = 0; v < kVectors; ++v) values[v] = Cache::lanes(span.values[j] + place + v * kLanes, half);
      for (int h = 0; h < kHeads; ++h)
        for (int v = 0; v < kVectors; ++v) sums[h][v] += weights[h][j] * values[v];
    }
    for (int h = 0; h < kHeads; ++h)
      for (int v = 0; v < kVectors; ++v) store_lanes(heads[h]->sum + begin + v * kLanes, sums[h][v]);
  }
  return begin;
}

template <class Cache, int kHeads>
void take_values(const Record<Cache>& r, Span<Cache>& span, int64_t low, int64_t high, PagedHead* const* heads) {
  const float* weights[kHeads];
  for (int64_t g = 0; g < r.groups; ++g) {
    for (int h = 0; h < kHeads; ++h) weights[h] = heads[h]->weights;
    if constexpr (Cache::kBits != 0) {
      for (int64_t j = low; j < high; ++j) {
        span.scales[j] = scale_of(span.values[j][r.codes + g]);
        span.zeros[j] = span.values[j][r.codes + r.groups + g] * Cache::kZeroStep;
      }
      for (int h = 0; h < kHeads; ++h) {
        for (int64_t j = low; j < high; ++j) {
          heads[h]->scaled[j] = heads[h]->weights[j] * span.scales[j];
          heads[h]->zero[g] += heads[h]->scaled[j] * span.zeros[j];
        }
        weights[h] = heads[h]->scaled;
      }
    }
    int64_t begin = g * r.group;
    while (begin < r.end_of(g)) {
      const int64_t stop = !r.high(begin) && r.half < r.end_of(g) ? r.half : r.end_of(g);
      begin = add_values<Cache, kHeads, 2>(r, span, begin, stop, low, high, heads, weights);
      begin = add_values<Cache, kHeads, 1>(r, span, begin, stop, low, high, heads, weights);
      for (; begin < stop; ++begin)
        for (int h = 0; h < kHeads; ++h)
          for (int64_t j = low; j < high; ++j)
            heads[h]->sum[begin] += weights[h][j] * Cache::element(span.values[j] + r.place(begin), r.high(begin));
    }
  }
}

// Calls `function` with the number of heads, at most kHeadsAtOnce, as a constant.
template <class Function>
void with_heads(int64_t count, Function&& function) {
  switch (count) {
    case 1: return function(std::integral_constant<int, 1>{});
    case 2: return function(std::integral_constant<int, 2>{});
    case 3: return function(std::integral_constant<int, 3>{});
    default: return function(std::integral_constant<int, 4>{});
  }
}

// Scores of the span's keys low .. high-1 (and of others beside them) for every head.
template <class Cache>
void score_span(const PagedAttention& a, const Record<Cache>& r, const int32_t* table, int64_t kv_head, int64_t start,
                int64_t low, int64_t high, PagedHead* const* heads, int64_t count) {
  const int64_t size = a.cache.block_size;
  const bool whole = size % kLanes == 0;
  for (int64_t j = whole ? low / kLanes * kLanes : low; j < high;) {
    const int64_t block = (start + j) / size, entry = (start + j) % size;
    int64_t some = whole || size - entry > kLanes ? kLanes : size - entry;
    some = !whole && high - j < some ? high - j : some;
    const auto* key = static_cast<const typename Cache::Element*>(a.cache.keys) +
                      (table[block] * a.cache.kv_heads + kv_head) * size * r.elements + entry;
    for (int64_t h = 0; h < count; h += kHeadsAtOnce)
      with_heads(count - h, [&](auto n) {
        some == kLanes ? score_keys<Cache, n, false>(r, key, size, some, heads + h, j)
                       : score_keys<Cache, n, true>(r, key, size, some, heads + h, j);
      });
    j += some;
  }
}

// Turns a head's scores of a span into weights and lets its running sums keep up.
inline void weigh(const PagedAttention& a, PagedHead& head, int64_t size, int64_t groups) {
  float* weights = head.weights;
  const int32_t low = static_cast<int32_t>(head.low), high = static_cast<int32_t>(head.high);
  if (a.softcap != 0.0f) {
    const float cap = a.softcap;
#pragma omp simd
    for (int32_t j = 0; j < kSpan; ++j) weights[j] = cap * tanh_of(weights[j] / cap);
  }
  float top = head.top;
  int32_t undefined = 0;
#pragma omp simd reduction(max : top) reduction(| : undefined)
  for (int32_t j = 0; j < kSpan; ++j) {
    const float score = select((j >= low) & (j < high), weights[j], -__builtin_inff());
    weights[j] = score;
    top = score > top ? score : top;
    undefined |= score != score;
  }
  if (undefined != 0 || head.top != head.top) top = __builtin_nanf("");
  const float base = top == -__builtin_inff() ? 0.0f : top;
  float total = 0.0f;
#pragma omp simd reduction(+ : total)
  for (int32_t j = 0; j < kSpan; ++j) {
    const float weight = select((j >= low) & (j < high), exp_of(weights[j] - base), 0.0f);
    weights[j] = weight;
    total += weight;
  }
  if (head.top != top) {
    const float shrink = exp_of(head.top - base);
    head.total *= shrink;
    for (int64_t i = 0; i < size; ++i) head.sum[i] *= shrink;
    for (int64_t g = 0; g < groups; ++g) head.zero[g] *= shrink;
  }
  head.top = top;
  head.total += total;
}

// Takes entries start .. start + kSpan - 1 into the state of those heads that see any of them.
template <class Cache>
void take_span(const PagedAttention& a, const Record<Cache>& r, const int32_t* table, int64_t kv_head, int64_t start,
               PagedHead* all, int64_t count) {
  PagedHead* heads[kTileHeads];
  int64_t seeing = 0, low = kSpan, high = 0;
  bool alike = true;
  for (int64_t h = 0; h < count; ++h) {
    PagedHead& head = all[h];
    head.low = head.first > start ? head.first - start : 0;
    head.high = head.seen < start + kSpan ? head.seen - start : kSpan;
    if (head.low >= head.high) continue;
    alike = alike && (seeing == 0 || (head.low == low && head.high == high));
    low = head.low < low ? head.low : low;
    high = head.high > high ? head.high : high;
    heads[seeing++] = &head;
  }
  if (seeing == 0) return;
  Span<Cache> span;
  const int64_t size = a.cache.block_size;
  for (int64_t j = low; j < high;) {
    const int64_t block = (start + j) / size, entry = (start + j) % size;
    const int64_t some = size - entry < high - j ? size - entry : high - j;
    const auto* value = static_cast<const typename Cache::Element*>(a.cache.values) +
                        ((table[block] * a.cache.kv_heads + kv_head) * size + entry) * r.elements;
    // They come while the scores are computed.
    for (int64_t byte = 0; byte < some * r.elements * static_cast<int64_t>(sizeof *value); byte += 64)
      __builtin_prefetch(reinterpret_cast<const char*>(value) + byte);
    for (const int64_t stop = j + some; j < stop; ++j, value += r.elements) span.values[j] = value;
  }
  score_span<Cache>(a, r, table, kv_head, start, low, high, heads, seeing);
  for (int64_t h = 0; h < seeing; ++h) weigh(a, *heads[h], r.size, Cache::kBits == 0 ? 0 : r.groups);
  // Heads of rows that do not see the same entries go one by one: what a row does not see, it must not read.
  const int64_t together = alike ? kHeadsAtOnce : 1;
  for (int64_t h = 0; h < seeing; h += together) {
    const int64_t n = seeing - h < together ? seeing - h : together;
    with_heads(n, [&](auto n) { take_values<Cache, n>(r, span, heads[h]->low, heads[h]->high, heads + h); });
  }
}

// What several parts come to, taken in order. `add` is compiled once: which of its products is fused with the addition is
// the compiler's choice, and must be the same for whoever calls it.
struct Running {
  float sum[kMostHeadSize];
  float top, total;

  // A sink is a key of this score whose value is 0.
  void begin(const float* sink, int64_t size) {
    top = sink != nullptr ? *sink : -__builtin_inff();
    total = sink != nullptr ? 1.0f : 0.0f;
    for (int64_t i = 0; i < size; ++i) sum[i] = 0.0f;
  }

  __attribute__((noinline)) void add(const float* part_sum, float part_top, float part_total, int64_t size) {
    float larger = part_top > top ? part_top : top;
    if (part_top != part_top || top != top) larger = __builtin_nanf("");
    const float base = larger == -__builtin_inff() ? 0.0f : larger;
    const float ours = top == larger ? 1.0f : exp_of(top - base);
    const float theirs = part_top == larger ? 1.0f : exp_of(part_top - base);
    for (int64_t i = 0; i < size; ++i) sum[i] = sum[i] * ours + part_sum[i] * theirs;
    total = total * ours + part_total * theirs;
    top = larger;
  }

  template <class T>
  __attribute__((noinline)) void write(T* out, int64_t size, bool turned) {
    const float scale = 1.0f / total;
    for (int64_t i = 0; i < size; ++i) sum[i] *= scale;
    if (turned) turn(sum, size);
    for (int64_t i = 0; i < size; ++i) store(out + i, sum[i]);
  }
};

template <class Cache>
void begin_query(const PagedAttention& a, const Record<Cache>& r, const PagedTile& tile, int64_t row, int64_t head,
                 PagedHead& state) {
  const int64_t place = (tile.row + row) * a.heads + head;
  for (int64_t i = 0; i < r.size; ++i)
    state.query[i] =
        (a.type == kFloat32 ? load(row_of<const float>(a.q, place) + i) : load(row_of<const bf16>(a.q, place) + i)) *
        a.scale;
  if constexpr (Cache::kBits != 0) {
    turn(state.query, r.size);
    for (int64_t g = 0; g < r.groups; ++g) {
      state.query_sums[g] = 0.0f;
      for (int64_t i = g * r.group; i < r.end_of(g); ++i) state.query_sums[g] += state.query[i];
    }
  }
  state.seen = tile.seen + row;
  state.first = a.window > 0 && state.seen > a.window ? state.seen - a.window : 0;
}

// Entries first .. stop-1 (within one part) by themselves: the heads' states afterwards hold sum, top and total.
template <class Cache>
void take_part(const PagedAttention& a, const Record<Cache>& r, const int32_t* table, int64_t kv_head, int64_t first,
               int64_t stop, PagedHead* heads, int64_t count) {
  for (int64_t h = 0; h < count; ++h) {
    heads[h].top = -__builtin_inff();
    heads[h].total = 0.0f;
    for (int64_t i = 0; i < r.size; ++i) heads[h].sum[i] = 0.0f;
    for (int64_t g = 0; g < r.groups; ++g) heads[h].zero[g] = 0.0f;
  }
  for (int64_t start = first / kSpan * kSpan; start < stop; start += kSpan)
    take_span<Cache>(a, r, table, kv_head, start, heads, count);
  if constexpr (Cache::kBits != 0)
    for (int64_t h = 0; h < count; ++h)
      for (int64_t g = 0; g < r.groups; ++g)
        for (int64_t i = g * r.group; i < r.end_of(g); ++i) heads[h].sum[i] -= heads[h].zero[g];
}

void write_head(const PagedAttention& a, Running& running, int64_t row, int64_t head) {
  const bool turned = a.cache.type == kCacheInt8 || a.cache.type == kCacheInt4;
  const int64_t place = row * a.heads + head;
  a.type == kFloat32 ? running.write(row_of<float>(a.out, place), a.cache.size, turned)
                     : running.write(row_of<bf16>(a.out, place), a.cache.size, turned);
}

template <class Cache>
void attend_tile(const PagedAttention& a, const PagedTile& tile, int64_t kv_head, int64_t part, float* states) {
  const Record<Cache> r(a.cache.size);
  const int64_t group = a.heads / a.cache.kv_heads, all = tile.count * group;
  PagedHead heads[kTileHeads];
  Running running[kTileHeads];
  for (int64_t begin = 0; begin < all; begin += kTileHeads) {
    const int64_t count = all - begin < kTileHeads ? all - begin : kTileHeads;
    int64_t first = INT64_MAX, seen = 0;
    for (int64_t h = 0; h < count; ++h) {
      const int64_t row = (begin + h) / group, head = kv_head * group + (begin + h) % group;
      begin_query<Cache>(a, r, tile, row, head, heads[h]);
      running[h].begin(a.sinks != nullptr ? a.sinks + head : nullptr, r.size);
      first = heads[h].first < first ? heads[h].first : first;
      seen = heads[h].seen > seen ? heads[h].seen : seen;
    }
    const int64_t from = states != nullptr ? part : first / kPartKeys;
    const int64_t upto = states != nullptr ? part + 1 : (seen + kPartKeys - 1) / kPartKeys;
    for (int64_t p = from; p < upto; ++p) {
      const int64_t low = first > p * kPartKeys ? first : p * kPartKeys;
      const int64_t high = seen < (p + 1) * kPartKeys ? seen : (p + 1) * kPartKeys;
      take_part<Cache>(a, r, tile.table, kv_head, low, high, heads, count);
      for (int64_t h = 0; h < count; ++h) {
        if (states == nullptr) {
          // A part of which a head sees nothing leaves its sums as they are, but not to the last bit.
          if (heads[h].first < high && heads[h].seen > low)
            running[h].add(heads[h].sum, heads[h].top, heads[h].total, r.size);
          continue;
        }
        float* state = states + (begin + h) * state_size(r.size);
        for (int64_t i = 0; i < r.size; ++i) state[i] = heads[h].sum[i];
        state[r.size] = heads[h].top;
        state[r.size + 1] = heads[h].total;
      }
    }
    if (states != nullptr) continue;
    for (int64_t h = 0; h < count; ++h)
      write_head(a, running[h], tile.row + (begin + h) / group, kv_head * group + (begin + h) % group);
  }
}

void paged_attend(const PagedAttention& a, const PagedTile& tile, int64_t kv_head, int64_t part, float* states) {
  with_cache(a.cache.type, [&](auto cache) { attend_tile<decltype(cache)>(a, tile, kv_head, part, states); });
}

void paged_combine(const PagedAttention& a, const PagedTile& tile, int64_t kv_head, int64_t begin, int64_t end,
                   const float* states) {
  const int64_t group = a.heads / a.cache.kv_heads, size = a.cache.size, step = state_size(size);
  Running running;
  for (int64_t index = 0; index < tile.count * group; ++index) {
    const int64_t row = index / group, head = kv_head * group + index % group, seen = tile.seen + row;
    const int64_t first = a.window > 0 && seen > a.window ? seen - a.window : 0;
    running.begin(a.sinks != nullptr ? a.sinks + head : nullptr, size);
    for (int64_t part = begin; part < end; ++part) {
      const float* state = states + ((part - begin) * tile.count * group + index) * step;
      if (first < (part + 1) * kPartKeys && seen > part * kPartKeys)
        running.add(state, state[size], state[size + 1], size);
    }
    write_head(a, running, tile.row + row, head);
  }
}

}  // namespace
}  // namespace treadle
