// The quantized kernels, compiled once for each instruction set (TREADLE_VARIANT names it).
#include "quantized.h"

#include <cstring>
#include <type_traits>

#include "quantized_formats.h"

#ifndef TREADLE_VARIANT
#define TREADLE_VARIANT baseline
#endif

namespace treadle {
namespace {

// Bytes ahead of the current group that a tile's first reader asks for: 150 to 400 ns at a core's share of the bandwidth.
constexpr int64_t kAhead = 6144;

TREADLE_INLINE void prefetch_lines(const uint8_t* p, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(p + i, 0, 3);
}

// What a register block of Rows tiles and Tokens tokens reads and computes; tokens are `first` .. of a block of `width`.
template <int RowTiles>
struct Place {
  const uint8_t* tiles[RowTiles];
  const uint8_t* activations;  // of the block of tokens
  int64_t columns;
  int width, first;
  bool ahead;                  // the tiles come from memory: prefetch
};

// Adds columns 4 J0 .. and 4 J1 .. of a group to the integer sums.
template <class F, int J0, int J1, int RowTiles, int Tokens, class Group>
TREADLE_INLINE void add_pair(Ints (&sums)[RowTiles][Tokens], const Group (&groups)[RowTiles], const uint8_t* values) {
  Bytes w0[RowTiles], w1[RowTiles];
  for (int r = 0; r < RowTiles; ++r) {
    w0[r] = groups[r].template weights<J0>();
    w1[r] = groups[r].template weights<J1>();
  }
#pragma GCC unroll 5
  for (int t = 0; t < Tokens; ++t) {
    const Quad y0 = load_quad(values + t * kGroup + 4 * J0), y1 = load_quad(values + t * kGroup + 4 * J1);
    for (int r = 0; r < RowTiles; ++r) dot<F::Bits>(sums[r][t], w0[r], w1[r], y0, y1);
  }
}

template <class F, int RowTiles, int Tokens>
TREADLE_INLINE void multiply(const Place<RowTiles>& place, Floats (&out)[RowTiles][Tokens]) {
  Floats acc[RowTiles][Tokens];
  for (int r = 0; r < RowTiles; ++r)
    for (int t = 0; t < Tokens; ++t) acc[r][t] = zero_floats();
  const int width = kMostTokens >= kBlockTokens ? Tokens : place.width;  // then a block is never cut
  const uint8_t* record = place.activations;
  const int64_t blocks = place.columns / (F::Groups * kGroup);
  for (int64_t b = 0; b < blocks; ++b) {
    const uint8_t* block[RowTiles];
    for (int r = 0; r < RowTiles; ++r) block[r] = place.tiles[r] + b * F::BlockBytes;
    for (int g = 0; g < F::Groups; ++g) {
      using Group = decltype(F::group(block[0], g));
      const uint8_t* values = record + place.first * kGroup;
      const uint8_t* side = record + width * kGroup + place.first * 4;
      const uint8_t *scales = side, *negated_sums = side + width * 4, *first_halves = side + width * 8, *scaled_sums = side + width * 12;
      record += width * kTokenGroupBytes;
      Group groups[RowTiles];
      for (int r = 0; r < RowTiles; ++r) {
        groups[r] = F::group(block[r], g);
        if (place.ahead) prefetch_lines(block[r] + g * (F::BlockBytes / F::Groups) + kAhead, F::BlockBytes / F::Groups);
      }
      for (int half = 0; half < F::Halves; ++half) {
        Ints sums[RowTiles][Tokens];
#pragma GCC unroll 5
        for (int t = 0; t < Tokens; ++t) {
          Ints begin = zero_ints();
          if constexpr (F::ZeroLog2 >= 0) {
            int32_t sum = load32((F::Halves == 1 ? negated_sums : first_halves) + 4 * t);
            if (half == 1) sum = load32(negated_sums + 4 * t) - sum;
            begin = start<F::Bits>(sum, F::ZeroLog2);
          }
          for (int r = 0; r < RowTiles; ++r) sums[r][t] = begin;
        }
        if constexpr (F::Halves == 1) {
          add_pair<F, 0, 4>(sums, groups, values);
          add_pair<F, 1, 5>(sums, groups, values);
          add_pair<F, 2, 6>(sums, groups, values);
          add_pair<F, 3, 7>(sums, groups, values);
        } else if (half == 0) {
          add_pair<F, 0, 1>(sums, groups, values);
          add_pair<F, 2, 3>(sums, groups, values);
        } else {
          add_pair<F, 4, 5>(sums, groups, values);
          add_pair<F, 6, 7>(sums, groups, values);
        }
        Floats scale[RowTiles];
        for (int r = 0; r < RowTiles; ++r) scale[r] = F::scale(block[r], g, half);
#pragma GCC unroll 5
        for (int t = 0; t < Tokens; ++t)
          for (int r = 0; r < RowTiles; ++r)
            acc[r][t] = fused(to_floats(sums[r][t]), times(scale[r], load_float(scales + 4 * t)), acc[r][t]);
      }
      if constexpr (F::HasMin) {
        Floats minimum[RowTiles];
        for (int r = 0; r < RowTiles; ++r) minimum[r] = F::minimum(block[r], g);
#pragma GCC unroll 5
        for (int t = 0; t < Tokens; ++t)
          for (int r = 0; r < RowTiles; ++r) acc[r][t] = fused(minimum[r], load_float(scaled_sums + 4 * t), acc[r][t]);
      }
    }
  }
  for (int r = 0; r < RowTiles; ++r)
    for (int t = 0; t < Tokens; ++t) out[r][t] = acc[r][t];
}

struct PairsOfBFloat16 {};

template <int Phase, int RowTiles, int Tokens>
TREADLE_INLINE void add_pair_products(Floats (&acc)[RowTiles][Tokens][2], const Place<RowTiles>& place, int64_t offset,
                                      const uint8_t* values) {
  Bytes weights[RowTiles];
  for (int r = 0; r < RowTiles; ++r) weights[r] = load_bytes(place.tiles[r] + offset);
#pragma GCC unroll 5
  for (int t = 0; t < Tokens; ++t) {
    const Quad y = load_quad(values + t * 2 * kGroup);
    for (int r = 0; r < RowTiles; ++r) pair_dot<Phase>(acc[r][t], weights[r], y);
  }
}

template <int RowTiles, int Tokens>
TREADLE_INLINE void multiply_bfloat16(const Place<RowTiles>& place, Floats (&out)[RowTiles][Tokens]) {
  Floats acc[RowTiles][Tokens][2];
  for (int r = 0; r < RowTiles; ++r)
    for (int t = 0; t < Tokens; ++t) acc[r][t][0] = acc[r][t][1] = zero_floats();
  const int width = kMostTokens >= kBlockTokens ? Tokens : place.width;  // then a block is never cut
  const uint8_t* record = place.activations;
  const int64_t groups = divided_up(place.columns, kGroup);
  for (int64_t g = 0; g < groups; ++g, record += width * kTokenGroupBytesBFloat16) {
    const uint8_t* values = record + place.first * 2 * kGroup;
    for (int r = 0; r < RowTiles && place.ahead; ++r) prefetch_lines(place.tiles[r] + g * 1024 + kAhead, 1024);
#pragma GCC unroll 8
    for (int i = 0; i < kGroup / 2; i += 2) {
      add_pair_products<0>(acc, place, g * 1024 + i * 64, values + 4 * i);
      add_pair_products<1>(acc, place, g * 1024 + i * 64 + 64, values + 4 * i + 4);
    }
  }
  for (int r = 0; r < RowTiles; ++r)
    for (int t = 0; t < Tokens; ++t) out[r][t] = plus(acc[r][t][0], acc[r][t][1]);
}

// The last tile's rows, of which some are only there to fill it up.
template <class T>
__attribute__((noinline)) void store_some(const QuantizedLinear& a, const float* sums, int64_t token, int64_t row) {
  const int64_t count = a.rows - row;
  T* out = static_cast<T*>(a.out) + token * a.out_stride + row;
  const T* add = a.add != nullptr ? static_cast<const T*>(a.add) + token * a.add_stride + row : nullptr;
  for (int64_t i = 0; i < count; ++i) {
    float value = sums[i];
    if (a.bias != nullptr) value += a.bias[row + i];
    if (add != nullptr) value += load(add + i);
    store(out + i, value);
  }
}

template <class T, int Tokens>
TREADLE_INLINE void store_tile(const QuantizedLinear& a, const Floats (&sums)[Tokens], int64_t token, int64_t row) {
  if (row + kTileRows > a.rows) {
    for (int t = 0; t < Tokens; ++t) {
      float values[kTileRows];
      store_floats(values, sums[t]);
      store_some<T>(a, values, token + t, row);
    }
    return;
  }
  T* out = static_cast<T*>(a.out) + token * a.out_stride + row;
  const T* add = a.add != nullptr ? static_cast<const T*>(a.add) + token * a.add_stride + row : nullptr;
#pragma GCC unroll 5
  for (int t = 0; t < Tokens; ++t) {
    Floats value = sums[t];
    if (a.bias != nullptr) value = plus(value, load_floats(a.bias + row));
    if (add != nullptr) value = plus(value, load_floats(add + t * a.add_stride));
    store_floats(out + t * a.out_stride, value);
  }
}

template <class F, int RowTiles, int Tokens>
void run_registers(const QuantizedLinear& a, const Place<RowTiles>& place, int64_t tile, int64_t token) {
  Floats sums[RowTiles][Tokens];
  if constexpr (std::is_same_v<F, PairsOfBFloat16>) multiply_bfloat16(place, sums);
  else multiply<F>(place, sums);
#pragma GCC unroll 2
  for (int r = 0; r < RowTiles; ++r) {
    const int64_t row = (tile + r) * kTileRows;
    a.type == kFloat32 ? store_tile<float>(a, sums[r], token, row) : store_tile<bf16>(a, sums[r], token, row);
  }
}

// One block of tokens, in pieces that fit the registers.
template <class F, int RowTiles>
void run_block(const QuantizedLinear& a, Place<RowTiles> place, int64_t tile, int64_t token) {
  for (place.first = 0; place.first < place.width;) {
    const int left = place.width - place.first, count = left < kMostTokens ? left : kMostTokens;
    const int64_t at = token + place.first;
    if (count == 1) run_registers<F, RowTiles, 1>(a, place, tile, at);
    if constexpr (kMostTokens >= 2) if (count == 2) run_registers<F, RowTiles, 2>(a, place, tile, at);
    if constexpr (kMostTokens >= 3) if (count == 3) run_registers<F, RowTiles, 3>(a, place, tile, at);
    if constexpr (kMostTokens >= 4) if (count == 4) run_registers<F, RowTiles, 4>(a, place, tile, at);
    if constexpr (kMostTokens >= 5) if (count == 5) run_registers<F, RowTiles, 5>(a, place, tile, at);
    place.first += count;
    place.ahead = false;
  }
}

struct Sizes {
  int64_t tile_bytes, token_bytes;
  TokenBlocks blocks;
};

template <class F, int RowTiles>
void run_tiles(const QuantizedLinear& a, const Sizes& sizes, int64_t tile, int64_t block_begin, int64_t block_end) {
  Place<RowTiles> place{};
  for (int r = 0; r < RowTiles; ++r) place.tiles[r] = a.weights + (tile + r) * sizes.tile_bytes;
  place.columns = a.columns;
  for (int64_t block = block_begin; block < block_end; ++block) {
    const int64_t token = sizes.blocks.first(block);
    place.activations = a.activations + token * sizes.token_bytes;
    place.width = static_cast<int>(sizes.blocks.width(block));
    place.ahead = block == block_begin;
    run_block<F, RowTiles>(a, place, tile, token);
  }
}

template <class F>
void run(const QuantizedLinear& a, int64_t tile_begin, int64_t tile_end, int64_t block_begin, int64_t block_end) {
  const Sizes sizes{tile_bytes_of(a.format, a.columns), token_bytes_of(a.format, a.columns), TokenBlocks(a.tokens)};
  int64_t tile = tile_begin;
  // With one block of tokens, tiles are read once, and one stream from memory is faster than two.
  if constexpr (kMostRowTiles == 2)
    for (; block_end - block_begin > 1 && tile + 2 <= tile_end; tile += 2)
      run_tiles<F, 2>(a, sizes, tile, block_begin, block_end);
  for (; tile < tile_end; ++tile) run_tiles<F, 1>(a, sizes, tile, block_begin, block_end);
}

void linear(const QuantizedLinear& a, int64_t tile_begin, int64_t tile_end, int64_t block_begin, int64_t block_end) {
  switch (a.format) {
    case kQ4_0: return run<FourBit<false>>(a, tile_begin, tile_end, block_begin, block_end);
    case kQ4_1: return run<FourBit<true>>(a, tile_begin, tile_end, block_begin, block_end);
    case kQ5_0: return run<FiveBit<false>>(a, tile_begin, tile_end, block_begin, block_end);
    case kQ5_1: return run<FiveBit<true>>(a, tile_begin, tile_end, block_begin, block_end);
    case kQ8_0: return run<EightBit>(a, tile_begin, tile_end, block_begin, block_end);
    case kQ4_K: return run<KBlock<false>>(a, tile_begin, tile_end, block_begin, block_end);
    case kQ5_K: return run<KBlock<true>>(a, tile_begin, tile_end, block_begin, block_end);
    case kQ6_K: return run<SixBit>(a, tile_begin, tile_end, block_begin, block_end);
    case kWeightsBFloat16: return run<PairsOfBFloat16>(a, tile_begin, tile_end, block_begin, block_end);
  }
}

template <class T>
TREADLE_INLINE void store_as(uint8_t* p, T value) {
  std::memcpy(p, &value, sizeof(T));
}

// One group of one token: the scale is its largest size / 127. A group whose sizes are all below 4e-37, so that the scale's
// inverse would overflow, counts as zeros; one with a value that is not finite gets the scale NaN, which reaches every output.
template <class T>
TREADLE_INLINE void quantize_group(const T* x, uint8_t* values, uint8_t* side, int64_t width) {
  const Floats low = load_floats(x), high = load_floats(x + kGroup / 2);
  const uint32_t largest_bits = largest_size_bits(low, high);
  const float largest = float_of(largest_bits);
  const bool finite = largest_bits < 0x7f800000u, usable = finite && largest >= 4.0e-37f;
  float scale = float_of(finite ? 0u : 0x7fc00000u);
  int32_t first = 0, second = 0;
  if (usable) {
    scale = largest * (1.0f / 127.0f);
    const float inverse = 127.0f / largest;
    first = round_to_bytes(low, inverse, values);
    second = round_to_bytes(high, inverse, values + kGroup / 2);
  } else {
    std::memset(values, 0, kGroup);
  }
  store_as(side, scale);
  store_as(side + 4 * width, -(first + second));
  store_as(side + 8 * width, -first);
  store_as(side + 12 * width, scale * static_cast<float>(first + second));
}

template <class T>
void prepare_token(const PrepareActivations& a, int64_t token, int64_t in_block, int64_t width, uint8_t* block) {
  const T* __restrict x = static_cast<const T*>(a.x) + token * a.stride;
  const int64_t groups = divided_up(a.columns, kGroup);
  if (a.format != kWeightsBFloat16) {
    for (int64_t g = 0; g < groups; ++g) {
      uint8_t* record = block + g * width * kTokenGroupBytes;
      quantize_group(x + g * kGroup, record + in_block * kGroup, record + width * kGroup + 4 * in_block, width);
    }
    return;
  }
  for (int64_t g = 0; g < groups; ++g) {
    uint8_t* values = block + g * width * kTokenGroupBytesBFloat16 + in_block * 2 * kGroup;
    const int64_t left = a.columns - g * kGroup, count = left < kGroup ? left : kGroup;
    bf16 rounded_values[kGroup] = {};
    for (int64_t i = 0; i < count; ++i) store(rounded_values + i, load(x + g * kGroup + i));
    std::memcpy(values, rounded_values, sizeof(rounded_values));
  }
}

void prepare(const PrepareActivations& a, int64_t begin, int64_t end) {
  const int64_t token_bytes = token_bytes_of(a.format, a.columns);
  const TokenBlocks blocks(a.tokens);
  for (int64_t block = begin; block < end; ++block) {
    const int64_t first = blocks.first(block), width = blocks.width(block);
    uint8_t* out = a.out + first * token_bytes;
    for (int64_t t = 0; t < width; ++t)
      a.type == kFloat32 ? prepare_token<float>(a, first + t, t, width, out) : prepare_token<bf16>(a, first + t, t, width, out);
  }
}

}  // namespace

namespace TREADLE_VARIANT {
extern const QuantizedKernels quantized_kernels;
const QuantizedKernels quantized_kernels = {prepare, linear};
}  // namespace TREADLE_VARIANT

}  // namespace treadle
