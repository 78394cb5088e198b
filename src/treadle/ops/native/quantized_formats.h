// How each format's tile blocks are laid out and read; see quantized.h for the order of columns in a 64-byte vector.
//
// A format has: Bits of a value, Groups of 32 columns in a block, Halves of a group that have scales of their own,
// ZeroLog2 where a value q means q - 2^ZeroLog2 (else -1), HasMin where a minimum is added. `group(block, g)` reads what
// the dot products need, `weights<J>` columns 4J .. 4J+3 of the group, `scale` and `minimum` the factors of 16 rows.
#pragma once
#include "quantized_simd.h"

namespace {

struct Nibbles {
  const uint8_t* values;

  template <int J>
  TREADLE_INLINE Bytes nibbles() const {
    const Bytes pair = load_bytes(values + 64 * (J % 4));
    return J < 4 ? low_nibbles(pair) : high_nibbles(pair);
  }
};

// 4-bit values. Block: 16 scales (float16), with minimums 16 minimums (float16), 256 bytes of values.
template <bool Min>
struct FourBit {
  static constexpr int Bits = 4, Groups = 1, Halves = 1, ZeroLog2 = Min ? -1 : 3;
  static constexpr bool HasMin = Min;
  static constexpr int64_t BlockBytes = Min ? 320 : 288;

  struct Group : Nibbles {
    template <int J>
    TREADLE_INLINE Bytes weights() const { return nibbles<J>(); }
  };
  static TREADLE_INLINE Group group(const uint8_t* block, int) { return {{block + (Min ? 64 : 32)}}; }
  static TREADLE_INLINE Floats scale(const uint8_t* block, int, int) { return load_halves(block); }
  static TREADLE_INLINE Floats minimum(const uint8_t* block, int) { return load_halves(block + 32); }
};

// A plane holds one more bit of every value of a group: bit j of byte 4r+k belongs to column 4j+k of row r.
struct NibblesAndBit : Nibbles {
  Bytes plane;

  template <int J>
  TREADLE_INLINE Bytes weights() const {
    return with_bits(nibbles<J>(), plane, J < 4 ? 4 - J : 0, J < 4 ? 0 : J - 4, 16);
  }
};

// 5-bit values. Block: as FourBit, with a plane of 64 bytes before the values.
template <bool Min>
struct FiveBit {
  static constexpr int Bits = 5, Groups = 1, Halves = 1, ZeroLog2 = Min ? -1 : 4;
  static constexpr bool HasMin = Min;
  static constexpr int64_t BlockBytes = Min ? 384 : 352;

  static TREADLE_INLINE NibblesAndBit group(const uint8_t* block, int) {
    const uint8_t* plane = block + (Min ? 64 : 32);
    return {{plane + 64}, load_bytes(plane)};
  }
  static TREADLE_INLINE Floats scale(const uint8_t* block, int, int) { return load_halves(block); }
  static TREADLE_INLINE Floats minimum(const uint8_t* block, int) { return load_halves(block + 32); }
};

// 8-bit values, stored plus 128. Block: 16 scales (float16), 512 bytes of values.
struct EightBit {
  static constexpr int Bits = 8, Groups = 1, Halves = 1, ZeroLog2 = 7;
  static constexpr bool HasMin = false;
  static constexpr int64_t BlockBytes = 544;

  struct Group {
    const uint8_t* values;
    template <int J>
    TREADLE_INLINE Bytes weights() const { return load_bytes(values + 64 * J); }
  };
  static TREADLE_INLINE Group group(const uint8_t* block, int) { return {block + 32}; }
  static TREADLE_INLINE Floats scale(const uint8_t* block, int, int) { return load_halves(block); }
  static TREADLE_INLINE Floats minimum(const uint8_t*, int) { return zero_floats(); }
};

// Q4_K and Q5_K: 8 groups a block. Block: 16 d and 16 dmin (float16), 16 words of 4 high bits for each group (2 of the
// scale, above them 2 of the minimum; group g at bit 4g), then for each group 16 bytes of low bits (scale in the low
// nibble, minimum in the high one), with five bits a plane of 64 bytes, and 256 bytes of values.
// A group's scale is d times its 6 bits, its minimum -dmin times its 6 bits; both products are exact.
template <bool Five>
struct KBlock {
  static constexpr int Bits = Five ? 5 : 4, Groups = 8, Halves = 1, ZeroLog2 = -1;
  static constexpr bool HasMin = true;
  static constexpr int64_t Header = 128, GroupBytes = Five ? 336 : 272, BlockBytes = Header + 8 * GroupBytes;

  struct FourBitGroup : Nibbles {
    template <int J>
    TREADLE_INLINE Bytes weights() const { return nibbles<J>(); }
  };
  static TREADLE_INLINE const uint8_t* at(const uint8_t* block, int g) { return block + Header + g * GroupBytes; }
  static TREADLE_INLINE auto group(const uint8_t* block, int g) {
    const uint8_t* p = at(block, g) + 16;
    if constexpr (Five) return NibblesAndBit{{p + 64}, load_bytes(p)};
    else return FourBitGroup{{p}};
  }
  static TREADLE_INLINE Floats scale(const uint8_t* block, int g, int) {
    const Ints low = bits(widen_unsigned(at(block, g)), 15);
    const Ints high = bits(shift_right(load_ints(block + 64), 4 * g), 3);
    return times(load_halves(block), to_floats(plus_sixteen_times(low, high)));
  }
  static TREADLE_INLINE Floats minimum(const uint8_t* block, int g) {
    const Ints low = shift_right(widen_unsigned(at(block, g)), 4);
    const Ints high = bits(shift_right(load_ints(block + 64), 4 * g + 2), 3);
    return times(load_halves(block + 32), to_floats(negated(plus_sixteen_times(low, high))));
  }
};

// Q6_K: 8 groups a block, a scale for every 16 columns. Block: 16 d (float16), then for each group 16 scales (int8) of
// the first 16 columns, 16 of the others, two planes of 64 bytes (bits 2j, 2j+1 of byte 4r+k belong to column 4j+k of
// row r, the second plane has columns 16 and up), 256 bytes of values.
struct SixBit {
  static constexpr int Bits = 6, Groups = 8, Halves = 2, ZeroLog2 = 5;
  static constexpr bool HasMin = false;
  static constexpr int64_t GroupBytes = 416, BlockBytes = 32 + 8 * GroupBytes;

  struct Group : Nibbles {
    const uint8_t* planes;
    template <int J>
    TREADLE_INLINE Bytes weights() const {
      constexpr int at = 2 * (J % 4);
      return with_bits(nibbles<J>(), load_bytes(planes + 64 * (J / 4)), at < 4 ? 4 - at : 0, at < 4 ? 0 : at - 4, 48);
    }
  };
  static TREADLE_INLINE const uint8_t* at(const uint8_t* block, int g) { return block + 32 + g * GroupBytes; }
  static TREADLE_INLINE Group group(const uint8_t* block, int g) {
    const uint8_t* p = at(block, g);
    return {{p + 160}, p + 32};
  }
  static TREADLE_INLINE Floats scale(const uint8_t* block, int g, int half) {
    return times(load_halves(block), to_floats(widen_signed(at(block, g) + 16 * half)));
  }
  static TREADLE_INLINE Floats minimum(const uint8_t*, int) { return zero_floats(); }
};

}  // namespace
