// Linear layers with quantized weights: formats, memory layouts, arguments, and the functions that a variant provides.
//
// Weights. A tile is 16 output rows; a matrix is its tiles one after the other, the last one filled up with zero rows.
// A tile is the sequence of its blocks along the columns (32 columns, or 256 for the K formats); what a block holds,
// in this order, is said beside each format in quantized_formats.h. Every array in it has the 16 rows side by side.
// Quantized values lie as 64-byte vectors: lane r (4 bytes) holds 4 consecutive columns of row r. Such a vector is one
// operand of a dot product of bytes; a vector of 4-bit values holds two of them, in the low nibbles columns 4i .. 4i+3
// of the group of 32, in the high ones columns 16+4i .. 16+4i+3. Nothing is rounded: the values, scales and minimums
// are the file's own, and a tile has as many bytes as its rows have in the file.
//
// Activations. Tokens are cut into blocks of at most kBlockTokens, as even as possible. For each group of 32 columns a
// block of T tokens holds T x 32 int8 values, then T float32 scales, T int32 negated sums of the values, T int32
// negated sums of the first 16 values, T float32 sums times scale. For bfloat16 weights it holds T x 32 bfloat16.
//
// Arithmetic. For each row and token, groups are summed in order with one fused multiply-add each (and one for the
// minimum), over exact integer dot products. So a result does not depend on the other tokens, on the threads, nor, for
// all formats but bfloat16, on the instruction set. Non-finite activations make every output of their token NaN.
#pragma once
#include <cstdint>

#include "kernels.h"

namespace treadle {

// The numbers are those of GGUF's tensor types.
enum Format : std::int32_t {
  kQ4_0 = 2, kQ4_1 = 3, kQ5_0 = 6, kQ5_1 = 7, kQ8_0 = 8, kQ4_K = 12, kQ5_K = 13, kQ6_K = 14, kWeightsBFloat16 = 30,
};

constexpr std::int64_t kTileRows = 16, kGroup = 32, kBlockTokens = 5;
constexpr std::int64_t kTokenGroupBytes = 48;       // of quantized activations: 32 values and four side values
constexpr std::int64_t kTokenGroupBytesBFloat16 = 64;

struct FormatSizes {
  std::int64_t columns;      // of a block
  std::int64_t file_bytes;   // of a block of one row in a GGUF file
  std::int64_t tile_bytes;   // of a block of 16 rows in a tile
};

// Zeros for a format that there is no kernel for.
constexpr FormatSizes sizes_of(Format format) {
  switch (format) {
    case kQ4_0: return {32, 18, 288};
    case kQ4_1: return {32, 20, 320};
    case kQ5_0: return {32, 22, 352};
    case kQ5_1: return {32, 24, 384};
    case kQ8_0: return {32, 34, 544};
    case kQ4_K: return {256, 144, 2304};
    case kQ5_K: return {256, 176, 2816};
    case kQ6_K: return {256, 210, 3360};
    case kWeightsBFloat16: return {32, 64, 1024};  // the file's rows may end within a block
  }
  return {0, 0, 0};
}

constexpr std::int64_t divided_up(std::int64_t value, std::int64_t by) { return (value + by - 1) / by; }

constexpr std::int64_t tiles_of(std::int64_t rows) { return divided_up(rows, kTileRows); }

constexpr std::int64_t tile_bytes_of(Format format, std::int64_t columns) {
  const FormatSizes sizes = sizes_of(format);
  return divided_up(columns, sizes.columns) * sizes.tile_bytes;
}

// How tokens are cut into blocks: the first `longer` blocks have size + 1 tokens, the others `size`.
struct TokenBlocks {
  std::int64_t count, size, longer;

  explicit constexpr TokenBlocks(std::int64_t tokens)
      : count(divided_up(tokens, kBlockTokens)),
        size(count > 0 ? tokens / count : 0),
        longer(count > 0 ? tokens % count : 0) {}

  // The first token of a block; of block `count` it is the number of tokens.
  constexpr std::int64_t first(std::int64_t block) const { return block * size + (block < longer ? block : longer); }
  constexpr std::int64_t width(std::int64_t block) const { return block < longer ? size + 1 : size; }
};

// Bytes of one token's prepared activations.
constexpr std::int64_t token_bytes_of(Format format, std::int64_t columns) {
  return divided_up(columns, kGroup) * (format == kWeightsBFloat16 ? kTokenGroupBytesBFloat16 : kTokenGroupBytes);
}

struct PrepareActivations {
  Format format;             // of the weights that they will meet
  DType type;                // of x
  std::int64_t tokens, columns, stride;  // x is [tokens, columns], rows `stride` elements apart
  const void* x;
  std::uint8_t* out;         // tokens * token_bytes_of(format, columns) bytes
};

struct QuantizedLinear {
  Format format;
  DType type;                // of out and add
  std::int64_t rows, columns, tokens;
  const std::uint8_t* weights;      // packed
  const std::uint8_t* activations;  // prepared
  const float* bias;         // [rows], or null
  const void* add;           // [tokens, rows] added to the product, or null; may be out itself
  void* out;                 // [tokens, rows]
  std::int64_t add_stride, out_stride;  // elements between tokens
};

struct QuantizedKernels {
  // Handles blocks of tokens begin .. end-1.
  void (*prepare)(const PrepareActivations&, std::int64_t begin, std::int64_t end);
  // Handles tiles tile_begin .. tile_end-1 for blocks of tokens block_begin .. block_end-1.
  void (*linear)(const QuantizedLinear&, std::int64_t tile_begin, std::int64_t tile_end, std::int64_t block_begin,
                 std::int64_t block_end);
};

// Packs tiles begin .. end-1 from the file's rows, `file_stride` bytes apart.
struct PackWeights {
  Format format;
  std::int64_t rows, columns, file_stride;
  const std::uint8_t* file;
  std::uint8_t* packed;
};
void pack_tiles(const PackWeights&, std::int64_t begin, std::int64_t end);

// Writes the float32 values of rows indices[begin .. end-1] to out, one after the other.
struct UnpackRows {
  Format format;
  std::int64_t columns;
  const std::uint8_t* packed;
  const std::int64_t* indices;
  float* out;
};
void unpack_rows(const UnpackRows&, std::int64_t begin, std::int64_t end);

}  // namespace treadle
