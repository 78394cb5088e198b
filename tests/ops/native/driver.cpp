// Calls every function of the native library on exact-size heap memory, odd shapes and every variant, and runs the pool
// from several threads; built with the sanitizers by scripts/sanitize_native. Values are tested from Python.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <thread>
#include <vector>

#include "kernels.h"
#include "paged.h"

using namespace treadle;

extern "C" {
std::int32_t treadle_abi();
const char* treadle_runnable(std::int32_t);
std::int32_t treadle_select(const char*);
std::int32_t treadle_rms_norm(const RmsNorm*, std::int64_t, std::int32_t);
std::int32_t treadle_rms_norm_backward(const RmsNormBackward*, float*, std::int64_t, std::int32_t);
std::int32_t treadle_gated_activation(const GatedActivation*, std::int64_t, std::int32_t);
std::int32_t treadle_gated_activation_backward(const GatedActivation*, std::int64_t, std::int32_t);
std::int32_t treadle_rope(const Rope*, std::int64_t, std::int32_t);
std::int32_t treadle_cross_entropy(const CrossEntropy*, std::int64_t, std::int32_t);
std::int32_t treadle_paged_write(const PagedWrite*, std::int64_t, std::int32_t);
std::int32_t treadle_paged_attention(const PagedAttention*, std::int64_t, std::int32_t);
std::int32_t treadle_sample(const Sample*, std::int64_t, std::int32_t);
std::int64_t treadle_exchange_bytes(std::int32_t, std::int64_t);
void treadle_exchange_enter(void*, std::int64_t, std::int32_t, std::int32_t);
std::int32_t treadle_exchange_sum(void*, std::int64_t, std::int32_t, std::int32_t, double, std::int32_t, const void*, void*,
                                  std::int64_t);
std::int32_t treadle_exchange_gather(void*, std::int64_t, std::int32_t, std::int32_t, double, const void*, void*,
                                     std::int64_t);
}

void quantized_layers(int threads);  // quantized_driver.cpp

namespace {

constexpr std::int64_t kWidths[] = {1, 2, 7, 15, 16, 17, 31, 64, 129, 1000};
constexpr std::int64_t kRows[] = {0, 1, 3, 70, 513};
constexpr DType kTypes[] = {kFloat32, kBFloat16};

// Memory of exactly the size asked for, so that one element too far is seen; every 50th value is special.
class Memory {
 public:
  Memory(DType type, std::int64_t count) : bytes_(static_cast<std::size_t>(count) * (type == kFloat32 ? 4 : 2)) {
    static const float special[] = {0.0f, -0.0f, std::numeric_limits<float>::infinity(),
                                    -std::numeric_limits<float>::infinity(), std::nanf(""), 3e38f, -3e38f, 1e-40f};
    for (std::int64_t i = 0; i < count; ++i) {
      float value = static_cast<float>(std::rand()) / static_cast<float>(RAND_MAX) * 8.0f - 4.0f;
      if (i % 50 == 49) value = special[std::rand() % 8];
      std::uint32_t bits;
      __builtin_memcpy(&bits, &value, 4);
      if (type == kFloat32) {
        __builtin_memcpy(&bytes_[static_cast<std::size_t>(i) * 4], &bits, 4);
      } else {
        bits >>= 16;
        __builtin_memcpy(&bytes_[static_cast<std::size_t>(i) * 2], &bits, 2);
      }
    }
  }
  void* data() { return bytes_.data(); }
  Rows rows(std::int64_t width) { return {data(), 1, width, 0}; }

 private:
  std::vector<unsigned char> bytes_;
};

void norms(DType x_type, DType weight_type, std::int64_t rows, std::int64_t width, int threads) {
  const std::int64_t count = rows * width;
  Memory x(x_type, count), residual(x_type, count), out(x_type, count), total(x_type, count), weight(weight_type, width);
  const Rows none{nullptr, 1, 0, 0};
  for (const bool adds : {false, true}) {
    for (const float offset : {0.0f, 1.0f}) {
      const RmsNorm forward{x_type, weight_type, width, 1e-6f, offset, x.rows(width), adds ? residual.rows(width) : none,
                            out.rows(width), adds ? total.rows(width) : none, weight.data()};
      treadle_rms_norm(&forward, rows, threads);
      std::vector<float> grad_weight(static_cast<std::size_t>(width));
      const RmsNormBackward backward{x_type, weight_type, width, 1e-6f, offset, residual.rows(width), x.rows(width),
                                     adds ? total.rows(width) : none, out.rows(width), weight.data()};
      treadle_rms_norm_backward(&backward, grad_weight.data(), rows, threads);
    }
  }
}

void activations(DType type, std::int64_t rows, std::int64_t width, int threads) {
  const std::int64_t count = rows * width;
  // The gate and the product are halves of rows of twice the width.
  Memory fused(type, 2 * count), out(type, count), grad(type, count), grad_gate(type, count), grad_up(type, count);
  char* second = static_cast<char*>(fused.data()) + width * (type == kFloat32 ? 4 : 2);
  for (int kind = kSilu; kind <= kRelu2; ++kind) {
    const GatedActivation arguments{type,
                                    static_cast<Activation>(kind),
                                    width,
                                    {fused.data(), 1, 2 * width, 0},
                                    {rows ? second : nullptr, 1, 2 * width, 0},
                                    out.rows(width),
                                    grad.rows(width),
                                    grad_gate.rows(width),
                                    grad_up.rows(width)};
    treadle_gated_activation(&arguments, rows, threads);
    treadle_gated_activation_backward(&arguments, rows, threads);
  }
}

void ropes(DType type, std::int64_t tokens, std::int64_t width, int threads) {
  constexpr std::int64_t heads = 3;
  for (const std::int64_t pairs : {width / 2, width / 4}) {
    Memory x(type, tokens * heads * width), out(type, tokens * heads * width);
    Memory cos(kFloat32, tokens * pairs), sin(kFloat32, tokens * pairs);
    for (const bool interleaved : {false, true}) {
      const Rope arguments{type,         interleaved,     interleaved,
                           heads,        width,           pairs,
                           x.rows(width), out.rows(width), static_cast<const float*>(cos.data()),
                           static_cast<const float*>(sin.data())};
      treadle_rope(&arguments, tokens * heads, threads);
    }
  }
}

void losses(DType type, std::int64_t rows, std::int64_t vocabulary, int threads) {
  Memory logits(type, rows * vocabulary), weights(kFloat32, rows);
  std::vector<std::int64_t> targets(static_cast<std::size_t>(rows));
  for (auto& target : targets) target = std::rand() % vocabulary;
  std::vector<float> out(static_cast<std::size_t>(rows));
  for (const float softcap : {0.0f, 3.0f}) {
    for (const bool with_gradients : {false, true}) {
      const CrossEntropy arguments{type, vocabulary, softcap, with_gradients, logits.data(), targets.data(),
                                   static_cast<const float*>(weights.data()), out.data()};
      treadle_cross_entropy(&arguments, rows, threads);
    }
  }
}

void expect(std::int32_t code, std::int32_t wanted) {
  if (code != wanted) std::abort();
}

// Sequences of one new row, of many and of none, in blocks of a size that vectors fit and one that they do not.
void paged(DType type, CacheType kind, std::int64_t size, std::int64_t block_size, int threads) {
  constexpr std::int64_t kv_heads = 2, heads = 10, sequences = 3, width = 400;
  if (size > 512 || (kind == kCacheInt4 && size % 2 != 0)) return;
  const std::int64_t wanted = size / 32 > 1 ? size / 32 : 1, even = (size + wanted - 1) / wanted;
  const std::int64_t group = even + even % 2, groups = (size + group - 1) / group;
  const std::int64_t record = kind == kCacheInt8 ? size + 2 : kind == kCacheInt4 ? size / 2 + 2 * groups : size;
  const std::int64_t bytes = kind == kCacheFloat32 ? 4 : kind == kCacheBFloat16 ? 2 : 1;
  const std::int32_t lengths[sequences] = {1100, 37, 5}, starts[sequences + 1] = {0, 1, 30, 30};
  std::vector<std::int32_t> tables(sequences * width, 0);
  std::vector<std::int64_t> rows;
  std::int64_t blocks = 1;
  for (std::int64_t s = 0; s < sequences; ++s) {
    for (std::int64_t p = 0; p < lengths[s]; ++p) {
      if (p % block_size == 0) tables[static_cast<std::size_t>(s * width + p / block_size)] = static_cast<std::int32_t>(blocks++);
      rows.push_back((blocks - 1) * block_size + p % block_size);
    }
  }
  const std::int64_t tokens = static_cast<std::int64_t>(rows.size());
  std::vector<unsigned char> keys(static_cast<std::size_t>(blocks * kv_heads * block_size * record * bytes)), values(keys);
  const PagedCache cache{kind, blocks, kv_heads, block_size, size, keys.data(), values.data()};
  Memory key(type, tokens * kv_heads * size), value(type, tokens * kv_heads * size);
  const PagedWrite write{type, cache, key.rows(size), value.rows(size), rows.data()};
  expect(treadle_paged_write(&write, tokens, threads), 0);
  Memory q(type, 30 * heads * size), out(type, 30 * heads * size), sinks(kFloat32, heads);
  for (const std::int64_t window : {0, 9, 1050}) {
    PagedAttention attention{type, cache, heads, 0.3f, window == 9 ? 2.0f : 0.0f, window, q.rows(size), out.rows(size),
                             window == 9 ? static_cast<const float*>(sinks.data()) : nullptr, sequences, width,
                             tables.data(), starts, lengths, 30};
    expect(treadle_paged_attention(&attention, 30, threads), 0);
    attention.tokens = 29;
    expect(treadle_paged_attention(&attention, 30, threads), -2);
  }
}

void samples(DType type, std::int64_t rows, std::int64_t vocabulary, int threads) {
  Memory logits(type, rows * vocabulary), odds(kFloat32, rows * vocabulary);
  std::vector<float> temperature, top_p, min_p, uniform;
  std::vector<std::int32_t> top_k;
  for (std::int64_t row = 0; row < rows; ++row) {
    temperature.push_back(static_cast<float>(row % 3) * 0.7f);
    top_p.push_back(row % 2 ? 0.6f : 1.0f);
    min_p.push_back(row % 5 ? 0.0f : 0.1f);
    uniform.push_back(static_cast<float>(row % 11) / 10.0f);
    top_k.push_back(static_cast<std::int32_t>(row % 7));
  }
  std::vector<std::int64_t> tokens(static_cast<std::size_t>(rows));
  const Sample arguments{type,         vocabulary,   logits.data(),  static_cast<float*>(odds.data()), temperature.data(),
                         top_k.data(), top_p.data(), min_p.data(),   uniform.data(),                   tokens.data()};
  treadle_sample(&arguments, rows, threads);
  for (const std::int64_t token : tokens)
    if (token < 0 || token >= vocabulary) std::abort();
}

void everything(int threads) {
  for (const std::int64_t width : kWidths)
    for (const DType type : kTypes)
      for (const CacheType kind : {kCacheFloat32, kCacheBFloat16, kCacheInt8, kCacheInt4})
        for (const std::int64_t block_size : {3, 16}) paged(type, kind, width, block_size, threads);
  for (const std::int64_t rows : kRows) {
    for (const std::int64_t width : kWidths) {
      for (const DType type : kTypes) {
        for (const DType weight_type : kTypes) norms(type, weight_type, rows, width, threads);
        activations(type, rows, width, threads);
        ropes(type, rows, width, threads);
        losses(type, rows, width, threads);
        samples(type, rows, width, threads);
      }
    }
  }
}

// Threads in the place of processes: what one of them does to the shared memory the thread sanitizer compares with what
// the others do.
void exchanges(std::int32_t ranks) {
  constexpr std::int64_t kCapacity = 192;
  const auto bytes = static_cast<std::size_t>(treadle_exchange_bytes(ranks, kCapacity));
  void* region = std::aligned_alloc(64, bytes);
  __builtin_memset(region, 0, bytes);
  std::vector<std::thread> members;
  for (std::int32_t rank = 0; rank < ranks; ++rank) {
    members.emplace_back([=] {
      treadle_exchange_enter(region, kCapacity, ranks, rank);
      for (std::int64_t turn = 0; turn < 300; ++turn) {
        const std::int64_t count = turn % 150;
        std::vector<float> in(count, static_cast<float>(turn + rank)), out(count), all(count * ranks);
        if (treadle_exchange_sum(region, kCapacity, ranks, rank, 60.0, kFloat32, in.data(), out.data(), count) != 0)
          std::abort();
        for (const float value : out)
          if (value != static_cast<float>(ranks * turn + ranks * (ranks - 1) / 2)) std::abort();
        float* kept = turn % 3 == rank ? nullptr : all.data();
        if (treadle_exchange_gather(region, kCapacity, ranks, rank, 60.0, in.data(), kept, count * 4) != 0) std::abort();
        for (std::int64_t i = 0; kept != nullptr && i < count * ranks; ++i)
          if (kept[i] != static_cast<float>(turn + i / count)) std::abort();
      }
    });
  }
  for (auto& member : members) member.join();
  std::free(region);
}

}  // namespace

int main() {
  exchanges(2);
  exchanges(3);
  for (int index = 0; const char* name = treadle_runnable(index); ++index) {
    treadle_select(name);
    std::printf("%s\n", name);
    everything(1);
    everything(4);
    quantized_layers(1);
    quantized_layers(4);
    std::vector<std::thread> callers;
    for (int i = 0; i < 3; ++i) {
      callers.emplace_back([] {
        for (int k = 0; k < 30; ++k) {
          activations(kFloat32, 513, 129, 3);
          losses(kBFloat16, 70, 1000, 4);
        }
      });
    }
    for (auto& caller : callers) caller.join();
  }
  std::printf("no error\n");
}
