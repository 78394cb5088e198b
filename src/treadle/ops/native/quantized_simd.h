// What the quantized kernels need of the instruction set, for 16 lanes of 32 bits; everything is static to a variant.
// Float operations round once each and are never contracted, so that all variants agree to the last bit.
#pragma once
#include <cstdint>
#include <cstring>

#include "math.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512VNNI__)
#define TREADLE_SIMD_512 1
#include <immintrin.h>
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define TREADLE_SIMD_256 1
#include <immintrin.h>
#else
#define TREADLE_SIMD_PLAIN 1
#endif

#define TREADLE_INLINE inline __attribute__((always_inline))

namespace {

using std::int16_t;
using std::int32_t;
using std::int64_t;
using std::int8_t;
using std::uint16_t;
using std::uint32_t;
using std::uint8_t;

TREADLE_INLINE int32_t load32(const uint8_t* p) {
  int32_t value;
  std::memcpy(&value, p, 4);
  return value;
}

TREADLE_INLINE float load_float(const uint8_t* p) {
  float value;
  std::memcpy(&value, p, 4);
  return value;
}

#if TREADLE_SIMD_512

constexpr int kMostRowTiles = 2, kMostTokens = 5;  // of a register block

struct Bytes { __m512i v; };
struct Ints { __m512i v; };
struct Floats { __m512 v; };
struct Quad { __m512i v; };  // 4 bytes in every lane

TREADLE_INLINE Bytes load_bytes(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
TREADLE_INLINE Bytes low_nibbles(Bytes x) { return {_mm512_and_si512(x.v, _mm512_set1_epi8(15))}; }
TREADLE_INLINE Bytes high_nibbles(Bytes x) {
  return {_mm512_and_si512(_mm512_srli_epi16(x.v, 4), _mm512_set1_epi8(15))};
}
// x with the bits `mask` of (plane << left >> right) set in each byte.
TREADLE_INLINE Bytes with_bits(Bytes x, Bytes plane, int left, int right, int mask) {
  const __m512i moved = _mm512_srli_epi16(_mm512_slli_epi16(plane.v, left), right);
  constexpr int kOrWithAnd = 0xf8;  // first | (second & third)
  return {_mm512_ternarylogic_epi32(x.v, moved, _mm512_set1_epi8(static_cast<char>(mask)), kOrWithAnd)};
}
TREADLE_INLINE Quad load_quad(const uint8_t* p) { return {_mm512_set1_epi32(load32(p))}; }

// d += the dot products of unsigned x0, x1 with signed y0, y1. Bits: those of x.
template <int Bits>
TREADLE_INLINE void dot(Ints& d, Bytes x0, Bytes x1, Quad y0, Quad y1) {
  d.v = _mm512_dpbusd_epi32(d.v, x0.v, y0.v);
  d.v = _mm512_dpbusd_epi32(d.v, x1.v, y1.v);
}
// What `dot` starts from, where a value x means x - 2^Log2: the negated sum of y times 2^Log2.
template <int Bits>
TREADLE_INLINE Ints start(int32_t negated_sum, int log2) {
  return {_mm512_slli_epi32(_mm512_set1_epi32(negated_sum), log2)};
}

TREADLE_INLINE Ints zero_ints() { return {_mm512_setzero_si512()}; }
TREADLE_INLINE Ints load_ints(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
TREADLE_INLINE Ints widen_unsigned(const uint8_t* p) {
  return {_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
TREADLE_INLINE Ints widen_signed(const uint8_t* p) {
  return {_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
TREADLE_INLINE Ints shift_right(Ints x, int count) { return {_mm512_srl_epi32(x.v, _mm_cvtsi32_si128(count))}; }
TREADLE_INLINE Ints bits(Ints x, int mask) { return {_mm512_and_si512(x.v, _mm512_set1_epi32(mask))}; }
TREADLE_INLINE Ints plus_sixteen_times(Ints x, Ints y) { return {_mm512_or_si512(x.v, _mm512_slli_epi32(y.v, 4))}; }
TREADLE_INLINE Ints negated(Ints x) { return {_mm512_sub_epi32(_mm512_setzero_si512(), x.v)}; }
TREADLE_INLINE Floats to_floats(Ints x) { return {_mm512_cvtepi32_ps(x.v)}; }

TREADLE_INLINE Floats zero_floats() { return {_mm512_setzero_ps()}; }
TREADLE_INLINE Floats load_halves(const uint8_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
TREADLE_INLINE Floats times(Floats x, Floats y) { return {_mm512_mul_ps(x.v, y.v)}; }
TREADLE_INLINE Floats times(Floats x, float y) { return {_mm512_mul_ps(x.v, _mm512_set1_ps(y))}; }
TREADLE_INLINE Floats plus(Floats x, Floats y) { return {_mm512_add_ps(x.v, y.v)}; }
TREADLE_INLINE Floats fused(Floats x, Floats y, Floats z) { return {_mm512_fmadd_ps(x.v, y.v, z.v)}; }
TREADLE_INLINE Floats fused(Floats x, float y, Floats z) { return {_mm512_fmadd_ps(x.v, _mm512_set1_ps(y), z.v)}; }
TREADLE_INLINE Floats load_floats(const float* p) { return {_mm512_loadu_ps(p)}; }
TREADLE_INLINE Floats load_floats(const bf16* p) {
  const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16))};
}
TREADLE_INLINE void store_floats(float* p, Floats x) { _mm512_storeu_ps(p, x.v); }

// The bits of the largest size among 32 values; NaN counts as larger than infinity.
TREADLE_INLINE uint32_t largest_size_bits(Floats x, Floats y) {
  const __m512i sign = _mm512_set1_epi32(0x7fffffff);
  const __m512i a = _mm512_and_si512(_mm512_castps_si512(x.v), sign);
  const __m512i b = _mm512_and_si512(_mm512_castps_si512(y.v), sign);
  return static_cast<uint32_t>(_mm512_reduce_max_epi32(_mm512_max_epi32(a, b)));
}
// Writes 16 int8, x times `by` rounded to the nearest integers (ties to even; sizes up to 127), and returns their sum.
TREADLE_INLINE int32_t round_to_bytes(Floats x, float by, uint8_t* out) {
  const __m128i q = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(_mm512_mul_ps(x.v, _mm512_set1_ps(by))));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), q);
  const __m128i sums = _mm_sad_epu8(_mm_xor_si128(q, _mm_set1_epi8(-128)), _mm_setzero_si128());
  return _mm_cvtsi128_si32(sums) + _mm_extract_epi16(sums, 4) - 16 * 128;
}

#elif TREADLE_SIMD_256

constexpr int kMostRowTiles = 1, kMostTokens = 2;

struct Bytes { __m256i v[2]; };
struct Ints { __m256i v[2]; };
struct Floats { __m256 v[2]; };
struct Quad { __m256i v; };

TREADLE_INLINE const __m256i* vectors(const uint8_t* p) { return reinterpret_cast<const __m256i*>(p); }
TREADLE_INLINE Bytes load_bytes(const uint8_t* p) {
  return {{_mm256_loadu_si256(vectors(p)), _mm256_loadu_si256(vectors(p) + 1)}};
}
TREADLE_INLINE Bytes low_nibbles(Bytes x) {
  const __m256i mask = _mm256_set1_epi8(15);
  return {{_mm256_and_si256(x.v[0], mask), _mm256_and_si256(x.v[1], mask)}};
}
TREADLE_INLINE Bytes high_nibbles(Bytes x) {
  return low_nibbles({{_mm256_srli_epi16(x.v[0], 4), _mm256_srli_epi16(x.v[1], 4)}});
}
TREADLE_INLINE Bytes with_bits(Bytes x, Bytes plane, int left, int right, int mask) {
  const __m256i keep = _mm256_set1_epi8(static_cast<char>(mask));
  Bytes out;
  for (int i = 0; i < 2; ++i) {
    const __m256i moved = _mm256_srli_epi16(_mm256_slli_epi16(plane.v[i], left), right);
    out.v[i] = _mm256_or_si256(x.v[i], _mm256_and_si256(moved, keep));
  }
  return out;
}
TREADLE_INLINE Quad load_quad(const uint8_t* p) { return {_mm256_set1_epi32(load32(p))}; }

template <int Bits>
TREADLE_INLINE void dot(Ints& d, Bytes x0, Bytes x1, Quad y0, Quad y1) {
  for (int i = 0; i < 2; ++i) {
#if defined(__AVXVNNI__)
    d.v[i] = _mm256_dpbusd_avx_epi32(_mm256_dpbusd_avx_epi32(d.v[i], x0.v[i], y0.v), x1.v[i], y1.v);
#else
    const __m256i ones = _mm256_set1_epi16(1);
    if constexpr (Bits <= 6) {
      // Sums of pairs stay below 2 * 63 * 127, of two pairs below 2^15: nothing saturates.
      const __m256i pairs = _mm256_add_epi16(_mm256_maddubs_epi16(x0.v[i], y0.v), _mm256_maddubs_epi16(x1.v[i], y1.v));
      d.v[i] = _mm256_add_epi32(d.v[i], _mm256_madd_epi16(pairs, ones));
    } else {
      // Unsigned bytes times signed ones would saturate. x - 128 is signed: its size times y with its sign does not.
      const __m256i flip = _mm256_set1_epi8(-128);
      const __m256i s0 = _mm256_xor_si256(x0.v[i], flip), s1 = _mm256_xor_si256(x1.v[i], flip);
      const __m256i pairs0 = _mm256_maddubs_epi16(_mm256_abs_epi8(s0), _mm256_sign_epi8(y0.v, s0));
      const __m256i pairs1 = _mm256_maddubs_epi16(_mm256_abs_epi8(s1), _mm256_sign_epi8(y1.v, s1));
      const __m256i sums = _mm256_add_epi32(_mm256_madd_epi16(pairs0, ones), _mm256_madd_epi16(pairs1, ones));
      d.v[i] = _mm256_add_epi32(d.v[i], sums);
    }
#endif
  }
}
template <int Bits>
TREADLE_INLINE Ints start(int32_t negated_sum, int log2) {
#if !defined(__AVXVNNI__)
  if constexpr (Bits == 8) negated_sum = 0;  // `dot` takes signed values there
#endif
  const __m256i value = _mm256_slli_epi32(_mm256_set1_epi32(negated_sum), log2);
  return {{value, value}};
}

TREADLE_INLINE Ints zero_ints() { return {{_mm256_setzero_si256(), _mm256_setzero_si256()}}; }
TREADLE_INLINE Ints load_ints(const uint8_t* p) {
  return {{_mm256_loadu_si256(vectors(p)), _mm256_loadu_si256(vectors(p) + 1)}};
}
TREADLE_INLINE __m128i load_eight(const uint8_t* p) { return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)); }
TREADLE_INLINE Ints widen_unsigned(const uint8_t* p) {
  return {{_mm256_cvtepu8_epi32(load_eight(p)), _mm256_cvtepu8_epi32(load_eight(p + 8))}};
}
TREADLE_INLINE Ints widen_signed(const uint8_t* p) {
  return {{_mm256_cvtepi8_epi32(load_eight(p)), _mm256_cvtepi8_epi32(load_eight(p + 8))}};
}
TREADLE_INLINE Ints shift_right(Ints x, int count) {
  const __m128i by = _mm_cvtsi32_si128(count);
  return {{_mm256_srl_epi32(x.v[0], by), _mm256_srl_epi32(x.v[1], by)}};
}
TREADLE_INLINE Ints bits(Ints x, int mask) {
  const __m256i keep = _mm256_set1_epi32(mask);
  return {{_mm256_and_si256(x.v[0], keep), _mm256_and_si256(x.v[1], keep)}};
}
TREADLE_INLINE Ints plus_sixteen_times(Ints x, Ints y) {
  return {{_mm256_or_si256(x.v[0], _mm256_slli_epi32(y.v[0], 4)),
           _mm256_or_si256(x.v[1], _mm256_slli_epi32(y.v[1], 4))}};
}
TREADLE_INLINE Ints negated(Ints x) {
  const __m256i zero = _mm256_setzero_si256();
  return {{_mm256_sub_epi32(zero, x.v[0]), _mm256_sub_epi32(zero, x.v[1])}};
}
TREADLE_INLINE Floats to_floats(Ints x) { return {{_mm256_cvtepi32_ps(x.v[0]), _mm256_cvtepi32_ps(x.v[1])}}; }

TREADLE_INLINE Floats zero_floats() { return {{_mm256_setzero_ps(), _mm256_setzero_ps()}}; }
TREADLE_INLINE Floats load_halves(const uint8_t* p) {
  const __m128i* q = reinterpret_cast<const __m128i*>(p);
  return {{_mm256_cvtph_ps(_mm_loadu_si128(q)), _mm256_cvtph_ps(_mm_loadu_si128(q + 1))}};
}
TREADLE_INLINE Floats times(Floats x, Floats y) {
  return {{_mm256_mul_ps(x.v[0], y.v[0]), _mm256_mul_ps(x.v[1], y.v[1])}};
}
TREADLE_INLINE Floats all(float x) { return {{_mm256_set1_ps(x), _mm256_set1_ps(x)}}; }
TREADLE_INLINE Floats times(Floats x, float y) { return times(x, all(y)); }
TREADLE_INLINE Floats plus(Floats x, Floats y) {
  return {{_mm256_add_ps(x.v[0], y.v[0]), _mm256_add_ps(x.v[1], y.v[1])}};
}
TREADLE_INLINE Floats fused(Floats x, Floats y, Floats z) {
  return {{_mm256_fmadd_ps(x.v[0], y.v[0], z.v[0]), _mm256_fmadd_ps(x.v[1], y.v[1], z.v[1])}};
}
TREADLE_INLINE Floats fused(Floats x, float y, Floats z) { return fused(x, all(y), z); }
TREADLE_INLINE Floats load_floats(const float* p) { return {{_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}}; }
TREADLE_INLINE Floats load_floats(const bf16* p) {
  const __m128i* halves = reinterpret_cast<const __m128i*>(p);
  Floats out;
  for (int i = 0; i < 2; ++i)
    out.v[i] = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(halves + i)), 16));
  return out;
}
TREADLE_INLINE void store_floats(float* p, Floats x) {
  _mm256_storeu_ps(p, x.v[0]);
  _mm256_storeu_ps(p + 8, x.v[1]);
}

TREADLE_INLINE uint32_t largest_size_bits(Floats x, Floats y) {
  const auto size = [](__m256 v) { return _mm256_and_si256(_mm256_castps_si256(v), _mm256_set1_epi32(0x7fffffff)); };
  const __m256i eight = _mm256_max_epi32(_mm256_max_epi32(size(x.v[0]), size(x.v[1])), _mm256_max_epi32(size(y.v[0]), size(y.v[1])));
  __m128i four = _mm_max_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0xb1));
  return static_cast<uint32_t>(_mm_cvtsi128_si32(four));
}
TREADLE_INLINE int32_t round_to_bytes(Floats x, float by, uint8_t* out) {
  const __m256 factor = _mm256_set1_ps(by);
  const __m256i low = _mm256_cvtps_epi32(_mm256_mul_ps(x.v[0], factor)), high = _mm256_cvtps_epi32(_mm256_mul_ps(x.v[1], factor));
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xd8);
  const __m128i q = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), q);
  const __m128i sums = _mm_sad_epu8(_mm_xor_si128(q, _mm_set1_epi8(-128)), _mm_setzero_si128());
  return _mm_cvtsi128_si32(sums) + _mm_extract_epi16(sums, 4) - 16 * 128;
}

#else

constexpr int kMostRowTiles = 1, kMostTokens = 1;

struct Bytes { uint8_t v[64]; };
struct Ints { int32_t v[16]; };
struct Floats { float v[16]; };
struct Quad { int8_t v[4]; };

TREADLE_INLINE Bytes load_bytes(const uint8_t* p) {
  Bytes out;
  std::memcpy(out.v, p, 64);
  return out;
}
TREADLE_INLINE Bytes low_nibbles(Bytes x) {
  for (uint8_t& v : x.v) v &= 15;
  return x;
}
TREADLE_INLINE Bytes high_nibbles(Bytes x) {
  for (uint8_t& v : x.v) v >>= 4;
  return x;
}
TREADLE_INLINE Bytes with_bits(Bytes x, Bytes plane, int left, int right, int mask) {
  for (int i = 0; i < 64; ++i) x.v[i] = static_cast<uint8_t>(x.v[i] | (((plane.v[i] << left) >> right) & mask));
  return x;
}
TREADLE_INLINE Quad load_quad(const uint8_t* p) {
  Quad out;
  std::memcpy(out.v, p, 4);
  return out;
}
template <int Bits>
TREADLE_INLINE void dot(Ints& d, const Bytes& x0, const Bytes& x1, Quad y0, Quad y1) {
  for (int i = 0; i < 16; ++i) {
    int32_t sum = 0;
    for (int k = 0; k < 4; ++k) sum += x0.v[4 * i + k] * y0.v[k] + x1.v[4 * i + k] * y1.v[k];
    d.v[i] += sum;
  }
}
template <int Bits>
TREADLE_INLINE Ints start(int32_t negated_sum, int log2) {
  Ints out;
  for (int32_t& v : out.v) v = negated_sum * (1 << log2);
  return out;
}

#define TREADLE_EACH(Type, expression)              \
  do {                                              \
    Type out;                                       \
    for (int i = 0; i < 16; ++i) out.v[i] = (expression); \
    return out;                                     \
  } while (false)

TREADLE_INLINE Ints zero_ints() { TREADLE_EACH(Ints, 0); }
TREADLE_INLINE Ints load_ints(const uint8_t* p) { TREADLE_EACH(Ints, load32(p + 4 * i)); }
TREADLE_INLINE Ints widen_unsigned(const uint8_t* p) { TREADLE_EACH(Ints, p[i]); }
TREADLE_INLINE Ints widen_signed(const uint8_t* p) { TREADLE_EACH(Ints, static_cast<int8_t>(p[i])); }
TREADLE_INLINE Ints shift_right(const Ints& x, int count) {
  TREADLE_EACH(Ints, static_cast<int32_t>(static_cast<uint32_t>(x.v[i]) >> count));
}
TREADLE_INLINE Ints bits(const Ints& x, int mask) { TREADLE_EACH(Ints, x.v[i] & mask); }
TREADLE_INLINE Ints plus_sixteen_times(const Ints& x, const Ints& y) { TREADLE_EACH(Ints, x.v[i] | (y.v[i] << 4)); }
TREADLE_INLINE Ints negated(const Ints& x) { TREADLE_EACH(Ints, -x.v[i]); }
TREADLE_INLINE Floats to_floats(const Ints& x) { TREADLE_EACH(Floats, static_cast<float>(x.v[i])); }
TREADLE_INLINE Floats zero_floats() { TREADLE_EACH(Floats, 0.0f); }

TREADLE_INLINE float half_to_float(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16, exponent = (half >> 10) & 31u, mantissa = half & 1023u;
  uint32_t word = sign | ((exponent + 112u) << 23) | (mantissa << 13);
  if (exponent == 31) word = sign | 0x7f800000u | (mantissa << 13) | (mantissa != 0 ? 0x400000u : 0u);
  float value;
  std::memcpy(&value, &word, 4);
  if (exponent == 0) value = (sign != 0 ? -1.0f : 1.0f) * static_cast<float>(mantissa) * 5.9604644775390625e-08f;  // 2^-24
  return value;
}
TREADLE_INLINE Floats load_halves(const uint8_t* p) {
  TREADLE_EACH(Floats, half_to_float(static_cast<uint16_t>(p[2 * i] | (p[2 * i + 1] << 8))));
}
TREADLE_INLINE Floats times(const Floats& x, const Floats& y) { TREADLE_EACH(Floats, x.v[i] * y.v[i]); }
TREADLE_INLINE Floats times(const Floats& x, float y) { TREADLE_EACH(Floats, x.v[i] * y); }
TREADLE_INLINE Floats plus(const Floats& x, const Floats& y) { TREADLE_EACH(Floats, x.v[i] + y.v[i]); }
TREADLE_INLINE Floats fused(const Floats& x, const Floats& y, const Floats& z) {
  TREADLE_EACH(Floats, __builtin_fmaf(x.v[i], y.v[i], z.v[i]));
}
TREADLE_INLINE Floats fused(const Floats& x, float y, const Floats& z) {
  TREADLE_EACH(Floats, __builtin_fmaf(x.v[i], y, z.v[i]));
}
TREADLE_INLINE Floats load_floats(const float* p) {
  Floats out;
  std::memcpy(out.v, p, 64);
  return out;
}
TREADLE_INLINE Floats load_floats(const bf16* p) { TREADLE_EACH(Floats, load(p + i)); }
TREADLE_INLINE void store_floats(float* p, const Floats& x) { std::memcpy(p, x.v, 64); }

TREADLE_INLINE uint32_t largest_size_bits(const Floats& x, const Floats& y) {
  uint32_t largest = 0;
  for (int i = 0; i < 16; ++i)
    for (int other = 0; other < 2; ++other) {
      const uint32_t size = bits_of(other == 0 ? x.v[i] : y.v[i]) & 0x7fffffffu;
      largest = size > largest ? size : largest;
    }
  return largest;
}
TREADLE_INLINE int32_t round_to_bytes(const Floats& x, float by, uint8_t* out) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  int32_t sum = 0;
  for (int i = 0; i < 16; ++i) {
    const int32_t q = static_cast<int32_t>(bits_of(x.v[i] * by + kRound) - bits_of(kRound));
    out[i] = static_cast<uint8_t>(static_cast<int8_t>(q));
    sum += q;
  }
  return sum;
}

#endif

__attribute__((noinline)) void round_sixteen(const float* __restrict p, bf16* __restrict out) {
#pragma omp simd
  for (int i = 0; i < 16; ++i) store(out + i, p[i]);
}

TREADLE_INLINE void store_floats(bf16* p, Floats x) {
  float values[16];
  store_floats(values, x);
  round_sixteen(values, p);
}

// acc[0] + acc[1] += the products of bfloat16 pairs: 16 rows' weights (columns 2i, 2i+1) and one token's values.
// Where the processor multiplies bfloat16 pairs, consecutive pairs go to alternate sums (Phase), which hides the latency.
template <int Phase>
TREADLE_INLINE void pair_dot(Floats (&acc)[2], const Bytes& weights, Quad values) {
#if TREADLE_SIMD_512 && defined(__AVX512BF16__)
  acc[Phase].v = _mm512_dpbf16_ps(acc[Phase].v, reinterpret_cast<__m512bh>(weights.v), reinterpret_cast<__m512bh>(values.v));
#elif TREADLE_SIMD_512
  const __m512i high = _mm512_set1_epi32(static_cast<int32_t>(0xffff0000u));
  const auto as_floats = [](__m512i x) { return _mm512_castsi512_ps(x); };
  acc[0].v = _mm512_fmadd_ps(as_floats(_mm512_slli_epi32(weights.v, 16)), as_floats(_mm512_slli_epi32(values.v, 16)), acc[0].v);
  acc[1].v = _mm512_fmadd_ps(as_floats(_mm512_and_si512(weights.v, high)), as_floats(_mm512_and_si512(values.v, high)), acc[1].v);
#elif TREADLE_SIMD_256
  const __m256i high = _mm256_set1_epi32(static_cast<int32_t>(0xffff0000u));
  const __m256 even = _mm256_castsi256_ps(_mm256_slli_epi32(values.v, 16));
  const __m256 odd = _mm256_castsi256_ps(_mm256_and_si256(values.v, high));
  for (int i = 0; i < 2; ++i) {
    acc[0].v[i] = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_slli_epi32(weights.v[i], 16)), even, acc[0].v[i]);
    acc[1].v[i] = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_and_si256(weights.v[i], high)), odd, acc[1].v[i]);
  }
#else
  const auto value_of = [](const void* p) {
    uint16_t half;
    std::memcpy(&half, p, 2);
    const uint32_t word = static_cast<uint32_t>(half) << 16;
    float value;
    std::memcpy(&value, &word, 4);
    return value;
  };
  const float even = value_of(values.v), odd = value_of(values.v + 2);
  for (int i = 0; i < 16; ++i) {
    acc[0].v[i] += value_of(weights.v + 4 * i) * even;
    acc[1].v[i] += value_of(weights.v + 4 * i + 2) * odd;
  }
#endif
}

}  // namespace
