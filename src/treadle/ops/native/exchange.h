// Sums and gathers between processes of one machine, through memory that all of them map.
#pragma once
#include <cstdint>

#include "kernels.h"

namespace treadle {

// A group of processes that share `region`, all zero when it was made. Every process calls the same functions in the
// same order, with the same sizes.
struct Exchange {
  void* region;
  std::int64_t capacity;          // bytes of one process's half of the buffer, a multiple of 64
  std::int32_t ranks, rank;
  double timeout;                 // seconds that a process waits for the others
};

// What a call returns: 0 when all is well, -1 where a process did not come in time, and n > 0 where process n - 1 is gone.
enum ExchangeResult : std::int32_t { kExchanged = 0, kTimedOut = -1 };

// How many bytes a region takes.
std::int64_t exchange_bytes(std::int32_t ranks, std::int64_t capacity);

// Says which process this is; before the first exchange, and before any other process may find it missing.
void exchange_enter(const Exchange& group);

// Writes to `out` the sum of every process's `in`, `count` elements, added in the order of the ranks in float32.
std::int32_t exchange_sum(const Exchange& group, DType type, const void* in, void* out, std::int64_t count);

// Writes to `out` every process's `in`, `bytes` each, in the order of the ranks; a null `out` only gives.
std::int32_t exchange_gather(const Exchange& group, const void* in, void* out, std::int64_t bytes);

}  // namespace treadle
