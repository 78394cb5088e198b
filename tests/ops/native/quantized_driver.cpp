// The driver's part for quantized linear layers: packing, unpacking, preparing and multiplying on exact-size memory.
#include <cstdint>
#include <cstdlib>
#include <vector>

#include "quantized.h"

using namespace treadle;

extern "C" {
std::int64_t treadle_quantized_bytes(std::int32_t, std::int64_t, std::int64_t);
std::int64_t treadle_quantized_token_bytes(std::int32_t, std::int64_t);
std::int32_t treadle_quantized_pack(const PackWeights*, std::int32_t);
std::int32_t treadle_quantized_unpack(const UnpackRows*, std::int64_t, std::int32_t);
std::int32_t treadle_quantized_prepare(const PrepareActivations*, std::int32_t);
std::int32_t treadle_quantized_linear(const QuantizedLinear*, std::int32_t);
}

namespace {

using Buffer = std::vector<std::uint8_t>;

// Any bits at all: infinities and NaN among the scales and the activations.
Buffer random_bytes(std::int64_t count) {
  Buffer bytes(static_cast<std::size_t>(count));
  for (auto& byte : bytes) byte = static_cast<std::uint8_t>(std::rand());
  return bytes;
}

template <class T>
std::vector<T> random_values(std::int64_t count) {
  std::vector<T> values(static_cast<std::size_t>(count));
  const Buffer bytes = random_bytes(count * static_cast<std::int64_t>(sizeof(T)));
  if (count > 0) __builtin_memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

template <class T>
void multiply(Format format, DType type, std::int64_t rows, std::int64_t columns, std::int64_t tokens, int threads,
              const Buffer& packed) {
  const std::int64_t stride = columns + 3;
  const std::vector<T> x = random_values<T>(tokens > 0 ? (tokens - 1) * stride + columns : 0);
  Buffer activations(static_cast<std::size_t>(tokens * treadle_quantized_token_bytes(format, columns)));
  const PrepareActivations prepare{format, type, tokens, columns, stride, x.data(), activations.data()};
  treadle_quantized_prepare(&prepare, threads);
  const std::vector<float> bias = random_values<float>(rows);
  std::vector<T> out = random_values<T>(tokens > 0 ? (tokens - 1) * (rows + 1) + rows : 0);
  for (const bool adds : {false, true}) {
    const QuantizedLinear linear{format, type, rows, columns, tokens, packed.data(), activations.data(),
                                 adds ? bias.data() : nullptr, adds ? out.data() : nullptr, out.data(), rows + 1, rows + 1};
    treadle_quantized_linear(&linear, threads);
  }
}

}  // namespace

void quantized_layers(int threads) {
  for (const Format format : {kQ4_0, kQ4_1, kQ5_0, kQ5_1, kQ8_0, kQ4_K, kQ5_K, kQ6_K, kWeightsBFloat16}) {
    const FormatSizes sizes = sizes_of(format);
    for (const std::int64_t rows : {1, 16, 17, 47, 100}) {
      for (const std::int64_t blocks : {1, 3}) {
        // Rows of bfloat16 may end anywhere.
        const std::int64_t columns = blocks * sizes.columns - (format == kWeightsBFloat16 ? 13 : 0);
        const std::int64_t stride = format == kWeightsBFloat16 ? 2 * columns : blocks * sizes.file_bytes;
        const Buffer file = random_bytes(rows * stride);
        Buffer packed(static_cast<std::size_t>(treadle_quantized_bytes(format, rows, columns)));
        const PackWeights pack{format, rows, columns, stride, file.data(), packed.data()};
        treadle_quantized_pack(&pack, threads);
        const std::vector<std::int64_t> indices = {rows - 1, 0, rows / 2};
        std::vector<float> values(static_cast<std::size_t>(3 * columns));
        const UnpackRows unpack{format, columns, packed.data(), indices.data(), values.data()};
        treadle_quantized_unpack(&unpack, 3, threads);
        for (const std::int64_t tokens : {0, 1, 2, 3, 4, 5, 8, 23}) {
          multiply<float>(format, kFloat32, rows, columns, tokens, threads, packed);
          multiply<std::uint16_t>(format, kBFloat16, rows, columns, tokens, threads, packed);
        }
      }
    }
    const Buffer packed = random_bytes(treadle_quantized_bytes(format, 700, 2 * sizes.columns));
    multiply<float>(format, kFloat32, 700, 2 * sizes.columns, 400, threads, packed);
  }
}
