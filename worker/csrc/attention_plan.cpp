// Cuts the attention of a step into tasks for the threads.
//
// A tile's result depends on its own sequence only: neither the other sequences
// nor the number of threads move a boundary between pieces. Rounds, which bound the memory
// of partial results, only order the tiles.
#include <algorithm>
#include <vector>

#include "attention.h"

namespace {

// Rows of a tile of a longer prompt: enough to reuse each K and V many times.
constexpr int64_t TILE_ROWS = 96;
// Up to this many rows a tile is bound by reading KV.
constexpr int64_t FEW_ROWS = 8;
// Tokens of a piece: short enough that two threads share one sequence evenly.
constexpr int64_t PIECE_FEW_ROWS = 256;
constexpr int64_t PIECE_MANY_ROWS = 1024;
constexpr int64_t PIECE_GRANULE = 64;

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t piece_length(int64_t tokens, int64_t rows) {
    const int64_t target = rows <= FEW_ROWS ? PIECE_FEW_ROWS : PIECE_MANY_ROWS;
    const int64_t even = divide_up(tokens, divide_up(tokens, target));
    return divide_up(even, PIECE_GRANULE) * PIECE_GRANULE;
}

int64_t cost(const TokendTile& tile, int64_t piece) {
    const int64_t begin = tile.kv_begin + piece * tile.piece_len;
    return std::min<int64_t>(tile.piece_len, tile.kv_end - begin) * tile.query_count;
}

void end_round(TokendPlan* plan) {
    if (plan->rounds != nullptr) plan->rounds[plan->num_rounds] = {int32_t(plan->num_tiles), int32_t(plan->num_tasks)};
    plan->num_rounds += 1;
}

}  // namespace

extern "C" void tokend_attention_plan(const TokendStep* step, TokendPlan* plan) {
    const int64_t group = step->num_heads / step->num_kv_heads;
    const int64_t tile_queries = std::max<int64_t>(1, TILE_ROWS / group);
    int64_t round_rows = 0;
    plan->num_tiles = plan->num_tasks = plan->num_rounds = plan->num_partial_rows = plan->num_elements = 0;
    for (int64_t seq = 0; seq < step->num_seqs; seq++) {
        const int64_t queries = step->query_start[seq + 1] - step->query_start[seq];
        const int64_t before = step->seq_lens[seq] - queries;
        for (int64_t begin = 0; begin < queries; begin += tile_queries) {
            const int64_t count = std::min(tile_queries, queries - begin);
            const int64_t rows = count * group;
            const int64_t kv_end = before + begin + count;
            // What the first of the queries sees: the others see no earlier token.
            const int64_t kv_begin = std::max<int64_t>(0, before + begin + 1 - step->window);
            const int64_t tokens = kv_end - kv_begin;
            const int64_t piece_len = piece_length(tokens, rows);
            const int64_t pieces = divide_up(tokens, piece_len);
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
    // The long ones first, so that no thread starts one while the others run dry.
    TokendTask* from = plan->tasks;
    for (const TokendRound* round = plan->rounds; round < plan->rounds + plan->num_rounds; round++) {
        TokendTask* to = plan->tasks + round->tasks_end;
        std::stable_sort(from, to, [plan](const TokendTask& a, const TokendTask& b) {
            return cost(plan->tiles[a.tile], a.piece) > cost(plan->tiles[b.tile], b.piece);
        });
        from = to;
    }
}
