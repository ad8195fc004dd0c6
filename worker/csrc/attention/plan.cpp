// Cuts the attention of a step into tasks for the threads.
//
// Cuts (drawn in attention.cpp) depend neither on the other sequences nor on the chunk of a prompt nor on the
// number of threads. Rounds, which bound the memory of partial results, only order the tiles.
#include <algorithm>
#include <tuple>

#include "attention/attention.h"
#include "attention/kv_split.h"

namespace {

int64_t cost(const TokendTile& tile, int64_t split) {
    const int64_t from = (tile.kv_begin / tile.split_len + split) * tile.split_len;
    const int64_t to = std::min<int64_t>(from + tile.split_len, tile.kv_end);
    return (to - std::max<int64_t>(from, tile.kv_begin)) * tile.query_count;
}

// From this many splits of few rows on, a task is all heads of a split; with fewer, threads would idle.
constexpr int64_t MANY_SPLITS = 8;
constexpr int64_t MOST_HEADS = 8;  // of a task: its data fits into the L2 cache

struct Cut {
    int64_t kv_begin, kv_end, split_len, num_splits;

    // Of `count` queries of a sequence from number `begin` on: the first sees the earliest token, the last one
    // the latest.
    Cut(const TokendAttentionStep* step, int64_t seq, int64_t begin, int64_t count, int64_t rows)
        : kv_begin(std::max<int64_t>(0, position(step, seq, begin) + 1 + step->ahead - step->window)),
          kv_end(std::min<int64_t>(step->seq_lens[seq], end_seen(step, seq, begin + count - 1))),
          split_len(rows <= tokend::SHORT_SPLIT_ROWS ? tokend::SHORT_SPLIT : tokend::LONG_SPLIT),
          num_splits((kv_end - 1) / split_len - kv_begin / split_len + 1) {}

  private:
    static int64_t position(const TokendAttentionStep* step, int64_t seq, int64_t query) {
        return step->seq_lens[seq] - (step->query_start[seq + 1] - step->query_start[seq]) + query;
    }
    static int64_t end_seen(const TokendAttentionStep* step, int64_t seq, int64_t query) {
        if (step->attend_end != nullptr) return step->attend_end[step->query_start[seq] + query];
        return position(step, seq, query) + 1 + step->ahead;
    }
};

// Whether the splits of decodes are enough for all threads.
bool has_many_splits(const TokendAttentionStep* step) {
    int64_t splits = 0;
    const int64_t group_size = step->num_heads / step->num_kv_heads;
    for (int64_t seq = 0; seq < step->num_seqs && splits < MANY_SPLITS; seq++) {
        const int64_t queries = step->query_start[seq + 1] - step->query_start[seq];
        if (queries * group_size <= tokend::SHORT_SPLIT_ROWS)
            splits += Cut(step, seq, 0, queries, queries * group_size).num_splits;
    }
    return splits >= MANY_SPLITS;
}

void end_round(TokendAttentionSchedule* plan) {
    if (plan->rounds != nullptr) plan->rounds[plan->num_rounds] = {int32_t(plan->num_tiles), int32_t(plan->num_tasks)};
    plan->num_rounds += 1;
}

}  // namespace

extern "C" void tokend_attention_plan(const TokendAttentionStep* step, TokendAttentionSchedule* plan) {
    const int64_t group_size = step->num_heads / step->num_kv_heads;
    const int64_t tile_queries = std::max<int64_t>(1, tokend::tile_rows() / group_size);
    const bool many_splits = has_many_splits(step);
    int64_t round_rows = 0;
    plan->num_tiles = plan->num_tasks = plan->num_rounds = plan->num_partial_rows = plan->num_elements = 0;
    for (int64_t seq = 0; seq < step->num_seqs; seq++) {
        const int64_t queries = step->query_start[seq + 1] - step->query_start[seq];
        // Tiles of about equal size: a small remainder would use the kernel of decodes.
        const int64_t num_tiles = (queries + tile_queries - 1) / tile_queries;
        for (int64_t number = 0; number < num_tiles; number++) {
            const int64_t begin = queries * number / num_tiles;
            const int64_t count = queries * (number + 1) / num_tiles - begin;
            const int64_t rows = count * group_size;
            const Cut cut(step, seq, begin, count, rows);
            const bool heads_together = many_splits && rows <= tokend::SHORT_SPLIT_ROWS;
            const int64_t partial_rows = cut.num_splits > 1 ? cut.num_splits * rows : 0;
            plan->num_elements += (cut.kv_end - cut.kv_begin) * rows * step->num_kv_heads * step->head_dim;
            int64_t together = 0;  // heads that the last tasks have so far
            for (int64_t head = 0; head < step->num_kv_heads; head++) {
                if (round_rows > 0 && round_rows + partial_rows > step->most_partial_rows) {
                    end_round(plan);
                    round_rows = 0;
                    together = 0;
                }
                together = heads_together && together < MOST_HEADS ? together + 1 : 1;
                if (together == 1) plan->num_tasks += cut.num_splits;
                if (plan->tiles != nullptr) {
                    plan->tiles[plan->num_tiles] = {
                        int32_t(seq),            int32_t(head),          int32_t(begin),
                        int32_t(count),          int32_t(cut.kv_begin),  int32_t(cut.kv_end),
                        int32_t(cut.num_splits), int32_t(cut.split_len), int32_t(round_rows)};
                    TokendTask* tasks = plan->tasks + plan->num_tasks - cut.num_splits;
                    for (int64_t split = 0; split < cut.num_splits; split++) {
                        const int64_t first = plan->num_tiles + 1 - together;
                        tasks[split] = {int32_t(first), int32_t(split), int32_t(together)};
                    }
                }
                plan->num_tiles += 1;
                round_rows += partial_rows;
                plan->num_partial_rows = std::max(plan->num_partial_rows, round_rows);
            }
        }
    }
    end_round(plan);
    if (plan->tasks == nullptr) return;
    // Long tasks first, so that no thread starts one at the end; among equal lengths, all heads of
    // the same tokens, which are adjacent in the pages.
    const auto order = [plan](const TokendTask& task) {
        const TokendTile& tile = plan->tiles[task.tile];
        return std::tuple(-cost(tile, task.split), tile.seq, tile.query_begin, task.split, tile.kv_head);
    };
    TokendTask* from = plan->tasks;
    for (const TokendRound* round = plan->rounds; round < plan->rounds + plan->num_rounds; round++) {
        TokendTask* to = plan->tasks + round->tasks_end;
        std::sort(from, to, [&](const TokendTask& a, const TokendTask& b) { return order(a) < order(b); });
        from = to;
    }
}
