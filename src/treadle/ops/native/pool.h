// A small persistent pool of threads. Work is a number of tasks, taken one after the other by whoever is free.
#pragma once
#include <cstdint>

namespace treadle {

// Does task number `task`; must not throw.
using Task = void (*)(const void* arguments, std::int64_t task);

// Runs tasks 0 .. tasks-1 on at most `threads` threads, the caller's among them, and returns when all are done.
// Safe from several threads at once (one gets the workers, the others work alone) and after a fork.
void run_tasks(int threads, std::int64_t tasks, Task task, const void* arguments);

}  // namespace treadle
