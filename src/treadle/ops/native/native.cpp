// The C ABI: picks the instruction-set variant, splits the rows into tasks, runs them on the pool.
// Every function returns 0, or -1 when memory is short. Types and kinds are those of kernels.h.
#include <atomic>
#include <cstdint>
#include <cstring>
#include <new>
#include <vector>

#include "exchange.h"
#include "kernels.h"
#include "paged.h"
#include "pool.h"

#define TREADLE_EXPORT extern "C" __attribute__((visibility("default")))

namespace treadle {

namespace baseline { extern const Kernels kernels; }
#ifdef TREADLE_HAVE_AVX2
namespace avx2 { extern const Kernels kernels; }
#endif
#ifdef TREADLE_HAVE_AVX_VNNI
namespace avx_vnni { extern const Kernels kernels; }
#endif
#ifdef TREADLE_HAVE_AVX512
namespace avx512 { extern const Kernels kernels; }
#endif
#ifdef TREADLE_HAVE_AVX512_VNNI
namespace avx512_vnni { extern const Kernels kernels; }
#endif
#ifdef TREADLE_HAVE_AVX512_BF16
namespace avx512_bf16 { extern const Kernels kernels; }
#endif

namespace {

using std::int32_t;
using std::int64_t;

// The variants that this processor can run, the widest first.
std::vector<const Kernels*> runnable() {
  std::vector<const Kernels*> found;
#if defined(__x86_64__) || defined(__i386__)
  __builtin_cpu_init();
  [[maybe_unused]] const bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                                     __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#ifdef TREADLE_HAVE_AVX512_BF16
  if (wide && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16"))
    found.push_back(&avx512_bf16::kernels);
#endif
#ifdef TREADLE_HAVE_AVX512_VNNI
  if (wide && __builtin_cpu_supports("avx512vnni")) found.push_back(&avx512_vnni::kernels);
#endif
#ifdef TREADLE_HAVE_AVX512
  if (wide) found.push_back(&avx512::kernels);
#endif
  [[maybe_unused]] const bool half_wide =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
#ifdef TREADLE_HAVE_AVX_VNNI
  if (half_wide && __builtin_cpu_supports("avxvnni")) found.push_back(&avx_vnni::kernels);
#endif
#ifdef TREADLE_HAVE_AVX2
  if (half_wide) found.push_back(&avx2::kernels);
#endif
#endif
  found.push_back(&baseline::kernels);
  return found;
}

const std::vector<const Kernels*>& variants() {
  static const std::vector<const Kernels*> found = runnable();
  return found;
}

std::atomic<const Kernels*>& chosen() {
  static std::atomic<const Kernels*> kernels{variants().front()};
  return kernels;
}

// A task is worth waking a thread for from about this many elements on.
constexpr int64_t kTaskElements = 16384;

template <class Arguments>
struct Call {
  void (*function)(const Arguments&, int64_t, int64_t);
  const Arguments* arguments;
  int64_t rows, rows_per_task;
};

template <class Arguments>
int32_t run_rows(void (*function)(const Arguments&, int64_t, int64_t), const Arguments& arguments, int64_t rows,
                 int64_t width, int32_t threads) {
  if (rows <= 0 || width <= 0) return 0;
  const int64_t rows_per_task = width >= kTaskElements ? 1 : kTaskElements / width;
  const Call<Arguments> call{function, &arguments, rows, rows_per_task};
  const auto task = [](const void* data, int64_t index) {
    const auto& c = *static_cast<const Call<Arguments>*>(data);
    const int64_t begin = index * c.rows_per_task, end = begin + c.rows_per_task;
    c.function(*c.arguments, begin, end < c.rows ? end : c.rows);
  };
  run_tasks(threads, (rows + rows_per_task - 1) / rows_per_task, task, &call);
  return 0;
}

}  // namespace

const Kernels& chosen_kernels() { return *chosen().load(); }

}  // namespace treadle

using namespace treadle;

// Changes whenever a function's meaning does; the Python side refuses a library of another number.
TREADLE_EXPORT int32_t treadle_abi() { return 6; }

// The size in bytes of the argument structure at `index`, so that the Python side can compare its own; -1 beyond the last.
TREADLE_EXPORT int32_t treadle_size(int32_t index) {
  constexpr std::size_t sizes[] = {sizeof(Rows),       sizeof(RmsNorm),      sizeof(RmsNormBackward), sizeof(GatedActivation),
                                   sizeof(Rope),       sizeof(CrossEntropy), sizeof(Sample),          sizeof(PagedCache),
                                   sizeof(PagedWrite), sizeof(PagedAttention)};
  constexpr int32_t count = sizeof(sizes) / sizeof(sizes[0]);
  return index >= 0 && index < count ? static_cast<int32_t>(sizes[index]) : -1;
}

TREADLE_EXPORT const char* treadle_variant() { return chosen().load()->name; }

// The name of the variant at `index` among those that this processor can run, the widest first; null beyond the last.
TREADLE_EXPORT const char* treadle_runnable(int32_t index) {
  return index >= 0 && index < static_cast<int32_t>(variants().size()) ? variants()[index]->name : nullptr;
}

// Uses the variant `name` from now on; -1 where this processor cannot run it.
TREADLE_EXPORT int32_t treadle_select(const char* name) {
  for (const Kernels* kernels : variants()) {
    if (std::strcmp(kernels->name, name) == 0) {
      chosen().store(kernels);
      return 0;
    }
  }
  return -1;
}

TREADLE_EXPORT int32_t treadle_rms_norm(const RmsNorm* a, int64_t rows, int32_t threads) {
  return run_rows(chosen().load()->rms_norm, *a, rows, a->width, threads);
}

TREADLE_EXPORT int32_t treadle_rms_norm_backward(const RmsNormBackward* a, float* grad_weight, int64_t rows,
                                                 int32_t threads) {
  // The rows are cut into parts by their number alone, so that the sum does not depend on the number of threads.
  constexpr int64_t kMostParts = 64, kRowsPerPart = 32;
  const int64_t width = a->width;
  std::memset(grad_weight, 0, static_cast<std::size_t>(width) * sizeof(float));
  if (rows <= 0 || width <= 0) return 0;
  int64_t parts = (rows + kRowsPerPart - 1) / kRowsPerPart;
  if (parts > kMostParts) parts = kMostParts;
  try {
    std::vector<float> sums(static_cast<std::size_t>(parts * width), 0.0f);
    struct Parts {
      const RmsNormBackward* a;
      void (*function)(const RmsNormBackward&, int64_t, int64_t, float*);
      float* sums;
      int64_t rows, parts;
    } call{a, chosen().load()->rms_norm_backward, sums.data(), rows, parts};
    const auto task = [](const void* data, int64_t part) {
      const auto& c = *static_cast<const Parts*>(data);
      c.function(*c.a, c.rows * part / c.parts, c.rows * (part + 1) / c.parts, c.sums + part * c.a->width);
    };
    run_tasks(rows * width < 2 * kTaskElements ? 1 : threads, parts, task, &call);
    for (int64_t part = 0; part < parts; ++part)
      for (int64_t i = 0; i < width; ++i) grad_weight[i] += sums[part * width + i];
  } catch (const std::bad_alloc&) {
    return -1;
  }
  return 0;
}

TREADLE_EXPORT int32_t treadle_gated_activation(const GatedActivation* a, int64_t rows, int32_t threads) {
  return run_rows(chosen().load()->gated_activation, *a, rows, a->width, threads);
}

TREADLE_EXPORT int32_t treadle_gated_activation_backward(const GatedActivation* a, int64_t rows, int32_t threads) {
  return run_rows(chosen().load()->gated_activation_backward, *a, rows, a->width, threads);
}

TREADLE_EXPORT int32_t treadle_rope(const Rope* a, int64_t rows, int32_t threads) {
  return run_rows(chosen().load()->rope, *a, rows, a->width, threads);
}

TREADLE_EXPORT int32_t treadle_cross_entropy(const CrossEntropy* a, int64_t rows, int32_t threads) {
  return run_rows(chosen().load()->cross_entropy, *a, rows, a->vocabulary, threads);
}

TREADLE_EXPORT int32_t treadle_sample(const Sample* a, int64_t rows, int32_t threads) {
  return run_rows(chosen().load()->sample, *a, rows, a->vocabulary, threads);
}

// Exchanges between processes (see exchange.h). They return an ExchangeResult.
TREADLE_EXPORT int64_t treadle_exchange_bytes(int32_t ranks, int64_t capacity) { return exchange_bytes(ranks, capacity); }

TREADLE_EXPORT void treadle_exchange_enter(void* region, int64_t capacity, int32_t ranks, int32_t rank) {
  exchange_enter({region, capacity, ranks, rank, 0});
}

TREADLE_EXPORT int32_t treadle_exchange_sum(void* region, int64_t capacity, int32_t ranks, int32_t rank, double timeout,
                                            int32_t type, const void* in, void* out, int64_t count) {
  return exchange_sum({region, capacity, ranks, rank, timeout}, static_cast<DType>(type), in, out, count);
}

TREADLE_EXPORT int32_t treadle_exchange_gather(void* region, int64_t capacity, int32_t ranks, int32_t rank,
                                               double timeout, const void* in, void* out, int64_t bytes) {
  return exchange_gather({region, capacity, ranks, rank, timeout}, in, out, bytes);
}
