// Elementary functions in plain float32 arithmetic without branches, so that the compiler vectorizes loops over them.
// Everything is static: each instruction-set variant keeps its own copy, and none leaks into another through the linker.
#pragma once
#include <cstdint>

namespace {

using std::int32_t;
using std::int64_t;
using std::uint16_t;
using std::uint32_t;

struct bf16 {
  uint16_t bits;
};

inline uint32_t bits_of(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, 4);
  return bits;
}

inline float float_of(uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, 4);
  return value;
}

inline float load(const float* p) { return *p; }
inline float load(const bf16* p) { return float_of(static_cast<uint32_t>(p->bits) << 16); }

inline void store(float* p, float value) { *p = value; }

// Rounds to nearest, ties to even; a NaN stays one.
inline void store(bf16* p, float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t quiet = (bits >> 16) | 0x40u;
  p->bits = static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
}

inline float rounded(float value, const float*) { return value; }
inline float rounded(float value, const bf16*) {
  bf16 short_value;
  store(&short_value, value);
  return load(&short_value);
}

inline float select(bool condition, float yes, float no) { return condition ? yes : no; }

// e^x within 2 units in the last place, from 0 (x < -104) to infinity (x > 88.7). x = n ln 2 + r; e^r by a polynomial
// fitted for the least relative error on |r| <= ln 2 / 2; 2^n in two factors, so that subnormal results come out right.
inline float exp_of(float x) {
  x = select(x > 89.0f, 89.0f, x);
  x = select(x < -104.0f, -104.0f, x);
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  const float shifted = x * 1.442695041f + kRound;
  const float n = shifted - kRound;
  const float r = (x - n * 0.693145752f) - n * 1.428606765e-06f;
  const float poly =
      4.999999341e-01f +
      r * (1.666652011e-01f + r * (4.166839422e-02f + r * (8.368780418e-03f + r * 1.381446685e-03f)));
  const float e = 1.0f + (r + r * r * poly);
  const uint32_t exponent = bits_of(shifted) - bits_of(kRound);
  const uint32_t half = static_cast<uint32_t>(static_cast<int32_t>(exponent) >> 1);
  const float low = float_of((half + 127u) << 23), high = float_of((exponent - half + 127u) << 23);
  return e * low * high;
}

// The logistic function 1 / (1 + e^-x), and in `rest` what is left to 1, without cancellation.
inline float logistic(float x, float& rest) {
  const float e = exp_of(-x);
  const float share = 1.0f / (1.0f + e);
  rest = select(e > 3e38f, 3e38f, e) * share;
  return share;
}

// The share of the normal distribution below x, given e^(-x^2/2): half the complementary error function of |x| / sqrt 2,
// which is e^(-x^2/2) * t * P(t) with t = 1 / (1 + 0.45 |x| / sqrt 2); P is fitted for a relative error of 4e-8.
inline float normal_below(float x, float bell) {
  const float size = select(x < 0, -x, x);
  const float t = 1.0f / (1.0f + 0.318198052f * size);
  float p = -4.139096187e-02f;
  p = p * t + 1.906872516e-01f;
  p = p * t - 3.005813342e-01f;
  p = p * t + 1.423998708e-01f;
  p = p * t - 2.235733537e-02f;
  p = p * t + 1.199502384e-01f;
  p = p * t + 1.752521621e-01f;
  p = p * t + 2.282716388e-01f;
  p = p * t + 2.538831629e-01f;
  p = p * t + 2.538853208e-01f;
  const float tail = 0.5f * bell * (t * p);
  return select(x < 0, tail, 1.0f - tail);
}

// tanh without cancellation near 0: e^(2|x|) - 1 loses digits there, so a short series takes over.
inline float tanh_of(float x) {
  const float size = select(x < 0, -x, x);
  const float square = x * x;
  const float small =
      size + size * square * (-0.333333333f + square * (0.133333333f + square * (-0.053968254f + square * 0.021869489f)));
  const float large = 1.0f - 2.0f / (1.0f + exp_of(2.0f * size));
  const float value = select(size < 0.3f, small, large);
  return select(x < 0, -value, value);
}

}  // namespace
