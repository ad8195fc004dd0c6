// The C interface of paged attention: plain structs, no torch.
#pragma once

#include <cstdint>

#include "common/dtype.h"

extern "C" {

// One step. Arrays as in worker/attention/backend.py, counts in elements.
struct TokendAttentionStep {
    int64_t num_seqs;
    int64_t num_tokens;
    int64_t num_heads;
    int64_t num_kv_heads;
    int64_t head_dim;
    int64_t block_size;
    int64_t max_blocks;
    int64_t window;  // tokens that a query sees at most, including its own
    int64_t most_partial_rows;  // limit of rows in memory, unless one tile needs more
    int64_t latent_dim;  // 0, or of latent attention: below
    int64_t ahead;  // tokens after its own that a query sees at most: 0 in causal attention; `window` counts them, too
    const int32_t* query_start;
    const int32_t* seq_lens;
    const int32_t* block_table;
    const int64_t* slot_mapping;
    const int32_t* attend_end;  // [num_tokens], where what a query sees ends; null: after its own token and `ahead`
    double scale;
    double soft_cap;  // scores become soft_cap * tanh(score / soft_cap); 0: no soft cap
};

// Latent attention (DeepSeek-V2, section 2.1) has one KV head and pages of keys only. The first
// latent_dim numbers of a key do not rotate and are its value too; the others rotate:
//
//   key   | latent, the value | rotated part |      queries are the same; an output is a latent

// A tile: neighbouring queries of one sequence under one KV head.
//   rows:     query_count * group_size, row = query * group_size + head in group
//   kv_begin, kv_end: tokens that at least one of the queries sees
//   num_splits: parts of this range, cut at multiples of split_len (drawn in attention.cpp)
//   partial_row: first row of its partial results, if it has several splits
struct TokendTile {
    int32_t seq;
    int32_t kv_head;
    int32_t query_begin;
    int32_t query_count;
    int32_t kv_begin;
    int32_t kv_end;
    int32_t num_splits;
    int32_t split_len;
    int32_t partial_row;
};

// What a thread computes at a time: one split of `heads` neighbouring tiles, the same queries and
// tokens under KV heads that are adjacent in the pages.
struct TokendTask {
    int32_t tile;
    int32_t split;
    int32_t heads;
};

// A round: tiles whose partial results are in memory together; begins at the end of the last one.
struct TokendRound {
    int32_t tiles_end;
    int32_t tasks_end;
};

struct TokendAttentionSchedule {
    int64_t num_tiles;
    int64_t num_tasks;
    int64_t num_rounds;
    int64_t num_partial_rows;
    int64_t num_elements;  // of K read by the tasks, times the rows that use them
    TokendTile* tiles;
    TokendTask* tasks;
    TokendRound* rounds;
    float* partials;  // [num_partial_rows, tokend_partial_width(head_dim)]
};

// One layer. Strides in elements; block_stride and head_stride hold for K and V.
//   dtype: of query, key, value and output, not int8
//   cache_dtype: of the pages; int8 rows [block_size, head_dim] are followed by their
//       float scales [parts of a row, block_size] (token_rows.h)
//   rotation: [num_tokens, 2, n / 2], cosines and sines of the last n numbers of a head, which rotate; a
//       latent does not
//   value_pages: those of keys in latent attention, where value is null
//   sinks: [num_heads], a logit of each head that takes part in the softmax but has no value; or null
struct TokendAttentionLayer {
    int64_t dtype;
    int64_t cache_dtype;
    const void* query;
    const void* key;
    const void* value;
    int64_t query_stride;
    int64_t key_stride;
    int64_t value_stride;
    const float* rotation;
    void* key_pages;
    void* value_pages;
    int64_t block_stride;
    int64_t head_stride;
    const float* sinks;
    void* output;
};

// Floats of one partial result.
__attribute__((visibility("default"))) int64_t tokend_partial_width(int64_t head_dim);

// Sets the counts of plan, and fills tiles, tasks and rounds unless they are null.
__attribute__((visibility("default"))) void tokend_attention_plan(const TokendAttentionStep* step, TokendAttentionSchedule* plan);

// Rotates the step's keys, writes K and V to the pages, then attends with rotated queries.
// May be called by every thread of a team (team.h).
__attribute__((visibility("default"))) void tokend_attention_run(const TokendAttentionStep* step, const TokendAttentionSchedule* plan, const TokendAttentionLayer* layer);
}
