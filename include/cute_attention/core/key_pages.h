// core/key_pages.h: where the keys of a tile lie in the pages of a cache, and which of them are
// loaded.
#pragma once

#include "cute_attention/core/kv_tiles.h"
#include "cute_attention/params.h"

namespace cute_attention {

// Whether the keys of a call lie in pages that a table names.
CUTE_HOST_DEVICE constexpr bool has_pages(ForwardParams const& params) {
  return params.cache.block_table != nullptr;
}

// The row of the cache, or of its table, that sequence `batch` has; without a cache `batch`.
CUTE_HOST_DEVICE constexpr int32_t cache_row(ForwardParams const& params, int32_t batch) {
  return params.cache.batch_idx == nullptr ? batch : params.cache.batch_idx[batch];
}

// A row of a page.
struct PageRow {
  int32_t page;
  int32_t row;
};

// The page that entry `index` of row `table_row` of the table names.
CUTE_HOST_DEVICE constexpr int32_t table_entry(KeyCache const& cache, int32_t table_row,
                                               int32_t index) {
  // Neither is negative: a sign would take a register of a warp that has few.
  return cache.block_table[uint32_t(table_row) * cache.block_table_stride + uint32_t(index)];
}

// Where a key of a sequence lies whose row of the table is `table_row`. It reads an entry of the
// table, so the key must be one that a query of the sequence may see.
CUTE_HOST_DEVICE constexpr PageRow page_row(KeyCache const& cache, int32_t table_row, int32_t key) {
  int32_t const index = key / cache.page_size;
  return {table_entry(cache, table_row, index), key - index * cache.page_size};
}

// How many rows of a tile of `tile_n` keys are loaded at once: as many as always lie in one page.
// Both numbers are multiples of kPageRows.
constexpr int32_t page_box_rows(int32_t page_size, int32_t tile_n) {
  return page_size == 0 ? tile_n : page_box_rows(tile_n % page_size, page_size);
}

// Boxes or rows [begin, end) of a tile of keys.
struct KeyRange {
  int32_t begin;
  int32_t end;
};

// The rows of the KV tile that begins with key `n_begin` from key `first_key` on, up to the
// sequence's end.
CUTE_HOST_DEVICE constexpr KeyRange key_rows(Sequence const& sequence, int32_t first_key,
                                             int32_t n_begin, int32_t tile_n) {
  return {max_of(first_key - n_begin, 0), min_of(sequence.seqlen_k - n_begin, tile_n)};
}

// Which boxes of `rows` rows of that tile are loaded: those with such rows, where `first_key` is
// the first that a query sees. A table may have anything for the pages of the others.
CUTE_HOST_DEVICE constexpr KeyRange key_boxes(Sequence const& sequence, int32_t first_key,
                                              int32_t n_begin, int32_t tile_n, int32_t rows) {
  KeyRange const keys = key_rows(sequence, first_key, n_begin, tile_n);
  return {keys.begin / rows, ceil_div(keys.end, rows)};
}

// The key with which the box of `rows` rows begins that has key `first_key`. Who has it tells the
// boxes of key_boxes() without a division: they are those that begin with one of the key_rows()
// from it on.
CUTE_HOST_DEVICE constexpr int32_t first_loaded_key(int32_t first_key, int32_t rows) {
  return first_key / rows * rows;
}

}  // namespace cute_attention
