// Causal attention over paged K and V with an online softmax in float32
// (Milakov, Gimelshein 2018), long contexts split as in Flash-Decoding.
//
// A tile is some query rows of a sequence under one KV head. Its KV tokens are cut into splits. A
// task, the work that a thread takes, is one split of a tile, or of several heads' tiles of the same
// queries:
//
//   tile 0    | split 0 | split 1 | split 2 | …    merged into the rows of tile 0
//   tile 1    | split 0 | split 1 | split 2 | …    merged into the rows of tile 1
//
// A task has a result for each row: the output before it is normalised, the largest raw score, and
// the sum of weights. Those of several splits are kept as partial results and merged afterwards.
//
// All cuts are at positions of the sequence that do not depend on which of its tokens a step
// computes. So a row adds up the same numbers in the same order alone, in a batch and in any chunk
// of its prompt:
//
//   token          0        64       128      192      256        512        768        1024
//   token group    |-|-|-|-|                                                                  16
//   chunk          |--------|--------|--------|--------|                                      64
//   short split    |-----------------------------------|----------|----------|----------|     256
//   long split     |--------------------------------------------------------------------|     1024
//
//   token group    what kernels that read pages in place take together, if each lies in one page
//   chunk          step of the online softmax in kernels that compute in float32 (few_rows.h, many_rows.h);
//                  the others take one softmax over a short split
//   short split    the split of a tile of few rows: reading KV limits it, and one sequence must be
//                  enough work for all threads
//   long split     the split of a tile of many rows, which merges its short splits itself
//
// In both kinds of tiles, short splits are merged into their long split from left to right, and long
// splits into the row.
#include "attention/attention.h"
#include "attention/few_rows.h"
#include "attention/kv_split.h"
#include "attention/many_rows.h"
#include "attention/softmax.h"
#include "attention/token_rows.h"
#include "common/team.h"

#include <omp.h>


namespace tokend {
namespace {

template <class C>
void compute_split(const KVSplit& split, const KVSplit& following, const TokendAttentionSchedule* plan, int64_t index,
                   Scratch& scratch) {
    if (split.rows <= SHORT_SPLIT_ROWS && attend_few_in_bfloat16(split, following, plan, index, scratch)) return;
    if (attend_in_bfloat16(split, plan, index, scratch)) return;
    if (split.rows <= FEW_ROWS) return attend_few<C>(split, following, plan, index, scratch);
    ManyRows<C> tile(split, scratch);
    tile.compute(split);
    for (int64_t row = 0; row < split.rows; row++) {
        float* output = tile.keys;  // unused by now, and large enough for a row
        for (int64_t dim = 0; dim < split.head_dim; dim++) output[dim] = tile.all.output[dim * tile.width + row];
        write_result(split, plan, index, row, {output, tile.all.best[row], tile.all.total[row]});
    }
}

// Computes one task: all of its heads together, or one after the other.
template <class C>
void compute_task(const KVSplit& first, int64_t heads, const KVSplit& following, const TokendAttentionSchedule* plan,
                  int64_t index, Scratch& scratch) {
    if (first.rows <= SHORT_SPLIT_ROWS && attend_few_in_int8(first, heads, following, plan, index, scratch)) return;
    for (int64_t head = 0; head < heads; head++) {
        const KVSplit split = first.of_head(head);
        compute_split<C>(split, head + 1 < heads ? first.of_head(head + 1) : following, plan, index, scratch);
    }
}

// Merges the partial results of one row of a tile: short splits into long ones, long splits into the row.
//   memory: 2 * head_dim floats
void merge_row(const KVSplit& split, const TokendAttentionSchedule* plan, int64_t row, float* memory) {
    const int64_t head_dim = split.head_dim, width = partial_width(head_dim), split_len = split.tile->split_len;
    const float* part = plan->partials + (split.tile->partial_row + row) * width;
    RowResult all = {memory, 0, 0}, long_split = {memory + head_dim, 0, 0};
    all.clear(head_dim);
    long_split.clear(head_dim);
    int64_t end = split.begin / split_len * split_len;
    for (int64_t index = 0; index < split.tile->num_splits; index++, part += split.rows * width) {
        end += split_len;
        long_split.fold(part, part[head_dim], part[head_dim + 1], head_dim, split.scale);
        if (end % LONG_SPLIT != 0 && index + 1 < split.tile->num_splits) continue;
        all.fold(long_split.output, long_split.best, long_split.total, head_dim, split.scale);
        long_split.clear(head_dim);
    }
    finish_row(split, row, all);
}

// Writes the rotated K and the V of one token to its page; in latent attention only K.
template <class C>
void write_token(const TokendAttentionStep* step, const TokendAttentionLayer* layer, int64_t token, Scratch& scratch) {
    const int64_t slot = step->slot_mapping[token], head_dim = step->head_dim, block_size = step->block_size;
    const int64_t rotary_dim = head_dim - step->latent_dim;
    const int64_t page = slot / block_size * layer->block_stride, offset = slot % block_size;
    float* row = scratch.floats(head_dim);
    for (int64_t head = 0; head < step->num_kv_heads; head++) {
        const int64_t at = page + head * layer->head_stride;
        read_row(layer->dtype, layer->key, token * layer->key_stride + head * head_dim, head_dim, row);
        rotate_row(layer->rotation + token * rotary_dim, rotary_dim, row + head_dim - rotary_dim);
        write_to_page(row, head_dim, block_size, offset, static_cast<C*>(layer->key_pages) + at);
        if (step->latent_dim > 0) continue;
        read_row(layer->dtype, layer->value, token * layer->value_stride + head * head_dim, head_dim, row);
        write_to_page(row, head_dim, block_size, offset, static_cast<C*>(layer->value_pages) + at);
    }
}

// Below this, some microseconds of one thread, waking other threads costs more than it saves.
constexpr int64_t PARALLEL_ELEMENTS = 1 << 17;

// Consecutive tasks that a thread takes at a time.
constexpr int64_t RUNS_PER_THREAD = 8;

template <class C>
void run(const TokendAttentionStep* step, const TokendAttentionSchedule* plan, const TokendAttentionLayer* layer) {
    const auto split_of = [&](const TokendTask& task) {
        return KVSplit(step, layer, plan->tiles + task.tile, task.split);
    };
    in_team(plan->num_elements > PARALLEL_ELEMENTS, [&] {
        static thread_local Scratch scratch;
#pragma omp for schedule(static)
        for (int64_t token = 0; token < step->num_tokens; token++) write_token<C>(step, layer, token, scratch);
        TokendRound done = {0, 0};
        for (int64_t number = 0; number < plan->num_rounds; number++) {
            const TokendRound round = plan->rounds[number];
            // A thread takes several consecutive tasks, to prefetch the beginning of the next, if
            // there are enough tasks for all threads to end at about the same time.
            const int64_t num_tasks = round.tasks_end - done.tasks_end;
            const int64_t grain = std::max<int64_t>(1, num_tasks / (RUNS_PER_THREAD * omp_get_num_threads()));
#pragma omp for schedule(dynamic, 1)
            for (int64_t run = done.tasks_end; run < round.tasks_end; run += grain) {
                const int64_t end = std::min<int64_t>(run + grain, round.tasks_end);
                for (int64_t index = run; index < end; index++) {
                    const TokendTask &task = plan->tasks[index], &next = plan->tasks[std::min(index + 1, end - 1)];
                    compute_task<C>(split_of(task), task.heads, split_of(next), plan, task.split, scratch);
                }
            }
            if (plan->num_partial_rows > 0) {
#pragma omp for schedule(static)
                for (int64_t index = done.tiles_end; index < round.tiles_end; index++) {
                    if (plan->tiles[index].num_splits == 1) continue;
                    const KVSplit split(step, layer, plan->tiles + index, 0);
                    float* sum = scratch.floats(2 * step->head_dim);
                    for (int64_t row = 0; row < split.rows; row++) merge_row(split, plan, row, sum);
                }
            }
            done = round;
        }
    });
}

}  // namespace
}  // namespace tokend

extern "C" int64_t tokend_partial_width(int64_t head_dim) { return tokend::partial_width(head_dim); }

extern "C" void tokend_attention_run(const TokendAttentionStep* step, const TokendAttentionSchedule* plan, const TokendAttentionLayer* layer) {
    switch (layer->cache_dtype) {
        case TOKEND_FLOAT32: return tokend::run<float>(step, plan, layer);
        case TOKEND_BFLOAT16: return tokend::run<tokend::bfloat16>(step, plan, layer);
        case TOKEND_FLOAT16: return tokend::run<tokend::float16>(step, plan, layer);
        case TOKEND_INT8: return tokend::run<int8_t>(step, plan, layer);
    }
}
