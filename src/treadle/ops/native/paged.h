// A cache of keys and values in blocks: its layout, the arguments, and the functions that a variant provides.
//
// A block holds `block_size` entries (tokens). For each key-value head an entry is a record of `record` elements: the
// head's own in a float cache, bytes in a quantized one. The keys of a block and head lie as [record][block_size], so
// that a vector holds the same element of several keys; the values lie as [block_size][record].
//
// A quantized record is, in this order: the codes, one byte of scale for each group, one byte of zero point for each.
// With 8 bits the head is one group and a code is a byte. With 4 bits there is a group for every 32 elements (at least
// one; all of one size but the last), and byte i holds element i in its low half and element size / 2 + i in its high
// half. An element is scale * (code - zero): a scale byte b stands for the float with the bits (b + 856) << 20 (eight
// steps for each power of two from 2^-20 on), 255 for NaN; a zero byte counts codes (8 bits) or sixteenths of one.
//
// What is quantized is the head turned by an orthonormal Hadamard matrix (as many of the same one, side by side, as
// the largest power of two that divides the size demands), so that a large channel spreads over all of them.
#pragma once
#include "kernels.h"

namespace treadle {

enum CacheType : std::int32_t { kCacheFloat32 = 0, kCacheBFloat16 = 1, kCacheInt8 = 2, kCacheInt4 = 3 };

constexpr std::int64_t kMostHeadSize = 512, kMostGroups = 16, kGroupSize = 32;  // the first also in paged_cache.py

struct PagedCache {
  CacheType type;
  std::int64_t blocks, kv_heads, block_size, size;  // size: elements of a head
  void *keys, *values;
};

struct PagedWrite {
  DType type;
  PagedCache cache;
  Rows key, value;               // rows are (token, key-value head)
  const std::int64_t* rows;      // where each token goes: block * block_size + entry
};

struct PagedAttention {
  DType type;
  PagedCache cache;
  std::int64_t heads;
  float scale, softcap;          // softcap 0: none
  std::int64_t window;           // 0: none
  Rows q, out;                   // rows are (token, head)
  const float* sinks;            // [heads], or null
  std::int64_t sequences, width; // tables has `width` columns
  const std::int32_t *tables, *starts, *lengths;
  std::int64_t tokens;           // rows of q
};

// Consecutive new rows of one sequence; the first sees `seen` entries, each further one one more.
struct PagedTile {
  const std::int32_t* table;
  std::int64_t row, count, seen;
};

// A row's entries are taken in parts that begin at multiples of this many, each by itself, and then combined in order:
// so the result is the same bit for bit whether one thread takes all of them or each takes one.
constexpr std::int64_t kPartKeys = 1024;
constexpr std::int64_t kTileHeads = 16;  // query heads that are done together

constexpr std::int64_t state_size(std::int64_t size) { return size + 2; }

struct PagedKernels {
  // Tokens begin .. end-1.
  void (*write)(const PagedWrite&, std::int64_t begin, std::int64_t end);
  // A tile's heads of one key-value head: all parts; or, with `states`, part `part` alone, whose result goes there as
  // [rows of the tile, heads of the group, state_size].
  void (*attend)(const PagedAttention&, const PagedTile&, std::int64_t kv_head, std::int64_t part, float* states);
  // Combines what `attend` left in parts begin .. end-1 of [parts][rows of the tile, heads of the group, state_size].
  void (*combine)(const PagedAttention&, const PagedTile&, std::int64_t kv_head, std::int64_t begin, std::int64_t end,
                  const float* states);
};

}  // namespace treadle
