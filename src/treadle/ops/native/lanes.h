// Vectors of as many floats as the instruction set has in a register, and how cached elements are loaded into them.
#pragma once
#include "math.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

using std::uint8_t;

#if defined(__AVX512F__)
constexpr int64_t kLanes = 16;
#elif defined(__AVX2__)
constexpr int64_t kLanes = 8;
#else
constexpr int64_t kLanes = 4;
#endif

typedef float Lanes __attribute__((vector_size(kLanes * 4)));
typedef int32_t Integers __attribute__((vector_size(kLanes * 4)));

inline Lanes as_lanes(Integers bits) {
  Lanes lanes;
  __builtin_memcpy(&lanes, &bits, sizeof lanes);
  return lanes;
}

inline Integers integers(const uint8_t* p) {
#if defined(__AVX512F__)
  // With a mask: GCC 12 takes the undefined lanes of the plain form for an oversight.
  return (Integers)_mm512_maskz_cvtepu8_epi32(0xffff, _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif defined(__AVX2__)
  return (Integers)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
#else
  Integers found;
  for (int64_t i = 0; i < kLanes; ++i) found[i] = p[i];
  return found;
#endif
}

inline Lanes converted(Integers values) { return __builtin_convertvector(values, Lanes); }

inline Lanes load_lanes(const float* p) {
  Lanes lanes;
  __builtin_memcpy(&lanes, p, sizeof lanes);
  return lanes;
}

inline Lanes load_lanes(const bf16* p) {
#if defined(__AVX512F__)
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return as_lanes((Integers)_mm512_maskz_cvtepu16_epi32(0xffff, bits) << 16);
#elif defined(__AVX2__)
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return as_lanes((Integers)_mm256_cvtepu16_epi32(bits) << 16);
#else
  Lanes lanes;
  for (int64_t i = 0; i < kLanes; ++i) lanes[i] = load(p + i);
  return lanes;
#endif
}

inline void store_lanes(float* p, Lanes lanes) { __builtin_memcpy(p, &lanes, sizeof lanes); }

}  // namespace
