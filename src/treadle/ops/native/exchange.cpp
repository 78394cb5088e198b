#include "exchange.h"

#include <signal.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstring>

#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#endif
#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

#include "math.h"

namespace treadle {
namespace {

// Some tens of microseconds: what neighbours differ by when each has a core. Then a process sleeps.
constexpr int kSpins = 2000;
constexpr int64_t kHeader = 64;      // bytes of a process's place
constexpr double kLookSeconds = 0.05;  // how often a sleeper looks whether the other still lives

// Where a process stands; alone on its cache line.
struct Place {
  std::atomic<uint32_t> arrived;   // how many exchanges it has given its part to
  std::atomic<uint32_t> sleepers;  // how many wait for it in the kernel
  std::atomic<int32_t> pid;
};
static_assert(sizeof(Place) <= kHeader && std::atomic<uint32_t>::is_always_lock_free);

void pause_briefly() {
#if defined(__x86_64__) || defined(__i386__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

Place& place_of(const Exchange& group, int32_t rank) {
  return *reinterpret_cast<Place*>(static_cast<char*>(group.region) + rank * kHeader);
}

// The part of the buffer that a process writes in exchange number `number`. There are two, in turn: when a process writes
// one of them again, it has seen that all others arrived at the exchange between, so none still reads the one before.
char* part_of(const Exchange& group, int32_t rank, uint32_t number) {
  char* parts = static_cast<char*>(group.region) + group.ranks * kHeader;
  return parts + ((number & 1) * static_cast<int64_t>(group.ranks) + rank) * group.capacity;
}

void sleep_on(std::atomic<uint32_t>& word, uint32_t value, double seconds) {
  timespec pause{static_cast<time_t>(seconds), static_cast<long>((seconds - static_cast<time_t>(seconds)) * 1e9)};
#ifdef __linux__
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, value, &pause, nullptr, 0);
#else
  pause = {0, 50000};
  if (word.load() == value) nanosleep(&pause, nullptr);
#endif
}

void wake(std::atomic<uint32_t>& word) {
#ifdef __linux__
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
#endif
  (void)word;
}

bool has_arrived(const Place& place, uint32_t number) {
  return static_cast<int32_t>(place.arrived.load(std::memory_order_acquire) - number) >= 0;
}

int32_t wait_for(const Exchange& group, int32_t rank, uint32_t number) {
  Place& place = place_of(group, rank);
  for (int i = 0; i < kSpins; ++i) {
    if (has_arrived(place, number)) return kExchanged;
    pause_briefly();
  }
  using Clock = std::chrono::steady_clock;
  const auto deadline = Clock::now() + std::chrono::duration<double>(group.timeout);
  int32_t result = kExchanged;
  place.sleepers.fetch_add(1);
  for (;;) {
    const uint32_t seen = place.arrived.load();
    if (static_cast<int32_t>(seen - number) >= 0) break;
    const double left = std::chrono::duration<double>(deadline - Clock::now()).count();
    if (left <= 0) {
      result = kTimedOut;
      break;
    }
    if (kill(place.pid.load(), 0) != 0 && errno == ESRCH) {
      result = rank + 1;
      break;
    }
    sleep_on(place.arrived, seen, std::min(left, kLookSeconds));
  }
  place.sleepers.fetch_sub(1);
  return result;
}

// Says that this process's part of exchange `number` is there, and waits until every other's is.
int32_t arrive(const Exchange& group, uint32_t number) {
  Place& own = place_of(group, group.rank);
  own.arrived.store(number);
  if (own.sleepers.load() != 0) wake(own.arrived);
  for (int32_t step = 1; step < group.ranks; ++step) {
    const int32_t result = wait_for(group, (group.rank + step) % group.ranks, number);
    if (result != kExchanged) return result;
  }
  return kExchanged;
}

uint32_t next_number(const Exchange& group) {
  return place_of(group, group.rank).arrived.load(std::memory_order_relaxed) + 1;
}

template <class T>
void add_up(const Exchange& group, uint32_t number, T* out, int64_t count) {
  // In pieces that stay in the first-level cache: the sum so far is kept in float32.
  constexpr int64_t kPiece = 2048;
  float total[kPiece];
  for (int64_t begin = 0; begin < count; begin += kPiece) {
    const int64_t size = std::min(kPiece, count - begin);
    const T* first = reinterpret_cast<const T*>(part_of(group, 0, number)) + begin;
    for (int64_t i = 0; i < size; ++i) total[i] = load(first + i);
    for (int32_t rank = 1; rank < group.ranks; ++rank) {
      const T* part = reinterpret_cast<const T*>(part_of(group, rank, number)) + begin;
      for (int64_t i = 0; i < size; ++i) total[i] += load(part + i);
    }
    for (int64_t i = 0; i < size; ++i) store(out + begin + i, total[i]);
  }
}

template <class T>
int32_t sum(const Exchange& group, const T* in, T* out, int64_t count) {
  const int64_t most = group.capacity / static_cast<int64_t>(sizeof(T));
  for (int64_t begin = 0; begin < count; begin += most) {
    const int64_t size = std::min(most, count - begin);
    const uint32_t number = next_number(group);
    std::memcpy(part_of(group, group.rank, number), in + begin, static_cast<std::size_t>(size) * sizeof(T));
    if (const int32_t result = arrive(group, number); result != kExchanged) return result;
    add_up(group, number, out + begin, size);
  }
  return kExchanged;
}

}  // namespace

int64_t exchange_bytes(int32_t ranks, int64_t capacity) { return ranks * (kHeader + 2 * capacity); }

void exchange_enter(const Exchange& group) { place_of(group, group.rank).pid.store(static_cast<int32_t>(getpid())); }

int32_t exchange_sum(const Exchange& group, DType type, const void* in, void* out, int64_t count) {
  if (type == kBFloat16)
    return sum(group, static_cast<const bf16*>(in), static_cast<bf16*>(out), count);
  return sum(group, static_cast<const float*>(in), static_cast<float*>(out), count);
}

int32_t exchange_gather(const Exchange& group, const void* in, void* out, int64_t bytes) {
  for (int64_t begin = 0; begin < bytes; begin += group.capacity) {
    const auto size = static_cast<std::size_t>(std::min(group.capacity, bytes - begin));
    const uint32_t number = next_number(group);
    std::memcpy(part_of(group, group.rank, number), static_cast<const char*>(in) + begin, size);
    if (const int32_t result = arrive(group, number); result != kExchanged) return result;
    if (out == nullptr) continue;
    for (int32_t rank = 0; rank < group.ranks; ++rank)
      std::memcpy(static_cast<char*>(out) + rank * bytes + begin, part_of(group, rank, number), size);
  }
  return kExchanged;
}

}  // namespace treadle
