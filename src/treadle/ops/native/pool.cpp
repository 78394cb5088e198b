#include "pool.h"

#include <pthread.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

namespace treadle {
namespace {

// A worker that has nothing to do looks for work this many times (tens of microseconds), then sleeps.
constexpr int kSpins = 2000;

void pause_briefly() {
#if defined(__x86_64__) || defined(__i386__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

struct Job {
  Task task;
  const void* arguments;
  std::int64_t tasks;
  std::atomic<std::int64_t> next{0};

  void work() {
    for (std::int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) task(arguments, i);
  }
};

// A worker's life: the caller offers a job (idle -> offered); the worker takes it (offered -> running) and ends it
// (running -> idle), or the caller, out of tasks, withdraws an offer not yet taken (offered -> idle). So a worker
// whose core is busy with something else never holds the caller up.
enum State : std::uint32_t { kIdle, kOffered, kRunning };

struct alignas(64) Worker {
  std::atomic<std::uint32_t> state{kIdle};
  Job* job = nullptr;

  // Waits while the state is `old`: spins, then sleeps.
  void wait_while(std::uint32_t old) {
    for (int i = 0; i < kSpins; ++i) {
      if (state.load(std::memory_order_acquire) != old) return;
      pause_briefly();
    }
    state.wait(old, std::memory_order_acquire);
  }

  void live() {
    for (;;) {
      wait_while(kIdle);
      std::uint32_t expected = kOffered;
      if (!state.compare_exchange_strong(expected, kRunning, std::memory_order_acquire)) continue;
      job->work();
      state.store(kIdle, std::memory_order_release);
      state.notify_all();
    }
  }
};

class Pool {
 public:
  void run(int threads, Job& job) {
    std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
    if (!lock.owns_lock()) return job.work();
    const int helpers = grow(threads - 1);
    for (int i = 0; i < helpers; ++i) {
      workers_[i]->job = &job;
      workers_[i]->state.store(kOffered, std::memory_order_release);
      workers_[i]->state.notify_one();
    }
    job.work();
    for (int i = 0; i < helpers; ++i) {
      std::uint32_t expected = kOffered;
      if (workers_[i]->state.compare_exchange_strong(expected, kIdle, std::memory_order_acquire)) continue;
      while (workers_[i]->state.load(std::memory_order_acquire) == kRunning) workers_[i]->wait_while(kRunning);
    }
  }

 private:
  // Returns how many workers there are, `wanted` at most; a system out of threads gives fewer.
  int grow(int wanted) {
    try {
      while (static_cast<int>(workers_.size()) < wanted) {
        auto worker = std::make_unique<Worker>();
        std::thread(&Worker::live, worker.get()).detach();
        workers_.push_back(std::move(worker));
      }
    } catch (const std::system_error&) {
    }
    const int have = static_cast<int>(workers_.size());
    return have < wanted ? have : wanted;
  }

  std::mutex mutex_;  // held by the caller whom the workers serve
  std::vector<std::unique_ptr<Worker>> workers_;
};

// Never destroyed: the workers may outlive every destructor at the end of the process. A forked child has no workers,
// so it forgets the pool and makes its own.
std::atomic<Pool*> pool{nullptr};

void forget_pool() { pool.store(nullptr); }

Pool& current_pool() {
  if (Pool* found = pool.load(std::memory_order_acquire)) return *found;
  static const int registered = pthread_atfork(nullptr, nullptr, forget_pool);
  (void)registered;
  Pool* made = new Pool;
  Pool* none = nullptr;
  if (pool.compare_exchange_strong(none, made)) return *made;
  delete made;
  return *none;
}

}  // namespace

void run_tasks(int threads, std::int64_t tasks, Task task, const void* arguments) {
  if (threads > tasks) threads = static_cast<int>(tasks);
  Job job{task, arguments, tasks};
  if (threads <= 1) return job.work();
  current_pool().run(threads, job);
}

}  // namespace treadle
