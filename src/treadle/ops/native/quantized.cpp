// The C ABI of the quantized linear layers: cuts the work into tasks and runs them on the pool. All return 0.
#include "quantized.h"

#include "pool.h"

#define TREADLE_EXPORT extern "C" __attribute__((visibility("default")))

namespace treadle {
namespace {

using std::int32_t;
using std::int64_t;

// A block of about this many tokens' activations stays in the second-level cache while tiles go by.
constexpr int64_t kChunkBlocks = 32;
// The work (columns x pairs of tiles x blocks of tokens) that is worth waking a thread for: about ten microseconds.
constexpr int64_t kTaskWork = 32768;
// Elements to quantize, likewise.
constexpr int64_t kTaskElements = 16384;

template <class Arguments>
struct Ranges {
  const Arguments* arguments;
  void (*function)(const Arguments&, int64_t, int64_t);
  int64_t count, each;
};

template <class Arguments>
void run_ranges(void (*function)(const Arguments&, int64_t, int64_t), const Arguments& arguments, int64_t count,
                int64_t each, int32_t threads) {
  if (count <= 0) return;
  const Ranges<Arguments> ranges{&arguments, function, count, each > 0 ? each : 1};
  const auto task = [](const void* data, int64_t index) {
    const auto& r = *static_cast<const Ranges<Arguments>*>(data);
    const int64_t begin = index * r.each, end = begin + r.each;
    r.function(*r.arguments, begin, end < r.count ? end : r.count);
  };
  run_tasks(threads, divided_up(count, ranges.each), task, &ranges);
}

struct LinearTasks {
  const QuantizedLinear* arguments;
  const QuantizedKernels* kernels;
  int64_t tiles, pairs, blocks, chunks, ranges;  // a task is one of `ranges` parts of the tiles with one chunk of the blocks
};

void run_linear(const QuantizedLinear& a, int32_t threads) {
  LinearTasks t{&a, chosen_kernels().quantized, tiles_of(a.rows), 0, TokenBlocks(a.tokens).count, 0, 0};
  if (t.tiles <= 0 || t.blocks <= 0) return;
  t.pairs = divided_up(t.tiles, 2);
  t.chunks = divided_up(t.blocks, kChunkBlocks);
  const int64_t worth = 1 + a.columns * t.pairs * t.blocks / kTaskWork / t.chunks, most = threads > 1 ? 8 * threads : 1;
  t.ranges = worth < most ? worth : most;
  if (t.ranges > t.pairs) t.ranges = t.pairs;
  const auto task = [](const void* data, int64_t index) {
    const auto& t = *static_cast<const LinearTasks*>(data);
    const int64_t chunk = index / t.ranges, range = index % t.ranges;
    const int64_t begin = 2 * (range * t.pairs / t.ranges), end = 2 * ((range + 1) * t.pairs / t.ranges);
    t.kernels->linear(*t.arguments, begin, end < t.tiles ? end : t.tiles, chunk * t.blocks / t.chunks,
                      (chunk + 1) * t.blocks / t.chunks);
  };
  run_tasks(threads, t.chunks * t.ranges, task, &t);
}

}  // namespace
}  // namespace treadle

using namespace treadle;

// Bytes of a packed matrix; -1 for a format that there is no kernel for.
TREADLE_EXPORT int64_t treadle_quantized_bytes(int32_t format, int64_t rows, int64_t columns) {
  const Format known = static_cast<Format>(format);
  return sizes_of(known).columns > 0 ? tiles_of(rows) * tile_bytes_of(known, columns) : -1;
}

// Bytes of a token's prepared activations.
TREADLE_EXPORT int64_t treadle_quantized_token_bytes(int32_t format, int64_t columns) {
  return token_bytes_of(static_cast<Format>(format), columns);
}

TREADLE_EXPORT int32_t treadle_quantized_pack(const PackWeights* a, int32_t threads) {
  const int64_t per_tile = a->columns * kTileRows;
  run_ranges(pack_tiles, *a, tiles_of(a->rows), per_tile > 0 ? kTaskElements * 4 / per_tile : 1, threads);
  return 0;
}

TREADLE_EXPORT int32_t treadle_quantized_unpack(const UnpackRows* a, int64_t count, int32_t threads) {
  run_ranges(unpack_rows, *a, count, a->columns > 0 ? kTaskElements / a->columns : 1, threads);
  return 0;
}

TREADLE_EXPORT int32_t treadle_quantized_prepare(const PrepareActivations* a, int32_t threads) {
  const int64_t per_block = a->columns * kBlockTokens;
  run_ranges(chosen_kernels().quantized->prepare, *a, TokenBlocks(a->tokens).count,
             per_block > 0 ? kTaskElements / per_block : 1, threads);
  return 0;
}

TREADLE_EXPORT int32_t treadle_quantized_linear(const QuantizedLinear* a, int32_t threads) {
  run_linear(*a, threads);
  return 0;
}
