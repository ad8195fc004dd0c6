// Cuts the attention of a step into tasks for the threads.
//
// Neither the other sequences, nor the chunk of a prompt, nor the number of threads move a
// cut (attention_cut.h). Rounds, which bound the memory of partial results, only order the
// tiles.
#include <algorithm>
#include <tuple>

#include "attention.h"
#include "attention_cut.h"
#include "attention_kernels.h"

namespace {

int64_t cost(const TokendTile& tile, int64_t piece) {
    const int64_t from = (tile.kv_begin / tile.piece_len + piece) * tile.piece_len;
    const int64_t to = std::min<int64_t>(from + tile.piece_len, tile.kv_end);
    return (to - std::max<int64_t>(from, tile.kv_begin)) * tile.query_count;
}

void end_round(TokendPlan* plan) {
    if (plan->rounds != nullptr) plan->rounds[plan->num_rounds] = {int32_t(plan->num_tiles), int32_t(plan->num_tasks)};
    plan->num_rounds += 1;
}

}  // namespace

extern "C" void tokend_attention_plan(const TokendStep* step, TokendPlan* plan) {
    const int64_t group = step->num_heads / step->num_kv_heads;
    const int64_t tile_queries = std::max<int64_t>(1, tokend::tile_rows() / group);
    int64_t round_rows = 0;
    plan->num_tiles = plan->num_tasks = plan->num_rounds = plan->num_partial_rows = plan->num_elements = 0;
    for (int64_t seq = 0; seq < step->num_seqs; seq++) {
        const int64_t queries = step->query_start[seq + 1] - step->query_start[seq];
        const int64_t before = step->seq_lens[seq] - queries;
        // Tiles of about the same size: a small rest would be computed as a decode is.
        const int64_t num_tiles = (queries + tile_queries - 1) / tile_queries;
        for (int64_t number = 0; number < num_tiles; number++) {
            const int64_t begin = queries * number / num_tiles;
            const int64_t count = queries * (number + 1) / num_tiles - begin;
            const int64_t rows = count * group;
            const int64_t kv_end = before + begin + count;
            // What the first of the queries sees: the others see no earlier token.
            const int64_t kv_begin = std::max<int64_t>(0, before + begin + 1 - step->window);
            const int64_t tokens = kv_end - kv_begin;
            const int64_t piece_len = rows <= tokend::PIECE_ROWS ? tokend::PIECE : tokend::SPAN;
            const int64_t pieces = (kv_end - 1) / piece_len - kv_begin / piece_len + 1;
            const int64_t partial_rows = pieces > 1 ? pieces * rows : 0;
            plan->num_elements += tokens * rows * step->num_kv_heads * step->head_dim;
            for (int64_t head = 0; head < step->num_kv_heads; head++) {
                if (round_rows > 0 && round_rows + partial_rows > step->most_partial_rows) {
                    end_round(plan);
                    round_rows = 0;
                }
                if (plan->tiles != nullptr) {
                    plan->tiles[plan->num_tiles] = {
                        int32_t(seq),    int32_t(head),      int32_t(begin),
                        int32_t(count),  int32_t(kv_begin),  int32_t(kv_end),
                        int32_t(pieces), int32_t(piece_len), int32_t(round_rows)};
                    for (int64_t piece = 0; piece < pieces; piece++)
                        plan->tasks[plan->num_tasks + piece] = {int32_t(plan->num_tiles), int32_t(piece)};
                }
                plan->num_tiles += 1;
                plan->num_tasks += pieces;
                round_rows += partial_rows;
                plan->num_partial_rows = std::max(plan->num_partial_rows, round_rows);
            }
        }
    }
    end_round(plan);
    if (plan->tasks == nullptr) return;
    // The long ones first, so that no thread starts one while the others run dry; of the same length
    // all heads of the same tokens, which lie side by side in the pages.
    const auto order = [plan](const TokendTask& task) {
        const TokendTile& tile = plan->tiles[task.tile];
        return std::tuple(-cost(tile, task.piece), tile.seq, tile.query_begin, task.piece, tile.kv_head);
    };
    TokendTask* from = plan->tasks;
    for (const TokendRound* round = plan->rounds; round < plan->rounds + plan->num_rounds; round++) {
        TokendTask* to = plan->tasks + round->tasks_end;
        std::sort(from, to, [&](const TokendTask& a, const TokendTask& b) { return order(a) < order(b); });
        from = to;
    }
}
