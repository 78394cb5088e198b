// Weights from a GGUF file's rows to tiles and back; every bit of every value, scale and minimum is kept.
#include <cstring>

#include "quantized.h"

namespace treadle {
namespace {

using std::int64_t;
using std::int8_t;
using std::uint16_t;
using std::uint32_t;
using std::uint8_t;

constexpr int64_t kRowBytes16 = 2 * kTileRows;  // one float16 for each row

// The group's 32 values of one row, as unsigned integers.
using Values = uint8_t[32];

void nibble_values(const uint8_t* nibbles, Values& out) {
  for (int k = 0; k < 16; ++k) {
    out[k] = nibbles[k] & 15;
    out[16 + k] = nibbles[k] >> 4;
  }
}

void put_nibbles(const Values& q, int64_t row, uint8_t* values) {
  for (int i = 0; i < 4; ++i)
    for (int k = 0; k < 4; ++k)
      values[64 * i + 4 * row + k] = static_cast<uint8_t>((q[4 * i + k] & 15) | (q[16 + 4 * i + k] << 4));
}

void get_nibbles(const uint8_t* values, int64_t row, Values& q) {
  for (int i = 0; i < 4; ++i)
    for (int k = 0; k < 4; ++k) {
      q[4 * i + k] = values[64 * i + 4 * row + k] & 15;
      q[16 + 4 * i + k] = values[64 * i + 4 * row + k] >> 4;
    }
}

// `Width` bits above the nibble: columns first .. first + 32 / Width - 1 in one plane of 64 bytes.
template <int Width>
void put_plane(const Values& q, int first, int64_t row, uint8_t* plane) {
  for (int k = 0; k < 4; ++k) {
    int byte = 0;
    for (int j = 0; j < 8 / Width; ++j) byte |= ((q[first + 4 * j + k] >> 4) & ((1 << Width) - 1)) << (Width * j);
    plane[4 * row + k] = static_cast<uint8_t>(byte);
  }
}

template <int Width>
void get_plane(const uint8_t* plane, int first, int64_t row, Values& q) {
  for (int k = 0; k < 4; ++k)
    for (int j = 0; j < 8 / Width; ++j)
      q[first + 4 * j + k] |= static_cast<uint8_t>(((plane[4 * row + k] >> (Width * j)) & ((1 << Width) - 1)) << 4);
}

struct SixBitPair {
  uint8_t scale, minimum;
};

// Scale and minimum of group g from the 12 bytes of a K block: groups 0-3 have their 6 bits in bytes g and 4+g; groups
// 4-7 their low nibbles in byte 4+g and their high bits in the top of bytes g-4 and g.
SixBitPair k_scales(const uint8_t* bytes, int g) {
  if (g < 4) return {static_cast<uint8_t>(bytes[g] & 63), static_cast<uint8_t>(bytes[4 + g] & 63)};
  return {static_cast<uint8_t>((bytes[4 + g] & 15) | ((bytes[g - 4] >> 6) << 4)),
          static_cast<uint8_t>((bytes[4 + g] >> 4) | ((bytes[g] >> 6) << 4))};
}

void pack_k_block(bool five, const uint8_t* in, int64_t row, uint8_t* out) {
  Values q;
  std::memcpy(out + 2 * row, in, 2);
  std::memcpy(out + kRowBytes16 + 2 * row, in + 2, 2);
  const uint8_t *scales = in + 4, *high = in + 16, *nibbles = in + (five ? 48 : 16);
  uint32_t top = 0;
  for (int g = 0; g < 8; ++g) {
    const SixBitPair pair = k_scales(scales, g);
    top |= static_cast<uint32_t>((pair.scale >> 4) | ((pair.minimum >> 4) << 2)) << (4 * g);
    uint8_t* group = out + 128 + g * (five ? 336 : 272);
    group[row] = static_cast<uint8_t>((pair.scale & 15) | ((pair.minimum & 15) << 4));
    for (int k = 0; k < 32; ++k) {
      q[k] = (nibbles[32 * (g / 2) + k] >> (4 * (g % 2))) & 15;
      if (five) q[k] |= static_cast<uint8_t>(((high[k] >> g) & 1) << 4);
    }
    if (five) put_plane<1>(q, 0, row, group + 16);
    put_nibbles(q, row, group + (five ? 80 : 16));
  }
  std::memcpy(out + 64 + 4 * row, &top, 4);
}

void pack_six_bit_block(const uint8_t* in, int64_t row, uint8_t* out) {
  Values q;
  const uint8_t *low = in, *high = in + 128, *scales = in + 192;
  std::memcpy(out + 2 * row, in + 208, 2);
  for (int g = 0; g < 8; ++g) {
    uint8_t* group = out + 32 + g * 416;
    group[row] = scales[2 * g];
    group[16 + row] = scales[2 * g + 1];
    for (int k = 0; k < 32; ++k) {
      const int nibble = (low[64 * (g / 4) + 32 * (g % 2) + k] >> (4 * (g % 4 / 2))) & 15;
      q[k] = static_cast<uint8_t>(nibble | (((high[32 * (g / 4) + k] >> (2 * (g % 4))) & 3) << 4));
    }
    put_plane<2>(q, 0, row, group + 32);
    put_plane<2>(q, 16, row, group + 96);
    put_nibbles(q, row, group + 160);
  }
}

// One row's block of the file into its row of the tile block.
void pack_block(Format format, const uint8_t* in, int64_t row, uint8_t* out) {
  Values q;
  switch (format) {
    case kQ4_0:
    case kQ4_1: {
      const int64_t halves = format == kQ4_1 ? 2 : 1;
      for (int64_t i = 0; i < halves; ++i) std::memcpy(out + i * kRowBytes16 + 2 * row, in + 2 * i, 2);
      nibble_values(in + 2 * halves, q);
      return put_nibbles(q, row, out + halves * kRowBytes16);
    }
    case kQ5_0:
    case kQ5_1: {
      const int64_t halves = format == kQ5_1 ? 2 : 1;
      for (int64_t i = 0; i < halves; ++i) std::memcpy(out + i * kRowBytes16 + 2 * row, in + 2 * i, 2);
      nibble_values(in + 2 * halves + 4, q);
      const uint8_t* high = in + 2 * halves;
      for (int k = 0; k < 32; ++k) q[k] |= static_cast<uint8_t>(((high[k / 8] >> (k % 8)) & 1) << 4);
      put_plane<1>(q, 0, row, out + halves * kRowBytes16);
      return put_nibbles(q, row, out + halves * kRowBytes16 + 64);
    }
    case kQ8_0:
      std::memcpy(out + 2 * row, in, 2);
      for (int j = 0; j < 8; ++j)
        for (int k = 0; k < 4; ++k)
          out[kRowBytes16 + 64 * j + 4 * row + k] = static_cast<uint8_t>(in[2 + 4 * j + k] ^ 0x80);
      return;
    case kQ4_K: return pack_k_block(false, in, row, out);
    case kQ5_K: return pack_k_block(true, in, row, out);
    case kQ6_K: return pack_six_bit_block(in, row, out);
    case kWeightsBFloat16:
      for (int i = 0; i < 16; ++i) std::memcpy(out + 64 * i + 4 * row, in + 4 * i, 4);
      return;
  }
}

float half_to_float(const uint8_t* p) {
  uint16_t half;
  std::memcpy(&half, p, 2);
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16, exponent = (half >> 10) & 31u, mantissa = half & 1023u;
  if (exponent == 0) return (sign != 0 ? -1.0f : 1.0f) * static_cast<float>(mantissa) * 5.9604644775390625e-08f;  // 2^-24
  const uint32_t word = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112u) << 23) | (mantissa << 13);
  float value;
  std::memcpy(&value, &word, 4);
  return value;
}

void unpack_k_block(bool five, const uint8_t* in, int64_t row, float* out) {
  Values q;
  const float d = half_to_float(in + 2 * row), dmin = half_to_float(in + kRowBytes16 + 2 * row);
  uint32_t top;
  std::memcpy(&top, in + 64 + 4 * row, 4);
  for (int g = 0; g < 8; ++g) {
    const uint8_t* group = in + 128 + g * (five ? 336 : 272);
    const uint32_t high = top >> (4 * g);
    const float scale = d * static_cast<float>((group[row] & 15) | ((high & 3) << 4));
    const float minimum = dmin * static_cast<float>((group[row] >> 4) | ((high >> 2 & 3) << 4));
    get_nibbles(group + (five ? 80 : 16), row, q);
    if (five) get_plane<1>(group + 16, 0, row, q);
    for (int k = 0; k < 32; ++k) out[32 * g + k] = scale * static_cast<float>(q[k]) - minimum;
  }
}

void unpack_six_bit_block(const uint8_t* in, int64_t row, float* out) {
  Values q;
  const float d = half_to_float(in + 2 * row);
  for (int g = 0; g < 8; ++g) {
    const uint8_t* group = in + 32 + g * 416;
    get_nibbles(group + 160, row, q);
    get_plane<2>(group + 32, 0, row, q);
    get_plane<2>(group + 96, 16, row, q);
    for (int k = 0; k < 32; ++k) {
      const float scale = d * static_cast<float>(static_cast<int8_t>(group[(k < 16 ? 0 : 16) + row]));
      out[32 * g + k] = scale * static_cast<float>(q[k] - 32);
    }
  }
}

// One row of a tile block as float32, by the formulas (and roundings) of the format's definition.
void unpack_block(Format format, const uint8_t* in, int64_t row, float* out) {
  Values q;
  switch (format) {
    case kQ4_0:
    case kQ4_1:
    case kQ5_0:
    case kQ5_1: {
      const bool has_min = format == kQ4_1 || format == kQ5_1, five = format == kQ5_0 || format == kQ5_1;
      const uint8_t* rest = in + (has_min ? 2 : 1) * kRowBytes16;
      get_nibbles(rest + (five ? 64 : 0), row, q);
      if (five) get_plane<1>(rest, 0, row, q);
      const float scale = half_to_float(in + 2 * row);
      if (has_min) {
        const float minimum = half_to_float(in + kRowBytes16 + 2 * row);
        for (int k = 0; k < 32; ++k) out[k] = scale * static_cast<float>(q[k]) + minimum;
      } else {
        for (int k = 0; k < 32; ++k) out[k] = scale * static_cast<float>(q[k] - (five ? 16 : 8));
      }
      return;
    }
    case kQ8_0: {
      const float scale = half_to_float(in + 2 * row);
      for (int k = 0; k < 32; ++k) out[k] = static_cast<float>(in[kRowBytes16 + 64 * (k / 4) + 4 * row + k % 4] - 128) * scale;
      return;
    }
    case kQ4_K: return unpack_k_block(false, in, row, out);
    case kQ5_K: return unpack_k_block(true, in, row, out);
    case kQ6_K: return unpack_six_bit_block(in, row, out);
    case kWeightsBFloat16:
      for (int k = 0; k < 32; ++k) {
        uint16_t half;
        std::memcpy(&half, in + 64 * (k / 2) + 4 * row + 2 * (k % 2), 2);
        const uint32_t word = static_cast<uint32_t>(half) << 16;
        std::memcpy(out + k, &word, 4);
      }
      return;
  }
}

}  // namespace

void pack_tiles(const PackWeights& a, int64_t begin, int64_t end) {
  const FormatSizes sizes = sizes_of(a.format);
  const int64_t tile_bytes = tile_bytes_of(a.format, a.columns), blocks = a.columns / sizes.columns;
  for (int64_t tile = begin; tile < end; ++tile) {
    uint8_t* out = a.packed + tile * tile_bytes;
    const int64_t row = tile * kTileRows, rows = a.rows - row < kTileRows ? a.rows - row : kTileRows;
    const int64_t rest = a.columns - blocks * sizes.columns;  // only bfloat16 rows end within a block
    if (rows < kTileRows || rest > 0) std::memset(out, 0, static_cast<std::size_t>(tile_bytes));
    for (int64_t b = 0; b < blocks; ++b)
      for (int64_t r = 0; r < rows; ++r)
        pack_block(a.format, a.file + (row + r) * a.file_stride + b * sizes.file_bytes, r, out + b * sizes.tile_bytes);
    if (rest > 0) {
      for (int64_t r = 0; r < rows; ++r) {
        uint8_t last[64] = {};
        std::memcpy(last, a.file + (row + r) * a.file_stride + blocks * 64, static_cast<std::size_t>(2 * rest));
        pack_block(a.format, last, r, out + blocks * sizes.tile_bytes);
      }
    }
  }
}

void unpack_rows(const UnpackRows& a, int64_t begin, int64_t end) {
  const FormatSizes sizes = sizes_of(a.format);
  const int64_t tile_bytes = tile_bytes_of(a.format, a.columns), blocks = divided_up(a.columns, sizes.columns);
  for (int64_t i = begin; i < end; ++i) {
    const uint8_t* tile = a.packed + a.indices[i] / kTileRows * tile_bytes;
    const int64_t row = a.indices[i] % kTileRows;
    float* out = a.out + i * a.columns;
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t left = a.columns - b * sizes.columns;
      if (left >= sizes.columns) {
        unpack_block(a.format, tile + b * sizes.tile_bytes, row, out + b * sizes.columns);
      } else {
        float last[32];
        unpack_block(a.format, tile + b * sizes.tile_bytes, row, last);
        std::memcpy(out + b * sizes.columns, last, static_cast<std::size_t>(left) * sizeof(float));
      }
    }
  }
}

}  // namespace treadle
