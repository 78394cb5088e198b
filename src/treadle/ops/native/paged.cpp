// The C ABI of the paged cache: checks what an index could break, cuts the work into tasks, runs them on the pool.
// Every function returns 0, -1 when memory is short, -2 where something lies outside the cache.
#include "paged.h"

#include <new>
#include <vector>

#include "pool.h"

#define TREADLE_EXPORT extern "C" __attribute__((visibility("default")))

namespace treadle {
namespace {

using std::int32_t;
using std::int64_t;

constexpr int32_t kShort = -1, kOutside = -2;
// A task is worth waking a thread for from about this many elements on.
constexpr int64_t kTaskElements = 16384;
constexpr int64_t kWriteWork = 16;  // what quantizing an element costs, in elements that are only read

int64_t divided_up(int64_t value, int64_t by) { return (value + by - 1) / by; }

// The entries of one sequence that a row sees begin here.
int64_t first_seen(const PagedAttention& a, int64_t seen) {
  return a.window > 0 && seen > a.window ? seen - a.window : 0;
}

bool inside(const PagedAttention& a) {
  if (a.starts[0] != 0 || a.starts[a.sequences] > a.tokens) return false;
  for (int64_t s = 0; s < a.sequences; ++s) {
    const int64_t count = a.starts[s + 1] - a.starts[s], length = a.lengths[s], size = a.cache.block_size;
    if (count < 0 || count > length || length > a.width * size) return false;
    if (count == 0) continue;
    for (int64_t block = first_seen(a, length - count + 1) / size; block < divided_up(length, size); ++block) {
      const int32_t index = a.tables[s * a.width + block];
      if (index < 1 || index >= a.cache.blocks) return false;
    }
  }
  return true;
}

// Each tile's tasks are numbers `task` and on: for each key-value head, all parts at once, or one after the other.
struct Tile {
  PagedTile rows;
  int64_t task, part, parts;
  int64_t state;  // where its states begin, -1 where there are none
};

struct Plan {
  const PagedAttention* a;
  const PagedKernels* kernels;
  std::vector<Tile> tiles;
  std::vector<float> states;
  std::vector<int32_t> owners;  // the tile of each task
  int64_t tasks = 0;

  int64_t part_size(const Tile& tile) const {
    return tile.rows.count * (a->heads / a->cache.kv_heads) * state_size(a->cache.size);
  }

  void cut(int32_t threads) {
    const int64_t group = a->heads / a->cache.kv_heads;
    const int64_t most = group >= kTileHeads ? 1 : kTileHeads / group;
    for (int64_t s = 0; s < a->sequences; ++s) {
      const int64_t count = a->starts[s + 1] - a->starts[s];
      for (int64_t row = 0; row < count; row += most) {
        const int64_t rows = count - row < most ? count - row : most, seen = a->lengths[s] - count + row + 1;
        const int64_t part = first_seen(*a, seen) / kPartKeys;
        tiles.push_back({{a->tables + s * a->width, a->starts[s] + row, rows, seen},
                         0,
                         part,
                         divided_up(seen + rows - 1, kPartKeys) - part,
                         -1});
      }
    }
    // With enough tiles for every thread, their parts need no tasks of their own.
    const bool split = threads > 1 && static_cast<int64_t>(tiles.size()) * a->cache.kv_heads < 4 * threads;
    int64_t size = 0;
    for (Tile& tile : tiles) {
      tile.task = tasks;
      const bool apart = split && tile.parts > 1;
      if (apart) {
        tile.state = size;
        size += a->cache.kv_heads * tile.parts * part_size(tile);
      }
      tasks += a->cache.kv_heads * (apart ? tile.parts : 1);
      owners.resize(static_cast<std::size_t>(tasks), static_cast<int32_t>(&tile - tiles.data()));
    }
    states.resize(static_cast<std::size_t>(size));
  }

  float* states_of(const Tile& tile, int64_t kv_head) {
    return states.data() + tile.state + kv_head * tile.parts * part_size(tile);
  }

  void run(int64_t task) {
    const Tile& tile = tiles[static_cast<std::size_t>(owners[static_cast<std::size_t>(task)])];
    const int64_t index = task - tile.task;
    if (tile.state < 0) return kernels->attend(*a, tile.rows, index, 0, nullptr);
    const int64_t kv_head = index / tile.parts, part = index % tile.parts;
    kernels->attend(*a, tile.rows, kv_head, tile.part + part, states_of(tile, kv_head) + part * part_size(tile));
  }

  void combine(int64_t kv_head) {
    for (const Tile& tile : tiles)
      if (tile.state >= 0)
        kernels->combine(*a, tile.rows, kv_head, tile.part, tile.part + tile.parts, states_of(tile, kv_head));
  }
};

}  // namespace
}  // namespace treadle

using namespace treadle;

TREADLE_EXPORT int32_t treadle_paged_write(const PagedWrite* a, int64_t tokens, int32_t threads) {
  for (int64_t token = 0; token < tokens; ++token)
    if (a->rows[token] < 0 || a->rows[token] >= a->cache.blocks * a->cache.block_size) return kOutside;
  struct Call {
    const PagedWrite* a;
    const PagedKernels* kernels;
    int64_t tokens, each;
  } call{a, chosen_kernels().paged, tokens, 1 + kTaskElements / (1 + kWriteWork * a->cache.kv_heads * a->cache.size)};
  const auto task = [](const void* data, int64_t index) {
    const auto& c = *static_cast<const Call*>(data);
    const int64_t begin = index * c.each, end = begin + c.each;
    c.kernels->write(*c.a, begin, end < c.tokens ? end : c.tokens);
  };
  run_tasks(threads, divided_up(tokens, call.each), task, &call);
  return 0;
}

TREADLE_EXPORT int32_t treadle_paged_attention(const PagedAttention* a, int64_t /*tokens*/, int32_t threads) {
  if (!inside(*a)) return kOutside;
  try {
    Plan plan{a, chosen_kernels().paged, {}, {}, {}};
    plan.cut(threads);
    int64_t work = 0;  // elements that are read
    for (const Tile& tile : plan.tiles) work += tile.parts * kPartKeys < tile.rows.seen ? tile.parts * kPartKeys : tile.rows.seen;
    if (work * a->cache.kv_heads * a->cache.size < kTaskElements) threads = 1;
    run_tasks(threads, plan.tasks, [](const void* p, int64_t task) { static_cast<Plan*>(const_cast<void*>(p))->run(task); },
              &plan);
    if (!plan.states.empty())
      for (int64_t kv_head = 0; kv_head < a->cache.kv_heads; ++kv_head) plan.combine(kv_head);
  } catch (const std::bad_alloc&) {
    return kShort;
  }
  return 0;
}
